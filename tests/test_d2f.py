"""D2F: its attention mask, the noise of the blocks, and the pipeline."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import MASK, config_with
from helpers import drawn_matrix

from refusion_jax import UserError
from refusion_jax.batch.rows import Rows
from refusion_jax.config import check
from refusion_jax.systems import d2f

OBJECTIVE = d2f.BlockForcing(mask_id=MASK, block_length=2, padding=0.0, least=0.2, most=0.7)
ROWS = Rows(
    tokens=jnp.arange(5, 31, dtype=jnp.int32)[None],
    segment_ids=jnp.array([[1] * 6 + [2] * 9 + [3] * 3 + [4] + [5] * 5 + [0] * 2]),
    is_response=jnp.array([[0, 0, 1, 1, 1, 1] + [0] + [1] * 8 + [1] * 9 + [0] * 2], bool),
)


@pytest.fixture(scope="module")
def batches():
    corrupt = jax.jit(OBJECTIVE.corrupt)
    return [corrupt(ROWS, jax.random.split(jax.random.key(seed), 1)) for seed in range(30)]


def test_the_matrix_of_the_docstring_is_the_mask(batches):
    """The first document is that of the docstring, and the third, without a prompt, begins with a block."""
    mask = np.asarray(batches[0].visibility.mask()[0])
    assert mask[:6, :6].tolist() == drawn_matrix(d2f.__doc__, 6)
    assert not mask[:6, 6:].any()
    assert mask[15:18, 15:18].tolist() == [[True, True, False], [True, True, False], [True, True, True]]


def test_noise_rises_from_block_to_block_between_its_bounds(batches):
    """By a share of what is left at most, whatever stands before the document: the last is a text after another."""
    p = np.stack([np.asarray(batch.diagnostics["mask_ratio"][0]) for batch in batches])
    assert (p >= 0.2).all()
    assert (p <= 0.7).all()
    blocks = np.asarray(batches[0].visibility.rank[0])
    for own in (range(2, 6), range(7, 15), range(15, 18), range(19, 24)):
        most = (0.7 - p[:, own[0]]) / (blocks[own[-1]] - 1)
        for here, after in zip(own, own[1:], strict=False):
            rise = p[:, after] - p[:, here]
            if blocks[here] == blocks[after]:
                np.testing.assert_allclose(rise, 0, atol=1e-6)
            else:
                assert (rise >= -1e-6).all()
                assert (rise <= most + 1e-6).all()
                assert rise.max() > 0.05


def test_weights_are_one_over_p_in_a_mean_over_masks(batches):
    for batch in batches[:5]:
        masked = np.asarray(batch.inputs[0] == MASK)
        assert not masked[~np.asarray(ROWS.is_response[0])].any()
        expected = np.where(masked, 1 / np.asarray(batch.diagnostics["mask_ratio"][0]) / max(masked.sum(), 1), 0)
        np.testing.assert_allclose(batch.weights["mdm"][0], expected, rtol=1e-6)


def test_noise_that_would_fall_is_refused():
    with pytest.raises(UserError, match="d2f.least=0.9: must not exceed d2f.most=0.5"):
        check(config_with(objective="d2f", **{"d2f.least": 0.9, "d2f.most": 0.5}))
