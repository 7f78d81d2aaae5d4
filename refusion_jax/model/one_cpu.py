"""The layout in which one CPU decodes models fastest: each layer has its own arrays, and its weights are transposed.

XLA for CPUs copies what it takes out of a stack of layers: a weight is read twice and written once before it is used.
Separate weights [out, in] of a layer are read once for one token, and products of 2 to 16 tokens are up to 1.9 times as
fast as with [in, out]. In return a program contains every layer, and takes longer to compile. Weights in int8 are read
once for one token if they are transposed in their stack, and are slower if separate (benchmarks/results/one_core.md).
"""

import operator
import weakref

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, PyTree

from refusion_jax.model.int8 import Int4Array, Int8Array, is_rounded
from refusion_jax.model.interface import LanguageModel
from refusion_jax.model.stack import Layers

# Bytes of all weights. Fewer stay in the CPU's caches; for more, there might be no room for the copies.
_LEAST, _MOST = 16 << 20, 4 << 30
_twins = weakref.WeakKeyDictionary[LanguageModel, tuple[list[jax.Array], bool, LanguageModel]]()


def for_one_cpu(model: LanguageModel, rounded: str = "same") -> LanguageModel:
    """The model in this layout if one CPU decodes it, kept for the next call while the model lives; else the model.

    Its weights will afterwards be `rounded` to "same", "int8" or "int4" (`LanguageModel.rounded`).
    """
    state = nnx.state(model)
    weights = jax.tree.leaves(state)
    devices = weights[0].sharding.device_set
    if len(devices) > 1 or next(iter(devices)).platform != "cpu":
        return model
    of_layers = [module for _, module in nnx.iter_modules(model) if isinstance(module, Layers)]
    kinds = {type(x) for x in jax.tree.leaves(nnx.to_pure_dict(state), is_leaf=is_rounded)}
    is_fitting = _LEAST <= sum(x.nbytes for x in weights) <= _MOST
    if not is_fitting or rounded == "int4" or Int4Array in kinds or any(x.outputs_first for x in of_layers):
        return model
    in_int8 = rounded == "int8" or Int8Array in kinds
    known, was_in_int8, twin = _twins.get(model, ([], in_int8, model))
    is_same = len(known) == len(weights) and all(map(operator.is_, known, weights))
    if not is_same or was_in_int8 != in_int8:
        twin = _in_layout(model, in_int8)
        _twins[model] = weights, in_int8, twin
    return twin


def _in_layout(model: LanguageModel, in_int8: bool) -> LanguageModel:
    """A copy of the model with transposed weights, and separate layers unless they are in int8."""
    twin = nnx.merge(*nnx.split(model))
    stacks = [(m, name) for _, m in nnx.iter_modules(twin) for name in vars(m) if isinstance(getattr(m, name), Layers)]
    for module, name in stacks:
        stack = getattr(module, name)
        stack.put_outputs_first()
        if not in_int8:
            setattr(module, name, nnx.List(stack.cut(at, at + 1) for at in range(stack.first, stack.end)))
    return twin


def computed_after(x: Float[Array, "*axes"], values: PyTree) -> PyTree:
    """The values, as a result that XLA cannot compute before x.

    The keys and values of the last layer are known before its attention reads the cache. If they are written to it
    first, XLA for CPUs copies all of the cache twice in every forward pass: with 20 M parameters, 4 rows and a cache of
    6,144 tokens that took 70 % of the time. Its compiler ignores `jax.lax.optimization_barrier`.
    """
    nothing = jnp.minimum(jnp.isnan(x.ravel()[0]).astype(jnp.int8), 0)  # 0, which XLA does not see
    return jax.tree.map(lambda value: value + nothing.astype(value.dtype), values)
