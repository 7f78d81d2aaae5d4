"""Plan and infill with a dense model: as ReFusion's exact infilling, but planned slots do not see each other's masks.

In training a mask sees only the clean text before its slot and the masks of its own slot, so that is what it sees in
a plan, too. Slots (ab)(cd)(ef), of which (cd) was chosen and is verified, with the plan of the others fed ahead:

    c   1 . . . . .
    d   1 1 . . . .
    A   1 1 1 . . .
    B   1 1 1 1 . .
    E   1 1 . . 1 .
    F   1 1 . . 1 1

Axes: B rows, W fed tokens.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Self

from jaxtyping import Array, Bool

from refusion_jax.model.shape import ModelConfig
from refusion_jax.systems.refusion.decoder import ExactInfill
from refusion_jax.systems.refusion.feed import Feed
from refusion_jax.systems.refusion.phases import Work
from refusion_jax.systems.refusion.settings import CONFIDENCE, EXACT, LEFT_TO_RIGHT, THRESHOLD, SlotSettings


class PlanSettings(SlotSettings):
    """How to plan and infill."""

    _infill = EXACT

    @classmethod
    def operating_points(cls, new_tokens: int, trained: Mapping[str, Any]) -> list[dict[str, Any]]:
        largest = {"slot_size": max(trained["sizes"]), "slot_threshold": 0.6, "order": LEFT_TO_RIGHT}
        points = [
            largest | {"serial_blocks": blocks, "infill_blend": b} for blocks, b in ((1, 0.5), (1, 0.0), (2, 0.0))
        ]
        points.append({"slot_size": min(trained["sizes"]), "slot_threshold": 0.6, "order": CONFIDENCE})
        return [p for p in points if not new_tokens % (p["slot_size"] * p.get("serial_blocks", 1))]

    def check(self) -> None:
        super().check()
        if self.infill == THRESHOLD:
            self.refuse("infill", "must be 'exact' or 'auto': a dense model is infilled exactly")

    def for_model(self, model: ModelConfig) -> Self:
        return dataclasses.replace(self, infill=EXACT)


class PlanAlone(ExactInfill):
    """Exact infilling after such plans."""

    settings: ClassVar[type[PlanSettings]] = PlanSettings
    typical: ClassVar[dict[float, float]] = {16.0: 4.53}

    def visible(self, work: Work, feed: Feed) -> Bool[Array, "B W W"]:
        """Which tokens of the feed each one attends to: itself and those before it, except masks of other slots."""
        slot = feed.source // self.slot_size  # numbered separately in drafts and plan
        return super().visible(work, feed) & (feed.is_draft[:, None] | (slot[:, :, None] == slot[:, None]))
