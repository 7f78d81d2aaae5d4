"""How much a forward feeds: the shapes that are compiled, and what each row may feed ahead of time in them.

Tokens fed ahead of time (the next plan, the next draft) never change the text; they only save forwards. They are free
where a forward waits for its weights, and where the shape that runs anyway has places left; elsewhere they cost what
any token costs. So there is a budget in tokens, of which a forward feeds what is needed always, and what is asked for
ahead of time as far as the budget, or else the shape, has room. Room is shared from the smallest wish up: that way most
wishes are granted whole, and one that is not is of little use.

Axes: B rows, S shards of rows, J shapes.
"""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32

from refusion_jax.decoding.feeds import Shape

_SHAPES = 6  # compiled, at most; each has two thirds of the places of the next, so that most of them are real
_TILE = 8  # places, where rows feed few: attention is slow with narrower tiles, and wider ones are seldom full
_TILES_A_ROW = 4  # on average, at most: each tile reads the keys of its row anew


def shapes_of(rows: int, width: int, needed: int, budget: int, slot_size: int) -> tuple[Shape, ...]:
    """The shapes of a forward, least first; a lone row is one tile, of each size.

    Rows are seldom wide all at once, so most forwards need a part of the places that all rows might.

    Args:
      rows: of a shard.
      width: tokens that a row may feed, at most.
      needed: tokens that a row must feed, at most.
      budget: tokens that all of them may feed to do something ahead of time.
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
    # The largest holds whatever rows need, and where the budget is for all that they might feed, that as well: tiles
    # are of one row each, so a place of the budget may cost more than a place.
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
    """The shape to run, and what each row may feed ahead of time in it.

    Args:
      needed: tokens that each row must feed.
      asked: tokens that it would feed ahead of time.
      budget: tokens that a forward of a shard may feed for the sake of that, as this row has it.
      shapes: from `shapes_of`.
      shards: S.

    Returns:
      (the index of the least shape that holds all that is needed, and all that is asked for within the budget; the
      tokens that each row may feed beside those it needs).
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
    """Tiles of each shard that hold so many tokens of its rows, in each shape."""
    return jnp.sum(-(-tokens[:, :, None] // tile[None]), axis=1)
