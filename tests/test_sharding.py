import functools
import math

import jax
import numpy as np
import pytest
from conftest import ROOT, tiny_config
from flax import nnx
from test_config import load
from test_train_step import random_rows

from refusion_jax import UserError
from refusion_jax.batch.batch import is_labelled, weigh
from refusion_jax.batch.rows import noise_keys
from refusion_jax.config import default_config, make_objective
from refusion_jax.config.model import model_config
from refusion_jax.distributed import sharding
from refusion_jax.model.transformer import Transformer, logical_axes
from refusion_jax.training.program import train_program

ONES = dict.fromkeys(sharding.MESH_AXES, 1)


@functools.cache
def loss_and_gradient(**mesh_shape: int):
    """Of a float32 model on one batch, the noise drawn on the mesh."""
    config = default_config()
    config.slots.sizes = (2, 3, 4)
    mesh = sharding.make_mesh(ONES | mesh_shape, jax.devices()[: math.prod(mesh_shape.values())])
    model = Transformer(tiny_config(), nnx.Rngs(0))
    graphdef, params = nnx.split(model)
    objective = make_objective(config, tiny_config().mask_token_id)

    def loss(params, rows):
        batch = objective.corrupt(rows, noise_keys(0, 0, rows.tokens.shape[0]))
        inputs = batch.inputs, batch.positions, batch.visibility, batch.labels, is_labelled(batch)
        return sum(weigh(nnx.merge(graphdef, params).cross_entropy(*inputs), batch).values())

    where = jax.tree.map(
        lambda axes: sharding.sharding(mesh, *axes), logical_axes(model), is_leaf=lambda x: isinstance(x, tuple)
    )
    with jax.set_mesh(mesh):
        params = jax.device_put(nnx.to_pure_dict(params), where)
        rows = jax.device_put(random_rows(0), sharding.sharding(mesh, "batch", "length"))
        return jax.device_get(jax.jit(jax.value_and_grad(loss))(params, rows))


@pytest.mark.parametrize(
    "mesh",
    [
        pytest.param({"data": 8}, marks=pytest.mark.slow),  # whole steps are compared on these two as well
        pytest.param({"fsdp": 8}, marks=pytest.mark.slow),
        {"data": 2, "fsdp": 2, "tensor": 2},
        {"fsdp": 4, "sequence": 2},
        {"fsdp": 2, "tensor": 2, "sequence": 2},
    ],
    ids=lambda m: "x".join(f"{k}{v}" for k, v in m.items()),
)
def test_a_mesh_changes_neither_loss_nor_gradient(mesh):
    (loss, grads), (expected, expected_grads) = loss_and_gradient(**mesh), loss_and_gradient()
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * np.abs(b).max()), grads, expected_grads
    )


@pytest.mark.parametrize("size", ["0.6b", "8b", "32b"])
@pytest.mark.parametrize("optimizer", ["adamw", "adafactor", "muon"])
def test_no_large_weight_or_moment_is_whole_on_a_chip(size, optimizer):
    """Adafactor's means over an axis (at most 6 MiB each here) are: the axis that was split may be the one averaged."""
    config = load(ROOT / "configs" / "refusion_8b.py")(size)
    config.optimizer = optimizer
    mesh = sharding.make_mesh(ONES | {"fsdp": 8})
    state = train_program(config, model_config(config), mesh).target
    for path, x in jax.tree.leaves_with_path(state):
        is_mean = optimizer == "adafactor" and "v_" in jax.tree_util.keystr(path)
        if x.size > 1_000_000 and not is_mean:
            assert math.prod(x.sharding.shard_shape(x.shape)) == x.size // 8, jax.tree_util.keystr(path)


@pytest.mark.parametrize(
    ("asked", "devices", "nearest"),
    [
        ({"fsdp": 3}, 8, {"fsdp": 8}),
        ({"data": 3, "fsdp": -1}, 8, {"data": 4, "fsdp": -1}),
        ({"tensor": 4, "fsdp": 16}, 32, {"tensor": 2, "fsdp": 16}),
        ({"tensor": 16, "fsdp": -1}, 8, {"tensor": 8, "fsdp": -1}),
        ({}, 8, {"fsdp": 8}),
    ],
)
def test_the_nearest_mesh_multiplies_to_the_devices(asked, devices, nearest):
    assert sharding.nearest_mesh(ONES | asked, devices) == nearest


def test_axes_that_collide_are_refused(monkeypatch):
    monkeypatch.setitem(sharding.RULES, "mlp", "fsdp")
    with pytest.raises(UserError, match="axes 'embed' and 'mlp' of one array are both split by mesh.fsdp"):
        sharding.spec("layers", "embed", "mlp")
