"""The phase of each row, and what follows from it: the tokens that it feeds, the slots that it chooses, the commits.

Axes: B rows, M slots of a block, K slot size.
"""

from typing import NamedTuple, Self

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float32, Int32

from refusion_jax.decoding.sampling import run_length, surest
from refusion_jax.decoding.settings import TracedSettings
from refusion_jax.systems.refusion.canvas import BY_CONFIDENCE, Block
from refusion_jax.systems.refusion.feed import Reading

PLAN, VERIFY, PROPOSE, CHECK = range(4)


@struct.dataclass
class Work:
    """What each row is doing in its block."""

    phase: Int32[Array, "B"]
    chosen: Bool[Array, "B M"]  # the slots being verified or infilled
    drafts: Int32[Array, "B M K"]
    accepted: Int32[Array, "B M"]  # length of each chosen slot's accepted prefix
    planned: Int32[Array, "B M K"]  # the drafts as mask tokens made them, whose next-token probabilities are wanted
    planned_chance: Float32[Array, "B M K"]  # their probabilities in the plan

    @classmethod
    def of(cls, chosen: Bool[Array, "B M"], plan: Reading) -> Self:
        """The work of rows whose plan has chosen these slots of its block."""
        phase, none = jnp.full(chosen.shape[:1], VERIFY, jnp.int32), jnp.zeros(chosen.shape, jnp.int32)
        return cls(phase, chosen, plan.token, none, plan.token, plan.chance)


class Needs(NamedTuple):
    """The tokens that the phase of a row needs besides a plan, by slots of its block."""

    chosen: Bool[Array, "B M"]  # the slots of its drafts
    drafted: Int32[Array, "B M"]  # number of tokens of each slot's draft
    is_read: Bool[Array, "B M K"]  # drafts whose logits are needed
    may_plan: Bool[Array, "B"]  # whether the next plan can be fed ahead of time
    masks: Bool[Array, "B M K"]  # where mask tokens continue these drafts; only in rows that do not plan


def needs_of(work: Work, here: Block) -> Needs:
    """The tokens that each row's phase needs; `here` is its block.

    Drafts, or in the phase PROPOSE their accepted prefixes, and masks in place of the rest. Logits are needed where
    they check a later draft of the same slot.
    """
    verifies, proposes, checks = ((work.phase == phase)[:, None] for phase in (VERIFY, PROPOSE, CHECK))
    chosen = work.chosen & (work.phase != PLAN)[:, None]
    offset, size = jnp.arange(work.drafts.shape[2])[None, None], here.size[:, :, None]
    is_open = offset >= work.accepted[:, :, None]
    return Needs(
        chosen=chosen,
        drafted=jnp.where(chosen, jnp.where(proposes, work.accepted, here.size), 0),
        is_read=is_open & (offset + 1 < size) & (verifies | checks)[:, :, None],
        may_plan=(verifies | checks)[:, 0],
        masks=is_open & (offset < size) & (chosen & proposes)[:, :, None],
    )


def choose_slots(
    candidates: Bool[Array, "B M"], block: Block, confidence: Float32[Array, "B M"], settings: TracedSettings
) -> Bool[Array, "B M"]:
    """The slots a plan chooses: all confident candidates, at least the best one; in a fixed order, as many by rank."""
    chosen = surest(confidence, candidates, confidence > settings.slot_threshold[:, None])
    is_before = candidates[:, None] & (block.rank[:, None] < block.rank[:, :, None])  # [B, M, M]
    is_next = candidates & (jnp.sum(is_before, axis=2) < jnp.sum(chosen, axis=1, keepdims=True))
    return jnp.where(block.rank == BY_CONFIDENCE, chosen, is_next)


def to_commit(work: Work, here: Block, accepted: Bool[Array, "B M K"], eos_id: int) -> Bool[Array, "B M K"]:
    """The drafts to commit: of the accepted prefix of the chosen slots in sequence all up to an EOS, or whole slots."""
    B, M, K = work.drafts.shape
    is_fed = work.chosen[:, :, None] & (jnp.arange(K)[None, None] < here.size[:, :, None])
    prefix = run_length((accepted | ~is_fed).reshape(B, M * K))[:, None, None]  # of the grid, empty places included
    eos = run_length((~is_fed | (work.drafts != eos_id)).reshape(B, M * K))[:, None, None]
    place = jnp.arange(M * K).reshape(1, M, K)
    return is_fed & jnp.where(eos < prefix, place <= eos, (place // K + 1) * K <= prefix)
