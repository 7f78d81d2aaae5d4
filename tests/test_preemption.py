"""Preemption, by real signals and by a metadata server as Google's machines have one."""

import collections
import re
import signal
import socket
import threading
import types
from pathlib import Path

import pytest
from conftest import ROOT, TINY_RUN, run, start
from helpers import computed, http_server, wait_for_steps, wait_until

from refusion_jax.checkpoints.directory import saved_steps
from refusion_jax.distributed import preemption
from refusion_jax.training.events import read_events

FLAGS = [*TINY_RUN, "--config.checkpoint.every=1000"]


def test_sigterm_saves_once_and_a_second_start_goes_on_to_the_bit(tmp_path, trained_run, monkeypatch):
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR")  # as users have it
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    cache, tmp_path = tmp_path / "home" / "refusion_jax" / "compiled", tmp_path / "run"
    _, err = run("train", *FLAGS, f"--workdir={tmp_path}", "--compile_only", "--config.compilation_cache=off", code=2)
    assert "--compile_only: no compiled programs are kept here" in err
    out, _ = run("train", *FLAGS, f"--workdir={tmp_path}", "--compile_only")
    assert re.search(rf"compiled in [\d.]+ s into {cache}: 0\.\d\d GiB per device\n$", out)
    assert not tmp_path.exists()
    (compiled,) = cache.glob("jit_train_step*-cache")
    process = start("train", *FLAGS, f"--workdir={tmp_path}")
    wait_for_steps(process, tmp_path, 3)
    for _ in range(3):  # an impatient scheduler
        process.send_signal(signal.SIGTERM)
    out, err = process.communicate()
    assert process.returncode == preemption.EXIT_CODE == 75, err
    (step,) = saved_steps(tmp_path)
    assert 3 <= step < 60, "too late to show anything"
    assert f"interrupted: saved step {step} of 60" in out
    assert "Traceback" not in err
    out, _ = run("train", *FLAGS, f"--workdir={tmp_path}")
    assert f"step {step} of 60" in out
    assert "in 2 sessions" in out
    assert computed(tmp_path) == computed(trained_run)
    assert saved_steps(tmp_path) == [step, 60]
    assert list(cache.glob("jit_train_step*-cache")) == [compiled]  # never again


def test_sigterm_before_the_first_step_ends_at_once_and_leaves_nothing(tmp_path):
    process = start("train", *FLAGS, f"--workdir={tmp_path / 'run'}", "--config.data.examples=400000")
    status = Path(f"/proc/{process.pid}/status")
    caught = 1 << (signal.SIGTERM - 1)  # once it has imported; then a minute of data begins
    wait_until(lambda: int(re.search(r"SigCgt:\s*(\w+)", status.read_text())[1], 16) & caught, process)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 75, err
    assert "Traceback" not in err
    assert not (tmp_path / "run").exists()


IN_A_CALLBACK = "gc.callbacks.append(lambda *_: os.kill(os.getpid(), 15)); gc.collect(); gc.callbacks.pop()"
IN_A_FINALIZER = "type('Dying', (), {'__del__': lambda _: os.kill(os.getpid(), 15)})()"


@pytest.mark.parametrize("moment", [IN_A_CALLBACK, IN_A_FINALIZER])
def test_a_signal_is_heard_where_python_drops_exceptions(moment):
    program = "import gc, os, time; from refusion_jax.distributed.preemption import Preemption; Preemption();"
    _, err = run("-c", f"{program} {moment}; time.sleep(600)", code=preemption.EXIT_CODE)
    assert err == "interrupted: there was nothing to save; start it again\n"


@pytest.fixture
def metadata_server():
    """Answers that can be changed while it runs, and how often each was given."""
    answers, given = {"maintenance-event": "NONE", "preempted": "FALSE"}, collections.Counter()

    def answer(path, headers, _):
        assert headers["Metadata-Flavor"] == "Google"
        assert path.startswith("/computeMetadata/v1/instance/")
        name = path.rsplit("/", 1)[1]
        given[name] += 1
        return 200, answers[name].encode()

    with http_server(answer) as address:
        yield types.SimpleNamespace(answers=answers, given=given, address=address.removeprefix("http://"))


TERMINATE = "TERMINATE_ON_HOST_MAINTENANCE"


@pytest.mark.parametrize(
    ("before", "notice"),
    [
        ("NONE", {"maintenance-event": TERMINATE}),
        ("MIGRATE_ON_HOST_MAINTENANCE", {"maintenance-event": TERMINATE}),
        (TERMINATE, {"preempted": "TRUE"}),  # what stands already does not stop the run again
    ],
)
def test_a_notice_becomes_sigterm(metadata_server, monkeypatch, before, notice):
    heard = []
    monkeypatch.setattr(preemption, "POLL_SECONDS", 0.05)
    monkeypatch.setattr(preemption.os, "kill", lambda pid, number: heard.append(number))
    metadata_server.answers["maintenance-event"] = before
    watcher = threading.Thread(target=preemption.watch_maintenance, args=(metadata_server.address,), daemon=True)
    watcher.start()
    wait_until(lambda: min(metadata_server.given[name] for name in metadata_server.answers) >= 3)
    assert not heard
    metadata_server.answers.update(notice)
    watcher.join(300)
    assert heard == [signal.SIGTERM]


@pytest.mark.thorough
def test_a_run_on_google_s_machines_can_be_profiled_and_leaves_on_a_notice(metadata_server, tmp_path, monkeypatch):
    monkeypatch.setenv("GCE_METADATA_HOST", metadata_server.address)
    with socket.create_server(("localhost", 0)) as free:
        port = free.getsockname()[1]
    flags = ["--config.steps=100000", "--config.log_every=10", f"--profiler_port={port}"]
    process = start("train", *FLAGS, f"--workdir={tmp_path}", *flags)
    wait_for_steps(process, tmp_path, 3)
    socket.create_connection(("localhost", port), timeout=60).close()
    metadata_server.answers["maintenance-event"] = TERMINATE
    try:
        out, err = process.communicate(timeout=200)
    finally:
        process.kill()
    assert process.returncode == 75, err
    assert len(saved_steps(tmp_path)) == 1
    assert [e["reason"] for e in read_events(tmp_path) if e["event"] == "end"] == ["preempted"]


def test_skypilot_knows_the_exit_code():
    assert f"recover_on_exit_codes: [{preemption.EXIT_CODE}]" in (ROOT / "launch" / "skypilot.yaml").read_text()
