"""Rows by step: a Grain pipeline in which data is a pure function of the global step.

Step s trains on rows s * B .. s * B + B - 1 of an endless, seeded shuffle (every row once an epoch), whatever the
number of hosts and devices; so a run resumes exactly, on any number of them, and the data's position is the step.

Axes: B rows of the global batch, T row length.
"""

from collections.abc import Iterator

import grain
import jax
import numpy as np
from jax.sharding import NamedSharding

from refusion_jax.data.packing import PackedRows
from refusion_jax.slots import Rows


def global_batches(
    rows: PackedRows, sharding: NamedSharding, *, batch_size: int, seed: int, first_step: int, last_step: int
) -> Iterator[Rows]:
    """Yields the global batch of each step from first_step up to last_step, already on the devices.

    This host reads only the rows that its own devices hold. Threads read ahead.

    Args:
      rows: the data set.
      sharding: of a [B, T] batch.
      batch_size: B.
      seed: of the shuffle.
      first_step: where to begin; constant time, wherever it is.
      last_step: one behind the last.
    """
    shape = (batch_size, rows.tokens.shape[1])
    shuffled = grain.MapDataset.source(rows).shuffle(seed=seed).repeat()
    local = _local_rows(sharding, shape)

    def load(step: int) -> dict[str, np.ndarray]:
        own = [shuffled[step * batch_size + row] for row in local]
        return {name: np.stack([row[name] for row in own]) for name in own[0]}

    steps = grain.MapDataset.range(first_step, last_step).map(load)
    for batch in steps.to_iter_dataset(grain.ReadOptions(num_threads=2, prefetch_buffer_size=16)):
        yield Rows(**{name: jax.make_array_from_process_local_data(sharding, x, shape) for name, x in batch.items()})


def abstract_batch(sharding: NamedSharding, batch_size: int, row_length: int) -> Rows:
    """Shape, dtypes and sharding of a global batch, to compile for."""
    shape = (batch_size, row_length)
    kinds = {"tokens": np.int32, "segment_ids": np.int32, "is_response": np.bool_}
    return Rows(**{name: jax.ShapeDtypeStruct(shape, kind, sharding=sharding) for name, kind in kinds.items()})


def _local_rows(sharding: NamedSharding, shape: tuple[int, int]) -> list[int]:
    """Rows of the global batch that this host's devices hold."""
    held = sharding.addressable_devices_indices_map(shape).values()
    return sorted({row for rows, _ in held for row in range(*rows.indices(shape[0]))})
