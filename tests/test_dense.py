"""Dense slot diffusion: its mask and labels, and what drafting accepts."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import MASK, PROMPTS, settings, tiny_model
from test_slots import packed

from refusion_jax import UserError, decode
from refusion_jax.batch.rows import Rows
from refusion_jax.decoding.cache import visible_to_masks
from refusion_jax.decoding.requests import prepare
from refusion_jax.systems.api import decoder_for
from refusion_jax.systems.dense import drafting, objective
from refusion_jax.systems.dense.objective import DenseSlots, Noise, dense_batch, draw_noise


def many(rows: Rows, count: int) -> Rows:
    return jax.tree.map(lambda x: jnp.repeat(x, count, axis=0), rows)


DOCS = [(2, 9), (0, 5), (3, 4)]
ROWS = many(packed(DOCS, 26), 300)


@functools.cache
def batch_of(text_order: float, copies: float = 0.5, sizes=(2, 3, 4)):
    keys = jax.random.split(jax.random.key(0), len(ROWS.tokens))
    made = DenseSlots(MASK, sizes, text_order, copies, 1.0)
    drawn = jax.jit(draw_noise, static_argnums=(2, 3))(keys, ROWS, sizes, text_order)
    return jax.device_get((drawn, jax.jit(made.corrupt)(ROWS, keys)))


def test_the_matrix_of_the_docstring_is_the_mask_and_its_labels_those_of_the_example():
    rows = packed([(1, 4)], 5)  # p a b c d
    start = jnp.array([[0, 1, 1, 3, 3]])
    noise = Noise(jnp.full((1, 5), 2), start, jnp.array([[0, 9, 9, 2, 2]], jnp.uint32), start.astype(jnp.uint32))
    batch = dense_batch(rows, noise, copies=4, stride=3, mask_id=MASK)
    drawn = re.findall(r" [pabcdABCD] +((?:[1.] ?){9})$", objective.__doc__, re.MULTILINE)
    assert batch.visibility.mask()[0].tolist() == [[cell == "1" for cell in line.split()] for line in drawn]

    names = dict(zip("pabcd", range(100, 105), strict=True))
    header = re.search(r"^ +((?:\w ){8}\w)$", objective.__doc__, re.MULTILINE)[1].split()
    inputs = [names.get(name, MASK) for name in header]
    assert batch.inputs[0].tolist() == inputs
    labels = re.search(r"labels +(.*)", objective.__doc__)[1].split()
    weights = sum(batch.weights.values())[0]
    assert [names[n] if n != "." else 0 for n in labels] == np.where(weights > 0, batch.labels[0], 0).tolist()
    assert batch.weights["ar"][0].tolist() == pytest.approx([1 / 3, 1 / 3, 0, 1 / 3, 0] + [0] * 4)
    assert batch.weights["mdm"][0].tolist() == pytest.approx([0] * 5 + [1 / 4] * 4)


@pytest.mark.parametrize("text_order", [0.0, 0.5, 1.0])
def test_slots_are_whole_and_in_an_order_and_in_text_order_begin_anywhere(text_order):
    noise, batch = batch_of(text_order)
    firsts, at = set(), 0
    for prompt, answer in DOCS:
        span = slice(at, at + prompt + answer)
        positions, start = batch.positions[:, span], noise.start[:, at + prompt : at + prompt + answer] - at - prompt
        assert (positions[:, :prompt] == np.arange(prompt)).all()
        assert (np.sort(positions, axis=1) == np.arange(prompt + answer)).all()
        in_order = (positions == np.arange(prompt + answer)).all(axis=1)
        assert in_order.all() if text_order == 1 else not in_order.all()
        for row in range(len(positions)):
            size, begins = noise.slot_size[row, at], sorted(set(start[row].tolist()))
            firsts.add((size, begins[1] if len(begins) > 1 else answer))
            assert set(np.diff(begins[1:])) <= {size}
            assert text_order or set(np.diff(begins)) <= {size}
            of_place = start[row][positions[row, prompt:] - prompt].tolist()  # the slot at each place
            runs = [slot for i, slot in enumerate(of_place) if i == 0 or slot != of_place[i - 1]]
            assert sorted(runs) == begins  # no slot is torn apart
        at += prompt + answer
    if text_order:
        assert {first for size, first in firsts if size == 4} >= {1, 2, 3, 4}


@pytest.mark.parametrize("copies", [0.25, 0.5, 1.0])
def test_every_mask_predicts_its_own_token_and_sees_what_stands_before_its_slot(copies):
    noise, batch = batch_of(0.5, copies)
    T = ROWS.tokens.shape[1]
    mask, M = np.asarray(jax.tree.map(jnp.asarray, batch.visibility).mask()), batch.inputs.shape[1] - T
    labelled = batch.weights["mdm"][:, T:] > 0
    segments, is_response = np.asarray(ROWS.segment_ids[0]), np.asarray(ROWS.is_response[0])
    assert labelled.sum(axis=1).tolist() == [min(M, is_response.sum())] * len(labelled)
    for row in range(50):
        place = {int(token) - 100: c for c, token in enumerate(batch.inputs[row, :T])}  # ids tell the index in the row
        index = batch.labels[row, T:][labelled[row]] - 100
        first = noise.start[row][index]
        assert (batch.inputs[row, T:] == MASK).all()
        for m, (i, b) in enumerate(zip(index, first, strict=True)):
            assert index[mask[row, T + m, T:][labelled[row]]].tolist() == list(range(b, i + 1))
            before = [c for c in range(place[b]) if segments[c] == segments[i]]
            assert mask[row, T + m, :T].nonzero()[0].tolist() == before
        sizes = {b: np.sum(noise.start[row][is_response] == b) for b in first}
        assert sum(np.sum(first == b) < size for b, size in sizes.items()) <= 1  # one slot is cut short, at most


def test_a_clean_token_predicts_the_next_one_unless_it_is_seen():
    noise, batch = batch_of(0.5)
    T = ROWS.tokens.shape[1]
    labelled = batch.weights["ar"][:, :T] > 0
    assert not batch.weights["ar"][:, T:].any()
    segments, response = np.asarray(ROWS.segment_ids[0]), np.asarray(ROWS.is_response[0])
    crossed = 0
    for row in range(len(labelled)):
        places = {int(token) - 100: c for c, token in enumerate(batch.inputs[row, :T])}
        for index in range(T - 1):
            has = segments[index] == segments[index + 1] and response[index + 1]
            has = has and places[index + 1] > places[index]
            assert labelled[row, places[index]] == has
            assert not has or batch.labels[row, places[index]] == 100 + index + 1
            crossed += has and noise.start[row, index] != noise.start[row, index + 1]
    assert crossed > 1000  # slot borders have labels, too


def test_slots_that_do_not_fit_are_left_out_evenly():
    """No place of the row is copied more often than another, but for those that end a torn slot."""
    _, batch = batch_of(1.0, copies=0.35, sizes=(2,))
    labels = batch.labels[:, 26:][batch.weights["mdm"][:, 26:] > 0] - 100
    share = np.bincount(labels, minlength=26)[np.asarray(ROWS.is_response[0])] / 300
    assert share.mean() == pytest.approx(10 / 18)
    assert share.min() > 10 / 18 - 0.15
    assert share.max() < 10 / 18 + 0.15


def test_the_matrix_of_the_decoder_is_what_its_forward_shows():
    drawn = re.findall(r"^    [xdM]        ([1.] .*?)(?:  +[A-Za-z].*)?$", drafting.__doc__, re.MULTILINE)
    expected = [[cell == "1" for cell in re.sub(r"[^1.]", "", line)] for line in drawn]
    assert visible_to_masks(4, jnp.array([[1, 3]]), 4, 4)[0].tolist() == expected
    two_slots = np.array(visible_to_masks(4, jnp.array([[1, 3]]), 4, 2)[0])
    assert not two_slots[6:8, 4:6].any()
    assert not two_slots[10:, 8:10].any()
    two_slots[6:8, 4:6] = two_slots[10:, 8:10] = True
    assert two_slots.tolist() == expected


def test_how_much_is_fed_is_chosen_by_the_rows_and_the_device():
    model = tiny_model()
    requests = prepare(PROMPTS, settings("dense", fed_tokens=0, size=8), model.config)
    decoder = decoder_for(requests, model.config)
    assert decoder.width == 48
    reach = [decoder.shape(model, rows)[0] for rows in (1, 8, 64)]
    assert reach == sorted(reach, reverse=True)
    assert reach[0] > reach[-1] == 1  # the arithmetic of many rows is not free
    # One token and no draft have one prefix, whatever else may be fed.
    out, ar = (decode(model, PROMPTS[:2], settings(m, fed_tokens=3, size=1, new=3)) for m in ("dense", "ar"))
    assert out.tokens == ar.tokens


def test_thresholds_of_tokens_are_refused_where_they_have_no_use():
    with pytest.raises(UserError, match="infill=threshold: must be 'exact' or 'auto'"):
        settings("dense_plan", infill="threshold")
