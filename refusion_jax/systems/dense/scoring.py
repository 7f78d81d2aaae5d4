"""The exact likelihood of a text under a dense model: in reading order, or in any order of its slots."""

import dataclasses

from refusion_jax.systems import ar
from refusion_jax.systems.refusion.scoring import slot_scoring
from refusion_jax.systems.scoring import ScoredText, ScoredTokens


def scoring_forward(text: ScoredText) -> ScoredTokens:
    """The forward that scores a text.

    In the order "left_to_right" each token is predicted by the one before it, as lossless drafting writes it, and the
    first one of a text without prompt by a mask. In another order of slots the first token of each is predicted by a
    mask that sees what comes before the slot, as in plan and infill.

    Raises:
      UserError: where the order does not name every slot once.
    """
    if text.order != "left_to_right":
        return slot_scoring(text)
    if len(text.prompt):
        return ar.scoring_forward(text)
    return slot_scoring(dataclasses.replace(text, slot_size=len(text.continuation)))
