"""Trackers follow a run over its sessions, and whatever they do, the run does not notice.

Modules named wandb and trackio stand in for the libraries, which are asked themselves where they are installed.
"""

import importlib.util
import json
import re
import shutil
import sqlite3
import sys
import threading
from contextlib import closing
from pathlib import Path

import pytest
from conftest import TINY_RUN, config_with, run, start
from helpers import wait_until

from refusion_jax.checkpoints.directory import saved_steps
from refusion_jax.training import trackers
from refusion_jax.training.metrics import read_metrics

# Writes its calls to a file, [call, what was given] a line; then it fails or hangs where STUB says so.
STUB = """
import json, os, sys, time

if "hangs" in os.environ.get("STUB", ""):
    sys.modules["refusion_jax.training.trackers"]._FINISH_SECONDS = 2.0

def call(what, **given):
    with open(f"{os.environ['STUB_CALLS']}/{__name__}", "a") as file:
        file.write(json.dumps([what, given], default=str) + "\\n")
    done = dict(pair.split("=") for pair in os.environ.get("STUB", "").split()).get(f"{__name__}.{what}")
    if done == "fails":
        raise ConnectionError("nobody is there")
    if done == "hangs":
        time.sleep(1e6)

def init(**given):
    call("init", **given)
    return Run()

class Run:
    def define_metric(self, *names, **given): pass
    def log(self, metrics, **given): call("log", **metrics, **given)
    def finish(self): call("finish")

Settings, Html, Markdown = dict, str, str
"""
ALL = "--config.tracker=tensorboard,wandb,trackio"


@pytest.fixture
def calls(tmp_path, monkeypatch):
    """A function that gives the calls of a stub, as (call, what was given); processes that are started find them."""
    for name in ("stubs", "calls"):
        (tmp_path / name).mkdir()
    for name in ("wandb", "trackio"):
        (tmp_path / "stubs" / f"{name}.py").write_text(STUB)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}/stubs")
    monkeypatch.setenv("STUB_CALLS", f"{tmp_path}/calls")
    return lambda name: list(map(json.loads, (tmp_path / "calls" / name).read_text().splitlines()))


def train(workdir: Path, *flags: str, steps: int = 6) -> str:
    """Trains to the end in a process of its own; gives what it says on stderr."""
    short = [f"--config.steps={steps}", "--config.checkpoint.every=3", "--config.schedule=constant"]
    process = start("train", *TINY_RUN, *short, f"--workdir={workdir}", *flags)
    out, err = process.communicate(timeout=600)
    assert process.returncode == 0, out + err
    return err


def resume_before_the_end(workdir: Path) -> list[dict]:
    """Six steps; then, from the checkpoint of step 3, seven: the records of both, and the warnings."""
    assert "--config.tracker" not in train(workdir, ALL)
    first = read_metrics(workdir)
    shutil.rmtree(workdir / "checkpoints" / "6")
    assert "--config.tracker" not in train(workdir, ALL, steps=7)
    return first + read_metrics(workdir)[3:]


@pytest.mark.thorough
def test_a_resumed_run_goes_on_in_the_same_run_of_the_tracker(calls, tmp_path):
    records = resume_before_the_end(tmp_path / "run")
    assert [record["step"] for record in records] == [1, 2, 3, 4, 5, 6, 4, 5, 6, 7]
    identity = json.loads((tmp_path / "run" / "tracker.json").read_text())["id"]
    for name, key, of_run in (("wandb", "id", identity), ("trackio", "name", f"run-{identity}")):
        told = calls(name)
        assert [what for what, _ in told if what != "log"] == ["init", "finish"] * 2
        begun = [given for what, given in told if what == "init"]
        assert [(given[key], given["resume"], given["config"]["steps"]) for given in begun] == [
            (of_run, "allow", 6),
            (of_run, "allow", 7),
        ]
        shown = [given for what, given in told if what == "log"]
        assert shown == [{name: x for name, x in record.items() if x is not None} for record in records]
    assert len(list((tmp_path / "run" / "tensorboard").glob("events*"))) == 2


@pytest.mark.thorough
def test_a_tracker_that_fails_or_hangs_costs_one_warning_and_no_step(calls, tmp_path, monkeypatch):
    monkeypatch.setenv("STUB", "wandb.log=fails trackio.finish=hangs")
    warned = re.findall(r"--config\.tracker: (.*); training goes on", train(tmp_path / "run", ALL))
    assert warned == [
        "wandb fails, and may miss records: ConnectionError: nobody is there",
        "trackio has not finished within 2 s, and may miss records",
    ]
    assert [record["step"] for record in read_metrics(tmp_path / "run")] == [1, 2, 3, 4, 5, 6]
    assert saved_steps(tmp_path / "run") == [3, 6]


def test_a_tracker_that_never_begins_costs_one_warning(tmp_path, monkeypatch, caplog):
    freed = threading.Event()
    monkeypatch.setitem(trackers._TRACKERS, "wandb", lambda session: sys.exit("I am leaving"))
    monkeypatch.setitem(trackers._TRACKERS, "trackio", lambda session: freed.wait())
    monkeypatch.setattr(trackers, "_FINISH_SECONDS", 0.2)
    both = trackers.Trackers(config_with(tracker="wandb,trackio"), tmp_path, tmp_path, 0)
    both.log(1, {"loss": 1.0})
    wait_until(lambda: caplog.messages)
    both.finish()
    freed.set()
    assert caplog.messages == [
        "--config.tracker: wandb cannot begin: SystemExit: I am leaving; training goes on",
        "--config.tracker: trackio has not finished within 0.2 s, and may miss records; training goes on",
    ]


def test_nobody_waits_for_a_tracker_nor_keeps_all_that_it_misses(tmp_path, monkeypatch, caplog):
    class Stuck:
        def __init__(self, session):
            begun.set()
            freed.wait()

        def log(self, step, metrics):
            taken.append(step)

        def finish(self):
            taken.append("the end")

    begun, freed, taken = threading.Event(), threading.Event(), []
    monkeypatch.setitem(trackers._TRACKERS, "wandb", Stuck)
    tracker = trackers.Trackers(config_with(tracker="wandb"), tmp_path, tmp_path, 0)
    begun.wait()
    for step in range(3000):
        tracker.log(step, {"loss": 1.0})
    freed.set()
    tracker.finish()
    assert taken == [*range(1000), "the end"]
    (said,) = caplog.messages
    assert said == "--config.tracker: wandb is too slow, or hangs, and misses records; training goes on"


def test_what_cannot_track_is_refused_before_training(tmp_path):
    def refused(name: str) -> str:
        _, err = run("train", *TINY_RUN, f"--workdir={tmp_path}/run", f"--config.tracker={name}", code=2)
        return err

    known = "known, with commas between: tensorboard, wandb, trackio\n"
    assert refused("tensorboard,mlflow") == f"error: --config.tracker=tensorboard,mlflow: 'mlflow' is unknown; {known}"
    for name in ("wandb", "trackio"):
        if importlib.util.find_spec(name) is None:
            how = f"{name} is not installed: pip install -e '.[{name}]' in the project's root\n"
            assert refused(name) == f"error: --config.tracker={name}: {how}"
    assert not (tmp_path / "run").exists()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "tracker.json").write_text('{"id": "../../x"}')
    assert "tracker.json cannot be read: id: String should match" in refused("tensorboard")


def test_the_libraries_themselves_take_a_resumed_run_offline(tmp_path, monkeypatch):
    for name in ("wandb", "trackio"):
        pytest.importorskip(name, reason=f"pip install {name} to try it")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    records = resume_before_the_end(tmp_path / "run")
    identity = json.loads((tmp_path / "run" / "tracker.json").read_text())["id"]
    assert len(list((tmp_path / "run" / "wandb").glob(f"offline-run-*-{identity}"))) == 2
    (file,) = (tmp_path / "trackio").glob("*.db")
    with closing(sqlite3.connect(file)) as database:
        rows = database.execute("SELECT run_name, step, metrics FROM metrics ORDER BY id").fetchall()
    assert [(name, step, json.loads(found)["loss"]) for name, step, found in rows] == [
        (f"run-{identity}", record["step"], record["loss"]) for record in records
    ]
