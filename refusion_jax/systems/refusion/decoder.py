"""Exact infilling: the chosen slots get the text that the model itself writes one token at a time.

The chosen slots in sequence are one text. One forward pass over its drafts predicts each next token, which replaces the
draft where it differs; what comes before the first such place is final. The jitted twin of `infill_exactly` in
reference.py.

    phase      drafts                  plan
    plan                               remaining slots       chooses the confident slots
    verify     chosen slots            (slots after them)    commits the leading slots that are final, repairs the rest

Plans in brackets are speculative. A row verifies until all chosen slots are committed.

Axes: B rows, M slots of a block, K slot size.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from refusion_jax.decoding.sampling import run_length, select
from refusion_jax.decoding.settings import TracedSettings
from refusion_jax.systems.refusion.canvas import Block
from refusion_jax.systems.refusion.feed import Reading
from refusion_jax.systems.refusion.loop import SlotDecoder
from refusion_jax.systems.refusion.phases import PLAN, VERIFY, Work, to_commit


class ExactInfill(SlotDecoder):
    """Plan and infill, exactly as token by token."""

    def judge(
        self, work: Work, here: Block, of_drafts: Reading, of_masks: Reading, settings: TracedSettings
    ) -> tuple[Work, Bool[Array, "B M K"]]:
        """(the next work of each row, unless a next plan is ready; the drafts to commit).

        After a committed EOS everything is dropped. In the remaining slots, each draft that differs from the wanted
        token at its place is replaced by it (Jacobi iteration, arXiv 2305.10427). The first replacement is final, since
        all tokens before it are; the later ones are new drafts. So every forward pass makes at least one more token
        final, even if rounding differs in the next forward pass.
        """
        is_verify = work.phase == VERIFY
        wanted = blend(work, of_drafts, settings)
        offset, slot = jnp.arange(self.slot_size)[None, None], jnp.arange(self.block_slots)[None]
        is_final = (work.drafts == wanted) | (offset <= work.accepted[:, :, None])
        committed = to_commit(work, here, is_final, self.ids.eos_id) & is_verify[:, None, None]
        ended = jnp.any(committed & (work.drafts == self.ids.eos_id), axis=(1, 2))
        left = work.chosen & ~jnp.any(committed, axis=2) & ~ended[:, None]
        runs = jnp.minimum(run_length(is_final), here.size)
        repaired = work.replace(
            phase=jnp.where(jnp.any(left, axis=1), VERIFY, PLAN).astype(work.phase.dtype),
            chosen=left,
            drafts=jnp.where(is_final, work.drafts, wanted),
            accepted=jnp.where(slot == run_length(~left)[:, None], runs, 0),
        )
        return select(is_verify, repaired, work), committed


def blend(work: Work, read: Reading, settings: TracedSettings) -> Int32[Array, "B M K"]:
    """The wanted token at each place, either the predicted next token or, at temperature 0 only, the plan's draft.

    There are two conditional distributions of the same token: given the tokens before it, and the plan's, given mask
    tokens. They are mixed with weight `infill_blend` for the plan's, and the more probable of plan's draft and
    predicted next token is taken. (The plan's probability of the latter is taken to be 0, so that no distribution has
    to be kept.) The choice depends only on the tokens before it and the plan, so the text does not depend on the number
    of forward passes.
    """
    following, following_chance, planned_chance = (
        jnp.roll(x, 1, axis=2) for x in (read.token, read.chance, read.candidate_chance)
    )
    share = settings.infill_blend[:, None, None]
    keeps = (1 - share) * (following_chance - planned_chance) < share * work.planned_chance
    return jnp.where(keeps & (settings.temperature == 0)[:, None, None], work.planned, following)
