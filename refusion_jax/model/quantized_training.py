"""Products in int8 or fp8, for training: twice the arithmetic of bfloat16, and a byte of each weight gathered.

TPUs of v5e, v5p and v6e are faster in int8, TPU7x and NVIDIA's chips since Hopper in fp8 (E4M3).

SwitchBack (arXiv 2304.13013, section 2.2): y = x W and the gradient of x are products of rounded arrays; the gradient
of W, a sum over all tokens, is computed from unrounded arrays. x and the gradient of y have a scale for every
token, W has one for every output; for the gradient of x, a sum over outputs, it is multiplied into the gradient of y
before that is rounded. The gradient of rounding is taken to be that of the identity.

Axes: n tokens, I inputs, O outputs.
"""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from refusion_jax.distributed.sharding import device_kind_here
from refusion_jax.model.int8 import round_to

DTYPES = {"int8": jnp.int8, "fp8": jnp.float8_e4m3fn}  # by config.quantization


def quantized_linear(
    x: Float[Array, "..."], w: Float[Array, "..."], rounded: tuple[Array, Float32[Array, "..."]], inputs: int
) -> Float[Array, "..."]:
    """`layers.linear` with a rounded weight: contracts the last `inputs` axes of x with the first ones of `rounded`.

    `rounded` is (values, scale) from `round_to`, with one scale for each output; w, the same weight in x's dtype, gets
    the gradient, and is not read.
    """
    size = math.prod(w.shape[:inputs])
    values, scale = rounded[0].reshape(size, -1), rounded[1].reshape(1, -1)
    y = _product(x.reshape(-1, size), w.reshape(size, -1), values, scale)
    return y.reshape(x.shape[:-inputs] + w.shape[inputs:])


@jax.custom_vjp
def _product(x: Float[Array, "n I"], w: Float[Array, "I O"], values: Array, scale: Array) -> Float[Array, "n O"]:
    return (_rounded_product(x, values, 0) * scale).astype(x.dtype)


def _backward(kept, dy):
    x, values, scale = kept
    dx = _rounded_product(dy.astype(jnp.float32) * scale, values, 1)
    return dx.astype(x.dtype), x.T @ dy, None, None


_product.defvjp(lambda x, w, values, scale: (_product(x, w, values, scale), (x, values, scale)), _backward)


def _rounded_product(x: Float[Array, "n _"], values: Array, axis: int) -> Float32[Array, "n _"]:
    """x, rounded token by token to the dtype of `values`, times `values`, whose `axis` is contracted.

    The sum of integers is exact in int32. CPUs, for whose narrow products XLA has no fast code, take float32: that is
    exact up to 1,040 terms.
    """
    x, scale = round_to(values.dtype, x, (1,))
    on_cpu, of_integers = device_kind_here() == "cpu", values.dtype == jnp.int8
    dtype, sums = (jnp.float32 if on_cpu else values.dtype), (jnp.int32 if of_integers and not on_cpu else jnp.float32)
    contracted = (((1,), (axis,)), ((), ()))
    y = jax.lax.dot_general(x.astype(dtype), values.astype(dtype), contracted, preferred_element_type=sums)
    return y.astype(jnp.float32) * scale
