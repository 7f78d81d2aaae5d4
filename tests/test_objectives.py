import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import pytest
from conftest import MASK, causal, forward, tiny_model
from helpers import loss_terms
from test_slots import packed

from refusion_jax.batch.batch import Batch, weigh
from refusion_jax.batch.rows import Rows
from refusion_jax.config import make_objective
from refusion_jax.systems.ar import NextToken
from refusion_jax.systems.refusion.objective import Noise, draw_noise, hybrid_batch


def rows_of(*rows: list[tuple[int, int]], row_length: int = 24) -> Rows:
    """Packed rows with tokens a tiny model knows."""
    stacked = jax.tree.map(lambda *x: jnp.concatenate(x), *(packed(row, row_length) for row in rows))
    return Rows(stacked.tokens % 24 + 5, stacked.segment_ids, stacked.is_response)


def objective(name: str):
    config = {"objective": name, "slots": {"sizes": (2, 3, 4), "eps": 1e-3, "mdm_weight": 1.0}}
    return make_objective(ml_collections.ConfigDict(config), MASK)


def prepare(rows: Rows, seed: int = 0, name: str = "refusion") -> Batch:
    keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(seed), jnp.arange(rows.tokens.shape[0]))
    return jax.jit(objective(name).corrupt)(rows, keys)


drawn, corrupted = jax.jit(draw_noise, static_argnums=(2, 3)), jax.jit(hybrid_batch, static_argnums=2)


def test_hybrid_loss_is_the_formula_of_the_paper():
    """Against loops over documents and tokens, as the paper writes it."""
    rows = rows_of([(2, 7), (0, 5), (3, 4)], [(1, 9), (4, 10)])
    noise = drawn(jax.random.split(jax.random.key(4), 2), rows, (2, 3, 4), 1e-3)
    batch = corrupted(rows, noise, MASK)
    logits = forward(tiny_model(), batch.inputs, batch.positions, causal(rows.segment_ids))
    terms = loss_terms(logits, batch)

    log_p = np.array(jax.nn.log_softmax(logits))
    clean, masked, documents = [], 0.0, 0
    for row in range(2):
        for segment in set(np.array(rows.segment_ids[row])) - {0}:
            documents += 1
            inside = np.flatnonzero(np.array(rows.segment_ids[row]) == segment)
            response = int(np.sum(rows.is_response[row, inside]))
            p = float(noise.mask_probability[row, inside[0]])
            for i in inside:
                ce = -log_p[row, i, batch.labels[row, i]]
                if batch.weights["ar"][row, i]:
                    clean.append(ce)
                elif batch.weights["mdm"][row, i]:
                    masked += ce / (p * response)
    assert documents == 5
    assert clean
    assert masked
    np.testing.assert_allclose(terms["ar"], np.mean(clean), rtol=1e-5)
    np.testing.assert_allclose(terms["mdm"], masked / documents, rtol=1e-5)


@pytest.mark.parametrize("masked", [True, False], ids=["no clean label", "no masked label"])
def test_a_missing_kind_of_label_is_zero_and_leaves_the_gradient_finite(masked):
    rows = rows_of([(2, 7), (0, 5)])
    noise = drawn(jax.random.split(jax.random.key(0), 1), rows, (2, 3, 4), 1e-3)
    noise = Noise(noise.slot_size, noise.mask_probability, rows.is_response & masked, noise.rank)
    assert_finite(corrupted(rows, noise, MASK), zero="ar" if masked else "mdm")


def test_a_batch_of_padding_is_zero_and_leaves_the_gradient_finite():
    assert_finite(prepare(rows_of([])), zero="ar", also_zero="mdm")


@jax.jit
def loss_and_gradient(model, batch: Batch):
    def loss(model):
        terms = loss_terms(model(batch.inputs, batch.positions, batch.visibility), batch)
        return sum(terms.values()), terms

    return jax.value_and_grad(loss, has_aux=True)(model)


def assert_finite(batch: Batch, zero: str, also_zero: str = ""):
    (_, terms), grads = loss_and_gradient(tiny_model(), batch)
    for name, term in terms.items():
        assert (term == 0) == (name in (zero, also_zero))
    assert all(np.isfinite(g).all() for g in jax.tree.leaves((terms, grads)))


def test_a_label_counts_that_has_a_negative_weight():
    batch, model = prepare(rows_of([(2, 7), (0, 5)]), name="ar"), tiny_model()
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
