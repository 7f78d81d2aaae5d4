"""A small trained model that decodes at the cost of a larger one, to compare speeds without training large models.

Every forward, every cache entry and every row of the output head that a decoder requests is computed by both models,
and the results are those of the trained one. The larger one has random weights; its results are never used.

Axes: B rows, T tokens of this forward pass, S keys it sees, D hidden size of both together, V vocabulary.
"""

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Float32, Int32

from refusion_jax.cli.errors import UserError
from refusion_jax.model.interface import LanguageModel, Wrapper
from refusion_jax.model.key_values import KeyValues
from refusion_jax.model.transformer import Transformer

_HEAD_DIM = 64
_UNIT = 128  # of hidden sizes


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BothKeyValues(KeyValues):
    """Keys and values of the trained model, and those of the proxy."""

    proxy: KeyValues


class SpeedProxy(Wrapper):
    """A trained model, along with which a larger one is computed; both have the same vocabulary and dtype."""

    def __init__(self, trained: LanguageModel, proxy: LanguageModel):
        super().__init__(trained)
        self.proxy = proxy

    # From these decoders derive how many speculative tokens are free.
    weight_bytes = property(lambda self: self.proxy.weight_bytes)
    operand_dtype = property(lambda self: self.proxy.operand_dtype)

    def with_head_rows(self, rows: int) -> "SpeedProxy":
        return SpeedProxy(self.model.with_head_rows(rows), self.proxy.with_head_rows(rows))

    def empty_cache(self, rows: int, capacity: int) -> BothKeyValues:
        own, proxy = (model.empty_cache(rows, capacity) for model in (self.model, self.proxy))
        return BothKeyValues(own.keys, own.values, proxy)

    def extend_hidden(
        self, tokens: Int32[Array, "B T"], positions: Int32[Array, "B T"], cached: BothKeyValues, *seen: Any
    ) -> tuple[Float[Array, "_ _ D"], BothKeyValues]:
        """Hidden states of both, concatenated."""
        x, new = self.model.extend_hidden(tokens, positions, KeyValues(cached.keys, cached.values), *seen)
        y, proxy = self.proxy.extend_hidden(tokens, positions, cached.proxy, *seen)
        return jnp.concatenate([x, y], axis=-1), BothKeyValues(new.keys, new.values, proxy)

    def hidden(self, *fed: Any) -> Float[Array, "B T D"]:
        return jnp.concatenate([model.hidden(*fed) for model in (self.model, self.proxy)], axis=-1)

    def logits(self, x: Float[Array, "_ _ D"]) -> Float32[Array, "_ _ V"]:
        """The trained model's logits; the proxy's, which are finite, are multiplied by zero."""
        own, proxy = jnp.split(x, [self.config.hidden_size], axis=-1)
        return self.model.logits(own) + 0.0 * jnp.max(self.proxy.logits(proxy), axis=-1, keepdims=True)


def read_shape(text: str) -> tuple[int, int]:
    """(hidden size, layers) of --speed_proxy, such as 640x12; UserError if it is malformed."""
    found = re.fullmatch(r"([1-9][0-9]{0,5})x([1-9][0-9]{0,3})", text)
    if not found or int(found[1]) % _UNIT:
        raise UserError(
            f"--speed_proxy={text}: must be a multiple of {_UNIT}, x and a number of layers, such as 640x12"
        )
    return int(found[1]), int(found[2])


def proxy_model(hidden_size: int, layers: int, like: LanguageModel) -> Transformer:
    """Random weights in Qwen3's proportions: 12 D^2 parameters per layer, and the embedding.

    The vocabulary and dtype are those of `like`. Two query heads of 64 share one for keys and values, so D is a
    multiple of 128.
    """
    heads = hidden_size // _HEAD_DIM
    config = dataclasses.replace(
        like.config,
        hidden_size=hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        head_dim=_HEAD_DIM,
        intermediate_size=3 * hidden_size,
    )
    return Transformer(config, nnx.Rngs(0), str(like.dtype))
