"""The paper's infilling: drafts above a threshold are accepted, the others are drafted again.

The jitted twin of `infill_by_threshold` in reference.py. Plans in brackets are speculative.

    phase      drafts                  plan                 masks
    plan                               remaining slots                         chooses the confident slots
    verify     chosen slots            (slots after them)                      commits the accepted whole slots
    propose    their accepted runs                          the rest of each   drafts the rest again
    check      chosen slots, alone     (slots after them)                      commits once all are accepted

Axes: B rows, M slots of a block, K slot size, W width of the feed.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from refusion_jax.decoding.sampling import run_length, select
from refusion_jax.decoding.settings import TracedSettings
from refusion_jax.systems.refusion.canvas import Block
from refusion_jax.systems.refusion.feed import Feed, Reading
from refusion_jax.systems.refusion.loop import SlotDecoder
from refusion_jax.systems.refusion.phases import CHECK, PLAN, PROPOSE, VERIFY, Work, to_commit


class ThresholdInfill(SlotDecoder):
    """Plan and infill with the thresholds of the paper."""

    def visible(self, work: Work, feed: Feed) -> Bool[Array, "B W W"]:
        """Which tokens of the feed each one attends to: always itself, and nothing after it.

        Example: two slots a and b of two tokens that are verified together, and a plan for slot c (row: query, column:
        key). `x` is 0 in rows that propose or check, slot by slot.

                   a1 a2 b1 b2  c1 c2
            a1      1  .  .  .   .  .
            a2      1  1  .  .   .  .
            b1      x  x  1  .   .  .
            b2      x  x  1  1   .  .
            c1      1  1  1  1   1  .
            c2      1  1  1  1   1  1
        """
        M, K = work.drafts.shape[1:]
        slot = feed.source // K % M
        proposes, checks = ((work.phase == phase)[:, None] for phase in (PROPOSE, CHECK))
        sees_all = ~proposes & ~(checks & feed.is_draft)
        return super().visible(work, feed) & (sees_all[:, :, None] | (slot[:, :, None] == slot[:, None]))

    def judge(
        self, work: Work, here: Block, of_drafts: Reading, of_masks: Reading, settings: TracedSettings
    ) -> tuple[Work, Bool[Array, "B M K"]]:
        """Commits accepted drafts; rows without any draft the rest again."""
        phase, drafts, eos_id = work.phase, work.drafts, self.ids.eos_id
        is_verify, is_propose, is_check = (phase == p for p in (VERIFY, PROPOSE, CHECK))
        offset = jnp.arange(self.slot_size)[None, None]
        draft_chance = jnp.roll(of_drafts.candidate_chance, 1, axis=2)
        trusted = (draft_chance > settings.token_threshold[:, None, None]) | (offset <= work.accepted[:, :, None])
        runs = jnp.minimum(run_length(trusted), here.size)
        verified = work.chosen, runs, to_commit(work, here, trusted, eos_id)
        nothing = work.chosen, work.accepted, jnp.zeros(drafts.shape, bool)
        checked = check_drafts(work, here, runs, eos_id)
        chosen, runs, committed = select(is_verify, verified, select(is_check, checked, nothing))

        infills = (is_verify | is_check) & ~jnp.any(committed, axis=(1, 2))
        is_new = is_propose[:, None, None] & (offset >= runs[:, :, None])
        drafts = jnp.where(is_new, of_masks.token, drafts)
        after = work.replace(
            phase=jnp.where(is_propose, CHECK, jnp.where(infills, PROPOSE, PLAN)).astype(phase.dtype),
            chosen=chosen,
            drafts=drafts,
            accepted=runs,
            planned=drafts,
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
    eos_slot = run_length(~jnp.any(is_eos & (offset < runs[:, :, None]), axis=2))[:, None]  # M if there is none
    chosen = work.chosen & (slot <= eos_slot)
    runs = jnp.where(slot == eos_slot, here.size, runs)

    is_finished = jnp.all((runs == here.size) | ~chosen, axis=1)
    is_fed = chosen[:, :, None] & (offset < here.size[:, :, None])
    eos = run_length(~is_eos.reshape(B, M * K))[:, None, None]  # the first one, in a slot that is still chosen
    is_covered = jnp.arange(M * K).reshape(1, M, K) <= eos
    return chosen, runs, is_finished[:, None, None] & is_fed & is_covered
