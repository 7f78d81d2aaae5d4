"""What the rows of the ReFusion decoder make of a forward: which drafts they commit, and what they do next.

Everything here is arithmetic on the grid of a block's slots; `refusion` feeds the forwards and keeps the state.

Axes: B rows, M slots of a block, K slot size.
"""

import dataclasses

import jax
import jax.numpy as jnp

from refusion_jax.systems.refusion.canvas import RowSettings
from refusion_jax.systems.refusion.feeding import Block, FeedPlan

DONE, PLAN, VERIFY, PROPOSE, CHECK = range(5)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Work:
    """What a row is busy with inside its block."""

    phase: jax.Array  # [B] int32
    chosen: jax.Array  # [B, M] bool, the slots being verified or infilled
    drafts: jax.Array  # [B, M, K] int32
    accepted: jax.Array  # [B, M] int32, length of each chosen slot's accepted run
    guess: jax.Array  # [B, M] int32, where its draft will most likely fail; its size where it cannot


@dataclasses.dataclass(frozen=True)
class Reading:
    """What the logits of one forward say about each part of the feed, on the grid."""

    trusted: jax.Array  # [B, M, K] bool, drafts above the threshold by the token before them; not the first of a slot
    plan: jax.Array  # [B, M, K] int32
    plan_probability: jax.Array  # [B, M, K] float32
    guesses: jax.Array  # [B, M, K] int32
    guesses_probability: jax.Array  # [B, M, K] float32


def judge(
    work: Work, here: Block, plan: FeedPlan, reading: Reading, settings: RowSettings, eos_id: int
) -> tuple[Work, jax.Array]:
    """What each row does next, a ready plan aside, and which of its drafts [B, M, K] it commits."""
    phase, drafts = work.phase, work.drafts
    is_verify, is_propose, is_check = (phase == p for p in (VERIFY, PROPOSE, CHECK))
    verified, checked = verify(work, here, reading, eos_id), check(work, here, reading, eos_id)
    nothing = work.chosen, work.accepted, jnp.zeros(drafts.shape, bool)
    chosen, runs, committed = select(is_verify, verified, select(is_check, checked, nothing))

    infills = (is_verify | is_check) & ~jnp.any(committed, axis=(1, 2))
    was_guessed = jnp.all(~chosen | (runs == here.size) | (plan.guessed & (plan.cut == runs)), axis=1)
    is_drafted = is_propose | (infills & was_guessed)
    is_new = is_drafted[:, None, None] & (jnp.arange(drafts.shape[2])[None, None] >= runs[:, :, None])
    guess = likely_failure(reading.guesses_probability, runs, here.size, settings)
    otherwise = jnp.where(phase == DONE, phase, PLAN)  # of phase's own dtype: a weak one would compile again
    return Work(
        phase=jnp.where(is_drafted, CHECK, jnp.where(infills, PROPOSE, otherwise)),
        chosen=chosen,
        drafts=jnp.where(is_new, reading.guesses, drafts),
        accepted=runs,
        guess=select(is_drafted, guess, work.guess),
    ), committed


def follow(candidates: jax.Array, block: Block, reading: Reading, settings: RowSettings) -> Work:
    """Chooses every candidate [B, M] above the threshold, or else the single best one."""
    confidence = reading.plan_probability[:, :, 0]
    confident = candidates & (confidence > settings.slot_threshold[:, None])
    best = jnp.argmax(jnp.where(candidates, confidence, -1.0), axis=1)
    single = jnp.arange(candidates.shape[1])[None] == best[:, None]
    chosen = jnp.where(jnp.any(confident, axis=1, keepdims=True), confident, single)
    none = jnp.zeros(candidates.shape, jnp.int32)
    guess = likely_failure(reading.plan_probability, none, block.size, settings)
    return Work(jnp.full(chosen.shape[:1], VERIFY, jnp.int32), chosen, reading.plan, none, guess)


def likely_failure(chance: jax.Array, runs: jax.Array, size: jax.Array, settings: RowSettings) -> jax.Array:
    """Where drafts will most likely fail: the first token below the threshold, or else the least probable one.

    Their probabilities given mask tokens stand in for those given the drafts, which are not known yet. A slot's next
    token behind its accepted run cannot fail.

    Args:
      chance: [B, M, K] float32, of each draft, where it was made.
      runs: [B, M] int32, accepted before.
      size: [B, M] int32.
      settings: token_threshold.

    Returns:
      [B, M] int32, a slot's size where no token can fail.
    """
    offset = jnp.arange(chance.shape[2])[None, None]
    can_fail = (offset > runs[:, :, None]) & (offset < size[:, :, None])
    low = can_fail & (chance <= settings.token_threshold[:, None, None])
    weakest = jnp.argmin(jnp.where(can_fail, chance, 2.0), axis=2)
    fails = jnp.where(jnp.any(low, axis=2), first(low), weakest)
    return jnp.where(jnp.any(can_fail, axis=2), fails, size)


def verify(work: Work, here: Block, reading: Reading, eos_id: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(chosen slots, their own accepted runs [B, M], the drafts [B, M, K] to commit).

    Committed is what the accepted prefix of the concatenation covers: up to its first EOS, or else its whole slots. A
    slot's first token is accepted always. An EOS behind the accepted prefix is ignored.
    """
    B, M, K = work.drafts.shape
    offset = jnp.arange(K)[None, None]
    is_fed = work.chosen[:, :, None] & (offset < here.size[:, :, None])
    accepted = reading.trusted | (offset == 0)
    prefix = first((is_fed & ~accepted).reshape(B, M * K))[:, None, None]  # in places of the grid, empty ones too
    eos = first((is_fed & (work.drafts == eos_id)).reshape(B, M * K))[:, None, None]
    place = jnp.arange(M * K).reshape(1, M, K)
    covered = jnp.where(eos < prefix, place <= eos, (place // K + 1) * K <= prefix)
    return work.chosen, jnp.minimum(run_length(accepted), here.size), is_fed & covered


def check(work: Work, here: Block, reading: Reading, eos_id: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(chosen slots, their accepted runs [B, M], the drafts [B, M, K] to commit): none until all runs are whole.

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


def select(rows: jax.Array, new, old):
    """A tree of per-row arrays: new where rows [B] is True, old elsewhere."""
    return jax.tree.map(lambda n, o: jnp.where(rows.reshape(rows.shape + (1,) * (n.ndim - 1)), n, o), new, old)


def run_length(flags: jax.Array) -> jax.Array:
    """Length of the leading run of True over the last axis, int32."""
    return jnp.sum(jnp.cumprod(flags.astype(jnp.int32), axis=-1), axis=-1)


def first(flags: jax.Array) -> jax.Array:
    """Index of the first True over the last axis, its length where there is none; int32."""
    return run_length(~flags)
