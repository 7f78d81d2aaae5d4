"""The paper's infilling: drafts above a threshold are accepted, the others are drafted again.

The jitted twin of `infill_by_threshold` in reference.py. Parts in brackets are speculative: if drafts fail where
guessed, the next draft is already there.

    phase      drafts                  plan                 guesses
    plan                               remaining slots                             chooses the confident slots
    verify     chosen slots            (slots after them)   (a lone slot's rest)   commits the accepted whole slots
    propose    their accepted runs                          the rest of each       drafts the rest again
    check      chosen slots, alone     (slots after them)   (the rest of each)     commits once all are accepted

Axes: B rows, M slots of a block, K slot size, W width of the feed.
"""

from typing import ClassVar

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float32, Int32

from refusion_jax.decoding.requests import Request
from refusion_jax.decoding.sampling import first, run_length, select
from refusion_jax.decoding.settings import TracedSettings
from refusion_jax.systems.refusion.canvas import Block
from refusion_jax.systems.refusion.feed import Feed, Part, Reading
from refusion_jax.systems.refusion.loop import CHECK, PLAN, PROPOSE, VERIFY, Needs, SlotDecoder, Work, to_commit


@struct.dataclass
class ThresholdWork(Work):
    """The work of each row, and where its drafts are expected to fail."""

    likely_failure: Int32[Array, "B M"]  # place in the slot; its size if the draft cannot fail

    @property
    def cut(self) -> Int32[Array, "B M"]:
        """The place in each slot where mask tokens take the place of the draft."""
        return jnp.where((self.phase == PROPOSE)[:, None], self.accepted, self.likely_failure)


class ThresholdInfill(SlotDecoder):
    """The decoder with its compiled sizes."""

    draws_drafts: ClassVar[bool] = False

    @classmethod
    def slots_of_a_forward(cls, request: Request) -> int:
        """The slots of any decoder; a lone slot is fed with the guess of its rest."""
        return max(super().slots_of_a_forward(request), 2 if request.settings.budget else 1)

    def needs(self, work: ThresholdWork, here: Block) -> Needs:
        """Drafts, with the mask tokens that draft their rest."""
        verifies, proposes, checks = ((work.phase == phase)[:, None] for phase in (VERIFY, PROPOSE, CHECK))
        chosen = work.chosen & (verifies | proposes | checks)
        # Only a slot that is verified without others attends to the same tokens as if it were alone.
        is_lone = jnp.sum(chosen, axis=1, keepdims=True) == 1
        offset = jnp.arange(self.slot_size)[None, None]
        is_open = (offset >= work.accepted[:, :, None]) & (offset + 1 < here.size[:, :, None])
        return Needs(
            chosen=chosen,
            drafted=jnp.where(chosen, jnp.where(proposes, work.accepted, here.size), 0),
            masks=jnp.where(proposes & chosen, here.size - work.accepted, 0),
            guesses=jnp.where(chosen & (checks | (verifies & is_lone)), here.size - work.likely_failure, 0),
            is_read=is_open & (verifies | checks)[:, :, None],
            may_plan=(verifies | checks)[:, 0],
        )

    def guess(self, work: ThresholdWork, here: Block, needs: Needs, room: Int32[Array, "B"]) -> list[Part]:
        """The masks from the cut of each slot on: those that are needed, or as many guesses as fit into the room."""
        fits = (needs.guesses > 0) & (jnp.cumsum(needs.guesses, axis=1) <= room[:, None])
        is_guessed = (needs.chosen & (work.phase == PROPOSE)[:, None]) | fits
        offset = jnp.arange(self.slot_size)[None, None]
        is_fed = is_guessed[:, :, None] & (offset >= work.cut[:, :, None]) & (offset < here.size[:, :, None])
        mask, always = jnp.full((1, 1, 1), self.ids.mask_id), jnp.ones((1, 1, 1), bool)
        return [Part(here, mask, is_fed, always, is_drawn=False)]

    def candidates(self, work: ThresholdWork) -> Int32[Array, "B M K"]:
        """The drafts: they are accepted if the token before gives them a probability above the threshold."""
        return work.drafts

    def visible(self, work: ThresholdWork, feed: Feed) -> Bool[Array, "B W W"]:
        """Which tokens of the feed each one attends to: always itself, and nothing after it.

        Example: two slots a and b of two tokens that are verified together, a plan for slot c, and a guess for the
        second token of b (row: query, column: key). `x` is 0 where rows propose or check, slot by slot.

                   a1 a2 b1 b2  c1 c2  B2
            a1      1  .  .  .   .  .   .
            a2      1  1  .  .   .  .   .
            b1      x  x  1  .   .  .   .
            b2      x  x  1  1   .  .   .
            c1      1  1  1  1   1  .   .
            c2      1  1  1  1   1  1   .
            B2      .  .  1  .   .  .   1
        """
        M, K = work.drafts.shape[1:]
        part, slot, offset = feed.source // (M * K), feed.source // K % M, feed.source % K
        same_slot = slot[:, :, None] == slot[:, None, :]
        before_cut = offset[:, None] < jnp.take_along_axis(work.cut, slot, axis=1)[:, :, None]
        is_alone = (work.phase == PROPOSE) | (work.phase == CHECK)
        of_draft = same_slot | ~is_alone[:, None, None]
        of_guess = same_slot & jnp.where(part[:, None] == 0, before_cut, part[:, None] == 2)
        query = part[:, :, None]
        seen = jnp.where(query == 0, of_draft, (query == 1) | of_guess)
        return super().visible(work, feed) & seen

    def begin(self, chosen: Bool[Array, "B M"], block: Block, plan: Reading, settings: TracedSettings) -> ThresholdWork:
        none = jnp.zeros(chosen.shape, jnp.int32)
        phase = jnp.full(chosen.shape[:1], VERIFY, jnp.int32)
        failure = likely_failure(plan.chance, none, block.size, settings)
        return ThresholdWork(phase, chosen, plan.token, none, failure)

    def judge(
        self, work: ThresholdWork, here: Block, guess: list[Part], readings: list[Reading], settings: TracedSettings
    ) -> tuple[ThresholdWork, Bool[Array, "B M K"]]:
        """Commits what is accepted; where that is nothing, drafts the rest again, or takes the guess if it fits."""
        phase, drafts, eos_id = work.phase, work.drafts, self.ids.eos_id
        is_verify, is_propose, is_check = (phase == p for p in (VERIFY, PROPOSE, CHECK))
        offset = jnp.arange(self.slot_size)[None, None]
        draft_chance = jnp.roll(readings[0].candidate_chance, 1, axis=2)
        trusted = (draft_chance > settings.token_threshold[:, None, None]) | (offset <= work.accepted[:, :, None])
        runs = jnp.minimum(run_length(trusted), here.size)
        verified = work.chosen, runs, to_commit(work, here, trusted, eos_id)
        nothing = work.chosen, work.accepted, jnp.zeros(drafts.shape, bool)
        checked = check_drafts(work, here, runs, eos_id)
        chosen, runs, committed = select(is_verify, verified, select(is_check, checked, nothing))

        infills = (is_verify | is_check) & ~jnp.any(committed, axis=(1, 2))
        is_guessed = jnp.any(guess[0].is_fed, axis=2)
        was_right = jnp.all(~chosen | (runs == here.size) | (is_guessed & (work.cut == runs)), axis=1)
        is_drafted = is_propose | (infills & was_right)
        is_new = is_drafted[:, None, None] & (offset >= runs[:, :, None])
        failure = likely_failure(readings[2].chance, runs, here.size, settings)
        after = ThresholdWork(
            phase=jnp.where(is_drafted, CHECK, jnp.where(infills, PROPOSE, PLAN)).astype(phase.dtype),
            chosen=chosen,
            drafts=jnp.where(is_new, readings[2].token, drafts),
            accepted=runs,
            likely_failure=select(is_drafted, failure, work.likely_failure),
        )
        return after, committed


def check_drafts(
    work: Work, here: Block, runs: Int32[Array, "B M"], eos_id: int
) -> tuple[Bool[Array, "B M"], Int32[Array, "B M"], Bool[Array, "B M K"]]:
    """The phase CHECK: (chosen slots, length of their accepted prefixes, drafts to commit, once all are accepted).

    Each prefix grows by at least one token. Once an accepted token is EOS, the rest of its slot counts as accepted and
    the chosen slots after it are dropped. (The authors' code drops by the index among the chosen slots, which can lose
    earlier, unfinished slots.)
    """
    B, M, K = work.drafts.shape
    offset, slot = jnp.arange(K)[None, None], jnp.arange(M)[None]
    is_eos = (work.drafts == eos_id) & (offset < here.size[:, :, None]) & work.chosen[:, :, None]
    eos_slot = first(jnp.any(is_eos & (offset < runs[:, :, None]), axis=2))[:, None]  # M if there is none
    chosen = work.chosen & (slot <= eos_slot)
    runs = jnp.where(slot == eos_slot, here.size, runs)

    is_finished = jnp.all((runs == here.size) | ~chosen, axis=1)
    is_fed = chosen[:, :, None] & (offset < here.size[:, :, None])
    eos = first((is_eos & is_fed).reshape(B, M * K))[:, None, None]
    is_covered = jnp.arange(M * K).reshape(1, M, K) <= eos
    return chosen, runs, is_finished[:, None, None] & is_fed & is_covered


def likely_failure(
    chance: Float32[Array, "B M K"], runs: Int32[Array, "B M"], size: Int32[Array, "B M"], settings: TracedSettings
) -> Int32[Array, "B M"]:
    """Where drafts will most likely be rejected: the first token below the threshold, or else the least probable one.

    The place in the slot, or the size of the slot if no token can fail: the token right after the accepted prefix,
    of length `runs`, cannot. The `chance` of each draft when it was made, given mask tokens, is used in place of that
    given the drafts, which are not known yet.
    """
    offset = jnp.arange(chance.shape[2])[None, None]
    can_fail = (offset > runs[:, :, None]) & (offset < size[:, :, None])
    low = can_fail & (chance <= settings.token_threshold[:, None, None])
    weakest = jnp.argmin(jnp.where(can_fail, chance, 2.0), axis=2)
    fails = jnp.where(jnp.any(low, axis=2), first(low), weakest)
    return jnp.where(jnp.any(can_fail, axis=2), fails, size)
