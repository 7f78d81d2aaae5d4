"""Packed rows of text, and the keys of the noise that an objective adds to them.

Axes: B rows, T row length.
"""

import dataclasses

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rows:
    """Packed rows of text: several documents a row, each one a prompt (may be empty) and then a response."""

    tokens: jax.Array  # [B, T] int32
    segment_ids: jax.Array  # [B, T] int32: 1, 2, ... by document, contiguous; 0 is padding, at the end
    is_response: jax.Array  # [B, T] bool


def row_index(x: jax.Array) -> jax.Array:
    """[B, T] int32: each token's place in its row."""
    return jax.lax.broadcasted_iota(jnp.int32, x.shape, 1)


def text_positions(segment_ids: jax.Array) -> jax.Array:
    """[B, T] int32: each token's place in its document, from 0."""
    index = row_index(segment_ids)
    starts = jnp.pad(segment_ids[:, 1:] != segment_ids[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    return index - jax.lax.cummax(jnp.where(starts, index, 0), axis=1)


def per_document_sum(x: jax.Array, segment_ids: jax.Array) -> jax.Array:
    """[B, T] int32: for every token the sum of x over its document."""
    T = x.shape[-1]

    def one_row(x, ids):
        return jax.ops.segment_sum(x.astype(jnp.int32), ids, num_segments=T + 1)[ids]

    return jax.vmap(one_row)(x, segment_ids)


def noise_keys(seed: int, step: jax.Array, batch_size: int) -> jax.Array:
    """[B] PRNG keys: a row's noise depends on (seed, step, its index in the global batch) and on nothing else."""
    step_key = jax.random.fold_in(jax.random.key(seed), step)
    return jax.vmap(jax.random.fold_in, in_axes=(None, 0))(step_key, jnp.arange(batch_size))
