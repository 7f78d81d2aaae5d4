"""What a system gives to be scored by: for each text, the tokens of one forward, who sees whom, and what they predict.

Axis: N tokens of a feed.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np


@dataclasses.dataclass(frozen=True)
class Feed:
    """The tokens of one forward that scores a text: log p is the sum of weight * log p(label)."""

    tokens: np.ndarray  # [N] int32
    positions: np.ndarray  # [N] int32, in the text
    rank: np.ndarray  # [N] int32, as in batch/visibility.py; the text is a segment of its own
    group: np.ndarray  # [N] int32
    labels: np.ndarray  # [N] int32
    weights: np.ndarray  # [N] float32; 0 where there is no label

    def __len__(self) -> int:
        return len(self.tokens)


@dataclasses.dataclass(frozen=True)
class Text:
    """What is to be scored, and how."""

    prompt: np.ndarray  # [P] int32, may be empty
    continuation: np.ndarray  # [R] int32, at least one
    slot_size: int  # for systems that have slots, and this order of theirs
    order: str | Sequence[int]  # "left_to_right" | "random" | slots by their number in the text
    mask_id: int
    draw: tuple[int, ...]  # all random draws are a function of this
    name: str  # for messages
