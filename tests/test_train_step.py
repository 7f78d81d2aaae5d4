"""The train step: schedules and optimizers, noise, devices, accumulation, adapters, and products in int8 and fp8."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import MASK, causal, config_with, tiny_config, tiny_model
from etils import epath
from flax import nnx
from helpers import load_config

from refusion_jax.batch.batch import Batch
from refusion_jax.batch.rows import Rows
from refusion_jax.checkpoints.manager import Checkpoints
from refusion_jax.cli.errors import SettingError, UserError
from refusion_jax.config import make_objective
from refusion_jax.config.model import model_config
from refusion_jax.distributed import sharding
from refusion_jax.distributed.sharding import constrain, make_mesh
from refusion_jax.model.int8 import round_to
from refusion_jax.model.lora import INPUTS as ADAPTED
from refusion_jax.model.quantized_training import DTYPES, quantized_linear
from refusion_jax.model.shape import ModelConfig
from refusion_jax.model.transformer import Transformer
from refusion_jax.systems.interface import train_flops_per_row
from refusion_jax.systems.registry import find_system
from refusion_jax.training.loop import Now
from refusion_jax.training.optimizer import make_optimizer, make_schedule
from refusion_jax.training.program import train_program
from refusion_jax.training.recovery import Health
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


def program_of(shape: ModelConfig | None = None, **keys):
    """(the training program of a config with these keys, on one device unless they say so, its mesh)."""
    sizes = {"batch_size": BATCH, "row_length": ROW, "slots.sizes": (2, 3, 4), "remat": "none", "mesh.fsdp": 1}
    config = config_with(**{"learning_rate": 1e-3, "steps": STEPS} | sizes | keys)
    mesh = sharding.make_mesh(config.mesh, jax.devices()[: math.prod(config.mesh.values())])
    return train_program(config, shape or tiny_config(), mesh), mesh


@functools.cache
def train(steps: int = STEPS, shape: ModelConfig | None = None, **keys):
    """A few float32 steps of this program: ([metrics], final state)."""
    (program, mesh), history = program_of(shape, **keys), []
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


@pytest.mark.parametrize("optimizer", ["adamw", pytest.param("muon", marks=pytest.mark.thorough)])
def test_a_first_moment_in_bfloat16_stays_so_through_a_checkpoint_and_costs_its_rounding(optimizer, tmp_path):
    keys = {"optimizer": optimizer, "learning_rate": 1e-2, "schedule": "constant", "warmup_steps": 1}
    (rounded, whole), exact = train(8, moment_dtype="bfloat16", **keys), train(8, **keys)
    (program, mesh), where = program_of(moment_dtype="bfloat16", **keys), epath.Path(tmp_path)
    with jax.set_mesh(mesh), Checkpoints(where, 1) as checkpoints:
        state = program.initial_state()
        for step in range(8):
            state, _ = program.step(state, jax.device_put(random_rows(step), sharding.sharding(mesh)))
            if step == 4:
                checkpoints.save(5, state, {"next_row": 0}, last=True)
                state, _ = checkpoints.restore(program.state)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(state), whole)
    kept = [(jax.tree_util.keystr(path), x.dtype) for path, x in jax.tree.leaves_with_path(whole.opt_state)]
    assert {dtype for path, dtype in kept if ".mu[" in path} == {jnp.dtype("bfloat16")}
    assert {dtype for path, dtype in kept if ".nu[" in path} == {jnp.dtype("float32")}
    found, expected = (np.array([metrics["loss"] for metrics in history]) for history in (rounded, exact[0]))
    # 8 bits: each update is off by 2^-9 of its size at most, and so is what the updates make of the loss.
    assert 0 < np.abs(found - expected).max() < 2**-8 * np.ptp(expected)


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
    config, optimizer = config_with(**{"slots.sizes": (2,)}), optax.sgd(0.0)

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


@pytest.mark.parametrize("part", ["inputs", "labels"])
def test_a_batch_with_what_is_no_token_trains_nothing_and_ends_the_run(part):
    """Such ids would be read, or learnt, as other tokens; labels without a weight may be anything."""

    class Odd(find_system("ar").objective):
        def corrupt(self, rows, keys):
            batch = super().corrupt(rows, keys)
            batch = batch.replace(labels=jnp.where(batch.weights["ar"] > 0, batch.labels, -100))
            return batch.replace(**{part: jnp.where(getattr(batch, part) == 7, 999, getattr(batch, part))})

    graphdef, params = nnx.split(tiny_model())
    step_fn = jax.jit(make_train_step(graphdef, Odd(), optax.sgd(0.1), lambda _: 0.1, 0, 1))
    health, state, odd = Health(), init_state(nnx.to_pure_dict(params), optax.sgd(0.1)), random_rows(0)
    for step, rows in enumerate((dataclasses.replace(odd, tokens=np.where(odd.tokens == 7, 8, odd.tokens)), odd)):
        before, (state, metrics) = state, step_fn(state, rows)
        assert all(jax.tree.leaves(jax.tree.map(jnp.array_equal, before.params, state.params))) == (step == 1)
        health.after_step(now := Now(step, state, metrics, is_end=False, is_preempted=False))
    with pytest.raises(
        UserError, match="objective: [1-9][0-9]* inputs or labels with a weight of step 1 are not tokens"
    ):
        health.before_save(now)


@pytest.mark.thorough
def test_the_learning_rate_that_is_logged_is_the_one_that_was_applied():
    """After a step that does not count, the optimizer's schedule is where it was."""
    graphdef, params = nnx.split(tiny_model())

    def rate(step):
        return 0.1 * (1 + step)

    optimizer = optax.sgd(rate)
    step_fn = jax.jit(make_train_step(graphdef, make_objective(config_with(), MASK), optimizer, rate, 0, 1, 2.0))
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
    program, mesh = program_of(objective="ar")
    with jax.set_mesh(mesh):
        _, metrics = jax.eval_shape(program.step, program.state, program.rows)
    internal = {"in_a_row", "invalid_ids"}
    assert set(metrics) == {"loss", "loss_ar", "grad_norm", "learning_rate", "tokens", "skipped", *internal}


def test_a_token_count_passes_32_bits():
    words = jnp.array([0, 2**32 - 3], jnp.uint32)
    assert wide_to_int(add_wide(words, jnp.int32(2))) == 2**32 - 1
    assert wide_to_int(add_wide(words, jnp.int32(3))) == 2**32
    assert wide_to_int(add_wide(add_wide(words, jnp.int32(1000)), jnp.int32(5))) == 2**32 + 1002


def test_micro_batches_are_strided_and_lose_no_row():
    x = jnp.arange(12).reshape(12, 1)
    parts = sharding.split_batch(x, 3)
    assert parts[:, :, 0].tolist() == [[0, 3, 6, 9], [1, 4, 7, 10], [2, 5, 8, 11]]


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
    sizes = {"steps": 100, "learning_rate": 2.0, "final_lr_ratio": 0.1, "decay_steps": 20}
    rate = make_schedule(config_with(schedule=name, warmup_steps=warmup, **sizes))
    np.testing.assert_allclose([rate(step) for step in rates], list(rates.values()), rtol=1e-5)


@pytest.mark.parametrize("name", ["adamw", "adafactor", "muon"])
def test_matrices_decay_and_norm_scales_do_not(name):
    config = config_with(weight_decay=0.5, optimizer=name)
    axes = {"scale": ("layers", "norm"), "matrix": ("embed", "mlp"), "layer": ("layers", "embed", "mlp")}
    params = {"scale": jnp.ones((2, 3)), "matrix": jnp.ones((3, 4)), "layer": jnp.ones((2, 3, 4))}
    optimizer = make_optimizer(config, lambda step: 0.1, axes)
    zero_gradients = {name: jnp.zeros_like(p) for name, p in params.items()}
    updates, _ = optimizer.update(zero_gradients, optimizer.init(params), params)
    for matrix in ("matrix", "layer"):
        np.testing.assert_allclose(updates[matrix], -0.05, rtol=1e-6)  # learning rate * decay
    np.testing.assert_array_equal(updates["scale"], 0)


def test_gradients_are_clipped_to_the_global_norm():
    config = config_with(clip_norm=1.0, beta1=0.0, beta2=0.0, weight_decay=0.0)
    axes, params = {"w": ("embed", "mlp")}, {"w": jnp.zeros((2, 2))}
    optimizer = make_optimizer(config, lambda step: 1.0, axes)
    _, state = optimizer.update({"w": jnp.full((2, 2), 3.0)}, optimizer.init(params), params)
    first_moment = state[1][0].mu["w"]  # with beta1 = 0, the clipped gradient itself: norm 6 scaled to 1
    np.testing.assert_allclose(first_moment, 0.5, rtol=1e-6)


@pytest.mark.parametrize("size", ["0.6b", "32b"])  # tied to the head, and not
@pytest.mark.parametrize("optimizer", ["adamw", "adafactor", "muon"])
def test_no_large_weight_or_moment_is_whole_on_a_chip(size, optimizer):
    """Adafactor's means over an axis (at most 6 MiB each here) are: the axis that was split may be the one averaged."""
    config = load_config("refusion_8b")(size)
    config.optimizer = optimizer
    mesh = make_mesh({"fsdp": 8})
    state = train_program(config, model_config(config), mesh).state
    for path, x in jax.tree.leaves_with_path(state):
        is_mean = optimizer == "adafactor" and "v_" in jax.tree_util.keystr(path)
        if x.size > 1_000_000 and not is_mean:
            assert math.prod(x.sharding.shard_shape(x.shape)) == x.size // 8, jax.tree_util.keystr(path)


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
def test_narrow_products_split_over_chips_are_the_same(name, tolerance):
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
def test_narrow_products_of_experts_are_refused(name):
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    config = config_with(quantization=name, **{f"model.{key}": value for key, value in experts.items()})
    with pytest.raises(SettingError, match="quantization") as error:
        train_program(config, model_config(config), make_mesh({"fsdp": 1}, jax.devices()[:1]))
    assert error.value.as_flag.startswith(f"--config.quantization={name}: models with experts")


def test_only_what_is_trained_has_optimizer_state_and_float32_and_all_of_it_is_split_as_its_weight():
    changes = {"lora.rank": 4, "lora.full": "final_norm", "init_from": "somewhere", "dtype": "bfloat16"}
    shape = tiny_config(num_attention_heads=4, num_key_value_heads=2)
    config = config_with(**changes, batch_size=8, row_length=32)
    mesh = sharding.make_mesh({"fsdp": 2, "tensor": 2}, jax.devices()[:4])
    program = train_program(config, shape, mesh)
    state, lora = program.state, program.lora
    assert state.params.keys() == {"layers", "final_norm"}
    assert state.params["layers"].keys() == {f"{name}_{side}" for name in ADAPTED for side in "ab"}
    assert {x.dtype for x in jax.tree.leaves(state.params)} == {jnp.dtype("float32")}
    assert {x.dtype for x in jax.tree.leaves(state.frozen)} == {jnp.dtype("bfloat16")}
    trained, moments = (sum(x.size for x in jax.tree.leaves(t)) for t in (state.params, state.opt_state))
    assert 2 * trained <= moments < 2 * trained + 8  # two moments of each, and a few counters

    def where(tree):
        return jax.tree.map(lambda x: (x.shape, x.sharding.is_fully_replicated), tree)

    assert where(lora.targets_like(program.base)) == where(state.params)
    found = state.params["layers"]["q_proj_a"].sharding.shard_shape(state.params["layers"]["q_proj_a"].shape)
    assert found[1] * 2 == shape.hidden_size
    found = state.params["layers"]["q_proj_b"].sharding.shard_shape(state.params["layers"]["q_proj_b"].shape)
    assert found[2] * 2 == shape.num_attention_heads


@pytest.mark.parametrize("head", ["embed_tokens", "lm_head"])
@pytest.mark.parametrize("full", ["none", "HEAD|.*norm", "v_proj|down_proj", ".*"])
def test_the_gradient_of_a_weight_that_is_trained_counts_and_that_of_a_frozen_one_does_not(full, head):
    shape = tiny_config(tie_word_embeddings=head == "embed_tokens")
    keys = {"lora.rank": 4, "lora.full": full.replace("HEAD", head) + "|final_norm", "init_from": "somewhere"}
    program, _ = program_of(shape, **keys)
    frozen = program.state.frozen | program.state.frozen["layers"]
    without = 2 * ROW * sum(x.size for name, x in frozen.items() if name in (*ADAPTED, head))
    assert program.flops_per_row == train_flops_per_row(program.objective, shape, ROW) - without
