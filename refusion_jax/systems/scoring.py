"""How a system scores a text: the tokens of one forward, who attends to whom, and the labels they predict.

Axis: N tokens of the forward.
"""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Float32, Int, Int32


@dataclasses.dataclass(frozen=True)
class ScoredTokens:
    """The tokens of one forward that scores a text: log p is the sum of weight * log p(label)."""

    tokens: Int32[np.ndarray, "N"]
    positions: Int32[np.ndarray, "N"]  # in the text
    rank: Int32[np.ndarray, "N"]  # as in batch/visibility.py; every text is its own segment
    group: Int32[np.ndarray, "N"]
    labels: Int32[np.ndarray, "N"]
    weights: Float32[np.ndarray, "N"]  # 0 without a label
    places: Int32[np.ndarray, "N"]  # of the labels in the continuation; only those with a weight count

    def __len__(self) -> int:
        return len(self.tokens)


@dataclasses.dataclass(frozen=True)
class ScoredText:
    """A text to score."""

    prompt: Int[np.ndarray, "P"]  # may be empty
    continuation: Int[np.ndarray, "R"]  # at least one token
    slot_size: int  # for systems with slots, as is `order`
    order: str | Sequence[int]  # "left_to_right" | "random" | slots by their number in the text
    mask_id: int
    draw: tuple[int, ...]  # random draws are a function of this
    name: str  # in error messages


@dataclasses.dataclass(frozen=True)
class Scoring:
    """The likelihood of texts under a system's models."""

    forward: Callable[[ScoredText], ScoredTokens]
    needs_prompt: bool = False  # whether the first token can only be predicted from one before it
    is_bound: bool = False  # whether the forward is random, and its mean a lower bound of log p
