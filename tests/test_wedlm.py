"""WeDLM: a batch computed by hand, and what its window commits."""

import jax
import jax.numpy as jnp
import numpy as np
from conftest import MASK, PROMPTS, settings, sharp_model

from refusion_jax import decode
from refusion_jax.batch.rows import Rows
from refusion_jax.systems import wedlm


def test_blocks_are_reordered_and_weighted_as_by_hand():
    """Two documents in blocks of four, of which the first has its second token in the prompt; any noise."""
    segments = jnp.array([[1, 1, 1, 1, 1, 1, 2, 2, 2, 0]])
    rows = Rows(jnp.arange(5, 15)[None], segments, jnp.array([[0, 0, 1, 1, 1, 1, 0, 1, 1, 0]]) > 0)
    parts, masked = [[0, 1, 2, 3], [4, 5], [6, 7], [8], [9]], 0
    corrupt = jax.jit(wedlm.ReorderedBlocks(MASK, 4).corrupt)
    for seed in range(5):
        batch = corrupt(rows, jax.random.split(jax.random.key(seed), 1))
        inputs, labels, weights = (np.asarray(x[0]) for x in (batch.inputs, batch.labels, batch.weights["mdm"]))
        np.testing.assert_array_equal(inputs[10:], rows.tokens[0])
        np.testing.assert_array_equal(batch.weights["ar"][0] * 6, [0] * 10 + [0, 1, 1, 1, 1, 0, 1, 1, 0, 0])
        for part in parts:
            own = inputs[part] == MASK
            masked += own.sum()
            assert own.tolist() == sorted(own)  # observed first
            assert sorted(labels[part]) == list(np.asarray(rows.tokens[0])[part])  # none lost
            for is_masked in (False, True):  # each in text order
                assert sorted(labels[part][own == is_masked]) == list(labels[part][own == is_masked])
            gamma = np.asarray(batch.diagnostics["mask_ratio"])[0, part]
            np.testing.assert_allclose(weights[part], own / (6 * gamma), rtol=1e-6)
        where = np.asarray(batch.positions[0, :10]) + np.array([5] * 6 + [11] * 3 + [14])
        np.testing.assert_array_equal(where, labels[:10])  # every token keeps its place in the text
    assert masked > 5


def test_where_all_is_sure_a_forward_fills_the_whole_window():
    model = sharp_model()
    out = decode(model, PROMPTS, settings("wedlm", window=4, entropy_threshold=100.0, eos_id=29))
    whole = [tokens for tokens in out.tokens if len(tokens) == 16]
    assert all(forwards <= 4 for forwards in out.forwards)
    assert len(whole) == sum(forwards == 4 for forwards in out.forwards)


def test_where_nothing_is_sure_a_forward_fills_one_place():
    out = decode(sharp_model(), PROMPTS, settings("wedlm", entropy_threshold=0.0))
    assert out.forwards == [len(order) for order in out.commit_order]
    assert any(order != sorted(order) for order in out.commit_order)
