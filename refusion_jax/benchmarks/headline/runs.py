"""Starts training runs as child processes, by `python -m refusion_jax.train`.

A run that was killed resumes, and runs share neither memory nor compiled programs.
"""

import contextlib
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from refusion_jax.benchmarks.headline.experiment import TrainingRun
from refusion_jax.benchmarks.headline.results import Logged, from_json, to_json
from refusion_jax.cli import command
from refusion_jax.cli.errors import Failure
from refusion_jax.distributed.preemption import EXIT_CODE
from refusion_jax.training.metrics import read_metrics

_NEWS_SECONDS = 60.0


def train(run: TrainingRun, directory: Path) -> dict[str, Any]:
    """Trains a run to its end, resuming if it was interrupted; prints its progress about once a minute.

    Returns the fields of `results.Trained` that metrics.jsonl has. Raises Failure, with the last line of its log, if
    training fails.
    """
    workdir, log = directory / "runs" / run.name, directory / "runs" / f"{run.name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    code = EXIT_CODE
    while code == EXIT_CODE:  # it was preempted and has saved: resume
        code = _run([sys.executable, "-m", "refusion_jax.train", *run.flags(directory)], log, workdir)
    if code:
        last = (log.read_text(errors="replace").strip().splitlines() or ["it said nothing"])[-1]
        raise Failure(f"training {run.name} ended with exit code {code}: {last[:300]} (all of it is in {log})")
    records = read_metrics(workdir)
    losses = [to_json(from_json(record, Logged)) for record in records]
    return {"seconds": records[-1]["seconds"], "tokens": records[-1]["tokens"], "losses": losses}


def _run(line: list[str], log: Path, workdir: Path) -> int:
    """Runs a command and returns its exit code. If this process is terminated, so is the child, which saves its run."""
    with log.open("ab") as out:
        process = subprocess.Popen(line, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT)
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return process.wait(_NEWS_SECONDS)
            if records := read_metrics(workdir):
                command.say(f"... step {records[-1]['step']}, loss {records[-1]['loss'] or float('nan'):.3f}")
    finally:
        signal.signal(signal.SIGTERM, before)
        process.terminate()  # no effect if it has ended
        process.wait()


def commit() -> str:
    """The commit of this checkout, followed by + if its code or configs differ from it; empty outside a checkout."""

    def git(*arguments: str) -> str:
        line = ["git", "-C", Path(__file__).parent, *arguments]
        return subprocess.run(line, capture_output=True, text=True, check=True).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--", ":/refusion_jax", ":/configs")  # also new files
        return git("rev-parse", "--short=12", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return ""
