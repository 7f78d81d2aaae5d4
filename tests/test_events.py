"""What a run tells: events, of which goodput adds up, metrics, and trackers, which it does not notice."""

import importlib.util
import json
import re
import shutil
import sqlite3
import sys
import threading
import time
from contextlib import closing
from pathlib import Path

import jax
import pytest
from conftest import TINY_RUN, config_with, run, start
from helpers import wait_until

from refusion_jax import UserError
from refusion_jax.checkpoints.run_directory import saved_steps
from refusion_jax.distributed.append_log import read_log
from refusion_jax.training import events, trackers
from refusion_jax.training.metrics import read_metrics


def event(time, event, **values):
    return {"time": time, "event": event, **values}


STRAIGHT = [
    event(100, "start", step=0),
    event(104, "init", seconds=4),
    event(110, "compile", seconds=6),
    event(130, "steps", first=1, last=10, seconds=18, data_seconds=1),
    event(130.5, "evaluate", step=10, seconds=0.25),
    event(131, "save", step=10, seconds=0.5),
    event(150, "steps", first=11, last=20, seconds=19, data_seconds=0),
]


def test_every_second_is_in_one_part():
    spent = events.account(STRAIGHT)
    assert spent["total"] == 50
    assert sum(spent[part] for part in events.PARTS) == pytest.approx(50)
    parts = {"step": 37, "init": 4, "compile": 6, "data": 1, "evaluate": 0.25, "checkpoint": 0.5, "other": 1.25}
    parts |= {"lost": 0, "down": 0}
    assert {part: spent[part] for part in events.PARTS} == pytest.approx(parts)
    assert spent["goodput"] == pytest.approx(37 / 50)
    assert spent["sessions"] == 1
    assert events.describe(spent).startswith("goodput 74.0% of 0 min 50 s in 1 session: step 74.0%, init 8.0%,")


def test_steps_taken_again_after_a_kill_are_lost_and_the_time_between_is_down():
    again = [
        event(170, "start", step=15),  # its checkpoint was newer than the last save written down
        event(173, "init", seconds=2),
        event(173, "restore", seconds=1),
        event(180, "steps", first=16, last=20, seconds=7, data_seconds=0),
        event(181, "end", step=20, reason="complete", seconds=1),
    ]
    spent = events.account(STRAIGHT + again)
    assert spent["lost"] == pytest.approx(19 / 2)
    assert spent["step"] == pytest.approx(18 + 19 / 2 + 7)
    assert spent["down"] == pytest.approx(20)
    assert spent["checkpoint"] == pytest.approx(0.5 + 1 + 1)
    assert sum(spent[part] for part in events.PARTS) == pytest.approx(spent["total"]) == pytest.approx(81)


def test_a_clock_that_is_set_back_makes_no_share_above_one():
    set_back = [*STRAIGHT[:3], *(entry | {"time": entry["time"] - 30} for entry in STRAIGHT[3:])]
    spent = events.account(set_back)
    assert sum(spent[part] for part in events.PARTS) == pytest.approx(spent["total"]) == pytest.approx(48.75)
    assert spent["goodput"] == pytest.approx(37 / 48.75)


@pytest.mark.parametrize("hours", [5, -3])
def test_a_clock_that_is_set_during_a_session_adds_and_takes_no_time(tmp_path, monkeypatch, hours):
    log, wall = events.EventLog(tmp_path / events.FILE), time.time()
    log.write("start", step=0)
    monkeypatch.setattr(time, "time", lambda: wall + 3600 * hours)
    log.write("end", ago=10.0, step=1, seconds=0.0)
    log.close()
    start, end = events.read_events(tmp_path)
    assert start["time"] == pytest.approx(wall, abs=60)
    assert end["time"] - start["time"] == pytest.approx(-10, abs=9)


def test_a_step_can_be_lost_more_than_once():
    sessions = []
    for begun in (0, 100, 200):
        sessions += [
            event(begun, "start", step=0),
            event(begun + 10, "steps", first=1, last=5, seconds=10, data_seconds=0),
        ]
    spent = events.account(sessions)
    assert (spent["lost"], spent["step"], spent["down"]) == (20, 10, 180)


def test_a_log_that_cannot_be_read_is_not_an_empty_one(tmp_path):
    assert list(read_log(tmp_path / "none.jsonl")) == []
    (tmp_path / "events.jsonl").mkdir()
    with pytest.raises(UserError, match=r"events\.jsonl cannot be read: Is a directory"):
        read_log(tmp_path / "events.jsonl")


def test_nothing_that_can_be_accounted_for_is_no_error():
    assert events.account([])["goodput"] == 0.0
    assert events.account([event(5, "init", seconds=1)])["total"] == 0.0  # its start was lost


class Written(list):
    def write(self, name, **values):
        self.append(values)


@pytest.mark.parametrize(
    ("fetches", "ends", "busy", "starved"),
    [
        # (began, ended) of fetching the rows of each step; when the step ended
        ([(0, 1), (1, 1), (1, 1)], [11, 21, 31], 30, 1),  # rows are always there
        ([(0, 1), (1, 15), (15, 29)], [11, 25, 39], 30, 1 + 4 + 4),  # rows take longer than a step
        ([(0, 0), (0, 8), (8, 16)], [10, 20, 30], 30, 0),  # rows take as long, but after a step
        ([(0, 0), (12, 12), (12, 12)], [10, 22, 32], 30, 0),  # the loop did something else: neither
    ],
)
def test_devices_are_busy_from_a_dispatch_or_the_step_before_to_the_end(monkeypatch, fetches, ends, busy, starved):
    monkeypatch.setattr(events, "when_ready", lambda end: end)
    written = Written()
    clock, start = events.StepClock(written, 7), time.monotonic()
    for (began, ended), end in zip(fetches, ends, strict=True):
        clock._fetched = start + began, start + ended
        clock.dispatched(start + end)
    clock.flush()
    assert written == [{"first": 8, "last": 10, "seconds": busy, "data_seconds": starved}]


def test_a_failing_step_is_not_swallowed(monkeypatch):
    def fail(_):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(events, "when_ready", fail)
    clock = events.StepClock(Written(), 0)
    with clock.fetching():
        pass
    clock.dispatched(None)
    with pytest.raises(RuntimeError, match="out of memory"):
        clock.flush()


def test_a_real_run_is_accounted_for_to_the_second(trained_run):
    out, _ = run("goodput", f"--workdir={trained_run}", "--json")
    spent = json.loads(out)
    assert sum(spent[part] for part in events.PARTS) == pytest.approx(spent["total"])
    assert all(spent[part] >= 0 for part in events.PARTS)
    assert min(spent["step"], spent["init"], spent["compile"], spent["checkpoint"]) > 0
    assert spent["lost"] == spent["down"] == 0
    found = events.read_events(trained_run)
    steps = [step for e in found if e["event"] == "steps" for step in range(e["first"], e["last"] + 1)]
    assert steps == list(range(1, 61))
    out, _ = run("goodput", f"--workdir={trained_run}")
    assert out.startswith("goodput ")
    (versions,) = (event["versions"] for event in found if event["event"] == "start")
    assert versions.keys() == {"jax", "jaxlib", "libtpu"}
    assert versions["jax"] == jax.__version__
    assert json.loads((trained_run / "config.json").read_text())["versions"] == versions


def test_junk_between_events_costs_no_other(tmp_path):
    lines = [json.dumps(e) for e in STRAIGHT]
    junk = [
        lines[0],  # again
        json.dumps(event(3, "steps", first=1, last=0, seconds=1, data_seconds=0)),  # of no step
        f'{{"time": 1{"0" * 400}, "event": "save"}}',
        "{}",
        "[]",
        "7",
        '{"event": "steps", "time": 1}',
        '{"event": 3}',
        "\ufffd\x00",
        '{"time": 1, "event": ["save"]}',
        '{"time": "x", "event": "save"}',
    ]
    (tmp_path / events.FILE).write_text("\n".join([lines[0], *junk, *lines[1:]]))
    assert events.read_events(tmp_path) == STRAIGHT


def test_junk_between_records_costs_no_other(tmp_path):
    junk = [b"{}", b"\xff\x00\n[]", b'{"step": "x"}', b'{"step": 2, "loss": 1.0}']
    lines = [json.dumps({"step": step}).encode() for step in (1, 2, 3)]
    cut_off = b'{"step": 4'
    (tmp_path / "metrics.jsonl").write_bytes(b"\n".join([junk[0], lines[0], *junk[1:], lines[2], cut_off]))
    assert read_metrics(tmp_path) == [{"step": 1}, {"step": 2, "loss": 1.0}, {"step": 3}]
    assert read_metrics(tmp_path, up_to=1) == [{"step": 1}]
    assert read_metrics(tmp_path / "none") == []


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
def test_a_resumed_run_goes_on_in_the_same_run_of_the_tracker(calls, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_NAME", "mine")
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
    assert [given["name"] for what, given in calls("wandb") if what == "init"] == ["mine", "mine"]
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


def test_tensorboard_has_what_it_was_told_when_the_process_is_killed(tmp_path):
    board = trackers.Trackers(config_with(tracker="tensorboard"), tmp_path, tmp_path, 0)
    board.log(1, {"loss": 1.0})
    wait_until(lambda: any(b"loss" in path.read_bytes() for path in tmp_path.glob("tensorboard/*")), seconds=20)
    board.finish()


def test_what_cannot_track_is_refused_before_training(tmp_path):
    def refused(name: str) -> str:
        _, err = run("train", *TINY_RUN, f"--workdir={tmp_path}/run", f"--config.tracker={name}", code=2)
        return err

    known = "known, comma-separated: tensorboard, wandb, trackio\n"
    assert refused("tensorboard,mlflow") == f"error: --config.tracker=tensorboard,mlflow: 'mlflow' is unknown; {known}"
    for name in ("wandb", "trackio"):
        if importlib.util.find_spec(name) is None:
            how = f"{name} is not installed: pip install -e '.[{name}]' in the project's root\n"
            assert refused(name) == f"error: --config.tracker={name}: {how}"
    assert not (tmp_path / "run").exists()


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
