"""Samples tokens and reads probabilities from the logits of a forward, computed only at the places where needed.

With a vocabulary of 152 k the output head costs more than a layer, and the logits of many places are not needed, such
as those of the last token of a slot that is verified. So the needed places are processed in portions, and arrays with
the size of the vocabulary exist for one portion at a time.

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
from refusion_jax.systems.refusion.feeding import PackedFeed
from refusion_jax.systems.refusion.settings import EXACT, RowSettings


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Hidden:
    """The input of the output head, packed as in the forward."""

    packed: Float[Array, "S P D"]
    index: Int32[Array, "B W"]  # index in its shard of each place of the feed


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Tokens:
    """What was read at each place of a feed; undefined elsewhere."""

    chosen: Int32[Array, "B W"]  # the most probable token, or a sample
    chance: Float32[Array, "B W"]  # its probability
    weighed: Float32[Array, "B W"]  # at drafts: the probability of `PackedFeed.weighed`


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Draws:
    """Noise and settings by which tokens are sampled."""

    keys: Key[Array, "*B"]  # of the new samples
    planned: Key[Array, "*B"]  # that the drafts were sampled with
    settings: RowSettings


def read_tokens(
    model: Transformer, hidden: Hidden, feed: PackedFeed, draws: Draws, ids: TokenIds, portion: int, shards: int
) -> Tokens:
    """Reads the tokens at all places of a feed whose logits are needed.

    Args:
      model: its output head is used.
      hidden: of the forward.
      feed: its `is_read` selects the places.
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
        at = jnp.minimum(at, R - 1)  # padding behind the last place
        index, position, may_end, is_draft, weighed = jax.tree.map(lambda x: take(x, at), places)
        own = jax.tree.map(lambda x: take(x, at // W), rows)
        # The token behind a draft is sampled with the same noise as in the plan, so that both are most likely equal.
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
