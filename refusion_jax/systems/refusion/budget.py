"""Speculation: tokens fed ahead of time, and the compiled shapes of forward passes that hold them.

Speculative tokens, those of the next plan, never change the text; they only save forward passes. They are free while a
forward pass is bound by reading its weights, and where the shape that runs anyway has places left; otherwise they cost
as much as any token. So there is a budget in tokens per forward: needed tokens are always fed, and speculative ones
within the budget, or where the row has shown that they pay, or where the shape has room. Room goes to the smallest
requests first, so that most are granted.

Axes: B rows, S shards of rows, J shapes.
"""

import dataclasses
from typing import Self

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int32

from refusion_jax.distributed.chips import free_tokens
from refusion_jax.distributed.sharding import device_kind_here, shard_count_here
from refusion_jax.model.interface import LanguageModel

_LEAST_PORTION = 16  # least number of places whose logits are computed at once; fewer cost as much on CPU
MOST_ODDS = 4  # shapes allow for what pays at odds of acceptance up to this; larger ones would hardly be used
_SHAPES = 6  # compiled shapes, at most; each has two thirds of the places of the next, which limits padding
_TILE = 8  # places of a tile for rows with few tokens: narrower tiles make attention slow, wider ones are seldom full
_TILES_A_ROW = 4  # average number, at most, as each tile reads the keys of its row again


@dataclasses.dataclass(frozen=True)
class ForwardShape:
    """The shape of a compiled forward pass: its token places come in tiles, each with tokens of one row."""

    width: int  # places of a row, at most
    tile: int  # places of a tile
    tiles: int  # of a shard

    @property
    def places(self) -> int:
        return self.tile * self.tiles


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Compiled sizes that depend on the batch and the device."""

    shards: int  # of rows
    shapes: tuple[ForwardShape, ...]  # of a forward pass
    free: int  # tokens that a shard can compute in the time that reading the weights takes
    portion: int  # places whose logits are computed at once

    @classmethod
    def of(cls, model: LanguageModel, rows: int, width: int, needed: int, budget: int, slot_size: int) -> Self:
        """The sizes for a batch of this many rows, on the mesh of `jax.set_mesh`; see `shapes_of`."""
        shards, itemsize = shard_count_here("batch"), model.operand_dtype.itemsize
        free = free_tokens(model.weight_bytes, device_kind_here(), itemsize)
        shapes = shapes_of(rows // shards, width, needed, max(budget, MOST_ODDS * free), slot_size)
        return cls(shards, shapes, free, min(max(free, _LEAST_PORTION), shapes[-1].places))


def shapes_of(rows: int, width: int, needed: int, budget: int, slot_size: int) -> tuple[ForwardShape, ...]:
    """The compiled shapes of a forward pass, smallest first; for a single row each is one tile.

    Rows are seldom wide at the same time, so most forward passes need only part of the places that all rows could fill.

    A shard has `rows` rows, with mostly whole slots: at most `width` tokens each, `needed` of them without speculation.
    With speculation all rows together may have up to `budget` tokens.
    """
    most = max(rows * needed, min(rows * width, budget))
    sizes = [-(-most * 2**i // 3**i) for i in range(_SHAPES)]
    if rows == 1:
        sizes = {-(-size // slot_size) * slot_size for size in sizes}
        return tuple(ForwardShape(size, size, 1) for size in sorted(sizes))
    shapes, least = [], min(max(slot_size, _TILE // 2), _TILE)
    for size in sizes:
        tile = max(size // (rows * _TILES_A_ROW * least), 1) * least
        shapes.append(ForwardShape(width, tile, -(-size // tile)))
    # The largest shape must hold all needed tokens, or, with a budget for everything, all tokens of all rows. A
    # tile holds tokens of one row only, so this takes more places than tokens.
    tile, each = shapes[0].tile, width if budget >= rows * width else needed
    shapes[0] = ForwardShape(width, tile, max(shapes[0].tiles, rows * -(-each // tile)))
    return tuple(sorted(set(shapes), key=lambda shape: shape.places))


def worthwhile(
    free: int, hits: Int32[Array, "B"], misses: Int32[Array, "B"], active: Bool[Array, "B"], shards: int
) -> Int32[Array, "B"]:
    """The largest number of speculative tokens that pays for a row, by how often its drafts were all accepted.

    A forward pass of n tokens takes about as long as the arithmetic of n + `free` tokens: reading the weights takes as
    long as computing `free` of them. If all drafts before them are accepted (`hits`, else `misses`), speculative tokens
    save the row a forward pass: its share, 1 / rows, of reading the weights. Otherwise they are wasted. So with odds of
    acceptance o, up to o free / rows of them pay.
    """
    rows = jnp.sum(active.reshape(shards, -1), axis=1, dtype=jnp.int32)
    rows = jnp.repeat(jnp.maximum(rows, 1), active.shape[0] // shards)
    return free * (hits + 1) // ((misses + 1) * rows)


def choose(
    needed: Int32[Array, "B"],
    requested: Int32[Array, "B"],
    budget: Int32[Array, "B"],
    affordable: Int32[Array, "B"],
    shapes: tuple[ForwardShape, ...],
    shards: int,
) -> tuple[Int32[Array, ""], Bool[Array, "B"]]:
    """(index of the smallest shape that holds needed tokens and speculative ones that pay; rows granted speculation).

    Args:
      needed, requested: tokens of each row that must be fed, and speculative ones that could be.
      budget: tokens up to which a forward pass of a shard may speculate.
      affordable: the most speculative tokens of each row that pay, whatever the budget.
      shapes, shards: from `shapes_of`; S.
    """
    needed, asked, budget, affordable = (x.reshape(shards, -1) for x in (needed, requested, budget, affordable))
    within = jnp.sum(needed, axis=1, keepdims=True) + asked + before(asked, asked) <= budget
    pays = (asked > 0) & ((asked <= affordable) | within)

    tile, tiles = jnp.array([s.tile for s in shapes])[None], jnp.array([s.tiles for s in shapes])[None]  # [1, J]
    fed = needed + jnp.where(pays, asked, 0)
    holds = jnp.sum(-(-fed[:, :, None] // tile[None]), axis=1) <= tiles  # [S, J]: the tiles of all rows
    index = jnp.argmax(jnp.all(holds, axis=0).at[-1].set(True))

    tile, tiles = tile[0, index], tiles[0, index]
    have = -(-needed // tile)
    more = -(-(needed + asked) // tile) - have  # [S, B/S] tiles
    last = jnp.max(more) + 1  # added to the keys of those that do not pay, to sort them last
    spare = tiles - jnp.sum(have, axis=1, keepdims=True)
    is_granted = before(more, more + jnp.where(pays, 0, last)) + more <= spare
    return index, is_granted.reshape(-1)


def before(amounts: Int32[Array, "S R"], keys: Int32[Array, "S R"]) -> Int32[Array, "S R"]:
    """For each row, the sum of the amounts of the rows before it, in the order of the keys, then of the rows."""
    order = np.arange(keys.shape[1])
    is_before = (keys[:, None] < keys[:, :, None]) | (
        (keys[:, None] == keys[:, :, None]) & (order[None] < order[:, None])[None]
    )
    return jnp.sum(jnp.where(is_before, amounts[:, None], 0), axis=2)
