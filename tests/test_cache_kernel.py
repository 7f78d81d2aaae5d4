"""The TPU kernel of decoding, emulated: it computes what `cached_attention` does, from filled entries alone."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import PROMPTS, settings, sharp_model

from refusion_jax import decode
from refusion_jax.distributed import sharding
from refusion_jax.model import cache_kernel, key_values
from refusion_jax.model.attention import cached_attention
from refusion_jax.model.cache_kernel import cache_attention

L, B, T, N, K, S, H = 2, 4, 5, 4, 2, 600, 16
LENGTH, FED = np.array([0, 7, 512, 600]), np.array([5, 2, 0, 5])


interpreted = functools.partial(cache_attention, interpret=True)


def inputs(entries_not_filled=0.0):
    keys = jax.random.split(jax.random.key(0), 6)
    q = jax.random.normal(keys[0], (B, T, N, H))
    k, v = (jax.random.normal(key, (B, T, K, H)) for key in keys[1:3])
    old = (jax.random.normal(key, (L, B, K, S, H)) for key in keys[3:5])
    is_filled = (np.arange(S) < LENGTH[:, None])[None, :, None, :, None]
    visible = jax.random.bernoulli(keys[5], 0.5, (B, T, T)) | jnp.eye(T, dtype=bool)[None]
    return q, k, v, visible, *(jnp.where(is_filled, x, entries_not_filled) for x in old)


def definition(q, k, v, visible, old_k, old_v):
    return cached_attention(q, k, v, visible, old_k[1], old_v[1], jnp.asarray(np.arange(S) < LENGTH[:, None]))


def emulated(*fed):
    return jax.jit(interpreted)(*fed, jnp.array(1), *map(jnp.asarray, (LENGTH, FED)))


def assert_equal_where_fed(got, expected):
    is_fed = np.arange(T) < FED[:, None]
    np.testing.assert_allclose(np.asarray(got)[is_fed], np.asarray(expected)[is_fed], atol=2e-6)


def test_the_kernel_is_the_definition_and_entries_that_are_not_filled_are_no_part_of_any_sum():
    """Also those beyond the end of the last block, which hold anything on a TPU."""
    assert_equal_where_fed(emulated(*inputs(jnp.nan)), definition(*inputs()))


@pytest.mark.thorough
def test_split_over_rows_and_heads_the_kernel_is_the_definition():
    with jax.set_mesh(sharding.make_mesh({"data": 2, "tensor": 2}, jax.devices()[:4])):
        assert_equal_where_fed(emulated(*inputs()), definition(*inputs()))


@pytest.mark.parametrize("method", ["refusion", pytest.param("ar", marks=pytest.mark.slow)])
@pytest.mark.thorough
def test_decoders_write_the_same_text_by_the_kernel(method, monkeypatch):
    expected = decode(sharp_model(1), PROMPTS, settings(method, new=8))
    monkeypatch.setattr(key_values, "is_for_kernel", lambda keys, tokens: keys.shape[3] > 0)
    used = []
    monkeypatch.setattr(cache_kernel, "cache_attention", lambda *fed: used.append(fed) or interpreted(*fed))
    own = settings(method, new=8, cache_length=41)  # of no other test: nothing was compiled for it before
    assert decode(sharp_model(1), PROMPTS, own) == expected
    assert used
