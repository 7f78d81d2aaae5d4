"""Attention by the flash kernel of JAX for Triton, on GPUs: of packed rows, without a [T, T] array.

Axes: B rows, T row length, N query heads, K key/value heads, H head size.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float

from refusion_jax.batch.visibility import CAUSAL, Visibility
from refusion_jax.distributed import sharding

TILE = 128  # side of the tiles that the kernel works on
HEAD_DIMS = (16, 32, 64, 128)  # that it takes


def triton_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    visibility: Visibility,
    interpret: bool = False,
) -> Float[Array, "B T N H"]:
    """`packed_attention` by the Triton kernel, on every chip's own rows and heads.

    cuDNN has packed rows as well, but for a number of documents a row that is compiled in and that its residuals grow
    with, on Hopper and later alone; and what JAX 0.10 makes of its offsets is wrong where key heads are fewer.

    Args:
      q, k, v, visibility: as for `packed_attention`, with a causal or bidirectional pattern; T a multiple of 128.
      interpret: emulate the kernel on another platform, for tests.
    """
    from jax.experimental.pallas.ops.gpu import attention as kernel  # 0.5 s that other devices need not wait for

    groups, is_causal = q.shape[2] // k.shape[2], visibility.pattern == CAUSAL

    def local(q, k, v, segments):
        k, v = (jnp.repeat(x, groups, axis=2) for x in (k, v))  # the kernel knows no groups of heads
        return kernel.mha(q, k, v, segments, sm_scale=q.shape[-1] ** -0.5, causal=is_causal, interpret=interpret)

    rows, heads, kv_heads = (
        sharding.spec("batch", None),
        sharding.spec("batch", None, "heads", None),
        sharding.spec("batch", None, "kv_heads", None),
    )
    return sharding.on_each_chip(local, (heads, kv_heads, kv_heads, rows), heads)(q, k, v, visibility.segment_ids)
