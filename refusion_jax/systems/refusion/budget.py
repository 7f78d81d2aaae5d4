"""How many tokens a forward feeds: the compiled shapes, and the speculative tokens of each row in them.

Speculative tokens (the next plan, the next draft) never change the text; they only save forwards. They are free while a
forward is bound by reading its weights, and where the shape that runs anyway has places left; otherwise they cost as
much as any token. So there is a budget in tokens a forward: needed tokens are always fed, speculative ones as far as
the budget, or else the shape, has room. Room goes to the smallest requests first, so that most are granted in full,
since a partly granted one is of little use.

Axes: B rows, S shards of rows, J shapes.
"""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32

from refusion_jax.decoding.feeds import Shape

_SHAPES = 6  # compiled shapes, at most; each has two thirds of the places of the next, which limits padding
_TILE = 8  # places of a tile where rows feed few tokens: narrower tiles make attention slow, wider ones are seldom full
_TILES_A_ROW = 4  # on average, at most, as each tile reads the keys of its row again


def shapes_of(rows: int, width: int, needed: int, budget: int, slot_size: int) -> tuple[Shape, ...]:
    """The compiled shapes of a forward, smallest first; for a single row each is one tile.

    Rows are seldom wide at the same time, so most forwards need only part of the places that all rows could fill.

    Args:
      rows: of a shard.
      width: tokens that a row can feed, at most.
      needed: tokens that a row must feed, at most.
      budget: up to how many tokens all rows together may speculate.
      slot_size: most rows feed whole slots.
    """
    most = max(rows * needed, min(rows * width, budget))
    sizes = [-(-most * 2**i // 3**i) for i in range(_SHAPES)]
    if rows == 1:
        sizes = {-(-size // slot_size) * slot_size for size in sizes}
        return tuple(Shape(size, size, 1) for size in sorted(sizes))
    shapes, least = [], min(max(slot_size, _TILE // 2), _TILE)
    for size in sizes:
        tile = max(size // (rows * _TILES_A_ROW * least), 1) * least
        shapes.append(Shape(width, tile, -(-size // tile)))
    # The largest shape must hold all needed tokens, or, with a budget for everything, all tokens that rows can feed. A
    # tile holds tokens of one row only, so this takes more places than tokens.
    tile, each = shapes[0].tile, width if budget >= rows * width else needed
    shapes[0] = Shape(width, tile, max(shapes[0].tiles, rows * -(-each // tile)))
    return tuple(sorted(set(shapes), key=lambda shape: shape.places))


def choose(
    needed: Int32[Array, "B"],
    asked: Int32[Array, "B"],
    budget: Int32[Array, "B"],
    shapes: tuple[Shape, ...],
    shards: int,
) -> tuple[Int32[Array, ""], Int32[Array, "B"]]:
    """Chooses the shape to run, and the number of speculative tokens of each row.

    Args:
      needed: tokens that each row must feed.
      asked: speculative tokens that each row could feed.
      budget: tokens up to which a forward of a shard may speculate, by the settings of each row.
      shapes: from `shapes_of`.
      shards: S.

    Returns:
      (the index of the smallest shape that holds all needed tokens, and the speculative ones within the budget; the
      number of speculative tokens of each row).
    """
    needed, asked, budget = (x.reshape(shards, -1) for x in (needed, asked, budget))
    tile, tiles = jnp.array([s.tile for s in shapes]), jnp.array([s.tiles for s in shapes])
    tile, tiles = tile[None], tiles[None]  # [1, J]
    holds = tiles_of(needed, tile) <= tiles
    budget = jnp.max(jnp.where(asked > 0, budget, 0), axis=1, keepdims=True)
    is_within = jnp.sum(needed + asked, axis=1, keepdims=True) <= budget
    holds &= jnp.where(is_within, tiles_of(needed + asked, tile) <= tiles, budget <= tile * tiles)  # [S, J]
    index = jnp.argmax(jnp.all(holds, axis=0).at[-1].set(True))

    tile, tiles = tile[0, index], tiles[0, index]
    have = -(-needed // tile)
    wish = -(-(needed + asked) // tile) - have  # [S, B/S] more tiles
    order = np.arange(wish.shape[1])
    is_before = (wish[:, None] < wish[:, :, None]) | (
        (wish[:, None] == wish[:, :, None]) & (order[None] < order[:, None])[None]
    )
    before = jnp.sum(jnp.where(is_before, wish[:, None], 0), axis=2)
    spare = tiles - jnp.sum(have, axis=1, keepdims=True)
    granted = jnp.clip(spare - before, 0, wish)
    return index, jnp.minimum((have + granted) * tile - needed, asked).reshape(-1)


def tiles_of(tokens: Int32[Array, "S _"], tile: Int32[Array, "1 J"]) -> Int32[Array, "S J"]:
    """The number of tiles that the tokens of each shard's rows take, in each shape."""
    return jnp.sum(-(-tokens[:, :, None] // tile[None]), axis=1)
