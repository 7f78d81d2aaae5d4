"""Saves that fail: of a full disk, a directory that vanishes, a store with errors; and what becomes of the run."""

import errno
import gc
import os
import re
import threading

import pytest
from conftest import tiny_model
from helpers import python
from test_checkpoints import put

from refusion_jax.checkpoints import checksums, run_directory
from refusion_jax.checkpoints import manager as checkpoints_module
from refusion_jax.checkpoints.manager import Checkpoints
from refusion_jax.checkpoints.run_directory import TEMPORARY, saved_steps
from refusion_jax.cli.errors import Failure
from refusion_jax.model import huggingface


def test_a_full_disk_costs_a_warning_and_the_next_save_is_whole(tmp_path, full_disk, caplog, capfd):
    with Checkpoints(tmp_path, 3) as checkpoints:
        put(checkpoints, 1)
        checkpoints.wait()
        full_disk(1)
        put(checkpoints, 2)
        checkpoints.wait()
        full_disk(-1)
        put(checkpoints, 3)
    gc.collect()  # of tasks that nobody has awaited asyncio logs the exception when they are collected
    assert caplog.text.count("could not be written") == caplog.text.count("checkpoint 2 could not be written") == 1
    assert "Traceback" not in caplog.text + capfd.readouterr().err
    assert saved_steps(tmp_path) == [1, 3]
    with Checkpoints(tmp_path, 3):  # what was being written when it failed is cleared away
        assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["1", "3"]


def test_a_full_disk_is_told_with_the_file_of_hugging_face_that_was_written(tmp_path, full_disk):
    full_disk(100)
    with pytest.raises(Failure, match=rf"^{tmp_path}/model-00001-of-00001.safetensors: .*File too large"):
        huggingface.save(tiny_model(), tmp_path)
    full_disk(-1)
    assert not list(tmp_path.iterdir())


def test_too_many_failed_saves_stop_the_run_in_one_line_and_the_last_one_is_tried_until_then(
    tmp_path, full_disk, monkeypatch, caplog
):
    monkeypatch.setattr(checkpoints_module, "PAUSE_SECONDS", 0.01)
    with Checkpoints(tmp_path, 3) as checkpoints:
        put(checkpoints, 1)
        checkpoints.wait()
        full_disk(1)
        put(checkpoints, 2)
        with pytest.raises(Failure, match=r"3 saves in a row have failed, .* \(from step 1\)") as stopped:
            put(checkpoints, 3, last=True)
        full_disk(-1)
    assert "\n" not in str(stopped.value)
    assert caplog.text.count("checkpoint 3 could not be written") == 1  # and once more in `stopped`
    assert saved_steps(tmp_path) == [1]


def test_a_failed_save_leaves_no_thread_that_waits(tmp_path, caplog, monkeypatch):
    """A process ends when its threads do: one that stops because of its disk is not to stand still for minutes."""
    before, mkdir = set(threading.enumerate()), os.mkdir

    def refuse(path, *args, **kwargs):
        if TEMPORARY in os.fspath(path):
            raise OSError(errno.ENOSPC, "No inode is left")
        mkdir(path, *args, **kwargs)

    with Checkpoints(tmp_path, 3) as checkpoints:
        with monkeypatch.context() as patched:
            patched.setattr(os, "mkdir", refuse)
            put(checkpoints, 1)
            checkpoints.wait()
        assert "checkpoint 1 could not be written: [Errno 28] No inode is left" in caplog.text
        put(checkpoints, 2)
    for thread in set(threading.enumerate()) - before:
        if not re.search(r"_\d+$", thread.name):  # those of pools wait for work, and end when told to
            threading.Thread.join(thread, 300)  # Orbax's own raises what the thread has met
            assert not thread.is_alive(), thread
    assert saved_steps(tmp_path) == [2]


def test_a_directory_that_vanishes_costs_the_saves_until_it_is_back(tmp_path, caplog):
    with Checkpoints(tmp_path, 3) as checkpoints:
        put(checkpoints, 1)
        checkpoints.wait()
        (tmp_path / "checkpoints").rename(tmp_path / "away")
        put(checkpoints, 2)
        assert "has vanished" in caplog.text
        assert not (tmp_path / "checkpoints").exists()
        (tmp_path / "away").rename(tmp_path / "checkpoints")
        put(checkpoints, 3, last=True)
    assert saved_steps(tmp_path) == [1, 3]


def test_writes_that_wait_for_a_lock_when_the_process_ends_leave_the_reason_in_the_last_line():
    """Whether there are any is a matter of timing: on a full disk one run in eight ended in their tracebacks."""
    code = """import asyncio
from refusion_jax.checkpoints.writer import silence_orbax_tracebacks
silence_orbax_tracebacks()
async def write():
    try:
        await asyncio.sleep(0)
    finally:
        raise RuntimeError("Lock is not acquired.")
def fail():
    kept = [write()]
    kept[0].send(None)
    kept.append(kept)
fail()
"""
    ended = python("-c", code)
    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.parametrize("broken", ["write_unlisted", "saved_steps", "remove_step"])
def test_a_store_that_fails_after_a_whole_save_costs_a_warning(tmp_path, caplog, monkeypatch, broken):
    """Errors of stores are none of the system's, and no reason to end a run: the checkpoint is there."""

    def fail(*_):
        raise RuntimeError("backend error, 503")

    with Checkpoints(tmp_path, 1) as checkpoints:
        put(checkpoints, 1, last=True)
        with monkeypatch.context() as patched:
            put(checkpoints, 2)
            checkpoints._checkpointer.wait_until_finished()  # whose own lists are written by then
            patched.setattr(checksums if broken == "write_unlisted" else run_directory, broken, fail)
            checkpoints.wait()
        assert caplog.text.count("backend error, 503") == 1
        put(checkpoints, 3, last=True)
    assert saved_steps(tmp_path) == [3]


def test_no_process_begins_a_save_where_another_cannot_write(tmp_path, caplog, monkeypatch):
    with Checkpoints(tmp_path, 3) as checkpoints:
        with monkeypatch.context() as patched:
            patched.setattr(checkpoints_module, "first_fault", lambda fault: "the disk of another is full")
            put(checkpoints, 1)
        assert "checkpoint 1 could not be written: the disk of another is full" in caplog.text
        assert not list((tmp_path / "checkpoints").iterdir())
        put(checkpoints, 2, last=True)
    assert saved_steps(tmp_path) == [2]
