"""Folded rows: an order of rows that are split over chips in which all chips have equally many keys to attend to.

In a causal row later tokens see more keys: in row order the last of P chips works nearly twice as long as the average.
A folded row has 2 P equal parts, of which chip i holds parts i and 2 P - 1 - i (Llama 3, arXiv 2407.21783, section
3.3.2). Eight tokens over two chips:

    row order    0 1 2 3 | 4 5 6 7     keys seen, causal: 10 | 26
    folded       0 1 6 7 | 2 3 4 5                        18 | 18

Everything except attention treats tokens one by one; only attention depends on the order, and takes it as a pattern.

Axes: B rows, T row length, P chips that share a row.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32, Shaped

from refusion_jax.batch.visibility import Pattern, Visibility


def fold(x: Shaped[Array, "B T *_"], parts: int) -> Shaped[Array, "B T *_"]:
    """Converts rows from row order to folded order; T must be a multiple of 2 `parts`."""
    begin, end = x.reshape(len(x), 2, parts, -1).swapaxes(0, 1)
    return jnp.stack([begin, end[:, ::-1]], axis=2).reshape(x.shape)


def unfold(x: Shaped[Array, "B T *_"], parts: int) -> Shaped[Array, "B T *_"]:
    """Converts folded rows back to row order."""
    begin, end = x.reshape(len(x), parts, 2, -1).transpose(2, 0, 1, 3)
    return jnp.concatenate([begin, end[:, ::-1]], axis=1).reshape(x.shape)


@dataclasses.dataclass(frozen=True)
class Folded(Pattern):
    """A pattern, with its rows folded over `parts` chips."""

    pattern: Pattern
    parts: int

    def rank_and_group(self, length: int) -> tuple[Int32[np.ndarray, "T"], Int32[np.ndarray, "T"]]:
        parts = np.split(np.arange(length), 2 * self.parts)
        order = np.concatenate([parts[i] for pair in range(self.parts) for i in (pair, -1 - pair)])
        rank, group = self.pattern.rank_and_group(length)
        return rank[order], group[order]


def fold_visibility(visibility: Visibility, parts: int) -> Visibility:
    """The visibility of folded rows."""
    segments, rank, group = (
        fold(jnp.asarray(x), parts) for x in (visibility.segment_ids, visibility.rank, visibility.group)
    )
    pattern = visibility.pattern and Folded(visibility.pattern, parts)
    return Visibility(segments, rank, group, pattern)
