"""Products in int8, for training: twice the arithmetic of bfloat16 on v5e, v5p and v6e; a byte of each weight gathered.

SwitchBack (arXiv 2304.13013, section 2.2): y = x W and the gradient of x are products of int8 arrays; the gradient of
W, a sum over all tokens, is computed from what was not rounded. x and the gradient of y have a scale for every token, W
has one for every output; for the gradient of x, a sum over outputs, it is multiplied into the gradient of y before that
is rounded. The gradient of rounding is taken to be that of the identity.

Axes: n tokens, I inputs, O outputs.
"""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from refusion_jax.distributed.sharding import device_kind_here
from refusion_jax.model.int8 import Int8Array


def int8_linear(x: Float[Array, "..."], w: Float[Array, "..."], rounded: Int8Array, inputs: int) -> Float[Array, "..."]:
    """`layers.linear` with a rounded weight: contracts the last `inputs` axes of x with the first ones of `rounded`.

    That has one scale for each output; w, the same weight in x's dtype, gets the gradient, and is not read.
    """
    size = math.prod(w.shape[:inputs])
    values, scale = rounded.values.reshape(size, -1), rounded.scale.reshape(1, -1)
    y = _product(x.reshape(-1, size), w.reshape(size, -1), values, scale)
    return y.reshape(x.shape[:-inputs] + w.shape[inputs:])


@jax.custom_vjp
def _product(x: Float[Array, "n I"], w: Float[Array, "I O"], values: Array, scale: Array) -> Float[Array, "n O"]:
    return (_rounded_product(x, values, 0) * scale).astype(x.dtype)


def _forward(x, w, values, scale):
    return _product(x, w, values, scale), (x, values, scale)


def _backward(kept, dy):
    x, values, scale = kept
    dx = _rounded_product(dy.astype(jnp.float32) * scale, values, 1)
    return dx.astype(x.dtype), x.T @ dy, None, None


_product.defvjp(_forward, _backward)


def _rounded_product(x: Float[Array, "n _"], values: Array, axis: int) -> Float[Array, "n _"]:
    """x, rounded token by token, times int8 values whose `axis` is contracted, in float32.

    The sum is exact in int32. CPUs, for whose int8 products XLA has no fast code, take float32: exact up to 1,040
    terms.
    """
    x = Int8Array.of(x, [1])
    dtype, sums = (jnp.float32, jnp.float32) if device_kind_here() == "cpu" else (jnp.int8, jnp.int32)
    contracted = (((1,), (axis,)), ((), ()))
    y = jax.lax.dot_general(x.values.astype(dtype), values.astype(dtype), contracted, preferred_element_type=sums)
    return y.astype(jnp.float32) * x.scale
