"""One owner of a run's directory at a time."""

import json
import signal
import subprocess
import sys
import time

import pytest
from conftest import TINY_RUN, run, start
from etils import epath
from test_preemption import wait_for_steps

from refusion_jax import UserError
from refusion_jax.distributed import owner


def test_a_second_owner_is_refused_until_the_first_leaves(tmp_path):
    directory = epath.Path(tmp_path)
    with owner.owned(directory):
        for refused in (owner.acquire, owner.check_vacant):
            with pytest.raises(UserError, match=r"is in use by process \d+ on .+, since 20\d\d-"):
                refused(directory)
    owner.check_vacant(directory)
    owner.acquire(directory).close()
    assert list(tmp_path.iterdir()) == []


def test_a_killed_owner_on_this_machine_is_followed_at_once(tmp_path):
    program = f"from refusion_jax.distributed import owner; owner.acquire(owner.epath.Path({str(tmp_path)!r}))"
    program += "; print(1, flush=True); import time; time.sleep(60)"
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    process.stdout.readline()
    with pytest.raises(UserError, match=f"in use by process {process.pid}"):
        owner.acquire(epath.Path(tmp_path))
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    owner.acquire(epath.Path(tmp_path)).close()


def lease_of_another_machine(tmp_path, beat: int) -> None:
    lease = {"id": "x", "host": "far", "machine": "other", "pid": 7, "started": "1", "since": "then", "beat": beat}
    (tmp_path / owner.FILE).write_text(json.dumps(lease))


def test_on_another_machine_only_a_heart_that_has_stopped_is_taken_for_dead(tmp_path, monkeypatch):
    monkeypatch.setattr(owner, "DEAD_SECONDS", 0.3)
    lease_of_another_machine(tmp_path, 1)
    began = time.monotonic()
    mine = owner.acquire(epath.Path(tmp_path))
    assert time.monotonic() - began > 0.3
    mine.close()

    lease_of_another_machine(tmp_path, 1)
    monkeypatch.setattr(owner.time, "sleep", lambda _: lease_of_another_machine(tmp_path, time.monotonic_ns()))
    with pytest.raises(UserError, match="in use by process 7 on far, since then"):
        owner.acquire(epath.Path(tmp_path))


def test_an_owner_that_was_taken_over_notices_and_leaves_the_lease_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(owner, "BEAT_SECONDS", 0.02)
    mine = owner.acquire(epath.Path(tmp_path))
    mine.check()
    lease_of_another_machine(tmp_path, 1)

    def check_for_a_minute():
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            mine.check()
            time.sleep(0.01)

    with pytest.raises(UserError, match="taken over by process 7 on far"):
        check_for_a_minute()
    mine.close()
    assert json.loads((tmp_path / owner.FILE).read_text())["host"] == "far"


@pytest.mark.parametrize("junk", [b"", b"\xff\x00", b"[]", b"{}"])
def test_junk_is_no_owner_for_ever(tmp_path, monkeypatch, junk):
    monkeypatch.setattr(owner, "DEAD_SECONDS", 0.1)
    (tmp_path / owner.FILE).write_bytes(junk)
    own = owner.acquire(epath.Path(tmp_path))
    assert (tmp_path / owner.FILE).read_bytes() != junk
    own.close()
    assert not (tmp_path / owner.FILE).exists()


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
        out, err = first.communicate(timeout=120)
    finally:
        first.kill()  # or it would train for an hour
    assert first.returncode == 75, err
    assert "start it again to resume" in out
    assert not (tmp_path / owner.FILE).exists()
