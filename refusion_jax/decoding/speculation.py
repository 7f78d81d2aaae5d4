"""Speculative sampling (arXiv 2302.01318): drafts are accepted such that the text is distributed by the verifier alone.

Axes: B rows, N verified places, M = N - 1 drafts, V vocabulary.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32, Key, Shaped

from refusion_jax.decoding.sampling import best, drawn_from
from refusion_jax.decoding.settings import TracedSettings

DRAFT, _CHECK, _REPAIR = range(3)  # purposes of a random draw at a place, each with its own noise


def distribution(logits: Float32[Array, "B T V"], settings: TracedSettings) -> Float32[Array, "B T V"]:
    """The distribution that tokens are sampled from; at temperature 0, one-hot at the most probable token.

    Args:
      logits: of the tokens that may be chosen.
      settings: temperature, top_k, top_p [B] of each row.
    """
    settings = jax.tree.map(lambda x: jnp.broadcast_to(x[:, None], logits.shape[:2]), settings)
    greedy = jax.nn.one_hot(best(logits), logits.shape[-1])
    is_warm = settings.temperature > 0

    def warm(logits):
        own = settings.replace(temperature=jnp.where(is_warm, settings.temperature, 1.0))
        return jnp.where(is_warm[:, :, None], jax.nn.softmax(drawn_from(logits, own), axis=-1), greedy)

    return jax.lax.cond(jnp.any(is_warm), warm, lambda _: greedy, logits)


def verify(
    p: Float32[Array, "B N V"],
    q: Float32[Array, "B M V"],
    drafts: Int32[Array, "B M"],
    drafted: Int32[Array, "B"],
    keys: Key[Array, "B"],
    places: Int32[Array, "B N"],
    is_warm: Bool[Array, "B"],
) -> tuple[Int32[Array, "B"], Int32[Array, "B"]]:
    """(number of accepted drafts, the token that follows them).

    From the left, a draft is accepted with probability min(1, p / q); the first rejected one is drawn again from
    max(0, p - q). If all are accepted, the token after them is drawn from p.

    Args:
      p: the verifier's distribution at the place of each draft, and at the place after the last one.
      q: that each draft was drawn from.
      drafts: tokens.
      drafted: how many of them count.
      keys: one per row.
      places: of p.
      is_warm: rows with a temperature.
    """
    M = drafts.shape[1]
    offset = jnp.arange(M + 1)[None]
    chance = _at(p[:, :M], drafts) / jnp.maximum(_at(q, drafts), jnp.finfo(jnp.float32).tiny)
    accepts = _uniform(keys, places[:, :M]) < chance
    accepted = jnp.sum(jnp.cumprod(accepts & (offset[:, :M] < drafted[:, None]), axis=1), axis=1)
    is_refused = (offset < drafted[:, None])[:, :, None]
    left = jnp.where(is_refused, jnp.maximum(p - jnp.pad(q, ((0, 0), (0, 1), (0, 0))), 0), p)
    return accepted, _pick(draw(left, is_warm, keys, places, _REPAIR), accepted)


def committed(
    drafts: Int32[Array, "B M"],
    accepted: Int32[Array, "B"],
    token: Int32[Array, "B"],
    room: Int32[Array, "B"],
    eos_id: int,
) -> tuple[Int32[Array, "B N"], Int32[Array, "B"], Bool[Array, "B"]]:
    """The accepted drafts and the token after them, cut after an EOS: (tokens, how many count, which rows end so).

    Args:
      drafts: tokens.
      accepted: how many of them were accepted.
      token: that follows these.
      room: most tokens that each row may commit; 0 for finished rows.
      eos_id: id of the end-of-text token.
    """
    offset = jnp.arange(drafts.shape[1] + 1)[None]
    tokens = jnp.where(offset < accepted[:, None], jnp.pad(drafts, ((0, 0), (0, 1))), token[:, None])
    count = jnp.minimum(accepted + 1, room)
    ends = (tokens == eos_id) & (offset < count[:, None])
    has_end = jnp.any(ends, axis=1)
    return tokens, jnp.where(has_end, jnp.argmax(ends, axis=1) + 1, count), has_end


def draw(
    p: Float32[Array, "B T V"],
    is_warm: Bool[Array, "B"],
    keys: Key[Array, "B"],
    places: Int32[Array, "B T"],
    purpose: int = DRAFT,
) -> Int32[Array, "B T"]:
    """Samples from p, which need not sum to 1; the noise depends on row, place and purpose.

    If all of `is_warm` [B] are false, p is one-hot everywhere, and no noise is computed.
    """

    def noisy():
        noise = jax.vmap(jax.vmap(lambda key: jax.random.gumbel(key, p.shape[2:])))(_keys_at(keys, places, purpose))
        return jnp.log(p) + noise

    return best(jax.lax.cond(jnp.any(is_warm), noisy, lambda: p))


def _uniform(keys: Key[Array, "B"], places: Int32[Array, "B T"]) -> Float32[Array, "B T"]:
    """Uniform draws in [0, 1)."""
    return jax.vmap(jax.vmap(jax.random.uniform))(_keys_at(keys, places, _CHECK))


def _keys_at(keys: Key[Array, "B"], places: Int32[Array, "B T"], purpose: int) -> Key[Array, "B T"]:
    """A key for each place and purpose."""
    own = jax.vmap(jax.random.fold_in, (0, None))(keys, purpose)
    return jax.vmap(jax.vmap(jax.random.fold_in, (None, 0)))(own, places)


def _at(p: Float32[Array, "B T V"], tokens: Int32[Array, "B T"]) -> Float32[Array, "B T"]:
    """The probabilities of these tokens."""
    return jnp.take_along_axis(p, tokens[:, :, None], axis=2)[:, :, 0]


def _pick(x: Shaped[Array, "B T"], index: Int32[Array, "B"]) -> Shaped[Array, "B"]:
    """The element of each row at its index."""
    return jnp.take_along_axis(x, index[:, None], axis=1)[:, 0]
