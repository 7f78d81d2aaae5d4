"""Training with products in int8 and fp8: how far off they are, that gradients are whole, and what a mesh changes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import causal, tiny_config
from flax import nnx

from refusion_jax.batch.batch import Batch
from refusion_jax.cli.errors import SettingError
from refusion_jax.config import default_config
from refusion_jax.config.model import model_config
from refusion_jax.distributed.sharding import constrain, make_mesh
from refusion_jax.model.int8 import round_to
from refusion_jax.model.quantized_training import DTYPES, quantized_linear
from refusion_jax.model.transformer import Transformer
from refusion_jax.training.program import train_program

TOKENS, INPUTS, OUTPUTS = 24, 96, 40


def factors() -> list[jax.Array]:
    """x, w and a gradient of x @ w, whose tokens, inputs and outputs are of very different sizes, some of them 0."""
    keys = jax.random.split(jax.random.key(0), 3)
    x, w, dy = (
        jax.random.normal(key, shape)
        for key, shape in zip(keys, [(TOKENS, INPUTS), (INPUTS, OUTPUTS), (TOKENS, OUTPUTS)], strict=True)
    )
    return [
        (x * jnp.logspace(-3, 3, TOKENS)[:, None]).at[0].set(0),
        (w * jnp.logspace(-2, 2, OUTPUTS)[None]).at[:, 0].set(0),
        (dy * jnp.logspace(2, -2, TOKENS)[:, None]).at[1].set(0),
    ]


@functools.partial(jax.jit, static_argnums=0)
def product_and_gradients(name, x, w, dy):
    def product(x, w):
        return quantized_linear(x, w, round_to(DTYPES[name], jax.lax.stop_gradient(w), (0,)), 1)

    y, pull_back = jax.vjp(product, x, w)
    return y, *pull_back(dy)


def rounding_error(name: str, a: np.ndarray, axis: int) -> np.ndarray:
    """The largest of each element: half a step of 127 up to the largest along an axis; of E4M3, whose largest is 448,
    half of its last bit, the fourth, or of 2^-9."""
    largest = np.abs(a).max(axis, keepdims=True)
    return 0 * a + largest / 254 if name == "int8" else np.maximum(np.abs(a) / 16, largest / 448 / 2**10)


def largest_error(a, a_error, b, b_error) -> np.ndarray:
    """Of a @ b, whose elements are off by these."""
    return 1.001 * (a_error @ np.abs(b) + (np.abs(a) + a_error) @ b_error)


@pytest.mark.parametrize("name", DTYPES)
def test_products_and_gradients_of_inputs_are_off_by_rounding_alone_and_those_of_weights_are_whole(name):
    x, w, dy = map(np.asarray, factors())
    y, dx, dw = product_and_gradients(name, *factors())
    w_error = rounding_error(name, w, 0)
    assert np.all(np.abs(y - x @ w) <= largest_error(x, rounding_error(name, x, 1), w, w_error))
    step = np.maximum(np.abs(w).max(0), 1e-30)  # of each output, up to a factor: it multiplies dy before it is rounded
    own = largest_error(dy * step, rounding_error(name, dy * step, 1), (w / step).T, (w_error / step).T)
    assert np.all(np.abs(dx - dy @ w.T) <= own)
    np.testing.assert_allclose(dw, x.T @ dy, rtol=1e-5, atol=1e-5 * np.abs(dw).max())


@pytest.mark.parametrize(("name", "tolerance"), [("int8", 0), ("fp8", 1e-6)])
def test_weights_and_tokens_split_over_chips_give_the_same(name, tolerance):
    """A scale is the largest of all parts. Sums of integers do not depend on their order, those of floats hardly."""
    alone = product_and_gradients(name, *factors())
    with jax.set_mesh(make_mesh({"fsdp": 4, "tensor": 2})):
        split = jax.jit(lambda x, w, dy: product_and_gradients(name, x, constrain(w, "embed", "mlp"), dy))(*factors())
    for a, b in zip(alone[:2], split[:2], strict=True):
        of_token = np.abs(a).max(1, keepdims=True)
        assert np.all(np.abs(a - b) <= tolerance * of_token)
    np.testing.assert_allclose(alone[2], split[2], rtol=1e-5, atol=1e-4)


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "most"), [("int8", 0.05), ("fp8", 0.2)])
def test_a_model_has_nearly_the_gradients_that_it_has_without_rounding(name, most):
    tokens = jnp.asarray(np.random.default_rng(0).integers(5, 30, (4, 16)), jnp.int32)
    positions, every = jnp.broadcast_to(jnp.arange(16), (4, 16)), jnp.ones(tokens.shape)
    batch = Batch(tokens, positions, causal(jnp.ones_like(tokens)), jnp.roll(tokens, 1, 1), {"ar": every})
    gradients = []
    for quantization in ("none", name):
        model = Transformer(tiny_config(), nnx.Rngs(0), quantization=quantization)

        def loss(model):
            return model.cross_entropy(batch)[0].mean()

        gradients.append(nnx.to_pure_dict(nnx.jit(nnx.grad(loss))(model)))
    for a, b in zip(*map(jax.tree.leaves, gradients), strict=True):
        assert 0 < jnp.linalg.norm(a - b) < most * jnp.linalg.norm(a)  # 0.038 and 0.166 at most


@pytest.mark.parametrize("name", DTYPES)
def test_experts_are_refused(name):
    config = default_config()
    config.quantization, config.model.num_experts, config.model.num_experts_per_tok = name, 4, 2
    config.model.moe_intermediate_size = 64
    with pytest.raises(SettingError, match="quantization") as error:
        train_program(config, model_config(config), make_mesh({"fsdp": 1}, jax.devices()[:1]))
    assert error.value.as_flag.startswith(f"--config.quantization={name}: a model with experts")
