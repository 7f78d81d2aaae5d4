import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import causal, extend, forward, tiny_config, tiny_model
from flax import nnx

from refusion_jax.decoding.cache import stored
from refusion_jax.model import layers
from refusion_jax.model.attention import attention
from refusion_jax.model.int8 import Int8Array, widened
from refusion_jax.model.key_values import KeyValues
from refusion_jax.model.layers import linear_outputs_first, rope_rotation, rotate
from refusion_jax.model.transformer import Transformer

TOKENS = jnp.array([[5, 6, 7, 8, 9, 10, 11, 12, 0, 0]])
POSITIONS = jnp.array([[0, 3, 1, 2, 0, 2, 1, 3, 0, 1]])  # physical order is not text order
SEGMENTS = jnp.array([[1, 1, 1, 1, 2, 2, 2, 2, 0, 0]])


def test_only_relative_positions_matter():
    model = tiny_model()
    a = forward(model, TOKENS, POSITIONS, causal(SEGMENTS))
    b = forward(model, TOKENS, POSITIONS + 17, causal(SEGMENTS))
    np.testing.assert_allclose(a, b, atol=2e-5)  # rounding of larger angles in float32
    assert np.abs(a - forward(model, TOKENS, POSITIONS * 2, causal(SEGMENTS))).max() > 1e-3


def test_extending_a_cache_equals_one_forward():
    model = tiny_model()
    tokens, positions = TOKENS[:, :8], jnp.array([[0, 1, 2, 3, 7, 6, 5, 4]])
    whole = forward(model, tokens, positions, causal(jnp.ones_like(tokens)))
    none = jnp.zeros((2, 1, 2, 0, 8))
    below = jnp.tril(jnp.ones((1, 8, 8), bool))
    first, kept = extend(
        model, tokens[:, :5], positions[:, :5], KeyValues(none, none), jnp.zeros(1, int), below[:, :5, :5]
    )
    second, _ = extend(model, tokens[:, 5:], positions[:, 5:], stored(kept), jnp.full(1, 5), below[:, 5:, 5:])
    np.testing.assert_allclose(whole, jnp.concatenate([first, second], axis=1), atol=1e-5)


def test_attention_equals_a_plain_loop():
    q, k, v = (np.array(jax.random.normal(jax.random.key(i), (2, 5, n, 8))) for i, n in enumerate((6, 3, 3)))
    mask = np.random.default_rng(0).random((2, 5, 5)) < 0.6
    mask |= np.eye(5, dtype=bool)
    got = jax.jit(attention)(q, k, v, mask)
    for b, t, n in np.ndindex(2, 5, 6):
        keys, values = k[b, mask[b, t], n // 2], v[b, mask[b, t], n // 2]
        weights = np.exp(keys @ q[b, t, n] / np.sqrt(8))
        np.testing.assert_allclose(got[b, t, n], weights @ values / weights.sum(), atol=1e-5)


def test_attention_of_a_query_that_sees_nothing_is_finite_with_finite_gradients():
    q = jnp.ones((1, 2, 2, 4))
    mask = jnp.array([[[True, False], [False, False]]])
    summed = jax.value_and_grad(lambda q, k, v: attention(q, k, v, mask).sum(), argnums=(0, 1, 2))
    value, grads = jax.jit(summed)(q, q, q)
    assert all(np.isfinite(x).all() for x in (value, *grads))


@pytest.mark.parametrize("kind", ["cpu", "TPU v5"])
def test_rotation_and_its_gradient_are_those_of_complex_numbers(kind, monkeypatch):
    """The halves of the first 4 values of a head are real and imaginary parts; the last 2 stay."""
    monkeypatch.setattr(layers, "device_kind_here", lambda: kind)
    x = jax.random.normal(jax.random.key(0), (2, 3, 5, 6))
    w = jax.random.normal(jax.random.key(1), x.shape)
    rotation = rope_rotation(jnp.array([[3, 0, 7], [1, 2, 900]]), size=4, theta=100.0)

    def expected(x):
        turned = (x[..., :2] + 1j * x[..., 2:4]) * (rotation[0] + 1j * rotation[1])
        return jnp.concatenate([turned.real, turned.imag, x[..., 4:]], axis=-1)

    np.testing.assert_allclose(rotation[0][0, 0, 0], np.cos([3.0, 3.0 / 10]), rtol=1e-6)

    def with_gradient(turn):
        turned, pull = jax.vjp(turn, x)
        return turned, *pull(w)

    got, wanted = (jax.jit(with_gradient, static_argnums=0)(turn) for turn in (lambda x: rotate(x, rotation), expected))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), got, wanted)


@pytest.mark.parametrize("dtype", ["float32", "int8"])
@pytest.mark.parametrize("tokens", [1, 2, 64, 65])  # one, few and many take different products on a CPU
def test_the_head_is_contracted_along_its_last_axis(tokens, dtype):
    x, head = jax.random.normal(jax.random.key(0), (1, tokens, 5)), jax.random.normal(jax.random.key(1), (7, 5))
    stored = Int8Array.of(head, [-1]) if dtype == "int8" else head
    expected = np.asarray(x) @ np.asarray(widened(stored, jnp.float32)).T
    np.testing.assert_allclose(linear_outputs_first(x, stored), expected, rtol=1e-5, atol=1e-5)


@functools.cache
def loss_and_counts(remat):
    """(loss and gradient, products, sigmoids) of a model."""
    model = Transformer(tiny_config(), nnx.Rngs(0), remat=remat)

    def loss(model):
        return jnp.sum(model(TOKENS, POSITIONS, causal(SEGMENTS)) ** 2)

    program = str(jax.make_jaxpr(jax.grad(loss))(model))
    value, gradient = jax.jit(jax.value_and_grad(loss))(model)
    return (value, jax.tree.leaves(gradient)), program.count("dot_general"), program.count("logistic")


@pytest.mark.parametrize(
    ("remat", "again"), [("products", 0), ("outputs", 4), ("attention", 6), ("full", 8), ("offload", 8)]
)
def test_recomputing_layers_changes_neither_loss_nor_gradient(remat, again):
    """And it happens: so many of a layer's nine products, and what stands between them."""
    (none, products, sigmoids), (other, other_products, other_sigmoids) = map(loss_and_counts, ("none", remat))
    assert (other_products - products, other_sigmoids - sigmoids) == (again, 1)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), none, other)


def test_bfloat16_computes_in_bfloat16_but_keeps_float32_weights_and_logits():
    exact, rough = tiny_model(), Transformer(tiny_config(), nnx.Rngs(0), dtype="bfloat16")
    logits = forward(rough, TOKENS, POSITIONS, causal(SEGMENTS))
    assert logits.dtype == jnp.float32
    assert {x.dtype for x in jax.tree.leaves(nnx.state(rough))} == {jnp.dtype("float32")}
    difference = np.abs(logits - forward(exact, TOKENS, POSITIONS, causal(SEGMENTS)))
    assert 0 < difference.max() < 0.15  # 2^-8 relative, a few roundings deep
