import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import MASK, config_with, tiny_config, tiny_model
from flax import nnx

from refusion_jax.batch.rows import Rows
from refusion_jax.config import default_config, make_objective
from refusion_jax.distributed import sharding
from refusion_jax.model.shape import ModelConfig
from refusion_jax.training.program import train_program
from refusion_jax.training.train_step import add_wide, init_state, make_train_step, noise_keys, wide_to_int

BATCH, ROW, STEPS = 16, 24, 3


def random_rows(step: int) -> Rows:
    """Packed rows of documents of random lengths, with padding."""
    rng = np.random.default_rng(step)
    tokens = rng.integers(5, 30, (BATCH, ROW)).astype(np.int32)
    segments, response = np.zeros((BATCH, ROW), np.int32), np.zeros((BATCH, ROW), bool)
    for row in range(BATCH):
        start, segment = 0, 1
        while (length := int(rng.integers(3, 12))) + start <= ROW:
            prompt = int(rng.integers(0, 3))
            segments[row, start : start + length] = segment
            response[row, start + prompt : start + length] = True
            start, segment = start + length, segment + 1
    return Rows(tokens, segments, response)


@functools.cache
def train(steps: int = STEPS, shape: ModelConfig | None = None, **keys):
    """A few float32 steps by a config with these keys, on one device unless they say so: ([metrics], final state)."""
    sizes = {"batch_size": BATCH, "row_length": ROW, "slots.sizes": (2, 3, 4), "remat": "none", "mesh.fsdp": 1}
    config = config_with(**{"learning_rate": 1e-3, "steps": STEPS} | sizes | keys)
    mesh = sharding.make_mesh(config.mesh, jax.devices()[: math.prod(config.mesh.values())])
    program, history = train_program(config, shape or tiny_config(), mesh), []
    with jax.set_mesh(mesh):
        state = program.initial_state()
        for step in range(steps):
            rows = jax.device_put(random_rows(step), sharding.sharding(mesh, "batch", "length"))
            with jax.transfer_guard("disallow"):  # nothing goes between host and device inside a step
                state, metrics = program.step(state, rows)
            history.append(jax.device_get(metrics))
    return history, jax.device_get(state)


def assert_same_training(a, b):
    """The same but for float32 sums taken in another order.

    Adam divides a gradient by its own size, so where a gradient is all rounding, its weight may differ by a part of the
    learning rate: by a tenth of 0.001 at most. The gradients themselves (first moments) agree closely.
    """
    for x, y in zip(a[0], b[0], strict=True):
        for name in x:
            np.testing.assert_allclose(x[name], y[name], rtol=1e-5, err_msg=name)
    moments = (state.opt_state[1][0].mu for _, state in (a, b))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-5 * np.abs(x).max()), *moments)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-4), a[1].params, b[1].params)


# One of them with accumulation; test_systems.py has another.
SPLIT = [
    {"mesh.replica": 2, "mesh.data": 2, "mesh.fsdp": 2},
    {"accumulation": 4, "mesh.fsdp": 2, "mesh.tensor": 2, "mesh.sequence": 2},
]


@pytest.mark.parametrize("how", SPLIT, ids=str)
@pytest.mark.thorough
def test_neither_eight_devices_nor_accumulation_change_training(how):
    assert_same_training(train(), train(**how))


def test_every_seed_step_and_row_has_noise_of_its_own():
    keys = [noise_keys(seed, step, 5) for seed in range(3) for step in range(4)]
    assert len({tuple(key) for drawn in keys for key in jax.random.key_data(drawn).tolist()}) == 3 * 4 * 5
    np.testing.assert_array_equal(*(jax.random.key_data(noise_keys(1, 2, n))[:5] for n in (5, 8)))


def test_a_step_draws_its_noise_from_the_seed_and_its_number():
    """With a learning rate of 0, the loss of the same rows changes by the noise alone."""
    graphdef, params = nnx.split(tiny_model())
    config, optimizer = default_config(), optax.sgd(0.0)
    config.slots.sizes = (2,)

    @functools.cache
    def step_of(seed):
        return jax.jit(make_train_step(graphdef, make_objective(config, MASK), optimizer, lambda _: 0.0, seed, 1))

    def losses(seed):
        step_fn, state, found = step_of(seed), init_state(nnx.to_pure_dict(params), optimizer), []
        for _ in range(3):
            state, metrics = step_fn(state, random_rows(0))
            found.append(float(metrics["loss"]))
        return found

    assert len({*losses(0), *losses(1)}) == 6
    assert losses(0) == losses(0)


@pytest.mark.thorough
def test_the_learning_rate_that_is_logged_is_the_one_that_was_applied():
    """After a step that does not count, the optimizer's schedule is where it was."""
    graphdef, params = nnx.split(tiny_model())

    def rate(step):
        return 0.1 * (1 + step)

    optimizer = optax.sgd(rate)
    step_fn = jax.jit(make_train_step(graphdef, make_objective(default_config(), MASK), optimizer, rate, 0, 1, 2.0))
    state = init_state(nnx.to_pure_dict(params), optimizer)
    usual, low = (dataclasses.replace(state.guard, good=jnp.int32(99), loss_mean=jnp.float32(x)) for x in (1e9, 1e-9))
    state, _ = step_fn(dataclasses.replace(state, guard=low), random_rows(0))  # its loss is a spike
    skipped = state.guard.skipped
    after, metrics = step_fn(
        dataclasses.replace(state, guard=dataclasses.replace(usual, skipped=skipped)), random_rows(1)
    )
    step = optax.tree.norm(jax.tree.map(jnp.subtract, after.params, state.params))
    assert int(skipped) == 1
    np.testing.assert_allclose(step / metrics["grad_norm"], metrics["learning_rate"], rtol=1e-3)


def test_metrics_count_tokens_and_report_every_term():
    history, state = train()
    real = np.cumsum([np.sum(random_rows(step).segment_ids > 0) for step in range(STEPS)])
    assert [wide_to_int(m["tokens"]) for m in history] == real.tolist()
    assert int(state.step) == STEPS
    for m in history:
        np.testing.assert_allclose(m["loss"], m["loss_ar"] + m["loss_mdm"], rtol=1e-6)
        assert m["grad_norm"] > 0
    assert set(train(objective="ar")[0][0]) == {
        *("loss", "loss_ar", "grad_norm", "learning_rate", "tokens", "skipped", "in_a_row"),
    }


def test_a_token_count_passes_32_bits():
    words = jnp.array([0, 2**32 - 3], jnp.uint32)
    assert wide_to_int(add_wide(words, jnp.int32(2))) == 2**32 - 1
    assert wide_to_int(add_wide(words, jnp.int32(3))) == 2**32
    assert wide_to_int(add_wide(add_wide(words, jnp.int32(1000)), jnp.int32(5))) == 2**32 + 1002


def test_micro_batches_are_strided_and_lose_no_row():
    x = jnp.arange(12).reshape(12, 1)
    parts = sharding.split_batch(x, 3)
    assert parts[:, :, 0].tolist() == [[0, 3, 6, 9], [1, 4, 7, 10], [2, 5, 8, 11]]
