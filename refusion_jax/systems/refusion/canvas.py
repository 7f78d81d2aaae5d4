"""The gaps of a request cut into slots, and the settings of ReFusion's decoders.

Axes: R requests, B rows, N slots a row.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import ArrayLike, Bool, Float32, Int32

from refusion_jax.decoding import settings as shared
from refusion_jax.decoding.requests import Request
from refusion_jax.runtime.settings import setting

INFILLS = "threshold", "exact"
THRESHOLD, EXACT = range(len(INFILLS))


@dataclasses.dataclass(frozen=True)
class SlotSettings(shared.Settings):
    """How to decode a slot-diffusion model (ReFusion, arXiv 2512.13586, section 3.3).

    Raises:
      SettingError: where a value is impossible, naming it, the reason, and what would work.
    """

    slot_size: int = setting(8, "Tokens a slot", scope="compiled", at_least=1, at_most=4096)
    serial_blocks: int = setting(
        1, "The answer is cut into this many equal runs of slots, finished one after the other", at_least=1,
        at_most=2**20,
    )  # fmt: skip
    slot_threshold: float = setting(
        0.9, "Slots are chosen whose first token is more probable than this", at_least=0, at_most=1
    )
    token_threshold: float = setting(
        0.9, "Drafted tokens are accepted to which their predecessor gives more than this", at_least=0, at_most=1
    )
    infill: str = setting(
        "threshold", "How drafts become text: 'threshold', the authors' way, accepts those above token_threshold and "
        "drafts the others anew; 'exact' takes the model's own next token wherever a draft is another",
        choices=INFILLS,
    )  # fmt: skip
    infill_blend: float = setting(
        0.0, "With infill=exact and no temperature: the share that the plan's own probability of its draft has in the "
        "choice between draft and next token; 0: always the next token, 1: always the draft", at_least=0, at_most=1,
    )  # fmt: skip
    recompute: bool = setting(
        False, "With infill=threshold: compute keys and values of slots that were infilled without seeing each other "
        "again, in text order, which the authors never do",
    )  # fmt: skip
    overlap_planning: bool = setting(
        True, "Plan the next slots in the forward that checks these: the same text, sooner"
    )
    overlap_infilling: bool = setting(
        True, "Draft a slot's likely rest in the forward that checks it: the same text, sooner"
    )

    @classmethod
    def dial(cls, new_tokens: int, trained: Mapping[str, Any]) -> list[dict[str, Any]]:
        own = {"slot_size": min(trained["sizes"]), "overlap_infilling": False}
        exact = [{"infill": "exact", "infill_blend": 0.5, "slot_threshold": sure} for sure in (0.9, 0.6, 0.3, 0.1)]
        theirs = [{"slot_threshold": sure, "token_threshold": sure} for sure in (0.9, 0.6, 0.3)]
        overlap = [{"overlap_planning": False}, {"overlap_planning": True}]  # which is faster depends on the device
        return [own | planning | dial for planning in overlap for dial in exact + theirs]

    def check(self) -> None:
        if self.new_tokens % self.multiple:
            self.refuse(
                "max_new_tokens",
                f"does not divide into serial_blocks={self.serial_blocks} runs of whole slots of "
                f"slot_size={self.slot_size}; {-(-self.new_tokens // self.multiple) * self.multiple} would",
            )

    @property
    def unit(self) -> int:
        return self.slot_size

    @property
    def multiple(self) -> int:
        return self.slot_size * self.serial_blocks


@dataclasses.dataclass(frozen=True)
class SequentialSettings(SlotSettings):
    """The same settings for one token a forward, which knows no blocks: their number need not divide the answer."""

    @classmethod
    def dial(cls, new_tokens: int, trained: Mapping[str, Any]) -> list[dict[str, Any]]:
        return [{"slot_size": min(trained["sizes"])}]

    @property
    def multiple(self) -> int:
        return self.slot_size


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RowSettings(shared.RowSettings):
    """The traced settings of each row."""

    slot_threshold: Float32[ArrayLike, "*B"]
    token_threshold: Float32[ArrayLike, "*B"]
    infill: Int32[ArrayLike, "*B"]  # THRESHOLD or EXACT
    infill_blend: Float32[ArrayLike, "*B"]
    recompute: Bool[ArrayLike, "*B"]
    overlap_planning: Bool[ArrayLike, "*B"]
    overlap_infilling: Bool[ArrayLike, "*B"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Canvas:
    """Where the slots of each row stand; slots of size 0 do not exist."""

    start: Int32[ArrayLike, "R N"]  # position of each slot's first token in the text
    size: Int32[ArrayLike, "R N"]  # its tokens; slot_size but for the last slot of a gap
    may_end: Bool[ArrayLike, "R N"]  # an EOS may be written there
    per_block: Int32[ArrayLike, "R"]  # slots of a serial block
    widest: Int32[ArrayLike, "R"]  # tokens that one forward of the row may feed

    @classmethod
    def of(cls, requests: Sequence[Request], slots: int) -> "Canvas":
        """The slots of some requests, as numpy arrays of N = slots."""
        start, size = np.zeros((2, len(requests), slots), np.int32)
        may_end, (per_block, widest) = np.zeros(start.shape, bool), np.ones((2, len(requests)), np.int32)
        for row, request in enumerate(requests):
            starts, sizes, ends = slots_of(request)
            n = len(starts)
            start[row, :n], size[row, :n], may_end[row, :n] = starts, sizes, ends
            per_block[row], widest[row] = slots_a_block(request), tokens_a_forward(request)
        return cls(start, size, may_end, per_block, widest)


def slots_of(request: Request) -> tuple[list[int], list[int], list[bool]]:
    """(starts, sizes, may_end) of a request's slots: each gap is cut into slots, the last of which may be short."""
    K = request.settings.slot_size
    slots = [
        (start, min(K, at + length - start), ends)
        for at, length, ends in request.gaps
        for start in range(at, at + length, K)
    ]
    return tuple(map(list, zip(*slots, strict=True)))


def slots_a_block(request: Request) -> int:
    """Slots of a serial block of a request."""
    return -(-len(slots_of(request)[0]) // request.settings.serial_blocks)


def tokens_a_forward(request: Request) -> int:
    """Tokens of its widest forward: a block; where overlapped, the next block as well, or a slot and its guesses."""
    s, per_block = request.settings, slots_a_block(request)
    blocks = 2 if s.overlap_planning and len(slots_of(request)[0]) > per_block else 1
    guesses = s.overlap_infilling and s.infill == "threshold"
    return s.slot_size * max(per_block * blocks, 2 if guesses else 1)
