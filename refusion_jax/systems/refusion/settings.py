"""The settings of ReFusion's decoders, and those of them that are traced arrays with a value for each row.

Axis: B rows.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Self

from refusion_jax.cli.settings import setting
from refusion_jax.decoding import settings as shared
from refusion_jax.model.shape import ModelConfig

INFILLS = THRESHOLD, EXACT, AUTO = "threshold", "exact", "auto"
ORDERS = CONFIDENCE, LEFT_TO_RIGHT, RANDOM = "confidence", "left_to_right", "random"
BEST_INFILL = {"infill": EXACT, "infill_blend": 0.5}  # right most often (benchmarks/results/infilling.md)


@dataclasses.dataclass(frozen=True)
class _Slots(shared.Settings):
    """Settings of all decoders that write slots."""

    slot_size: int = setting(8, "Tokens per slot", scope="compiled", at_least=1, at_most=4096)

    @property
    def unit(self) -> int:
        return self.slot_size


@dataclasses.dataclass(frozen=True)
class SlotSettings(_Slots):
    """How to decode a slot-diffusion model (ReFusion, arXiv 2512.13586, section 3.3)."""

    serial_blocks: int = setting(
        1, "The answer is cut into this many equal blocks of slots, decoded one after the other", at_least=1,
        at_most=2**20,
    )  # fmt: skip
    slot_threshold: float = setting(
        0.9, "Slots whose first token is more probable than this are chosen", at_least=0, at_most=1
    )
    order: str = setting(
        CONFIDENCE, "Which slots are chosen, as many as pass slot_threshold, at least one: 'confidence', those with "
        "the most probable first tokens; 'left_to_right', the next in the text; 'random', the next in an order that is "
        "drawn for each prompt, by seed",
        choices=ORDERS,
    )  # fmt: skip
    token_threshold: float = setting(
        -1.0, "With infill=threshold: drafted tokens more probable than this are accepted; -1: 0.9. "
        "If given, infill=auto means threshold", at_least=-1, at_most=1,
    )  # fmt: skip
    infill: str = setting(
        AUTO, "How drafts become text: 'threshold', the authors' algorithm, accepts those above token_threshold and "
        "drafts the others again; 'exact' takes the model's own next token wherever a draft differs from it; 'auto': "
        "exact, unless token_threshold is given",
        scope="compiled", choices=INFILLS,
    )  # fmt: skip
    infill_blend: float = setting(
        0.5, "With infill=exact and no temperature: weight of the plan's probabilities in the choice between its draft "
        "and the next token; 0: always the next token, 1: always the draft", at_least=0, at_most=1,
    )  # fmt: skip
    speculate: str = setting(
        AUTO, "Tokens per forward pass and shard of rows up to which it speculates: the same text in fewer passes. "
        "'auto': as many as save time on this device; 0: no speculation",
        choices=(AUTO,), or_number=True,
    )  # fmt: skip

    @classmethod
    def operating_points(cls, new_tokens: int, trained: Mapping[str, Any]) -> list[dict[str, Any]]:
        least, largest = min(trained["sizes"]), max(trained["sizes"])
        narrow = [
            {"serial_blocks": blocks} | BEST_INFILL | {"slot_threshold": sure}
            for blocks, thresholds in ((1, (0.9, 0.6, 0.3)), (2, (0.9, 0.6)), (4, (0.9, 0.6)))
            if not new_tokens % (least * blocks)
            for sure in thresholds
        ]
        theirs = [{"slot_threshold": sure, "token_threshold": sure} for sure in (0.9, 0.6, 0.3)]
        wide = [
            {"serial_blocks": blocks} | BEST_INFILL | {"slot_threshold": 0.6, "order": order}
            for blocks in (2, 4)
            if largest > least and not new_tokens % (largest * blocks)
            for order in (CONFIDENCE, LEFT_TO_RIGHT)[: 1 + (largest * blocks < new_tokens)]  # one slot has one order
        ]
        points = [{"slot_size": least} | point for point in narrow + theirs]
        return points + [{"slot_size": largest} | point for point in wide]

    def check(self) -> None:
        if -1 < self.token_threshold < 0:
            self.refuse("token_threshold", "must be at least 0, or -1 for 0.9")
        if self.new_tokens % self.multiple:
            self.refuse(
                "max_new_tokens",
                f"does not divide into serial_blocks={self.serial_blocks} runs of whole slots of "
                f"slot_size={self.slot_size}; {-(-self.new_tokens // self.multiple) * self.multiple} would",
            )

    def for_model(self, model: ModelConfig) -> Self:
        """The settings with `infill` and `token_threshold` resolved, because a batch uses one kind of infilling.

        The default is exact infilling, which writes better text in fewer forward passes (see
        benchmarks/results/infilling.md), unless `token_threshold` is given, which only the authors' infilling uses.
        """
        return dataclasses.replace(
            self,
            infill=THRESHOLD if self._infill == THRESHOLD else EXACT,
            token_threshold=self.token_threshold if self.token_threshold >= 0 else 0.9,
        )

    def traced(self) -> dict[str, float | int | bool]:
        return super().traced() | {"budget": self.budget}

    @property
    def _infill(self) -> str:
        """`infill`, or what it becomes by a given token_threshold."""
        return THRESHOLD if self.infill == AUTO and self.token_threshold >= 0 else self.infill

    @property
    def unread(self) -> dict[str, str]:
        unread = {EXACT: "token_threshold", THRESHOLD: "infill_blend"}
        return {unread[self._infill]: f"infill={self._infill}"} if self._infill in unread else {}

    @property
    def budget(self) -> int:
        """`speculate` as a number; -1 for "auto"."""
        return -1 if self.speculate == AUTO else int(self.speculate)

    @property
    def multiple(self) -> int:
        return self.slot_size * self.serial_blocks


class SequentialSettings(_Slots):
    """How to decode a slot-diffusion model one token per forward."""

    @classmethod
    def operating_points(cls, new_tokens: int, trained: Mapping[str, Any]) -> list[dict[str, Any]]:
        return [{"slot_size": min(trained["sizes"])}]
