"""Runs a comparison: chooses learning rates, trains, measures. Every result is stored, so that it can resume.

All training comes before all decoding, so that this process holds no device while its child processes train.
"""

import functools
import json
import math
import re
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax

from refusion_jax.benchmarks.headline import results
from refusion_jax.benchmarks.headline.curves import PROXY, Curve, Measured, Timings, claimed, curves, fastest_points
from refusion_jax.benchmarks.headline.experiment import (
    BATCH_SIZES,
    Experiment,
    Point,
    Run,
    ablations,
    adapted_run,
    first_rates,
    held_out,
    next_rate,
    operating_points,
    trial_run,
    whole_run,
)
from refusion_jax.benchmarks.headline.measure import (
    PROXY_PROBLEMS,
    PROXY_REPEATS,
    REPEATS,
    Subject,
    check_fit,
    interleaved,
    measure,
    score,
)
from refusion_jax.benchmarks.headline.result_store import ResultStore
from refusion_jax.benchmarks.headline.results import Results, Scored, Timed, Trained
from refusion_jax.benchmarks.headline.runs import commit, train
from refusion_jax.benchmarks.headline.speed_proxy import read_shape, with_proxies
from refusion_jax.benchmarks.headline.tpu_estimates import tpu_estimates
from refusion_jax.checkpoints.directory import saved_steps
from refusion_jax.checkpoints.load import load_model, load_tokenizer
from refusion_jax.cli import command
from refusion_jax.data.families import mixture
from refusion_jax.distributed.compiled_code import keep_compiled
from refusion_jax.distributed.storage import write_file


class Comparison:
    """One comparison: what is asked for, and what is stored of it."""

    def __init__(self, directory: Path, experiment: Experiment, store: ResultStore):
        """Nothing is done before `run`.

        Args:
          directory: of the comparison.
          experiment: what is asked for.
          store: results of earlier sessions.
        """
        self._directory, self._asked, self._store = directory, experiment, store
        self._config, self._budget = experiment.config, experiment.budget
        self._points = {name: operating_points(name, self._budget, self._config) for name in experiment.systems}
        self._mixture = mixture(self._config.data.difficulty)
        self._validation, self._test = held_out(self._config, self._budget)
        self._began, self._commit = time.monotonic(), commit()

    def run(self) -> Results:
        """Makes what is missing; writes results.json after every model.

        Raises:
          Failure: where a training run fails; what is finished is kept.
        """
        sweep, models = self._train_all()
        runs = [run for run, _ in models]

        keep_compiled(self._directory / "compilation_cache", "own")
        found = Results(results.about(self._asked), sweep, [record for _, record in models])
        for run in runs:
            found.points += self._at_every_point(run)
            if self._asked.with_ablations and not run.start:
                found.ablations += self._ablated(run)
            self._write(found)

        # The validation problems alone choose the settings that are timed, and scored on the test problems.
        measured = curves(found)
        chosen = fastest_points(measured, [*map(str, BATCH_SIZES)])
        found.timings = self._timed([self._on_first_seed(runs, *entry) for entry in chosen])
        found.proxy_timings = self._timed_at_proxy(measured, runs)
        timings = Timings.of(found)
        chosen += [(c, timings.chosen(c, PROXY)) for c in measured if timings.has(c, PROXY)]
        found.tests = self._tested({(curve.name, point.settings): (curve, point) for curve, point in chosen}, runs)
        found.tpu_estimates = [
            estimate
            for curve in measured
            for estimate in tpu_estimates(_near_best(curve, found.points), self._budget.problems)
        ]
        self._write(found)
        return found

    def _write(self, found: Results) -> None:
        write_file(self._directory / "results.json", found.as_json())

    # Training

    def _train_all(self) -> tuple[list[Trained], list[tuple[Run, Trained]]]:
        """(runs that tried learning rates; runs whose models are measured, with their records)."""
        asked, config, sweep, rates = self._asked, self._config, [], {}
        for system in asked.systems:
            trials = self._tried(system)
            sweep += trials
            rates[system] = min(trials, key=_final_loss)["learning_rate"] if trials else config.learning_rate
        runs = [whole_run(system, seed, rates[system], asked.file) for system, seed in asked.seeds]
        models = [(run, self._trained(run)) for run in runs]
        first_halves = {run.seed: (run, record) for run, record in models if run.system == asked.start}
        for system, count in asked.adapted.items():
            for seed in range(count):
                start, half = first_halves[seed]
                run = adapted_run(system, start, rates[system], config, asked.file, self._directory)
                models.append((run, _continued(half, self._trained(run))))
        return sweep, models

    def _tried(self, system: str) -> list[Trained]:
        """A short run for each learning rate that is tried."""

        def tried(rate: float) -> Trained:
            run = trial_run(system, rate, self._budget, self._config, self._asked.file)
            return self._stored(f"try {run.name}", lambda: self._train(run))

        found = [tried(rate) for rate in first_rates(self._budget, self._config)]
        while rate := next_rate({trial["learning_rate"]: _final_loss(trial) for trial in found}, self._budget):
            found.append(tried(rate))
        return found

    def _trained(self, run: Run) -> Trained:
        return self._stored(f"train {run.name}", lambda: self._train(run))

    def _train(self, run: Run) -> dict[str, Any]:
        trained = train(run, self._directory, command.say)
        # Before any other run is trained for problems that do not fit:
        check_fit(self._validation + self._test, load_tokenizer(self._workdir(run)), self._budget)
        about = {"system": run.system, "start": run.start, "seed": run.seed, "name": run.name}
        about |= {"command": run.command(self._directory), "learning_rate": run.changes["learning_rate"]}
        return about | trained

    # Decoding

    def _at_every_point(self, run: Run) -> list[Scored]:
        """Measures the model of a run at all its operating points."""
        load = functools.cache(lambda: self._load(self._workdir(run)))
        found, decoder = [], None
        for point in self._points[run.system]:
            if point.decoder != decoder:
                jax.clear_caches()  # compiled programs use memory mappings, and a process can have only 65,530
            decoder = point.decoder

            def make(point: Point = point) -> dict[str, Any]:
                measured = measure(self._mixture, self._validation, Subject(point, *load()), self._budget)
                return _about(run, point) | measured | {"where": results.where()}

            found.append(self._stored(f"measure {run.name}: {point}", make))
        return found

    def _ablated(self, run: Run) -> list[Scored]:
        """Scores the checkpoints of a run at the points of its system's ablations."""
        found, workdir, every = [], self._workdir(run), self._config.checkpoint.every
        steps = {step for step in saved_steps(workdir) if not step % every or step == self._config.steps}
        known = re.compile(rf"ablation {re.escape(run.name)} at step (\d+), ")
        steps |= {int(key[1]) for key in map(known.match, self._store.records) if key}  # also where the run is gone
        for step in sorted(steps):
            load = functools.cache(lambda step=step: self._load(workdir / "checkpoints" / str(step)))
            for title, points in ablations(run.system, self._budget, self._config).items():
                for point in points:

                    def make(point: Point = point, load: Callable = load) -> dict[str, Any]:
                        subject = Subject(point, *load())
                        record, *_ = score(self._mixture, self._validation, subject, self._budget)
                        return _about(run, point) | record

                    record = self._stored(f"ablation {run.name} at step {step}, {title}: {point}", make)
                    found.append(record | {"ablation": title, "step": step})
            jax.clear_caches()
        return found

    def _tested(self, chosen: dict[Any, tuple[Curve, Measured]], runs: list[Run]) -> list[Scored]:
        """Scores points on the test problems, on the models of all seeds; their answers are kept in DIR/answers."""
        found = []
        for run in runs:
            for curve, measured in chosen.values():
                if (run.system, run.start) != (curve.system, curve.start):
                    continue
                point = self._point(curve, measured)

                def make(run: Run = run, point: Point = point) -> dict[str, Any]:
                    subject = Subject(point, *self._load(self._workdir(run)))
                    record, texts, _ = score(self._mixture, self._test, subject, self._budget)
                    self._keep_answers(f"{run.name} {point}", texts)
                    return _about(run, point) | record

                found.append(self._stored(f"test {run.name}: {point}", make))
                jax.clear_caches()
        return found

    def _keep_answers(self, name: str, texts: list[str]) -> None:
        lines = [
            json.dumps({"query": problem.query, "response": problem.response, "answer": text})
            for problem, text in zip(self._test, texts, strict=True)
        ]
        write_file(self._directory / "answers" / f"{name}.jsonl", "\n".join(lines) + "\n")

    def _timed(self, entries: list[tuple[Run, Point]]) -> list[Timed]:
        """The speeds of points in interleaved repeats."""

        def make() -> dict[str, Any]:
            subjects = [Subject(point, *self._load(self._workdir(run))) for run, point in entries]
            return interleaved(subjects, self._validation[: self._budget.timed], BATCH_SIZES, REPEATS, self._budget)

        return self._stored_timings(f"time {len(entries)} settings ({_checksum(entries)})", entries, make)

    def _timed_at_proxy(self, measured: Sequence[Curve], runs: list[Run]) -> list[Timed]:
        """The speeds at the cost of the speed proxy of what papers make claims about, near the best accuracy."""
        compared = {curve.name: curve for _, *pair in claimed(measured) for curve in pair}
        entries = [self._on_first_seed(runs, curve, p) for curve in compared.values() for p in curve.near_best]
        shape = self._budget.speed_proxy
        if not shape or not entries:
            return []

        def make() -> dict[str, Any]:
            loaded = {run.name: self._load(self._workdir(run)) for run, _ in entries}
            trained = {name: model for name, (model, _) in loaded.items()}
            larger = with_proxies(trained, *read_shape("speed_proxy", shape))
            subjects = [Subject(point, larger[run.name], loaded[run.name][1]) for run, point in entries]
            problems = self._validation[: min(PROXY_PROBLEMS, self._budget.timed)]
            found = interleaved(subjects, problems, BATCH_SIZES[:1], PROXY_REPEATS, self._budget)
            return [
                record | {"shape": shape, "parameters": subject.model.parameters}
                for record, subject in zip(found, subjects, strict=True)
            ]

        return self._stored_timings(f"time {len(entries)} settings at {shape} ({_checksum(entries)})", entries, make)

    def _stored_timings(
        self, key: str, entries: list[tuple[Run, Point]], make: Callable[[], list[dict[str, Any]]]
    ) -> list[Timed]:
        """The speeds of some points, which are stored as one record, since they compare only with each other."""

        def timed() -> dict[str, Any]:
            jax.clear_caches()
            about = [_about(run, point) for run, point in entries]
            records = [own | record for own, record in zip(about, make(), strict=True)]
            return {"timings": records, "where": results.where()}

        stored = self._stored(key, timed)
        return [record | {name: stored[name] for name in ("commit", "where")} for record in stored["timings"]]

    def _on_first_seed(self, runs: list[Run], curve: Curve, measured: Measured) -> tuple[Run, Point]:
        """A point of a curve, and the first run of its models."""
        run = next(run for run in runs if (run.system, run.start) == (curve.system, curve.start))
        return run, self._point(curve, measured)

    def _point(self, curve: Curve, measured: Measured) -> Point:
        """The operating point that was measured."""
        key = curve.decoder, measured.settings
        return next(point for point in self._points[curve.system] if (point.decoder, point.label) == key)

    def _workdir(self, run: Run) -> Path:
        return self._directory / "runs" / run.name

    def _load(self, path: Path) -> tuple:
        return load_model(path, self._config.dtype), load_tokenizer(path)

    def _stored(self, key: str, make: Callable[[], dict[str, Any]]) -> Any:
        """The record of a run or measurement, from an earlier session or made now. Prints the progress."""
        if key not in self._store.records:
            began = time.monotonic()
            record = make() | {"commit": self._commit}
            self._store.add(key, record)
            now = time.monotonic()
            outcome = f": {record['accuracy']:.1%}" if "accuracy" in record else ""
            command.say(f"{(now - self._began) / 60:.1f} min, the last {(now - began) / 60:.1f}: {key}{outcome}")
        return self._store.records[key]


def _about(run: Run, point: Point) -> dict[str, Any]:
    """What a record of a point begins with."""
    about = {"system": run.system, "start": run.start, "seed": run.seed}
    return about | {"decoder": point.decoder, "settings": point.label}


def _near_best(curve: Curve, points: Sequence[Scored]) -> list[Scored]:
    """The records of a curve near its best accuracy, of the first seed."""
    near = {point.settings for point in curve.near_best}
    key = curve.system, curve.decoder, curve.start
    own = [p for p in points if (p["system"], p["decoder"], p["start"]) == key and p["settings"] in near]
    return [point for point in own if point["seed"] == own[0]["seed"]]


def _continued(start: Trained, adapted: Trained) -> Trained:
    """The record of an adapted run, with the steps and tokens of the first half before its own.

    Args:
      start: record of the run whose weights it started from.
      adapted: its own record.
    """
    half = adapted["losses"][-1]["step"]
    seen = next(record["tokens"] for record in start["losses"] if record["step"] == half)
    losses = [
        record | {"step": half + record["step"], "tokens": seen + record["tokens"]} for record in adapted["losses"]
    ]
    return adapted | {"tokens": seen + adapted["tokens"], "losses": losses}


def _checksum(entries: list[tuple[Run, Point]]) -> str:
    """Tells one list of points from another."""
    return f"{zlib.crc32('; '.join(f'{run.name} {point}' for run, point in entries).encode()):08x}"


def _final_loss(trial: Trained) -> float:
    """The held-out loss at the end."""
    return trial["losses"][-1].get("eval_loss", math.inf)  # it is missing where it was not finite
