"""Layers of one kind: their stacked weights, and the scan over them, whose compile time does not grow with depth.

Axes: B rows, T tokens, L layers, D hidden size, N query heads, K key/value heads, H head size, F mlp size, E experts.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float

from refusion_jax.distributed.sharding import constrain
from refusion_jax.model.experts import Load, mixture
from refusion_jax.model.families import FAMILIES
from refusion_jax.model.int8 import in_dtype, round_to
from refusion_jax.model.layers import Rotation, linear, linear_outputs_first, rotate, scattered_along_embed, weight
from refusion_jax.model.quantized_training import DTYPES, quantized_linear
from refusion_jax.model.remat import GATE, INPUT, PROJECTION, REMAT_POLICIES, UP, WITHOUT_GATHERED
from refusion_jax.model.shape import ModelConfig


def norm(x: Float[Array, "*axes D"], scale: Float[Array, "D"], c: ModelConfig) -> Float[Array, "*axes D"]:
    """The RMSNorm of a model, x / rms(x) * (scale + offset) over the last axis; computed in float32."""
    x32, scale = x.astype(jnp.float32), jnp.expand_dims(scale, range(x.ndim - 1))
    x32 = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + c.rms_norm_eps)
    if offset := FAMILIES[c.family].norm_offset:  # in bfloat16 the sum would be off by up to 0.4 %
        return (x32 * (scale.astype(jnp.float32) + offset)).astype(x.dtype)
    return x32.astype(x.dtype) * scale


class Layers(nnx.Module):
    """The weights of layers `first` to below `end`, stacked: every array begins with the `layers` axis.

    They have experts if the first one has.
    """

    outputs_first = False  # see `put_outputs_first`

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs, first: int, end: int):
        self.config, self.first, self.end = config, first, end
        L, D = end - first, config.hidden_size
        N, K, H = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        residual = (2 * config.num_hidden_layers) ** -0.5  # the residual stream sums the outputs of two blocks a layer
        family = FAMILIES[config.family]
        scale = 0.0 if family.norm_offset else None
        for name in family.norms:
            setattr(self, name, weight(rngs, (L, D), ("layers", "norm"), scale))
        self.q_proj = weight(rngs, (L, D, N, H), ("layers", "embed", "heads", "head_dim"), D**-0.5, ("embed",))
        self.k_proj = weight(rngs, (L, D, K, H), ("layers", "embed", "kv_heads", "head_dim"), D**-0.5, ("embed",))
        self.v_proj = weight(rngs, (L, D, K, H), ("layers", "embed", "kv_heads", "head_dim"), D**-0.5, ("embed",))
        if family.qkv_bias:
            self.q_bias = weight(rngs, (L, N, H), ("layers", "heads", "bias"), 0.0)
            self.k_bias = weight(rngs, (L, K, H), ("layers", "kv_heads", "bias"), 0.0)
            self.v_bias = weight(rngs, (L, K, H), ("layers", "kv_heads", "bias"), 0.0)
        if family.qk_norm:
            every = family.qk_norm == "all"
            self.q_norm = weight(rngs, (L, N * H if every else H), ("layers", "norm"), scale)
            self.k_norm = weight(rngs, (L, K * H if every else H), ("layers", "norm"), scale)
        self.o_proj = weight(
            rngs, (L, N, H, D), ("layers", "heads", "head_dim", "embed"), residual * (N * H) ** -0.5,
            ("heads", "head_dim"),
        )  # fmt: skip

        def add_mlp(kind: str, F: int, leading=(L,), axes=("layers",), embed="embed"):
            into, out = ((*leading, D, F), (*axes, embed, "mlp")), ((*leading, F, D), (*axes, "mlp", embed))
            setattr(self, f"{kind}gate_proj", weight(rngs, *into, D**-0.5, (embed,)))
            setattr(self, f"{kind}up_proj", weight(rngs, *into, D**-0.5, (embed,)))
            setattr(self, f"{kind}down_proj", weight(rngs, *out, residual * F**-0.5, ("mlp",)))

        E, F, shared = config.num_experts, config.moe_intermediate_size, config.num_shared_experts
        if not E or first < config.first_k_dense_replace:
            add_mlp("", config.intermediate_size)
        else:
            self.router = weight(rngs, (L, D, E), ("layers", "embed", None), D**-0.5)
            add_mlp("", F, (L, E), ("layers", "experts"), "expert_embed")
            if shared:
                add_mlp("shared_", shared * F)
            if family.router == "sigmoid":
                self.expert_bias = weight(rngs, (L, E), ("layers", "bias"), 0.0)

    def __call__(
        self,
        x: Float[Array, "B T D"],
        rotations: Sequence[Rotation],
        attend: Callable,
        remat: str,
        quantization: str,
        is_real: Bool[Array, "B T"] | None,
    ) -> tuple[Float[Array, "B T D"], Any, Load | None]:
        """Runs the layers one after the other, as `Transformer.through_layers` says, in the dtype of x.

        With two rotary embeddings, every n-th layer uses the first one, all others the second.
        """

        def layer(x, inputs):
            w, number = inputs
            x = checkpoint_name(x, INPUT)
            h, kept = self._attention(self._normed(x, w, "attention_norm"), w, number, rotations, attend)
            x = x + self._normed(h, w, "post_attention_norm")
            h, load = self._mixture_or_mlp(self._normed(x, w, "mlp_norm"), w, is_real)
            x = x + self._normed(h, w, "post_mlp_norm")
            return constrain(x, "batch", "length", None), (kept, load)

        if policy := REMAT_POLICIES[remat] or (self.config.num_experts and WITHOUT_GATHERED):
            layer = jax.checkpoint(layer, policy=policy, prevent_cse=False)  # the scan already prevents it
        own = nnx.to_pure_dict(nnx.state(self))
        exact = {name: own[name] for name in ("router", "expert_bias") if name in own}
        weights = in_dtype(own, x.dtype) | in_dtype(exact, jnp.float32)
        if dtype := DTYPES.get(quantization):  # once per step: the maxima of all layers cross a mesh together
            weights |= {f"{name}_rounded": self._rounded(name, dtype) for name in own if getattr(self, name).summed}
        x, (kept, load) = jax.lax.scan(layer, x, (weights, jnp.arange(self.first, self.end)))
        return x, kept, jax.tree.map(functools.partial(jnp.sum, axis=0), load)

    # The parts of one layer, whose weights are w, by name.

    def _normed(self, x, w, name):
        """x after the norm of this name, if the layers have it."""
        return norm(x, w[name], self.config) if name in w else x

    def _attention(self, h, w, number, rotations, attend):
        """(the output of attention, what `attend` kept)."""
        c, turn = self.config, rotations[0]
        if len(rotations) > 1:
            every = c.no_rope_layer_interval or c.local_rope[1]
            turn = jax.tree.map(functools.partial(jnp.where, (number + 1) % every == 0), *rotations)
        q, k = (rotate(self._heads(h, w, name), turn) for name in "qk")  # [B, T, N, H], [B, T, K, H]
        heads, kept = attend(q, k, self._heads(h, w, "v"), number)
        if not self.outputs_first:
            w = w | {"o_proj": scattered_along_embed(w["o_proj"])}
        return checkpoint_name(self._product(heads, w, "o_proj", inputs=2), PROJECTION), kept

    def _heads(self, h, w, name):
        """Queries, keys or values of all heads, [B, T, heads, H]."""
        c, family = self.config, FAMILIES[self.config.family]
        x = checkpoint_name(self._product(h, w, f"{name}_proj"), PROJECTION)
        if family.qkv_bias:
            x = x + w[f"{name}_bias"][None, None]
        if family.qk_norm and name != "v":
            scale = w[f"{name}_norm"]
            x = norm(x.reshape(*x.shape[:2], -1, *scale.shape), scale, c).reshape(x.shape)
        query_scale = (c.head_dim / (c.query_pre_attn_scalar or c.head_dim)) ** 0.5
        return x * query_scale if name == "q" and query_scale != 1 else x

    def _mixture_or_mlp(self, h, w, is_real):
        """(the output of the experts, shared ones included, or else of the MLP; the load of the experts)."""
        activation = jax.nn.silu if "silu" in FAMILIES[self.config.family].activation.values() else jax.nn.gelu

        def mlp(kind=""):
            gate = checkpoint_name(self._product(h, w, f"{kind}gate_proj"), GATE)
            up = checkpoint_name(self._product(h, w, f"{kind}up_proj"), UP)
            return self._product(activation(gate) * up, w, f"{kind}down_proj")

        if "router" not in w:
            return mlp(), None
        routed, load = mixture(h, w, self.config, activation, is_real)
        return routed + mlp("shared_") if "shared_gate_proj" in w else routed, load

    def _product(self, x, w, name, inputs=1):
        """x times a weight, rounded in quantized training, plus its adapter if there is one."""
        if self.outputs_first:
            y = linear_outputs_first(x, w[name], inputs)
        else:
            rounded = w.get(f"{name}_rounded")
            y = quantized_linear(x, w[name], rounded, inputs) if rounded else linear(x, w[name], inputs)
        if f"{name}_a" not in w:
            return y
        return y + self.lora_scale * linear(linear(x, w[f"{name}_a"], inputs), w[f"{name}_b"])

    def cut(self, first: int, end: int) -> "Layers":
        """The layers `first` to `end` - 1, by their numbers, copied."""
        graphdef, state = nnx.split(self)
        part = nnx.merge(graphdef, jax.tree.map(lambda x: x[first - self.first : end - self.first], state))
        part.first, part.end = first, end
        return part

    def put_outputs_first(self) -> None:
        """Transposes the weights of dense products, so that the axes that are summed over come last."""
        for name, p in list(vars(self).items()):
            if isinstance(p, nnx.Param) and p.summed and "experts" not in p.logical_axes:
                order = sorted(range(len(p.logical_axes)), key=lambda axis: p.logical_axes[axis] in p.summed)
                value = jax.tree.map(lambda x, order=order: x.transpose(order), p.get_value())
                setattr(self, name, p.replace(value, logical_axes=tuple(p.logical_axes[axis] for axis in order)))
        self.outputs_first = True

    def _rounded(self, name: str, dtype: jnp.dtype) -> tuple[Array, Array]:
        """A weight rounded to int8 or fp8: (values, a scale for every output)."""
        w = getattr(self, name)
        axes = tuple(w.logical_axes.index(axis) for axis in w.summed)
        return round_to(dtype, jax.lax.stop_gradient(w.get_value()), axes)
