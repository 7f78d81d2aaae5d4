"""Attention by the flash kernel of JAX for Triton, on GPUs: of packed rows, without a [T, T] array.

Axes: B rows, T row length, N query heads, K key/value heads, H head size.
"""

import warnings

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from refusion_jax.batch.visibility import CAUSAL, Visibility
from refusion_jax.distributed import sharding

TILE = 128  # side of the tiles that the kernel works on
HEAD_DIMS = (16, 32, 64, 128)  # that it takes

# Sides of the tiles of the backward pass. On an H200, 8 rows of 2,048 tokens with 16 heads of 128: 2.2 ms forward and
# backward with 128, 2.8 with 64, 4.5 with 32 (JAX's default), which fits into the shared memory of any GPU.
_BACKWARD_TILES = {"9.0": 128}  # by compute capability; 9.0: H100 and H200
_SMALLEST_BACKWARD_TILE = 32


def triton_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    visibility: Visibility,
    backward_tile: int | None = None,
    interpret: bool = False,
) -> Float[Array, "B T N H"]:
    """`packed_attention` by the Triton kernel, on every chip's own rows and heads.

    cuDNN has packed rows as well, but for a number of documents a row that is compiled in and that its residuals grow
    with, on Hopper and later alone; and what JAX 0.10 makes of its offsets is wrong where key heads are fewer.

    The pattern is causal or bidirectional, and T a multiple of 128. `backward_tile` is the side of tiles of the
    backward pass; None: the fastest one known for the GPU at hand. `interpret` emulates the kernel, for tests.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # JAX 0.11 names tokamax as the kernel's new home
        from jax.experimental.pallas.ops.gpu import attention as kernel  # 0.5 s that other devices need not wait for

    groups, is_causal = q.shape[2] // k.shape[2], visibility.pattern == CAUSAL
    capability = getattr(jax.devices()[0], "compute_capability", "")
    tile = backward_tile or _BACKWARD_TILES.get(capability, _SMALLEST_BACKWARD_TILE)
    tiles = kernel.BlockSizes(TILE, TILE, tile, tile, tile, tile)

    def local(q, k, v, segments):
        k, v = (jnp.repeat(x, groups, axis=2) for x in (k, v))  # the kernel knows no groups of heads
        return kernel.mha(q, k, v, segments, q.shape[-1] ** -0.5, is_causal, tiles, interpret=interpret)

    rows, heads, kv_heads = (
        sharding.spec("batch", None),
        sharding.spec("batch", None, "heads", None),
        sharding.spec("batch", None, "kv_heads", None),
    )
    return sharding.on_each_chip(local, (heads, kv_heads, kv_heads, rows), heads)(q, k, v, visibility.segment_ids)
