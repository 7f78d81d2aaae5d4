"""What a comparison asks for: its budget, its training runs, and the operating points that are measured.

A point is a decoder with settings. All of this is known before anything is trained.
"""

import collections
import dataclasses
import itertools
import json
import random
import shlex
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import ml_collections

from refusion_jax.cli.errors import UserError
from refusion_jax.data.families import mixture
from refusion_jax.data.problems import Problem
from refusion_jax.data.sources import held_out_problems
from refusion_jax.decoding.settings import Settings
from refusion_jax.systems.api import DecodeSettings
from refusion_jax.systems.registry import decoders_for, find_decoder, systems

BATCH_SIZES = (1, 16)
_FURTHER_RATES = 3  # most rates tried after the first ones, to find the best one between worse ones
_DRAWS = 20  # draws of test problems, as a multiple of their number: families with few problems draw them repeatedly
_NEW_PROBLEMS = 1000  # added to the seed of an adapted run, so that its problems are not those of the first half


@dataclasses.dataclass(frozen=True)
class Budget:
    """The size of a comparison, beyond the config of each run."""

    seeds: int  # per system, unless it has its own number
    problems: int  # number of validation problems, decoded 16 at a time and scored; the same number of test problems
    timed: int  # how many of these are also decoded one at a time
    new_tokens: int  # most tokens of an answer
    repeats: int  # of every timing; the median counts
    rates: tuple[float, ...] = ()  # learning rates to try, as multiples of the config's; empty: only that one
    sweep: int = 4  # runs that try a learning rate have this fraction of the steps: 1 / sweep
    speed_proxy: str = ""  # WIDTHxLAYERS of a model at whose cost speed claims are checked, too; empty: none

    def of_each_run(self) -> dict[str, Any]:
        """What the result of a run depends on: all except the seeds and the speed proxy, which may change later."""
        return {name: value for name, value in dataclasses.asdict(self).items() if name not in ("seeds", "speed_proxy")}


BUDGETS = {
    "tiny": Budget(seeds=1, problems=96, timed=32, new_tokens=32, repeats=2),
    "small": Budget(
        seeds=3, problems=480, timed=96, new_tokens=32, repeats=3, rates=(0.5, 1.0, 2.0, 4.0), speed_proxy="640x12"
    ),
    "gpu": Budget(seeds=1, problems=480, timed=96, new_tokens=64, repeats=3),
}


@dataclasses.dataclass(frozen=True)
class TrainingRun:
    """A training run: the name of its directory and its flags."""

    system: str
    seed: int
    name: str  # of its directory
    changes: Mapping[str, Any]  # config keys and their values
    config: str  # file and variant
    start: str = ""  # the system that trained the weights it starts from; random ones if empty

    def flags(self, directory: Path) -> list[str]:
        changes = {"objective": self.system, "seed": self.seed} | dict(self.changes)
        return [
            f"--config={self.config}",
            f"--workdir={directory / 'runs' / self.name}",
            *(f"--config.{name}={value}" for name, value in changes.items()),
        ]

    def command(self, directory: Path) -> str:
        return shlex.join(["python", "-m", "refusion_jax.train", *self.flags(directory)])


@dataclasses.dataclass(frozen=True)
class Point:
    """A decoder with settings."""

    decoder: str
    changes: Mapping[str, Any]

    @property
    def label(self) -> str:
        """Its settings in one line, in the form of `bench decode --setup`."""
        return " ".join(
            f"{name}={value if isinstance(value, str) else json.dumps(value)}" for name, value in self.changes.items()
        )

    def __str__(self) -> str:
        return f"{self.decoder} {self.label}"

    def settings(self, new_tokens: int, batch_size: int) -> Settings:
        return DecodeSettings(self.decoder, max_new_tokens=new_tokens, batch_size=batch_size, **self.changes)


@dataclasses.dataclass(frozen=True)
class Experiment:
    """An experiment: the budget, the systems and how each is trained and decoded."""

    name: str  # of the budget
    budget: Budget
    config: ml_collections.ConfigDict  # of every run
    file: str  # of the config of every run, with its variant
    systems: Mapping[str, int]  # by name, the number of seeds
    start: str  # the system from whose weights the others are also adapted; empty: none
    command: str  # the command line, for the results
    rates: Mapping[str, float] = dataclasses.field(default_factory=dict)  # of systems that try no others

    @property
    def seeds(self) -> list[tuple[str, int]]:
        """(system, seed) for all seeds: first all systems with the first seed, then those with a second one."""
        most = max(self.systems.values())
        return [(name, seed) for seed in range(most) for name, count in self.systems.items() if seed < count]

    @property
    def adapted(self) -> dict[str, int]:
        """The adapted systems, and their number of seeds: at most as many as there are models to adapt."""
        most = self.systems.get(self.start, 0)
        return {name: min(count, most) for name, count in self.systems.items() if most and name != self.start}

    def check(self) -> None:
        """Raises UserError if models to be adapted are not trained, or not stored after half of the steps."""
        c, flag = self.config, f"--adapt_from={self.start}"
        if self.start and self.start not in self.systems:
            raise UserError(f"{flag}: is not among --systems={','.join(self.systems)}")
        half, every = c.steps // 2, c.checkpoint.every
        if self.start and (c.steps % 2 or half % every or half // every >= c.checkpoint.keep):
            raise UserError(
                f"{flag}: needs the checkpoint of step {c.steps / 2:g}, which is not kept with "
                f"checkpoint.every={every} and checkpoint.keep={c.checkpoint.keep}"
            )
        if self.start and half % c.log_every:
            raise UserError(f"{flag}: step {half}, in the middle, is not logged with log_every={c.log_every}")

    def next_rate(self, losses: Mapping[float, float]) -> float | None:
        """The learning rate to try next, given the held-out losses of those tried; None if enough were tried.

        After the budget's rates it is twice the highest or half the lowest, if that one is the best so far.
        """
        first = [multiple * self.config.learning_rate for multiple in self.budget.rates]
        if len(losses) < len(first):
            return first[len(losses)]
        if not losses or len(losses) >= len(first) + _FURTHER_RATES:
            return None
        best = min(losses, key=losses.get)
        return {max(losses): 2 * best, min(losses): best / 2}.get(best)

    def trial(self, system: str, rate: float) -> TrainingRun:
        """A short run that tries a learning rate, with the whole schedule of warmup and decay."""
        c = self.config
        steps = max(1, c.steps // self.budget.sweep)
        shorter = {"steps": steps, "warmup_steps": min(c.warmup_steps, max(1, steps // 4)), "eval.every": steps}
        return TrainingRun(system, 0, f"{system}_rate{rate:g}", shorter | {"learning_rate": rate}, self.file)

    def whole(self, system: str, seed: int, rate: float) -> TrainingRun:
        return TrainingRun(system, seed, f"{system}_seed{seed}", {"learning_rate": rate}, self.file)

    def adaptation(self, system: str, start: TrainingRun, rate: float, directory: Path) -> TrainingRun:
        """A run that takes the second half of the steps, from another system's weights after the first half.

        Both halves together have the steps of a whole run and about its tokens, of different problems.
        """
        c, workdir = self.config, directory / "runs" / start.name
        half = c.steps // 2
        changes = {
            "seed": start.seed + _NEW_PROBLEMS,
            "steps": half,
            "data.examples": max(1, c.data.examples // 2),
            "data.tokenizer": str(workdir / "tokenizer.model"),
            "init_from": str(workdir / "checkpoints" / str(half)),
            "learning_rate": rate,
        }
        name = f"{system}_from_{start.system}_seed{start.seed}"
        return TrainingRun(system, start.seed, name, changes, self.file, start.system)

    def auxiliaries(self, run: TrainingRun, directory: Path) -> dict[tuple[str, str], TrainingRun]:
        """The runs of the further models that decoders need for the model of a run, by decoder and setting."""
        found, workdir = {}, directory / "runs" / run.name
        same = {"learning_rate": run.changes["learning_rate"], "data.tokenizer": str(workdir / "tokenizer.model")}
        for decoder in decoders_for(run.system):
            for setting, keys in find_decoder(decoder).settings.auxiliary_models.items():
                changes = same | {key: str(value).format(run=workdir) for key, value in keys.items()}
                system, name = changes.pop("objective", run.system), f"{run.name}_{decoder}_{setting}"
                found[decoder, setting] = TrainingRun(system, run.seed, name, changes, self.file)
        return found

    def points(self, system: str) -> list[Point]:
        """The operating points of all decoders that serve a system's models."""
        section = systems()[system].section
        own = self.budget.new_tokens, self.config[section].to_dict() if section else {}
        decoders = {name: find_decoder(name).settings for name in decoders_for(system)}
        return [Point(name, point) for name, settings in decoders.items() for point in settings.operating_points(*own)]

    def held_out(self) -> tuple[list[Problem], list[Problem]]:
        """(validation problems, which choose the settings; test problems, which score the chosen ones).

        They are the same for every run, and none of them is trained on. Both have equally many of each family.
        """
        data, count = self.config.data, self.budget.problems
        every, draws = mixture(data.difficulty), _DRAWS * count
        wanted = collections.Counter(problem.family for problem in every.problems("test", count, seed=0))
        validation = _different(every.problems("test", draws, seed=0), wanted, set())
        known = {problem.query for problem in validation}
        by_loss = {problem.query for problem in held_out_problems(data)}  # these choose the learning rates
        return validation, _different(every.problems("test", draws, seed=1), wanted, known, by_loss)


def _different(
    drawn: Iterable[Problem], wanted: collections.Counter[str], known: set[str], avoided: Collection[str] = ()
) -> list[Problem]:
    """The wanted number of problems of each family, all different; a family with too few repeats its problems.

    Queries among the known are left out; those to be avoided are only used if a family has no others.
    """
    found = {problem.query: problem for problem in drawn if problem.query not in known}
    chosen = []
    for family, count in wanted.items():
        own = [problem for problem in found.values() if problem.family == family]
        own.sort(key=lambda problem: problem.query in avoided)  # a stable sort
        chosen += itertools.islice(itertools.cycle(own), count)
    return random.Random(0).sample(chosen, len(chosen))  # so that the first, timed ones are from all families
