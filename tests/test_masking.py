"""Padding behind answers, and masks that do not give it away."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import MASK, config_with

from refusion_jax.batch.masking import pad_answers
from refusion_jax.batch.rows import Rows, text_positions
from refusion_jax.config import make_objective

SEGMENTS = np.array([[1] * 3 + [2] * 3 + [3] * 3 + [0], [0] * 10])
ROWS = Rows(
    tokens=jnp.array([[10, 11, 2, 20, 21, 2, 30, 31, 2, 0], [0] * 10]),
    segment_ids=jnp.asarray(SEGMENTS),
    is_response=jnp.asarray((SEGMENTS > 0) & (np.arange(10)[None] % 3 > 0)),
)
PAD = jax.jit(pad_answers, static_argnums=2)
KEYS = [jax.random.split(jax.random.key(seed), 2) for seed in range(20)]


def test_the_drawing_of_the_docstring_is_one_of_the_rows_that_come_out():
    drawn = [(np.asarray(rows.tokens[0]).tolist(), np.asarray(source[0]).tolist()) for rows, source in
             (PAD(ROWS, keys, 0.5) for keys in KEYS)]  # fmt: skip
    assert ([10, 11, 2, 2, 2, 2, 30, 31, 2, 2], [0, 1, 2, 2, 2, 2, 6, 7, 8, 8]) in drawn
    assert ([10, 11, 2, 20, 21, 2, 30, 31, 2, 2], [*range(9), 8]) in drawn
    assert all(tokens[:3] == [10, 11, 2] for tokens, _ in drawn)  # the first stays


def test_padding_is_a_part_of_the_answer_before_it():
    for keys in KEYS:
        rows, source = PAD(ROWS, keys, 0.5)
        is_padding = np.asarray(source[0]) != np.arange(10)
        assert np.asarray(rows.is_response[0])[is_padding].all()
        positions = np.asarray(text_positions(rows.segment_ids))[0]
        for at in np.flatnonzero(is_padding):
            assert rows.segment_ids[0, at] == rows.segment_ids[0, at - 1]
            assert positions[at] == positions[at - 1] + 1


def test_rows_without_documents_stay_empty_and_no_share_changes_nothing():
    rows, _ = PAD(ROWS, KEYS[0], 0.5)
    assert not np.asarray(rows.segment_ids[1]).any()
    same, source = PAD(ROWS, KEYS[0], 0.0)
    np.testing.assert_array_equal(same.tokens, ROWS.tokens)
    np.testing.assert_array_equal(source[0], np.arange(10))


@pytest.mark.parametrize("name", ["llada", "dream", "d2f"])
def test_an_eos_and_its_repeats_are_masked_all_or_none(name):
    section = {f"{name}.padding": 0.5} | ({"d2f.block_length": 2} if name == "d2f" else {})
    corrupt = jax.jit(make_objective(config_with(objective=name, **section), MASK).corrupt)
    seen = set()
    for keys in KEYS:
        batch = corrupt(ROWS, keys)
        for segment in set(np.asarray(batch.visibility.segment_ids[0])):
            own = np.asarray(batch.visibility.segment_ids[0]) == segment
            behind = np.asarray(batch.inputs[0])[own][2:]  # the EOS, third of each document, and its repeats
            assert (behind == MASK).all() or (behind == 2).all()
            seen.add((len(behind) > 1, bool((behind == MASK).all())))
    assert len(seen) == 4
