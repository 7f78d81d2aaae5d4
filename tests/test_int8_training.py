"""Training with products in int8: how far off they are, that gradients are whole, and that a mesh changes no sum."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import causal, tiny_config
from flax import nnx

from refusion_jax.cli.errors import SettingError
from refusion_jax.config import default_config
from refusion_jax.config.model import model_config
from refusion_jax.distributed.sharding import constrain, make_mesh
from refusion_jax.model.int8 import Int8Array
from refusion_jax.model.int8_training import int8_linear
from refusion_jax.model.transformer import Transformer
from refusion_jax.training.program import train_program

TOKENS, INPUTS, OUTPUTS = 24, 96, 40


def factors() -> list[jax.Array]:
    """x, w and a gradient of x @ w, whose tokens, inputs and outputs are of very different sizes."""
    keys = jax.random.split(jax.random.key(0), 3)
    x, w, dy = (
        jax.random.normal(key, shape)
        for key, shape in zip(keys, [(TOKENS, INPUTS), (INPUTS, OUTPUTS), (TOKENS, OUTPUTS)], strict=True)
    )
    return [
        x * jnp.logspace(-3, 3, TOKENS)[:, None],
        w * jnp.logspace(-2, 2, OUTPUTS)[None],
        dy * jnp.logspace(2, -2, TOKENS)[:, None],
    ]


def product_and_gradients(x, w, dy):
    def product(x, w):
        return int8_linear(x, w, Int8Array.of(jax.lax.stop_gradient(w), [0]), 1)

    y, pull_back = jax.vjp(product, x, w)
    return y, *pull_back(dy)


def largest_error(a, b, b_half) -> np.ndarray:
    """Of a @ b, where a row of a is rounded to 127 steps up to its largest, and b by up to `b_half`."""
    a_half = np.abs(a).max(1, keepdims=True) / 254
    return 1.001 * (a_half * np.abs(b).sum(0) + (np.abs(a) + a_half) @ np.broadcast_to(b_half, b.shape))


def test_products_and_gradients_of_inputs_are_off_by_rounding_alone_and_those_of_weights_are_whole():
    x, w, dy = map(np.asarray, factors())
    y, dx, dw = jax.jit(product_and_gradients)(*factors())
    step = np.abs(w).max(0) / 127  # of each output
    assert np.all(np.abs(y - x @ w) <= largest_error(x, w, step / 2))
    assert np.all(np.abs(dx - dy @ w.T) <= largest_error(dy * step, (w / step).T, 0.5))
    np.testing.assert_allclose(dw, x.T @ dy, rtol=1e-5, atol=1e-5 * np.abs(dw).max())


def test_weights_and_tokens_split_over_chips_give_the_same_to_the_bit():
    """Integers are summed, so that their order does not matter, and a scale is the largest of all parts."""
    alone = jax.jit(product_and_gradients)(*factors())
    with jax.set_mesh(make_mesh({"fsdp": 4, "tensor": 2})):
        split = jax.jit(lambda x, w, dy: product_and_gradients(x, constrain(w, "embed", "mlp"), dy))(*factors())
    for a, b in zip(alone[:2], split[:2], strict=True):
        np.testing.assert_array_equal(a, b)
    np.testing.assert_allclose(alone[2], split[2], rtol=1e-5, atol=1e-4)


@pytest.mark.thorough
def test_a_model_has_the_gradients_that_it_has_without_rounding_but_for_a_twentieth():
    tokens = jnp.asarray(np.random.default_rng(0).integers(5, 30, (4, 16)), jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(16), (4, 16))
    gradients = []
    for quantization in ("none", "int8"):
        model = Transformer(tiny_config(), nnx.Rngs(0), quantization=quantization)

        def loss(model):
            costs, _ = model.cross_entropy(
                tokens, positions, causal(jnp.ones_like(tokens)), jnp.roll(tokens, 1, 1), tokens > 0
            )
            return costs.mean()

        gradients.append(nnx.to_pure_dict(nnx.jit(nnx.grad(loss))(model)))
    for a, b in zip(*map(jax.tree.leaves, gradients), strict=True):
        assert 0 < jnp.linalg.norm(a - b) < 0.05 * jnp.linalg.norm(a)  # 0.038 at most


def test_experts_are_refused():
    config = default_config()
    config.quantization, config.model.num_experts, config.model.num_experts_per_tok = "int8", 4, 2
    config.model.moe_intermediate_size = 64
    with pytest.raises(SettingError, match="quantization") as error:
        train_program(config, model_config(config), make_mesh({"fsdp": 1}, jax.devices()[:1]))
    assert error.value.as_flag.startswith("--config.quantization=int8: a model with experts")
