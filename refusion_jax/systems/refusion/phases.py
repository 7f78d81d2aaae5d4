"""What the rows of the ReFusion decoder make of a forward: which drafts they commit, and what they do next.

Everything here is arithmetic on the grid of a block's slots; `refusion` feeds the forwards and keeps the state.

Axes: B rows, M slots of a block, K slot size.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32

from refusion_jax.systems.refusion.canvas import EXACT, RowSettings
from refusion_jax.systems.refusion.feeding import Block, FeedPlan

DONE, PLAN, VERIFY, PROPOSE, CHECK, RECOMPUTE = range(6)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Work:
    """What a row is busy with inside its block."""

    phase: Int32[Array, "B"]
    chosen: Bool[Array, "B M"]  # the slots being verified or infilled
    drafts: Int32[Array, "B M K"]
    planned: Int32[Array, "B M K"]  # the drafts as the plan made them
    planned_probability: Float32[Array, "B M K"]  # which the plan gave them
    accepted: Int32[Array, "B M"]  # length of each chosen slot's accepted run
    guess: Int32[Array, "B M"]  # where its draft will most likely fail; its size where it cannot


@dataclasses.dataclass(frozen=True)
class Reading:
    """What the logits of one forward say about each part of the feed, on the grid."""

    trusted: Bool[Array, "B M K"]  # drafts that the token before them accepts; means nothing at a slot's first
    wanted: Int32[Array, "B M K"]  # with exact infilling: what the token before them would have there instead
    plan: Int32[Array, "B M K"]
    plan_probability: Float32[Array, "B M K"]
    guesses: Int32[Array, "B M K"]
    guesses_probability: Float32[Array, "B M K"]


def judge(
    work: Work, here: Block, plan: FeedPlan, reading: Reading, settings: RowSettings, eos_id: int
) -> tuple[Work, Bool[Array, "B M K"]]:
    """What each row does next, a ready plan aside, and which of its drafts it commits."""
    phase, drafts = work.phase, work.drafts
    is_verify, is_propose, is_exact = phase == VERIFY, phase == PROPOSE, settings.infill == EXACT
    is_check = (phase == CHECK) | (phase == RECOMPUTE)
    verified, checked = verify(work, here, reading, eos_id), check(work, here, reading, eos_id)
    nothing = work.chosen, work.accepted, jnp.zeros(drafts.shape, bool)
    chosen, runs, committed = select(is_verify, verified, select(is_check, checked, nothing))

    infills = ((is_verify & ~is_exact) | is_check) & ~jnp.any(committed, axis=(1, 2))
    saw_less = (phase == CHECK) & jnp.any(committed, axis=(1, 2)) & (jnp.sum(chosen, axis=1) > 1)
    recomputes = saw_less & settings.recompute  # all are accepted: fed once more, and committed then
    committed = committed & ~recomputes[:, None, None]
    was_guessed = jnp.all(~chosen | (runs == here.size) | (plan.guessed & (plan.cut == runs)), axis=1)
    is_drafted = is_propose | (infills & was_guessed)
    is_new = is_drafted[:, None, None] & (jnp.arange(drafts.shape[2])[None, None] >= runs[:, :, None])
    guess = likely_failure(reading.guesses_probability, runs, here.size, settings)
    # Of phase's own dtype: a weak one would compile again.
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
    """Exact infilling: the token that is wanted at each place, the next token's or the plan's.

    Two conditionals tell of the same token: the one given the tokens before it, and the plan's, given mask tokens. With
    a share `infill_blend` of the second, the plan's draft is compared to the next token (of which the plan's
    probability is taken to be 0, so that no distribution need be kept). The choice depends on nothing but the tokens
    before it and the plan, so the text is the same however many forwards it took.

    Args:
      work: planned, planned_probability.
      planned: probability of the plan's draft, given the tokens before it.
      following: the choice given the tokens before it.
      following_probability: of that choice.
      settings: temperature, infill_blend [B, 1, 1].
    """
    share = settings.infill_blend
    keeps = (1 - share) * (following_probability - planned) < share * work.planned_probability
    return jnp.where(keeps & (settings.temperature == 0), work.planned, following)


def repair(
    work: Work, reading: Reading, runs: Int32[Array, "B M"], committed: Bool[Array, "B M K"], eos_id: int
) -> Work:
    """Exact infilling: what rows do after a forward that commits these drafts of the chosen slots.

    Whatever lies behind a committed EOS is dropped. Of the slots that are left, a draft that its predecessor would not
    have is replaced by what it would have (Jacobi iteration, arXiv 2305.10427): behind the first of them that is
    another draft, at the first it is final, since everything before it is. So one token more at least is known to be
    final after each forward, whatever rounding does to the next.

    Args:
      work: before the forward.
      reading: of the forward.
      runs: accepted tokens of each slot, the slots before it aside.
      committed: by this forward.
      eos_id: the end of text.
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
    """Chooses every candidate above the threshold, or else the single best one."""
    confidence = reading.plan_probability[:, :, 0]
    confident = candidates & (confidence > settings.slot_threshold[:, None])
    best = jnp.argmax(jnp.where(candidates, confidence, -1.0), axis=1)
    single = jnp.arange(candidates.shape[1])[None] == best[:, None]
    chosen = jnp.where(jnp.any(confident, axis=1, keepdims=True), confident, single)
    none = jnp.zeros(candidates.shape, jnp.int32)
    guess = likely_failure(reading.plan_probability, none, block.size, settings)
    phase = jnp.full(chosen.shape[:1], VERIFY, jnp.int32)
    return Work(phase, chosen, reading.plan, reading.plan, reading.plan_probability, none, guess)


def likely_failure(
    chance: Float32[Array, "B M K"], runs: Int32[Array, "B M"], size: Int32[Array, "B M"], settings: RowSettings
) -> Int32[Array, "B M"]:
    """Where drafts will most likely fail: the first token below the threshold, or else the least probable one.

    Their probabilities given mask tokens stand in for those given the drafts, which are not known yet. A slot's next
    token behind its accepted run cannot fail.

    Args:
      chance: of each draft, where it was made.
      runs: accepted before.
      size: of each slot.
      settings: token_threshold.

    Returns:
      The place in the slot; the slot's size where no token can fail.
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
    """(chosen slots, their own accepted runs, the drafts to commit).

    Committed is what the accepted prefix of the concatenation covers: up to its first EOS, or else its whole slots. A
    slot's first token is accepted always, and so is the one behind the run that exact infilling knows to be final. An
    EOS behind the accepted prefix is ignored.
    """
    B, M, K = work.drafts.shape
    offset = jnp.arange(K)[None, None]
    is_fed = work.chosen[:, :, None] & (offset < here.size[:, :, None])
    accepted = reading.trusted | (offset <= work.accepted[:, :, None])
    prefix = first((is_fed & ~accepted).reshape(B, M * K))[:, None, None]  # in places of the grid, empty ones too
    eos = first((is_fed & (work.drafts == eos_id)).reshape(B, M * K))[:, None, None]
    place = jnp.arange(M * K).reshape(1, M, K)
    covered = jnp.where(eos < prefix, place <= eos, (place // K + 1) * K <= prefix)
    return work.chosen, jnp.minimum(run_length(accepted), here.size), is_fed & covered


def check(
    work: Work, here: Block, reading: Reading, eos_id: int
) -> tuple[Bool[Array, "B M"], Int32[Array, "B M"], Bool[Array, "B M K"]]:
    """(chosen slots, their accepted runs, the drafts to commit): none until all runs are whole.

    Runs grow by one token at least. Once an accepted token is EOS, the rest of its slot counts as accepted and the
    chosen slots behind it are dropped. (The authors' code drops by the index among the chosen slots and can lose
    earlier, unfinished ones; this does not.)
    """
    B, M, K = work.drafts.shape
    offset, slot = jnp.arange(K)[None, None], jnp.arange(M)[None]
    runs = jnp.minimum(run_length(reading.trusted | (offset <= work.accepted[:, :, None])), here.size)
    is_eos = (work.drafts == eos_id) & (offset < here.size[:, :, None]) & work.chosen[:, :, None]
    eos_slot = first(jnp.any(is_eos & (offset < runs[:, :, None]), axis=2))[:, None]  # M where there is none
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
    """Index of the first True over the last axis, its length where there is none."""
    return run_length(~flags)
