"""The tests run under a checker of the shapes in annotations: it is on."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from beartype.roar import BeartypeCallHintViolation
from jaxtyping import TypeCheckError

from refusion_jax.batch.rows import Rows
from refusion_jax.model.attention import attention

ROWS = Rows(np.ones((2, 5), np.int32), np.ones((2, 5), np.int32), np.ones((2, 5), bool))


def test_a_wrong_shape_is_reported_where_it_is_made():
    q, mask = jnp.ones((2, 5, 4, 8)), jnp.ones((2, 5, 5), bool)
    k = v = jnp.ones((2, 5, 2, 8))
    attention(q, k, v, mask)
    for wrong in ((q, k.swapaxes(1, 2), v, mask), (q, k, v, mask[:1]), (q, k, v, mask.astype(jnp.int32))):
        with pytest.raises(BeartypeCallHintViolation):
            jax.jit(attention)(*wrong)


def test_a_dataclass_of_wrong_shapes_is_reported():
    with pytest.raises(TypeCheckError):
        dataclasses.replace(ROWS, is_response=ROWS.is_response.T)
    with pytest.raises(TypeCheckError):
        Rows(ROWS.tokens.astype(np.int64), ROWS.segment_ids, ROWS.is_response)
