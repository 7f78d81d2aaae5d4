import jax
import numpy as np
import pytest

from refusion_jax.data.loader import global_batches
from refusion_jax.data.packing import PackedRows
from refusion_jax.distributed import sharding

ROWS, BATCH, LENGTH = 20, 8, 4


def dataset() -> PackedRows:
    """Every row holds its own number."""
    tokens = np.repeat(np.arange(ROWS, dtype=np.int32)[:, None], LENGTH, axis=1)
    return PackedRows(tokens, np.ones_like(tokens), np.ones_like(tokens, dtype=bool))


def batches(first: int, last: int, seed: int = 0, devices: int = 1, **mesh) -> list[list[int]]:
    """The row numbers of each step's batch."""
    mesh = sharding.make_mesh(dict.fromkeys(sharding.MESH_AXES, 1) | mesh, jax.devices()[:devices])
    where = sharding.sharding(mesh, "batch", "length")
    found = global_batches(dataset(), where, batch_size=BATCH, seed=seed, first_step=first, last_step=last)
    return [jax.device_get(rows.tokens)[:, 0].tolist() for rows in found]


@pytest.mark.parametrize("mesh", [{"data": 8}, {"data": 2, "fsdp": 4}, {"fsdp": 4, "sequence": 2}])
def test_any_mesh_sees_the_same_rows(mesh):
    assert batches(0, 4, devices=8, **mesh) == batches(0, 4)


def test_all_fields_of_a_row_stay_together():
    where = sharding.sharding(
        sharding.make_mesh(dict.fromkeys(sharding.MESH_AXES, 1), jax.devices()[:1]), "batch", "length"
    )
    rows = dataset()
    rows = PackedRows(rows.tokens, rows.tokens + 1, rows.tokens % 2 == 0)
    (batch,) = global_batches(rows, where, batch_size=BATCH, seed=0, first_step=2, last_step=3)
    np.testing.assert_array_equal(batch.segment_ids, batch.tokens + 1)
    np.testing.assert_array_equal(batch.is_response, batch.tokens % 2 == 0)
    assert batch.tokens.shape == (BATCH, LENGTH)
