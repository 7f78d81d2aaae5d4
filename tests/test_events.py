import json
import time

import jax
import pytest
from conftest import run

from refusion_jax import UserError
from refusion_jax.distributed.append_log import read_log
from refusion_jax.training import events


def event(time, event, **values):
    return {"time": time, "event": event, **values}


STRAIGHT = [
    event(100, "start", step=0),
    event(104, "init", seconds=4),
    event(110, "compile", seconds=6),
    event(130, "steps", first=1, last=10, seconds=18, data_seconds=1),
    event(131, "save", step=10, seconds=0.5),
    event(150, "steps", first=11, last=20, seconds=19, data_seconds=0),
]


def test_every_second_is_in_one_part():
    spent = events.account(STRAIGHT)
    assert spent["total"] == 50
    assert sum(spent[part] for part in events.PARTS) == pytest.approx(50)
    parts = {"step": 37, "init": 4, "compile": 6, "data": 1, "checkpoint": 0.5, "lost": 0, "other": 1.5, "down": 0}
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
    assert sum(spent[part] for part in events.PARTS) == pytest.approx(spent["total"]) == pytest.approx(48.5)
    assert spent["goodput"] == pytest.approx(37 / 48.5)


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
    for start in (0, 100, 200):
        sessions += [
            event(start, "start", step=0),
            event(start + 10, "steps", first=1, last=5, seconds=10, data_seconds=0),
        ]
    spent = events.account(sessions)
    assert (spent["lost"], spent["step"], spent["down"]) == (20, 10, 180)


def test_a_log_that_cannot_be_read_is_not_an_empty_one(tmp_path):
    assert list(read_log(tmp_path / "none.jsonl")) == []
    (tmp_path / "events.jsonl").mkdir()
    with pytest.raises(UserError, match=r"events\.jsonl cannot be read: Is a directory"):
        read_log(tmp_path / "events.jsonl")


def test_steps_of_no_number_and_lines_that_stand_there_twice_are_no_event(tmp_path):
    none = event(3, "steps", first=1, last=0, seconds=1, data_seconds=0)
    (tmp_path / events.FILE).write_text(2 * f"{json.dumps(STRAIGHT[0])}\n" + f"{json.dumps(none)}\n")
    assert events.read_events(tmp_path) == STRAIGHT[:1]
    out, err = run("goodput", f"--workdir={tmp_path}")
    assert out.startswith("goodput 0.0% of 0 min 0 s in 1 session")
    assert (len(out.splitlines()), err) == (1, "")


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


def test_junk_between_events_costs_no_other(tmp_path):
    lines = [json.dumps(e) for e in STRAIGHT]
    junk = [
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
