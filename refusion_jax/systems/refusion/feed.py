"""The feed: the tokens of one forward pass on top of each row's cache, and what is read from their logits.

A feed has two parts, each of which may be empty: drafts of a block's slots, and mask tokens that plan slots or, in the
authors' infilling, stand in place of drafts. On the grid [parts, M slots, K tokens] most places are empty; the feed
holds the others contiguously, part by part. Committed tokens are always a prefix of the drafts, so their cache entries
are a prefix of those that were just written. Example with slots of two: slots b and d were chosen and are verified, and
the plan for the slots that will remain, a and c, is fed after them:

    grid      drafts  . .   b1 b2   . .   d1 d2        feed    b1 b2 d1 d2 M  M  M  M
              masks   M M   . .     M M   . .          place   2  3  6  7  8  9  12 13

With a vocabulary of 152 k the output head costs more than a layer, and the logits of many places are not needed, such
as those of the last token of a slot that is verified. So the needed places are processed in portions, and arrays with
the size of the vocabulary exist for one portion at a time.

Axes: B rows, M slots of a block, K slot size, U places of the grid, W width of the feed, S shards of rows, R places of
a shard's rows, P packed ones, C places of a portion, V vocabulary, D hidden size.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int32, Key, Shaped

from refusion_jax.decoding.cache import Cache
from refusion_jax.decoding.sampling import mask_logits, probability, sample
from refusion_jax.decoding.settings import TokenIds, TracedSettings
from refusion_jax.model.interface import LanguageModel
from refusion_jax.model.key_values import KeyValues
from refusion_jax.model.ragged import Ragged, take
from refusion_jax.systems.refusion.budget import Sizes
from refusion_jax.systems.refusion.canvas import Block


class Part(NamedTuple):
    """Some tokens of a block's slots."""

    block: Block
    tokens: Int32[Array, "#B #M #K"]
    is_fed: Bool[Array, "B M K"]
    is_read: Bool[Array, "#B #M #K"]  # whether its logits are needed
    is_drawn: Bool[Array, "#B #M #K"]  # whether its tokens are sampled at the request's temperature


@dataclasses.dataclass(frozen=True)
class Feed:
    """Parts in sequence, padded from index `length` on."""

    tokens: Int32[Array, "B W"]
    positions: Int32[Array, "B W"]  # in the text
    may_end: Bool[Array, "B W"]  # an EOS may be written where its logits predict a token
    candidate: Int32[Array, "B W"]  # at drafts: a token for the next place, whose probability is wanted
    is_draft: Bool[Array, "B W"]
    is_drawn: Bool[Array, "B W"]
    is_read: Bool[Array, "B W"]
    length: Int32[Array, "B"]
    source: Int32[Array, "B W"]  # place on the grid
    place: Int32[Array, "B 2 M K"]  # index in the feed of each place of the grid; undefined for empty ones


@dataclasses.dataclass(frozen=True)
class Reading:
    """The tokens that were read at each place of a part; undefined elsewhere."""

    token: Int32[Array, "B M K"]  # the most probable one, or a sample
    chance: Float32[Array, "B M K"]  # its probability
    candidate_chance: Float32[Array, "B M K"]  # at drafts: the probability of `Feed.candidate`


def pack(drafts: Part, masks: Part, candidates: Int32[Array, "B M K"], width: int) -> Feed:
    """Packs both parts, with at most W tokens per row in total, into a feed.

    `candidates` has, at each draft's place, the token whose probability is wanted; it is read at the token before.
    """
    B, M, K = candidates.shape
    parts, U, offset = (drafts, masks), 2 * M * K, jnp.arange(K)[None, None]
    seen = jnp.cumsum(jnp.stack([part.is_fed for part in parts], axis=1).reshape(B, U), axis=1, dtype=jnp.int32)
    source = jnp.sum(seen[:, None] <= jnp.arange(width)[None, :, None], axis=2, dtype=jnp.int32)
    source = jnp.minimum(source, U - 1)  # padding

    def pick(values):  # one per part, each [B, M, K] or broadcast to it -> [B, W]
        grid = jnp.stack([jnp.broadcast_to(value, (B, M, K)) for value in values], axis=1).reshape(B, U)
        return jnp.take_along_axis(grid, source, axis=1)

    length, is_draft = seen[:, -1], source < M * K
    positions = pick(part.block.start[:, :, None] + offset for part in parts)
    return Feed(
        tokens=pick(part.tokens for part in parts),
        positions=positions,
        may_end=positions + is_draft >= drafts.block.ends_from[:, None],
        candidate=pick([jnp.roll(candidates, -1, axis=2)] * 2),
        is_draft=is_draft,
        is_drawn=pick(part.is_drawn for part in parts),
        is_read=pick(part.is_read for part in parts) & (jnp.arange(width)[None] < length[:, None]),
        length=length,
        source=source,
        place=jnp.clip(seen - 1, 0, width - 1).reshape(B, 2, M, K),
    )


def run(
    model: LanguageModel,
    cache: Cache,
    feed: Feed,
    visible: Bool[Array, "B W W"],
    shape: Int32[Array, ""],
    sizes: Sizes,
    drafts: int,
) -> tuple[Float[Array, "S P D"], Int32[Array, "B W"], KeyValues]:
    """A forward pass: (input of the output head, packed; index there of each place of the feed; entries of the drafts).

    All tokens of the feed attend to the cache, and to the tokens of the feed that `visible` allows. `shape` is the
    index of the compiled shape to run, `drafts` the most drafts of a row: only these can be committed.
    """
    W, most = feed.tokens.shape[1], sizes.shapes[-1].places

    def widened(x, size, axis):  # all shapes return arrays of the same sizes
        return jnp.pad(x, [(0, (size - n) * (i == axis)) for i, n in enumerate(x.shape)])

    def in_shape(shape):
        def forward():
            width = min(shape.width, W)
            ragged = Ragged.of(feed.length, width, shape.tile, shape.tiles, sizes.shards)
            x, new = model.extend_hidden(
                feed.tokens[:, :width], feed.positions[:, :width], cache.entries, cache.length,
                visible[:, :width, :width], ragged,
            )  # fmt: skip
            new = jax.tree.map(lambda x: jax.vmap(lambda x: ragged.spread(x, min(width, drafts)))(x), new)
            new = jax.tree.map(lambda x: widened(x, drafts, 2), new)
            return widened(x, most, 1), widened(ragged.index(), W, 1), new

        return forward

    return jax.lax.switch(shape, [in_shape(each) for each in sizes.shapes])


def read(
    model: LanguageModel,
    hidden: Float[Array, "S P D"],
    index: Int32[Array, "B W"],
    feed: Feed,
    draws: tuple[Key[Array, "B"], Key[Array, "B"], TracedSettings],
    ids: TokenIds,
    sizes: Sizes,
) -> tuple[Reading, Reading]:
    """Reads the tokens at all places of a feed whose logits are needed: (of the drafts, of the masks).

    `hidden` and `index` come from `run`. `draws` has, for each row, the key for new samples, the key with which the
    drafts were sampled, and the settings.
    """
    (B, W), shards, portion = feed.tokens.shape, sizes.shards, sizes.portion

    def by_shard(x):
        return x.reshape(shards, -1, *x.shape[2:])

    seen = jnp.cumsum(by_shard(feed.is_read), axis=1, dtype=jnp.int32)  # [S, R]
    R = seen.shape[1]
    places = jax.tree.map(by_shard, (index, feed.positions, feed.may_end, feed.is_draft, feed.is_drawn, feed.candidate))
    rows = jax.tree.map(lambda x: x.reshape(shards, -1), draws)

    def read_portion(i, out):
        rank = i * portion + jnp.arange(portion)
        at = jnp.sum(seen[:, None] <= rank[None, :, None], axis=2, dtype=jnp.int32)  # [S, C]
        at = jnp.minimum(at, R - 1)  # padding after the last place
        packed, position, may_end, is_draft, is_drawn, candidate = jax.tree.map(lambda x: take(x, at), places)
        fresh, planned, settings = jax.tree.map(lambda x: take(x, at // W), rows)
        # The token after a draft is sampled with the same noise as in the plan, so that the two are likely to be equal.
        keys = jnp.where(is_draft, planned, fresh)
        real, choosable = mask_logits(model.logits(take(hidden, packed)), may_end, ids)
        token = sample(choosable, is_drawn, keys, position + is_draft, settings)
        new = token, probability(real, token), probability(real, candidate)
        return jax.tree.map(lambda out, x: jax.lax.dynamic_update_slice_in_dim(out, x, i * portion, 1), out, new)

    none = jnp.zeros((shards, -(-R // portion) * portion), jnp.float32)
    portions = (jnp.max(seen[:, -1]) + portion - 1) // portion
    out = jax.lax.fori_loop(0, portions, read_portion, (none.astype(jnp.int32), none, none))

    def on_grid(x: Shaped[Array, "S _"]) -> Shaped[Array, "2 B M K"]:
        of_feed = take(x, jnp.maximum(seen - 1, 0)).reshape(B, W)
        placed = jnp.take_along_axis(of_feed, feed.place.reshape(B, -1), axis=1)
        return jnp.moveaxis(placed.reshape(feed.place.shape), 1, 0)

    of_drafts, of_masks = zip(*map(on_grid, out), strict=True)
    return Reading(*of_drafts), Reading(*of_masks)
