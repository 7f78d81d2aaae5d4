"""What a system gives to be scored by: for each text, the tokens of one forward, who sees whom, and what they predict.

Axis: N tokens of a feed.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float32, Int, Int32


@dataclasses.dataclass(frozen=True)
class Feed:
    """The tokens of one forward that scores a text: log p is the sum of weight * log p(label)."""

    tokens: Int32[np.ndarray, "N"]
    positions: Int32[np.ndarray, "N"]  # in the text
    rank: Int32[np.ndarray, "N"]  # as in batch/visibility.py; the text is a segment of its own
    group: Int32[np.ndarray, "N"]
    labels: Int32[np.ndarray, "N"]
    weights: Float32[np.ndarray, "N"]  # 0 where there is no label

    def __len__(self) -> int:
        return len(self.tokens)


@dataclasses.dataclass(frozen=True)
class Text:
    """What is to be scored, and how."""

    prompt: Int[np.ndarray, "P"]  # may be empty
    continuation: Int[np.ndarray, "R"]  # one token at least
    slot_size: int  # for systems that have slots, and this order of theirs
    order: str | Sequence[int]  # "left_to_right" | "random" | slots by their number in the text
    mask_id: int
    draw: tuple[int, ...]  # all random draws are a function of this
    name: str  # for messages
