"""The order of rows in training: an endless sequence with constant-time access to any place.

The row at a place is a function of the seed and the place alone; steps, hosts and devices take places of it. From each
source every row comes once an epoch, in a different order each time.
"""

import itertools
from collections.abc import Sequence

import grain
import numpy as np

from refusion_jax.cli.errors import UserError

_BLOCK = 4096  # places after which the pattern of sources repeats: weights are kept to 1/4096


class RowOrder:
    """`order[place]` is the index of a row in the concatenation of all sources.

    Two sources of 2 and 6 rows (indices 0 to 1 and 2 to 7) with weights 1 and 3, seed 0:

        place            0 1 2 3 4 5 6 7
        source           1 0 1 1 1 0 1 1   a quarter of every stretch is of source 0
        draw from it     0 0 1 2 3 1 4 5   how often the source came before
        order[place]     3 1 4 6 7 0 5 2   the first row of the source, and what its shuffle puts at that draw
    """

    def __init__(self, sizes: Sequence[int], weights: Sequence[float], seed: int):
        """Takes no time, whatever the sizes.

        Args:
          sizes: rows of each source.
          weights: the share of each in every stretch of the order, relative to the others.
          seed: of the shuffles.
        """
        self._sizes = list(sizes)
        self._starts = [0, *itertools.accumulate(sizes)][:-1]
        # Grain's permutation of an epoch is computed index by index; the next epoch's is that of the next seed.
        self._shuffled = [
            grain.MapDataset.range(size).shuffle(seed=_seed(seed, source)).repeat() for source, size in enumerate(sizes)
        ]
        self._counts = block_counts(weights)  # [sources] of a block
        self._pattern = _spread(self._counts)  # [_BLOCK] source of each place
        self._before = np.zeros((_BLOCK + 1, len(self._sizes)), np.int64)  # how often each came before a place
        np.cumsum(self._pattern[:, None] == np.arange(len(self._sizes)), axis=0, out=self._before[1:])

    def __getitem__(self, place: int) -> int:
        block, at = divmod(place, _BLOCK)
        source = int(self._pattern[at])
        draw = block * int(self._counts[source]) + int(self._before[at, source])
        return self._starts[source] + int(self._shuffled[source][draw])

    def epochs(self, place: int) -> list[float]:
        """The number of epochs of each source before a place."""
        block, at = divmod(place, _BLOCK)
        draws = block * self._counts + self._before[at]
        return [int(n) / size for n, size in zip(draws, self._sizes, strict=True)]


def block_counts(weights: Sequence[float]) -> np.ndarray:
    """[sources] int64: the weights as parts of a block, by largest remainder.

    Raises:
      UserError: where one is less than a part.
    """
    share = np.asarray(weights, np.float64) / np.sum(weights) * _BLOCK
    counts = np.floor(share).astype(np.int64)
    most = np.argsort(counts - share, kind="stable")[: _BLOCK - int(counts.sum())]
    counts[most] += 1
    if (counts < 1).any():
        raise UserError(f"--config.data.weights={tuple(weights)}: the smallest is less than 1/{_BLOCK} of their sum")
    return counts


def _spread(counts: np.ndarray) -> np.ndarray:
    """[_BLOCK] the source of each place, evenly spaced, so that every batch has its share of each."""
    source = np.repeat(np.arange(len(counts)), counts)
    place = np.concatenate([(np.arange(count) + 0.5) / count for count in counts])
    return source[np.argsort(place, kind="stable")]


def _seed(seed: int, source: int) -> int:
    """The seed of a source, distinct from those of other sources and of neighbouring seeds."""
    return int(np.random.SeedSequence([seed, source]).generate_state(1)[0])
