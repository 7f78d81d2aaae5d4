"""What objectives feed, label and weigh, and their losses, by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import EOS, MASK, causal, config_with, forward, tiny_model
from helpers import loss_terms, places_of_documents, rows_of, with_eos

from refusion_jax.batch.batch import Batch, weigh
from refusion_jax.batch.masking import pad_answers
from refusion_jax.batch.rows import Rows
from refusion_jax.batch.visibility import BIDIRECTIONAL, Visibility
from refusion_jax.config import make_objective
from refusion_jax.systems import idlm
from refusion_jax.systems.ar import NextToken
from refusion_jax.systems.refusion.objective import Noise, draw_noise, hybrid_batch

drawn, corrupted = jax.jit(draw_noise, static_argnums=(2, 3)), jax.jit(hybrid_batch, static_argnums=2)


def test_hybrid_loss_is_the_formula_of_the_paper():
    """Against loops over documents and tokens, as the paper writes it."""
    rows = rows_of([(2, 7), (0, 5), (3, 4)], [(1, 9), (4, 10)])
    noise = drawn(jax.random.split(jax.random.key(4), 2), rows, (2, 3, 4), 1e-3)
    batch = corrupted(rows, noise, MASK)
    logits = forward(tiny_model(), batch.inputs, batch.positions, causal(rows.segment_ids))
    terms = loss_terms(logits, batch)

    log_p = np.array(jax.nn.log_softmax(logits))
    clean, masked = [], 0.0
    for row, inside in places_of_documents(rows.segment_ids):
        response = int(np.sum(rows.is_response[row, inside]))
        p = float(noise.mask_probability[row, inside[0]])
        for i in inside:
            ce = -log_p[row, i, batch.labels[row, i]]
            if batch.weights["ar"][row, i]:
                clean.append(ce)
            elif batch.weights["mdm"][row, i]:
                masked += ce / (p * response)
    assert clean
    assert masked
    np.testing.assert_allclose(terms["ar"], np.mean(clean), rtol=1e-5)
    np.testing.assert_allclose(terms["mdm"], masked / 5, rtol=1e-5)


@jax.jit
def loss_and_gradient(model, batch: Batch):
    def loss(model):
        terms = loss_terms(model(batch.inputs, batch.positions, batch.visibility), batch)
        return sum(terms.values()), terms

    return jax.value_and_grad(loss, has_aux=True)(model)


@pytest.mark.parametrize(
    ("documents", "masked", "zero"),
    [([(2, 7), (0, 5)], True, {"ar"}), ([(2, 7), (0, 5)], False, {"mdm"}), ([], False, {"ar", "mdm"})],
    ids=["no clean label", "no masked label", "padding alone"],
)
def test_a_missing_kind_of_label_is_zero_and_leaves_the_gradient_finite(documents, masked, zero):
    rows = rows_of(documents)
    noise = drawn(jax.random.split(jax.random.key(0), 1), rows, (2, 3, 4), 1e-3)
    noise = Noise(noise.slot_size, noise.mask_probability, rows.is_response & masked, noise.rank)
    (_, terms), grads = loss_and_gradient(tiny_model(), corrupted(rows, noise, MASK))
    assert {name for name, term in terms.items() if term == 0} == zero
    assert all(np.isfinite(g).all() for g in jax.tree.leaves((terms, grads)))


def test_a_label_counts_that_has_a_negative_weight():
    rows, model = rows_of([(2, 7), (0, 5)]), tiny_model()
    batch = NextToken().corrupt(rows, jax.random.split(jax.random.key(0), 1))
    batch = batch.replace(weights={"ar": jnp.where(batch.labels % 2 == 0, -1.0, 2.0) * batch.weights["ar"]})
    logits = forward(model, batch.inputs, batch.positions, batch.visibility)
    found = weigh(model.cross_entropy(batch)[0], batch)["ar"]
    np.testing.assert_allclose(found, loss_terms(logits, batch)["ar"], rtol=1e-5)


def test_next_token_labels_are_the_responses_of_the_same_document():
    rows = rows_of([(2, 3), (0, 3), (1, 1)], row_length=12)
    batch = jax.jit(NextToken().corrupt)(rows, jax.random.split(jax.random.key(0), len(rows.tokens)))
    #                      prompt  response   text    p r   padding
    labelled = np.array([[0, 1, 1, 1, 0, 1, 1, 0, 1, 0, 0, 0]], bool)
    np.testing.assert_array_equal(batch.weights["ar"] > 0, labelled)
    assert float(batch.weights["ar"].sum()) == pytest.approx(1)
    np.testing.assert_array_equal(batch.labels[labelled], jnp.roll(rows.tokens, -1, axis=1)[labelled])
    np.testing.assert_array_equal(batch.inputs, rows.tokens)


R2FT = make_objective(config_with(objective="r2ft"), MASK)
reject = jax.jit(R2FT.corrupt)


def batch_of(seed: int = 0):
    rows = rows_of([(2, 7), (0, 9)], [(1, 14)])
    return rows, reject(rows, jax.random.split(jax.random.key(seed), 2))


def test_the_loss_of_r2ft_is_the_formula_document_by_document():
    model = tiny_model()
    rows, batch = batch_of()
    logits = forward(model, batch.inputs, batch.positions, batch.visibility)
    log_p, T = np.asarray(jax.nn.log_softmax(logits)), rows.tokens.shape[1]
    preferences, own, documents = 0.0, 0.0, 3
    for row, inside in places_of_documents(rows.segment_ids):
        places = [i for i in inside if batch.inputs[row, i] == MASK and rows.is_response[row, i]]
        assert places
        chosen = sum(log_p[row, i, rows.tokens[row, i]] for i in places) / len(places)
        rejected = sum(log_p[row, i, batch.labels[row, T + i]] for i in places) / len(places)
        preferences += -np.log(1 / (1 + np.exp(rejected - chosen))) / documents
        own += -chosen / documents
    terms = loss_terms(logits, batch)
    np.testing.assert_allclose(terms["preference"], preferences, rtol=1e-5)
    np.testing.assert_allclose(terms["mdm"], own, rtol=1e-5)
    assert R2FT.coefficients == {"preference": 1.0, "mdm": 0.1}


def test_the_text_that_r2ft_rejects_repeats_the_first_masked_tokens_of_its_document():
    lengths = set()
    for seed in range(100):
        rows, batch = batch_of(seed)
        T = rows.tokens.shape[1]
        assert jnp.array_equal(batch.inputs[:, :T], batch.inputs[:, T:])
        for row, inside in places_of_documents(rows.segment_ids):
            places = [i for i in inside if batch.weights["mdm"][row, i] > 0]
            text = [int(rows.tokens[row, i]) for i in places]
            rejected = [int(batch.labels[row, T + i]) for i in places]
            fitting = [n for n in range(1, 9) if rejected == [text[i % n] for i in range(len(text))]]
            assert fitting or not places
            lengths.update(fitting[:1] if len(text) > 8 else [])
    assert lengths == {*range(1, 9)}


def test_the_length_of_a_phrase_that_r2ft_repeats_does_not_depend_on_how_much_is_masked():
    rows, T = 4000, 8
    text = Rows(jnp.tile(jnp.arange(10, 10 + T), (rows, 1)), jnp.ones((rows, T), int), jnp.ones((rows, T), bool))
    batch = reject(text, jax.random.split(jax.random.key(0), rows))
    ratio, masked = np.asarray(batch.diagnostics["mask_ratio"][:, 0]), np.asarray(batch.weights["mdm"][:, :T] > 0)
    second = np.arange(rows), np.argsort(~masked, axis=1, kind="stable")[:, 1]
    chosen, rejected = np.split(np.asarray(batch.labels), 2, axis=1)
    is_longer, any_two = rejected[second] == chosen[second], masked.sum(axis=1) >= 2
    one, more = (ratio[any_two & (is_longer == wanted)] for wanted in (False, True))
    assert len(more) > len(one) > 300
    assert abs(one.mean() - more.mean()) < 0.05  # 0.4 if both came of the same number


def test_labels_and_weights_of_a_row_of_idlm_computed_by_hand():
    rows = Rows(jnp.array([[7, 8, 9, 10, 11, 0]]), jnp.array([[1, 1, 1, 2, 2, 0]]), jnp.array([[0, 1, 1, 0, 1, 0]]) > 0)
    batch = jax.jit(idlm.AllMasked(MASK, 3, 0.2).corrupt)(rows, jax.random.split(jax.random.key(0), 1))
    assert batch.inputs[0].tolist() == [MASK] * 6 + [7, 8, 9, 10, 11, 0]
    assert batch.positions[0].tolist() == [0, 1, 2, 0, 1, 0] * 2
    third = 1 / 3
    np.testing.assert_allclose(batch.weights["mdm"][0], [third, third, 0, third, 0, 0] + [0] * 6)
    np.testing.assert_allclose(batch.weights["ar"][0], [0] * 6 + [third, third, 0, third, 0, 0])
    assert batch.labels[0, [0, 1, 3]].tolist() == batch.labels[0, [6, 7, 9]].tolist() == [8, 9, 11]


@pytest.mark.parametrize("padding", [0.0, 0.5])
def test_the_loss_of_llada_is_that_of_its_documents_one_a_row_by_hand(padding):
    """1 / documents * sum over masked tokens of CE / (p * response tokens), each document in a forward of its own."""
    rows, model = with_eos(rows_of([(2, 7), (0, 5), (3, 4)], [(1, 9), (4, 10)])), tiny_model()
    objective = make_objective(config_with(objective="llada", **{"llada.padding": padding}), MASK, EOS)
    keys = jax.random.split(jax.random.key(5), 2)
    batch, padded = jax.jit(lambda *given: (objective.corrupt(*given), pad_answers(*given, padding, EOS)))(rows, keys)
    total, length, documents = 0.0, rows.tokens.shape[1], places_of_documents(batch.visibility.segment_ids)
    for row, places in documents:
        alone = np.zeros((1, length), np.int32)
        alone[0, : len(places)] = batch.inputs[row, places]
        seen = Visibility.of(BIDIRECTIONAL, (jnp.arange(length)[None] < len(places)).astype(jnp.int32))
        logits = forward(model, jnp.asarray(alone), jnp.arange(length)[None], seen)
        log_p = np.asarray(jax.nn.log_softmax(logits))[0]
        is_masked = alone[0, : len(places)] == MASK
        p = float(batch.diagnostics["mask_ratio"][row, places[0]])
        prompt = int(np.sum(~np.asarray(padded.is_response[row, places])))
        assert not is_masked[:prompt].any()
        cost = sum(-log_p[at, batch.labels[row, places[at]]] for at in np.flatnonzero(is_masked))
        total += cost / (p * (len(places) - prompt))
    assert len(documents) < 5 if padding else len(documents) == 5  # some give way to padding of the one before
    terms = loss_terms(forward(model, batch.inputs, batch.positions, batch.visibility), batch)
    np.testing.assert_allclose(terms["mdm"], total / len(documents), rtol=1e-5)
    assert total > 0
