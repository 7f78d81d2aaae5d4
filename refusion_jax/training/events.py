"""The event log of a run, which tells where its time went, and the goodput computed from it.

DIR/events.jsonl holds one object for each event, over all sessions (starts) of the run: `time` (Unix seconds), `event`,
and

  start       step: where the session resumed; time: when the process began; versions: of JAX and its compilers
  changed     what: a key of the config, with --allow_change
  passed_over step, why: a checkpoint that could not be read
  rolled_back from_step, to_step, why: after failed steps; the rows in between are left out
  init        seconds from the start to the first compilation, excluding the restore
  restore     seconds to read the checkpoint
  compile     seconds to compile the step (or to find it in the compilation cache)
  steps       first, last; seconds that devices worked on them; data_seconds that devices waited for rows
  save        step, seconds that the loop was blocked by the checkpoint
  evaluate    step, seconds of held-out loss and tasks
  end         step, reason: complete | preempted; seconds to finish writing

Goodput is the share of the time since the first start that devices spent on steps that count. Steps that had to be
repeated after a kill are lost.
"""

import collections
import concurrent.futures
import contextlib
import itertools
import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
from etils import epath

from refusion_jax.distributed.append_log import AppendLog, read_log

FILE = "events.jsonl"
PARTS = ("step", "init", "compile", "data", "evaluate", "checkpoint", "lost", "other", "down")
_PART_OF = {name: name for name in ("init", "compile", "evaluate")}
_PART_OF |= dict.fromkeys(("restore", "save", "end"), "checkpoint")
_NUMBERS = {"steps": ("first", "last", "seconds", "data_seconds"), "start": ("step",)}
_NUMBERS |= dict.fromkeys(_PART_OF, ("seconds",))
_MOST = 1e30  # larger than anything that is logged; larger integers may not fit into a float
_WRITE_SECONDS = 10.0  # at most this much of the log is lost in a kill
_IN_FLIGHT = 2  # steps dispatched but not finished: enough to keep devices busy, few enough to notice a preemption soon


class EventLog:
    """Appends events to the log, in process 0 only."""

    def __init__(self, path: Path):
        self._file = AppendLog(path, keeps_trying=True) if jax.process_index() == 0 else None
        self._epoch = time.time() - time.monotonic()  # once, so that setting the clock does not count as time

    def write(self, event: str, ago: float = 0.0, **values: Any) -> None:
        """Adds an event that happened now or `ago` seconds ago."""
        if self._file:
            self._file.append({"time": self._epoch + time.monotonic() - ago, "event": event, **values})

    def close(self) -> None:
        if self._file:
            self._file.close()


class StepClock:
    """Measures how long devices work and wait, while the loop dispatches steps ahead.

    A step occupies the devices from its dispatch, or the end of the step before it, to its own end. They wait for data
    while the loop fetches rows and no step is in flight.
    """

    def __init__(self, log: EventLog, first_step: int):
        self._log = log
        self._watcher = concurrent.futures.ThreadPoolExecutor(1, "steps")
        self._pending = collections.deque()
        self._done = time.monotonic()
        self._written = self._last = first_step
        self._wrote_at = self._done
        self._busy = self._starved = 0.0

    @contextlib.contextmanager
    def fetching(self) -> Iterator[None]:
        """Encloses the fetching of a step's rows, just before it is dispatched."""
        began = time.monotonic()
        yield
        self._fetched = began, time.monotonic()

    def dispatched(self, outputs: Any) -> None:
        """Records a dispatched step, finished when its outputs are ready; waits until at most two are unfinished."""
        self._pending.append((*self._fetched, self._watcher.submit(when_ready, outputs)))
        self._collect(_IN_FLIGHT)
        if time.monotonic() - self._wrote_at > _WRITE_SECONDS:
            self._write()

    def flush(self) -> None:
        """Waits for all steps and writes them to the log."""
        self._collect(0)
        self._write()

    def _collect(self, most: int) -> None:
        while len(self._pending) > most:
            fetch_began, fetch_ended, ready = self._pending.popleft()
            done = ready.result()
            self._starved += max(0.0, fetch_ended - max(fetch_began, self._done))
            self._busy += done - max(fetch_ended, self._done)
            self._done = done
            self._last += 1

    def _write(self) -> None:
        if self._last > self._written:
            seconds = {"seconds": round(self._busy, 4), "data_seconds": round(self._starved, 4)}
            self._log.write("steps", first=self._written + 1, last=self._last, **seconds)
        self._written, self._wrote_at = self._last, time.monotonic()
        self._busy = self._starved = 0.0


def when_ready(outputs: Any) -> float:
    """Waits for arrays and returns time.monotonic() when they are ready."""
    jax.block_until_ready(outputs)
    return time.monotonic()


def process_age() -> float:
    """Seconds since this process was started, imports included; 0 where the system does not report it."""
    stat = Path("/proc/self/stat")
    if not stat.exists():
        return 0.0
    ticks = int(stat.read_text().rpartition(")")[2].split()[19])  # since boot, time asleep included
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


def read_events(workdir: epath.PathLike) -> list[dict[str, Any]]:
    """The valid events of a run, without truncated lines and repeated ones."""

    def is_valid(event: dict[str, Any]) -> bool:
        kind = event.get("event")
        is_whole = isinstance(kind, str) and all(is_number(event.get(x)) for x in ("time", *_NUMBERS.get(kind, ())))
        return is_whole and (kind != "steps" or event["first"] <= event["last"])

    return [event for event, _ in itertools.groupby(filter(is_valid, read_log(epath.Path(workdir) / FILE)))]


def is_number(value: Any) -> bool:
    """Whether a value from a log is a finite number of reasonable size."""
    return isinstance(value, int | float) and not isinstance(value, bool) and -_MOST < value < _MOST


def account(events: Iterable[dict[str, Any]]) -> dict[str, float]:
    """Seconds by PARTS, which add up to `total`; `goodput`: the share of `step`; and the number of `sessions`.

    `other` is the remaining time of sessions; `down` is the time between sessions, including steps that a kill kept
    from being logged.
    """
    sessions = []
    for event in events:
        if event["event"] == "start":
            sessions.append([])
        if sessions:  # events before the first start belong to a session whose start was cut off
            sessions[-1].append(event)
    spent = dict.fromkeys(PARTS, 0.0)
    resumed_from = float("inf")  # the first step of any later session: steps after it were repeated
    total = 0.0
    for before, session in reversed([*itertools.pairwise([None, *sessions])]):
        for event in session:
            if event["event"] == "steps":
                count = event["last"] - event["first"] + 1
                kept = min(max(0, min(event["last"], resumed_from) - event["first"] + 1) / count, 1.0)
                spent["step"] += kept * event["seconds"]
                spent["lost"] += (1 - kept) * event["seconds"]
                spent["data"] += event["data_seconds"]
            elif event["event"] in _PART_OF:
                spent[_PART_OF[event["event"]]] += event["seconds"]
        start, end = session[0], session[-1]
        down = max(0.0, start["time"] - before[-1]["time"]) if before else 0.0
        spent["down"] += down
        total += down + max(0.0, end["time"] - start["time"])
        resumed_from = min(resumed_from, start["step"])
    total = max(total, sum(spent.values()))  # the first is too small if the clock was set back
    spent["other"] = total - sum(spent.values())
    return {**spent, "total": total, "goodput": spent["step"] / total if total else 0.0, "sessions": len(sessions)}


def describe(spent: dict[str, float]) -> str:
    """The result of `account` as one line of text."""
    minutes, seconds = divmod(round(spent["total"]), 60)
    whole = max(spent["total"], 1e-9)
    shares = ", ".join(f"{part} {spent[part] / whole:.1%}" for part in PARTS if spent[part] > 0)
    plural = "session" if spent["sessions"] == 1 else "sessions"
    return f"goodput {spent['goodput']:.1%} of {minutes} min {seconds} s in {spent['sessions']} {plural}: {shares}"
