"""CARD: its noise and weights against loops, and the passes of its decoder."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import MASK, PROMPTS, settings, sharp_model

from refusion_jax import decode
from refusion_jax.batch.rows import Rows
from refusion_jax.systems import card

SEGMENTS = [1] * 12 + [2] * 9 + [0] * 3
RESPONSE = [0] * 3 + [1] * 9 + [0] + [1] * 8 + [0] * 3


corrupt = jax.jit(card.SoftTail(MASK, tail=1.5, beta=1.0, decay=0.5).corrupt)


def rows() -> Rows:
    return Rows(jnp.arange(5, 29)[None], jnp.array([SEGMENTS]), jnp.array([RESPONSE]) > 0)


def test_masks_lie_in_the_tail_and_are_as_many_as_drawn():
    counts = set()
    for seed in range(20):
        batch = corrupt(rows(), jax.random.split(jax.random.key(seed), 1))
        masked, ratio = np.asarray(batch.inputs[0]) == MASK, np.asarray(batch.diagnostics["mask_ratio"])[0]
        for first, end, length in ((3, 12, 9), (13, 21, 8)):
            count = masked[first:end].sum()
            counts.add(count)
            assert count == round(ratio[first] * length) >= 1
            tail = min(length, int(1.5 * count))
            assert not masked[first : end - tail].any()
        assert masked.sum() == masked[3:12].sum() + masked[13:21].sum()
    assert len(counts) > 5


def test_weights_are_the_recursion_of_the_paper():
    for seed in range(3):
        batch = corrupt(rows(), jax.random.split(jax.random.key(seed), 1))
        masked = np.asarray(batch.inputs[0]) == MASK
        total, labels = {}, sum(RESPONSE)
        for n, segment in enumerate(SEGMENTS):
            starts = n == 0 or SEGMENTS[n - 1] != segment
            before = 0 if starts else total[n - 1]
            own = masked[n] * (1 + (not starts and masked[n - 1]))
            total[n] = own + 0.5 * before
        expected = np.zeros(24)
        for n in np.flatnonzero(RESPONSE):
            expected[n - 1] = 1 / (1 + total[n]) / labels
        np.testing.assert_allclose(batch.weights["mdm"][0], expected, rtol=1e-6)
        labelled = expected > 0
        np.testing.assert_array_equal(batch.labels[0][labelled], np.arange(6, 30)[labelled])


def test_where_all_is_sure_a_block_takes_a_pass_and_a_commit_pass():
    out = decode(sharp_model(), PROMPTS, settings("card", draft_length=4, threshold=0.0, eos_id=29))
    for tokens, forwards in zip(out.tokens, out.forwards, strict=True):
        assert forwards <= 4 + 3
        assert (forwards == 7) == (len(tokens) > 12)
    assert max(out.forwards) == 7


def test_a_pass_that_reveals_nothing_is_the_last_unless_the_next_one_draws_again():
    for temperature, passes in ((0.0, 1), (1.0, 3)):
        own = settings("card", new=4, draft_length=4, passes=3, threshold=1.0, temperature=temperature)
        assert decode(sharp_model(), PROMPTS[:2], own).forwards == [passes] * 2


@pytest.mark.thorough
def test_blocks_of_one_are_next_tokens():
    """Without masks in sight it is a causal model that is fed every token twice: as its own, and to be committed."""
    ar, out = decode(sharp_model(), PROMPTS, settings("ar")), decode(
        sharp_model(), PROMPTS, settings("card", draft_length=1)
    )  # fmt: skip
    assert out.tokens == ar.tokens
