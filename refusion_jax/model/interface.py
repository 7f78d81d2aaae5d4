"""The interface of a model: what decoders call, whether it is one transformer or a model around others.

Axes: B rows, T tokens of this forward pass, S cached entries, L layers, K key/value heads, H head size, V vocabulary.
"""

import abc
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, Bool, Float, Float32, Int32

from refusion_jax.batch.visibility import Visibility
from refusion_jax.distributed.sharding import make_mesh
from refusion_jax.model.approximate_head import rounded_head, shortlisted_logits
from refusion_jax.model.int8 import Int4Array, Int8Array, is_rounded
from refusion_jax.model.key_values import KeyValues
from refusion_jax.model.ragged import Ragged
from refusion_jax.model.shape import ModelConfig


class LanguageModel(nnx.Module):
    """A model that predicts tokens, with or without a cache. The caller supplies the attention mask."""

    config: ModelConfig
    dtype: jnp.dtype  # of computation; logits are float32
    cache_dtype: jnp.dtype  # of keys and values between forward passes; int8: see `rounded`
    head_rows: int = 0  # rows of the output head for which a token's logits are computed; 0: all
    trained_by: str = ""  # name of the system, if known
    output_head: Float[Array, "V D"] | Int8Array  # in the dtype of computation, or in int8
    operand_dtype: jnp.dtype  # of weights in products: the dtype of computation, or int8
    weight_bytes: int  # that a forward pass reads: all weights except an embedding that is not the output head, too

    @abc.abstractmethod
    def hidden(self, *fed: Any) -> Float[Array, "B T _"]:
        """The inputs of the output head for packed rows; the arguments are those of `__call__`."""

    @abc.abstractmethod
    def extend_hidden(
        self,
        tokens: Int32[Array, "B T"],
        positions: Int32[Array, "B T"],
        cached: KeyValues,
        length: Int32[Array, "B"],
        visible: Bool[Array, "B T T"],
        ragged: Ragged | None = None,
    ) -> tuple[Float[Array, "_ _ _"], KeyValues]:
        """The inputs of the output head for new tokens after cached ones, and the keys and values of the new tokens.

        The cache is only read: the caller decides which of the new keys and values to keep. For a cache in int8 the new
        ones are rounded before any token sees them: results do not depend on how tokens are split into passes.

        Every new token sees the leading `length` of the S cached entries of its row, [L, B, K, S, H], and the new ones
        that `visible` allows. With `ragged`, only the new tokens that it lists are computed, and results are packed.

        Returns:
          ([B, T, D], the input of `logits`; keys and values of the new tokens, [L, B, T, K, H]).
        """

    @abc.abstractmethod
    def logits(self, x: Float[Array, "B T _"]) -> Float32[Array, "B T V"]:
        """Logits from the result of `hidden` or `extend_hidden`, or from a part of its tokens."""

    @property
    def mesh(self) -> Mesh:
        """The mesh of the weights, which may be abstract; for weights on one device, a mesh of that device."""
        weights = (x for _, x in nnx.iter_graph(self) if isinstance(x, nnx.Variable))  # listing all would take 5 ms
        place = jax.tree.leaves(next(weights))[0].sharding
        return place.mesh if isinstance(place, NamedSharding) else make_mesh({}, list(place.device_set))

    def __call__(
        self, tokens: Int32[Array, "B T"], positions: Int32[Array, "B T"], visibility: Visibility
    ) -> Float32[Array, "B T V"]:
        """Logits of packed rows; a position is a token's place in its text (RoPE), whatever its index in the row."""
        return self.logits(self.hidden(tokens, positions, visibility))

    def extend(self, *fed: Any) -> tuple[Float32[Array, "B T V"], KeyValues]:
        """`extend_hidden`, with the logits of all new tokens in place of the inputs of the output head."""
        x, new = self.extend_hidden(*fed)
        return self.logits(x), new

    def empty_cache(self, rows: int, capacity: int) -> KeyValues:
        """Empty cache entries in `cache_dtype`, in the form that `extend` takes."""
        return KeyValues.empty(self.config, self.cache_dtype, rows, capacity)

    def with_head_rows(self, rows: int) -> "LanguageModel":
        """This model with logits of only `rows` rows of the head per token (see approximate_head.py); 0: all."""
        return ApproximateHead(self, rows) if 0 < rows < self.config.vocab_size else self

    def rounded(self, weights: str = "same", cache: str = "same") -> "LanguageModel":
        """The same model with weights or cache in int8, for decoding (see int8.py); rounded parts stay as they are.

        Args:
          weights: "same", "int8" or "int4", for weights of products; with int4, embeddings and experts are in int8.
          cache: "same", "int8" or "int4", for caches that decoders create.
        """
        if weights == cache == "same":
            return self
        graphdef, state = nnx.split(self)
        state = jax.tree.map(lambda p: rounded_weight(p, weights), state, is_leaf=lambda p: isinstance(p, nnx.Variable))
        model = nnx.merge(graphdef, state)
        for _, each in nnx.iter_modules(model):  # also of models inside this one
            if cache != "same" and isinstance(each, LanguageModel):
                each.cache_dtype = jnp.dtype(cache)
        return model


def rounded_weight(p: nnx.Variable, weights: str) -> nnx.Variable:
    """A weight, rounded as `LanguageModel.rounded` describes."""
    if weights == "same" or not p.summed or is_rounded(p.get_value()):
        return p
    in_int4 = weights == "int4" and p.logical_axes[0] == "layers" and "experts" not in p.logical_axes
    kind = Int4Array if in_int4 else Int8Array
    return p.replace(kind.of(p.get_value(), [p.logical_axes.index(name) for name in p.summed]))


class Wrapper(LanguageModel):
    """A model that computes what the inner one does, except for what a subclass overrides."""

    def __init__(self, model: LanguageModel):
        self.model, self.head_rows, self.trained_by = model, model.head_rows, model.trained_by
        self.config, self.dtype, self.cache_dtype = model.config, model.dtype, model.cache_dtype

    def hidden(self, *fed: Any) -> Float[Array, "B T _"]:
        return self.model.hidden(*fed)

    def extend_hidden(self, *fed: Any) -> tuple[Float[Array, "_ _ _"], KeyValues]:
        return self.model.extend_hidden(*fed)

    def logits(self, x: Float[Array, "B T _"]) -> Float32[Array, "B T V"]:
        return self.model.logits(x)

    def empty_cache(self, rows: int, capacity: int) -> KeyValues:
        return self.model.empty_cache(rows, capacity)

    weight_bytes = property(lambda self: self.model.weight_bytes)
    operand_dtype = property(lambda self: self.model.operand_dtype)
    output_head = property(lambda self: self.model.output_head)


class ApproximateHead(Wrapper):
    """A model with logits only for a few rows of the output head, chosen by its rounded copy; -inf for the others."""

    def __init__(self, model: LanguageModel, rows: int):
        super().__init__(model)
        self.head_rows = rows
        self.rounded_head = nnx.Param(rounded_head(model.output_head), logical_axes=("vocab", None), summed=())

    def logits(self, x: Float[Array, "B T D"]) -> Float32[Array, "B T V"]:
        return shortlisted_logits(x, self.output_head, self.rounded_head.get_value(), self.head_rows)
