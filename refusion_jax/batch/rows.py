"""Packed rows of text, and the keys of an objective's noise.

Axes: B rows, T row length.
"""

import zlib

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, ArrayLike, Bool, Float, Int, Int32, Key, Shaped


@struct.dataclass
class Rows:
    """Packed rows of text: several documents a row, each a prompt, which may be empty, followed by a response."""

    tokens: Int32[ArrayLike, "B T"]
    segment_ids: Int32[ArrayLike, "B T"]  # 1, 2, ... by document, contiguous; 0 is padding, at the end
    is_response: Bool[ArrayLike, "B T"]


def row_index(x: Shaped[ArrayLike, "B T"]) -> Int32[Array, "B T"]:
    """The index of each token in its row."""
    return jax.lax.broadcasted_iota(jnp.int32, x.shape, 1)


def document_start(segment_ids: Int32[ArrayLike, "B T"]) -> Int32[Array, "B T"]:
    """The index in the row of the first token of each token's document."""
    is_first = jnp.pad(segment_ids[:, 1:] != segment_ids[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    return jax.lax.cummax(jnp.where(is_first, row_index(segment_ids), 0), axis=1)


def text_positions(segment_ids: Int32[ArrayLike, "B T"]) -> Int32[Array, "B T"]:
    """The position of each token in its document, from 0."""
    return row_index(segment_ids) - document_start(segment_ids)


def next_in_row(x: Shaped[Array, "B T"]) -> Shaped[Array, "B T"]:
    """The value of the next token at each token; 0 at the end of the row."""
    return jnp.pad(x[:, 1:], ((0, 0), (0, 1)))


def join(*streams: Shaped[Array, "B _"]) -> Shaped[Array, "B _"]:
    """Rows that hold several streams, one after the other."""
    return jnp.concatenate(streams, axis=1)


def decayed_sum(x: Float[Array, "B T"], keep: Float[Array, "B T"]) -> Float[Array, "B T"]:
    """s with s_n = keep_n s_(n-1) + x_n along each row."""

    def after(first, then):
        return first[0] * then[0], first[1] * then[0] + then[1]

    return jax.lax.associative_scan(after, (keep, x), axis=1)[1]


def precedes_response(rows: Rows) -> Bool[Array, "B T"]:
    """Which tokens have a response token of the same document right after them, to be labelled with it."""
    return next_in_row(rows.is_response) & (next_in_row(rows.segment_ids) == rows.segment_ids)


def per_document_sum(x: Shaped[Array, "B T"], segment_ids: Int32[ArrayLike, "B T"]) -> Shaped[Array, "B T"]:
    """The sum of x over the document of each token, in the dtype of x (int32 for bool)."""
    T = x.shape[-1]
    x = x.astype(jnp.int32) if x.dtype == bool else x
    return jax.vmap(lambda x, ids: jax.ops.segment_sum(x, ids, num_segments=T + 1)[ids])(x, segment_ids)


def noise_keys(seed: int, step: Int[ArrayLike, ""], batch_size: int) -> Key[Array, "B"]:
    """One key per row, a function of (seed, step, index of the row in the global batch) alone."""
    step_key = jax.random.fold_in(jax.random.key(seed), step)
    return jax.vmap(jax.random.fold_in, in_axes=(None, 0))(step_key, jnp.arange(batch_size))


def keys_for(purpose: str, keys: Key[Array, "B"]) -> Key[Array, "B"]:
    """Keys for a named purpose, derived from the keys of the rows.

    Draws for different purposes are independent of each other, and of those from splits of the row's key. (In JAX
    `split(key)[i]` is `fold_in(key, i)`, so purposes numbered 0, 1, ... would repeat the draws of the splits.)
    """
    return jax.vmap(jax.random.fold_in, in_axes=(0, None))(keys, zlib.crc32(purpose.encode()))
