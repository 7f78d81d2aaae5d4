"""The phases of the ReFusion decoder: which drafts each row commits after a forward, and what it does next.

Everything here is arithmetic on the grid of a block's slots; decoder.py runs the forwards and keeps the state.

Axes: B rows, M slots of a block, K slot size.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32

from refusion_jax.systems.refusion.canvas import BY_CONFIDENCE
from refusion_jax.systems.refusion.feeding import Block, FeedPlan
from refusion_jax.systems.refusion.settings import EXACT, RowSettings

DONE, PLAN, VERIFY, PROPOSE, CHECK, RECOMPUTE = range(6)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Work:
    """The work of each row in its block."""

    phase: Int32[Array, "B"]
    chosen: Bool[Array, "B M"]  # the slots being verified or infilled
    drafts: Int32[Array, "B M K"]
    planned: Int32[Array, "B M K"]  # the drafts of the plan
    planned_probability: Float32[Array, "B M K"]  # probabilities of these drafts in the plan
    accepted: Int32[Array, "B M"]  # length of each chosen slot's accepted prefix
    guess: Int32[Array, "B M"]  # where its draft will most likely fail; its size if it cannot fail


@dataclasses.dataclass(frozen=True)
class Reading:
    """What the logits of a forward tell about each part of the feed, on the grid."""

    trusted: Bool[Array, "B M K"]  # whether the token before accepts the draft; undefined at the first of a slot
    wanted: Int32[Array, "B M K"]  # with exact infilling: the token to have at each place
    plan: Int32[Array, "B M K"]
    plan_probability: Float32[Array, "B M K"]
    guesses: Int32[Array, "B M K"]
    guesses_probability: Float32[Array, "B M K"]


def judge(
    work: Work, here: Block, plan: FeedPlan, reading: Reading, settings: RowSettings, eos_id: int
) -> tuple[Work, Bool[Array, "B M K"]]:
    """The next work of each row, unless a next plan is ready, and the drafts to commit."""
    phase, drafts = work.phase, work.drafts
    is_verify, is_propose, is_exact = phase == VERIFY, phase == PROPOSE, settings.infill == EXACT
    is_check = (phase == CHECK) | (phase == RECOMPUTE)
    verified, checked = verify(work, here, reading, eos_id), check(work, here, reading, eos_id)
    nothing = work.chosen, work.accepted, jnp.zeros(drafts.shape, bool)
    chosen, runs, committed = select(is_verify, verified, select(is_check, checked, nothing))

    infills = ((is_verify & ~is_exact) | is_check) & ~jnp.any(committed, axis=(1, 2))
    saw_less = (phase == CHECK) & jnp.any(committed, axis=(1, 2)) & (jnp.sum(chosen, axis=1) > 1)
    recomputes = saw_less & settings.recompute  # all are accepted: they are fed once more, and then committed
    committed = committed & ~recomputes[:, None, None]
    was_guessed = jnp.all(~chosen | (runs == here.size) | (plan.guessed & (plan.cut == runs)), axis=1)
    is_drafted = is_propose | (infills & was_guessed)
    is_new = is_drafted[:, None, None] & (jnp.arange(drafts.shape[2])[None, None] >= runs[:, :, None])
    guess = likely_failure(reading.guesses_probability, runs, here.size, settings)
    # Keeps the dtype of phase: a weak type would recompile.
    otherwise = jnp.where(phase == DONE, phase, jnp.where(recomputes, RECOMPUTE, PLAN))
    after = dataclasses.replace(
        work,
        phase=jnp.where(is_drafted, CHECK, jnp.where(infills, PROPOSE, otherwise)),
        chosen=chosen,
        drafts=jnp.where(is_new, reading.guesses, drafts),
        accepted=runs,
        guess=select(is_drafted, guess, work.guess),
    )
    return select(is_exact & is_verify, repair(work, reading, runs, committed, eos_id), after), committed


def blend(
    work: Work,
    planned: Float32[Array, "B M K"],
    following: Int32[Array, "B M K"],
    following_probability: Float32[Array, "B M K"],
    settings: RowSettings,
) -> Int32[Array, "B M K"]:
    """Exact infilling: the token to have at each place, either the predicted next token or the plan's draft.

    There are two conditional distributions of the same token: given the tokens before it, and the plan's, given mask
    tokens. They are mixed with a share `infill_blend` of the plan's, and the plan's draft is compared with the
    predicted next token. (The plan's probability of the latter is taken to be 0, so that no distribution has to be
    kept.) The choice depends only on the tokens before it and the plan, so the text does not depend on the number of
    forwards.

    Args:
      work: its planned and planned_probability are used.
      planned: probability of the plan's draft, given the tokens before it.
      following: the predicted next token.
      following_probability: of that token.
      settings: temperature, infill_blend [B, 1, 1].
    """
    share = settings.infill_blend
    keeps = (1 - share) * (following_probability - planned) < share * work.planned_probability
    return jnp.where(keeps & (settings.temperature == 0), work.planned, following)


def repair(
    work: Work, reading: Reading, runs: Int32[Array, "B M"], committed: Bool[Array, "B M K"], eos_id: int
) -> Work:
    """Exact infilling: the next work of rows after a forward that commits these drafts of the chosen slots.

    All behind a committed EOS is dropped. In the remaining slots, each draft that differs from the token to have at its
    place is replaced by it (Jacobi iteration, arXiv 2305.10427). The first such replacement is final, since all tokens
    before it are; the later ones are new drafts. So every forward makes at least one more token final, whatever
    rounding does to the next forward.

    Args:
      work: before the forward.
      reading: of the forward.
      runs: length of each slot's accepted prefix, regardless of the slots before it.
      committed: drafts that this forward commits.
      eos_id: id of the end-of-text token.
    """
    slot = jnp.arange(runs.shape[1])[None]
    offset = jnp.arange(work.drafts.shape[2])[None, None]
    ended = jnp.any(committed & (work.drafts == eos_id), axis=(1, 2))
    left = work.chosen & ~jnp.any(committed, axis=2) & ~ended[:, None]
    return dataclasses.replace(
        work,
        phase=jnp.where(jnp.any(left, axis=1), VERIFY, PLAN).astype(work.phase.dtype),
        chosen=left,
        drafts=jnp.where(reading.trusted | (offset <= work.accepted[:, :, None]), work.drafts, reading.wanted),
        accepted=jnp.where(slot == first(left)[:, None], runs, 0),
    )


def follow(candidates: Bool[Array, "B M"], block: Block, reading: Reading, settings: RowSettings) -> Work:
    """The work that follows a plan: all confident candidates are chosen, or else the best; or as many by rank."""
    confidence = reading.plan_probability[:, :, 0]
    confident = candidates & (confidence > settings.slot_threshold[:, None])
    best = jnp.argmax(jnp.where(candidates, confidence, -1.0), axis=1)
    single = jnp.arange(candidates.shape[1])[None] == best[:, None]
    chosen = jnp.where(jnp.any(confident, axis=1, keepdims=True), confident, single)
    is_before = candidates[:, None] & (block.rank[:, None] < block.rank[:, :, None])  # [B, M, M]
    is_next = candidates & (jnp.sum(is_before, axis=2) < jnp.sum(chosen, axis=1, keepdims=True))
    chosen = jnp.where(block.rank == BY_CONFIDENCE, chosen, is_next)
    none = jnp.zeros(candidates.shape, jnp.int32)
    guess = likely_failure(reading.plan_probability, none, block.size, settings)
    phase = jnp.full(chosen.shape[:1], VERIFY, jnp.int32)
    return Work(phase, chosen, reading.plan, reading.plan, reading.plan_probability, none, guess)


def likely_failure(
    chance: Float32[Array, "B M K"], runs: Int32[Array, "B M"], size: Int32[Array, "B M"], settings: RowSettings
) -> Int32[Array, "B M"]:
    """Where drafts will most likely be rejected: the first token below the threshold, or else the least probable one.

    The probabilities given mask tokens are used in place of those given the drafts, which are not known yet. The token
    right behind the accepted prefix of a slot cannot fail.

    Args:
      chance: probability of each draft when it was made.
      runs: length of each slot's accepted prefix.
      size: of each slot.
      settings: token_threshold.

    Returns:
      The place in the slot; the size of the slot if no token can fail.
    """
    offset = jnp.arange(chance.shape[2])[None, None]
    can_fail = (offset > runs[:, :, None]) & (offset < size[:, :, None])
    low = can_fail & (chance <= settings.token_threshold[:, None, None])
    weakest = jnp.argmin(jnp.where(can_fail, chance, 2.0), axis=2)
    fails = jnp.where(jnp.any(low, axis=2), first(low), weakest)
    return jnp.where(jnp.any(can_fail, axis=2), fails, size)


def verify(
    work: Work, here: Block, reading: Reading, eos_id: int
) -> tuple[Bool[Array, "B M"], Int32[Array, "B M"], Bool[Array, "B M K"]]:
    """The phase verify: (chosen slots, length of each one's accepted prefix, drafts to commit).

    Commits up to the first EOS in the accepted prefix of all chosen slots in sequence; otherwise the whole slots in
    that prefix. The first token of a slot is always accepted, and so are tokens that exact infilling knows to be final.
    An EOS behind the accepted prefix is ignored.
    """
    B, M, K = work.drafts.shape
    offset = jnp.arange(K)[None, None]
    is_fed = work.chosen[:, :, None] & (offset < here.size[:, :, None])
    accepted = reading.trusted | (offset <= work.accepted[:, :, None])
    prefix = first((is_fed & ~accepted).reshape(B, M * K))[:, None, None]  # in places of the grid, empty ones included
    eos = first((is_fed & (work.drafts == eos_id)).reshape(B, M * K))[:, None, None]
    place = jnp.arange(M * K).reshape(1, M, K)
    covered = jnp.where(eos < prefix, place <= eos, (place // K + 1) * K <= prefix)
    return work.chosen, jnp.minimum(run_length(accepted), here.size), is_fed & covered


def check(
    work: Work, here: Block, reading: Reading, eos_id: int
) -> tuple[Bool[Array, "B M"], Int32[Array, "B M"], Bool[Array, "B M K"]]:
    """The phase check: (chosen slots, length of their accepted prefixes, drafts to commit, once all are accepted).

    Each prefix grows by at least one token. Once an accepted token is EOS, the rest of its slot counts as accepted and
    the chosen slots behind it are dropped. (The authors' code drops by the index among the chosen slots, which can lose
    earlier, unfinished slots.)
    """
    B, M, K = work.drafts.shape
    offset, slot = jnp.arange(K)[None, None], jnp.arange(M)[None]
    runs = jnp.minimum(run_length(reading.trusted | (offset <= work.accepted[:, :, None])), here.size)
    is_eos = (work.drafts == eos_id) & (offset < here.size[:, :, None]) & work.chosen[:, :, None]
    eos_slot = first(jnp.any(is_eos & (offset < runs[:, :, None]), axis=2))[:, None]  # M if there is none
    chosen = work.chosen & (slot <= eos_slot)
    runs = jnp.where(slot == eos_slot, here.size, runs)

    finished = jnp.all((runs == here.size) | ~chosen, axis=1)
    is_fed = chosen[:, :, None] & (offset < here.size[:, :, None])
    eos = first((is_eos & is_fed).reshape(B, M * K))[:, None, None]
    covered = jnp.arange(M * K).reshape(1, M, K) <= eos
    return chosen, runs, finished[:, None, None] & is_fed & covered


def select(rows: Bool[Array, "B"], new, old):
    """A tree of per-row arrays: new where rows is True, old elsewhere."""
    return jax.tree.map(lambda n, o: jnp.where(rows.reshape(rows.shape + (1,) * (n.ndim - 1)), n, o), new, old)


def run_length(flags: Bool[Array, "*axes K"]) -> Int32[Array, "*axes"]:
    """Length of the leading run of True over the last axis."""
    return jnp.sum(jnp.cumprod(flags.astype(jnp.int32), axis=-1), axis=-1)


def first(flags: Bool[Array, "*axes K"]) -> Int32[Array, "*axes"]:
    """Index of the first True over the last axis; the length of the axis if there is none."""
    return run_length(~flags)
