"""What the logits of a forward say, computed only where somebody reads them.

A vocabulary of 152 k costs more than a layer, and of many places nobody reads the logits: the last token of a slot that
is checked, drafts that only stand there to be seen. So the places that are read are worked off in portions, as many as
there are, and all that is wide as the vocabulary lives for one portion.

Axes: B rows, W places of a row, S shards of rows, R places of a shard's rows, P packed ones, C places of a portion, V
vocabulary, D hidden size.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32, Key

from refusion_jax.decoding.sampling import mask_logits, probability, sample
from refusion_jax.decoding.settings import TokenIds
from refusion_jax.model.ragged import take
from refusion_jax.model.transformer import Transformer
from refusion_jax.systems.refusion.canvas import EXACT, RowSettings
from refusion_jax.systems.refusion.feeding import PackedFeed


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Hidden:
    """What the output head reads, packed as the forward left it."""

    packed: Float[Array, "S P D"]
    index: Int32[Array, "B W"]  # where each place of the feed stands in its shard's


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Tokens:
    """What is read at each place of a feed; means nothing where nobody reads."""

    chosen: Int32[Array, "B W"]  # the best token, or the one that was drawn
    chance: Float32[Array, "B W"]  # its probability
    weighed: Float32[Array, "B W"]  # at drafts: the probability of `PackedFeed.weighed`


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Draws:
    """What decides which token is drawn at a place of a row, beside its logits."""

    keys: Key[Array, "*B"]  # of what is drawn now
    planned: Key[Array, "*B"]  # that the drafts were drawn with
    settings: RowSettings


def read_tokens(
    model: Transformer, hidden: Hidden, feed: PackedFeed, draws: Draws, ids: TokenIds, portion: int, shards: int
) -> Tokens:
    """The tokens at all places of a feed that are read.

    Args:
      model: whose output head is used.
      hidden: of the forward.
      feed: says which places those are.
      draws: of each row.
      ids: of the special tokens.
      portion: C.
      shards: S.
    """
    B, W = feed.tokens.shape

    def by_shard(x):
        return x.reshape(shards, -1, *x.shape[2:])

    seen = jnp.cumsum(by_shard(feed.is_read), axis=1, dtype=jnp.int32)  # [S, R]
    R = seen.shape[1]
    places = jax.tree.map(by_shard, (hidden.index, feed.positions, feed.may_end, feed.is_draft, feed.weighed))
    rows = jax.tree.map(lambda x: x.reshape(shards, -1), draws)

    def read(i, out):
        rank = i * portion + jnp.arange(portion)
        at = jnp.sum(seen[:, None] <= rank[None, :, None], axis=2, dtype=jnp.int32)  # [S, C]
        at = jnp.minimum(at, R - 1)  # filler behind the last place
        index, position, may_end, is_draft, weighed = jax.tree.map(lambda x: take(x, at), places)
        own = jax.tree.map(lambda x: take(x, at // W), rows)
        # A draft's next token is drawn with the noise that the plan drew it with: so they are most likely the same.
        keys = jnp.where(is_draft, own.planned, own.keys)
        is_drawn = ~is_draft | (own.settings.infill == EXACT)
        is_drawn &= take(by_shard(~feed.is_guess), at)
        real, choosable = mask_logits(model.logits(take(hidden.packed, index)), may_end, ids)
        chosen = sample(choosable, is_drawn, keys, position + is_draft, own.settings)
        new = Tokens(chosen, probability(real, chosen), probability(real, weighed))
        return jax.tree.map(lambda out, x: jax.lax.dynamic_update_slice_in_dim(out, x, i * portion, 1), out, new)

    none = jnp.zeros((shards, -(-R // portion) * portion), jnp.float32)
    portions = (jnp.max(seen[:, -1]) + portion - 1) // portion
    out = jax.lax.fori_loop(0, portions, read, Tokens(none.astype(jnp.int32), none, none))
    return jax.tree.map(lambda x: take(x, jnp.maximum(seen - 1, 0)).reshape(B, W), out)
