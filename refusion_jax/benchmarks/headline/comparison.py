"""Runs a comparison: chooses learning rates, trains, measures. Each finished piece is saved, so that it can resume.

All training comes before all decoding, so that this process holds no device while its child processes train.
"""

import collections
import dataclasses
import functools
import math
import re
import statistics
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from refusion_jax.benchmarks.headline import results
from refusion_jax.benchmarks.headline.curves import REPLAY, Curve, Turns, claimed, curves, shown
from refusion_jax.benchmarks.headline.measure import (
    REPLAY_TURNS,
    REPLAYED,
    TURNS,
    check_fit,
    in_turns,
    measure,
    score,
)
from refusion_jax.benchmarks.headline.pieces import Pieces
from refusion_jax.benchmarks.headline.plan import (
    BATCH_SIZES,
    Plan,
    Point,
    Run,
    adapted_run,
    first_rates,
    held_out,
    next_rate,
    operating_points,
    studies,
    text_run,
    trial_run,
    whole_run,
)
from refusion_jax.benchmarks.headline.runs import commit, train
from refusion_jax.benchmarks.headline.tpu_estimates import tpu_estimates
from refusion_jax.benchmarks.replay.beside import beside, read_shape
from refusion_jax.checkpoints.directory import saved_steps
from refusion_jax.checkpoints.load import load_model, load_tokenizer
from refusion_jax.cli import command
from refusion_jax.data.families import mixture
from refusion_jax.data.interface import Tokenizer
from refusion_jax.data.problems import Problem
from refusion_jax.distributed.compiled_code import keep_compiled
from refusion_jax.distributed.storage import write_file
from refusion_jax.model.transformer import Transformer
from refusion_jax.systems.registry import find_system

_TIMED = ("measure", "turns")  # kinds of pieces; the others do not ask for the device


class Comparison:
    """The pieces of one comparison, finished and to do."""

    def __init__(self, directory: Path, plan: Plan, pieces: Pieces):
        """Counts all pieces; `run` does the work.

        Args:
          directory: of the comparison.
          plan: what is asked for.
          pieces: finished in earlier sessions.
        """
        self._directory, self._plan, self._commit, self._pieces = directory, plan, commit(), pieces
        self._config, self._budget, self._file, self._systems = plan.config, plan.budget, plan.file, plan.systems
        self._scored = [name for name in plan.systems if plan.text and find_system(name).scoring]  # by likelihood
        self._points = {system: operating_points(system, self._budget, self._config) for system in plan.systems}
        self._studies = {
            system: studies(system, self._budget, self._config) if plan.with_studies else {} for system in plan.systems
        }
        self._mixture = mixture(self._config.data.difficulty)
        self._validation, self._test = held_out(self._config, self._budget)
        self._began, self._took, self._left = time.monotonic(), collections.defaultdict(list), self._count()
        self._total = self._left.total()

    def _count(self) -> collections.Counter:
        """The number of pieces of each kind."""
        seeds, models = self._systems, [*self._systems.items(), *self._plan.adapted.items()]
        each = {"try": len(self._budget.rates) * len(self._systems)}
        each["train"] = sum(count for _, count in models) + sum(seeds[system] for system in self._scored)
        each["measure"] = sum(count * len(self._points[system]) for system, count in models)
        checkpoints = min(-(-self._config.steps // self._config.checkpoint.every), self._config.checkpoint.keep)
        points = sum(seeds[system] * sum(map(len, own.values())) for system, own in self._studies.items())
        return collections.Counter(each | {"turns": 1 + bool(self._budget.replay), "study": checkpoints * points})

    def run(self) -> dict[str, Any]:
        """Runs the missing pieces, and writes results.json after every model.

        Returns:
          The content of results.json.

        Raises:
          Failure: where a training run fails; finished pieces are kept.
        """
        trials = {system: self._trials(system) for system in self._systems}
        rates, seeds = {system: self._best(own) for system, own in trials.items()}, self._plan.seeds
        runs = [whole_run(system, seed, rates[system], self._file) for system, seed in seeds]
        texts = [
            text_run(system, seed, rates[system] / self._config.learning_rate, self._plan.text, self._budget.text)
            for system, seed in seeds
            if system in self._scored
        ]
        adapted = [
            adapted_run(system, run, rates[system], self._config, self._file, self._directory)
            for run in runs
            if run.system == self._plan.start
            for system, count in self._plan.adapted.items()
            if run.seed < count
        ]
        trained, texts, continued = map(self._trained, (runs, texts, adapted))
        begun = {(record["system"], record["seed"]): record for record in trained}
        trained += [results.continued(begun[run["start"], run["seed"]], run) for run in continued]
        runs += adapted
        keep_compiled(self._directory / "compilation_cache", "own")
        found = results.about(self._plan)
        found |= {"sweep": [trial for own in trials.values() for trial in own], "runs": trained, "texts": texts}
        found |= {"points": [], "tests": [], "turns": [], "replays": [], "studies": [], "tpu_estimates": []}
        for run in runs:
            found["points"] += self._measured(run)
            found["studies"] += [] if run.start else self._studied(run)
            self._write(found)
        chosen = self._shown(found)  # by the validation problems alone
        found["turns"] = self._in_turns([(self._first(curve, runs), point) for curve, point in chosen])
        found["replays"] = self._replayed(found, runs)
        found["tests"] = self._tested([*chosen, *self._shown_of_replay(found, chosen)], runs)
        found["tpu_estimates"] = self._estimated(found)
        self._write(found)
        return found

    def _write(self, found: dict[str, Any]) -> None:
        """Writes the results so far, with the commits of the code that made them."""
        kinds = "sweep", "runs", "texts", "points", "tests", "turns", "replays", "studies"
        made = [piece for kind in kinds for piece in found[kind]]
        found["commits"] = sorted({piece["commit"] for piece in made})
        timed = [piece for kind in ("points", "turns", "replays") for piece in found[kind]]
        found["where"] = sorted({piece["where"] for piece in timed})
        write_file(self._directory / "results.json", results.as_json(found))

    def _trials(self, system: str) -> list[dict[str, Any]]:
        """The outcome of each learning rate that is tried."""
        found = [self._try(system, rate) for rate in first_rates(self._budget, self._config)]
        while rate := next_rate({trial["learning_rate"]: _final_loss(trial) for trial in found}, self._budget):
            self._left["try"] += 1
            self._total += 1
            found.append(self._try(system, rate))
        return found

    def _try(self, system: str, rate: float) -> dict[str, Any]:
        run = trial_run(system, rate, self._budget, self._config, self._file)
        return self._piece("try", f"try {run.name}", lambda: self._train(run))

    def _best(self, trials: list[dict[str, Any]]) -> float:
        """The learning rate with the lowest final held-out loss; the config's where none was tried."""
        return min(trials, key=_final_loss)["learning_rate"] if trials else self._config.learning_rate

    def _trained(self, runs: list[Run]) -> list[dict[str, Any]]:
        """The records of some runs, each trained to its end."""
        return [
            self._piece("train", f"train {run.name}", functools.partial(self._train, run)) | {"start": run.start}
            for run in runs
        ]

    def _train(self, run: Run) -> dict[str, Any]:
        record = {"system": run.system, "seed": run.seed, "name": run.name, "command": run.command(self._directory)}
        trained = train(run, self._directory, command.say)
        if run.config == self._file:  # before any other run is trained for problems that do not fit
            tokenizer = load_tokenizer(self._directory / "runs" / run.name)
            check_fit(self._validation + self._test, tokenizer, self._budget)
        return record | {"learning_rate": run.changes["learning_rate"]} | trained

    def _measured(self, run: Run) -> list[dict[str, Any]]:
        """Measures the model of a run at all its operating points."""
        load = functools.cache(lambda: self._load(self._directory / "runs" / run.name))
        found, decoder = [], None
        for point in self._points[run.system]:
            if point.decoder != decoder:
                jax.clear_caches()  # compiled programs use memory mappings, and a process can have only 65,530
            decoder = point.decoder
            key = f"measure {run.name}: {decoder} {point.label}"
            piece = self._piece_at("measure", key, self._measure, run, point, load)
            found.append(piece | {"start": run.start})
        return found

    def _shown(self, found: dict[str, Any]) -> list[tuple[Curve, Point]]:
        """The points that the page shows."""
        return [
            (curve, point)
            for curve, chosen in shown(curves(found), [*map(str, BATCH_SIZES)])
            for point in self._points[curve.system]
            if (point.decoder, point.label) == (curve.decoder, chosen.settings)
        ]

    def _tested(self, chosen: list[tuple[Curve, Point]], runs: list[Run]) -> list[dict[str, Any]]:
        """Scores the points that the page shows on the test problems, on the models of all seeds."""
        entries = [
            (run, point)
            for run in runs
            for curve, point in chosen
            if (run.system, run.start) == (curve.system, curve.start)
        ]
        self._left["test"], found = len(entries), []
        self._total += len(entries)
        for run, point in entries:
            load = functools.partial(self._load, self._directory / "runs" / run.name)
            key = f"test {run.name}: {point.decoder} {point.label}"
            piece = self._piece_at("test", key, functools.partial(self._score, self._test), run, point, load)
            found.append(piece | {"start": run.start})
            jax.clear_caches()
        return found

    def _in_turns(self, points: list[tuple[Run, Point]]) -> list[dict[str, Any]]:
        """The speeds of points, on the models of the first seed."""
        key = f"time {len(points)} settings in {TURNS} turns ({_checksum(points)})"
        return self._timed(key, points, lambda: in_turns(self._models(points), self._timing_problems, self._budget))

    def _replayed(self, found: dict[str, Any], runs: list[Run]) -> list[dict[str, Any]]:
        """The speeds of what the papers' claims are about near the best accuracy, at the price of larger weights."""
        compared = {curve.name: curve for _, *pair in claimed(curves(found)) for curve in pair}
        points, shape = [entry for curve in compared.values() for entry in self._near(curve, runs)], self._budget.replay
        if not shape or not points:
            self._left["turns"] = 0
            return []

        def time_them() -> list[dict[str, Any]]:
            loaded = {run.name: self._load(self._directory / "runs" / run.name) for run, _ in points}
            larger = beside({name: model for name, (model, _) in loaded.items()}, *read_shape("replay", shape))
            entries = [(point, larger[run.name], loaded[run.name][1]) for run, point in points]
            few = self._timing_problems[:REPLAYED]
            timed = in_turns(entries, few, self._budget, BATCH_SIZES[:1], REPLAY_TURNS)
            return [
                record | {"shape": shape, "parameters": model.parameters}
                for record, (_, model, _) in zip(timed, entries, strict=True)
            ]

        key = f"time {len(points)} settings at {shape} in {REPLAY_TURNS} turns ({_checksum(points)})"
        return self._timed(key, points, time_them)

    def _timed(
        self, key: str, points: list[tuple[Run, Point]], time_them: Callable[[], list[dict[str, Any]]]
    ) -> list[dict[str, Any]]:
        """The piece with the times of some points, as one record a point."""

        def make() -> dict[str, Any]:
            jax.clear_caches()
            about = [
                {"system": run.system, "start": run.start, "decoder": point.decoder, "settings": point.label}
                for run, point in points
            ]
            return {"turns": [own | record for own, record in zip(about, time_them(), strict=True)]}

        piece = self._piece("turns", key, make)
        return [own | {name: piece[name] for name in ("commit", "where")} for own in piece["turns"]]

    def _models(self, points: list[tuple[Run, Point]]) -> list[tuple[Point, Transformer, Tokenizer]]:
        """Each point with the model and tokenizer of its run."""
        return [(point, *self._load(self._directory / "runs" / run.name)) for run, point in points]

    @property
    def _timing_problems(self) -> list[Problem]:
        return self._validation[: self._budget.timed]

    def _shown_of_replay(self, found: dict[str, Any], chosen: list[tuple[Curve, Point]]) -> list[tuple[Curve, Point]]:
        """The points that the page shows of the replay, without those of `chosen`."""
        turns, known = Turns.of(found), {(curve.name, point.label) for curve, point in chosen}
        return [
            (curve, point)
            for curve in curves(found)
            if turns.has(curve, REPLAY)
            for point in self._points[curve.system]
            if (point.decoder, point.label) == (curve.decoder, turns.chosen(curve, REPLAY).settings)
            and (curve.name, point.label) not in known
        ]

    def _near(self, curve: Curve, runs: list[Run]) -> list[tuple[Run, Point]]:
        """The points of a decoder near its best accuracy, on the model of the first seed."""
        near = {measured.settings for measured in curve.near_best}
        return [
            (self._first(curve, runs), point)
            for point in self._points[curve.system]
            if point.decoder == curve.decoder and point.label in near
        ]

    def _first(self, curve: Curve, runs: list[Run]) -> Run:
        """The first run of the models of a curve."""
        return next(run for run in runs if (run.system, run.start) == (curve.system, curve.start))

    def _estimated(self, found: dict[str, Any]) -> list[dict[str, Any]]:
        """Estimates for TPUs, from every decoder's points near its best accuracy, on the model of the first seed."""
        estimates = []
        for curve in curves(found):
            near = {point.settings for point in curve.near_best}
            own = [p for p in found["points"] if (p["system"], p["decoder"], p["start"]) == curve.key]
            first = [p for p in own if p["settings"] in near and p["seed"] == own[0]["seed"]]
            estimates += tpu_estimates(first, self._budget.problems)
        return estimates

    def _studied(self, run: Run) -> list[dict[str, Any]]:
        """Measures the checkpoints of a run at the points of its system's studies."""
        found, steps, every = [], self._config.steps, self._config.checkpoint.every
        workdir = self._directory / "runs" / run.name
        saved = [step for step in saved_steps(workdir) if not step % every or step == steps]  # not by an interruption
        known = re.compile(rf"study {re.escape(run.name)} at step (\d+), ")
        done = {int(key[1]) for key in map(known.match, self._pieces.records) if key}  # also where the run is gone
        for step in sorted(done | set(saved)) if self._studies[run.system] else ():
            load = functools.cache(lambda path=workdir / "checkpoints" / str(step): self._load(path))
            for title, points in self._studies[run.system].items():
                for point in points:
                    key = f"study {run.name} at step {step}, {title}: {point.decoder} {point.label}"
                    score = functools.partial(self._score, self._validation)
                    made = self._piece_at("study", key, score, run, point, load)
                    found.append(made | {"study": title, "step": step})
            jax.clear_caches()
        return found

    def _piece_at(
        self, kind: str, key: str, what: Callable, run: Run, point: Point, load: Callable[[], tuple]
    ) -> dict[str, Any]:
        """The piece of one measurement, `what`, of a run's model at a point; loaded only where it is still to do."""
        own = {"system": run.system, "seed": run.seed, "decoder": point.decoder, "settings": point.label}
        return self._piece(kind, key, lambda: own | what(point, *load()))

    def _measure(self, point: Point, model: Transformer, tokenizer: Tokenizer) -> dict[str, Any]:
        return measure(self._mixture, self._validation, point, self._budget, model, tokenizer)

    def _score(self, problems: list[Problem], point: Point, model: Transformer, tokenizer: Tokenizer) -> dict[str, Any]:
        once = dataclasses.replace(self._budget, repeats=1)  # nothing is timed
        return score(self._mixture, problems, point, once, model, tokenizer)[0]

    def _load(self, path: Path) -> tuple:
        return load_model(path, self._config.dtype), load_tokenizer(path)

    def _piece(self, kind: str, key: str, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The record of a piece, from an earlier session or made now. Prints the progress."""
        self._left[kind] -= 1
        if key in self._pieces.records:
            return self._pieces.records[key]
        began = time.monotonic()
        record = make() | {"commit": self._commit}
        record |= {"where": results.where()} if kind in _TIMED else {}
        self._took[kind].append(time.monotonic() - began)
        self._pieces.add(key, record)
        unknown = any(count and not self._took[kind] for kind, count in self._left.items())
        left = sum(statistics.mean(self._took[kind]) * count for kind, count in self._left.items() if self._took[kind])
        command.say(
            f"[{self._total - self._left.total()}/{self._total}] {(time.monotonic() - self._began) / 60:.1f} min, "
            f"{'at least ' * unknown}{left / 60:.0f} min left  {key}{_outcome(record)}"
        )
        return record


def _checksum(points: list[tuple[Run, Point]]) -> str:
    """Tells one list of points from another."""
    return f"{zlib.crc32('; '.join(f'{run.name} {point.decoder} {point.label}' for run, point in points).encode()):08x}"


def _final_loss(trial: dict[str, Any]) -> float:
    """The held-out loss at the end."""
    return trial["losses"][-1].get("eval_loss", math.inf)  # it is missing where it was not finite


def _outcome(record: dict[str, Any]) -> str:
    """The outcome of a piece in a few words."""
    if "turns" in record:
        return ""
    if "accuracy" in record:
        speeds = "".join(
            f", {speed:,.0f} tokens/s at {size}" for size, speed in record.get("tokens_per_second", {}).items()
        )
        return f"  {record['accuracy']:.1%} right, {record['tokens_per_forward']:.2f} tokens/forward{speeds}"
    return f"  loss {record['losses'][-1].get('loss', math.nan):.3f} in {record['seconds']:.0f} s"
