"""Rows by step: a Grain pipeline in which data is a pure function of the global step.

Step s trains on places s * B .. s * B + B - 1 of an endless, seeded order (every row once an epoch), whatever the
number of hosts and devices; so a run resumes exactly, on any number of them, and the data's position is the step.

Axes: B rows of the global batch, H of them that a host reads, T row length.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import grain
import jax
import numpy as np
from jax.sharding import NamedSharding

from refusion_jax.batch.rows import Rows
from refusion_jax.data.interface import RowSource
from refusion_jax.data.order import RowOrder


def global_batches(rows: RowSource, sharding: NamedSharding, *, batch_size: int, **steps: Any) -> Iterator[Rows]:
    """Yields the global batch [B, T] of each step, already on the devices, with this sharding.

    This host reads only the rows that its own devices hold; the other arguments are those of `host_batches`.
    """
    shape = (batch_size, rows.row_length)
    for batch in host_batches(rows, _local_rows(sharding, shape), batch_size=batch_size, **steps):
        yield Rows(**{name: jax.make_array_from_process_local_data(sharding, x, shape) for name, x in batch.items()})


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

    Threads read ahead. Nothing but the named rows is read.

    Args:
      rows: the data set.
      local: [H] the rows of the global batch that this host's devices hold.
      batch_size: B.
      seed: of the shuffle.
      first_step: where to begin; constant time, wherever it is.
      last_step: one after the last.
      batch_of: which batch of the order a step trains on; its own unless rows are left out.
    """
    order = row_order(rows, seed)

    def load(step: int) -> dict[str, np.ndarray]:
        own = [rows[order[batch_of(step) * batch_size + row]] for row in local]
        return {name: np.stack([row[name] for row in own]) for name in own[0]}

    steps = grain.MapDataset.range(first_step, last_step).map(load)
    yield from steps.to_iter_dataset(grain.ReadOptions(num_threads=2, prefetch_buffer_size=16))


def row_order(rows: RowSource, seed: int) -> RowOrder:
    """The order in which rows are trained on."""
    _, sizes, weights = zip(*rows.shares, strict=True)
    return RowOrder(sizes, weights, seed)


def epochs(rows: RowSource, drawn: int) -> dict[str, float]:
    """The number of epochs of the data, or of each part of a mixture, after so many rows."""
    names = [f"epoch_{name}" if name else "epoch" for name, *_ in rows.shares]
    return dict(zip(names, row_order(rows, seed=0).epochs(drawn), strict=True))


def _local_rows(sharding: NamedSharding, shape: tuple[int, int]) -> list[int]:
    """Rows of the global batch that this host's devices hold."""
    held = sharding.addressable_devices_indices_map(shape).values()
    return sorted({row for rows, _ in held for row in range(*rows.indices(shape[0]))})
