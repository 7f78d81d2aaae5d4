"""Fine-tuning against repetition: the loss by hand, and what the rejected text is."""

import jax
import jax.numpy as jnp
import numpy as np
from conftest import MASK, forward, tiny_model
from helpers import loss_terms
from test_objectives import rows_of

from refusion_jax.batch.rows import Rows
from refusion_jax.config import default_config, make_objective


def batch_of(seed: int = 0, **keys):
    config = default_config()
    config.objective = "r2ft"
    config.r2ft.update(keys)
    rows = rows_of([(2, 7), (0, 9)], [(1, 14)])
    objective = make_objective(config, MASK)
    return rows, objective, jax.jit(objective.corrupt)(rows, jax.random.split(jax.random.key(seed), 2))


def test_the_loss_is_the_formula_document_by_document():
    model = tiny_model()
    rows, objective, batch = batch_of(beta_chosen=0.5, beta_rejected=2.0)
    logits = forward(model, batch.inputs, batch.positions, batch.visibility)
    log_p, T = np.asarray(jax.nn.log_softmax(logits)), rows.tokens.shape[1]
    preferences, own, documents = 0.0, 0.0, 3
    for row, segment in ((0, 1), (0, 2), (1, 1)):
        places = [
            i
            for i in np.flatnonzero(np.asarray(rows.segment_ids[row]) == segment)
            if batch.inputs[row, i] == MASK and rows.is_response[row, i]
        ]
        assert places
        chosen = sum(log_p[row, i, rows.tokens[row, i]] for i in places) / len(places)
        rejected = sum(log_p[row, i, batch.labels[row, T + i]] for i in places) / len(places)
        preferences += -np.log(1 / (1 + np.exp(-(0.5 * chosen - 2.0 * rejected)))) / documents
        own += -chosen / documents
    terms = loss_terms(logits, batch)
    np.testing.assert_allclose(terms["preference"], preferences, rtol=1e-5)
    np.testing.assert_allclose(terms["mdm"], own, rtol=1e-5)
    assert objective.coefficients == {"preference": 1.0, "mdm": 0.1}


def test_the_rejected_text_repeats_the_first_masked_tokens_of_its_document():
    lengths = set()
    for seed in range(8):
        rows, _, batch = batch_of(seed, longest_phrase=3)
        T = rows.tokens.shape[1]
        assert jnp.array_equal(batch.inputs[:, :T], batch.inputs[:, T:])
        for row, segment in ((0, 1), (0, 2), (1, 1)):
            inside = np.flatnonzero(np.asarray(rows.segment_ids[row]) == segment)
            places = [i for i in inside if batch.weights["mdm"][row, i] > 0]
            text = [int(rows.tokens[row, i]) for i in places]
            rejected = [int(batch.labels[row, T + i]) for i in places]
            fitting = [n for n in (1, 2, 3) if rejected == [text[i % n] for i in range(len(text))]]
            assert fitting or not places
            lengths.update(fitting[:1] if len(text) > 3 else [])
    assert lengths == {1, 2, 3}


def test_the_length_of_a_phrase_does_not_depend_on_how_much_is_masked():
    config = default_config()
    config.objective, config.r2ft.longest_phrase = "r2ft", 2
    rows, T = 4000, 8
    text = Rows(jnp.tile(jnp.arange(10, 10 + T), (rows, 1)), jnp.ones((rows, T), int), jnp.ones((rows, T), bool))
    batch = jax.jit(make_objective(config, MASK).corrupt)(text, jax.random.split(jax.random.key(0), rows))
    ratio, masked = np.asarray(batch.diagnostics["mask_ratio"][:, 0]), np.asarray(batch.weights["mdm"][:, :T] > 0)
    second = np.arange(rows), np.argsort(~masked, axis=1, kind="stable")[:, 1]
    chosen, rejected = np.split(np.asarray(batch.labels), 2, axis=1)
    is_two, any_two = rejected[second] == chosen[second], masked.sum(axis=1) >= 2
    short, long = (ratio[any_two & (is_two == one)] for one in (False, True))
    assert min(len(short), len(long)) > 1000
    assert abs(short.mean() - long.mean()) < 0.05  # 0.4 if both came of the same number
