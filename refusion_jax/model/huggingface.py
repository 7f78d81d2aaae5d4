"""Hugging Face directories of the Qwen3 family: their weights into ours, and ours into theirs.

A weight of theirs is [out, in], one tensor a layer; ours is [in, out] with the head axes apart, all layers stacked. One
table says which is which, and both directions follow from it.
"""

import functools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
from flax import nnx
from safetensors.numpy import save_file

from refusion_jax.cli.errors import UserError
from refusion_jax.cli.paths import is_remote
from refusion_jax.data.interface import Tokenizer
from refusion_jax.distributed.json_input import read_object
from refusion_jax.distributed.storage import check_file
from refusion_jax.model.shape import to_model_config
from refusion_jax.model.transformer import ModelConfig, Transformer

# Ours -> (theirs, how many leading axes of ours are the input; 0: the same array in both).
_LAYER = {
    "attention_norm": ("input_layernorm", 0),
    "q_proj": ("self_attn.q_proj", 1),
    "k_proj": ("self_attn.k_proj", 1),
    "v_proj": ("self_attn.v_proj", 1),
    "q_norm": ("self_attn.q_norm", 0),
    "k_norm": ("self_attn.k_norm", 0),
    "o_proj": ("self_attn.o_proj", 2),
    "mlp_norm": ("post_attention_layernorm", 0),
    "gate_proj": ("mlp.gate_proj", 1),
    "up_proj": ("mlp.up_proj", 1),
    "down_proj": ("mlp.down_proj", 1),
}
_TOP = {"embed_tokens": "model.embed_tokens", "final_norm": "model.norm", "lm_head": "lm_head"}
_INDEX = "model.safetensors.index.json"
_SECTION = "refusion_jax"  # of a config.json that we write: what transformers has no words for
_OURS = ("shifted", "block_size")  # of ModelConfig
SHARD_BYTES = 4 << 30  # of the shards we write
_DTYPES = ("F64", "F32", "F16", "BF16")  # safetensors' names of those that weights may have

# What a config.json may say beside the sizes; anything else would need another transformer.
_SUPPORTED = {
    "model_type": ("qwen3",),
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "use_sliding_window": (False,),
    "rope_scaling": (None,),
}


def is_huggingface(path: Path) -> bool:
    """Whether a directory is meant as a Hugging Face model; a run of ours has a config.json, too."""
    return (path / "config.json").exists() and not (path / "model.json").exists()


def read_model_config(path: Path, tokenizer: Tokenizer | None = None, mask_token_id: int | None = None) -> ModelConfig:
    """The shape that config.json describes.

    Args:
      path: the directory.
      tokenizer: of the model; rows of the embedding behind its ids are padding and never predicted. Where it has more
        ids than the embedding has rows, the result has rows for all of them (a multiple of 128, to split evenly).
      mask_token_id: by default config.json's, else the tokenizer's; -1 in the result where nobody has one.

    Raises:
      UserError: where the file is unreadable, lacks a size, or describes an architecture that is not Qwen3's.
    """
    file, given = path / "config.json", _read_config(path)
    rope = given.get("rope_parameters") or {}  # where transformers 5 keeps rope_theta
    if not isinstance(rope, dict):
        raise UserError(f"{file}: rope_parameters must be an object")
    if rope.get("rope_type", "default") != "default":
        given["rope_scaling"] = rope
    for key, supported in _SUPPORTED.items():
        if given.get(key, supported[0]) not in supported:
            raise UserError(
                f"{file}: {key}={json.dumps(given[key])[:60]} is not supported; "
                f"of Hugging Face models we read model_type=qwen3 with its defaults"
            )
    sizes = "vocab_size hidden_size num_hidden_layers num_attention_heads num_key_value_heads head_dim"
    try:
        shape = {key: given[key] for key in f"{sizes} intermediate_size rms_norm_eps".split()}
        theta = rope["rope_theta"] if "rope_theta" in rope else given["rope_theta"]
    except KeyError as error:
        raise UserError(f"{file}: {error.args[0]} is missing") from error
    if mask_token_id is None:
        mask_token_id = given.get("mask_token_id")
    if mask_token_id is None and tokenizer:
        mask_token_id = tokenizer.mask_id
    mask = -1 if mask_token_id is None else mask_token_id
    for name, value in {**shape, "mask_token_id": mask}.items():
        if type(value) not in ((int, float) if name == "rms_norm_eps" else (int,)):
            raise UserError(f"{file}: {name} must be a number")
    if tokenizer and tokenizer.size > shape["vocab_size"]:
        shape["vocab_size"] = -(-tokenizer.size // 128) * 128
    if not -1 <= mask < shape["vocab_size"]:
        raise UserError(f"mask_token_id={mask} is no row of the embedding; {path} has {shape['vocab_size']}")
    described = {
        **shape,
        "rope_theta": theta,
        "tie_word_embeddings": given.get("tie_word_embeddings", False),
        "max_position_embeddings": given.get("max_position_embeddings", 32768),
        "num_tokens": max(tokenizer.size, mask + 1) if tokenizer else shape["vocab_size"],
        "mask_token_id": mask,
    }
    ids = {name: _first(given.get(name)) for name in ("pad_token_id", "bos_token_id", "eos_token_id")}
    if ids["pad_token_id"] == ids["eos_token_id"]:
        ids["pad_token_id"] = -1  # no decoder writes padding, and each has to write EOS
    ours = {name: value for name, value in _of_ours(path).items() if name in _OURS}
    return to_model_config(file, described | ids | ours)


def read_mask_token_id(path: Path) -> int | None:
    """The mask token that config.json names, if it does.

    Raises:
      UserError: where the file cannot be read.
    """
    given = _read_config(path).get("mask_token_id")
    return given if type(given) is int else None


def read_objective(path: Path) -> str | None:
    """The system that trained a model which `save` wrote, where it is known.

    Raises:
      UserError: where the file cannot be read.
    """
    given = _of_ours(path).get("objective")
    return given if isinstance(given, str) else None


def _of_ours(path: Path) -> dict:
    """What `save` says of a model in words of ours."""
    given = _read_config(path).get(_SECTION, {})
    if not isinstance(given, dict):
        raise UserError(f"{path / 'config.json'}: {_SECTION} must be an object")
    return given


def _read_config(path: Path) -> dict:
    return read_object(path / "config.json")


def _first(token_id: int | list[int] | None) -> int:
    """-1 where there is none; the first of several."""
    return -1 if token_id in (None, []) else token_id[0] if isinstance(token_id, list) else token_id


def _files_of(index: Path) -> set[str]:
    """The files that an index names, which lie beside it."""
    places = read_object(index).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(name, str) for name in places.values()):
        raise UserError(f"{index} cannot be read: weight_map must be an object of file names")
    for name in places.values():
        if name in ("", ".", "..") or "\0" in name or "/" in name or "\\" in name or len(name) > 255:
            raise UserError(f"{index} cannot be read: {name[:60]!r} is no file of this directory")
    return set(places.values())


class Tensors:
    """The tensors of one or many safetensors files, read one at a time.

    Raises:
      UserError: where a file is missing or cut off, or lacks a tensor, or one has another shape or holds no floats; or
        for a directory in an object store, which safetensors does not read.
    """

    def __init__(self, path: Path):
        if is_remote(path):
            raise UserError(
                f"{path}: weights of Hugging Face are read from a local disk; put there what "
                f"`convert --format=orbax` makes of them"
            )
        self._path = path
        index = path / _INDEX
        if index.exists():
            files = _files_of(index)
        else:
            files = {"model.safetensors"}
        self._file_of = {}
        for name in sorted(files):
            try:
                check_file(path / name)
                with safetensors.safe_open(path / name, "numpy") as file:
                    self._file_of |= dict.fromkeys(file.keys(), name)
            except FileNotFoundError as error:
                raise UserError(f"{path / name} is missing") from error
            except safetensors.SafetensorError as error:
                raise UserError(f"{path / name} is damaged: {error}") from error

    def read(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        """One tensor, which must have this shape."""
        if name not in self._file_of:
            raise UserError(f"{self._path} holds no tensor {name}")
        # Opened anew each time: the pages of a mapping that is closed do not count as ours.
        with safetensors.safe_open(self._path / self._file_of[name], "numpy") as file:
            about = file.get_slice(name)
            found = tuple(about.get_shape())
            if about.get_dtype() not in _DTYPES:
                raise UserError(
                    f"{self.place_of(name)}: {name} has dtype {about.get_dtype()}; we read {', '.join(_DTYPES)}"
                )
            if found != shape:
                raise UserError(f"{self._path}: {name} has shape {found}, but config.json makes it {shape}")
            return file.get_tensor(name)

    def place_of(self, name: str) -> Path:
        """The file that holds a tensor."""
        return self._path / self._file_of[name]


def load_params(path: Path, target: dict[str, Any], progress: Callable[[], None] = lambda: None) -> dict[str, Any]:
    """Reads all weights, tensor by tensor, straight into (sharded) arrays.

    The host holds one tensor at a time beside the arrays themselves.

    Args:
      path: the Hugging Face directory.
      target: shapes, dtypes and shardings of our weights; rows that their embedding lacks become zeros.
      progress: called after each tensor.

    Raises:
      UserError: as `Tensors`, and where a weight is infinite or not a number, in the file or in the target's dtype.
    """
    tensors = Tensors(path)

    def read(name: str, shape: tuple[int, ...], target: jax.ShapeDtypeStruct, inputs: int = 0) -> jax.Array:
        tensor = tensors.read(name, _their_shape(shape, inputs))
        placed = _place(tensor.T.reshape(shape) if inputs else tensor, target)
        if not _is_finite(placed):
            raise UserError(f"{tensors.place_of(name)}: {name} holds values that are not finite as {target.dtype}")
        progress()
        return placed

    params = {name: None for name in target if name != "layers"}
    for name in params:
        rows = (_read_config(path)["vocab_size"],) if name != "final_norm" else ()
        shape = rows + target[name].shape[len(rows) :]
        params[name] = read(f"{_TOP[name]}.weight", shape, target[name])
    params["layers"] = {}
    for name, (theirs, inputs) in _LAYER.items():
        goal = target["layers"][name]
        layer = jax.ShapeDtypeStruct(
            goal.shape[1:], goal.dtype, sharding=_drop_first_axis(goal.sharding) if goal.sharding else None
        )
        stacked = jax.jit(functools.partial(jnp.zeros, goal.shape, goal.dtype), out_shardings=goal.sharding)()
        for index in range(goal.shape[0]):
            stacked = _put(stacked, read(f"model.layers.{index}.{theirs}.weight", layer.shape, layer, inputs), index)
        params["layers"][name] = stacked
    return params


def _their_shape(shape: tuple[int, ...], inputs: int) -> tuple[int, ...]:
    """Shape of the tensor of one layer that becomes one of ours: [out, in] from [*in, *out]."""
    return (int(np.prod(shape[inputs:])), int(np.prod(shape[:inputs]))) if inputs else shape


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
def _put(stacked: jax.Array, layer: jax.Array, index: int) -> jax.Array:
    return jax.lax.dynamic_update_index_in_dim(stacked, layer, index, axis=0)


def _drop_first_axis(sharding: jax.sharding.Sharding) -> jax.sharding.Sharding:
    """The sharding of one layer, of that of all layers stacked."""
    if not isinstance(sharding, jax.sharding.NamedSharding):
        return sharding
    return jax.sharding.NamedSharding(sharding.mesh, jax.sharding.PartitionSpec(*sharding.spec[1:]))


def count_tensors(config: ModelConfig) -> int:
    """How many tensors a directory holds."""
    return len(_LAYER) * config.num_hidden_layers + len(_TOP) - config.tie_word_embeddings


def save(model: Transformer, path: Path, objective: str | None = None) -> None:
    """Writes a directory that `transformers` loads as Qwen3: config.json, safetensors shards with their index.

    Args:
      model: in the dtype that shall be written.
      path: an empty directory.
      objective: the system that trained it, where it is known.
    """
    weight_map, shard, size, total = {}, {}, 0, 0
    names = []

    def flush():
        nonlocal shard, size
        names.append(f"part-{len(names)}.safetensors")
        save_file(shard, path / names[-1], metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(shard, names[-1]))
        shard, size = {}, 0

    for name, tensor in _their_tensors(nnx.to_pure_dict(nnx.state(model))):
        if shard and size + tensor.nbytes > SHARD_BYTES:
            flush()
        shard[name], size, total = tensor, size + tensor.nbytes, total + tensor.nbytes
    flush()
    final = {old: f"model-{i:05}-of-{len(names):05}.safetensors" for i, old in enumerate(names, 1)}
    for old, new in final.items():
        (path / old).rename(path / new)
    index = {"metadata": {"total_size": total}, "weight_map": {k: final[v] for k, v in sorted(weight_map.items())}}
    (path / _INDEX).write_text(json.dumps(index, indent=2) + "\n")
    ours = {name: getattr(model.config, name) for name in _OURS} | ({"objective": objective} if objective else {})
    (path / "config.json").write_text(json.dumps(_their_config(model) | {_SECTION: ours}, indent=2) + "\n")


def _their_tensors(params: dict) -> Iterator[tuple[str, np.ndarray]]:
    """Every tensor by its Hugging Face name, one at a time on the host."""
    for name, theirs in _TOP.items():
        if name in params:
            yield f"{theirs}.weight", np.ascontiguousarray(jax.device_get(params[name]))
    for name, (theirs, inputs) in _LAYER.items():
        for index in range(len(params["layers"][name])):
            tensor = jax.device_get(params["layers"][name][index])
            if inputs:
                tensor = tensor.reshape(*_their_shape(tensor.shape, inputs)[::-1]).T
            yield f"model.layers.{index}.{theirs}.weight", np.ascontiguousarray(tensor)


def _their_config(model: Transformer) -> dict:
    c = model.config
    token_ids = {f"{kind}_token_id": getattr(c, f"{kind}_token_id") for kind in ("pad", "bos", "eos", "mask")}
    copied = "vocab_size hidden_size num_hidden_layers num_attention_heads num_key_value_heads head_dim"
    copied += " intermediate_size rope_theta rms_norm_eps tie_word_embeddings max_position_embeddings"
    return {
        "architectures": ["Qwen3ForCausalLM"],
        **{key: supported[0] for key, supported in _SUPPORTED.items()},
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "use_cache": True,
        "torch_dtype": str(jax.tree.leaves(nnx.state(model))[0].dtype),
        **{key: getattr(c, key) for key in copied.split()},
        **{key: value for key, value in token_ids.items() if value >= 0},
    }
