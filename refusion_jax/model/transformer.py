"""The transformer that every system shares, in Flax NNX; by default of Qwen3's shape (arXiv 2505.09388).

RMSNorm, grouped-query attention, RoPE (half-split rotation), SwiGLU, or a mixture of experts (experts.py). The family
(families.py) determines where the norms are, and which biases there are. The layers are those of stack.py.

Axes: B rows, T tokens of this forward pass, S keys it sees, L layers, D hidden size, N query heads, K key/value heads,
H head size, V vocabulary.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Float32, Int32

from refusion_jax.batch.batch import Batch, is_labelled
from refusion_jax.batch.folding import fold, fold_visibility, unfold
from refusion_jax.batch.visibility import Visibility
from refusion_jax.distributed.sharding import constrain, shard_count_here
from refusion_jax.model import packed_attention as packed
from refusion_jax.model.approximate_head import rounded_head, shortlisted_logits
from refusion_jax.model.cross_entropy import linear_cross_entropy
from refusion_jax.model.experts import Load
from refusion_jax.model.families import FAMILIES
from refusion_jax.model.int8 import Int4Array, Int8Array, in_dtype, is_int8, widened
from refusion_jax.model.key_values import KeyValues, attend_over
from refusion_jax.model.layers import linear_outputs_first, rope_rotation, weight
from refusion_jax.model.ragged import Ragged
from refusion_jax.model.shape import ModelConfig
from refusion_jax.model.stack import Layers, norm


class Transformer(nnx.Module):
    """A decoder-only transformer. The caller supplies the attention mask. It computes in `dtype`; logits are float32.

    `remat` is one of `remat.REMAT_POLICIES`, `backend`, for packed rows, comes from `packed_attention.backend_for`, and
    `quantization`, of products with weights of layers in training (quantized_training.py), is "int8", "fp8" or "none".
    """

    head_rows = 0  # rows of the output head for which a token's logits are computed; 0: all
    reads: "Transformer | None" = None  # in training: see `embedded_with`

    def __init__(
        self,
        config: ModelConfig,
        rngs: nnx.Rngs,
        dtype: str = "float32",
        remat: str = "none",
        backend: str = "xla",
        quantization: str = "none",
    ):
        self.config, self.dtype, self.remat, self.backend = config, jnp.dtype(dtype), remat, backend
        self.quantization = quantization
        self.cache_dtype = self.dtype  # of keys and values between forward passes; int8: see `rounded`
        V, D = config.vocab_size, config.hidden_size
        self.embed_tokens = weight(rngs, (V, D), ("vocab", "embed"), D**-0.5, ("embed",))
        dense = config.first_k_dense_replace
        if dense:
            self.dense_layers = Layers(config, rngs, 0, dense)
        self.layers = Layers(config, rngs, dense, config.num_hidden_layers)
        self.final_norm = weight(rngs, (D,), ("norm",), 0.0 if FAMILIES[config.family].norm_offset else None)
        if not config.tie_word_embeddings:
            self.lm_head = weight(rngs, (V, D), ("vocab", "embed"), D**-0.5, ("embed",))

    def __call__(
        self, tokens: Int32[Array, "B T"], positions: Int32[Array, "B T"], visibility: Visibility
    ) -> Float32[Array, "B T V"]:
        """Logits of packed rows; a position is a token's place in its text (RoPE), whatever its index in the row."""
        return self.logits(self.hidden(tokens, positions, visibility))

    def cross_entropy(self, batch: Batch) -> tuple[Float32[Array, "B T"], Load | None]:
        """(-log p(label) of packed rows, without ever holding their logits; the load of the experts, if there are any).

        Rows that are split over chips are folded for it (batch/folding.py), so that none waits for the last one. Tokens
        without a label are skipped; their loss is 0.
        """
        head = widened(self._head.get_value(), self.dtype)
        of_tokens = batch.inputs, batch.positions, batch.labels, is_labelled(batch)
        parts, visibility = shard_count_here("length"), batch.visibility
        if is_folded := parts > 1 and not batch.inputs.shape[1] % (2 * parts):
            of_tokens = (constrain(fold(x, parts), "batch", "length") for x in of_tokens)
            visibility = fold_visibility(visibility, parts)
        tokens, positions, *labels = of_tokens
        x, load = self.hidden_and_load(tokens, positions, visibility)
        cost = linear_cross_entropy(x, head, *labels)
        return unfold(cost, parts) if is_folded else cost, load

    def extend(self, *fed: Any) -> tuple[Float32[Array, "B T V"], KeyValues]:
        """`extend_hidden`, with the logits of all new tokens in place of the inputs of the output head."""
        x, new = self.extend_hidden(*fed)
        return self.logits(x), new

    def extend_hidden(
        self,
        tokens: Int32[Array, "B T"],
        positions: Int32[Array, "B T"],
        cached: KeyValues,
        length: Int32[Array, "B"],
        visible: Bool[Array, "B T T"],
        ragged: Ragged | None = None,
    ) -> tuple[Float[Array, "_ _ D"], KeyValues]:
        """The inputs of the output head for new tokens after cached ones, and the keys and values of the new tokens.

        The cache is only read: the caller decides which of the new keys and values to keep. For a cache in int8 the new
        ones are rounded before any token sees them: results do not depend on how tokens are split into passes.

        Every new token sees the leading `length` of the S cached entries of its row, [L, B, K, S, H], and the new ones
        that `visible` allows. With `ragged`, only the new tokens that it lists are computed, and results are packed.

        Returns:
          ([B, T, D], the input of `logits`; keys and values of the new tokens, [L, B, T, K, H]).
        """
        ragged = ragged or Ragged.whole(*tokens.shape)
        attend = attend_over(cached, length, visible, ragged)
        x, new, _ = self.through_layers(self.embedded(ragged.pack(tokens)), ragged.pack(positions), attend)
        return self.normed(x), new

    def empty_cache(self, rows: int, capacity: int) -> KeyValues:
        """Empty cache entries in `cache_dtype`, in the form that `extend` takes."""
        return KeyValues.empty(self.config, self.cache_dtype, rows, capacity)

    def hidden(
        self, tokens: Int32[Array, "B T"], positions: Int32[Array, "B T"], visibility: Visibility
    ) -> Float[Array, "B T D"]:
        """The inputs of the output head for packed rows; the arguments are those of `__call__`."""
        return self.hidden_and_load(tokens, positions, visibility)[0]

    def hidden_and_load(
        self, tokens: Int32[Array, "B T"], positions: Int32[Array, "B T"], visibility: Visibility
    ) -> tuple[Float[Array, "B T D"], Load | None]:
        """`hidden`, and the load of the experts of all layers, if there are any."""

        def attend(q, k, v, _):
            return packed.packed_attention(q, k, v, visibility, self.backend), None

        x = self.embedded(tokens)
        if self.reads is not None:
            read = self.reads.hidden(tokens, positions, visibility)
            x = jnp.where((visibility.group == 0)[:, :, None], self.embedded_with(tokens, read), x)
        x, _, load = self.through_layers(x, positions, attend, visibility.segment_ids > 0)
        return self.normed(x), load

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights that a forward pass reads: all except an embedding that is not the output head, too."""

        def size(x):
            return x.size * x.dtype.itemsize

        every, embedding = (
            sum(map(size, jax.tree.leaves(some)))
            for some in (nnx.to_pure_dict(nnx.state(self)), self.embed_tokens.get_value())
        )
        return every - (0 if self.config.tie_word_embeddings else embedding)

    @property
    def _head(self) -> nnx.Param:
        return self.embed_tokens if self.config.tie_word_embeddings else self.lm_head

    @property
    def output_head(self) -> Float[Array, "V D"] | Int8Array:
        """The output head in the dtype of computation, or in int8."""
        return in_dtype(self._head.get_value(), self.dtype)

    @property
    def operand_dtype(self) -> jnp.dtype:
        """The dtype of weights in products: the dtype of computation, or int8."""
        return jnp.dtype(jnp.int8) if is_int8(self._head.get_value()) else jnp.dtype(self.dtype)

    def logits(self, x: Float[Array, "B T D"]) -> Float32[Array, "B T V"]:
        """Logits from the result of `hidden`, or from a part of its tokens."""
        logits = linear_outputs_first(x, self.output_head)
        return constrain(logits.astype(jnp.float32), "batch", "length", "vocab")

    def with_head_rows(self, rows: int) -> "Transformer":
        """This model with logits of only `rows` rows of the head per token (see approximate_head.py); 0: all."""
        return ApproximateHead(self, rows) if 0 < rows < self.config.vocab_size else self

    def rounded(self, weights: str = "same", cache: str = "same") -> "Transformer":
        """The same model with weights or cache in int8, for decoding (see int8.py); rounded parts stay as they are.

        Args:
          weights: "same", "int8" or "int4", for weights of products; with int4, embeddings and experts are in int8.
          cache: "same", "int8" or "int4", for caches that decoders create.
        """
        if weights == cache == "same":
            return self
        graphdef, state = nnx.split(self)
        of = functools.partial(rounded_weight, weights=weights)
        state = jax.tree.map(of, state, is_leaf=lambda p: isinstance(p, nnx.Variable))
        model = nnx.merge(graphdef, state)
        for _, each in nnx.iter_modules(model):  # also of models inside this one
            if cache != "same" and isinstance(each, Transformer):
                each.cache_dtype = jnp.dtype(cache)
        return model

    def embedded(self, tokens: Int32[Array, "B T"]) -> Float[Array, "B T D"]:
        """The embeddings that the first layer reads."""
        c = self.config
        rows = jax.tree.map(lambda w: w[tokens], in_dtype(self.embed_tokens.get_value(), self.dtype))
        x = constrain(widened(rows, self.dtype), "batch", "length", None)
        return x * jnp.asarray(c.hidden_size**0.5, x.dtype) if FAMILIES[c.family].scaled_embedding else x

    def embedded_with(self, tokens: Int32[Array, "B T"], read: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """The embeddings of a text, plus another model's inputs of its output head, scaled to the same size."""
        return self.embedded(tokens) + self.config.hidden_size**-0.5 * read

    def through_layers(
        self, x: Float[Array, "B T D"], positions: Int32[Array, "B T"], attend: Callable, is_real: Any = None
    ) -> tuple[Float[Array, "B T D"], Any, Load | None]:
        """Runs the layers: (input of the final norm, what `attend` kept, stacked over layers, load summed over layers).

        `attend` is (q, k, v, number of the layer) -> ([B, T, N, H], what to keep of this layer). `is_real`, [B, T]
        bool, are the tokens that count for the load of experts; None: no load is computed.
        """
        c = self.config
        size = int(c.head_dim * c.partial_rotary_factor)
        rotations = [rope_rotation(positions, size, c.rope_theta, c.rope_scaling)]
        if c.local_rope:
            rotations.append(rope_rotation(positions, size, c.local_rope[0]))
        elif c.no_rope_layer_interval:
            cos, sin = rotations[0]
            rotations.insert(0, (jnp.ones_like(cos), jnp.zeros_like(sin)))
        kept, load = [], None
        stacks = [self.dense_layers, self.layers] if c.first_k_dense_replace else [self.layers]
        stacks = [part for stack in stacks for part in (stack if isinstance(stack, nnx.List) else [stack])]
        for layers in stacks:  # one or two stacks, but on one CPU one per layer: see one_cpu.py
            x, own, load = layers(x, rotations, attend, self.remat, self.quantization, is_real)
            kept.append(own)
        return x, jax.tree.map(lambda *parts: jnp.concatenate(parts), *kept), load

    def normed(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """The inputs of the output head, from the outputs of the layers."""
        return norm(x, self.final_norm[...].astype(self.dtype), self.config)


def rounded_weight(p: nnx.Variable, weights: str) -> nnx.Variable:
    """A weight, rounded as `Transformer.rounded` describes."""
    if weights == "same" or not p.summed or is_int8(p.get_value()):
        return p
    in_int4 = weights == "int4" and p.logical_axes[0] == "layers" and "experts" not in p.logical_axes
    kind = Int4Array if in_int4 else Int8Array
    return p.replace(kind.of(p.get_value(), [p.logical_axes.index(name) for name in p.summed]))


class Wrapper(Transformer):
    """A model that computes what the inner one does, except for what a subclass overrides; see `Transformer`."""

    def __init__(self, model: Transformer):
        self.model = model
        self.config, self.dtype, self.cache_dtype = model.config, model.dtype, model.cache_dtype
        self.head_rows = model.head_rows

    def hidden_and_load(self, *fed: Any) -> tuple[Float[Array, "B T D"], Load | None]:
        return self.model.hidden_and_load(*fed)

    def extend_hidden(self, *fed: Any) -> tuple[Float[Array, "_ _ D"], KeyValues]:
        return self.model.extend_hidden(*fed)

    def logits(self, x: Float[Array, "B T D"]) -> Float32[Array, "B T V"]:
        return self.model.logits(x)

    def empty_cache(self, rows: int, capacity: int) -> KeyValues:
        return self.model.empty_cache(rows, capacity)

    @property
    def weight_bytes(self) -> int:
        return self.model.weight_bytes

    @property
    def _head(self) -> nnx.Param:
        return self.model._head  # noqa: SLF001


class ApproximateHead(Wrapper):
    """A model with logits only for a few rows of the output head, chosen by its rounded copy; -inf for the others."""

    def __init__(self, model: Transformer, rows: int):
        super().__init__(model)
        self.head_rows = rows
        self.rounded_head = nnx.Param(rounded_head(model.output_head), logical_axes=("vocab", None), summed=())

    def logits(self, x: Float[Array, "B T D"]) -> Float32[Array, "B T V"]:
        return shortlisted_logits(x, self.output_head, self.rounded_head.get_value(), self.head_rows)


def logical_axes(model: Transformer) -> dict:
    """The logical axis names of every weight, as a tree of the same structure as the weights."""
    state = nnx.state(model, nnx.Param)
    return nnx.to_pure_dict(jax.tree.map(lambda p: p.logical_axes, state, is_leaf=lambda p: isinstance(p, nnx.Param)))
