import ctypes
import dataclasses
import errno
import functools
import random
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import tiny_model
from etils import epath
from flax import nnx

from refusion_jax import UserError
from refusion_jax.checkpoints import checksums, manager
from refusion_jax.checkpoints.manager import Checkpoints
from refusion_jax.checkpoints.run_directory import find_step, is_complete, saved_steps
from refusion_jax.checkpoints.weights import open_params, restore_params, save_params, stored_dtype
from refusion_jax.cli.errors import Failure
from refusion_jax.distributed import sharding
from refusion_jax.model.transformer import logical_axes
from refusion_jax.training.train_step import Guard, init_state, state_shardings

OPTIMIZER = optax.adamw(1e-3)


@functools.cache
def make_state(seed: int, devices: int = 1, **mesh):
    """A train state on a mesh; moments that differ from zero."""
    mesh = sharding.make_mesh(mesh, jax.devices()[:devices])
    model = tiny_model(seed)
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
            put(checkpoints, step)


def put(checkpoints, step, last=False):
    checkpoints.save(step, make_state(step), {"next_row": 8 * step}, last=last)


def restored(workdir):
    """The state of the newest checkpoint that can be read."""
    with Checkpoints(workdir, 3) as checkpoints:
        return checkpoints.restore(target(make_state(0)))[0]


def assert_equal(a, b):
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(a), jax.device_get(b))


def tear(workdir, step):
    """What a full disk or a lost file leaves."""
    for path in sorted((workdir / "checkpoints" / str(step)).rglob("*")):
        if path.is_file() and "manifest" not in path.name and path.stat().st_size > 64:
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


ONE, EIGHT = {"devices": 1}, {"devices": 8, "fsdp": 4, "tensor": 2}


@pytest.mark.parametrize(("before", "after"), [(ONE, ONE), (ONE, EIGHT), (EIGHT, ONE)], ids=["1 1", "1 8", "8 1"])
def test_a_state_comes_back_to_the_bit_on_any_mesh(tmp_path, before, after):
    wanted = target(make_state(0, **after))
    with Checkpoints(tmp_path, 3) as checkpoints:
        assert checkpoints.restore(wanted) is None
        checkpoints.save(5, make_state(5, **before), {"next_row": 40}, last=True)
        state, data = checkpoints.restore(wanted)
    assert_equal(state, make_state(5))
    assert data == {"next_row": 40}
    jax.tree.map(lambda x, t: x.sharding == t.sharding or pytest.fail("lives elsewhere"), state, wanted)


def test_a_save_holds_little_in_addition_to_the_copy_of_the_state(tmp_path):
    """160 MiB of random numbers; on a CPU the state itself counts as the copy."""
    noise = np.random.default_rng(0)
    weights = {str(i): jnp.asarray(noise.standard_normal((1024, 1024), np.float32)) for i in range(40)}
    state = dataclasses.replace(make_state(0), params=weights)
    with Checkpoints(tmp_path, 1) as checkpoints:
        ctypes.CDLL(None).malloc_trim(0)  # or the save would take what compiling has left
        before = held("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        checkpoints.save(1, state, {"next_row": 0}, last=True)
        assert held("VmHWM") - before <= 0.2 * sum(x.nbytes for x in weights.values())


def held(name: str) -> int:
    """A memory figure of this process in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def test_when_all_are_torn_the_run_does_not_start_over_in_silence(tmp_path):
    save(tmp_path, 1, 2)
    tear(tmp_path, 1)
    shutil.rmtree(tmp_path / "checkpoints" / "2" / "params")
    with pytest.raises(UserError, match=r"none of the checkpoints in .* new --workdir"):
        restored(tmp_path)


def test_weights_of_another_shape_are_named(tmp_path, capfd):
    save(tmp_path, 5, 6)
    wanted = target(make_state(5).params)
    wanted["layers"]["q_norm"] = jax.ShapeDtypeStruct((3, 8), jnp.float32)
    said = r"checkpoints/6: \['layers'\]\['q_norm'\] has shape \(2, 8\) instead of \(3, 8\)"
    with pytest.raises(UserError, match=said):
        restore_params(tmp_path, wanted)
    assert "Event loop" not in capfd.readouterr().err


@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_weights_that_are_no_numbers_are_named(tmp_path, value):
    """In a matrix: XLA's maximum of a short vector tells of a NaN on a CPU, and that of a matrix does not."""
    params = {"layers": {"o_proj": jnp.ones((64, 128)).at[3, 5].set(value)}}
    save_params(tmp_path, params)
    said = "checkpoints/0/params: layers.o_proj holds values that are not finite as float32"
    with pytest.raises(UserError, match=said):
        restore_params(tmp_path, target(params))
    with pytest.raises(UserError, match=said):
        open_params(tmp_path, target(params))(("layers", "o_proj"), slice(2, 4))


def test_a_step_is_found_from_a_run_its_checkpoints_or_itself(tmp_path):
    save(tmp_path, 1, 2)
    folder = tmp_path / "checkpoints"
    assert find_step(tmp_path) == find_step(folder) == find_step(folder / "2") == (tmp_path, folder / "2")
    assert find_step(folder / "1") == (tmp_path, folder / "1")
    for nowhere in (folder / "7", tmp_path / "none"):
        with pytest.raises(UserError, match="holds no checkpoint; give the --workdir of a training run"):
            find_step(nowhere)


def flip(path, bit):
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


def test_a_hundred_flipped_bits_are_a_hundred_noticed(tmp_path):
    """In any file, also in the lists of checksums and in what Orbax writes after us."""
    save(tmp_path, 1)
    step = tmp_path / "checkpoints" / "1"
    files = [path for path in sorted(step.rglob("*")) if path.is_file() and path.stat().st_size]
    names = {path.relative_to(step).parts[0] for path in files}
    assert {"params", "optimizer", "data", "_CHECKPOINT_METADATA"} <= names
    assert checksums.find_damage(step) is None
    chance = random.Random(0)
    for _ in range(100):
        path = chance.choice(files)
        bit = chance.randrange(8 * path.stat().st_size)
        flip(path, bit)
        assert "checksum" in checksums.find_damage(step), (path, bit)
        flip(path, bit)
    assert checksums.find_damage(step) is None


def test_a_kill_while_an_old_checkpoint_is_removed_leaves_nothing_torn_under_its_name(tmp_path, monkeypatch):
    def killed(*_):
        raise KeyboardInterrupt

    save(tmp_path, 1)
    with monkeypatch.context() as patch:
        patch.setattr("etils.epath.gpath.PosixGPath.rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            save(tmp_path, 2, keep=1)
    assert saved_steps(tmp_path) == [2]
    save(tmp_path, 3)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["2", "3"]


def test_a_resumed_run_makes_room_before_its_first_save_and_removes_nothing_until_then(tmp_path):
    """A killed process leaves one checkpoint more than are kept: with the next, a disk would need room for two more."""
    save(tmp_path, 1, 2, 3, 4, keep=4)
    with Checkpoints(tmp_path, 3) as checkpoints:
        checkpoints.restore(target(make_state(0)))
        assert saved_steps(tmp_path) == [1, 2, 3, 4]  # what is refused after reading, as other data, has lost nothing
        put(checkpoints, 5)
        assert 1 not in saved_steps(tmp_path)


def test_a_flipped_bit_is_said_with_the_file_and_a_run_goes_on_from_the_one_before(tmp_path, caplog):
    save(tmp_path, 0, 1, 2, keep=2)
    assert saved_steps(tmp_path) == [1, 2]
    step = tmp_path / "checkpoints" / "2"
    path = max(step.glob("params/**/*"), key=lambda path: path.stat().st_size)
    flip(path, 1000)
    assert not is_complete(tmp_path, 2)
    state = make_state(1)
    damaged = "checkpoint 2 cannot be read .name another step in .*checksum does not match"
    with pytest.raises(UserError, match=damaged):
        restore_params(tmp_path, target(state.params))  # answers of an older one would pass for the newest's
    with pytest.raises(UserError, match=damaged):
        stored_dtype(tmp_path)
    assert_equal(restore_params(step.with_name("1"), target(state.params)), state.params)
    with Checkpoints(tmp_path, 3) as checkpoints:
        assert_equal(checkpoints.restore(target(make_state(0)))[0], state)
        assert str(path.relative_to(tmp_path)) in checkpoints.passed_over[2]
        assert "checksum does not match" in checkpoints.passed_over[2]
        assert "checkpoint 2 cannot be read" in caplog.text
        put(checkpoints, 2)
    assert_equal(restored(tmp_path), make_state(2))


def test_in_a_store_nothing_is_read_for_checksums_and_damage_is_noticed_there_and_in_a_copy(store, tmp_path):
    save(epath.Path("gs://bucket"), 1)
    there, copy = (epath.Path(place) / "checkpoints" / "1" for place in ("gs://bucket", tmp_path))
    assert checksums.listed(there)
    assert checksums.find_damage(there) is None
    name = max(store.objects, key=lambda name: len(store.objects[name][1]))
    assert store.read[name] == 0

    for path, (_, content) in store.objects.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes(content)
    assert checksums.find_damage(copy) is None
    assert_equal(restored(tmp_path), make_state(1))
    flip(tmp_path / name, 1000)
    assert f"{name}: the checksum does not match (its content has changed)" in checksums.find_damage(copy)
    store.objects[name] = next(store.generations), (tmp_path / name).read_bytes()
    assert f"{name}: the checksum does not match (its content has changed)" in checksums.find_damage(there)
    del store.objects[name]
    assert f"{name}: the checksum does not match (the file is gone)" in checksums.find_damage(there)
    assert store.read[name] == 0


def test_a_checkpoint_without_checksums_is_read_as_it_is(tmp_path):
    """It is older than they are, or made by hand."""
    save(tmp_path, 1)
    for path in (tmp_path / "checkpoints" / "1").glob("checksums*"):
        path.unlink()
    assert not is_complete(tmp_path, 1)
    assert_equal(restored(tmp_path), make_state(1))


@pytest.mark.parametrize("damage", ["foreign", "empty", "renamed", "torn"])
def test_what_is_no_checkpoint_of_this_run_is_never_counted(tmp_path, damage):
    save(tmp_path, 1, 2)
    folder = tmp_path / "checkpoints"
    if damage == "foreign":
        (folder / "9999999" / "params").mkdir(parents=True)
        (folder / "9999999" / "params" / "x").write_bytes(b"\xff")
    elif damage == "empty":
        (folder / "9999999").mkdir()
    elif damage == "renamed":
        (folder / "2").rename(folder / "7")
    else:
        shutil.rmtree(folder / "2" / "optimizer")
    assert not is_complete(tmp_path, 1000)
    with Checkpoints(tmp_path, 1) as checkpoints:
        state, _ = checkpoints.restore(target(make_state(0)))
        assert int(state.step) == (2 if damage in ("foreign", "empty") else 1)
        put(checkpoints, 3)
    assert saved_steps(tmp_path)[-1] in (3, 7)
    assert int(restored(tmp_path).step) == 3


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (OSError("403"), Failure),
        (PermissionError("no"), UserError),
        (OSError(errno.ENAMETOOLONG, "File name too long"), UserError),
    ],
)
def test_a_directory_that_cannot_be_listed_is_not_an_empty_one(tmp_path, monkeypatch, error, raised):
    """A run that took it for one would begin again at step 0, and write over its log."""
    save(tmp_path, 1)

    def fail(_):
        raise error

    with Checkpoints(tmp_path, 1) as checkpoints, monkeypatch.context() as patched:
        patched.setattr(type(epath.Path(tmp_path)), "iterdir", fail)
        with pytest.raises(raised, match="checkpoints cannot be read: "):
            checkpoints.restore(target(make_state(0)))


EIO = OSError(errno.EIO, "Input/output error")


def failing(monkeypatch, method: str, name: str, times: float, error: Exception = EIO) -> list:
    """Makes a method of paths fail so often where `name` is part of the path; returns the paths that failed."""
    kind, failed = type(epath.Path("/")), []
    whole = getattr(kind, method)

    def fail(path, *given, **named):
        if name in str(path) and len(failed) < times:
            failed.append(path)
            raise error
        return whole(path, *given, **named)

    monkeypatch.setattr(kind, method, fail)
    return failed


@pytest.mark.parametrize(
    ("method", "name", "error"),
    [
        ("open", "/2/optimizer/", EIO),
        ("read_bytes", "/2/checksums.0.", EIO),
        ("iterdir", "/2/params", EIO),
        ("read_text", "/2/data/", EIO),
        ("read_text", "/2/data/", Exception("503")),  # as gcsfs raises it
        ("read_text", "/2/data/", ValueError("UNAVAILABLE: 503")),  # as tensorstore does
    ],
)
def test_what_cannot_be_read_for_a_moment_is_read_again_and_never_taken_for_damage(
    tmp_path, monkeypatch, caplog, method, name, error
):
    """An older checkpoint would be trained from, and the newest one be overwritten."""
    save(tmp_path, 1, 2)
    monkeypatch.setattr(manager, "PAUSE_SECONDS", 0.0)
    with monkeypatch.context() as patched:
        failed = failing(patched, method, name, 1, error)
        assert_equal(restored(tmp_path), make_state(2))
        assert failed
    failing(monkeypatch, method, name, np.inf, error)
    with pytest.raises(
        Failure, match=r"^checkpoint 2 cannot be read now \(.*(5|error).*\), and an older one would lose"
    ):
        restored(tmp_path)
    assert not caplog.text


def test_a_model_is_not_loaded_from_an_older_step_where_the_newest_cannot_be_read(tmp_path, monkeypatch):
    save(tmp_path, 1, 2)
    for method, name in (("iterdir", "/2/params"), ("open", "/2/params/")):
        with monkeypatch.context() as patched:
            failing(patched, method, name, np.inf)
            with pytest.raises(Failure, match=f"checkpoints{name}.* cannot be read: Input/output error$"):
                stored_dtype(epath.Path(tmp_path))
