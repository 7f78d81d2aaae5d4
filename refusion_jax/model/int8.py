"""Arrays in int8, for decoding, which is bound by memory: half the bytes of bfloat16, a quarter of float32.

Rounding is symmetric, with the largest magnitude as the scale (as in LLM.int8(), arXiv 2208.07339, for vectors).
Weights have a scale for every output channel, keys and values for every token and head. A scale is constant along the
axes that a product sums over, so int8 values enter the product converted to the dtype of computation, and the result is
multiplied by the scale. A converted copy is never stored.

Libraries that quantize models, such as qwix, replace products with weights that are parameters of their own module;
ours are stacked over layers and sliced by a scan.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int8

_LARGEST = 127.0


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Int8Array:
    """The array values * scale; axes of `values` that share a scale have size 1 in `scale`."""

    values: Int8[Array | jax.ShapeDtypeStruct, "..."]
    scale: Float32[Array | jax.ShapeDtypeStruct, "..."]

    @classmethod
    def of(cls, x: Float[Array, "..."], axes: Sequence[int]) -> "Int8Array":
        """Rounds x, with one scale for all elements along these axes."""
        return cls(*_round(x, tuple(axes)))

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the values."""
        return self.values.shape


def factors(x: "Array | Int8Array", dtype: jnp.dtype) -> tuple[Array, Float32[Array, "..."] | None]:
    """(operand of a product, factor of its result): for an array without a scale, (itself, None)."""
    return (x.values.astype(dtype), x.scale) if isinstance(x, Int8Array) else (x, None)


def widened(x: "Array | Int8Array", dtype: jnp.dtype) -> Array:
    """An int8 array converted to another dtype; other arrays unchanged."""
    values, scale = factors(x, dtype)
    return values if scale is None else (values * scale).astype(dtype)


def in_dtype(weights: Any, dtype: jnp.dtype) -> Any:
    """A tree of weights in the dtype of computation, except those in int8."""
    return jax.tree.map(lambda w: w if is_int8(w) else w.astype(dtype), weights, is_leaf=is_int8)


def stored_like(x: Float[Array, "B T K H"], cached: "Array | Int8Array") -> "Array | Int8Array":
    """Keys or values in the format of a cache."""
    return Int8Array.of(x, [-1]) if is_int8(cached) else x


def is_int8(x: Any) -> bool:
    """Whether x is an array in int8; for `is_leaf`."""
    return isinstance(x, Int8Array)


@functools.partial(jax.jit, static_argnames="axes")
def _round(x, axes: tuple[int, ...]):
    x = x.astype(jnp.float32)
    scale = jnp.maximum(jnp.max(jnp.abs(x), axis=axes, keepdims=True), jnp.finfo(jnp.float32).tiny) / _LARGEST
    return jnp.round(x / scale).astype(jnp.int8), scale
