"""A comparison from beginning to end: choose learning rates, train, measure; piece by piece, each kept when it is done.

All training comes before all decoding, so that this process holds no device while others train.
"""

import collections
import functools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import ml_collections

from refusion_jax.benchmarks.headline import prices, results
from refusion_jax.benchmarks.headline.curves import curves
from refusion_jax.benchmarks.headline.measure import check_fit, measure, score
from refusion_jax.benchmarks.headline.pieces import Pieces
from refusion_jax.benchmarks.headline.plan import BUDGETS, Point, Run, dial, held_out, studies, trial_runs, whole_run
from refusion_jax.benchmarks.headline.runs import commit, train
from refusion_jax.data.families import mixture
from refusion_jax.runtime import cli
from refusion_jax.runtime.compiled_code import keep_compiled
from refusion_jax.runtime.storage import write_file
from refusion_jax.training.checkpoint_directory import saved_steps
from refusion_jax.training.pretrained import load_model, load_tokenizer


class Comparison:
    """What is to be done, and what has been."""

    def __init__(
        self,
        directory: Path,
        budget: str,
        config: ml_collections.ConfigDict,
        file: str,
        systems: list[str],
        with_studies: bool,
        command: str,
        pieces: Pieces,
    ):
        """Does nothing yet.

        Args:
          directory: of the comparison.
          budget: name of one of BUDGETS.
          config: of every run.
          file: that it was read from, and its variant.
          systems: names.
          with_studies: whether to measure what the systems themselves want to be compared, too.
          command: that all of it was asked for by.
          pieces: what was done in sessions before.
        """
        self._directory, self._config, self._file, self._systems = directory, config, file, systems
        self._command, self._commit = command, commit()
        self._name, self._budget, self._pieces = budget, BUDGETS[budget], pieces
        self._dials = {system: dial(system, self._budget, config) for system in systems}
        self._studies = {system: studies(system, self._budget, config) if with_studies else {} for system in systems}
        self._mixture, self._problems = mixture(config.data.difficulty), held_out(config, self._budget)
        self._began, self._took, self._left = time.monotonic(), collections.defaultdict(list), self._count()
        self._total = self._left.total()

    def _count(self) -> collections.Counter:
        """How many pieces of each kind there are in all."""
        each = {"try": len(self._budget.rates) * len(self._systems), "train": self._budget.seeds * len(self._systems)}
        each["measure"] = self._budget.seeds * sum(map(len, self._dials.values()))
        each["record"] = sum(len({point.decoder for point in points}) for points in self._dials.values())
        checkpoints = min(-(-self._config.steps // self._config.checkpoint.every), self._config.checkpoint.keep)
        points = sum(len(points) for own in self._studies.values() for points in own.values())
        return collections.Counter(each | {"study": self._budget.seeds * checkpoints * points})

    def run(self) -> dict[str, Any]:
        """Does what is left, and writes results.json whenever a model has been measured.

        Returns:
          What results.json holds.

        Raises:
          Failure: where a training run fails; all that was done before is kept.
        """
        trials = {system: self._trials(system) for system in self._systems}
        runs = [
            whole_run(system, seed, self._best(trials[system]), self._file)
            for seed in range(self._budget.seeds)
            for system in self._systems
        ]
        trained = [self._piece("train", f"train {run.name}", lambda run=run: self._train(run)) for run in runs]
        keep_compiled(self._directory / "compilation_cache", "own")
        found = results.about(self._name, self._command, self._config, self._budget)
        found |= {"sweep": [trial for own in trials.values() for trial in own], "runs": trained}
        found |= {"points": [], "studies": [], "prices": []}
        for run in runs:
            found["points"] += self._measured(run)
            found["studies"] += self._studied(run)
            self._write(found)
        recorded = self._recorded(found, runs)
        found["prices"] = [estimate for record in recorded for estimate in prices.prices(record)]
        self._write(found, recorded)
        return found

    def _write(self, found: dict[str, Any], recorded: Sequence[dict[str, Any]] = ()) -> None:
        """What there is so far, with the commits that it was made at."""
        made = found["sweep"] + found["runs"] + found["points"] + found["studies"]
        found["commits"] = sorted({piece["commit"] for piece in [*made, *recorded]})
        write_file(self._directory / "results.json", results.as_json(found))

    def _trials(self, system: str) -> list[dict[str, Any]]:
        """What each learning rate that is tried leads to."""
        return [
            self._piece("try", f"try {run.name}", lambda run=run: self._train(run))
            for run in trial_runs(system, self._budget, self._config, self._file)
        ]

    def _best(self, trials: list[dict[str, Any]]) -> float:
        """The rate with the least held-out loss at the end; the config's where none was tried."""

        def loss(trial: dict[str, Any]) -> float:
            return trial["losses"][-1].get("eval_loss", math.inf)  # not finite where it is missing

        return min(trials, key=loss)["learning_rate"] if trials else self._config.learning_rate

    def _train(self, run: Run) -> dict[str, Any]:
        record = {"system": run.system, "seed": run.seed, "name": run.name, "command": run.command(self._directory)}
        return record | {"learning_rate": run.changes["learning_rate"]} | train(run, self._directory, cli.say)

    def _measured(self, run: Run) -> list[dict[str, Any]]:
        """The run's model at all points of its dials."""
        load = functools.cache(lambda: self._load(self._directory / "runs" / run.name))
        found, decoder = [], None
        for point in self._dials[run.system]:
            if point.decoder != decoder:
                jax.clear_caches()  # each program takes memory mappings, of which a process has 65,530
            decoder = point.decoder
            key = f"measure {run.name}: {decoder} {point.label}"
            found.append(self._piece("measure", key, functools.partial(self._at, measure, run, point, load)))
        return found

    def _recorded(self, found: dict[str, Any], runs: list[Run]) -> list[dict[str, Any]]:
        """What every decoder feeds, at its widest on the first seed's model."""
        recorded = []
        for curve in curves(found):
            run = next(run for run in runs if run.system == curve.system)
            points = (p for p in self._dials[run.system] if p.decoder == curve.decoder)
            point = next(p for p in points if p.label == curve.widest.settings)
            key = f"record {run.name}: {point.decoder} {point.label}"
            recorded.append(self._piece("record", key, functools.partial(self._feeds, run, point)))
            jax.clear_caches()
        return recorded

    def _feeds(self, run: Run, point: Point) -> dict[str, Any]:
        model, tokenizer = self._load(self._directory / "runs" / run.name)
        own = {"system": run.system, "seed": run.seed, "decoder": point.decoder, "settings": point.label}
        return own | prices.record(self._problems, point, self._budget, model, tokenizer)

    def _studied(self, run: Run) -> list[dict[str, Any]]:
        """The run's checkpoints at the points of its system's studies."""
        found = []
        workdir = self._directory / "runs" / run.name
        for step in saved_steps(workdir) if self._studies[run.system] else ():
            load = functools.cache(lambda path=workdir / "checkpoints" / str(step): self._load(path))
            for title, points in self._studies[run.system].items():
                for point in points:
                    key = f"study {run.name} at step {step}, {title}: {point.decoder} {point.label}"
                    made = self._piece("study", key, functools.partial(self._at, _accuracy, run, point, load))
                    found.append(made | {"study": title, "step": step})
            jax.clear_caches()
        return found

    def _at(self, what: Callable, run: Run, point: Point, load: Callable[[], tuple]) -> dict[str, Any]:
        """The record of a run's model at a point, as `what` measures it."""
        own = {"system": run.system, "seed": run.seed, "decoder": point.decoder, "settings": point.label}
        return own | what(self._mixture, self._problems, point, self._budget, *load())

    def _load(self, path: Path) -> tuple:
        model, tokenizer = load_model(path, self._config.dtype), load_tokenizer(path)
        check_fit(self._problems, tokenizer, self._budget)
        return model, tokenizer

    def _piece(self, kind: str, key: str, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The record of a piece: made now, unless a session before has made it. Prints how far all of it is."""
        self._left[kind] -= 1
        if key in self._pieces.records:
            return self._pieces.records[key]
        began = time.monotonic()
        record = make() | {"commit": self._commit}
        self._took[kind].append(time.monotonic() - began)
        self._pieces.add(key, record)
        unknown = any(count and not self._took[kind] for kind, count in self._left.items())
        left = sum(statistics.mean(self._took[kind]) * count for kind, count in self._left.items() if self._took[kind])
        cli.say(
            f"[{self._total - self._left.total()}/{self._total}] {(time.monotonic() - self._began) / 60:.1f} min, "
            f"{'at least ' * unknown}{left / 60:.0f} min left  {key}{_outcome(record)}"
        )
        return record


def _accuracy(*what: Any) -> dict[str, Any]:
    return score(*what)[0]


def _outcome(record: dict[str, Any]) -> str:
    """What came out, in a few words."""
    if "recordings" in record:
        return ""
    if "accuracy" in record:
        speeds = "".join(
            f", {speed:,.0f} tokens/s at {size}" for size, speed in record.get("tokens_per_second", {}).items()
        )
        return f"  {record['accuracy']:.1%} right, {record['tokens_per_forward']:.2f} tokens/forward{speeds}"
    return f"  loss {record['losses'][-1].get('loss', math.nan):.3f} in {record['seconds']:.0f} s"
