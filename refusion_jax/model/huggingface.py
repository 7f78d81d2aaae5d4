"""Hugging Face directories of the families in families.py: their weights into ours, and ours into theirs."""

import functools
import json
import math
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pydantic
from etils import epath
from flax import nnx
from safetensors.numpy import save_file

from refusion_jax.cli.errors import UserError
from refusion_jax.cli.progress import track
from refusion_jax.data.interface import Tokenizer
from refusion_jax.distributed.json_files import read_json, to_type
from refusion_jax.distributed.storage import replacing, write_file
from refusion_jax.model.families import FAMILIES, OPTIONAL, Release
from refusion_jax.model.shape import ModelConfig, to_model_config
from refusion_jax.model.tensor_files import INDEX, Tensors
from refusion_jax.model.tensor_layout import Part, layout, tensor_names
from refusion_jax.model.transformer import Transformer

_SECTION = "refusion_jax"  # of a config.json that we write: what transformers has no words for
_OURS = ("shifted", "block_size")  # of ModelConfig
_COPIED = (  # of config.json into ModelConfig and back
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("intermediate_size", "rms_norm_eps", "tie_word_embeddings", "max_position_embeddings"),
)
_FULL = "full_attention"
_LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")  # of ModelConfig
_IGNORED = (  # keys of config.json that change nothing, in what authors released
    *("_name_or_path", "architectures", "auto_map", "attention_dropout", "initializer_range", "torch_dtype", "dtype"),
    *("transformers_version", "use_cache", "max_window_layers", "sliding_window", "layer_types"),
)
SHARD_BYTES = 4 << 30  # of the shards we write

Releases = Mapping[str, Sequence[Release]]  # by the name of the system
NONE: Releases = types.MappingProxyType({})


class _Ours(pydantic.BaseModel):
    """What `save` says of a model in words of ours."""

    objective: str | None = None
    shifted: bool = False
    block_size: int = 0


class Config(pydantic.BaseModel):
    """What we read of a config.json; defaults are those of transformers."""

    model_config = pydantic.ConfigDict(strict=True)

    model_type: str
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: pydantic.PositiveInt
    num_key_value_heads: int | None = None  # as many as query heads
    head_dim: int | None = None  # all heads together are as wide as the model
    intermediate_size: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None  # where transformers 5 keeps both
    tie_word_embeddings: bool = False
    max_position_embeddings: int = 32768
    query_pre_attn_scalar: int = 0
    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    norm_topk_prob: bool = True
    router_aux_loss_coef: float = 0.001
    first_k_dense_replace: int = 0
    num_shared_experts: int = 0
    n_group: int = 1
    topk_group: int = 1
    routed_scaling_factor: float = 1.0
    partial_rotary_factor: float = 1.0
    rope_local_base_freq: float | None = None
    sliding_window: int | None = None
    sliding_window_pattern: int | None = None
    layer_types: list[str] | None = None
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    mask_token_id: int | None = None
    refusion_jax: _Ours = _Ours()


def is_huggingface(path: epath.Path) -> bool:
    """Whether a directory is meant as a Hugging Face model; a run of ours has a config.json, too."""
    return (path / "config.json").exists() and not (path / "model.json").exists()


def read_model_config(
    path: epath.Path, tokenizer: Tokenizer | None = None, mask_token_id: int | None = None, releases: Releases = NONE
) -> ModelConfig:
    """The shape that config.json describes.

    Args:
      path: the directory.
      tokenizer: of the model; rows of the embedding after its ids are padding and never predicted. Where it has more
        ids than the embedding has rows, the result has rows for all of them (a multiple of 128, to split evenly).
      mask_token_id: by default config.json's, else the tokenizer's; -1 in the result where nobody has one.
      releases: as for `read_config`.

    Raises:
      UserError: as `read_config`.
    """
    file, given = path / "config.json", read_config(path, releases)
    theta, scaling, local = _rope(file, given)
    shape = {name: getattr(given, name) for name in (*_COPIED, *OPTIONAL)}
    if local:  # attention to all of so many tokens is attention in a window
        shape["max_position_embeddings"] = min(given.sliding_window or 2**28, given.max_position_embeddings)
    shape["num_key_value_heads"] = given.num_key_value_heads or given.num_attention_heads
    shape["head_dim"] = given.head_dim or given.hidden_size // given.num_attention_heads
    if mask_token_id is None:
        mask_token_id = given.mask_token_id
    if mask_token_id is None and tokenizer:
        mask_token_id = tokenizer.mask_id
    mask = -1 if mask_token_id is None else mask_token_id
    if tokenizer and tokenizer.size > given.vocab_size:
        shape["vocab_size"] = -(-tokenizer.size // 128) * 128
    if not -1 <= mask < shape["vocab_size"]:
        raise UserError(f"mask_token_id={mask} is no row of the embedding; {path} has {shape['vocab_size']}")
    ids = {name: _first(getattr(given, name)) for name in ("pad_token_id", "bos_token_id", "eos_token_id")}
    if ids["pad_token_id"] == ids["eos_token_id"]:
        ids["pad_token_id"] = -1  # no decoder writes padding, and each has to write EOS
    described = {
        "family": given.model_type,
        "rope_theta": theta,
        "rope_scaling": scaling,
        "local_rope": local,
        "query_pre_attn_scalar": given.query_pre_attn_scalar,
        "num_tokens": max(tokenizer.size, mask + 1) if tokenizer else shape["vocab_size"],
        "mask_token_id": mask,
    }
    ours = {name: getattr(given.refusion_jax, name) for name in _OURS}
    return to_model_config(file, shape | ids | described | ours)


def read_config(path: epath.Path, releases: Releases = NONE) -> Config:
    """config.json in the terms of the family whose layers the model has.

    Args:
      path: the directory.
      releases: what authors released, by the name of the system.

    Raises:
      UserError: where it cannot be read, or describes something else than a family or release that we read.
    """
    return _read_config(path, releases)[0]


def _read_config(path: epath.Path, releases: Releases) -> tuple[Config, Mapping[str, str]]:
    """(config.json, the names of tensors that the release has of its own)."""
    file = path / "config.json"
    given = read_json(file)
    model_type = str(given.get("model_type"))
    released = {} if _SECTION in given else releases  # what we wrote is a model of its family
    found = [(system, one) for system, some in released.items() for one in some if one.model_type == model_type]
    found.sort(key=lambda item: any(given.get(key) != value for key, value in item[1].fixed.items()))
    system, release = found[0] if found else (None, Release(model_type, model_type))
    family = FAMILIES.get(release.family)
    fixed = dict(family.activation | family.fixed if family else {"model_type": ""}) | release.fixed
    fixed["quantization_config"] = None
    for key, value in fixed.items():
        if family is None or given.get(key, value) != value:
            raise UserError(
                f"{file}: {key}={json.dumps(given.get(key))[:60]} is not supported; of Hugging Face models "
                f"we read those of model_type {', '.join([*FAMILIES, *_model_types(releases)])} with that "
                f"family's defaults"
            )
    known = {*Config.model_fields, *_OURS, *fixed, *release.keys, *release.ignored, *_IGNORED}
    known -= set(OPTIONAL) - family.defaults.keys()
    if system and (unknown := sorted(given.keys() - known)):
        raise UserError(f"{file}: {unknown[0]}={json.dumps(given[unknown[0]])[:60]} is not understood")
    renamed = {ours: given[key] for key, ours in {**family.keys, **release.keys}.items() if key in given}
    given = family.defaults | release.defaults | given | renamed
    if system:
        ours = {key: given[key] for key in _OURS if key in given}
        given |= {"model_type": release.family, _SECTION: ours | {"objective": system}}
    given = {key: value for key, value in given.items() if key in Config.model_fields}
    return to_type(given, Config, f"{file} cannot be read"), release.names


def _model_types(releases: Releases) -> list[str]:
    return sorted({one.model_type for some in releases.values() for one in some})


def _rope(file: epath.Path, given: Config) -> tuple[float, tuple[float, ...], tuple[float, ...]]:
    """(rope_theta, rope_scaling, local_rope) of a ModelConfig."""
    new = given.rope_parameters or {}
    local = new.get("sliding_attention", {}).get("rope_theta", given.rope_local_base_freq)
    new = new.get("full_attention", new)
    scaling = given.rope_scaling or new
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    names = {"default": (), "linear": _LLAMA3[:1], "llama3": _LLAMA3}.get(kind)
    if names is None or not all(name in scaling for name in names):
        raise UserError(
            f"{file}: rope_scaling={json.dumps(scaling)[:90]} is not supported; we read linear and that of Llama 3"
        )
    every = given.sliding_window_pattern
    if local and given.layer_types:
        every = [*given.layer_types, _FULL].index(_FULL) + 1
        if given.layer_types != _layer_types(len(given.layer_types), every):
            raise UserError(f"{file}: layer_types={json.dumps(given.layer_types)[:90]} do not alternate evenly")
    theta = new.get("rope_theta", given.rope_theta)
    return theta, tuple(scaling[name] for name in names), (local, every) if local else ()


def _layer_types(layers: int, every: int) -> list[str]:
    return [_FULL if layer % every == 0 else "sliding_attention" for layer in range(1, layers + 1)]


def _first(token_id: int | list[int] | None) -> int:
    """-1 where there is none; the first of several."""
    return -1 if token_id in (None, []) else token_id[0] if isinstance(token_id, list) else token_id


def load_params(
    path: epath.Path,
    target: dict[str, Any],
    progress: Callable[[], None] = lambda: None,
    releases: Releases = NONE,
) -> dict[str, Any]:
    """Reads all weights, tensor by tensor, straight into (sharded) arrays.

    The host holds one tensor at a time in addition to the arrays themselves.

    Args:
      path: the Hugging Face directory.
      target: shapes, dtypes and shardings of our weights; rows that their embedding lacks become zeros.
      progress: called after each part of a weight.
      releases: as for `read_config`.

    Raises:
      UserError: as `Tensors`; where a tensor would be left over; and where a weight is infinite or not a number, in the
        file or in the target's dtype.
    """
    tensors, (config, renamed) = Tensors(path), _read_config(path, releases)
    weights = dict(layout(target, config.model_type, renamed, config.vocab_size))
    _refuse_others(tensors, config, renamed, {part.tensor for parts in weights.values() for part in parts})

    def read(part: Part, target: jax.ShapeDtypeStruct) -> jax.Array:
        placed = _place(part.ours(tensors.read(part.tensor, part.whole)), target)
        if not _is_finite(placed):
            where = tensors.place_of(part.tensor)
            raise UserError(f"{where}: {part.tensor} holds values that are not finite as {target.dtype}")
        progress()
        return placed

    params: dict[str, Any] = {}
    for (*stack, name), parts in weights.items():
        goals, own = (target[stack[0]], params.setdefault(stack[0], {})) if stack else (target, params)
        own[name] = _stacked(parts, goals[name], read) if stack else read(parts[0], goals[name])
    return params


def _stacked(parts: list[Part], goal: jax.ShapeDtypeStruct, read: Callable) -> jax.Array:
    """A weight of all layers, filled part by part."""
    axes = len(parts[0].index)
    place = _drop_first_axes(goal.sharding, axes) if goal.sharding else None
    part_goal = jax.ShapeDtypeStruct(goal.shape[axes:], goal.dtype, sharding=place)
    stacked = jax.jit(functools.partial(jnp.zeros, goal.shape, goal.dtype), out_shardings=goal.sharding)()
    for part in parts:
        stacked = _put(stacked, read(part, part_goal), part.index)
    return stacked


def _refuse_others(tensors: Tensors, config: Config, renamed: Mapping[str, str], known: set[str]) -> None:
    """Refuses tensors that would be left over: without them it would be another model.

    Raises:
      UserError: naming the file and the tensor.
    """
    names = tensor_names(config.model_type, renamed)
    for name in sorted(tensors.names - known):
        if name == names["lm_head"]:  # of tied weights, which some save twice
            shape = (config.vocab_size, config.hidden_size)
            if np.array_equal(tensors.read(name, shape), tensors.read(names["embed_tokens"], shape)):
                continue
        if not name.endswith(".rotary_emb.inv_freq"):  # which follows from rope_theta
            raise UserError(f"{tensors.place_of(name)}: {name} has no place in the model that config.json describes")


def _place(tensor: np.ndarray, target: jax.ShapeDtypeStruct) -> jax.Array:
    """On the devices, in the target's dtype; rows that are missing at the end become zeros."""
    if tensor.shape != target.shape:
        tensor = np.pad(tensor, ((0, target.shape[0] - tensor.shape[0]), (0, 0)))
    placed = jax.device_put(tensor, target.sharding).astype(target.dtype)
    return placed.block_until_ready()  # or the next tensor would be read while this one is still held


@jax.jit
def _is_finite(tensor: jax.Array) -> jax.Array:
    return jnp.isfinite(jnp.max(jnp.abs(tensor)))  # all(isfinite) holds a third of the tensor more on a CPU


@functools.partial(jax.jit, donate_argnums=0)
def _put(stacked: jax.Array, layer: jax.Array, index: tuple[int, ...]) -> jax.Array:
    layer = layer.reshape((1,) * len(index) + layer.shape)
    return jax.lax.dynamic_update_slice(stacked, layer, (*index, *(0,) * (layer.ndim - len(index))))


def _drop_first_axes(sharding: jax.sharding.Sharding, axes: int) -> jax.sharding.Sharding:
    """The sharding of one layer or expert, of that of all of them stacked."""
    if not isinstance(sharding, jax.sharding.NamedSharding):
        return sharding
    return jax.sharding.NamedSharding(sharding.mesh, jax.sharding.PartitionSpec(*sharding.spec[axes:]))


def count_parts(target: dict[str, Any], config: ModelConfig) -> int:
    """How often `load_params` calls `progress` for a target."""
    return sum(len(parts) for _, parts in layout(target, config.family, {}, config.vocab_size))


def read_dtype(path: epath.Path) -> str:
    """The dtype in which no weight of a directory is rounded: "bfloat16", or "float32" for any other.

    Raises:
      UserError: as `Tensors`.
    """
    return "bfloat16" if Tensors(path).dtype == jnp.bfloat16 else "float32"


def save(model: Transformer, path: epath.PathLike, objective: str | None = None) -> None:
    """Writes a directory that `transformers` loads: safetensors shards, their index, and last config.json.

    Args:
      model: in the dtype that shall be written.
      path: an empty directory, or one that is made.
      objective: the system that trained it, where it is known.
    """
    path = epath.Path(path)
    tensors = _their_tensors(nnx.to_pure_dict(nnx.state(model)), model.config)
    shards: list[list[str]] = [[]]
    left = SHARD_BYTES
    for name, (size, _) in tensors.items():
        if shards[-1] and size > left:
            shards.append([])
            left = SHARD_BYTES
        shards[-1].append(name)
        left -= size
    weight_map = {}
    for number, names in enumerate(track(shards, "writing"), 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        with replacing(path / file) as temporary:
            temporary.touch()
            mode = temporary.stat().st_mode  # by the umask; safetensors would make it the user's alone
            save_file({name: tensors[name][1]() for name in names}, temporary, metadata={"format": "pt"})
            temporary.chmod(mode)
        weight_map |= dict.fromkeys(names, file)
    total = sum(size for size, _ in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    write_file(path / INDEX, json.dumps(index, indent=2) + "\n")
    ours = {name: getattr(model.config, name) for name in _OURS} | ({"objective": objective} if objective else {})
    write_file(path / "config.json", json.dumps(_their_config(model) | {_SECTION: ours}, indent=2) + "\n")


def _their_tensors(params: dict[str, Any], config: ModelConfig) -> dict[str, tuple[int, Callable[[], np.ndarray]]]:
    """Every tensor by its Hugging Face name: (bytes, what brings it to the host)."""
    found: dict[str, list[tuple[Part, jax.Array]]] = {}
    for (*stack, name), parts in layout(params, config.family, {}, config.vocab_size):
        weight = (params[stack[0]] if stack else params)[name]
        for part in parts:
            found.setdefault(part.tensor, []).append((part, weight))
    return {
        name: (math.prod(parts[0][0].whole) * parts[0][1].dtype.itemsize, functools.partial(_on_host, parts))
        for name, parts in found.items()
    }


def _on_host(parts: list[tuple[Part, jax.Array]]) -> np.ndarray:
    """The tensor that some parts of our weights are together."""
    parts = sorted(parts, key=lambda item: item[0].rows.start)
    rows = [part.theirs(jax.device_get(weight[part.index])) for part, weight in parts]
    return np.concatenate(rows) if len(rows) > 1 else rows[0]


def _their_config(model: Transformer) -> dict[str, Any]:
    c = model.config
    family = FAMILIES[c.family]
    token_ids = {name: getattr(c, name) for name in ("pad_token_id", "bos_token_id", "eos_token_id", "mask_token_id")}
    kind = {1: "linear", 4: "llama3"}.get(len(c.rope_scaling))
    scaling = {"rope_type": kind, **dict(zip(_LLAMA3, c.rope_scaling, strict=False))} if kind else None
    local = {}
    if "rope_local_base_freq" in family.defaults:
        theta, every = c.local_rope or (c.rope_theta, 1)
        local = {
            "rope_local_base_freq": theta,
            "layer_types": _layer_types(c.num_hidden_layers, int(every)),
            "sliding_window": c.max_position_embeddings,
            "query_pre_attn_scalar": c.query_pre_attn_scalar or c.head_dim,
        }
    return {
        "architectures": [family.architecture],
        "model_type": c.family,
        **family.activation,
        **family.fixed,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "use_cache": True,
        "torch_dtype": str(jax.tree.leaves(nnx.state(model))[0].dtype),
        **{key: getattr(c, key) for key in (*_COPIED, *(key for key in OPTIONAL if key in family.defaults))},
        "rope_theta": c.rope_theta,
        "rope_scaling": scaling,
        **local,
        **{name: None if token < 0 else token for name, token in token_ids.items()},  # some families have defaults
    }
