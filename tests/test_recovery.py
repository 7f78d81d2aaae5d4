"""What a run survives: steps that do not count, preemption by real signals and notices, a drill of faults."""

import collections
import json
import os
import re
import shutil
import signal
import socket
import threading
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import ROOT, TINY_RUN, run, start
from etils import epath
from helpers import computed, config_of_mine, free_port, http_server, wait_for_steps, wait_until
from test_checkpoints import make_state

from refusion_jax import UserError
from refusion_jax.checkpoints.run_directory import saved_steps
from refusion_jax.distributed import preemption
from refusion_jax.training import recovery
from refusion_jax.training.events import read_events
from refusion_jax.training.loop import Now, RollBack
from refusion_jax.training.metrics import read_metrics
from refusion_jax.training.recovery import Health, SkippedBatches


def test_rows_left_out_move_all_after_them_up_and_none_comes_twice(tmp_path):
    skipped = SkippedBatches(epath.Path(tmp_path))
    assert [skipped.batch_of(step) for step in range(4)] == [0, 1, 2, 3]
    for first, last in ((10, 14), (10, 12), (5, 8)):
        skipped.add(first, RollBack(last, ""))
    again = SkippedBatches(epath.Path(tmp_path))  # a run that was killed reads the same
    drawn = [again.batch_of(step) for step in range(30)]
    assert drawn[:5] == [0, 1, 2, 3, 4]
    assert drawn[5] == 5 + 3
    assert drawn[10] == 10 + 3 + 4 + 2
    assert len(set(drawn)) == 30
    assert drawn == sorted(drawn)


@pytest.mark.parametrize("junk", [b"\xff", b"{}", b"[1]", b'[["a", 2]]'])
def test_a_list_of_rows_that_cannot_be_read_is_never_passed_over(tmp_path, junk):
    (tmp_path / recovery.FILE).write_bytes(junk)
    with pytest.raises(UserError, match=r"left_out\.json cannot be read"):
        SkippedBatches(epath.Path(tmp_path))


def test_what_does_not_help_is_given_up_with_a_diagnosis(tmp_path):
    skipped = SkippedBatches(epath.Path(tmp_path))
    for last in (12, 13, 14):
        skipped.add(10, RollBack(last, "step 12 does not count"))
    with pytest.raises(UserError, match="training diverged: step 9 .* 3 roll-backs to step 10"):
        skipped.add(10, RollBack(11, "step 9 does not count"))


def after(step, in_a_row=0, state=None):
    metrics = {
        "in_a_row": jnp.int32(in_a_row),
        "invalid_ids": jnp.int32(0),
        "loss": jnp.float32(jnp.nan),
        "grad_norm": jnp.float32(1),
    }
    return Now(step, state or make_state(0), metrics, is_end=False, is_preempted=False)


@pytest.mark.parametrize("looked_at", ["late", "at once"])
def test_as_many_in_a_row_as_allowed_roll_back_at_the_same_step_however_they_are_looked_at(looked_at, capsys):
    health = Health()

    def train():
        for step, in_a_row in enumerate([0, 1, 0, *range(1, 13)], start=1):
            health.after_step(after(step, in_a_row))
            if looked_at == "at once":
                health.before_save(after(step))

    with pytest.raises(RollBack, match=r"step 13 does not count \(loss nan, gradient norm 1.*10 in a row") as failure:
        train()
    assert failure.value.step == 13
    said = "step 2 does not count (loss nan, gradient norm 1; name the tensor with --config.debug_nans)"
    assert said in capsys.readouterr().out


@pytest.mark.parametrize("first", ["weight", "gradient", "update"])
def test_the_first_that_is_not_finite_is_named_in_the_order_in_which_a_step_computes_them(first, capsys):
    kinds = ("weight", "gradient", "update")
    finite = {kind: {"a": jnp.bool_(True), "b": jnp.bool_(at < kinds.index(first))} for at, kind in enumerate(kinds)}
    now = after(1, in_a_row=1)
    now.metrics["finite"] = jax.jit(lambda x: x)(finite)
    (health := Health()).after_step(now)
    assert health.is_in_doubt()
    assert f"; first not finite: {first} ['b'], of 1 such)" in capsys.readouterr().out


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e25], ids=str)
def test_a_state_that_must_not_be_saved_is_named(value):
    state = make_state(0)
    Health().before_save(after(5, state=state))
    name = next(iter(state.params))
    broken = jax.tree.map(lambda x: x.at[(0,) * x.ndim].set(value), state.params[name])
    state = state.replace(params=state.params | {name: broken})
    with pytest.raises(RollBack, match=r"step 5 left \['weight'\]"):
        Health().before_save(after(5, state=state))


@pytest.mark.thorough
def test_a_spike_is_left_out_and_several_roll_back_past_their_rows(tmp_path):
    """A limit below the mean makes every step after the first 20 a spike, whatever the rows."""
    flags = [*TINY_RUN, f"--workdir={tmp_path}", "--config.guard.spike=0.01"]
    out, err = run("train", *flags, code=2)
    assert "step 21 does not count (loss " in out
    assert "debug_nans" not in out  # which would find nothing
    assert "rolling back" in out
    assert "3 roll-backs to step 20" in err
    assert saved_steps(tmp_path) == [10, 20]
    assert SkippedBatches(epath.Path(tmp_path)).windows == 3 * [(20, 30)]
    out, _ = run("train", *TINY_RUN, f"--workdir={tmp_path}")  # without the limit it goes on, past those rows
    assert "step 20 of 60" in out
    assert read_metrics(tmp_path)[-1]["step"] == 60


BROKEN = """class Broken(registry.find_system("ar").objective):
    def corrupt(self, rows, keys):
        batch = super().corrupt(rows, keys)
        return batch.replace(weights={"ar": batch.weights["ar"] * float("nan")})


own = {"objective": Broken, """


def test_a_run_of_few_steps_does_not_end_well_if_none_of_them_counts(tmp_path):
    (tmp_path / "mine.py").write_text(config_of_mine("ar").replace("own = {", BROKEN))
    flags = [
        f"--config={tmp_path}/mine.py",
        *TINY_RUN[1:],
        "--config.objective=mine",
        "--config.steps=6",
        "--config.row_length=64",
        "--config.debug_nans",
    ]
    out, err = run("train", *flags, f"--workdir={tmp_path}/run", code=2)
    assert re.match(
        r"error: training diverged: step 6 does not count \(loss nan, .* the last of 6 in a row; 3 roll", err
    )
    assert "step 1 does not count (loss nan, gradient norm nan; first not finite: gradient ['embed_tokens'], of " in out
    assert saved_steps(tmp_path / "run") == []


def test_a_run_whose_last_steps_do_not_count_ends_with_a_line_that_says_so(tmp_path):
    """As above, a limit below the mean makes every step after the first 20 a spike."""
    out, _ = run("train", *TINY_RUN, f"--workdir={tmp_path}", "--config.steps=24", "--config.guard.spike=0.01")
    said = "its weights are those of step 20: the updates of all later steps were left out\n"
    assert f"trained to step 24; the run is in {tmp_path}\n{said}" in out
    assert read_metrics(tmp_path)[-1]["skipped"] == 4


FLAGS = [*TINY_RUN, "--config.checkpoint.every=1000"]


def test_sigterm_saves_once_and_a_second_start_goes_on_to_the_bit(tmp_path, trained_run, monkeypatch):
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR")  # as users have it
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    cache, tmp_path = tmp_path / "home" / "refusion_jax" / "compiled", tmp_path / "run"
    _, err = run("train", *FLAGS, f"--workdir={tmp_path}", "--compile_only", "--config.compilation_cache=off", code=2)
    assert "--compile_only: nothing compiled is kept here" in err
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
    caught = 1 << (signal.SIGQUIT - 1)  # once it has imported; then a minute of data begins
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
    port = free_port()
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


def test_skypilot_knows_the_exit_codes():
    codes = f"recover_on_exit_codes: [{preemption.EXIT_CODE}, {128 + signal.SIGTERM}]"
    assert codes in (ROOT / "launch" / "skypilot.yaml").read_text()


DRILLED = [*TINY_RUN, "--config.epochs=3.5", "--config.checkpoint.every=20"]  # steps are counted from the rows


def drill(tmp_path, *flags: str) -> list[dict]:
    workdir = os.path.relpath(tmp_path / "drill", ROOT)  # as users name it; it was not compared at the end, once
    out, _ = run("drill", *DRILLED, f"--workdir={workdir}", *flags)
    return [json.loads(line) for line in out.splitlines()]


# Of the others the parts are tested alone: a kill and SIGTERM of a run, a full disk, files that are cut or gone.
FEW = "kill_in_save,bit_flip"


@pytest.mark.parametrize(("faults", "kinds"), [(2, FEW), pytest.param(7, "", marks=pytest.mark.slow)])
@pytest.mark.thorough
def test_faults_of_all_kinds_leave_the_outcome_equal(tmp_path, monkeypatch, faults, kinds):
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR")  # as users have it: the run keeps its programs itself
    lines = drill(tmp_path, f"--faults={faults}", f"--kinds={kinds}")
    found = [line for line in lines if "fault" in line]
    assert len({fault["kind"] for fault in found}) == faults
    assert all(fault["ok"] for fault in found)
    assert all(line["equal"] for line in lines if "equal" in line)


@pytest.mark.slow
def test_several_hosts_lose_one_another_their_disk_and_their_directory(tmp_path):
    kinds = "kill_host,term,full_disk"
    lines = drill(tmp_path, "--faults=3", "--hosts=2", f"--kinds={kinds}")
    assert all(line["ok"] for line in lines if "fault" in line)
    assert all(line["equal"] for line in lines if "equal" in line)
    assert {line["what"] for line in lines if line.get("kind") == "full_disk"} <= {"the run went on", "the run stopped"}


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--config.steps=50"], "/straight holds a run with another config (differs in steps): "),
        (["--config.accumulation=2"], "/straight holds a run with another config (differs in accumulation): "),
        (["--hosts=2"], "--hosts=2: "),
        (["--kinds=kill,kill_host"], "--kinds=kill_host: needs --hosts of 2 or more"),
        (["--workdir=gs://bucket/drill"], "--workdir=gs:/bucket/drill: must be a local path"),
    ],
)
def test_a_drill_that_could_not_compare_is_refused(tmp_path, trained_run, store, flags, said):
    (tmp_path / "straight").mkdir()
    shutil.copy(trained_run / "config.json", tmp_path / "straight")
    (tmp_path / "hosts").write_text("1")
    _, err = run("drill", *TINY_RUN, f"--workdir={tmp_path}", *flags, code=2)
    assert said in err
