"""A trained model that decides what is written, and one of another size that is computed beside it, token for token.

Decoders take the pair for one model: every forward, every entry of the cache and every row of the output head that they
ask for is computed by both, and the numbers are those of the trained one. So its decoding is replayed at the price of
the other, whatever the decoder.

Axes: B rows, T tokens of this forward, S keys it sees, D hidden size of both together, V vocabulary.
"""

import dataclasses
import re

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Float32, Int32

from refusion_jax.batch.visibility import Visibility
from refusion_jax.cli.errors import UserError
from refusion_jax.model.ragged import Ragged
from refusion_jax.model.transformer import KeyValues, ModelConfig, Transformer

_HEAD_DIM = 64
_UNIT = 128  # of hidden sizes


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BothKeyValues(KeyValues):
    """Those of the trained model, and of the other."""

    other: KeyValues

    @property
    def trained(self) -> KeyValues:
        """Those of the trained model alone."""
        return KeyValues(self.keys, self.values)


class Beside(Transformer):
    """A model with another one beside it; both are for the same vocabulary, and of the same dtype."""

    def __init__(self, trained: Transformer, other: Transformer):
        self.trained, self.other = trained, other
        self.config, self.dtype, self.cache_dtype = trained.config, trained.dtype, trained.cache_dtype
        self.head_rows = trained.head_rows

    @property
    def weight_bytes(self) -> int:
        """Of the other: by them decoders judge what a forward may do ahead of time."""
        return self.other.weight_bytes

    @property
    def parameters(self) -> int:
        """Of the other."""
        return sum(x.size for x in jax.tree.leaves(nnx.state(self.other)))

    @property
    def operand_dtype(self) -> jnp.dtype:
        """Of the other."""
        return self.other.operand_dtype

    def with_head_rows(self, rows: int) -> "Beside":
        """As of each."""
        return Beside(self.trained.with_head_rows(rows), self.other.with_head_rows(rows))

    def empty_cache(self, rows: int, capacity: int) -> BothKeyValues:
        """Of both."""
        own, other = (model.empty_cache(rows, capacity) for model in (self.trained, self.other))
        return BothKeyValues(own.keys, own.values, other)

    def extend_hidden(
        self,
        tokens: Int32[Array, "B T"],
        positions: Int32[Array, "B T"],
        cached: BothKeyValues,
        length: Int32[Array, "B"],
        visible: Bool[Array, "B T T"],
        ragged: Ragged | None = None,
    ) -> tuple[Float[Array, "_ _ D"], BothKeyValues]:
        """As the trained model's, with the other's behind it."""
        x, new = self.trained.extend_hidden(tokens, positions, cached.trained, length, visible, ragged)
        y, other = self.other.extend_hidden(tokens, positions, cached.other, length, visible, ragged)
        return jnp.concatenate([x, y], axis=-1), BothKeyValues(new.keys, new.values, other)

    def hidden(
        self, tokens: Int32[Array, "B T"], positions: Int32[Array, "B T"], visibility: Visibility
    ) -> Float[Array, "B T D"]:
        """As the trained model's, with the other's behind it."""
        return jnp.concatenate([m.hidden(tokens, positions, visibility) for m in (self.trained, self.other)], axis=-1)

    def logits(self, x: Float[Array, "_ _ D"]) -> Float32[Array, "_ _ V"]:
        """The trained model's; the other's, which are finite, count nothing."""
        own, other = jnp.split(x, [self.trained.config.hidden_size], axis=-1)
        return self.trained.logits(own) + 0.0 * jnp.max(self.other.logits(other), axis=-1, keepdims=True)


def read_shape(flag: str, text: str) -> tuple[int, int]:
    """(hidden size, layers) of a shape such as 640x12.

    Args:
      flag: that it comes from, for messages.
      text: the shape.

    Raises:
      UserError: where it is none.
    """
    found = re.fullmatch(r"([1-9][0-9]{0,5})x([1-9][0-9]{0,3})", text)
    if not found or int(found[1]) % _UNIT:
        raise UserError(f"--{flag}={text}: must be a multiple of {_UNIT}, x and a number of layers, such as 640x12")
    return int(found[1]), int(found[2])


def beside(models: dict[str, Transformer], hidden_size: int, layers: int) -> dict[str, Beside]:
    """Each model with random weights beside it: those of one vocabulary share them."""
    like = {model.config.vocab_size: model for model in models.values()}
    others = {vocabulary: of_size(hidden_size, layers, model) for vocabulary, model in like.items()}
    return {name: Beside(model, others[model.config.vocab_size]) for name, model in models.items()}


def of_size(hidden_size: int, layers: int, like: Transformer) -> Transformer:
    """Random weights for the same vocabulary, in Qwen3's proportions: 12 D^2 a layer, and the embedding.

    Args:
      hidden_size: a multiple of 128, since two query heads of 64 share one for keys and values.
      layers: how many.
      like: the model whose vocabulary, and whose dtype, it is for.
    """
    heads = hidden_size // _HEAD_DIM
    config: ModelConfig = dataclasses.replace(
        like.config,
        hidden_size=hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        head_dim=_HEAD_DIM,
        intermediate_size=3 * hidden_size,
    )
    return Transformer(config, nnx.Rngs(0), str(like.dtype))
