"""ReFusion (arXiv 2512.13586): slot diffusion, with slots in any order and the tokens of a slot left to right."""

from collections.abc import Sequence
from pathlib import Path

from refusion_jax.decoding.requests import Request
from refusion_jax.model.shape import ModelConfig
from refusion_jax.systems.interface import Claim, Scoring, System
from refusion_jax.systems.refusion.authors import ThresholdInfill
from refusion_jax.systems.refusion.decoder import ExactInfill
from refusion_jax.systems.refusion.likelihood import slot_scoring
from refusion_jax.systems.refusion.loop import SlotDecoder
from refusion_jax.systems.refusion.objective import SlotDiffusion
from refusion_jax.systems.refusion.reference import one_by_one, plan_and_infill
from refusion_jax.systems.refusion.sequential import Sequential
from refusion_jax.systems.refusion.settings import EXACT, THRESHOLD

# arXiv 2512.13586, abstract: 34 % better and 18 times as fast as earlier masked diffusion models, and 2.33 times as
# fast as strong autoregressive models, with about their quality.
CLAIMS = (Claim("llada", accuracy=1.34, speed=18.0), Claim("ar", accuracy=0.98, speed=2.33))


class PlanAndInfill(SlotDecoder):
    """The decoder `refusion`: `ExactInfill` or `ThresholdInfill`, as the setting `infill` says."""

    @classmethod
    def for_requests(cls, requests: Sequence[Request], model: ModelConfig) -> SlotDecoder:
        infill = {EXACT: ExactInfill, THRESHOLD: ThresholdInfill}[requests[0].settings.infill]
        return infill.for_requests(requests, model)


SYSTEM = System(
    name="refusion",
    objective=SlotDiffusion,
    decoders={"refusion": PlanAndInfill, "sequential": Sequential},
    references={"refusion": plan_and_infill, "sequential": one_by_one},
    section="slots",
    scoring=Scoring(slot_scoring),
    claims=CLAIMS,
    custom_generate=Path(__file__).parent / "custom_generate",
    is_default=True,
)
