"""Writes the metrics of a run to metrics.jsonl, its trackers and the terminal."""

import json
import sys
import time
from typing import Any

import jax
import numpy as np
from etils import epath
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn

from refusion_jax.cli import command
from refusion_jax.cli.progress import progress
from refusion_jax.distributed.append_log import AppendLog, read_log
from refusion_jax.distributed.chips import peak_flops
from refusion_jax.distributed.storage import LogDirectory, write_file
from refusion_jax.systems.registry import systems
from refusion_jax.training.loop import Run
from refusion_jax.training.trackers import Trackers, as_markdown
from refusion_jax.training.train_step import wide_to_int

FILE = "metrics.jsonl"
SAMPLES = "samples.jsonl"  # answers to tasks; the last one to a problem counts
_NOT_LOGGED = ("in_a_row", "finite", "invalid_ids")  # for internal use


class MetricsWriter:
    """Writes the metrics of logged steps. A resumed run continues the files as if it had never stopped.

    Rates are averages between logged steps. `seconds` is the training time so far, over all sessions of the run.
    """

    def __init__(self, run: Run, logs: LogDirectory, first_step: int, tokens: int):
        """Opens the files, and drops records after the checkpoint from which the run resumes.

        `first_step` steps were taken and `tokens` tokens seen so far; the MFU counts model FLOPs over all devices.
        """
        config, kept = run.config, read_metrics(run.workdir, up_to=first_step)
        peak = peak_flops(run.mesh.devices.flat[0].device_kind)
        self._flops_per_step = config.batch_size * run.program.flops_per_row
        self._peak = peak and peak * run.mesh.size
        seconds = [record["seconds"] for record in kept if isinstance(record.get("seconds"), int | float)]
        self._began = time.monotonic() - max(seconds, default=0.0)
        self._last = first_step, tokens, time.monotonic()
        self._kept: tuple[int, dict[str, jax.Array]] | None = None
        self._is_writer = jax.process_index() == 0
        if not self._is_writer:
            return
        self._file = _reopened(logs.path / FILE, kept)
        self._samples = _reopened(logs.path / SAMPLES, _up_to(run.workdir / SAMPLES, first_step))
        self._trackers = Trackers(config, run.workdir, logs.path, first_step)
        self._bar = None
        if sys.stdout.isatty():
            columns = (TextColumn("step"), MofNCompleteColumn(), BarColumn(), TimeRemainingColumn())
            self._bar = progress(*columns, TextColumn("{task.fields[note]}"), stderr=False)
            self._task = self._bar.add_task("training", total=config.steps, completed=first_step, note="compiling")
            self._bar.start()

    def later(self, step: int, metrics: dict[str, jax.Array]) -> None:
        """Keeps the metrics of a step for `flush`, so that the host does not wait for the device yet."""
        self._kept = step, metrics

    def flush(self) -> None:
        """Waits for the metrics kept by `later`, if any, and writes their record, with null for non-finite numbers."""
        if not self._kept:
            return
        (step, metrics), self._kept = self._kept, None
        metrics = jax.device_get({name: value for name, value in metrics.items() if name not in _NOT_LOGGED})
        tokens, now = wide_to_int(metrics.pop("tokens")), time.monotonic()
        step_before, tokens_before, before = self._last
        self._last = step, tokens, now
        objectives = [system.objective(mask_id=0) for system in systems().values() if system.objective]
        flops = self._flops_per_step * (step - step_before) / (now - before)
        record = {
            "step": step,
            **{f"loss_{term}": None for objective in objectives for term in objective.coefficients},
            **{name: _finite(value) for name, value in metrics.items()},
            "tokens": tokens,
            "tokens_per_second": (tokens - tokens_before) / (now - before),
            "mfu": self._peak and flops / self._peak,
            "skipped": int(metrics["skipped"]),  # steps so far that did not count
            "seconds": now - self._began,
        }
        if self._is_writer:
            self._write(record)

    def show(self, step: int, samples: list[dict[str, Any]]) -> None:
        """Writes answers to tasks, in the form `TaskScores` returns."""
        for sample in samples if self._is_writer else ():
            self._samples.append({"step": step} | sample)
            parts = {name.capitalize(): sample[name] for name in ("asked", "answered", "right")}
            self._trackers.text(step, f"eval_{sample['task']}/{sample['problem']}", as_markdown(parts))

    def paused(self, seconds: float) -> None:
        """Excludes seconds without training from the rates."""
        step, tokens, before = self._last
        self._last = step, tokens, before + seconds

    def _write(self, record: dict) -> None:
        self._file.append(record)
        points = {name: x for name, x in record.items() if name != "step" and not (x is None or isinstance(x, bool))}
        self._trackers.log(record["step"], points)
        loss = "not finite" if record["loss"] is None else f"{record['loss']:.4f}"
        note = f"loss {loss}  {record['tokens_per_second']:,.0f} tokens/s"
        if record.get("eval_loss") is not None:
            note += f"  held-out loss {record['eval_loss']:.4f}"
        if self._bar:
            mfu = "" if record["mfu"] is None else f"  MFU {record['mfu']:.1%}"
            self._bar.update(self._task, completed=record["step"], note=note + mfu)
        else:
            command.say(f"step {record['step']:>6}  {note}")

    def close(self) -> None:
        if self._is_writer:
            self._file.close()
            self._samples.close()
            self._trackers.finish()
            if self._bar:
                self._bar.stop()


def read_metrics(workdir: epath.Path, up_to: float = float("inf")) -> list[dict]:
    """The records of a run up to a step, in the order of steps; invalid lines are skipped."""
    records = {record["step"]: record for record in _up_to(workdir / FILE, up_to)}
    return [records[step] for step in sorted(records)]


def _up_to(path: epath.Path, step: float) -> list[dict]:
    return [record for record in read_log(path) if isinstance(record.get("step"), int) and record["step"] <= step]


def _reopened(path: epath.PathLike, records: list[dict]) -> AppendLog:
    """Rewrites a log with these records, and opens it for appending."""
    write_file(path, "".join(json.dumps(record) + "\n" for record in records))
    return AppendLog(path, keeps_trying=True)


def _finite(value: np.ndarray | float | bool) -> float | bool | None:
    return value if isinstance(value, bool) else float(value) if np.isfinite(value) else None
