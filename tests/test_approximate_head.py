"""The approximate output head: which rows it computes, that they are exact, and that neither mesh nor batch matter."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import PROMPTS, settings, sharp_model
from flax import nnx

from refusion_jax import decode
from refusion_jax.distributed.sharding import make_mesh, sharding
from refusion_jax.model.approximate_head import rounded_head, shortlisted_logits
from refusion_jax.model.transformer import logical_axes

V, D = 64, 16


@functools.partial(jax.jit, static_argnames="rows")
def shortlisted(x, head, rows):
    return shortlisted_logits(x, head, rounded_head(head), rows)


def head_and_tokens(tokens: int = 12) -> tuple[jax.Array, jax.Array]:
    head = jax.random.normal(jax.random.key(0), (V, D)) * jnp.linspace(0.1, 3.0, V)[:, None]  # rows of many sizes
    return head, jax.random.normal(jax.random.key(1), (4, tokens // 4, D))


def test_the_best_rows_by_the_rounded_head_are_exact_and_the_others_impossible():
    head, x = head_and_tokens()
    logits = np.asarray(shortlisted(x, head, rows=8))
    rounded = np.round(head / np.abs(head).max(axis=1, keepdims=True) * 127) * np.abs(head).max(axis=1, keepdims=True)
    tokens = np.round(x / np.abs(x).max(axis=2, keepdims=True) * 127)
    best = np.argsort(-(tokens @ rounded.T), axis=2)[:, :, :8]
    exact = np.take_along_axis(np.asarray(x @ head.T), best, axis=2)
    np.testing.assert_allclose(np.take_along_axis(logits, best, axis=2), exact, rtol=1e-5, atol=1e-5)
    assert np.isfinite(logits).sum() == 8 * x.shape[0] * x.shape[1]


def test_eight_rows_of_64_never_miss_the_best():
    head, x = head_and_tokens(4000)
    logits = shortlisted(x, head, rows=8)
    np.testing.assert_array_equal(logits.argmax(axis=2), (x @ head.T).argmax(axis=2))


@pytest.mark.parametrize("shape", [{"data": 2, "tensor": 4}, {"fsdp": 4, "tensor": 2}], ids=["tensor", "fsdp"])
def test_the_shards_of_a_vocabulary_find_what_one_chip_finds(shape):
    head, x = head_and_tokens()
    mesh = make_mesh(shape)
    x4 = jnp.tile(x, (2, 1, 1))[:4]
    expected = shortlisted(x4, head, rows=8)
    with jax.set_mesh(mesh):
        split = jax.device_put(head, sharding(mesh, "vocab", "embed"))
        logits = shortlisted(x4, split, rows=8)
    np.testing.assert_array_equal(np.isfinite(logits), np.isfinite(expected))
    np.testing.assert_allclose(logits, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.thorough
def test_greedy_answers_are_those_of_the_exact_head_on_one_device_and_on_a_mesh():
    model, s = sharp_model(), settings("ar")
    exact, few = decode(model, PROMPTS, s), dataclasses.replace(s, head_rows=8)
    assert decode(model, PROMPTS, few).tokens == exact.tokens
    mesh = make_mesh({"data": 2, "tensor": 2}, jax.devices()[:4])
    graphdef, params = nnx.split(model)
    places = jax.tree.map(
        lambda axes: sharding(mesh, *axes), logical_axes(model), is_leaf=lambda x: isinstance(x, tuple)
    )
    split = nnx.merge(graphdef, jax.device_put(nnx.to_pure_dict(params), places))
    assert decode(split, PROMPTS, few).tokens == exact.tokens


def test_as_many_rows_as_the_vocabulary_are_the_exact_head():
    assert sharp_model().with_head_rows(32).head_rows == 0
