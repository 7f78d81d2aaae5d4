"""One run at a time in a directory."""

import os
import signal

import pytest
from conftest import TINY_RUN, run, start
from etils import epath
from helpers import wait_for_steps

from refusion_jax import UserError
from refusion_jax.checkpoints import lock

HOLD = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored by what a shell starts in the background
from etils import epath
from refusion_jax.checkpoints.lock import locked
with locked(epath.Path(sys.argv[1])):
    print(1, flush=True)
    for _ in range(600):  # and not one minute at once, which a signal that comes just before it does not end
        time.sleep(0.1)
"""


def test_a_second_holder_is_refused_until_the_first_leaves_or_is_killed(tmp_path):
    directory = epath.Path(tmp_path)
    lock.check_free(directory)
    for sign in (signal.SIGKILL, signal.SIGINT):
        with start("-c", HOLD, str(tmp_path)) as holder:
            holder.stdout.readline()
            for refused in (lambda: lock.check_free(directory), lock.locked(directory).__enter__):
                with pytest.raises(UserError, match=rf"is in use by process {holder.pid} on .+, since 20\d\d-.*: wait"):
                    refused()
            holder.send_signal(sign)
    lock.check_free(directory)
    with lock.locked(directory) as check:
        check()


def test_in_a_store_the_last_one_holds_the_lease_and_the_one_before_stops_at_its_next_save(store, caplog):
    directory = epath.Path("gs://bucket/run")
    with lock.locked(directory) as check:
        check()
        with lock.locked(directory) as new_check:  # on another machine: the first may be dead, as far as this one sees
            assert "taking over from process " in caplog.text
            new_check()
            with pytest.raises(UserError, match="taken over by process .*: this run stops and saves nothing more"):
                check()
    assert not store.objects


@pytest.mark.parametrize("path", ["gs://", "hf://datasets/me/run"])
def test_a_place_that_can_hold_no_lease_is_refused_in_one_line(store, path):
    with pytest.raises(UserError, match=f"--workdir={path} cannot be written: "), lock.locked(epath.Path(path)):
        pass


def test_of_two_that_start_at_once_in_a_store_one_is_refused(store, monkeypatch):
    directory = epath.Path("gs://bucket/run")
    this_process = lock._this_process

    def late() -> bytes:
        store.objects["run/lock"] = (next(store.generations), b"process 7 on far, since then")
        return this_process()

    monkeypatch.setattr(lock, "_this_process", late)
    with pytest.raises(UserError, match="in use by process 7 on far, since then"), lock.locked(directory):
        pass
    assert store.objects["run/lock"][1] == b"process 7 on far, since then"


def test_a_second_training_is_refused_in_one_line_and_hurts_nothing(tmp_path):
    flags = [*TINY_RUN, "--config.steps=100000", f"--workdir={tmp_path}"]
    first = start("train", *flags)
    try:
        wait_for_steps(first, tmp_path, 10)
        _, err = run("train", *flags, code=2)
        (line,) = [line for line in err.splitlines() if line.startswith("error:")]
        assert f"--workdir={tmp_path} is in use by process {first.pid} on " in line
        assert first.poll() is None
        first.send_signal(signal.SIGHUP)  # as TERM, and INT and QUIT: saved, and the same exit code
        out, err = first.communicate(timeout=300)
    finally:
        first.kill()  # or it would train for an hour
    assert first.returncode == 75, err
    assert "start it again to resume" in out


def test_a_drill_is_refused_where_another_one_runs(tmp_path):
    with lock.file_lock(tmp_path / "drill"):
        _, err = run("drill", *TINY_RUN, f"--workdir={tmp_path}/drill", code=2)
    assert f"is in use by process {os.getpid()} on " in err
    assert [path.name for path in (tmp_path / "drill").iterdir()] == ["lock"]


def test_a_conversion_writes_to_no_directory_that_another_is_writing_to(tmp_path, trained_run):
    (tmp_path / ".out.partial").mkdir()
    _, err = run("convert", f"--from={trained_run}", f"--to={tmp_path}/out", "--format=huggingface", code=2)
    assert f"--to={tmp_path}/out: {tmp_path}/.out.partial is in the way: another `convert` is writing it, or" in err
    assert [path.name for path in tmp_path.iterdir()] == [".out.partial"]


def test_a_disk_that_is_full_is_told_by_a_conversion_which_leaves_nothing(tmp_path, trained_run, full_disk):
    run("convert", f"--from={trained_run}", f"--to={tmp_path}/first", "--format=huggingface")
    full_disk(1 << 13)
    back = start("convert", f"--from={tmp_path}/first", f"--to={tmp_path}/ours", "--format=orbax")
    out = start("convert", f"--from={trained_run}", f"--to={tmp_path}/out", "--format=huggingface")
    full_disk(-1)
    for process in (back, out):
        assert process.communicate()[1].splitlines()[-1].startswith("error: File too large: ")
        assert process.returncode == 1
    assert [path.name for path in tmp_path.iterdir()] == ["first"]
