"""Arrays in int8 and int4, for decoding, which is memory-bound: half the bytes of bfloat16, a quarter of float32.

Rounding is symmetric, with the largest magnitude as the scale (as in LLM.int8(), arXiv 2208.07339, for vectors).
Weights have a scale for every output channel, keys and values for every token and head. A scale is constant along the
axes that a product sums over, so int8 values enter the product converted to the dtype of computation, and the result is
multiplied by the scale. A converted copy is never stored.

Libraries such as qwix quantize products whose weight is a parameter of the same module; our weights are stacked over
layers and sliced by a scan.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Float32, Int8, UInt8

_LARGEST = 127.0
_LARGEST_INT4, _GROUP = 7, 32


@struct.dataclass
class Int8Array:
    """The array values * scale; axes of `values` that share a scale have size 1 in `scale`."""

    values: Int8[Array | jax.ShapeDtypeStruct, "..."]
    scale: Float32[Array | jax.ShapeDtypeStruct, "..."]

    @classmethod
    def of(cls, x: Float[Array, "..."], axes: Sequence[int]) -> "Int8Array":
        """Rounds x, with one scale for all elements along these axes."""
        return cls(*round_to(jnp.int8, x, tuple(axes)))

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape


@struct.dataclass
class Int4Array(Int8Array):
    """Integers from -7 to 7, with a scale per group along one axis: errors are up to 1/14 of a group's largest value.

    A byte holds two integers, from the same index in the first and the second half of the axis.
    """

    values: UInt8[Array | jax.ShapeDtypeStruct, "..."]
    axis: int = struct.field(pytree_node=False)  # counted from the end, below 0

    @classmethod
    def of(cls, x: Float[Array, "..."], axes: Sequence[int]) -> "Int4Array":
        """Rounds x along the last of these axes, whose size is even, in groups of 32 if that divides the size."""
        axis, size = axes[-1] % x.ndim - x.ndim, x.shape[axes[-1]]
        x = jnp.moveaxis(x, axis, -1).astype(jnp.float32)
        groups = x.reshape(*x.shape[:-1], -1, _GROUP if size % _GROUP == 0 else size)
        scale = jnp.maximum(jnp.max(jnp.abs(groups), axis=-1) / _LARGEST_INT4, jnp.finfo(jnp.float32).tiny)
        nibbles = (jnp.round(groups / scale[..., None]) + _LARGEST_INT4).astype(jnp.uint8).reshape(x.shape)
        first, second = jnp.split(nibbles, 2, axis=-1)
        return cls(*(jnp.moveaxis(part, -1, axis) for part in (first | second << 4, scale)), axis)

    def widened(self, dtype: jnp.dtype) -> Float[Array, "..."]:
        packed, scale = (jnp.moveaxis(part, self.axis, -1) for part in (self.values, self.scale))
        x = jnp.concatenate([packed & 15, packed >> 4], axis=-1).astype(jnp.float32) - _LARGEST_INT4
        x = (x.reshape(*scale.shape, -1) * scale[..., None]).reshape(x.shape)
        return jnp.moveaxis(x, -1, self.axis).astype(dtype)


def factors(x: "Array | Int8Array", dtype: jnp.dtype) -> tuple[Array, Float32[Array, "..."] | None]:
    """(operand of a product, factor of its result): for an array without a scale, (itself, None)."""
    if isinstance(x, Int4Array):  # its scales differ along the axes that are summed over
        return x.widened(dtype), None
    return (x.values.astype(dtype), x.scale) if isinstance(x, Int8Array) else (x, None)


def widened(x: "Array | Int8Array", dtype: jnp.dtype) -> Array:
    """A rounded array converted to another dtype; other arrays unchanged."""
    values, scale = factors(x, dtype)
    return values if scale is None else (values * scale).astype(dtype)


def in_dtype(weights: Any, dtype: jnp.dtype) -> Any:
    """A tree of weights in the dtype of computation, except rounded ones."""
    return jax.tree.map(lambda w: w if is_rounded(w) else w.astype(dtype), weights, is_leaf=is_rounded)


def is_rounded(x: Any) -> bool:
    """Whether x is an array in int8 or int4; for `is_leaf`."""
    return isinstance(x, Int8Array)


@functools.partial(jax.jit, static_argnames=("dtype", "axes"))
def round_to(dtype: jnp.dtype, x: Float[Array, "..."], axes: tuple[int, ...]) -> tuple[Array, Float32[Array, "..."]]:
    """(values, scale) of x in int8 or an eight-bit float: the largest magnitude along the axes becomes its largest."""
    largest = _LARGEST if dtype == jnp.int8 else float(jnp.finfo(dtype).max)
    x = x.astype(jnp.float32)
    # Never 0, so that zeros remain zeros: a CPU flushes numbers below `tiny` to 0.
    scale = jnp.maximum(jnp.max(jnp.abs(x), axis=axes, keepdims=True) / largest, jnp.finfo(jnp.float32).tiny)
    return (jnp.round(x / scale) if dtype == jnp.int8 else x / scale).astype(dtype), scale
