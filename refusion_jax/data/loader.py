"""Rows by step: a Grain pipeline in which data is a pure function of the global step.

Step s trains on places s * B .. s * B + B - 1 of an endless, seeded order, whatever the number of hosts and devices; so
a run resumes exactly, on any number of them, and the position in the data is the step. The row at a place depends only
on the seed and the place. Every row of a source comes once per epoch, in a different order each time.

Axes: B rows of the global batch, H of them that a host reads, T row length.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import grain
import jax
import numpy as np
from jax.sharding import NamedSharding

from refusion_jax.batch.rows import Rows
from refusion_jax.cli.errors import UserError
from refusion_jax.data.interface import RowSource

_BLOCK = 4096  # places after which the pattern of sources repeats: weights are kept to 1/4096


class RowOrder:
    """`order[place]` is the index of a row in the concatenation of all sources.

    Two sources of 2 and 6 rows (indices 0 to 1 and 2 to 7) with weights 1 and 3, seed 0:

        place            0 1 2 3 4 5 6 7
        source           1 0 1 1 1 0 1 1   a quarter of every stretch is of source 0
        draw from it     0 0 1 2 3 1 4 5   how often the source occurred before
        order[place]     3 1 4 6 7 0 5 2   the first row of the source, plus its shuffle at that draw
    """

    def __init__(self, sizes: Sequence[int], weights: Sequence[float], seed: int):
        """Takes constant time, whatever the sizes (rows of each source); weights are relative to each other."""
        self._sizes = list(sizes)
        self._starts = [0, *itertools.accumulate(sizes)][:-1]
        # Grain's permutation of an epoch is computed index by index; the next epoch's is that of the next seed.
        self._shuffled = [
            grain.MapDataset.range(size).shuffle(seed=_seed(seed, source)).repeat() for source, size in enumerate(sizes)
        ]
        self._counts = block_counts(weights)  # [sources] of a block
        self._pattern = _spread(self._counts)  # [_BLOCK] source of each place
        self._before = np.zeros((_BLOCK + 1, len(self._sizes)), np.int64)  # how often each occurs before a place
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
    """[sources] int64: the weights as places of a block, by largest remainder; refuses weights below one place."""
    share = np.asarray(weights, np.float64) / np.sum(weights) * _BLOCK
    counts = np.floor(share).astype(np.int64)
    most = np.argsort(counts - share, kind="stable")[: _BLOCK - int(counts.sum())]
    counts[most] += 1
    if (counts < 1).any():
        why = f"the smallest is less than 1/{_BLOCK} of their sum; without the flag they are the rows of each part"
        raise UserError(f"--config.data.weights={tuple(weights)}: {why}")
    return counts


def _spread(counts: np.ndarray) -> np.ndarray:
    """[_BLOCK] the source of each place, evenly spaced, so that every batch has its share of each."""
    source = np.repeat(np.arange(len(counts)), counts)
    place = np.concatenate([(np.arange(count) + 0.5) / count for count in counts])
    return source[np.argsort(place, kind="stable")]


def _seed(seed: int, source: int) -> int:
    """The seed of a source, distinct from those of other sources and of neighbouring seeds."""
    return int(np.random.SeedSequence([seed, source]).generate_state(1)[0])


def global_batches(rows: RowSource, sharding: NamedSharding, *, batch_size: int, **steps: Any) -> Iterator[Rows]:
    """Yields the global batch [B, T] of each step, already on the devices, with this sharding.

    This host reads only the rows that its own devices hold; the other arguments are those of `host_batches`.
    """
    shape = (batch_size, rows.row_length)
    local = local_rows(sharding, shape)
    for batch in host_batches(rows, local, batch_size=batch_size, **steps):
        yield Rows(**{name: jax.make_array_from_process_local_data(sharding, x, shape) for name, x in batch.items()})


def local_rows(sharding: NamedSharding, shape: tuple[int, int]) -> list[int]:
    """The numbers of the rows that the devices of this host hold of an array [B, T]."""
    held = sharding.addressable_devices_indices_map(shape).values()
    return sorted({row for part, _ in held for row in range(*part.indices(shape[0]))})


def host_batches(
    rows: RowSource,
    local: Sequence[int],
    *,
    batch_size: int,
    seed: int,
    first_step: int,
    last_step: int,
    batch_of: Callable[[int], int] = int,
) -> Iterator[dict[str, np.ndarray]]:
    """Yields one host's part of each step's batch: tokens, segment_ids and is_response, [H, T] each.

    Threads read ahead. Only the `local` rows of a global batch are read, those that this host's devices hold. Starting
    at `first_step` takes constant time; `last_step` is excluded. If rows are left out, `batch_of` says which batch of
    the order a step trains on.
    """
    order = row_order(rows, seed)

    def load(step: int) -> dict[str, np.ndarray]:
        own = [rows[order[batch_of(step) * batch_size + row]] for row in local]
        return {name: np.stack([row[name] for row in own]) for name in own[0]}

    steps = grain.MapDataset.range(first_step, last_step).map(load)
    # One thread per step ahead, as buckets have latency for each row. From a disk 2 threads are as fast as 16.
    yield from steps.to_iter_dataset(grain.ReadOptions(num_threads=16, prefetch_buffer_size=16))


def row_order(rows: RowSource, seed: int) -> RowOrder:
    """The order in which rows are trained on."""
    _, sizes, weights = zip(*rows.shares, strict=True)
    return RowOrder(sizes, weights, seed)


def epochs(rows: RowSource, drawn: int) -> dict[str, float]:
    """The number of epochs of the data, or of each part of a mixture, after `drawn` rows."""
    names = [f"epoch_{name}" if name else "epoch" for name, *_ in rows.shares]
    return dict(zip(names, row_order(rows, seed=0).epochs(drawn), strict=True))
