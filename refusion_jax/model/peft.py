"""Low-rank adapters in the format of the package `peft`: adapter_config.json and adapter_model.safetensors.

Their lora_A is [rank, in] and lora_B [out, rank], one of each per layer; ours are [*in, rank] and [rank, *out], of all
layers stacked.
"""

import json
import math
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import pydantic
from etils import epath
from safetensors.numpy import save

from refusion_jax.cli.errors import UserError
from refusion_jax.distributed.json_files import read_json
from refusion_jax.distributed.storage import write_file
from refusion_jax.model.families import NAMES
from refusion_jax.model.lora import INPUTS, Lora, pair_of
from refusion_jax.model.tensor_files import INDEX, MODEL, Tensors

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_OF_NO_EFFECT = frozenset(  # on the adapters in the file
    "auto_mapping ensure_weight_tying eva_config exclude_modules fan_in_fan_out inference_mode layers_pattern "
    "layers_to_transform lora_dropout megatron_core peft_version qalora_group_size revision runtime_config "
    "target_modules task_type".split()
)


class _Config(pydantic.BaseModel):
    """What we read of an adapter_config.json; variants that compute something else are refused."""

    model_config = pydantic.ConfigDict(allow_inf_nan=False)

    peft_type: Literal["LORA"]
    base_model_name_or_path: str
    r: pydantic.PositiveInt
    lora_alpha: float
    bias: Literal["none"] = "none"
    # Others, such as PiSSA, also change the weights that are adapted, when `peft` loads them.
    init_lora_weights: Literal[True, False, "gaussian", "orthogonal", "eva"] = True

    @pydantic.model_validator(mode="before")
    @classmethod
    def _nothing_else_is_asked_for(cls, given: Any) -> Any:
        """Requires that further fields have no effect, or are empty, as `peft` writes unused ones."""
        for name, value in given.items() if isinstance(given, dict) else ():
            if value and name not in _OF_NO_EFFECT and name not in cls.model_fields:
                raise ValueError(f"{name[:60]}={json.dumps(value)[:60]} is not supported")
        return given


def is_peft(path: epath.Path) -> bool:
    """Whether a directory holds adapters of `peft`, and not the model itself, whose config.json some keep with them."""
    return (path / CONFIG).exists() and not any((path / name).exists() for name in (MODEL, INDEX))


def base_of(path: epath.Path) -> epath.Path:
    """The directory of the model that adapters adapt; UserError if the file cannot be read or names none here."""
    base = epath.Path(read_json(path / CONFIG, _Config, extra="ignore").base_model_name_or_path)
    if not base.is_dir():
        raise UserError(f"{path / CONFIG}: base_model_name_or_path={base} is not a directory here: put its path there")
    return base


def load(path: epath.Path, target: dict[str, Any], names: Mapping[str, str]) -> tuple[Lora, dict[str, Any]]:
    """The adapters in a directory, in host memory; UserError if one has no place among weights like `target`.

    `names` are those of the model's tensors, by ours.
    """
    config = read_json(path / CONFIG, _Config, extra="ignore")
    tensors, layers, known = Tensors(path, WEIGHTS), {}, set()
    depth = range(target["layers"]["q_proj"].shape[0])
    found = [name for name in INPUTS if any(_their_name(names[name], "a", layer) in tensors.names for layer in depth)]
    for name in found:
        for side, shape in zip("ab", pair_of(name, target["layers"][name].shape, config.r), strict=True):
            theirs = [_their_name(names[name], side, layer) for layer in range(shape[0])]
            width = math.prod(shape[1:]) // config.r
            flat = (config.r, width) if side == "a" else (width, config.r)
            stacked = np.stack([tensors.read(each, flat).astype(np.float32).T for each in theirs])
            layers[f"{name}_{side}"] = stacked.reshape(shape)
            known |= set(theirs)
    for left in sorted(tensors.names - known):
        raise UserError(f"{path / WEIGHTS}: {left} has no place in the model that it adapts")
    return Lora(config.r, config.lora_alpha, "|".join(found)), {"layers": layers}


def find_objective(path: epath.Path) -> str | None:
    """The system that trained the adapters in a directory, if `write` has recorded it: see there."""
    return Tensors(path, WEIGHTS).metadata.get("objective")


def write(path: epath.Path, lora: Lora, adapters: dict[str, Any], base: epath.Path, objective: str) -> None:
    """Writes a directory that `peft` loads, with what was trained, by names of weights, and the path of its base.

    The system that trained them is recorded where `peft` does not look, because it warns of unknown keys. UserError if
    other weights were trained, too.
    """
    if others := lora.without_adapters(adapters)["layers"].keys() | (adapters.keys() - {"layers"}):
        raise UserError(f"--format=peft holds only adapters, but {min(others)} was trained, too: use huggingface")
    tensors = {}
    for name, stacked in adapters["layers"].items():
        name, side = name[:-2], name[-1]
        for layer, weight in enumerate(np.asarray(stacked)):
            flat = weight.reshape(-1, lora.rank) if side == "a" else weight.reshape(lora.rank, -1)
            tensors[_their_name(NAMES[name], side, layer)] = np.ascontiguousarray(flat.T)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base),
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "target_modules": lora.names,
        "bias": "none",
    }
    write_file(path / WEIGHTS, save(tensors, {"format": "pt", "objective": objective}))
    write_file(path / CONFIG, json.dumps(config, indent=2) + "\n")


def _their_name(tensor: str, side: str, layer: int) -> str:
    return "base_model.model." + tensor.format(layer).replace("weight", f"lora_{side.upper()}.weight")
