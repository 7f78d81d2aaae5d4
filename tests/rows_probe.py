"""What each step trains on: run on one process or on several, it must print the same."""

import hashlib
import json
import sys

import jax
import numpy as np
from jax.experimental import multihost_utils

from refusion_jax.batch.rows import noise_keys
from refusion_jax.data.loader import global_batches
from refusion_jax.data.packing import PackedRows
from refusion_jax.distributed import processes, sharding

BATCH, LENGTH = 16, 8
MESHES = [{"fsdp": 8}, {"data": 2, "fsdp": 4}, {"data": 4, "sequence": 2}, {"tensor": 8}, {"sequence": 8}]


class Counted(PackedRows):
    """Rows that note which are read, by any thread."""

    reads = []

    def __getitem__(self, index):
        Counted.reads.append(index)
        return super().__getitem__(index)


def digest(mesh: dict[str, int], first: int, last: int) -> str:
    """Of all rows and noise keys of some steps, gathered from all hosts."""
    tokens = np.arange(40 * LENGTH, dtype=np.int32).reshape(40, LENGTH)
    Counted.reads.clear()
    rows = Counted(tokens, tokens % 3, tokens % 2 == 0)
    mesh = sharding.make_mesh(mesh)
    where = sharding.sharding(mesh, "batch", "length")
    found = hashlib.blake2b(digest_size=8)
    batches = global_batches(rows, where, batch_size=BATCH, seed=3, first_step=first, last_step=last)
    keys = jax.jit(
        lambda step: jax.random.key_data(noise_keys(3, step, BATCH)), out_shardings=sharding.sharding(mesh, "batch")
    )
    for step, batch in enumerate(batches, first):
        for array in [*jax.tree.leaves(batch), keys(step)]:
            found.update(np.ascontiguousarray(multihost_utils.process_allgather(array, tiled=True)))
    hosts = min(jax.process_count(), sharding.shard_count(mesh, "batch"))
    assert len(Counted.reads) == (last - first) * BATCH // hosts, "rows of other hosts are read"
    return found.hexdigest()


if __name__ == "__main__":
    processes.initialize()
    digests = [digest(mesh, 2, 5) for mesh in MESHES]
    faults = [processes.first_fault("a damaged file" * jax.process_index()), processes.first_fault(None)]
    if jax.process_index() == 0:
        print(json.dumps({"processes": jax.process_count(), "digests": digests, "faults": faults}))
    sys.exit(0)
