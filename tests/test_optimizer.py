import jax.numpy as jnp
import numpy as np
import pytest

from refusion_jax.config import default_config
from refusion_jax.training.optimizer import make_optimizer, make_schedule


@pytest.mark.parametrize(
    ("name", "warmup", "rates"),
    [
        ("cosine", 0, {50: (2.0 + 0.2) / 2, 100: 0.2}),
        ("cosine", 10, {0: 0.0, 5: 1.0, 10: 2.0, 100: 0.2}),
        ("wsd", 0, {0: 2.0, 100: 0.2}),
        ("wsd", 10, {0: 0.0, 5: 1.0, 10: 2.0, 50: 2.0, 80: 2.0, 90: 1.1, 100: 0.2}),
        ("constant", 10, {0: 0.0, 5: 1.0, 10: 2.0, 100: 2.0}),
        ("cosine", 100, {0: 0.0, 50: 1.0, 99: 1.98}),  # warm-up alone
        ("constant", 100, {0: 0.0, 50: 1.0, 99: 1.98}),
    ],
)
def test_a_schedule_has_the_rates_that_are_worked_out_by_hand(name, warmup, rates):
    config = default_config()
    config.update({"steps": 100, "learning_rate": 2.0, "final_lr_ratio": 0.1, "decay_steps": 20})
    config.update({"schedule": name, "warmup_steps": warmup})
    rate = make_schedule(config)
    np.testing.assert_allclose([rate(step) for step in rates], list(rates.values()), rtol=1e-5)


@pytest.mark.parametrize("name", ["adamw", "adafactor", "muon"])
def test_matrices_decay_and_norm_scales_do_not(name):
    config = default_config()
    config.weight_decay, config.optimizer = 0.5, name
    axes = {"scale": ("layers", "norm"), "matrix": ("embed", "mlp"), "layer": ("layers", "embed", "mlp")}
    params = {"scale": jnp.ones((2, 3)), "matrix": jnp.ones((3, 4)), "layer": jnp.ones((2, 3, 4))}
    optimizer = make_optimizer(config, lambda step: 0.1, axes)
    zero_gradients = {name: jnp.zeros_like(p) for name, p in params.items()}
    updates, _ = optimizer.update(zero_gradients, optimizer.init(params), params)
    for matrix in ("matrix", "layer"):
        np.testing.assert_allclose(updates[matrix], -0.05, rtol=1e-6)  # learning rate * decay
    np.testing.assert_array_equal(updates["scale"], 0)


def test_gradients_are_clipped_to_the_global_norm():
    config = default_config()
    config.update({"clip_norm": 1.0, "beta1": 0.0, "beta2": 0.0, "weight_decay": 0.0})
    axes, params = {"w": ("embed", "mlp")}, {"w": jnp.zeros((2, 2))}
    optimizer = make_optimizer(config, lambda step: 1.0, axes)
    _, state = optimizer.update({"w": jnp.full((2, 2), 3.0)}, optimizer.init(params), params)
    first_moment = state[1][0].mu["w"]  # with beta1 = 0, the clipped gradient itself: norm 6 scaled to 1
    np.testing.assert_allclose(first_moment, 0.5, rtol=1e-6)
