"""The static-shape key/value cache of a batch of rows.

New keys and values are written right behind the committed ones: *committing is only advancing a counter*, and
throwing away is doing nothing.

Axes: B rows, L layers, C cache entries, P prompt tokens, T new tokens, K key/value heads, H head size, V vocabulary.
"""

import dataclasses

import jax
import jax.numpy as jnp

from refusion_jax.model.transformer import KeyValues, Transformer


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cache:
    """Keys and values of the committed tokens of every row; entries at or behind `length` mean nothing."""

    entries: KeyValues  # [L, B, C, K, H]
    length: jax.Array  # [B] int32, committed entries


def prefill(model: Transformer, prompts: jax.Array, lengths: jax.Array, capacity: int) -> Cache:
    """Computes the prompts' keys and values in one forward.

    Args:
      model: the transformer.
      prompts: [B, P] int32, padded on the right with anything.
      lengths: [B] int32, tokens of each prompt that count.
      capacity: C, entries a row; at least P.
    """
    B, P = prompts.shape
    c = model.config
    none = jnp.zeros((c.num_hidden_layers, B, 0, c.num_key_value_heads, c.head_dim), model.dtype)
    positions = jnp.broadcast_to(jnp.arange(P), (B, P))
    causal = jnp.broadcast_to(jnp.tril(jnp.ones((P, P), bool)), (B, P, P))
    _, new = model.extend(prompts, positions, KeyValues(none, none), causal)
    room = ((0, 0), (0, 0), (0, capacity - P), (0, 0), (0, 0))
    return Cache(jax.tree.map(lambda x: jnp.pad(x, room), new), lengths)


def extend(
    model: Transformer, cache: Cache, tokens: jax.Array, positions: jax.Array, visible: jax.Array
) -> tuple[jax.Array, Cache]:
    """One forward of T new tokens a row on top of the committed ones; their entries are written, not committed.

    Args:
      model: the transformer.
      cache: with room for T more entries in every row.
      tokens: [B, T] int32.
      positions: [B, T] int32, in the text.
      visible: [B, T, T] bool, which of the new tokens each new token sees. All see every committed entry.

    Returns:
      ([B, T, V] float32 logits, the cache with the new entries behind the committed ones).
    """
    B, T = tokens.shape
    C = cache.entries.keys.shape[2]
    committed = jnp.broadcast_to(jnp.arange(C)[None, None] < cache.length[:, None, None], (B, T, C))
    mask = jnp.concatenate([committed, visible], axis=2)
    logits, new = model.extend(tokens, positions, cache.entries, mask)
    write = jax.vmap(put, in_axes=(1, 1, 0), out_axes=1)  # over rows
    entries = jax.tree.map(lambda old, new: write(old, new, cache.length), cache.entries, new)
    return logits, Cache(entries, cache.length)


def put(buffer: jax.Array, values: jax.Array, at: jax.Array) -> jax.Array:
    """Writes values [L, T, ...] into a buffer [L, C, ...] of one row, from entry `at` on."""
    return jax.lax.dynamic_update_slice_in_dim(buffer, values, at, axis=1)


def commit(cache: Cache, count: jax.Array) -> Cache:
    """Keeps the first `count` [B] of the entries written last."""
    return Cache(cache.entries, cache.length + count)
