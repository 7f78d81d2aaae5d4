"""Corruption: slots that are masked and permuted, documents that are shuffled and padded."""

import functools
import itertools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import EOS, MASK, config_with
from helpers import packed

from refusion_jax.batch.batch import Batch
from refusion_jax.batch.masking import pad_answers, shuffle_documents
from refusion_jax.batch.rows import Rows, text_positions
from refusion_jax.config import make_objective
from refusion_jax.systems.refusion.objective import Noise, draw_noise, hybrid_batch

SIZES = (2, 3, 4)


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


@hypothesis.settings(max_examples=100)
@hypothesis.given(documents, st.integers(0, 2**31 - 1))
def test_corruption_permutes_tokens_and_loses_none(docs, seed):
    """Into the prompt, clean slots whole, and masked ones in text order."""
    rows = packed(docs, ROW)
    noise, c = corrupt(rows, seed)
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


SEGMENTS = np.array([[1] * 3 + [2] * 3 + [3] * 3 + [0], [0] * 10])
ROWS = Rows(
    tokens=jnp.array([[10, 11, 2, 20, 21, 2, 30, 31, 2, 0], [0] * 10]),
    segment_ids=jnp.asarray(SEGMENTS),
    is_response=jnp.asarray((SEGMENTS > 0) & (np.arange(10)[None] % 3 > 0)),
)
FIRST = jax.tree.map(lambda x: x * (jnp.arange(10) < 3)[None], ROWS)  # one document of three tokens, and room
UNEQUAL = Rows(
    tokens=jnp.array([[30, 31, 32, 2, 20, 21, 2, 10, 2, 0]]),
    segment_ids=jnp.array([[1] * 4 + [2] * 3 + [3] * 2 + [0]]),
    is_response=jnp.array([[0, 0, 0, 1, 0, 0, 1, 0, 1, 0]], bool),
)
PAD, SHUFFLE = jax.jit(pad_answers, static_argnums=(2, 3)), jax.jit(shuffle_documents)
KEYS = [jax.random.split(jax.random.key(seed), 2) for seed in range(40)]


def corruption(name: str, **keys):
    """The compiled `corrupt` of a system with these keys of its own."""
    config = config_with(objective=name, **{f"{name}.{key}": value for key, value in keys.items()})
    return jax.jit(make_objective(config, MASK, EOS).corrupt)


def documents_of(rows: Rows) -> list[list[int]]:
    """The documents of the first row, in order."""
    tokens, segments = rows.tokens[0].tolist(), rows.segment_ids[0].tolist()
    parts = itertools.groupby(zip(segments, tokens, strict=True), key=lambda pair: pair[0])
    return [[token for _, token in part] for number, part in parts if number]


def test_documents_are_whole_and_stand_in_any_order_and_place():
    """Where one begins must not tell how long it is."""
    orders, begins = set(), set()
    for keys in KEYS:
        rows = SHUFFLE(UNEQUAL, keys[:1])
        found = documents_of(rows)
        assert sorted(found) == [[10, 2], [20, 21, 2], [30, 31, 32, 2]]
        np.testing.assert_array_equal(rows.is_response, rows.tokens == 2)
        assert not np.asarray(rows.segment_ids[0, 9:]).any()
        begin = [rows.tokens[0].tolist().index(token) for token in (30, 20, 10)]
        assert rows.segment_ids[0, jnp.array(begin)].tolist() == [1, 2, 3]  # as before
        orders.add(tuple(text[0] for text in found))
        begins.add(np.asarray(rows.tokens[0]).tolist().index(10))
    assert len(orders) == 6
    assert begins == {0, 3, 4, 7}


@pytest.mark.parametrize("name", ["llada", "dream"])
@pytest.mark.parametrize("shuffle", [False, True])
def test_the_shortest_document_is_replaced_unless_it_is_shuffled_to_the_front(name, shuffle):
    corrupt, lengths = corruption(name, padding=0.5, shuffle=shuffle), set()
    for keys in KEYS:
        batch = corrupt(UNEQUAL, keys[:1])
        segments, inputs = (np.asarray(x[0]) for x in (batch.visibility.segment_ids, batch.inputs))
        lengths |= {int(np.sum(segments == segments[at])) for at in np.flatnonzero(inputs == 10)}
    assert max(lengths) == (10 if shuffle else 3)  # padded by the others' places, or by the row's empty end alone


def test_the_drawing_of_the_docstring_is_one_of_the_rows_that_come_out():
    drawn = [np.asarray(PAD(ROWS, keys, 0.5, EOS).tokens[0]).tolist() for keys in KEYS]
    assert [10, 11, 2, 2, 2, 2, 30, 31, 2, 2] in drawn
    assert [10, 11, 2, 20, 21, 2, 30, 31, 2, 2] in drawn
    assert all(tokens[:3] == [10, 11, 2] for tokens in drawn)  # the first stays


def test_padding_is_a_part_of_the_answer_before_it():
    for keys in KEYS:
        rows = PAD(ROWS, keys, 0.5, EOS)
        tokens = np.asarray(rows.tokens[0])
        is_padding = (tokens == 2) & (np.roll(tokens, 1) == 2)
        assert np.asarray(rows.is_response[0])[is_padding].all()
        positions = np.asarray(text_positions(rows.segment_ids))[0]
        for at in np.flatnonzero(is_padding):
            assert rows.segment_ids[0, at] == rows.segment_ids[0, at - 1]
            assert positions[at] == positions[at - 1] + 1


@pytest.mark.parametrize("name", ["llada", "dream"])
def test_how_much_of_a_document_is_masked_does_not_depend_on_whether_it_stays(name):
    many = jax.tree.map(lambda x: jnp.repeat(x, 4000, axis=0), UNEQUAL)
    batch = corruption(name, padding=0.5)(many, jax.random.split(jax.random.key(0), 4000))
    first, second = np.asarray(batch.diagnostics["mask_ratio"][:, [0, 4]]).T
    stays = first != second  # else the second document has become padding of the first
    assert 0.45 < stays.mean() < 0.55
    quartiles = np.quantile(second[stays], [0.25, 0.5, 0.75])
    np.testing.assert_allclose(quartiles, [0.25, 0.5, 0.75], atol=0.05)  # 2,000 draws: 3.5 deviations


def test_masks_do_not_depend_on_where_a_document_was_shuffled_to():
    many = jax.tree.map(lambda x: jnp.repeat(x, 4000, axis=0), UNEQUAL)
    keys = jax.random.split(jax.random.key(0), 4000)
    is_first = np.asarray(SHUFFLE(many, keys).tokens[:, 0]) == 30  # the document that stood first stays there
    ratio = np.asarray(corruption("block_diffusion", block_size=4)(many, keys).diagnostics["mask_ratio"][:, 0])
    assert 0.3 < is_first.mean() < 0.37
    assert abs(ratio[is_first].mean() - ratio[~is_first].mean()) < 0.04


def test_rows_without_documents_stay_empty_and_no_share_changes_nothing():
    assert not np.asarray(PAD(ROWS, KEYS[0], 0.5, EOS).segment_ids[1]).any()
    np.testing.assert_array_equal(PAD(ROWS, KEYS[0], 0.0, EOS).tokens, ROWS.tokens)


# Systems that repeat the EOS of answers, with keys of theirs.
REPEATING = {"llada": {"padding": 0.5}, "dream": {"padding": 0.5}, "d2f": {"block_length": 2}}
REPEATING["block_diffusion"] = {"block_size": 6}


@pytest.mark.parametrize("name", REPEATING)
def test_nothing_but_an_eos_is_repeated(name):
    """A text that was cut ends without one, and when documents are shuffled others come after it."""
    cut = ROWS.replace(tokens=ROWS.tokens.at[0, 5].set(22))
    corrupt, learnt = corruption(name, **REPEATING[name]), set()
    for keys in KEYS:
        batch = corrupt(cut, keys)
        labels = np.asarray(batch.labels)[np.asarray(batch.weights["mdm"]) != 0]
        tokens, counts = np.unique(labels[labels != EOS], return_counts=True)
        assert (counts == 1).all(), tokens
        learnt |= set(tokens.tolist())
    assert learnt == {11, 21, 22, 31}


@pytest.mark.parametrize("name", REPEATING)
def test_an_eos_may_be_masked_where_a_repeat_of_it_is_not(name):
    """Decoders come through this state, as they may commit the last repeats first."""
    corrupt, seen = corruption(name, **REPEATING[name]), set()
    for keys in KEYS:
        ends = np.asarray(corrupt(FIRST, keys).inputs[0])[2:6]  # the EOS of the first document, and its repeats
        seen |= {(bool(a == MASK), bool(b == MASK)) for a, b in itertools.pairwise(ends)}
    assert len(seen) == 4
