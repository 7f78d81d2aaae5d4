"""The drill, as users run it: real processes, seeded faults, an outcome equal to the bit."""

import contextlib
import json
import os
import random
import resource
import shutil
import signal
import subprocess

import pytest
from conftest import ROOT, TINY_RUN, run

from refusion_jax.training.faults import RunUnderTest, full_disk

FLAGS = [*TINY_RUN, "--config.epochs=3.5", "--config.checkpoint.every=20"]  # steps are counted from the rows


def drill(tmp_path, *flags: str) -> list[dict]:
    workdir = os.path.relpath(tmp_path / "drill", ROOT)  # as users name it; it was not compared at the end, once
    out, _ = run("drill", *FLAGS, f"--workdir={workdir}", *flags)
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


def test_a_full_disk_strikes_children_too_and_lasts_until_a_save_of_its_own_has_failed(tmp_path):
    run, log = RunUnderTest([], tmp_path / "faulty", hosts=1), tmp_path / "faulty.log"
    log.write_text("checkpoint 10 could not be written\n")  # by the full disk before
    program, seen = ["sh", "-c", "sleep 600 & echo; wait"], []

    def until(happened):
        seen.append((happened(), [resource.prlimit(pid, resource.RLIMIT_FSIZE)[0] for pid in run.pids()]))
        log.write_text(log.read_text() + "checkpoint 20 could not be written\n")
        seen.append(happened())

    run.until = until
    with (
        subprocess.Popen(program, stdout=subprocess.PIPE, start_new_session=True) as process,
        contextlib.ExitStack() as stack,
    ):
        stack.callback(os.killpg, process.pid, signal.SIGKILL)
        process.stdout.readline()
        run.processes = [process]
        assert full_disk(run, random.Random(0)) == "the run went on"
        assert {resource.prlimit(pid, resource.RLIMIT_FSIZE)[0] for pid in run.pids()} == {resource.RLIM_INFINITY}
    assert seen == [(False, [1, 1]), True]


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
