"""Which tensors of a Hugging Face directory correspond to our weights; reading and writing both follow from it.

Their weights are [out, in], one tensor per layer; ours are [in, out] with separate head axes, all layers stacked.
A tensor may hold several of our weights, one after the other along `out`.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from refusion_jax.model.families import FAMILIES, NAMES
from refusion_jax.model.lora import INPUTS

# Axes of those that are transposed.
_INPUTS = INPUTS | dict.fromkeys(("router", "shared_gate_proj", "shared_up_proj", "shared_down_proj"), 1)
_STACKS = ("dense_layers", "layers")  # of a model, in order


class Part(NamedTuple):
    """A weight outside the layers, or that of one layer or expert, as rows of a tensor."""

    tensor: str  # its name
    whole: tuple[int, ...]  # shape of the tensor
    rows: slice
    shape: tuple[int, ...]  # of the weight
    index: tuple[int, ...]  # in the weight of all layers: (layer,) or (layer, expert)
    inputs: int  # axes of the weight that form the tensor's last one; 0: it is not transposed

    def ours(self, tensor: np.ndarray) -> np.ndarray:
        """The weight, from the tensor."""
        rows = tensor[self.rows]
        return (rows.T if self.inputs else rows).reshape(self.shape)

    def theirs(self, weight: np.ndarray) -> np.ndarray:
        """The rows of the tensor, from the weight."""
        rows = (self.rows.stop - self.rows.start, *self.whole[1:])
        return np.ascontiguousarray(weight.reshape(rows[::-1]).T if self.inputs else weight.reshape(rows))


def tensor_names(family: str, renamed: Mapping[str, str], experts: bool = False) -> dict[str, str]:
    """Ours -> theirs, for layers with experts or without; `renamed` is where a release differs from its family."""
    own = FAMILIES[family]
    return NAMES | dict(own.names) | (dict(own.experts) if experts else {}) | dict(renamed)


def layout(
    weights: dict[str, Any], family: str, renamed: Mapping[str, str], vocab_size: int
) -> Iterator[tuple[tuple[str, ...], list[Part]]]:
    """(path, parts) of every weight, from a tree of anything with the weights' shapes.

    `vocab_size` is the number of rows of the embedding in the directory; ours may have more.
    """
    names = tensor_names(family, renamed)
    for name in [name for name in weights if name not in _STACKS]:
        shape = weights[name].shape
        shape = (vocab_size, *shape[1:]) if len(shape) > 1 else shape
        yield (name,), [Part(names[name], shape, slice(0, shape[0]), shape, (), 0)]
    first = 0
    for stack in [stack for stack in _STACKS if stack in weights]:
        shapes = {name: w.shape for name, w in weights[stack].items()}
        names = tensor_names(family, renamed, experts="router" in shapes)
        ends: dict[str, int] = {}  # number of rows of each tensor that are assigned so far
        rows = {}
        for name in [name for name in names if name in shapes]:
            height = _tensor_shape(shapes[name][names[name].count("{}") :], _INPUTS.get(name, 0))[0]
            begin = ends.get(names[name], 0)
            rows[name], ends[names[name]] = slice(begin, begin + height), begin + height
        for name, shape in shapes.items():
            inputs, stacked = _INPUTS.get(name, 0), names[name].count("{}")
            own = shape[stacked:]
            whole = (ends[names[name]], *_tensor_shape(own, inputs)[1:])
            parts = [
                Part(names[name].format(first + layer, *expert), whole, rows[name], own, (layer, *expert), inputs)
                for layer, *expert in np.ndindex(shape[:stacked])
            ]
            yield (stack, name), parts
        first += next(iter(shapes.values()))[0]


def _tensor_shape(shape: tuple[int, ...], inputs: int) -> tuple[int, ...]:
    """[out, in] from [*in, *out]; a bias or norm is flat."""
    return (math.prod(shape[inputs:]), math.prod(shape[:inputs])) if inputs else (math.prod(shape),)
