import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from refusion_jax.batch.batch import Batch
from refusion_jax.batch.rows import Rows
from refusion_jax.systems.refusion.objective import Noise, draw_noise, hybrid_batch

MASK = 99
SIZES = (2, 3, 4)


def packed(documents: list[tuple[int, int]], row_length: int) -> Rows:
    """One row of documents given as (prompt length, response length); every token's id is its index, from 100."""
    segments, response = np.zeros((1, row_length), np.int32), np.zeros((1, row_length), bool)
    start = 0
    for segment, (p, r) in enumerate(documents, 1):
        segments[0, start : start + p + r] = segment
        response[0, start + p : start + p + r] = True
        start += p + r
    return Rows(jnp.arange(100, 100 + row_length)[None], jnp.array(segments), jnp.array(response))


def corrupt(rows: Rows, seed: int, sizes=SIZES) -> tuple[Noise, Batch]:
    return jax.device_get(_corrupt(rows, seed, sizes))


@functools.partial(jax.jit, static_argnames="sizes")
def _corrupt(rows, seed, sizes):
    keys = jax.random.split(jax.random.key(seed), rows.tokens.shape[0])
    noise = draw_noise(keys, rows, sizes, 1e-3)
    return noise, hybrid_batch(rows, noise, MASK)


ROW = 24
documents = st.lists(st.tuples(st.integers(0, 4), st.integers(1, 9)), min_size=1, max_size=4).filter(
    lambda d: sum(p + r for p, r in d) <= ROW
)
any_corruption = hypothesis.given(documents, st.integers(0, 2**31 - 1))
few = hypothesis.settings(max_examples=100)


@few
@any_corruption
def test_corruption_is_a_permutation_that_keeps_every_token(docs, seed):
    rows = packed(docs, ROW)
    _, c = corrupt(rows, seed)
    segments, tokens = np.array(rows.segment_ids[0]), np.array(rows.tokens[0])
    np.testing.assert_array_equal(c.visibility.segment_ids[0], segments)
    starts = np.array([np.argmax(segments == s) for s in segments])
    text_index = starts + c.positions[0]  # where each physical token stands in the text
    assert sorted(text_index) == list(range(ROW))
    was_masked = c.inputs[0] == MASK
    restored = np.zeros(ROW, np.int32)
    restored[text_index] = np.where(was_masked, c.labels[0], c.inputs[0])
    np.testing.assert_array_equal(restored, tokens)
    np.testing.assert_array_equal(was_masked, c.weights["mdm"][0] > 0)


@few
@any_corruption
def test_order_is_prompt_then_clean_slots_whole_then_masked_in_text_order(docs, seed):
    rows = packed(docs, ROW)
    noise, c = corrupt(rows, seed)
    start = 0
    for p, r in docs:
        k = noise.slot_size[0, start]
        span = slice(start, start + p + r)
        positions, masked = c.positions[0, span], c.weights["mdm"][0, span] > 0
        assert list(positions[:p]) == list(range(p))
        slot = (positions[p:] - p) // k
        n_clean = int((~masked[p:]).sum())
        assert not masked[p : p + n_clean].any()
        assert list(positions[p + n_clean :]) == sorted(positions[p + n_clean :])
        runs = [s for i, s in enumerate(slot[:n_clean]) if i == 0 or slot[i - 1] != s]
        assert len(runs) == len(set(runs)), "a clean slot was torn apart"
        offsets = (positions[p : p + n_clean] - p) % k
        for i in range(1, n_clean):
            assert offsets[i] == (offsets[i - 1] + 1 if slot[i] == slot[i - 1] else 0)
        for s in set(slot):
            assert len(set(masked[p:][slot == s])) == 1, "a slot is masked whole or not at all"
        start += p + r


def test_the_example_of_the_docstring():
    rows = packed([(1, 6)], 7)
    p, a, b, c, d, e, f = range(100, 107)
    masked = jnp.array([[False] * 3 + [True] * 2 + [False] * 2])
    rank = jnp.array([[0, 7, 7, 5, 5, 2, 2]], jnp.uint32)
    noise = Noise(jnp.full((1, 7), 2), jnp.full((1, 7), 0.5), masked, rank)
    got = jax.device_get(jax.jit(hybrid_batch, static_argnums=2)(rows, noise, MASK))
    assert got.inputs[0].tolist() == [p, e, f, a, b, MASK, MASK]
    assert got.positions[0].tolist() == [0, 5, 6, 1, 2, 3, 4]
    has_label = (got.weights["ar"] > 0) | (got.weights["mdm"] > 0)
    assert np.where(has_label, got.labels, -1)[0].tolist() == [-1, f, -1, b, -1, c, d]


def test_draws_have_the_distributions_of_the_method():
    rows = jax.tree.map(lambda x: jnp.repeat(x, 4000, axis=0), packed([(1, 11), (0, 12)], ROW))
    noise, c = corrupt(rows, 0)
    first = noise.slot_size[:, [0, 12]]
    for size in SIZES:  # 8000 draws: 5 standard deviations are 0.026
        assert np.mean(first == size) == pytest.approx(1 / len(SIZES), abs=0.027)
    p = noise.mask_probability[:, [0, 12]].ravel()
    assert p.min() >= 1e-3
    assert p.max() < 1
    assert np.mean(p) == pytest.approx(0.5005, abs=0.017)  # 5 standard deviations of a mean of 8000 uniforms
    assert np.var(p) == pytest.approx(1 / 12, rel=0.1)
    masked = noise.is_masked[:, [1, 12]].ravel()  # the first slot of each response
    for low, high in ((0.0, 0.25), (0.25, 0.5), (0.5, 0.75), (0.75, 1.0)):
        inside = (p >= low) & (p < high)
        assert np.mean(masked[inside]) == pytest.approx(np.mean(p[inside]), abs=0.06)
    nothing_masked = ~noise.is_masked[:, 12:].any(axis=1) & (noise.slot_size[:, 12] == 4)
    leads = c.positions[nothing_masked, 12] // 4  # which of three clean slots stands first
    assert len(leads) > 300
    for slot in range(3):
        assert np.mean(leads == slot) == pytest.approx(1 / 3, abs=0.14)
