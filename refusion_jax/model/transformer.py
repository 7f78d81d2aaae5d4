"""The transformer that every system shares, in Flax NNX; by default of Qwen3's shape (arXiv 2505.09388).

RMSNorm, grouped-query attention, RoPE (half-split rotation), SwiGLU, or a mixture of experts (experts.py). The family
(families.py) determines where the norms are, and which biases there are. The layers are those of stack.py.

Axes: B rows, T tokens of this forward pass, S keys it sees, L layers, D hidden size, N query heads, K key/value heads,
H head size, V vocabulary.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Float32, Int32

from refusion_jax.batch.batch import Batch, is_labelled
from refusion_jax.batch.folding import fold, fold_visibility, unfold
from refusion_jax.batch.visibility import Visibility
from refusion_jax.cli.errors import SettingError
from refusion_jax.distributed.sharding import RULES, constrain, shard_count, shard_count_here, sharding
from refusion_jax.model import packed_attention as packed
from refusion_jax.model.cross_entropy import linear_cross_entropy
from refusion_jax.model.experts import Load
from refusion_jax.model.families import FAMILIES
from refusion_jax.model.int8 import Int8Array, in_dtype, is_rounded, widened
from refusion_jax.model.interface import LanguageModel
from refusion_jax.model.key_values import KeyValues, attend_over
from refusion_jax.model.layers import linear_outputs_first, rope_rotation, weight
from refusion_jax.model.one_cpu import computed_after
from refusion_jax.model.ragged import Ragged
from refusion_jax.model.shape import ModelConfig
from refusion_jax.model.stack import Layers, norm


class Transformer(LanguageModel):
    """A decoder-only transformer.

    `remat` is one of `remat.REMAT_POLICIES`, `backend`, for packed rows, comes from `packed_attention.backend_for`, and
    `quantization`, of products with weights of layers in training (quantized_training.py), is "int8", "fp8" or "none".
    """

    target_model: "Transformer | None" = None  # in training, one whose hidden states are read: see `embedded_with`

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
        self.quantization, self.cache_dtype = quantization, self.dtype
        V, D = config.vocab_size, config.hidden_size
        self.embed_tokens = weight(rngs, (V, D), ("vocab", "embed"), D**-0.5, ("embed",))
        if dense := config.first_k_dense_replace:
            self.dense_layers = Layers(config, rngs, 0, dense)
        self.layers = Layers(config, rngs, dense, config.num_hidden_layers)
        self.final_norm = weight(rngs, (D,), ("norm",), 0.0 if FAMILIES[config.family].norm_offset else None)
        if not config.tie_word_embeddings:
            self.lm_head = weight(rngs, (V, D), ("vocab", "embed"), D**-0.5, ("embed",))

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

    def extend_hidden(
        self,
        tokens: Int32[Array, "B T"],
        positions: Int32[Array, "B T"],
        cached: KeyValues,
        length: Int32[Array, "B"],
        visible: Bool[Array, "B T T"],
        ragged: Ragged | None = None,
    ) -> tuple[Float[Array, "_ _ D"], KeyValues]:
        ragged = ragged or Ragged.whole(*tokens.shape)
        attend = attend_over(cached, length, visible, ragged)
        x, new, _ = self.through_layers(self.embedded(ragged.pack(tokens)), ragged.pack(positions), attend)
        return self.normed(x), new

    def hidden(self, *fed: Any) -> Float[Array, "B T D"]:
        return self.hidden_and_load(*fed)[0]

    def hidden_and_load(
        self, tokens: Int32[Array, "B T"], positions: Int32[Array, "B T"], visibility: Visibility
    ) -> tuple[Float[Array, "B T D"], Load | None]:
        """(the result of `hidden`, the load of the experts of all layers, if there are any)."""

        def attend(q, k, v, _):
            return packed.packed_attention(q, k, v, visibility, self.backend), None

        x = self.embedded(tokens)
        if self.target_model is not None:
            read = self.target_model.hidden(tokens, positions, visibility)
            x = jnp.where((visibility.group == 0)[:, :, None], self.embedded_with(tokens, read), x)
        x, _, load = self.through_layers(x, positions, attend, visibility.segment_ids > 0)
        return self.normed(x), load

    @property
    def weight_bytes(self) -> int:
        weights = nnx.to_pure_dict(nnx.state(self))
        if not self.config.tie_word_embeddings:
            del weights["embed_tokens"]
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(weights))

    @property
    def _head(self) -> nnx.Param:
        return self.embed_tokens if self.config.tie_word_embeddings else self.lm_head

    @property
    def output_head(self) -> Float[Array, "V D"] | Int8Array:
        return in_dtype(self._head.get_value(), self.dtype)

    @property
    def operand_dtype(self) -> jnp.dtype:
        return jnp.dtype(jnp.int8) if is_rounded(self._head.get_value()) else jnp.dtype(self.dtype)

    def logits(self, x: Float[Array, "B T D"]) -> Float32[Array, "B T V"]:
        logits = linear_outputs_first(x, self.output_head)
        return constrain(logits.astype(jnp.float32), "batch", "length", "vocab")

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
        if isinstance(self.layers, nnx.List):
            kept[-1] = computed_after(x, kept[-1])
        return x, jax.tree.map(lambda *parts: jnp.concatenate(parts), *kept), load

    def normed(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """The inputs of the output head, from the outputs of the layers."""
        return norm(x, self.final_norm[...].astype(self.dtype), self.config)


def logical_axes(model: Transformer) -> dict:
    """The logical axis names of every weight, as a tree of the same structure as the weights."""
    state = nnx.state(model, nnx.Param)
    return nnx.to_pure_dict(jax.tree.map(lambda p: p.logical_axes, state, is_leaf=lambda p: isinstance(p, nnx.Param)))


def abstract_transformer(
    config: ModelConfig,
    dtype: str,
    mesh: Mesh,
    flags: str = "mesh",
    head_rows: int = 0,
    weights: str = "same",
    cache: str = "same",
) -> tuple[nnx.GraphDef, dict[str, Any]]:
    """The structure of a model, and a `jax.ShapeDtypeStruct` of every weight with its sharding.

    SettingError, naming flags by the prefix `flags`, if the mesh cannot split a weight evenly; its devices may be
    abstract. `head_rows`, `weights` and `cache`: see `LanguageModel.with_head_rows` and `rounded`.
    """
    model = nnx.eval_shape(
        lambda: Transformer(config, nnx.Rngs(0), dtype).rounded(weights, cache).with_head_rows(head_rows)
    )
    graphdef, params = nnx.split(model)

    def place(x: Any, axes: Sequence[str | None], dtype: DTypeLike = dtype) -> Any:
        if is_rounded(x):
            of_scale = [axis if size > 1 else None for size, axis in zip(x.scale.shape, axes, strict=True)]
            return Int8Array(place(x.values, axes, jnp.int8), place(x.scale, of_scale, jnp.float32))
        for size, axis in zip(x.shape, axes, strict=True):
            if size % shard_count(mesh, axis):
                name = RULES[axis][0]
                raise SettingError(flags, name, mesh.shape[name], f"does not divide the model's {size} {axis}")
        return jax.ShapeDtypeStruct(x.shape, dtype, sharding=sharding(mesh, *axes))

    return graphdef, jax.tree.map(place, nnx.to_pure_dict(params), logical_axes(model), is_leaf=is_rounded)
