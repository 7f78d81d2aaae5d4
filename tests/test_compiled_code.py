"""Compiled programs are run as they are found, so only where nobody else can have put them."""

import os

import jax
import pytest
from etils import epath

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
def no_cache_yet():
    """As users have it; the tests' own cache is back after the test."""
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", None)
    yield
    jax.config.update("jax_compilation_cache_dir", before)


def test_a_cache_that_is_not_trusted_is_not_used_unless_asked(no_cache_yet, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(jax.config, "update", lambda *changed: used.append(changed))
    used = []
    tmp_path.chmod(0o777)
    keep_compiled(epath.Path(tmp_path), "own")
    assert "compiled programs are not kept: others can write to" in caplog.text
    keep_compiled(epath.Path(tmp_path), "off")
    assert used == []
    keep_compiled(epath.Path(tmp_path), "shared")
    assert used == [("jax_compilation_cache_dir", str(tmp_path))]
