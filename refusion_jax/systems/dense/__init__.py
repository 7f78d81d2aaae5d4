"""Dense slot diffusion: slots in any order, each token trained on as the next token and as a mask."""

import dataclasses
import functools
from pathlib import Path

from refusion_jax.systems import ar
from refusion_jax.systems.dense.drafting import Drafting
from refusion_jax.systems.dense.objective import DenseSlots
from refusion_jax.systems.dense.planning import PlanAlone
from refusion_jax.systems.interface import ScoredText, ScoredTokens, Scoring, System
from refusion_jax.systems.refusion import CLAIMS
from refusion_jax.systems.refusion.likelihood import slot_scoring
from refusion_jax.systems.refusion.reference import plan_and_infill


def scoring_forward(text: ScoredText) -> ScoredTokens:
    """The forward pass that scores a text.

    In the order "left_to_right" each token is predicted by the one before it, as lossless drafting writes it, and the
    first one of a text without prompt by a mask. In another order of slots the first token of each is predicted by a
    mask that sees what comes before the slot, as in plan and infill: see `slot_scoring`.
    """
    if text.order != "left_to_right":
        return slot_scoring(text)
    if len(text.prompt):
        return ar.scoring_forward(text)
    return slot_scoring(dataclasses.replace(text, slot_size=len(text.continuation)))


SYSTEM = System(
    name="dense",
    objective=DenseSlots,
    decoders={"dense": Drafting, "dense_plan": PlanAlone},
    references={"dense": ar.reference, "dense_plan": functools.partial(plan_and_infill, plans_alone=True)},
    scoring=Scoring(scoring_forward),
    claims=CLAIMS,  # goals, not claims of a paper
    custom_generate=Path(__file__).parent / "custom_generate",
)
