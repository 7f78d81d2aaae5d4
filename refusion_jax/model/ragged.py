"""Rows of different lengths in one forward: what is done token by token is done on the real tokens only.

A batch whose rows feed 5, 90 and 20 tokens of at most 128 needs 115 tokens of every matrix product, not 384. They are
packed for all that sees one token at a time, and spread out in their rows again for attention. Where rows are split
over devices each shard is packed alone, so nothing moves between devices.

Axes: B rows, T places of a row, S shards of rows, N packed tokens of a shard.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32, Shaped


@dataclasses.dataclass(frozen=True)
class Ragged:
    """Where the tokens of rows [B, T] stand when they are packed to [S, N]."""

    rows: int  # B
    width: int  # T
    shards: int  # S
    source: Int32[Array, "S N"] | None  # row of the shard * T + place in the row; None: all places, as they stand
    place: Int32[Array, "S _"] | None  # B/S * T of each: where the places of its rows went; no meaning for filler

    @classmethod
    def of(cls, length: Int32[Array, "B"], width: int, size: int, shards: int) -> "Ragged":
        """Packs the leading `length` tokens of every row.

        Args:
          length: at most T each, and together at most N in every shard.
          width: T.
          size: N, at most B/S * T.
          shards: S, a divisor of B.
        """
        B, T = len(length), width
        if size == B // shards * T:
            return cls(B, T, shards, None, None)
        each = length.reshape(shards, -1)  # [S, B/S]
        end = jnp.cumsum(each, axis=1, dtype=jnp.int32)
        start = end - each
        index = jnp.arange(size, dtype=jnp.int32)[None]
        row = jnp.sum(end[:, :, None] <= index[:, None], axis=1, dtype=jnp.int32)  # [S, N]
        row = jnp.minimum(row, each.shape[1] - 1)  # filler behind the last token
        column = jnp.minimum(index - jnp.take_along_axis(start, row, axis=1), T - 1)
        place = jnp.minimum(start[:, :, None] + jnp.arange(T)[None, None], size - 1)
        return cls(B, T, shards, row * T + column, place.reshape(shards, -1))

    def pack(self, x: Shaped[Array, "B T ..."]) -> Shaped[Array, "S N ..."]:
        """Moves the tokens together; filler repeats some token."""
        x = x.reshape(self.shards, -1, *x.shape[2:])
        return x if self.source is None else _take(x, self.source)

    def spread(self, x: Shaped[Array, "S N ..."]) -> Shaped[Array, "B T ..."]:
        """Moves the tokens back; filler gets the values of some token."""
        x = x if self.place is None else _take(x, self.place)
        return x.reshape(self.rows, self.width, *x.shape[2:])


def _take(x: Shaped[Array, "S M ..."], index: Int32[Array, "S N"]) -> Shaped[Array, "S N ..."]:
    return jax.vmap(lambda x, i: x.at[i].get(mode="promise_in_bounds"))(x, index)
