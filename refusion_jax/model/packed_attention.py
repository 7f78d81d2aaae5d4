"""Attention over packed rows, by the kernel that suits the device and the visibility.

splash   TPU: the Pallas kernel of JAX (splash.py), where visibility follows a static pattern; skips the tiles in
         which no query sees a key, by the pattern and by the documents of the batch
triton   GPU: the flash attention of JAX in Pallas, for causal and bidirectional patterns; no [T, T] array,
         forward or backward
xla      everything else, in blocks of queries: [T, T] scores are never held for a whole row

All of them compute what `attention` does with `Visibility.mask`, the dense definition.

Axes: B rows, T row length, N query heads, K key/value heads, H head size.
"""

import warnings

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from refusion_jax.batch.visibility import BIDIRECTIONAL, CAUSAL, Visibility
from refusion_jax.distributed import sharding
from refusion_jax.model.attention import attention

# XLA computes blocks of queries with only those keys that their pattern lets any of them see. So causal rows of 512
# tokens take 53 ms forward and backward on two cores instead of 90. Blocks of 64 take 46, but twice as long to compile.
_QUERIES, _MOST_BLOCKS = 128, 8

_TILE = 128  # the least side of the tiles that splash works on, and the side of triton's
_HEAD_DIMS = (16, 32, 64, 128)  # that triton takes
# Sides of the tiles of its backward pass. On an H200, 8 rows of 2,048 tokens with 16 heads of 128: 2.2 ms forward and
# backward with 128, 2.8 with 64, 4.5 with 32 (JAX's default), which fits into the shared memory of any GPU.
_BACKWARD_TILES = {"9.0": 128}  # by compute capability; 9.0: H100 and H200
_SMALLEST_BACKWARD_TILE = 32


def backend_for(platform: str, length: int, head_dim: int, dtype: str) -> str:
    """The kernel for a platform ("tpu", "gpu", "cpu") if it supports these sizes; "xla" otherwise.

    `length` is that of the part of a row on one chip.
    """
    if length % _TILE:
        return "xla"
    if platform == "tpu":
        return "splash"
    if platform == "gpu" and head_dim in _HEAD_DIMS and dtype == "bfloat16":
        return "triton"
    return "xla"


def packed_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    visibility: Visibility,
    backend: str,
) -> Float[Array, "B T N H"]:
    """Attention of every token to the tokens that it sees; arrays and result are float32 or bfloat16.

    Of the backends, splash supports only patterns, and triton only two of them; everything else goes to xla.
    """
    if backend == "splash" and visibility.pattern:
        from refusion_jax.model import splash  # Pallas: 0.1 s that other devices need not wait for

        return splash.splash_attention(q, k, v, visibility)
    T, is_split = q.shape[1], sharding.shard_count_here("length") > 1
    if backend == "triton" and visibility.pattern in (CAUSAL, BIDIRECTIONAL) and not is_split:
        return triton_attention(q, k, v, visibility)

    def of_block(begin: int, end: int) -> Float[Array, "B {end-begin} N H"]:
        """Attention of some queries to the keys that any of them may see."""
        keys = slice(*visibility.pattern.key_range(T, begin, end)) if visibility.pattern else slice(0, T)
        mask = visibility.mask(slice(begin, end), keys)
        return attention(q[:, begin:end], k[:, keys], v[:, keys], mask)

    block = T if is_split else max(_QUERIES, -(-T // _MOST_BLOCKS))
    ends = [*range(block, T, block), T]
    return jnp.concatenate([of_block(begin, end) for begin, end in zip([0, *ends], ends, strict=False)], axis=1)


def triton_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    visibility: Visibility,
    backward_tile: int | None = None,
    interpret: bool = False,
) -> Float[Array, "B T N H"]:
    """`packed_attention` by the Triton kernel, on every chip's own rows and heads.

    cuDNN supports packed rows as well, but for a compiled number of documents per row with which its residuals grow,
    and only on Hopper and later; and JAX 0.10 computes wrong offsets for it if there are fewer key heads.

    The pattern is causal or bidirectional, and T a multiple of 128. `backward_tile` is the side of tiles of the
    backward pass; None: the fastest one known for the GPU at hand. `interpret` emulates the kernel, for tests.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # JAX 0.11 names tokamax as the kernel's new home
        from jax.experimental.pallas.ops.gpu import attention as kernel  # 0.5 s that other devices need not wait for

    groups, is_causal = q.shape[2] // k.shape[2], visibility.pattern == CAUSAL
    capability = getattr(jax.devices()[0], "compute_capability", "")
    tile = backward_tile or _BACKWARD_TILES.get(capability, _SMALLEST_BACKWARD_TILE)
    tiles = kernel.BlockSizes(_TILE, _TILE, tile, tile, tile, tile)

    def local(q, k, v, segments):
        k, v = (jnp.repeat(x, groups, axis=2) for x in (k, v))  # the kernel does not support groups of heads
        return kernel.mha(q, k, v, segments, q.shape[-1] ** -0.5, is_causal, tiles, interpret=interpret)

    heads, kv_heads = (sharding.spec("batch", None, axis, None) for axis in ("heads", "kv_heads"))
    specs = heads, kv_heads, kv_heads, sharding.spec("batch", None)
    return sharding.on_each_chip(local, specs, heads)(q, k, v, visibility.segment_ids)
