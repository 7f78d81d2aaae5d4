"""Sampling tokens from logits, speculative sampling (arXiv 2302.01318), and the record of committed tokens.

Axes: B rows, T tokens, V vocabulary, R capacity of the record; N verified places, M = N - 1 drafts.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, ArrayLike, Bool, Float32, Int32, Key, PyTree, Shaped

from refusion_jax.decoding.settings import TokenIds, TracedSettings
from refusion_jax.decoding.trajectory import Told, tell


@struct.dataclass
class Record:
    """Committed tokens in the order of commitment; entries from index `count` on are unused."""

    tokens: Int32[Array, "B R"]
    positions: Int32[Array, "B R"]  # each token's place in the text
    count: Int32[Array, "B"]

    @classmethod
    def empty(cls, rows: int, capacity: int) -> "Record":
        zeros = jnp.zeros((rows, capacity), jnp.int32)
        return cls(zeros, zeros, jnp.zeros((rows,), jnp.int32))

    def append(self, tokens: Int32[Array, "B T"], positions: Int32[Array, "B T"], count: Int32[Array, "B"]) -> "Record":
        """Appends the first `count` of these tokens; needs room for all T."""
        write = jax.vmap(lambda buffer, new, at: jax.lax.dynamic_update_slice_in_dim(buffer, new, at, axis=0))
        return Record(
            write(self.tokens, tokens, self.count), write(self.positions, positions, self.count), self.count + count
        )

    def append_where(
        self, is_new: Bool[Array, "B T"], tokens: Int32[Array, "B T"], positions: Int32[Array, "B T"]
    ) -> "Record":
        """Appends the new tokens, in their order; needs room for all T."""
        front = jnp.argsort(~is_new, axis=1, stable=True)
        tokens, positions = (jnp.take_along_axis(x, front, axis=1) for x in (tokens, positions))
        return self.append(tokens, positions, jnp.sum(is_new, axis=1))


def count_drafts(
    told: Sequence[Told], active: Bool[Array, "B"], before: Record, after: Record, capacity: int
) -> Int32[Array, "B 2"]:
    """For each row: (number of drafts that a forward pass has verified, number of those that it has committed).

    `told`: what the pass reports of plans and drafts; `active`: rows that took part; `capacity`: places of a text.
    """
    drafts = [one for one in told if one.chances is None]
    if not drafts:
        return jnp.zeros((len(active), 2), jnp.int32)
    tokens, places = (jnp.concatenate([getattr(x, name) for x in drafts], axis=1) for name in ("tokens", "places"))
    is_fed = (places >= 0) & active[:, None]
    by_place = put(jnp.full((len(active), capacity), -1), jnp.where(is_fed, places, capacity), tokens)
    index = jnp.arange(after.tokens.shape[1])[None]
    is_new = (index >= before.count[:, None]) & (index < after.count[:, None])
    is_kept = is_new & (jnp.take_along_axis(by_place, after.positions, axis=1) == after.tokens)
    return jnp.stack([jnp.sum(is_fed, axis=1), jnp.sum(is_kept, axis=1)], axis=1).astype(jnp.int32)


SAMPLED = "sampled"  # the scope of conditions on whether a row has a temperature; `plan` counts them
_LEAST = 1e-30  # of temperature and top_p: below it logits overflow, or the nucleus lacks the most probable token


def mask_logits(
    logits: Float32[Array, "B T V"], may_end: Bool[Array, "B T"], ids: TokenIds
) -> tuple[Float32[Array, "B T V"], Float32[Array, "B T V"]]:
    """(logits of the real vocabulary, logits of the tokens that may be chosen; EOS only where `may_end`).

    The mask and padding tokens are never chosen, but the first logits still have them, so they count in its softmax.
    (The authors' code can choose the mask token.)
    """
    token = jnp.arange(logits.shape[-1])[None, None]
    real = jnp.where(token < ids.num_tokens, logits, -jnp.inf)
    banned = (token == ids.mask_id) | (token == ids.pad_id) | (token == ids.eos_id) & ~may_end[:, :, None]
    return real, jnp.where(banned, -jnp.inf, real)


def sample(
    logits: Float32[Array, "B T V"],
    draw: Bool[Array, "B T"],
    keys: Key[Array, "B *T"],
    positions: Int32[Array, "B T"],
    settings: TracedSettings,
) -> Int32[Array, "B T"]:
    """The most probable token at every place or, where `draw` is True, a sample of softmax(logits / temperature).

    Samples come from the top_k tokens, and among these from the nucleus of top_p (Holtzman et al., arXiv 1904.09751),
    by the Gumbel-max trick in float32. If all temperatures are 0, no noise is computed. Keys and settings are those of
    each row, or of each token; a sample depends on this key and the token's position in its text only.
    """
    keys, settings = _of_tokens((keys, settings), positions.shape)

    def drawn(logits):
        gumbel = jax.vmap(jax.vmap(lambda key, at: jax.random.gumbel(jax.random.fold_in(key, at), logits.shape[2:])))
        noisy = drawn_from(logits, settings) + gumbel(keys, positions)
        return jnp.where((draw & (settings.temperature > 0))[:, :, None], noisy, logits)

    return best(_if_sampled(settings, drawn, lambda logits: logits, logits))


def best(logits: Float32[Array, "*B V"]) -> Int32[Array, "*B"]:
    """The index of the highest logit, of the first in a tie; V, which is no token, if the highest is not finite.

    Computed by a maximum and a minimum, which XLA vectorizes on CPU. Its argmax there takes longer than the output
    head: 0.12 ms for 32 places and 512 tokens, against 0.03 ms here. XLA's maximum does not always show a NaN: among
    NaNs it can be the -inf of a token that is never chosen.
    """
    V, most = logits.shape[-1], jnp.max(logits, axis=-1, keepdims=True)
    is_best = logits == jnp.where(jnp.isfinite(most), most, jnp.nan)
    return jnp.min(jnp.where(is_best, jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1), V), axis=-1)


def drawn_from(logits: Float32[Array, "B T V"], settings: TracedSettings) -> Float32[Array, "B T V"]:
    """Logits of the distribution that is sampled: logits / temperature, -inf outside top_k and the nucleus.

    The logits are those of the tokens that may be chosen, the settings [B, T]; undefined at temperature 0. A cut that
    no row asks for is skipped: a sample from 151,936 logits then takes a third of the time on a CPU.
    """
    scaled = logits / jnp.maximum(settings.temperature, _LEAST)[:, :, None]

    def highest(scaled):
        k = jnp.where(settings.top_k > 0, settings.top_k, scaled.shape[-1])
        return keep_top(scaled, jnp.ones_like(scaled), k.astype(jnp.float32))

    def nucleus(scaled):
        kept = keep_top(scaled, jax.nn.softmax(scaled, axis=-1), jnp.maximum(settings.top_p, _LEAST))
        # At top_p = 1 nothing is cut; the probabilities may sum to less than 1 by rounding.
        return jnp.where((settings.top_p < 1)[:, :, None], kept, scaled)

    scaled = jax.lax.cond(jnp.any(settings.top_k > 0), highest, lambda scaled: scaled, scaled)
    return jax.lax.cond(jnp.any(settings.top_p < 1), nucleus, lambda scaled: scaled, scaled)


def keep_top(
    logits: Float32[Array, "B T V"], weights: Float32[Array, "B T V"], target: Float32[ArrayLike, "B T"]
) -> Float32[Array, "B T V"]:
    """Keeps the fewest highest logits whose weights sum to the target, with ties; -inf elsewhere.

    The lowest logit to keep is found bit by bit, among all float32 values in their order: 32 sums over the vocabulary,
    fewer passes than a sort takes.
    """
    bits = jax.lax.bitcast_convert_type(logits, jnp.int32)
    ordered = jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)  # integers in the order of the floats

    def add_bit(i, low):  # the logits at or above `low` reach the target
        higher = low + (1 << 31 - i)
        reaches = jnp.sum(jnp.where(ordered >= higher[:, :, None], weights, 0.0), axis=-1) >= target
        return jnp.where(reaches, higher, low)

    low = jax.lax.fori_loop(0, 32, add_bit, jnp.full(logits.shape[:2], jnp.iinfo(jnp.int32).min))
    return jnp.where(ordered >= low[:, :, None], logits, -jnp.inf)


def probability(logits: Float32[Array, "B T V"], tokens: Int32[Array, "B T"]) -> Float32[Array, "B T"]:
    """softmax(logits)[tokens]; 0 for the id V, which is no token, so that decoders that depend on it terminate."""
    return jnp.nan_to_num(jnp.exp(_of(logits, tokens) - jax.nn.logsumexp(logits, axis=-1)))


def put(text: Int32[Array, "B C"], at: Int32[Array, "B K"], tokens: Int32[Array, "B K"]) -> Int32[Array, "B C"]:
    """The text with tokens written at these indices; indices outside the text are dropped."""
    return jax.vmap(lambda text, at, tokens: text.at[at].set(tokens, mode="drop"))(text, at, tokens)


def entry(x: Shaped[Array, "B T"], index: Int32[Array, "B"]) -> Shaped[Array, "B"]:
    """The entry of each row at its index."""
    return jnp.take_along_axis(x, index[:, None], axis=1)[:, 0]


def surest(scores: Float32[Array, "B T"], among: Bool[Array, "B T"], is_sure: Bool[Array, "B T"]) -> Bool[Array, "B T"]:
    """Of some places, those that are sure, and at least the one with the highest score, the first one in a tie."""
    best = jnp.argmax(jnp.where(among, scores, -jnp.inf), axis=1)
    return among & (is_sure | (jnp.arange(scores.shape[1])[None] == best[:, None]))


def select(rows: Bool[Array, "B"], new: PyTree, old: PyTree) -> PyTree:
    """A tree of per-row arrays: new where rows is True, old elsewhere."""
    return jax.tree.map(lambda n, o: jnp.where(rows.reshape(rows.shape + (1,) * (n.ndim - 1)), n, o), new, old)


def run_length(flags: Bool[Array, "*axes K"]) -> Int32[Array, "*axes"]:
    """Length of the leading run of True over the last axis."""
    return jnp.sum(jnp.cumprod(flags.astype(jnp.int32), axis=-1), axis=-1)


def _if_sampled(settings: TracedSettings, sampled: Callable, greedy: Callable, *operands: Array) -> Array:
    """The first function of the operands if any row has a temperature, else the second one."""
    with jax.named_scope(SAMPLED):
        return jax.lax.cond(jnp.any(settings.temperature > 0), sampled, greedy, *operands)


def _of_tokens(of_rows: PyTree, shape: tuple[int, int]) -> PyTree:
    """Arrays [B], or [B, T] already, as [B, T]."""
    return jax.tree.map(lambda x: jnp.broadcast_to(x.reshape(*x.shape, *(1,) * (2 - x.ndim)), shape), of_rows)


DRAFT, _CHECK, _REPAIR = range(3)  # purposes of a random draw at a place, each with its own noise


def distribution(logits: Float32[Array, "B T V"], settings: TracedSettings) -> Float32[Array, "B T V"]:
    """The distribution that tokens that may be chosen are sampled from; at temperature 0, one-hot at the best one."""
    settings = _of_tokens(settings, logits.shape[:2])
    greedy = jax.nn.one_hot(best(logits), logits.shape[-1])
    is_warm = settings.temperature > 0

    def warm(logits):
        return jnp.where(is_warm[:, :, None], jax.nn.softmax(drawn_from(logits, settings), axis=-1), greedy)

    return _if_sampled(settings, warm, lambda _: greedy, logits)


def verify(
    p: Float32[Array, "B N V"],
    q: Float32[Array, "B M V"],
    drafts: Int32[Array, "B M"],
    drafted: Int32[Array, "B"],
    keys: Key[Array, "B"],
    places: Int32[Array, "B N"],
    settings: TracedSettings,
) -> tuple[Int32[Array, "B"], Int32[Array, "B N"]]:
    """(number of accepted drafts; these, followed by the token after them, which also fills the rest).

    From the left, a draft is accepted with probability min(1, p / q); the first rejected one is drawn again from
    max(0, p - q). If all are accepted, the token after them is drawn from p.

    p is the verifier's distribution at the place of each draft, and at the place after the last one, q that from which
    each draft was drawn. Of the drafts, `drafted` count.
    """
    M = drafts.shape[1]
    offset = jnp.arange(M + 1)[None]
    chance = _of(p[:, :M], drafts) / jnp.maximum(_of(q, drafts), jnp.finfo(jnp.float32).tiny)
    accepts = jax.vmap(jax.vmap(jax.random.uniform))(_keys_at(keys, places[:, :M], _CHECK)) < chance
    accepted = run_length(accepts & (offset[:, :M] < drafted[:, None]))
    tell(drafts, places[:, :M], offset[:, :M] < drafted[:, None])
    left, of_draft, place = (
        jnp.take_along_axis(x, accepted.reshape(-1, *(1,) * (x.ndim - 1)), axis=1)
        for x in (p, jnp.pad(q, ((0, 0), (0, 1), (0, 0))), places)
    )
    left = jnp.where((accepted < drafted)[:, None, None], jnp.maximum(left - of_draft, 0), left)
    token = draw(left, keys, place, settings, _REPAIR)
    return accepted, jnp.where(offset < accepted[:, None], jnp.pad(drafts, ((0, 0), (0, 1))), token)


def draw(
    p: Float32[Array, "B T V"],
    keys: Key[Array, "B"],
    places: Int32[Array, "B T"],
    settings: TracedSettings,
    purpose: int = DRAFT,
) -> Int32[Array, "B T"]:
    """Samples from p, which need not sum to 1; the noise depends on row, place and purpose.

    If all temperatures are 0, p is one-hot everywhere, and no noise is computed.
    """

    def noisy():
        noise = jax.vmap(jax.vmap(lambda key: jax.random.gumbel(key, p.shape[2:])))(_keys_at(keys, places, purpose))
        return jnp.log(p) + noise

    return best(_if_sampled(settings, noisy, lambda: jnp.where(p > 0, p, -jnp.inf)))


def _keys_at(keys: Key[Array, "B"], places: Int32[Array, "B T"], purpose: int) -> Key[Array, "B T"]:
    own = jax.vmap(jax.random.fold_in, (0, None))(keys, purpose)
    return jax.vmap(jax.vmap(jax.random.fold_in, (None, 0)))(own, places)


def _of(p: Float32[Array, "B T V"], tokens: Int32[Array, "B T"]) -> Float32[Array, "B T"]:
    return jnp.take_along_axis(p, tokens[:, :, None], axis=2)[:, :, 0]
