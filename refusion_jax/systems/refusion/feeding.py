"""The packed feed: what one forward of the ReFusion decoder feeds on top of each row's cache.

A feed has three parts, each of which may be empty:

    drafts    tokens to verify, or that masks behind them attend to, slot by slot in text order
    plan      mask tokens of whole slots that need a plan: the remaining ones of the block, or those of the next block
    guesses   mask tokens for the rest of slots whose drafts are assumed to be right up to their `cut`

On the grid [3 parts, M slots, K tokens] most places are empty; the packed feed holds the others contiguously. Committed
tokens are always a prefix of the drafts, so their cache entries are a prefix of those that were just written.

Axes: B rows, N slots of a row, M slots of a block, K slot size, U = 3 M K places of the grid, W width of the
packed feed.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32, Shaped

from refusion_jax.systems.refusion.canvas import Canvas


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Block:
    """The slots of the serial block of each row."""

    start: Int32[Array, "B M"]  # position of each slot's first token
    size: Int32[Array, "B M"]  # 0 where there is no slot
    may_end: Bool[Array, "B M"]  # an EOS may be written there
    rank: Int32[Array, "B M"]  # when its turn is, or BY_CONFIDENCE


@dataclasses.dataclass(frozen=True)
class FeedPlan:
    """What to feed, as places of the grid."""

    drafted: Int32[Array, "B M"]  # number of tokens of each slot's draft
    planned: Bool[Array, "B M"]  # which slots of `plan_block` are planned
    plan_block: Block
    guessed: Bool[Array, "B M"]
    cut: Int32[Array, "B M"]  # place in the slot where its guess begins
    alone: Bool[Array, "B"]  # whether drafts do not attend to those of other slots
    read: Bool[Array, "B M K"]  # drafts whose logits are needed; those of plan and guesses always are


@dataclasses.dataclass(frozen=True)
class PackedFeed:
    """The packed feed, padded from index `length` on."""

    tokens: Int32[Array, "B W"]
    positions: Int32[Array, "B W"]  # in the text
    visible: Bool[Array, "B W W"]
    may_end: Bool[Array, "B W"]  # an EOS may be written there
    weighed: Int32[Array, "B W"]  # at drafts: a token for the next place, whose probability is wanted
    is_draft: Bool[Array, "B W"]
    is_guess: Bool[Array, "B W"]
    is_read: Bool[Array, "B W"]  # whether its logits are needed
    length: Int32[Array, "B"]
    place: Int32[Array, "B U"]  # index in the feed of each place of the grid; undefined for empty ones

    def to_grid(
        self, x: Shaped[Array, "B W"], like: Shaped[Array, "B M K"]
    ) -> tuple[Shaped[Array, "B M K"], Shaped[Array, "B M K"], Shaped[Array, "B M K"]]:
        """Values of the feed on the grid, for drafts, plan and guesses; only the shape of `like` is used."""
        B, M, K = like.shape
        parts = jnp.take_along_axis(x, self.place, axis=1).reshape(B, 3, M, K)
        return parts[:, 0], parts[:, 1], parts[:, 2]


def block_of(canvas: Canvas, index: Int32[Array, "B"], block_slots: int) -> Block:
    """The slots of serial block `index` of each row; empty behind the last block."""
    M, N = block_slots, canvas.size.shape[1]
    slot = jnp.arange(M)[None]
    at = index[:, None] * canvas.per_block[:, None] + slot
    exists = (slot < canvas.per_block[:, None]) & (at < N)
    start, size, may_end, rank = (
        jnp.take_along_axis(x, jnp.minimum(at, N - 1), axis=1)
        for x in (canvas.start, canvas.size, canvas.may_end, canvas.rank)
    )
    return Block(start, jnp.where(exists, size, 0), may_end, rank)


def pack_feed(
    plan: FeedPlan,
    here: Block,
    drafts: Int32[Array, "B M K"],
    weighed: Int32[Array, "B M K"],
    width: int,
    mask_id: int,
) -> PackedFeed:
    """Packs the parts of a plan into a feed.

    Args:
      plan: with at most W tokens a row.
      here: the block of drafts and guesses.
      drafts: of its slots.
      weighed: tokens at the same places whose probabilities are wanted.
      width: W.
      mask_id: id of the mask token.
    """
    B, M, K = drafts.shape
    W = width
    offset = jnp.arange(K)[None, None]
    there = plan.plan_block
    is_fed = jnp.stack(
        [
            offset < plan.drafted[:, :, None],
            plan.planned[:, :, None] & (offset < there.size[:, :, None]),
            plan.guessed[:, :, None] & (offset >= plan.cut[:, :, None]) & (offset < here.size[:, :, None]),
        ],
        axis=1,
    ).reshape(B, 3 * M * K)
    seen = jnp.cumsum(is_fed, axis=1, dtype=jnp.int32)
    source = jnp.sum(
        seen[:, None] <= jnp.arange(W)[None, :, None], axis=2, dtype=jnp.int32
    )  # [B, W], index in the feed -> place on the grid
    source = jnp.minimum(source, 3 * M * K - 1)  # padding

    def pick(*parts):  # three of [B, M, K], or that broadcast to it -> [B, W]
        grid = jnp.stack([jnp.broadcast_to(part, (B, M, K)) for part in parts], axis=1).reshape(B, 3 * M * K)
        return jnp.take_along_axis(grid, source, axis=1)

    mask = jnp.full((1, 1, 1), mask_id)
    begin, end = here.start[:, :, None], here.may_end[:, :, None]
    always = jnp.ones((1, 1, 1), bool)
    length = seen[:, -1]
    return PackedFeed(
        tokens=pick(drafts, mask, mask),
        positions=pick(begin + offset, there.start[:, :, None] + offset, begin + offset),
        visible=visibility(source, plan, M, K),
        may_end=pick(end, there.may_end[:, :, None], end),
        weighed=pick(jnp.roll(weighed, -1, axis=2), mask, mask),
        is_draft=source < M * K,
        is_guess=source // (M * K) == 2,
        is_read=pick(plan.read, always, always) & (jnp.arange(W)[None] < length[:, None]),
        length=length,
        place=jnp.clip(seen - 1, 0, W - 1),
    )


def visibility(source: Int32[Array, "B W"], plan: FeedPlan, M: int, K: int) -> Bool[Array, "B W W"]:
    """Which tokens of the feed each one attends to: always itself, and nothing behind it.

    Example: two slots a and b of two tokens that are verified together, a plan for slot c, and a guess for the second
    token of b (row: query, column: key). `x` is 0 where drafts are alone.

               a1 a2 b1 b2  c1 c2  B2
        a1      1  .  .  .   .  .   .
        a2      1  1  .  .   .  .   .
        b1      x  x  1  .   .  .   .
        b2      x  x  1  1   .  .   .
        c1      1  1  1  1   1  .   .
        c2      1  1  1  1   1  1   .
        B2      .  .  1  .   .  .   1

    Args:
      source: the place on the grid of each token of the feed.
      plan: which rows are alone, and where guesses begin.
      M, K: of the grid.
    """
    part, slot, offset = source // (M * K), source // K % M, source % K
    index = jnp.arange(source.shape[1])
    causal = (index[:, None] >= index[None])[None]
    same_slot = slot[:, :, None] == slot[:, None, :]
    before_cut = offset[:, None] < jnp.take_along_axis(plan.cut, slot, axis=1)[:, :, None]
    of_draft = same_slot | ~plan.alone[:, None, None]
    of_guess = same_slot & jnp.where(part[:, None] == 0, before_cut, part[:, None] == 2)
    query = part[:, :, None]
    return causal & jnp.where(query == 0, of_draft, (query == 1) | of_guess)
