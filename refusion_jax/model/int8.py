"""Arrays in int8, for decoding: half the bytes of bfloat16, a quarter of float32, where a forward waits for memory.

Symmetric rounding with the largest magnitude as its scale (LLM.int8(), arXiv 2208.07339, has the same for vectors): a
weight has a scale for every output channel, a key or value one for every token and head. A scale is constant along the
axes that a product sums over. So int8 values enter the product as they are, widened to the dtype of computation, and
the scale multiplies what comes out: a widened copy is never kept.

Libraries that quantize a model, such as qwix, replace the products of weights that are parameters of a module of their
own; ours are stacked over layers and sliced by a scan.
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
    """values * scale; every axis of `values` that shares a scale has size 1 in `scale`."""

    values: Int8[Array | jax.ShapeDtypeStruct, "..."]
    scale: Float32[Array | jax.ShapeDtypeStruct, "..."]

    @classmethod
    def of(cls, x: Float[Array, "..."], axes: Sequence[int]) -> "Int8Array":
        """Rounds x, with one scale for all that these axes span."""
        return cls(*_round(x, tuple(axes)))

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the values."""
        return self.values.shape


def factors(x: "Array | Int8Array", dtype: jnp.dtype) -> tuple[Array, Float32[Array, "..."] | None]:
    """(what enters a product, what to multiply its outcome by): an array without a scale enters as it is."""
    return (x.values.astype(dtype), x.scale) if isinstance(x, Int8Array) else (x, None)


def widened(x: "Array | Int8Array", dtype: jnp.dtype) -> Array:
    """An int8 array in another dtype; any other array as it is."""
    values, scale = factors(x, dtype)
    return values if scale is None else (values * scale).astype(dtype)


def in_dtype(weights: Any, dtype: jnp.dtype) -> Any:
    """A tree of weights in the dtype of computation, but for those in int8."""
    return jax.tree.map(lambda w: w if is_int8(w) else w.astype(dtype), weights, is_leaf=is_int8)


def stored_like(x: Float[Array, "B T K H"], cached: "Array | Int8Array") -> "Array | Int8Array":
    """Keys or values as a cache keeps them."""
    return Int8Array.of(x, [-1]) if is_int8(cached) else x


def is_int8(x: Any) -> bool:
    """Whether it is an array in int8; for `is_leaf`."""
    return isinstance(x, Int8Array)


@functools.partial(jax.jit, static_argnames="axes")
def _round(x, axes: tuple[int, ...]):
    x = x.astype(jnp.float32)
    scale = jnp.maximum(jnp.max(jnp.abs(x), axis=axes, keepdims=True), jnp.finfo(jnp.float32).tiny) / _LARGEST
    return jnp.round(x / scale).astype(jnp.int8), scale
