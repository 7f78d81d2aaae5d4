"""Runs a comparison: chooses learning rates, trains, measures. Every result is stored, so that it can resume.

All training comes before all decoding, so that this process holds no device while its child processes train.
"""

import dataclasses
import functools
import itertools
import json
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from flax import nnx

from refusion_jax.benchmarks.headline import measure, results
from refusion_jax.benchmarks.headline.curves import PROXY, Curve, Measured, claimed, curves, fastest_points
from refusion_jax.benchmarks.headline.experiment import BATCH_SIZES, Experiment, Point, TrainingRun
from refusion_jax.benchmarks.headline.results import Results, Scored, Timed, Trained, from_json
from refusion_jax.benchmarks.headline.runs import commit, train
from refusion_jax.benchmarks.headline.speed_proxy import SpeedProxy, proxy_model, read_shape
from refusion_jax.benchmarks.headline.tpu_estimates import tpu_estimates
from refusion_jax.checkpoints.contents import load_tokenizer
from refusion_jax.checkpoints.load import load_model
from refusion_jax.cli import command
from refusion_jax.cli.progress import track
from refusion_jax.decoding.auxiliary import with_auxiliaries
from refusion_jax.decoding.journal import Journal
from refusion_jax.decoding.player import Decodings, Scene, page
from refusion_jax.distributed.compiled_code import keep_for_user
from refusion_jax.distributed.json_files import read_json_lines, to_type
from refusion_jax.distributed.storage import write_file
from refusion_jax.systems.registry import find_decoder

Entry = tuple[TrainingRun, Point]  # a trained model at an operating point


class Comparison:
    """One comparison: its experiment, and its stored records."""

    def __init__(self, directory: Path, experiment: Experiment, store: Journal):
        self._directory, self._asked, self._store = directory, experiment, store
        self._config, self._budget = experiment.config, experiment.budget
        self._validation, self._test = experiment.held_out()
        self._began, self._commit = time.monotonic(), commit()

    def run(self) -> Results:
        """Makes missing records, and writes results.json after every model; Failure if a training run fails."""
        sweep, models, auxiliaries = self._train_all()
        runs = [run for run, _ in models]

        keep_for_user()
        found = Results(results.about(self._asked), sweep, [record for _, record in models], auxiliaries)
        for run in track(runs, "measuring", ticks=False):
            found.points += self._at_every_point(run)
            self._write(found)

        # Only the validation problems choose the settings that are timed, and scored on the test problems.
        measured = curves(found)
        chosen = self._on_first_seed(fastest_points(measured, [*map(str, BATCH_SIZES)]), runs)
        found.timings = self._timed(chosen)
        if self._budget.speed_proxy:
            compared = {curve.name: curve for _, *pair in claimed(measured) for curve in pair}
            near_best = [(curve, point) for curve in compared.values() for point in curve.near_best]
            found.proxy_timings = self._timed(self._on_first_seed(near_best, runs), self._budget.speed_proxy)
            fastest = [(curve, curve.fastest(PROXY)) for curve in curves(found) if curve.is_timed(PROXY)]
            chosen += self._on_first_seed(fastest, runs)
        found.tests = self._tested(chosen, runs)
        for curve in measured:
            first_seed = [point.scores[0] for point in curve.near_best]
            if not find_decoder(curve.decoder).settings.auxiliary_models:  # their forwards are not counted
                found.tpu_estimates += tpu_estimates(first_seed, self._budget.problems)
        self._write(found)
        self._play(chosen)
        return found

    def _write(self, found: Results) -> None:
        write_file(self._directory / "results.json", found.as_json())

    # Training

    def _train_all(self) -> tuple[list[Trained], list[tuple[TrainingRun, Trained]], list[Trained]]:
        """(runs that tried rates; runs whose models are measured, with their records; runs of further models)."""
        asked, sweep, rates = self._asked, [], {}
        for system in asked.systems:
            trials = [] if system in asked.rates else self._tried(system)
            sweep += trials
            best = min(trials, key=lambda trial: trial.final_loss, default=self._config)
            rates[system] = asked.rates.get(system, best.learning_rate)
        runs = [asked.whole(system, seed, rates[system]) for system, seed in asked.seeds]
        models = [(run, self._trained(run)) for run in track(runs, "training")]
        first_halves = {run.seed: (run, record) for run, record in models if run.system == asked.start}
        for system, count in asked.adapted.items():
            for seed in range(count):
                start, half = first_halves[seed]
                run = asked.adaptation(system, start, rates[system], self._directory)
                models.append((run, _continued(half, self._trained(run))))
        needed = [own for run, _ in models for own in asked.auxiliaries(run, self._directory).values()]
        return sweep, models, [self._trained(run) for run in track(needed, "training further models")]

    def _tried(self, system: str) -> list[Trained]:
        found = []
        while rate := self._asked.next_rate({trial.learning_rate: trial.final_loss for trial in found}):
            found.append(self._trained(self._asked.trial(system, rate), "try"))
        return found

    def _trained(self, run: TrainingRun, verb: str = "train") -> Trained:
        def make() -> dict[str, Any]:
            trained = train(run, self._directory)
            # To fail before any other run is trained for problems that do not fit:
            measure.check_fit(self._validation + self._test, load_tokenizer(self._workdir(run)), self._budget)
            about = {"system": run.system, "start": run.start, "seed": run.seed, "name": run.name}
            about |= {"command": run.command(self._directory), "learning_rate": run.changes["learning_rate"]}
            return about | trained

        return from_json(self._stored(f"{verb} {run.name}", make), Trained)

    # Decoding

    def _at_every_point(self, run: TrainingRun) -> list[Scored]:
        """Measures a run's model at all of its operating points."""
        found, decoder = [], None
        for point in self._asked.points(run.system):
            if point.decoder != decoder:
                jax.clear_caches()  # compiled programs use memory mappings, and a process can have only 65,530
            decoder = point.decoder

            def make(point: Point = point) -> dict[str, Any]:
                measured = measure.measure(self._validation, self._subject(run, point))
                return _about(run, point) | measured | {"where": results.where()}

            found.append(from_json(self._stored(f"measure {run.name}: {point}", make), Scored))
        return found

    def _tested(self, chosen: list[Entry], runs: list[TrainingRun]) -> list[Scored]:
        """Scores points on the test problems, with the models of all seeds; answers are kept in DIR/answers."""
        found, once = [], {f"{run.name} {point}": (run, point) for run, point in chosen}
        for run in runs:
            for first, point in once.values():
                if (run.system, run.start) != (first.system, first.start):
                    continue

                def make(run: TrainingRun = run, point: Point = point) -> dict[str, Any]:
                    subject = self._subject(run, point)
                    decodings = Decodings(f"{run.name} {point}", subject.tokenizer)
                    record, texts, _ = measure.score(self._test, subject, decodings=decodings)
                    self._keep_answers(f"{run.name} {point}", texts, decodings)
                    return _about(run, point) | record

                found.append(from_json(self._stored(f"test {run.name}: {point}", make), Scored))
                jax.clear_caches()
        return found

    def _keep_answers(self, name: str, texts: list[str], decodings: Decodings) -> None:
        lines = [
            {"query": problem.query, "response": problem.response, "answer": text}
            for problem, text in zip(self._test, texts, strict=True)
        ]
        for index, scene in decodings.scenes.items():
            lines[index]["scene"] = dataclasses.asdict(scene)
        write_file(self._answers(name), "".join(json.dumps(line) + "\n" for line in lines))

    def _answers(self, name: str) -> Path:
        return self._directory / "answers" / f"{name}.jsonl"

    def _play(self, chosen: list[Entry]) -> None:
        """Writes a page of the first test problems, as decoded by the first model of each curve."""
        names = {}
        for run, point in chosen:
            names.setdefault((run.name, point.decoder), f"{run.name} {point}")
        kept = [itertools.islice(read_json_lines(self._answers(name)), measure.PLAYED) for name in names.values()]
        rows = [[to_type(line["scene"], Scene, "answers") for _, line in row] for row in zip(*kept, strict=True)]
        if rows:
            write_file(self._directory / "decodings.html", page(list(enumerate(rows))))

    def _timed(self, entries: list[Entry], shape: str = "") -> list[Timed]:
        """The speeds of points in interleaved repeats, stored as one record, since they compare only with each other.

        With a shape, at the cost of a proxy of that shape.
        """
        if not entries:
            return []

        def make() -> dict[str, Any]:
            jax.clear_caches()
            models = {run.name: self._load(self._workdir(run)) for run, _ in entries}
            problems, about = self._validation[: self._budget.timed], {}
            sizes, repeats = BATCH_SIZES, measure.REPEATS
            if shape:
                proxy = proxy_model(*read_shape(shape), models[entries[0][0].name])
                models = {name: SpeedProxy(model, proxy) for name, model in models.items()}
                about = {"shape": shape, "parameters": sum(x.size for x in jax.tree.leaves(nnx.state(proxy)))}
                problems, sizes, repeats = problems[: measure.PROXY_PROBLEMS], BATCH_SIZES[:1], measure.PROXY_REPEATS
            subjects = [self._subject(run, point, models[run.name]) for run, point in entries]
            timings = measure.interleaved(subjects, problems, sizes, repeats)
            for (run, point), record in zip(entries, timings, strict=True):
                record |= _about(run, point) | about
            return {"timings": timings, "where": results.where()}

        checksum = zlib.crc32("; ".join(f"{run.name} {point}" for run, point in entries).encode())
        stored = self._stored(f"time {len(entries)} settings{f' at {shape}' * bool(shape)} ({checksum:08x})", make)
        common = {name: stored[name] for name in ("commit", "where")}
        return [from_json(record | common, Timed) for record in stored["timings"]]

    def _on_first_seed(self, chosen: list[tuple[Curve, Measured]], runs: list[TrainingRun]) -> list[Entry]:
        first, found = {(run.system, run.start): run for run in reversed(runs)}, []
        for curve, measured in chosen:
            points = {(point.decoder, point.label): point for point in self._asked.points(curve.system)}
            found.append((first[curve.system, curve.start], points[curve.decoder, measured.settings]))
        return found

    def _workdir(self, run: TrainingRun) -> Path:
        return self._directory / "runs" / run.name

    def _subject(self, run: TrainingRun, point: Point, model: Any = None) -> measure.Subject:
        path, needed = self._workdir(run), self._asked.auxiliaries(run, self._directory).items()
        model = model or self._load(path)
        further = {name: self._load(self._workdir(own)) for (of, name), own in needed if of == point.decoder}
        return measure.Subject(point, with_auxiliaries(model, **further), load_tokenizer(path), self._budget)

    @functools.lru_cache(2)  # noqa: B019  a process has one comparison; a model and an auxiliary one
    def _load(self, path: Path):
        return load_model(path, self._config.dtype)

    def _stored(self, key: str, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The record of a run or measurement, from an earlier session or made now. Prints the progress."""
        if key not in self._store.records:
            began = time.monotonic()
            record = make() | {"commit": self._commit}
            self._store.add(key, record)
            now = time.monotonic()
            outcome = f": {record['accuracy']:.1%}" if "accuracy" in record else ""
            command.say(f"{(now - self._began) / 60:.1f} min, the last {(now - began) / 60:.1f}: {key}{outcome}")
        return self._store.records[key]


def _about(run: TrainingRun, point: Point) -> dict[str, Any]:
    about = {"system": run.system, "start": run.start, "seed": run.seed}
    return about | {"decoder": point.decoder, "settings": point.label}


def _continued(start: Trained, adapted: Trained) -> Trained:
    """The record of an adapted run, preceded by the steps and tokens of the first half."""
    half = adapted.losses[-1].step
    seen = next(logged.tokens for logged in start.losses if logged.step == half)
    losses = [
        dataclasses.replace(logged, step=half + logged.step, tokens=seen + logged.tokens) for logged in adapted.losses
    ]
    return dataclasses.replace(adapted, tokens=seen + adapted.tokens, losses=losses)
