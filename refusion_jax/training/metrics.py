"""Where the numbers of a run go: metrics.jsonl, TensorBoard, and the terminal."""

import json
import sys
import time

import jax
import numpy as np
import tensorboardX
from etils import epath
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from refusion_jax.model.flops import peak_flops
from refusion_jax.runtime.errors import UserError
from refusion_jax.runtime.storage import LogDirectory
from refusion_jax.systems.registry import loss_terms
from refusion_jax.training.train_step import wide_to_int
from refusion_jax.training.workdir import write_file


class MetricsWriter:
    """Writes each logged step; a resumed run continues the files as if it had never stopped.

    Rates are taken between logged steps. `seconds` counts the time spent training, over all sessions of the run.
    """

    def __init__(
        self,
        workdir: epath.Path,
        logs: LogDirectory,
        last_step: int,
        first_step: int,
        tokens: int,
        flops_per_step: float,
        devices: np.ndarray,
    ):
        """Opens the files and drops what a killed run had logged behind its last checkpoint.

        Args:
          workdir: the run's directory.
          logs: where its files are appended to.
          last_step: steps of the whole run.
          first_step: steps taken so far.
          tokens: trained on so far.
          flops_per_step: model FLOPs, for the MFU.
          devices: that share the work.
        """
        kept = read_metrics(workdir, up_to=first_step)
        peak = peak_flops(devices.flat[0].device_kind)
        self._flops_per_step = flops_per_step
        self._peak = peak and peak * devices.size
        self._began = time.monotonic() - (kept[-1]["seconds"] if kept else 0.0)
        self._last = first_step, tokens, time.monotonic()
        self._is_writer = jax.process_index() == 0
        if not self._is_writer:
            return
        write_file(logs.path / "metrics.jsonl", "".join(json.dumps(record) + "\n" for record in kept))
        self._file = (logs.path / "metrics.jsonl").open("a")
        self._board = tensorboardX.SummaryWriter(str(logs.path / "tensorboard"), purge_step=first_step + 1)
        self._bar = None
        if sys.stdout.isatty():
            columns = (TextColumn("step"), MofNCompleteColumn(), BarColumn(), TimeRemainingColumn())
            self._bar = Progress(*columns, TextColumn("{task.fields[note]}"))
            self._task = self._bar.add_task("training", total=last_step, completed=first_step, note="compiling")
            self._bar.start()

    def write(self, step: int, metrics: dict[str, jax.Array]) -> None:
        """Waits for the metrics of a step and writes its record; UserError where they are not finite."""
        check_finite(step, metrics)
        metrics = jax.device_get(metrics)
        tokens = wide_to_int(metrics.pop("tokens"))
        now = time.monotonic()
        step_before, tokens_before, before = self._last
        self._last = step, tokens, now
        record = (
            {"step": step}
            | {f"loss_{term}": None for term in loss_terms()}
            | {k: _finite(v) for k, v in metrics.items()}
        )
        flops = self._flops_per_step * (step - step_before) / (now - before)
        record |= {
            "tokens": tokens,
            "tokens_per_second": (tokens - tokens_before) / (now - before),
            "mfu": self._peak and flops / self._peak,
            "seconds": now - self._began,
        }
        if self._is_writer:
            self._write(record)

    def _write(self, record: dict) -> None:
        print(json.dumps(record), file=self._file, flush=True)
        for name, value in record.items():
            if name != "step" and value is not None:
                self._board.add_scalar(name, value, record["step"])
        note = f"loss {record['loss']:.4f}  {record['tokens_per_second']:,.0f} tokens/s"
        if record.get("eval_loss") is not None:
            note += f"  held-out loss {record['eval_loss']:.4f}"
        if self._bar:
            self._bar.update(self._task, completed=record["step"], note=note)
        else:
            print(f"step {record['step']:>6}  {note}", flush=True)

    def close(self) -> None:
        """Flushes and closes the files."""
        if self._is_writer:
            self._file.close()
            self._board.close()
            if self._bar:
                self._bar.stop()


def check_finite(step: int, metrics: dict[str, jax.Array]) -> None:
    """Waits for a step; UserError where its loss or gradient is not finite: all that follows would be garbage."""
    loss, grad_norm = (float(metrics[name]) for name in ("loss", "grad_norm"))
    if not np.isfinite([loss, grad_norm]).all():
        raise UserError(
            f"training diverged at step {step} (loss {loss}, gradient norm {grad_norm}): the checkpoints before it are "
            f"whole; start a new --workdir with a lower --config.learning_rate or more --config.warmup_steps"
        )


def read_metrics(workdir: epath.Path, up_to: int | None = None) -> list[dict]:
    """The logged records of a run, up to a step; a last line that a kill cut off is left out."""
    path = workdir / "metrics.jsonl"
    records = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            record = json.loads(line)
        except ValueError:
            break
        if up_to is None or record["step"] <= up_to:
            records.append(record)
    return records


def _finite(value: np.ndarray) -> float | None:
    return float(value) if np.isfinite(value) else None
