"""Attention over packed rows, by the kernel that suits the device and what is visible.

splash   TPU: the Pallas kernel of JAX (splash.py), where visibility follows a static pattern; skips the tiles that
         nobody sees, by the pattern and by the documents of the batch
triton   GPU: the flash attention of JAX in Pallas (triton.py), for causal and bidirectional patterns; no [T, T] array,
         forward or backward
xla      everything else, in blocks of queries: [T, T] scores are never held for a whole row

All of them compute what `attention` does with `Visibility.mask`, the dense definition.

Axes: B rows, T row length, N query heads, K key/value heads, H head size.
"""

import types

import jax.numpy as jnp
from jaxtyping import Array, Float

from refusion_jax.batch.visibility import BIDIRECTIONAL, CAUSAL, Visibility
from refusion_jax.distributed import sharding
from refusion_jax.model import triton
from refusion_jax.model.attention import attention

# Queries go to XLA in blocks that see only the keys that their pattern lets any of them see. Causal rows of 512 tokens
# so take 53 ms forward and backward on two cores instead of 90. Blocks of 64 take 46, but compile in twice the time.
_QUERIES, _MOST_BLOCKS = 128, 8


def backend_for(platform: str, length: int, head_dim: int, dtype: str) -> str:
    """The kernel for a platform ("tpu", "gpu", "cpu"), where it can do these sizes; "xla" otherwise.

    `length` is that of the part of a row that a chip has.
    """
    if platform == "tpu" and length % _splash().SMALLEST_TILE == 0:
        return "splash"
    if platform == "gpu" and length % triton.TILE == 0 and head_dim in triton.HEAD_DIMS and dtype == "bfloat16":
        return "triton"
    return "xla"


def packed_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    visibility: Visibility,
    backend: str,
) -> Float[Array, "B T N H"]:
    """Attention of every token to the tokens that it sees; arrays are float32 or bfloat16, as is what is returned.

    Of the backends splash serves patterns alone, triton two of them, and what they do not goes to xla.
    """
    if backend == "splash" and visibility.pattern:
        return _splash().splash_attention(q, k, v, visibility)
    T, is_split = q.shape[1], sharding.shard_count_here("length") > 1
    if backend == "triton" and visibility.pattern in (CAUSAL, BIDIRECTIONAL) and not is_split:
        return triton.triton_attention(q, k, v, visibility)

    def of_block(begin: int, end: int) -> Float[Array, "B {end-begin} N H"]:
        """Attention of some queries to the keys that any of them may see."""
        keys = slice(*visibility.pattern.key_range(T, begin, end)) if visibility.pattern else slice(0, T)
        mask = visibility.mask(slice(begin, end), keys)
        return attention(q[:, begin:end], k[:, keys], v[:, keys], mask)

    block = T if is_split else max(_QUERIES, -(-T // _MOST_BLOCKS))
    ends = [*range(block, T, block), T]
    return jnp.concatenate([of_block(begin, end) for begin, end in zip([0, *ends], ends, strict=False)], axis=1)


def _splash() -> types.ModuleType:
    from refusion_jax.model import splash  # Pallas: 0.1 s that other devices need not wait for

    return splash
