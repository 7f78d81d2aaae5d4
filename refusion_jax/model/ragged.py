"""Packs rows of different lengths for one forward pass, so that padding is not computed.

A batch whose rows have 5, 90 and 20 tokens of at most 128 needs 115 tokens in every matrix product, not 384. The tokens
of each row are cut into tiles, and the tiles of all rows are packed. A tile attends to the keys of its own row, so that
attention also costs only what the rows need (32 rows of at most 64 tokens, 288 keys: 26 ms per layer on a CPU, and 1 ms
as 48 tiles of 8). A row without tokens has no tiles and costs nothing. Where rows are split over devices, each shard is
packed separately, so that nothing moves between devices.

Axes: B rows, T places of a row, S shards of rows, M tiles of a shard, Q tokens of a tile, N = M Q packed tokens of a
shard.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32, Shaped


@dataclasses.dataclass(frozen=True)
class Ragged:
    """The packing of rows [B, T] to [S, N]."""

    rows: int  # B
    width: int  # T
    shards: int  # S
    tile: int  # Q
    fed: Int32[Array, "B"]  # tokens of each row
    row: Int32[Array, "S M"] | None = None  # row of each tile in its shard; None: every row is a tile
    source: Int32[Array, "S N"] | None = None  # index of each packed token: row of the shard * T + place in the row
    place: Int32[Array, "S _ T"] | None = None  # packed index of each place of the rows; undefined for padding

    @classmethod
    def whole(cls, rows: int, width: int) -> "Ragged":
        """Without packing: every row is one tile and one shard, [B, T]."""
        return cls(rows, width, rows, width, jnp.full((rows,), width, jnp.int32))

    @classmethod
    def of(cls, length: Int32[Array, "B"], width: int, tile: int, tiles: int, shards: int) -> "Ragged":
        """Packs the leading `length` tokens of every row: at most T each, and at most M tiles in each shard."""
        B, T, Q = len(length), width, tile
        if (tile, tiles) == (width, B // shards):
            return cls(B, T, shards, T, length)
        each = -(-length.reshape(shards, -1) // Q)  # [S, B/S] tiles
        end = jnp.cumsum(each, axis=1, dtype=jnp.int32)
        start = end - each
        index = jnp.arange(tiles, dtype=jnp.int32)[None]
        row = jnp.sum(end[:, :, None] <= index[:, None], axis=1, dtype=jnp.int32)  # [S, M]
        row = jnp.minimum(row, each.shape[1] - 1)  # padding after the last tile
        first = (index - jnp.take_along_axis(start, row, axis=1)) * Q
        column = jnp.minimum(first[:, :, None] + jnp.arange(Q)[None, None], T - 1)
        place = jnp.minimum(start[:, :, None] * Q + jnp.arange(T)[None, None], tiles * Q - 1)
        return cls(B, T, shards, Q, length, row, (row[:, :, None] * T + column).reshape(shards, -1), place)

    def pack(self, x: Shaped[Array, "B T ..."]) -> Shaped[Array, "S N ..."]:
        """Packs tokens; padding repeats other tokens."""
        x = x.reshape(self.shards, -1, *x.shape[2:])
        return x if self.source is None else take(x, self.source)

    def spread(self, x: Shaped[Array, "S N ..."], width: int | None = None) -> Shaped[Array, "B _ ..."]:
        """Unpacks all places of each row, or the first `width`; places without a token get values of other tokens."""
        if self.place is None:
            return x.reshape(self.rows, self.width, *x.shape[2:])[:, :width]
        place = self.place[:, :, :width]
        return take(x, place.reshape(self.shards, -1)).reshape(self.rows, place.shape[2], *x.shape[2:])

    def index(self) -> Int32[Array, "B T"]:
        """The packed index of each place of the rows, in its shard."""
        place = self.place
        if place is None:
            place = jnp.tile(jnp.arange(self.rows // self.shards * self.width, dtype=jnp.int32), self.shards)
        return place.reshape(self.rows, self.width)

    def tiles(self, x: Shaped[Array, "S N ..."]) -> Shaped[Array, "tiles Q ..."]:
        """The packed tokens as tiles, of all shards."""
        return x.reshape(-1, self.tile, *x.shape[2:])

    def rows_of_tiles(self, x: Shaped[Array, "B ..."]) -> Shaped[Array, "tiles ..."]:
        """For each tile, the entry of its row."""
        if self.row is None:
            return x
        taken = take(x.reshape(self.shards, -1, *x.shape[1:]), self.row)
        return taken.reshape(-1, *x.shape[1:])

    def keys_of_tiles(self, x: Shaped[Array, "S N ..."]) -> Shaped[Array, "tiles T ..."]:
        """For each tile, the tokens of its whole row."""
        if self.place is None:
            return self.tiles(x)
        place = take(self.place, self.row)  # [S, M, T]
        return take(x, place.reshape(self.shards, -1)).reshape(-1, self.width, *x.shape[2:])


def take(x: Shaped[Array, "S M ..."], index: Int32[Array, "S ..."]) -> Shaped[Array, "S ..."]:
    """Selects entries of the first axis in every shard."""
    return jax.vmap(lambda x, i: x.at[i].get(mode="promise_in_bounds"))(x, index)
