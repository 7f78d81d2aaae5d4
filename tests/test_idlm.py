"""I-DLM: its labels."""

import jax
import jax.numpy as jnp
import numpy as np
from conftest import MASK

from refusion_jax.batch.rows import Rows
from refusion_jax.systems import idlm


def test_labels_and_weights_of_a_row_computed_by_hand():
    rows = Rows(jnp.array([[7, 8, 9, 10, 11, 0]]), jnp.array([[1, 1, 1, 2, 2, 0]]), jnp.array([[0, 1, 1, 0, 1, 0]]) > 0)
    batch = jax.jit(idlm.AllMasked(MASK, 3, 0.2).corrupt)(rows, jax.random.split(jax.random.key(0), 1))
    assert batch.inputs[0].tolist() == [MASK] * 6 + [7, 8, 9, 10, 11, 0]
    assert batch.positions[0].tolist() == [0, 1, 2, 0, 1, 0] * 2
    third = 1 / 3
    np.testing.assert_allclose(batch.weights["mdm"][0], [third, third, 0, third, 0, 0] + [0] * 6)
    np.testing.assert_allclose(batch.weights["ar"][0], [0] * 6 + [third, third, 0, third, 0, 0])
    assert batch.labels[0, [0, 1, 3]].tolist() == batch.labels[0, [6, 7, 9]].tolist() == [8, 9, 11]
