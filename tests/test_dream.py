"""Dream: the shift, the weights and the schedule, by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import BOS, MASK, settings, sharp_model

from refusion_jax import UserError, decode
from refusion_jax.batch.rows import Rows
from refusion_jax.decoding.requests import Request
from refusion_jax.systems import dream

cart_weights = jax.jit(dream.cart_weights)
OBJECTIVE = dream.ShiftedDiffusion(mask_id=MASK, padding=0.0, shuffle=False, cart_p=0.5)


def test_weights_of_the_docstring():
    """inputs p q a M c M, and another document that must not count."""
    clean = jnp.array([[1, 1, 1, 0, 1, 0, 1, 0]], bool)
    weights = cart_weights(clean, jnp.array([[1, 1, 1, 1, 1, 1, 2, 2]]), 0.5)
    np.testing.assert_allclose(weights[0, [3, 5]], [(1 + 1 / 2 + 1 / 4 + 1) / 4, (1 + 1 / 4 + 1 / 8 + 1 / 16) / 4])
    np.testing.assert_allclose(weights[0, 7], 0.25)


def test_weights_are_the_double_sum_of_the_paper():
    rng = np.random.default_rng(0)
    segments = np.array([[1] * 9 + [2] * 14 + [0] * 3])
    clean = (rng.random(segments.shape) < 0.5) & (segments > 0)
    expected = np.zeros(segments.shape)
    for n in range(26):
        for i in range(26):
            if i != n and clean[0, i] and segments[0, i] == segments[0, n]:
                expected[0, n] += 0.3 * 0.7 ** (abs(n - i) - 1) / 2
    np.testing.assert_allclose(cart_weights(jnp.asarray(clean), jnp.asarray(segments), 0.3), expected, atol=1e-6)


def test_a_masked_token_is_the_label_of_the_token_before_it_and_the_weights_are_a_mean_over_masks():
    tokens = jnp.arange(5, 21, dtype=jnp.int32)[None]
    rows = Rows(tokens, jnp.array([[1] * 8 + [2] * 6 + [0] * 2]), jnp.array([[0] * 2 + [1] * 12 + [0] * 2], bool))
    seen, corrupt = set(), jax.jit(OBJECTIVE.corrupt)
    for seed in range(5):
        batch = corrupt(rows, jax.random.split(jax.random.key(seed), 1))
        masked = np.flatnonzero(batch.inputs[0] == MASK)
        seen |= set(masked)
        cart = cart_weights((rows.segment_ids > 0) & (batch.inputs != MASK), rows.segment_ids, 0.5)[0]
        np.testing.assert_array_equal(batch.labels[0, masked - 1], tokens[0, masked])
        expected = np.zeros(16)
        expected[masked - 1] = cart[masked] / max(len(masked), 1)
        np.testing.assert_allclose(batch.weights["mdm"][0], expected, rtol=1e-6)
    assert seen == {*range(2, 8), *range(9, 14)}  # neither prompts nor the first token of a document


@pytest.mark.parametrize(("masks", "steps"), [(16, 16), (16, 4), (7, 3), (5, 9), (32, 512)])
def test_a_schedule_commits_everything_in_no_more_steps_than_asked_for(masks, steps):
    counts = dream.schedule(masks, steps)
    assert sum(counts) == masks
    assert len(counts) <= steps
    assert min(counts) > 0


def test_a_schedule_of_few_steps_is_even():
    assert dream.schedule(16, 4) == (3, 4, 4, 5)  # floor(16 * 0.999 / 4) = 3, then a share of what is left


def test_unless_steps_are_given_every_forward_commits_one_token():
    out = decode(sharp_model(), [Request([BOS, 5], (8, [9]))], settings("dream"))
    assert out.forwards == [8]


def test_a_text_cannot_begin_with_a_gap():
    with pytest.raises(UserError, match="prompt 0: begins with a gap"):
        decode(sharp_model(), [Request([], (2, [BOS, 5], 3))], settings("dream"))
