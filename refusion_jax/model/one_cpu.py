"""Models as one CPU decodes them fastest: weights of layers transposed.

With one token, XLA for CPUs multiplies by a weight [L, in, out] only after it has copied the layer out of the stack. Of
[L, out, in] it reads each layer where it is: for layers of 1.8 M float32 parameters 1.75 times as fast on one core of
an AMD EPYC, at nine tenths of the memory bandwidth, and 3 times in int8; with several tokens it makes no difference.
"""

import weakref

import jax
from flax import nnx

from refusion_jax.model.int8 import Int4Array
from refusion_jax.model.stack import Layers
from refusion_jax.model.transformer import Transformer

# Bytes of all weights. Fewer remain in the CPU's caches; of more, there might be no room for the copies.
_LEAST, _MOST = 16 << 20, 4 << 30
_transposed: weakref.WeakKeyDictionary[Transformer, tuple[list[jax.Array], Transformer]] = weakref.WeakKeyDictionary()


def for_one_cpu(model: Transformer) -> Transformer:
    """The same model, on one CPU with its layers transposed; kept for the next call, as long as there is the model."""
    state = nnx.state(model)
    weights = jax.tree.leaves(state)
    devices = weights[0].sharding.device_set
    if len(devices) > 1 or next(iter(devices)).platform != "cpu":
        return model
    of_layers = [module for _, module in nnx.iter_modules(model) if isinstance(module, Layers)]
    values = jax.tree.leaves(nnx.to_pure_dict(state), is_leaf=lambda x: isinstance(x, Int4Array))
    is_fitting = _LEAST <= sum(x.nbytes for x in weights) <= _MOST
    if not is_fitting or any(isinstance(x, Int4Array) for x in values) or any(x.outputs_first for x in of_layers):
        return model
    known, twin = _transposed.get(model, ([], model))
    if len(known) != len(weights) or any(x is not y for x, y in zip(known, weights, strict=True)):
        twin = nnx.merge(*nnx.split(model))
        for _, module in nnx.iter_modules(twin):
            if isinstance(module, Layers):
                module.put_outputs_first()
        _transposed[model] = weights, twin
    return twin
