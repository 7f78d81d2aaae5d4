"""Trackers show the metrics of a run: TensorBoard, Weights & Biases (wandb), trackio.

Each has its own thread. The run waits for it only at the end of a session, and not for long: a tracker that is
offline, hangs or fails costs one warning. A session that resumes a run continues the same run of the tracker.
"""

import dataclasses
import functools
import html
import importlib.util
import os
import queue
import secrets
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import jax
import ml_collections
from absl import logging
from etils import epath
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto import event_pb2, summary_pb2
from tensorboardX.summary import text as as_summary

from refusion_jax.cli.errors import SettingError, first_line
from refusion_jax.distributed.json_files import read_json
from refusion_jax.distributed.storage import absolute, write_file

FILE = "tracker.json"  # in the directory of a run: its id in wandb and trackio
_PROJECT = "refusion_jax"  # unless the environment names another
_MOST = 1000  # queued calls of a tracker; while the queue is full, further ones are dropped
_FINISH_SECONDS = 30.0  # how long the end of a session waits for all its trackers together
_LIBRARY_SECONDS = 25.0  # how long a library waits for its server; libraries wait again when the process exits


class Tracker(Protocol):
    """Shows the metrics of a run. Its methods may block, and may raise anything."""

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Adds one point to the curve of each metric. Steps may repeat, if a session resumes before them."""

    def text(self, step: int, title: str, markdown: str) -> None:
        """Shows a text."""

    def finish(self) -> None:
        """Sends what is left."""


@dataclasses.dataclass(frozen=True)
class TrackedSession:
    """The session that a tracker follows."""

    config: ml_collections.ConfigDict
    name: str  # of the run, for people
    id: str  # of the run, for trackers: unique, and the same in all its sessions
    logs: Path  # local directory of files
    first_step: int  # steps of the run before this session


class Trackers:
    """The trackers that a config names, as one that never waits and never raises. In process 0 only."""

    def __init__(self, config: ml_collections.ConfigDict, workdir: epath.Path, logs: Path, first_step: int):
        """Begins or continues the run of each tracker; `logs` is a local directory for their files."""
        names, run_id = _names(config.tracker), ""
        if set(names) - {"tensorboard"}:
            if not (workdir / FILE).exists():
                write_file(workdir / FILE, f'{{"id": "{secrets.token_hex(4)}"}}\n')
            run_id = read_json(workdir / FILE, dict[str, str])["id"]
        session = TrackedSession(config, f"{absolute(workdir).name}-{run_id}", run_id, logs, first_step)
        self._all = [_OnThread(name, functools.partial(_TRACKERS[name], session)) for name in names]

    def log(self, step: int, metrics: dict[str, float]) -> None:
        for tracker in self._all:
            tracker.call(lambda it: it.log(step, metrics))

    def text(self, step: int, title: str, markdown: str) -> None:
        for tracker in self._all:
            tracker.call(lambda it: it.text(step, title, markdown))

    def finish(self) -> None:
        """Asks all trackers to send what is left, and waits for them for up to _FINISH_SECONDS."""
        deadline = time.monotonic() + _FINISH_SECONDS
        for tracker in self._all:
            tracker.end()
        for tracker in self._all:
            tracker.wait(deadline - time.monotonic())


def check_trackers(config: ml_collections.ConfigDict) -> None:
    """Refuses trackers that are unknown or not installed."""

    def refuse(why: str) -> None:
        raise SettingError("config", "tracker", config.tracker, why)

    for name in _names(config.tracker):
        if name not in _TRACKERS:
            refuse(f"{name!r} is unknown; known, comma-separated: {', '.join(_TRACKERS)}")
        if jax.process_index() == 0 and name != "tensorboard" and importlib.util.find_spec(name) is None:
            refuse(f"{name} is not installed: pip install -e '.[{name}]' in the project's root")


def _names(text: str) -> list[str]:
    return list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))


def as_markdown(parts: dict[str, str]) -> str:
    """Texts under their titles, each as a block of code."""
    blocks = {title: "\n".join(f"    {line}" for line in x.splitlines() or [""]) for title, x in parts.items()}
    return "\n\n".join(f"**{title}**\n\n{block}" for title, block in blocks.items())


class _OnThread:
    """A tracker on its own thread: callers never wait for it, and never see its exceptions."""

    def __init__(self, name: str, begin: Callable[[], Tracker]):
        self._name, self._warned = name, False
        self._calls: queue.SimpleQueue[Callable[[Tracker], Any] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, args=(begin,), name=name, daemon=True)
        self._thread.start()

    def call(self, what: Callable[[Tracker], Any]) -> None:
        if self._calls.qsize() < _MOST:
            self._calls.put(what)
        elif self._thread.is_alive():
            self._warn("is too slow, or hangs, and misses records")

    def end(self) -> None:
        """Ends the thread after the queued calls and `finish`."""
        self._calls.put(lambda tracker: tracker.finish())
        self._calls.put(None)

    def wait(self, seconds: float) -> None:
        self._thread.join(max(seconds, 0.0))
        if self._thread.is_alive():
            self._warn(f"has not finished within {_FINISH_SECONDS:g} s, and may miss records")

    def _work(self, begin: Callable[[], Tracker]) -> None:
        try:
            tracker = begin()
        except BaseException as error:  # noqa: BLE001  libraries raise errors of many kinds, and some exit
            self._warn(f"cannot begin: {type(error).__name__}: {first_line(error)}")
            return
        for call in iter(self._calls.get, None):
            try:
                call(tracker)
            except BaseException as error:  # noqa: BLE001
                self._warn(f"fails, and may miss records: {type(error).__name__}: {first_line(error)}")

    def _warn(self, what: str) -> None:
        """Prints a warning, but only the first one of this tracker."""
        if not self._warned:
            logging.warning("--config.tracker: %s %s; training goes on", self._name, what)
        self._warned = True


class TensorBoard:
    """Files in DIR/tensorboard; after a failed write, later records go into a new file."""

    def __init__(self, session: TrackedSession):
        self._directory, self._first_step, self._files = session.logs / "tensorboard", session.first_step + 1, 0
        self._writer: EventsWriter | None = None

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self._add(step, [summary_pb2.Summary.Value(tag=name, simple_value=x) for name, x in metrics.items()])

    def text(self, step: int, title: str, markdown: str) -> None:
        self._add(step, as_summary(title, markdown).value)

    def finish(self) -> None:
        if self._writer:
            self._writer.close()

    def _add(self, step: int, values: list[summary_pb2.Summary.Value]) -> None:
        try:
            self._writer = self._writer or self._open()
            summary = summary_pb2.Summary(value=values)
            self._writer.write_event(event_pb2.Event(wall_time=time.time(), step=step, summary=summary))
            self._writer.flush()  # a kill would lose what Python has buffered
        except OSError:
            self._writer = None
            raise

    def _open(self) -> EventsWriter:
        self._directory.mkdir(parents=True, exist_ok=True)
        self._files += 1
        writer = EventsWriter(str(self._directory / "events"), f".{os.getpid()}.{self._first_step}.{self._files}")
        # It tells TensorBoard to drop older records from this step on.
        start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        writer.write_event(event_pb2.Event(wall_time=time.time(), step=self._first_step, session_log=start))
        return writer


class WeightsAndBiases:
    """A run of wandb, with files in DIR/wandb; its environment variables (WANDB_MODE, WANDB_PROJECT ...) apply.

    The step is logged as a metric, because wandb drops records of a step that repeats.
    """

    def __init__(self, session: TrackedSession):
        import wandb

        self._html = wandb.Html
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", _PROJECT),
            id=session.id,
            name=os.environ.get("WANDB_NAME", session.name),
            resume="allow",
            config=session.config.to_dict(),
            allow_val_change=True,
            dir=session.logs,
            settings=wandb.Settings(console="off", init_timeout=_LIBRARY_SECONDS, finish_timeout=_LIBRARY_SECONDS),
        )
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self._run.log({"step": step, **metrics})

    def text(self, step: int, title: str, markdown: str) -> None:
        """Adds a text verbatim, as wandb renders Markdown only in reports."""
        self._run.log({"step": step, title: self._html(f"<pre>{html.escape(markdown)}</pre>")})

    def finish(self) -> None:
        self._run.finish()


class Trackio:
    """A run of trackio, on this machine or where TRACKIO_SPACE_ID says; `trackio show` shows it."""

    def __init__(self, session: TrackedSession):
        import trackio

        self._markdown = trackio.Markdown
        config = session.config.to_dict()
        self._run = trackio.init(project=_PROJECT, name=session.name, resume="allow", config=config, embed=False)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self._run.log(metrics, step=step)

    def text(self, step: int, title: str, markdown: str) -> None:
        self._run.log({title: self._markdown(markdown)}, step=step)

    def finish(self) -> None:
        self._run.finish()


_TRACKERS: dict[str, Callable[[TrackedSession], Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
    "trackio": Trackio,
}
