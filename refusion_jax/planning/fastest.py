"""The fastest settings that `plan` has found for models on slices, by its estimate; configs and `train` read them."""

import math
import operator
from collections.abc import Sequence

import jax
import ml_collections

from refusion_jax.config import make_objective
from refusion_jax.distributed.chips import find_chip

# By hidden size, layers, heads and MLP size, then by slice: changes to a config that otherwise has remat=full, one copy
# of the weights, no accumulation, and steps of 128 rows of 4,096 tokens, each of which is one token of the input.
_SEARCHED = {"row_length": 4096, "batch_size": 128, "mesh.tensor": 1, "mesh.sequence": 1}
_SEARCHED |= {"optimizer": "adamw", "quantization": "none", "lora.rank": 0}
FASTEST: dict[tuple[int, int, int, int], dict[str, dict]] = {
    (4096, 36, 32, 12288): {  # Qwen3 8B
        "v4:2x4x4": {"remat": "outputs", "accumulation": 2},
        "v5p:2x2x4": {"remat": "products", "accumulation": 2},
        "v5p:2x4x4": {"remat": "products"},
        "v5p:4x4x4": {"remat": "products", "mesh.data": 2},
        "v6e:4x8": {"remat": "products", "accumulation": 2},
        "v6e:8x8": {"remat": "products", "mesh.data": 2},
        "v6e:16x16": {"remat": "products", "mesh.data": 2, "batch_size": 256},
        "v5e:16x16": {"remat": "products", "mesh.data": 4, "batch_size": 256},
        "tpu7x:4x4x4": {"remat": "products"},
    },
}


def faster_settings(config: ml_collections.ConfigDict, devices: Sequence[jax.Device]) -> str:
    """Flags that make a step of this model and batch faster on these devices; "" if none are known."""
    model = config.model
    if make_objective(config, mask_id=0).input_length(config.row_length) > config.row_length:
        return ""
    shape = model.hidden_size, model.num_hidden_layers, model.num_attention_heads, model.intermediate_size
    for topology, settings in FASTEST.get(shape, {}).items():
        chip, sides = find_chip(topology), topology.split(":")[1].split("x")
        there = math.prod(map(int, sides)) * chip.per_chip
        is_here = (chip.device_kind, there) == (devices[0].device_kind, len(devices))
        if is_here and not changes(config, {key: settings.get(key, value) for key, value in _SEARCHED.items()}):
            return as_flags(changes(config, settings))
    return ""


def changes(config: ml_collections.ConfigDict, settings: dict) -> dict:
    """The settings, by dotted key, for which the config has a different value."""
    return {key: value for key, value in settings.items() if operator.attrgetter(key)(config) != value}


def as_flags(settings: dict) -> str:
    """The settings as command-line flags."""
    return " ".join(f"--config.{key}={value}" for key, value in settings.items())
