"""What a system gives to be scored by: for each text, the tokens of one forward and what they predict.

A token sees another one of its text iff rank(other) <= rank(own), and group(other) is 0 or its own.

Axis: N tokens of a feed.
"""

import dataclasses

import numpy as np

from refusion_jax.runtime.errors import UserError


@dataclasses.dataclass(frozen=True)
class Feed:
    """The tokens of one forward that scores a text: sum of weight * log p(label)."""

    tokens: np.ndarray  # [N] int32
    positions: np.ndarray  # [N] int32, in the text
    rank: np.ndarray  # [N] int32
    group: np.ndarray  # [N] int32
    labels: np.ndarray  # [N] int32
    weights: np.ndarray  # [N] float32; 0 where there is no label

    def __len__(self) -> int:
        return len(self.tokens)


def next_token_feed(prompt: np.ndarray, continuation: np.ndarray, name: str) -> Feed:
    """Left to right: each token of the continuation is predicted from the one before it.

    Raises:
      UserError: where there is no token before the first.
    """
    if not len(prompt):
        raise UserError(f"{name}: a left-to-right model needs at least one token of prompt before what it scores")
    tokens = np.concatenate([prompt, continuation[:-1]])
    index = np.arange(len(tokens), dtype=np.int32)
    is_labelled = index >= len(prompt) - 1
    labels = np.zeros_like(tokens)
    labels[is_labelled] = continuation
    return Feed(tokens, index, index, np.zeros_like(index), labels, is_labelled.astype(np.float32))
