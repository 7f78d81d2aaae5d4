"""The layers of the transformer as functions of arrays: products and RoPE; and the declaration of a weight.

Axes: B rows, T tokens, D hidden size, N query heads, H head size, R of it that RoPE rotates.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental.layout import Layout, with_layout_constraint
from jaxtyping import Array, Float, Float32, Int32

from refusion_jax.distributed.sharding import constrain, device_kind_here, shard_count_here
from refusion_jax.model.int8 import Int8Array, factors, is_rounded


def weight(
    rngs: nnx.Rngs, shape: tuple[int, ...], axes: tuple[str, ...], std: float | None, summed: tuple[str, ...] = ()
) -> nnx.Param:
    """Declares one float32 weight, from which sharding, names, conversion and rounding follow.

    Args:
      rngs, shape: source of randomness, and shape of the weight.
      axes: a logical name per axis; `refusion_jax.distributed.sharding.RULES` maps each to mesh axes.
      std: standard deviation of the initial normal draw; None means ones (the scale of a norm).
      summed: names of the axes that its product sums over; empty if it is in no product.
    """
    if std is None:
        value = jnp.ones(shape, jnp.float32)
    else:
        value = std * jax.random.normal(rngs.params(), shape, jnp.float32)
    return nnx.Param(value, logical_axes=axes, summed=summed)


def linear(x: Float[Array, "..."], w: Float[Array, "..."] | Int8Array, inputs: int = 1) -> Float[Array, "..."]:
    """Contracts the last `inputs` axes of x with the first ones of w.

    The product is over flattened axes, [tokens, in] x [in, out]. That is free on every backend, and on CPU it saves XLA
    a strided copy of each operand of the weight gradient (MLP forward and backward are 2.5x faster).
    """
    w, scale = factors(w, x.dtype)
    size = math.prod(w.shape[:inputs])
    y = (_row_by_row(x) if inputs == 1 else x).reshape(-1, size) @ w.reshape(size, -1)
    y = y if scale is None else (y * scale.reshape(1, -1)).astype(x.dtype)
    return y.reshape(x.shape[:-inputs] + w.shape[inputs:])


@jax.custom_vjp
def _row_by_row(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Identity; on TPUs it forces a token-major layout in memory where gradients are computed from it.

    For the gradient of a weight XLA would put tokens innermost, and copy what was kept to that layout: 4 % of the time
    of a step of 8B on v6e:8x8, as compiled. If rows or heads are split, too, steps of a small model take 2 to 6 % more.
    """
    return x


def _laid_out(x: Float[Array, "..."]) -> tuple[Float[Array, "..."], None]:
    is_whole = shard_count_here("length") == shard_count_here("mlp") == 1
    if device_kind_here().startswith("TPU") and is_whole:
        x = with_layout_constraint(x, Layout(major_to_minor=tuple(range(x.ndim))))
    return x, None


_row_by_row.defvjp(_laid_out, lambda _, cotangent: (cotangent,))


_FEW_TOKENS = 64  # up to which a CPU multiplies faster with its operands swapped


def _cpu_width(tokens: int) -> int:
    """Tokens that a CPU multiplies as fast as these, or faster: 8 instead of 5 to 7, 16 instead of 9 to 15, and so on.

    59 M parameters times 7, 8, 12, 14 and 16 tokens take 15.8, 13.1, 19.6, 22.5 and 16.0 ms (2 virtual AMD EPYC cores).
    """
    if 4 < tokens < 8:
        return 8
    return tokens + -tokens % 16 if tokens % 16 > 8 else tokens


def linear_outputs_first(
    x: Float[Array, "..."], w: Float[Array, "..."] | Int8Array, inputs: int = 1
) -> Float[Array, "..."]:
    """Contracts the last `inputs` axes of x [tokens, in] with the last ones of w [out, in]: [tokens, out].

    For one token XLA for CPUs reads w once. For a few more the operands are swapped, because then products take half to
    0.9 of the time (2 virtual AMD EPYC cores); the barrier keeps XLA from swapping them back. With 256 tokens, swapped
    products would take 1.1 times as long.
    """
    w, scale = factors(w, x.dtype)
    outputs, size = w.shape[:-inputs], math.prod(w.shape[-inputs:])
    tokens, matrix = x.reshape(-1, size), w.reshape(-1, size)
    if device_kind_here() == "cpu" and 1 < len(tokens) <= _FEW_TOKENS:
        padded = jnp.pad(tokens, ((0, _cpu_width(len(tokens)) - len(tokens)), (0, 0)))
        y = jax.lax.optimization_barrier(matrix @ padded.T).T[: len(tokens)]
    else:
        y = tokens @ matrix.T
    y = y if scale is None else (y * scale.reshape(1, -1)).astype(x.dtype)
    return y.reshape(x.shape[:-inputs] + outputs)


def scattered_along_embed(w: Float[Array, "N H D"] | Int8Array) -> Float[Array, "N H D"] | Int8Array:
    """The same weight, constrained so that a mesh reduce-scatters its gradient along the last axis.

    XLA for TPUs scatters along the first axis only; for the last of three axes it would all-reduce the whole gradient.
    Rounded weights have no gradient and are left unchanged.
    """
    return w if is_rounded(w) else constrain(w.transpose(2, 0, 1), "embed", "heads", "head_dim").transpose(1, 2, 0)


Rotation = tuple[Float32[Array, "B T 1 half"], Float32[Array, "B T 1 half"]]  # cosines and sines of R / 2 angles


def rope_rotation(positions: Int32[Array, "B T"], size: int, theta: float, scaling: tuple[float, ...] = ()) -> Rotation:
    """Cosines and sines of the rotary angles (RoFormer, arXiv 2104.09864).

    Args:
      positions: of the tokens.
      size, theta: R, the part of a head that is rotated, and the base of the frequencies.
      scaling: none; (factor,), by which all frequencies are divided; or Llama 3's (factor, low_freq_factor,
        high_freq_factor, original_max_position_embeddings): a frequency that turns less than low_freq_factor times in
        the original length is divided by the factor, one that turns more than high_freq_factor times stays, with a
        linear transition in between.
    """
    frequencies = theta ** (-jnp.arange(0, size, 2, dtype=jnp.float32) / size)
    if len(scaling) == 1:
        frequencies = frequencies / scaling[0]
    elif scaling:
        factor, low, high, length = scaling
        kept = jnp.clip((length * frequencies / (2 * jnp.pi) - low) / (high - low), 0.0, 1.0)
        frequencies = kept * frequencies + (1 - kept) * frequencies / factor
    angles = positions[:, :, None, None].astype(jnp.float32) * frequencies[None, None, None]
    return jnp.cos(angles), jnp.sin(angles)


@jax.custom_vjp
def rotate(x: Float[Array, "B T N H"], rotation: Rotation) -> Float[Array, "B T N H"]:
    """Rotates the pairs (i, i + R/2) among the first R of each head (half-split, as Qwen3 does); computed in float32.

    Its gradient rotates back by the same function: autodiff would carry float32 through the copies between layouts.
    """
    cos, sin = rotation  # [B, T, 1, R / 2]
    rest = [(0, 0)] * 3 + [(0, x.shape[-1] - 2 * cos.shape[-1])]
    cos = jnp.pad(jnp.concatenate([cos, cos], axis=-1), rest, constant_values=1)
    sin = jnp.pad(jnp.concatenate([-sin, sin], axis=-1), rest)
    return (x.astype(jnp.float32) * cos + _swapped(x, rotation[0].shape[-1]) * sin).astype(x.dtype)


def _swapped(x: Float[Array, "B T N H"], half: int) -> Float[Array, "B T N H"]:
    """The other value of each pair.

    On TPUs by an exact product with a permutation, since concatenating parts of a head, which lie across lanes, copies
    them: that saves 2 to 4 % of a step of 8B on v6e, v5p and v5e, as compiled.
    """
    if device_kind_here().startswith("TPU"):
        order = np.r_[half : 2 * half, :half, 2 * half : x.shape[-1]]
        return jnp.matmul(x, jnp.eye(x.shape[-1], dtype=x.dtype)[order], precision=jax.lax.Precision.HIGHEST)
    first, second, rest = jnp.split(x, [half, 2 * half], axis=-1)
    return jnp.concatenate([second, first, rest], axis=-1)


rotate.defvjp(
    lambda x, rotation: (rotate(x, rotation), rotation),
    lambda rotation, cotangent: (rotate(cotangent, (rotation[0], -rotation[1])), None),
)
