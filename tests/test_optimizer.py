import jax.numpy as jnp
import numpy as np
import pytest

from refusion_jax.config import default_config
from refusion_jax.training.optimizer import make_optimizer, make_schedule


def schedule(**changes):
    config = default_config()
    config.update({"steps": 100, "learning_rate": 2.0, "final_lr_ratio": 0.1} | changes)
    return make_schedule(config)


@pytest.mark.parametrize("name", ["cosine", "wsd", "constant"])
def test_warm_up_is_linear_to_the_peak(name):
    rate = schedule(schedule=name, warmup_steps=10, decay_steps=20)
    np.testing.assert_allclose([rate(0), rate(5), rate(10)], [0.0, 1.0, 2.0])


@pytest.mark.parametrize(("name", "end"), [("cosine", 0.2), ("wsd", 0.2), ("constant", 2.0)])
@pytest.mark.parametrize("warmup", [0, 10])
def test_schedules_end_where_they_should(name, end, warmup):
    rate = schedule(schedule=name, warmup_steps=warmup, decay_steps=20)
    np.testing.assert_allclose(rate(100), end, rtol=1e-5)


def test_wsd_is_stable_until_it_decays_linearly():
    rate = schedule(schedule="wsd", warmup_steps=10, decay_steps=20)
    np.testing.assert_allclose([rate(10), rate(50), rate(80), rate(90)], [2.0, 2.0, 2.0, 1.1], rtol=1e-6)


def test_cosine_is_half_way_in_the_middle():
    np.testing.assert_allclose(schedule(schedule="cosine")(50), (2.0 + 0.2) / 2, rtol=1e-6)


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


@pytest.mark.parametrize("name", ["cosine", "constant"])
def test_a_run_may_be_warm_up_alone(name):
    rate = schedule(schedule=name, warmup_steps=100)
    np.testing.assert_allclose([rate(0), rate(50), rate(99)], [0.0, 1.0, 1.98], rtol=1e-6)
