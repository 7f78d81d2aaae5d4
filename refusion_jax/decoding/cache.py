"""The static-shape key/value cache of a batch of rows.

A forward pass writes the keys and values of its tokens right after the committed ones. Committing some of them only
advances a counter; dropping the others costs nothing, as the next forward pass overwrites them.

Axes: B rows, L layers, C cache entries, T new tokens, K key/value heads, H head size, V vocabulary; G prefixes, N masks
after each of them, W tokens and masks.
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.experimental.layout import Layout, with_layout_constraint
from jaxtyping import Array, Bool, Float32, Int32

from refusion_jax.decoding.requests import Given
from refusion_jax.decoding.sampling import entry
from refusion_jax.distributed.sharding import constrain, device_kind_here
from refusion_jax.model.interface import LanguageModel
from refusion_jax.model.key_values import KeyValues
from refusion_jax.model.shape import ModelConfig

_CPU_CHUNK, _SHORT_CHUNK = 64, 16  # most tokens per prefill forward on a CPU; for prompts up to 32 tokens


@struct.dataclass
class Cache:
    """Keys and values of the committed tokens of every row. Entries from index `length` on are unused."""

    entries: KeyValues  # C entries in each row
    length: Int32[Array, "B"]  # committed entries

    @classmethod
    def empty(cls, model: LanguageModel, rows: int, capacity: int) -> "Cache":
        """An empty cache; if there is a mesh, it is split over it by rows and heads."""
        return cls(split(model.empty_cache(rows, capacity)), jnp.zeros((rows,), jnp.int32))


def split(entries: KeyValues, rows: str | None = "batch") -> KeyValues:
    """Shards entries [L, B, K, C, H] over the mesh, if there is one; with rows=None all devices have all rows."""
    return jax.tree.map(lambda x: constrain(x, "layers", rows, "kv_heads", None, None), entries)


def stored(new: KeyValues) -> KeyValues:
    """The keys and values of a forward pass, [L, B, T, K, H], as a cache holds them, [L, B, K, T, H]."""
    return jax.tree.map(lambda x: x.swapaxes(2, 3), new)


def bytes_per_token(model: ModelConfig, dtype: jnp.dtype) -> int:
    """Bytes that one token of one row takes in a cache of this dtype."""
    entry = jax.eval_shape(lambda: KeyValues.empty(model, jnp.dtype(dtype), 1, 1))
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(entry))


def prefill(model: LanguageModel, given: Given, chunk_length: int, block_size: int = 1) -> Cache:
    """Fills a new cache with the keys and values of the given tokens, one chunk of tokens per forward.

    The cache has C entries, as there are [B, C] given tokens, padded on the right; keys and values in `given.entries`
    are copied, not computed. `chunk_length` is a multiple of the block size, at most C: see `tokens_at_once`. Attention
    is causal over blocks of `block_size` tokens, counted from the first.
    """
    B, C = given.tokens.shape
    T, first, cache = tokens_at_once(chunk_length, block_size), 0, Cache.empty(model, B, C)
    if given.entries:
        first, cache = given.known, Cache(split(given.entries), cache.length)

    def chunk(i, cache):
        # A last chunk that would reach beyond the cache begins earlier, and computes some entries again.
        at = jnp.minimum(first + i * T, C - T)
        tokens, positions = (jax.lax.dynamic_slice_in_dim(x, at, T, 1) for x in (given.tokens, given.positions))
        index = (at + jnp.arange(T))[None]
        visible = index[:, :, None] // block_size >= index[:, None] // block_size
        if block_size > 1:  # the tokens of a last, incomplete block do not see the padding after them
            visible &= (index < given.length[:, None])[:, None]
        _, cache = extend(model, Cache(cache.entries, jnp.full((B,), at)), tokens, positions, visible)
        return cache

    chunks = (jnp.max(given.length) - first + T - 1) // T
    cache = jax.lax.fori_loop(0, chunks, chunk, cache)
    return Cache(cache.entries, given.length)


def tokens_at_once(chunk_length: int, block_size: int = 1, masks: int = 0) -> int:
    """Tokens per forward of a prefill in chunks of at most `chunk_length`, a multiple of the block size.

    On a CPU padding takes as much time as tokens. On one core SmolLM2-135M takes 0.75 s for a prompt of 100 tokens in a
    chunk of 256, and 0.33 s in two of 64; for one of 500 tokens 1.58 s and 1.40 s. Short chunks are as long as a CPU
    multiplies at once, together with the `masks` after the last one: with 59 M parameters on two cores prompts of 17 to
    24 tokens take 49 ms as 16 and 8 with 8 masks, and 34 at once.
    """
    most = _CPU_CHUNK if chunk_length > 2 * _SHORT_CHUNK else _SHORT_CHUNK + -masks % _SHORT_CHUNK
    most = max(most // block_size, 1) * block_size
    return min(chunk_length, most) if device_kind_here() == "cpu" else chunk_length


def prefill_but_last(model: LanguageModel, given: Given, chunk_length: int) -> tuple[Cache, Int32[Array, "B"]]:
    """(cache of all given tokens but the last, the last token), which the first pass of the decoding loop takes."""
    last = entry(given.tokens, given.length - 1)
    return Cache(prefill(model, given, chunk_length).entries, given.length - 1), last


def extend(
    model: LanguageModel,
    cache: Cache,
    tokens: Int32[Array, "B T"],
    positions: Int32[Array, "B T"],
    visible: Bool[Array, "#B T T"] | None = None,
) -> tuple[Float32[Array, "B T V"], Cache]:
    """A forward pass of T new tokens of each row on top of the committed ones: (logits, the cache with their entries).

    The new entries are written after the committed ones, where each row has room for T, but not committed. New tokens
    attend to every committed entry, and to the `visible` new ones, by default themselves and those before them.
    """
    B, T = tokens.shape
    visible = jnp.tril(jnp.ones((1, T, T), bool)) if visible is None else visible
    visible = jnp.broadcast_to(visible, (B, T, T))
    logits, new = model.extend(tokens, positions, cache.entries, cache.length, visible)
    return logits, write(cache, new)


def visible_to_masks(tokens: int, seen: Int32[Array, "B G"], N: int, slot_size: int) -> Bool[Array, "B W W"]:
    """The attention mask of causal tokens and N masks for each of G prefixes, in slots that do not see each other.

    `seen` is the index of the last token that the masks of each prefix see.
    """
    B, G = seen.shape
    index = np.arange(G * N)
    slot = index // N * N + index % N // slot_size  # numbered across prefixes
    own = (slot[:, None] == slot[None]) & (index[None] <= index[:, None])
    corner = np.zeros((tokens + G * N, tokens + G * N), bool)
    corner[:tokens, :tokens], corner[tokens:, tokens:] = np.tri(tokens, dtype=bool), own
    before = jnp.arange(tokens)[None, None] <= jnp.repeat(seen, N, axis=1)[:, :, None]
    return jnp.broadcast_to(jnp.array(corner), (B, *corner.shape)).at[:, tokens:, :tokens].set(before)


def write(cache: Cache, new: KeyValues) -> Cache:
    """Writes the keys and values of a forward pass, [L, B, T, K, H], after the committed ones, in place."""
    # This scatter states that rows are independent and indices in bounds. A vmapped dynamic_update_slice clamps its
    # indices instead, and XLA then copies the whole cache (seen on CPU).
    windows = jax.lax.ScatterDimensionNumbers(
        update_window_dims=(0, 2, 3, 4),
        inserted_window_dims=(),
        scatter_dims_to_operand_dims=(3,),
        operand_batching_dims=(1,),
        scatter_indices_batching_dims=(0,),
    )

    def put(entries, new):
        # Otherwise XLA gives the cache the layout of one new token per row, and a TPU copies all of it in every pass.
        new = with_layout_constraint(new, Layout(tuple(range(new.ndim))))
        return jax.lax.scatter(
            entries, cache.length[:, None], new, windows, unique_indices=True, mode="promise_in_bounds"
        )

    return Cache(jax.tree.map(put, cache.entries, stored(new)), cache.length)


def commit(cache: Cache, count: Int32[Array, "B"]) -> Cache:
    """Commits the first `count` of the entries that were written last."""
    return Cache(cache.entries, cache.length + count)
