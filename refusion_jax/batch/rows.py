"""Packed rows of text, and the keys of the noise that an objective adds to them.

Axes: B rows, T row length.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Bool, Int, Int32, Key, Shaped


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rows:
    """Packed rows of text: several documents a row, each one a prompt (may be empty) and then a response."""

    tokens: Int32[ArrayLike, "B T"]
    segment_ids: Int32[ArrayLike, "B T"]  # 1, 2, ... by document, contiguous; 0 is padding, at the end
    is_response: Bool[ArrayLike, "B T"]


def row_index(x: Shaped[ArrayLike, "B T"]) -> Int32[Array, "B T"]:
    """Each token's place in its row."""
    return jax.lax.broadcasted_iota(jnp.int32, x.shape, 1)


def text_positions(segment_ids: Int32[ArrayLike, "B T"]) -> Int32[Array, "B T"]:
    """Each token's place in its document, from 0."""
    index = row_index(segment_ids)
    starts = jnp.pad(segment_ids[:, 1:] != segment_ids[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    return index - jax.lax.cummax(jnp.where(starts, index, 0), axis=1)


def per_document_sum(x: Shaped[Array, "B T"], segment_ids: Int32[ArrayLike, "B T"]) -> Shaped[Array, "B T"]:
    """For every token the sum of x over its document, in x's dtype; where that is bool, int32."""
    T = x.shape[-1]
    x = x.astype(jnp.int32) if x.dtype == bool else x

    def one_row(x, ids):
        return jax.ops.segment_sum(x, ids, num_segments=T + 1)[ids]

    return jax.vmap(one_row)(x, segment_ids)


def noise_keys(seed: int, step: Int[ArrayLike, ""], batch_size: int) -> Key[Array, "B"]:
    """A key a row, whose noise depends on (seed, step, its index in the global batch) and on nothing else."""
    step_key = jax.random.fold_in(jax.random.key(seed), step)
    return jax.vmap(jax.random.fold_in, in_axes=(None, 0))(step_key, jnp.arange(batch_size))
