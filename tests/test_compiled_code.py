"""Compiled programs are run as they are found, so only where nobody else can have put them."""

import os

import jax
import pytest
from etils import epath
from jax.experimental.compilation_cache import compilation_cache

from refusion_jax.distributed.compiled_code import find_danger, keep_compiled


def test_a_directory_of_ones_own_is_trusted_and_one_that_others_can_write_is_not(tmp_path):
    cache = tmp_path / "runs" / "cache"
    assert find_danger(epath.Path(cache)) is None  # not there yet
    cache.mkdir(parents=True)
    (cache / "program").write_bytes(b"x")
    assert find_danger(epath.Path(cache)) is None
    for path, mode in ((cache, 0o777), (cache, 0o1777), (cache.parent, 0o777), (cache / "program", 0o666)):
        before = path.stat().st_mode
        path.chmod(mode)
        assert str(path) in find_danger(epath.Path(cache))
        path.chmod(before)
    cache.parent.chmod(0o1777)  # like /tmp: others can add to it, but not replace what is ours
    assert find_danger(epath.Path(cache)) is None


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_what_somebody_else_has_put_there_is_not_run(tmp_path):
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "program").write_bytes(b"x")
    os.chown(tmp_path / "cache" / "program", 12345, -1)
    assert "program may be by somebody else" in find_danger(epath.Path(tmp_path / "cache"))
    os.chown(tmp_path / "cache", 12345, -1)
    assert "belongs to another user" in find_danger(epath.Path(tmp_path / "cache"))


def test_who_can_write_to_an_object_store_is_not_known():
    assert "is not known" in find_danger(epath.Path("gs://bucket/run"))


@pytest.fixture
def no_cache_yet(monkeypatch, tmp_path):
    """As users have it; the tests' own cache is back after the test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    names = ("enable_compilation_cache", "compilation_cache_dir", "persistent_cache_min_compile_time_secs")
    names = [f"jax_{name}" for name in names]
    before = [getattr(jax.config, name) for name in names]
    jax.config.update("jax_enable_compilation_cache", True)
    yield
    for name, value in zip(names, before, strict=True):
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def test_a_doctored_program_in_a_downloaded_run_is_not_run(no_cache_yet, tmp_path):
    """Not even where all of its files are this user's, as those of a download are, unless the user shares them."""

    def compute(directory, whose, factor):
        jax.config.update("jax_compilation_cache_dir", None)
        compilation_cache.reset_cache()  # each call stands for a process
        keep_compiled(epath.Path(directory), whose)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)

        def program(x):
            return factor * x

        return float(jax.jit(program)(1.0))

    run, other = tmp_path / "run", tmp_path / "other"
    assert [compute(run, "shared", 2.0), compute(other, "shared", 3.0)] == [2.0, 3.0]
    (kept,), (doctored,) = (list(directory.glob("jit_program-*-cache")) for directory in (run, other))
    kept.write_bytes(doctored.read_bytes())
    assert compute(run, "shared", 2.0) == 3.0
    assert compute(run, "off", 2.0) == compute(run, "own", 2.0) == 2.0
    assert [path.name.split("-")[0] for path in (tmp_path / "home" / "refusion_jax" / "compiled").glob("*-cache")] == [
        "jit_program"
    ]
