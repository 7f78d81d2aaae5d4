"""Keys and values of a cache, and attention of new tokens to them.

Axes: B rows, T new tokens of a row, S cached entries, L layers, N query heads, K key/value heads, H head size, Q tokens
of a tile.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int32

from refusion_jax.distributed import sharding
from refusion_jax.model.attention import cached_attention
from refusion_jax.model.int8 import Int4Array, Int8Array, is_rounded
from refusion_jax.model.ragged import Ragged
from refusion_jax.model.shape import ModelConfig

# Attention over a cache is compiled for all of its entries, a half and a quarter of them: most rows are far from full.
_KEY_COUNTS, _LEAST_KEYS = 3, 32
# Up to so many rows of a chip XLA keeps the scores on the chip: a forward pass of 8B on eight v5e moves 1.04 times its
# weights and cache (by the kernel 1.06), with 32 rows 4.07 times (1.16).
_ROWS_OF_XLA = 8
_MOST_NEW = 512  # most tokens of a row for the kernel: their mask and scores must fit into vector memory


@struct.dataclass
class KeyValues:
    """Keys and values of some tokens in all layers (inside the layer scan: in one, without the first axis).

    A forward pass returns those of its tokens, [L, B, T, K, H]. A cache holds them in the order in which attention
    multiplies them, [L, B, K, S, H]: decoding 48 rows with four heads is 7 to 11 % faster on a CPU than from the other.
    """

    keys: Float[Array, "*L B _ _ H"] | Int8Array
    values: Float[Array, "*L B _ _ H"] | Int8Array

    @classmethod
    def empty(cls, c: ModelConfig, dtype: jnp.dtype, rows: int, capacity: int) -> "KeyValues":
        """Empty cache entries, [L, B, K, C, H], with room for C tokens of every row."""
        shape = (c.num_hidden_layers, rows, c.num_key_value_heads, capacity, c.head_dim)
        zeros = jnp.zeros(shape, dtype)
        if dtype in (jnp.int8, jnp.int4):
            kind = Int8Array if dtype == jnp.int8 else Int4Array
            zeros = jax.tree.map(jnp.zeros_like, jax.eval_shape(lambda: kind.of(jnp.zeros(shape), [-1])))
        return cls(zeros, zeros)


def attend_over(
    cached: KeyValues, length: Int32[Array, "B"], visible: Bool[Array, "B T T"], ragged: Ragged, before: int = 0
) -> Callable:
    """Attention of the new tokens of one layer: (q, k, v, layer) -> (heads, the new keys and values as kept).

    q, k, v and the results are packed. `before` is the place of layer 0 in the cache; it is negative if the cache
    begins with a later layer. The other arguments are those of `LanguageModel.extend_hidden`.
    """
    if not is_for_kernel(cached.keys, ragged.width):
        return _by_parts(cached, length, visible, ragged, before)
    from refusion_jax.model import cache_kernel  # Pallas: 0.1 s that other devices need not wait for

    def attend(q, k, v, layer):
        rows = (ragged.spread(x) for x in (q, k, v))
        entries = cached.keys, cached.values, layer + before
        heads = cache_kernel.cache_attention(*rows, visible, *entries, length, ragged.fed)
        return ragged.pack(heads), KeyValues(k, v)

    return attend


def is_for_kernel(cached: Array, tokens: int) -> bool:
    """Whether to use cache_kernel.py, given this device, cached keys [L, B, K, S, H], and new tokens per row."""
    if not sharding.device_kind_here().startswith("TPU") or is_rounded(cached):
        return False
    rows = cached.shape[1] // sharding.shard_count_here("batch")
    return rows > _ROWS_OF_XLA and cached.shape[3] > 0 and tokens <= _MOST_NEW


def _by_parts(cached, length, visible, ragged, before: int) -> Callable:
    """Attention by XLA, over the smallest part of the cache that holds all rows."""
    sizes = key_counts(cached.keys.shape[3])
    enough = jnp.sum(jnp.max(length) > jnp.array(sizes[:-1], jnp.int32))  # index of the least that holds all rows
    is_cached = ragged.rows_of_tiles(jnp.arange(sizes[-1])[None] < length[:, None])  # [tiles, S]
    visible = ragged.tiles(ragged.pack(visible))  # [tiles, Q, T]

    def attend(q, k, v, layer):
        new = KeyValues(k, v)
        if is_rounded(cached.keys):
            new = jax.tree.map(lambda x: type(cached.keys).of(x, [-1]), new)
        q, seen = ragged.tiles(q), jax.tree.map(ragged.keys_of_tiles, new)

        def over(size):
            def take(x):
                # One slice for layer and size: a slice of the whole layer's entries would be read from memory first.
                x = jax.lax.dynamic_slice(x, (layer + before, 0, 0, 0, 0), (1, *x.shape[1:3], size, x.shape[4]))[0]
                return ragged.rows_of_tiles(x)  # [tiles, K, size, H]

            def run():
                # The layer is selected here, because passing its part of the cache into a branch would copy it.
                old = jax.tree.map(take, cached)
                return cached_attention(q, seen.keys, seen.values, visible, old.keys, old.values, is_cached[:, :size])

            return run

        heads = jax.lax.switch(enough, [over(size) for size in sizes])
        return heads.reshape(*k.shape[:2], *heads.shape[2:]), new

    return attend


def key_counts(capacity: int) -> list[int]:
    """The numbers of cached entries that attention may read, ascending; it reads the least that holds all rows."""
    return sorted({max(capacity >> i, min(_LEAST_KEYS, capacity)) for i in range(_KEY_COUNTS)})
