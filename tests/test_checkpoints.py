import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import tiny_config
from flax import nnx

from refusion_jax import UserError
from refusion_jax.model.transformer import Transformer, logical_axes
from refusion_jax.runtime import sharding
from refusion_jax.training.checkpoints import Checkpoints, find_step, restore_params, saved_steps
from refusion_jax.training.train_step import Guard, init_state, state_shardings

OPTIMIZER = optax.adamw(1e-3)


def make_state(seed: int, devices: int = 1, **mesh):
    """A train state on a mesh; moments that differ from zero."""
    mesh = sharding.make_mesh(dict.fromkeys(sharding.MESH_AXES, 1) | mesh, jax.devices()[:devices])
    model = Transformer(tiny_config(), nnx.Rngs(seed))
    params = nnx.to_pure_dict(nnx.state(model))
    state = init_state(params, OPTIMIZER)
    _, opt_state = OPTIMIZER.update(params, state.opt_state, params)
    guard = Guard(jnp.float32(seed) / 3, jnp.int32(7), jnp.int32(seed), jnp.int32(1))
    state = type(state)(jnp.int32(seed), jnp.array([0, 100 + seed], jnp.uint32), params, opt_state, guard)
    return jax.device_put(state, state_shardings(mesh, logical_axes(model), state))


def target(state):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)


def save(workdir, *steps, keep=3):
    with Checkpoints(workdir, keep) as checkpoints:
        for step in steps:
            checkpoints.save(step, make_state(step), {"next_row": 8 * step})


def assert_equal(a, b):
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(a), jax.device_get(b))


def tear(workdir, step):
    """What a full disk or a lost file leaves behind."""
    for path in sorted((workdir / "checkpoints" / str(step)).rglob("*")):
        if path.is_file() and "manifest" not in path.name and path.stat().st_size > 64:
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize("mesh", [{"devices": 1}, {"devices": 8, "fsdp": 4, "tensor": 2}], ids=["1", "8"])
def test_a_state_comes_back_to_the_bit_on_any_mesh(tmp_path, mesh):
    save(tmp_path, 5)
    wanted = target(make_state(0, **mesh))
    with Checkpoints(tmp_path, 3) as checkpoints:
        state, data = checkpoints.restore(wanted)
    assert_equal(state, make_state(5))
    assert data == {"next_row": 40}
    jax.tree.map(lambda x, t: x.sharding == t.sharding or pytest.fail("lives elsewhere"), state, wanted)


def test_a_sharded_state_is_saved_whole(tmp_path):
    state = make_state(3, devices=8, fsdp=4, tensor=2)
    with Checkpoints(tmp_path, 3) as checkpoints:
        checkpoints.save(3, state, {"next_row": 24})
    with Checkpoints(tmp_path, 3) as checkpoints:
        assert_equal(checkpoints.restore(target(make_state(0)))[0], state)


def test_the_newest_is_restored_and_only_the_last_are_kept(tmp_path):
    save(tmp_path, 1, 2, 3, 4, keep=2)
    assert saved_steps(tmp_path) == [3, 4]
    with Checkpoints(tmp_path, 2) as checkpoints:
        assert int(checkpoints.restore(target(make_state(0)))[0].step) == 4


def test_nothing_saved_is_none(tmp_path):
    with Checkpoints(tmp_path, 3) as checkpoints:
        assert checkpoints.restore(target(make_state(0))) is None


def test_a_torn_checkpoint_is_passed_over_and_saved_anew(tmp_path, caplog):
    save(tmp_path, 1, 2)
    tear(tmp_path, 2)
    with Checkpoints(tmp_path, 3) as checkpoints:
        state, _ = checkpoints.restore(target(make_state(0)))
        assert_equal(state, make_state(1))
        assert "checkpoint 2 cannot be read" in caplog.text
        checkpoints.save(2, make_state(2), {"next_row": 16})
    with Checkpoints(tmp_path, 3) as checkpoints:
        assert_equal(checkpoints.restore(target(make_state(0)))[0], make_state(2))


def test_when_all_are_torn_the_run_does_not_start_over_in_silence(tmp_path):
    save(tmp_path, 1, 2)
    tear(tmp_path, 1)
    shutil.rmtree(tmp_path / "checkpoints" / "2" / "params")
    with Checkpoints(tmp_path, 3) as checkpoints, pytest.raises(UserError, match="none of the checkpoints in"):
        checkpoints.restore(target(make_state(0)))


def test_weights_can_be_read_alone(tmp_path):
    save(tmp_path, 1)
    state = make_state(1)
    assert_equal(restore_params(find_step(tmp_path)[1], target(state.params)), state.params)


def test_a_step_is_found_from_a_run_its_checkpoints_or_itself(tmp_path):
    save(tmp_path, 1, 2)
    folder = tmp_path / "checkpoints"
    assert find_step(tmp_path) == find_step(folder) == find_step(folder / "2") == (tmp_path, folder / "2")
    assert find_step(folder / "1") == (tmp_path, folder / "1")
    for nowhere in (folder / "7", tmp_path / "none"):
        with pytest.raises(UserError, match="holds no checkpoint; give the --workdir of a training run"):
            find_step(nowhere)
