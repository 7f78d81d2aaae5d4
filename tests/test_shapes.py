"""The tests run under a checker of the shapes in annotations: it is on, and JAX may still rebuild what it checks."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from beartype.roar import BeartypeCallHintViolation
from jaxtyping import TypeCheckError

from refusion_jax.batch.batch import mean_over
from refusion_jax.batch.rows import Rows, text_positions
from refusion_jax.decoding.sampling import Record
from refusion_jax.model.attention import attention

ROWS = Rows(np.ones((2, 5), np.int32), np.ones((2, 5), np.int32), np.ones((2, 5), bool))


def test_a_wrong_shape_is_reported_where_it_is_made():
    q, mask = jnp.ones((2, 5, 4, 8)), jnp.ones((2, 5, 5), bool)
    k = v = jnp.ones((2, 5, 2, 8))
    attention(q, k, v, mask)
    for wrong in ((q, k.swapaxes(1, 2), v, mask), (q, k, v, mask[:1]), (q, k, v, mask.astype(jnp.int32))):
        with pytest.raises(BeartypeCallHintViolation):
            jax.jit(attention)(*wrong)
    with pytest.raises(BeartypeCallHintViolation):
        text_positions(jnp.ones(5, jnp.int32))
    with pytest.raises(BeartypeCallHintViolation):
        mean_over(jnp.ones((2, 5)))
    with pytest.raises(BeartypeCallHintViolation):
        Record.empty(2, 8).append(jnp.ones((2, 3), jnp.int32), jnp.ones((2, 4), jnp.int32), jnp.ones(2, jnp.int32))


def test_a_dataclass_of_wrong_shapes_is_reported():
    with pytest.raises(TypeCheckError):
        dataclasses.replace(ROWS, is_response=ROWS.is_response.T)
    with pytest.raises(TypeCheckError):
        Rows(ROWS.tokens.astype(np.int64), ROWS.segment_ids, ROWS.is_response)


def test_what_jax_rebuilds_may_hold_anything():
    shapes = jax.eval_shape(lambda rows: rows, ROWS)
    assert jax.tree.map(lambda x: x.shape, shapes) == jax.tree.map(np.shape, ROWS)
    stacked = jax.tree.map(lambda x: jnp.stack([x, x]), ROWS)
    assert jax.vmap(lambda rows: text_positions(rows.segment_ids))(stacked).shape == (2, 2, 5)
