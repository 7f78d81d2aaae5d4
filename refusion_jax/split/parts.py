"""Parts of a model: its first layers for a device, the rest for a server; loaded without the other part in memory."""

import dataclasses
import hashlib
import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.traverse_util import flatten_dict

from refusion_jax.checkpoints.weights import Reader
from refusion_jax.model.interface import rounded_weight
from refusion_jax.model.shape import ModelConfig
from refusion_jax.model.transformer import Transformer

_STACKS = ("dense_layers", "layers")  # of the weights of a model, in order
_HASHED = 2**20  # values at each end of a weight


def part_of(model: Transformer, first: int, end: int) -> Transformer:
    """The layers `first` to `end` - 1, by their numbers, copied; with embedding and output head if `first` is 0."""
    part = nnx.clone(model)
    part.config = dataclasses.replace(model.config, num_hidden_layers=end - first)
    for name in _STACKS:
        if layers := getattr(part, name, None):
            setattr(part, name, layers.cut(*(min(max(at, layers.first), layers.end) for at in (first, end))))
    if first:
        for name in ("embed_tokens", "lm_head"):
            if hasattr(part, name):
                delattr(part, name)
    return part


def load_part(
    read: Reader, config: ModelConfig, first: int, end: int, dtype: str, weights: str = "same", cache: str = "same"
) -> Transformer:
    """`part_of` a stored model; no other weights are kept, and each is rounded before the next is read.

    `read` and `config` are those of the whole model, `weights` and `cache` as for `LanguageModel.rounded`. UserError
    if a weight cannot be read.
    """
    part = abstract_part(config, first, end, dtype)
    graphdef, state = nnx.split(part)
    begins = {"layers": config.first_k_dense_replace, "dense_layers": 0}

    def fill(path, p: nnx.Variable) -> nnx.Variable:
        name, shape = tuple(str(key.key) for key in path), p.get_value().shape
        begin = getattr(part, name[0]).first - begins[name[0]] if name[0] in _STACKS else 0
        value = jnp.asarray(read(name, slice(begin, begin + shape[0])), dtype)
        return rounded_weight(p.replace(value), weights)

    state = jax.tree.map_with_path(fill, state, is_leaf=lambda p: isinstance(p, nnx.Variable))
    return nnx.merge(graphdef, state).rounded(cache=cache)


def abstract_part(config: ModelConfig, first: int, end: int, dtype: str) -> Transformer:
    """`part_of` a model without arrays."""
    return nnx.eval_shape(lambda: part_of(Transformer(config, nnx.Rngs(0), dtype), first, end))


def fingerprint(read: Reader, config: ModelConfig, dtype: str) -> bytes:
    """16 bytes that differ between models: from their shape, dtype, and the first and the last values of every weight.

    Both ends, because often only the last layers are trained. Norms and biases are read as a whole, so that training of
    a layer in between shows unless they were frozen; reading all matrices would take as long as reading the model.
    """
    content = hashlib.blake2b(f"{config} {dtype}".encode(), digest_size=16)
    whole = nnx.to_pure_dict(nnx.state(nnx.eval_shape(lambda: Transformer(config, nnx.Rngs(0), dtype))))
    for name, weight in sorted(flatten_dict(whole).items()):
        end = weight.shape[0]
        entries = min(-(-_HASHED // math.prod(weight.shape[1:])), end)
        for part in (slice(0, entries), slice(end - entries, end)):
            content.update(read(name, part).reshape(-1)[:_HASHED].astype(np.float32).tobytes())
    return content.digest()
