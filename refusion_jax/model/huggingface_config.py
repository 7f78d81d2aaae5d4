"""Converts config.json of the Hugging Face families in families.py to our ModelConfig, and ours to config.json."""

import dataclasses
import json
import types
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import pydantic
from etils import epath

from refusion_jax.cli.errors import UserError
from refusion_jax.data.fast_tokenizer import read_ends
from refusion_jax.data.interface import Tokenizer
from refusion_jax.distributed.json_files import read_json, to_type
from refusion_jax.model.families import FAMILIES, Family, Release
from refusion_jax.model.peft import is_peft
from refusion_jax.model.shape import OPTIONAL, ModelConfig, RareFields, to_model_config

_SECTION = "refusion_jax"  # of a config.json that we write: what transformers has no keys for
_OURS = ("shifted", "block_size")  # of ModelConfig
_ADDED = 1024  # by how many tokens a tokenizer may exceed the model's rows
_FULL, _LOCAL = "full_attention", "sliding_attention"
_LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")  # of ModelConfig
_ROPES = {"default": (), "linear": _LLAMA3[:1], "llama3": _LLAMA3}  # rope_type: its parameters
# Keys of families that have layers of two kinds; in other families they would describe layers that we do not compute.
_OF_KINDS = (
    *("query_pre_attn_scalar", "rope_local_base_freq", "sliding_window_pattern"),
    *("no_rope_layers", "no_rope_layer_interval"),
)
_IGNORED = (  # keys of config.json without effect, in released models
    *("_name_or_path", "architectures", "auto_map", "attention_dropout", "initializer_range", "torch_dtype", "dtype"),
    *("attn_implementation", "transformers_version", "use_cache", "max_window_layers"),
)

Releases = Mapping[str, Sequence[Release]]  # by the name of the system
NONE: Releases = types.MappingProxyType({})


@dataclasses.dataclass(frozen=True)
class _Ours:
    """What `save` adds to a config.json under our own names."""

    objective: str | None = None
    shifted: bool = False
    block_size: int = 0
    num_tokens: int = 0  # 0: not said


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(RareFields):
    """What we read of a config.json; defaults are those of transformers."""

    model_type: str
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: pydantic.PositiveInt
    num_key_value_heads: pydantic.PositiveInt | None = None  # as many as query heads
    head_dim: pydantic.PositiveInt | None = None  # all heads together are as wide as the model
    intermediate_size: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None  # where transformers 5 keeps both
    tie_word_embeddings: bool = False
    max_position_embeddings: int = 32768
    query_pre_attn_scalar: pydantic.PositiveInt | None = None
    no_rope_layers: list[int] | None = None  # 0: a layer without RoPE
    rotary_dim: int | None = None  # another form of partial_rotary_factor
    rope_local_base_freq: float | None = None
    sliding_window: pydantic.PositiveInt | None = None
    sliding_window_pattern: pydantic.PositiveInt | None = None
    layer_types: list[str] | None = None
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    mask_token_id: int | None = None
    refusion_jax: _Ours = _Ours()
    names: Mapping[str, str] = dataclasses.field(default_factory=dict)  # of tensors that a release names differently


_FIELDS = frozenset(field.name for field in dataclasses.fields(Config)) - {"names"}  # not a key of any file
_SHARED = [field.name for field in dataclasses.fields(ModelConfig) if field.name in _FIELDS]


def is_huggingface(path: epath.Path) -> bool:
    """Whether a directory is a Hugging Face model, and not a run of ours or adapters, which have a config.json, too."""
    return (path / "config.json").exists() and not (path / "model.json").exists() and not is_peft(path)


def read_model_config(
    path: epath.Path, tokenizer: Tokenizer | None = None, mask_token_id: int | None = None, releases: Releases = NONE
) -> ModelConfig:
    """The shape that config.json describes.

    Rows of the embedding after the ids of the tokenizer are padding and never predicted. If it has more ids than the
    embedding has rows, the result has rows for all of them (a multiple of 128, to split evenly). The mask token is by
    default config.json's, else the tokenizer's; -1 in the result if neither has one.
    """
    file, given = path / "config.json", read_config(path, releases)
    theta, scaling, local = _rope(file, given)
    shape = {name: getattr(given, name) for name in _SHARED}
    if local:  # up to this length, full attention is the same as attention in a window
        if not given.sliding_window:
            raise UserError(f"{file}: sliding_window, the reach of local layers, is missing")
        shape["max_position_embeddings"] = min(given.sliding_window, given.max_position_embeddings)
    if given.no_rope_layers is not None:
        shape["no_rope_layer_interval"] = _interval(file, given, "no_rope_layers", 0, 1)
    shape["num_key_value_heads"] = given.num_key_value_heads or given.num_attention_heads
    shape["head_dim"] = given.head_dim or given.hidden_size // given.num_attention_heads
    masks = (mask_token_id, given.mask_token_id, tokenizer.mask_id if tokenizer else None, -1)
    mask = next(token for token in masks if token is not None)
    if tokenizer and tokenizer.size > given.vocab_size:
        if tokenizer.size > given.vocab_size + _ADDED:
            raise UserError(f"{path}: a tokenizer of {tokenizer.size} ids is not that of {given.vocab_size} rows")
        shape["vocab_size"] = -(-tokenizer.size // 128) * 128
    if not -1 <= mask < shape["vocab_size"]:
        raise UserError(f"mask_token_id={mask} is not a row of the embedding; {path} has {shape['vocab_size']}")
    end = given.eos_token_id
    if isinstance(end, list):
        end = tokenizer.eos_id if tokenizer and tokenizer.eos_id in end else next(iter(end), None)
    ids = {"pad_token_id": given.pad_token_id, "bos_token_id": given.bos_token_id, "eos_token_id": end}
    ids = {name: -1 if token is None else token for name, token in ids.items()}
    if ids["pad_token_id"] == ids["eos_token_id"]:
        ids["pad_token_id"] = -1  # decoders never write padding, but must write EOS
    ours = given.refusion_jax
    described = {
        "family": given.model_type,
        "rope_theta": theta,
        "rope_scaling": scaling,
        "local_rope": local,
        "query_pre_attn_scalar": given.query_pre_attn_scalar or 0,
        "num_tokens": max(tokenizer.size if tokenizer else ours.num_tokens or shape["vocab_size"], mask + 1),
        "mask_token_id": mask,
    }
    config = to_model_config(file, shape | ids | described | {name: getattr(ours, name) for name in _OURS})
    if given.rotary_dim not in (None, rotated := int(config.head_dim * config.partial_rotary_factor)):
        raise UserError(f"{file}: rotary_dim={given.rotary_dim}, but partial_rotary_factor makes it {rotated}")
    return config


def read_config(path: epath.Path, releases: Releases = NONE) -> Config:
    """config.json, with a release's keys renamed to its family's; `releases` are those of all systems.

    UserError if it cannot be read, or describes anything but a family or release that we read.
    """
    file = path / "config.json"
    given = read_json(file)
    system, release = _release_of(given, releases)
    if release.family not in FAMILIES:
        released = sorted(one.model_type for some in releases.values() for one in some)
        known = ", ".join(dict.fromkeys([*FAMILIES, *released]))
        why = f"of Hugging Face models we read those of model_type {known}"
        _refuse(file, "model_type", given.get("model_type"), why)
    family = FAMILIES[release.family]
    _check_keys(file, given, family, release, is_released=system is not None)
    renamed = {ours: given[key] for key, ours in {**family.keys, **release.keys}.items() if key in given}
    given = {key: value for key, value in given.items() if value is not None or key not in release.defaults}
    given = dict(family.defaults) | release.defaults | given | renamed
    if system:
        ours = {key: given[key] for key in _OURS if key in given}
        given |= {"model_type": release.family, _SECTION: ours | {"objective": system}}
    elif (ends := read_ends(path)) is not None:
        given["eos_token_id"] = ends
    given = {key: value for key, value in given.items() if key in _FIELDS}
    return dataclasses.replace(to_type(given, Config, f"{file} cannot be read"), names=release.names)


def _release_of(given: dict[str, Any], releases: Releases) -> tuple[str | None, Release]:
    """(system, release) that a config.json describes, the one with its fixed keys first; (None, plain) if none does.

    A release under the model_type of a family is only described by its fixed keys.
    """
    model_type = str(given.get("model_type"))
    released = {} if _SECTION in given else releases  # what we wrote follows its family
    found = [(system, one) for system, some in released.items() for one in some if one.model_type == model_type]
    if not found or model_type in FAMILIES:
        found.append((None, Release(model_type, model_type)))
    return min(found, key=lambda item: any(given.get(key) != value for key, value in item[1].fixed.items()))


def _check_keys(file: epath.Path, given: dict[str, Any], family: Family, release: Release, is_released: bool) -> None:
    """Refuses keys whose values we do not compute; of a release, also keys that we do not know."""
    fixed = {**family.activation, **family.fixed, **release.fixed, "quantization_config": None, "is_causal": True}
    fixed |= {key: None for key in _OF_KINDS if key not in family.defaults}
    classes = str(given.get("architectures") or [family.architecture]).replace("LLaMA", "Llama")  # once spelled so
    if classes != str([family.architecture]) and not is_released:  # others compute other things under one model_type
        fixed = {"architectures": [family.architecture], **fixed}
    for key, value in fixed.items():
        if (said := given.get(key, family.defaults.get(key, value))) != value:
            _refuse(file, key, said, f"of model_type={given['model_type']} we read {json.dumps(value)}")
    known = {*_FIELDS, *_OURS, *fixed, *release.keys, *release.ignored, *_IGNORED}
    known -= set(OPTIONAL) - family.defaults.keys()
    if is_released and (unknown := sorted(given.keys() - known)):
        raise UserError(f"{file}: {unknown[0]}={json.dumps(given[unknown[0]])[:60]} is not understood")


def _refuse(file: epath.Path, key: str, value: Any, why: str) -> NoReturn:
    raise UserError(f"{file}: {key}={json.dumps(value)[:90]} is not supported; {why}")


def _rope(file: epath.Path, given: Config) -> tuple[float, tuple[float, ...], tuple[float, ...]]:
    """(rope_theta, rope_scaling, local_rope) of a ModelConfig."""
    old, new, local = given.rope_scaling or {}, given.rope_parameters or {}, given.rope_local_base_freq
    is_local = "rope_local_base_freq" in FAMILIES[given.model_type].defaults
    every = given.sliding_window_pattern
    if given.layer_types is not None:
        every = _interval(file, given, "layer_types", _FULL, _LOCAL if is_local else _FULL)
    if is_local:
        if new and new.keys() != {_FULL, _LOCAL}:
            raise UserError(f"{file}: rope_parameters must be those of {_FULL} and of {_LOCAL}")
        local, scaling = _one_rope(file, given, new.get(_LOCAL, {}), local)
        if scaling:
            raise UserError(f"{file}: rope_parameters scale those of {_LOCAL}, which is not supported")
        new = new.get(_FULL, {})
    rope, other = (_one_rope(file, given, said, given.rope_theta) for said in (old or new, new or old))
    if rope != other:
        raise UserError(f"{file}: rope_scaling and rope_parameters say different things; leave out one of them")
    return *rope, (local, every) if is_local else ()


def _one_rope(file: epath.Path, given: Config, scaling: Any, theta: float) -> tuple[float, tuple[float, ...]]:
    """(rope_theta, rope_scaling) of some layers, from what config.json says about them; `theta` is the default.

    UserError if it says anything that we do not compute.
    """
    said = dict(scaling) if isinstance(scaling, dict) else {"": scaling}
    kinds = {str(said.pop(key)) for key in ("rope_type", "type") if key in said} or {"default"}
    names = _ROPES.get(*kinds) if len(kinds) == 1 else None  # both keys may be there, and say the same
    theta, part = said.pop("rope_theta", theta), said.pop("partial_rotary_factor", given.partial_rotary_factor)
    if names is None or said.keys() != {*names} or part != given.partial_rotary_factor:
        raise UserError(
            f"{file}: rope_scaling={json.dumps(scaling)[:90]} is not supported (rope_type={', '.join(sorted(kinds))}); "
            f"we read linear and that of Llama 3"
        )
    return theta, tuple(said[name] for name in names)


def _interval(file: epath.Path, given: Config, key: str, nth: Any, other: Any) -> int:
    """n if every n-th layer is `nth` by the list under a key, and all others are `other`.

    Entries beyond the number of layers are ignored.
    """
    kinds, layers = getattr(given, key), given.num_hidden_layers
    every = [*kinds, nth].index(nth) + 1
    if len(kinds) < layers or kinds[:layers] != _kinds(layers, every, nth, other):
        why = f"we read num_hidden_layers={layers} times {other}"
        _refuse(file, key, kinds, why if nth == other else f"{why}, or {nth} for every n-th")
    return every


def _kinds(layers: int, every: int, nth: Any, other: Any) -> list[Any]:
    return [other if layer % every else nth for layer in range(1, layers + 1)]


def describe(c: ModelConfig, dtype: str, objective: str | None = None) -> dict[str, Any]:
    """The config.json of one of our models; `dtype` is that of its weights, `objective` the system that trained it."""
    family = FAMILIES[c.family]
    token_ids = {name: getattr(c, name) for name in ("pad_token_id", "bos_token_id", "eos_token_id", "mask_token_id")}
    kind = {1: "linear", 4: "llama3"}.get(len(c.rope_scaling))
    numbers = (*c.rope_scaling[:3], *map(int, c.rope_scaling[3:]))  # transformers requires an integer length
    scaling = {"rope_type": kind, **dict(zip(_LLAMA3, numbers, strict=False))} if kind else None
    local = {}
    if "rope_local_base_freq" in family.defaults:
        theta, every = c.local_rope or (c.rope_theta, 1)
        local = {
            "rope_local_base_freq": theta,
            "layer_types": _kinds(c.num_hidden_layers, int(every), _FULL, _LOCAL),
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
        "torch_dtype": dtype,
        **{key: getattr(c, key) for key in _SHARED if key not in OPTIONAL or key in family.defaults},
        "rope_scaling": scaling,
        **local,
        **{name: None if token < 0 else token for name, token in token_ids.items()},  # some families have defaults
        _SECTION: dataclasses.asdict(_Ours(objective, c.shifted, c.block_size, c.num_tokens)),
    }
