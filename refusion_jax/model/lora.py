"""Low-rank adapters (LoRA, arXiv 2106.09685): x W becomes x W + alpha / rank (x A) B, and only A and B are trained.

They are weights of the layers, `NAME_a` and `NAME_b` next to `NAME`, split over a mesh as their weight is.

Axes: L layers, R rank.
"""

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import NamedSharding, PartitionSpec

from refusion_jax.cli.errors import SettingError
from refusion_jax.model.layers import weight

INPUTS = {"q_proj": 1, "k_proj": 1, "v_proj": 1, "o_proj": 2, "gate_proj": 1, "up_proj": 1, "down_proj": 1}  # axes


@dataclasses.dataclass(frozen=True)
class Lora:
    """Which weights have adapters, and which others are trained. Patterns are regular expressions of whole names."""

    rank: int
    alpha: float
    targets: str
    full: str = ""  # weights that are trained themselves, such as "embed_tokens|.*norm"

    @property
    def names(self) -> list[str]:
        return [name for name in INPUTS if re.fullmatch(self.targets, name)]

    def split(self, tree: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Splits a tree by names of weights: (trained: adapters, and what `full` names; frozen)."""
        flat = flatten_dict(tree)
        trained = {at for at in flat if at[-1][-2:] in ("_a", "_b") or re.fullmatch(self.full, at[-1])}
        parts = trained, flat.keys() - trained
        return tuple({"layers": {}} | unflatten_dict({at: flat[at] for at in sorted(part)}) for part in parts)

    def without_adapters(self, tree: dict[str, Any]) -> dict[str, Any]:
        """The weights of the model itself in a tree by names of weights."""
        layers = {name: value for name, value in tree["layers"].items() if name[-2:] not in ("_a", "_b")}
        return tree | {"layers": layers}

    def merge(self, params: dict[str, Any], adapters: dict[str, Any]) -> dict[str, Any]:
        """The weights with their adapters added, in float32, and then in the dtype of the weight."""
        layers = dict(params["layers"])
        for name in self.names:
            w, a, b = layers[name], adapters["layers"][f"{name}_a"], adapters["layers"][f"{name}_b"]
            L, R = b.shape[:2]
            update = (a.reshape(L, -1, R) @ b.reshape(L, R, -1)).reshape(w.shape)
            layers[name] = (w.astype(jnp.float32) + self.alpha / self.rank * update).astype(w.dtype)
        return params | {"layers": layers}

    def targets_like(self, target: dict[str, Any]) -> dict[str, Any]:
        """Shapes and shardings of the trained weights, in float32, from those of all weights without adapters."""
        found = self.split(target)[0]
        for name in self.names:
            w = target["layers"][name]
            spec = [*w.sharding.spec, *[None] * (w.ndim - len(w.sharding.spec))]
            both = pair_of(name, w.shape, self.rank), pair_of(name, spec, None)
            for side, shape, own in zip("ab", *both, strict=True):
                where = NamedSharding(w.sharding.mesh, PartitionSpec(*own))
                found["layers"][f"{name}_{side}"] = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=where)
        return found


def pair_of(name: str, of_weight: Sequence[Any], of_rank: Any) -> tuple[tuple, tuple]:
    """The values of A and B along each axis, such as sizes, given those of their weight and the value of axis R."""
    inputs = 1 + INPUTS[name]
    return (*of_weight[:inputs], of_rank), (of_weight[0], of_rank, *of_weight[inputs:])


def read_lora(section: Mapping[str, Any]) -> Lora | None:
    """The adapters that a config's section describes, if its rank is above 0."""
    return Lora(**{f.name: section[f.name] for f in dataclasses.fields(Lora)}) if section["rank"] else None


def add_adapters(layers: nnx.Module, lora: Lora, rngs: nnx.Rngs) -> None:
    """Gives the layers of a transformer adapters that change nothing yet: A is drawn, B is 0.

    SettingError if one would be an adapter of experts, or if other layers come before these.
    """
    if layers.first:
        why = f"first_k_dense_replace={layers.first}: models whose first layers have no experts take no adapters"
        raise SettingError("config", "lora.rank", lora.rank, why)
    layers.lora_scale = lora.alpha / lora.rank
    for name in lora.names:
        w = getattr(layers, name)
        if "experts" in w.logical_axes:
            why = f"experts have no adapters, and {name} is theirs; of this family (q|k|v|o)_proj can have them"
            raise SettingError("config", "lora.targets", lora.targets, why)
        both = pair_of(name, w.shape, lora.rank), pair_of(name, w.logical_axes, "rank")
        stds = math.prod(w.shape[1 : 1 + INPUTS[name]]) ** -0.5, 0.0
        for side, shape, axes, std in zip("ab", *both, stds, strict=True):
            setattr(layers, f"{name}_{side}", weight(rngs, shape, axes, std))


def combine(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """The union of two trees by names; where both have an entry, the first one's."""
    return unflatten_dict(flatten_dict(second) | flatten_dict(first))
