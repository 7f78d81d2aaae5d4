"""Masked diffusion: the loss by hand, document by document, each alone in a row."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import EOS, MASK, config_with, forward, tiny_model
from helpers import loss_terms, with_eos
from test_objectives import rows_of

from refusion_jax.batch.masking import pad_answers
from refusion_jax.batch.visibility import BIDIRECTIONAL, Visibility
from refusion_jax.config import make_objective


@pytest.mark.parametrize("padding", [0.0, 0.5])
def test_the_loss_of_packed_rows_is_that_of_their_documents_one_a_row_by_hand(padding):
    """1 / documents * sum over masked tokens of CE / (p * response tokens), each document in a forward of its own."""
    rows, model = with_eos(rows_of([(2, 7), (0, 5), (3, 4)], [(1, 9), (4, 10)])), tiny_model()
    objective = make_objective(config_with(objective="llada", **{"llada.padding": padding}), MASK, EOS)
    keys = jax.random.split(jax.random.key(5), 2)
    batch, padded = jax.jit(lambda *given: (objective.corrupt(*given), pad_answers(*given, padding, EOS)))(rows, keys)
    total, documents, length = 0.0, 0, rows.tokens.shape[1]
    segments = np.asarray(batch.visibility.segment_ids)
    for row in range(2):
        for segment in sorted(set(segments[row]) - {0}):
            places = np.flatnonzero(segments[row] == segment)
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
            documents += 1
    assert documents == 5 if not padding else documents < 5  # some give way to padding of the one before
    terms = loss_terms(forward(model, batch.inputs, batch.positions, batch.visibility), batch)
    np.testing.assert_allclose(terms["mdm"], total / documents, rtol=1e-5)
    assert total > 0
