"""Curves of accuracy against speed: the points of a decoder on the models of one system, averaged over seeds."""

import collections
import dataclasses
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from refusion_jax.benchmarks.headline.results import Results, Scored
from refusion_jax.systems.interface import Claim
from refusion_jax.systems.registry import systems

WITHIN = 0.01  # decoders are compared at their fastest point within this of their best accuracy
PROXY = "proxy"  # in place of a batch size: one prompt at a time, at the cost of the speed proxy
MARGIN = f"{100 * WITHIN:.0f} percentage point"  # the same in words


def is_near(accuracy: float, best: float) -> bool:
    """Whether an accuracy is within WITHIN of the best one, where rounding does not decide."""
    return accuracy >= best - WITHIN - 1e-9


@dataclasses.dataclass(frozen=True)
class Figure:
    """The values of one figure, one for each seed or repeat."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        """Mean of the values."""
        return statistics.mean(self.values)

    @property
    def least(self) -> float:
        """Minimum of the values."""
        return min(self.values)

    @property
    def most(self) -> float:
        """Maximum of the values."""
        return max(self.values)


@dataclasses.dataclass(frozen=True)
class Measured:
    """What was measured of a decoder at one setting, over the seeds."""

    settings: str
    accuracy: Figure
    tokens_per_forward: Figure
    without_eos: Figure  # tokens per forward, without the closing EOS
    families: dict[str, Figure]
    speed: dict[str, Figure]  # tokens per second by batch size

    @classmethod
    def of(cls, records: Sequence[Scored], speed: dict[str, Figure] | None = None) -> "Measured":
        """The mean of some records that differ in their seeds; their own speeds, if none are given."""

        def figure(value: Callable[[Scored], float]) -> Figure:
            return Figure(tuple(map(value, records)))

        first = records[0]
        return cls(
            first["settings"],
            figure(lambda r: r["accuracy"]),
            figure(lambda r: r["tokens_per_forward"]),
            figure(lambda r: r["tokens_per_forward_without_eos"]),
            {family: figure(lambda r: r["families"][family]) for family in first["families"]},  # noqa: B023
            speed or {size: figure(lambda r: r["tokens_per_second"][size]) for size in first["tokens_per_second"]},  # noqa: B023
        )


@dataclasses.dataclass(frozen=True)
class Curve:
    """The operating points of a decoder, on the models of one system."""

    system: str
    decoder: str
    start: str  # the system whose weights the training started from; random ones if empty
    points: tuple[Measured, ...]  # scored on the validation problems
    tested: Mapping[str, Measured]  # by settings, scored on the test problems

    @property
    def name(self) -> str:
        """Its name in tables."""
        return name_of(self.system, self.decoder, self.start)

    @property
    def is_default(self) -> bool:
        """Whether the decoder is the first of its system."""
        return self.decoder == next(iter(systems()[self.system].decoders), "")

    @property
    def near_best(self) -> list[Measured]:
        """The points within WITHIN of the best accuracy."""
        best = max(point.accuracy.mean for point in self.points)
        return [point for point in self.points if is_near(point.accuracy.mean, best)]

    def fastest(self, batch_size: str) -> Measured:
        """The fastest point within WITHIN of the best accuracy, with its score on the test problems if there is one."""
        return self.scored(max(self.near_best, key=lambda point: point.speed[batch_size].mean))

    def scored(self, point: Measured) -> Measured:
        """A point with its score on the test problems, if there is one."""
        return self.tested.get(point.settings, point)


def curves(results: Results) -> list[Curve]:
    """All curves, in the order of measurement."""
    points, tests = _by_curve(results.points), _by_curve(results.tests)
    found = []
    for (system, decoder, start), own in points.items():
        measured = {settings: Measured.of(records) for settings, records in own.items()}
        tested = tests.get((system, decoder, start), {})
        scores = {settings: Measured.of(records, measured[settings].speed) for settings, records in tested.items()}
        found.append(Curve(system, decoder, start, tuple(measured.values()), scores))
    return found


def _by_curve(records: Iterable[Scored]) -> dict[tuple[str, str, str], dict[str, list[Scored]]]:
    """Records by (system, decoder, start), then by settings."""
    found = collections.defaultdict(lambda: collections.defaultdict(list))
    for record in records:
        found[record["system"], record["decoder"], record["start"]][record["settings"]].append(record)
    return found


def claimed(found: Sequence[Curve]) -> list[tuple[Claim, Curve, Curve]]:
    """The claims of papers and what they are about: (claim, curve of the default decoder, that of the rival's).

    A model that was adapted is compared with a rival that was, if there is one.
    """
    of = {(curve.system, curve.start): curve for curve in found if curve.is_default}
    pairs = [
        (claim, of[key], of.get((claim.rival, key[1])) or of.get((claim.rival, "")))
        for name, system in systems().items()
        for claim in system.experiments.claims
        for key in sorted(of)
        if key[0] == name
    ]
    return [(claim, own, rival) for claim, own, rival in pairs if rival]


def fastest_points(found: Sequence[Curve], batch_sizes: Sequence[str]) -> list[tuple[Curve, Measured]]:
    """The fastest point of each curve near its best accuracy, at each batch size: what the page shows."""
    fastest = [(curve, curve.fastest(size)) for curve in found for size in batch_sizes]
    return list({(curve.name, point.settings): (curve, point) for curve, point in fastest}.values())


@dataclasses.dataclass(frozen=True)
class Timings:
    """Tokens per second of some points in interleaved repeats, on the models of the first seed."""

    # By name and settings, then by batch size or PROXY; one for each repeat.
    speeds: Mapping[tuple[str, str], Mapping[str, list[float]]]

    @classmethod
    def of(cls, results: Results) -> "Timings":
        """Those of a comparison."""
        found = collections.defaultdict(dict)
        for record in results.timings:
            found[_which(record)].update(record["tokens_per_second"])
        for record in results.proxy_timings:
            (found[_which(record)][PROXY],) = record["tokens_per_second"].values()
        return cls(found)

    def has(self, curve: Curve, batch_size: str) -> bool:
        """Whether points of a curve were timed."""
        return any(batch_size in self.speeds.get((curve.name, p.settings), ()) for p in curve.near_best)

    def chosen(self, curve: Curve, batch_size: str) -> Measured:
        """The fastest point of a curve within WITHIN of its best accuracy; for PROXY, the fastest there."""
        if batch_size != PROXY:
            return curve.fastest(batch_size)
        timed = [point for point in curve.near_best if PROXY in self.speeds.get((curve.name, point.settings), ())]
        return curve.scored(max(timed, key=lambda point: self.speed(curve, point, PROXY).mean))

    def speed(self, curve: Curve, point: Measured, batch_size: str) -> Figure:
        """Tokens per second at a point."""
        return Figure(tuple(self.speeds[curve.name, point.settings][batch_size]))

    def ratio(self, curve: Curve, rival: Curve, batch_size: str) -> float:
        """How many times as fast as a rival: the median of the repeats, each at its fastest point near its best."""
        own, other = (self.speed(c, self.chosen(c, batch_size), batch_size).values for c in (curve, rival))
        return statistics.median(x / y for x, y in zip(own, other, strict=True))


def _which(record: Mapping[str, Any]) -> tuple[str, str]:
    """(name of the curve, settings) of a record."""
    return name_of(record["system"], record["decoder"], record["start"]), record["settings"]


def name_of(system: str, decoder: str, start: str) -> str:
    """The name of a curve: the system, what it was adapted from, and the decoder where it has another name."""
    return system + f" from {start}" * bool(start) + f" by {decoder}" * (system != decoder)


def model_name(run: Mapping[str, Any]) -> str:
    """The name of the model of a training run."""
    return name_of(run["system"], run["system"], run["start"])
