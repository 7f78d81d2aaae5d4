"""Curves of accuracy against speed: the points of a decoder on the models of one system, averaged over seeds."""

import collections
import dataclasses
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from refusion_jax.systems.interface import Claim
from refusion_jax.systems.registry import systems

WITHIN = 0.01  # decoders are compared at their fastest point within this of their best accuracy
REPLAY = "replay"  # key of the speeds with one prompt at a time, at the price of larger weights
MARGIN = f"{100 * WITHIN:.0f} percentage point"  # the same in words


def is_near(accuracy: float, best: float) -> bool:
    """Whether an accuracy is within WITHIN of the best one, where rounding does not decide."""
    return accuracy >= best - WITHIN - 1e-9


@dataclasses.dataclass(frozen=True)
class Figure:
    """The values of one figure, one for each seed."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        """Mean over seeds."""
        return statistics.mean(self.values)

    @property
    def least(self) -> float:
        """Minimum over seeds."""
        return min(self.values)

    @property
    def most(self) -> float:
        """Maximum over seeds."""
        return max(self.values)


@dataclasses.dataclass(frozen=True)
class Measured:
    """What was measured of a decoder at one setting, over the seeds."""

    settings: str
    accuracy: Figure
    tokens_per_forward: Figure
    speed: dict[str, Figure]  # tokens a second by batch size
    families: dict[str, Figure]


@dataclasses.dataclass(frozen=True)
class Curve:
    """The operating points of a decoder, on the models of one system."""

    system: str
    decoder: str
    points: tuple[Measured, ...]  # scored on the validation problems
    start: str = ""  # the system whose weights the training started from; random ones if empty
    tested: Mapping[str, Measured] = dataclasses.field(default_factory=dict)  # by settings, scored on the test problems

    @property
    def key(self) -> tuple[str, str, str]:
        """What its records have in common."""
        return self.system, self.decoder, self.start

    @property
    def name(self) -> str:
        """Its name in tables."""
        return name_of(self.system, self.decoder, self.start)

    @property
    def best(self) -> float:
        """The highest accuracy on the validation problems."""
        return max(point.accuracy.mean for point in self.points)

    def fastest(self, batch_size: str) -> Measured:
        """The fastest point within WITHIN of the best accuracy, with its score on the test problems if there is one."""
        return self.scored(max(self.near_best, key=lambda point: point.speed[batch_size].mean))

    def scored(self, point: Measured) -> Measured:
        """A point with its score on the test problems, if there is one."""
        return self.tested.get(point.settings, point)

    @property
    def near_best(self) -> list[Measured]:
        """The points within WITHIN of the best accuracy."""
        return [point for point in self.points if is_near(point.accuracy.mean, self.best)]


def claimed(found: Sequence[Curve]) -> list[tuple[Claim, Curve, Curve]]:
    """The claims of papers and what they are about: (claim, curve of the default decoder, that of the rival's).

    A model that was adapted is compared with a rival that was, if there is one.
    """
    of = {(c.system, c.start): c for c in found if c.decoder == default_decoder(c.system)}
    pairs = [
        (claim, of[key], of.get((claim.rival, key[1])) or of.get((claim.rival, "")))
        for name, system in systems().items()
        for claim in system.claims
        for key in sorted(of)
        if key[0] == name
    ]
    return [(claim, own, rival) for claim, own, rival in pairs if rival]


def default_decoder(system: str) -> str:
    """The first decoder of a system."""
    return next(iter(systems()[system].decoders), "")


def shown(found: Sequence[Curve], batch_sizes: Sequence[str]) -> list[tuple[Curve, Measured]]:
    """The fastest points within WITHIN of the best accuracy, which are timed in turns."""
    fastest = [(curve, curve.fastest(size)) for curve in found for size in batch_sizes]
    return list({(curve.name, point.settings): (curve, point) for curve, point in fastest}.values())


@dataclasses.dataclass(frozen=True)
class Turns:
    """Tokens a second of the points that are shown, timed in turns on the models of the first seed."""

    # By name and settings, then by batch size or REPLAY; one a turn.
    speeds: Mapping[tuple[str, str], Mapping[str, list[float]]]

    @classmethod
    def of(cls, results: dict[str, Any]) -> "Turns":
        """Those of a comparison."""
        found = collections.defaultdict(dict)
        for record in results["turns"]:
            found[_which(record)].update(record["tokens_per_second"])
        for record in results.get("replays", ()):
            (found[_which(record)][REPLAY],) = record["tokens_per_second"].values()
        return cls(found)

    def has(self, curve: Curve, batch_size: str) -> bool:
        """Whether points of a curve were timed."""
        return any(batch_size in self.speeds.get((curve.name, p.settings), ()) for p in curve.near_best)

    def chosen(self, curve: Curve, batch_size: str) -> Measured:
        """The fastest point of a curve within WITHIN of its best accuracy; REPLAY takes the times of the replay."""
        if batch_size != REPLAY:
            return curve.fastest(batch_size)
        timed = [point for point in curve.near_best if REPLAY in self.speeds.get((curve.name, point.settings), ())]
        return curve.scored(max(timed, key=lambda point: self.speed(curve, point, REPLAY).mean))

    def speed(self, curve: Curve, point: Measured, batch_size: str) -> Figure:
        """Tokens a second at a point."""
        return Figure(tuple(self.speeds[curve.name, point.settings][batch_size]))

    def ratio(self, curve: Curve, rival: Curve, batch_size: str) -> float:
        """How many times as fast as a rival: the median of the turns, each at its fastest point near its best."""
        own, other = (self.speed(c, self.chosen(c, batch_size), batch_size).values for c in (curve, rival))
        return statistics.median(x / y for x, y in zip(own, other, strict=True))


def _which(record: dict[str, Any]) -> tuple[str, str]:
    """(name of the curve, settings) of a record."""
    return name_of(record["system"], record["decoder"], record["start"]), record["settings"]


def name_of(system: str, decoder: str, start: str) -> str:
    """The name of a curve: the system, what it was adapted from, and the decoder where it has another name."""
    return system + f" from {start}" * bool(start) + f" by {decoder}" * (system != decoder)


def model_name(run: dict[str, Any]) -> str:
    """The name of the model of a training run."""
    return name_of(run["system"], run["system"], run["start"])


def curves(results: dict[str, Any]) -> list[Curve]:
    """All curves, in the order of measurement."""
    points, tests = (_by_curve(results[kind]) for kind in ("points", "tests"))
    found = []
    for key, own in points.items():
        measured = {settings: _point(settings, records) for settings, records in own.items()}
        tested = {
            settings: dataclasses.replace(measured[settings], **_scores(records))
            for settings, records in tests[key].items()
        }
        system, decoder, start = key
        found.append(Curve(system, decoder, tuple(measured.values()), start, tested))
    return found


def _by_curve(records: Iterable[dict[str, Any]]) -> dict[tuple[str, str, str], dict[str, list[dict[str, Any]]]]:
    """Records by (system, decoder, start), then by settings."""
    found = collections.defaultdict(lambda: collections.defaultdict(list))
    for record in records:
        found[record["system"], record["decoder"], record["start"]][record["settings"]].append(record)
    return found


def _point(settings: str, records: list[dict[str, Any]]) -> Measured:
    sizes = records[0]["tokens_per_second"]
    speed = {size: _figure(record["tokens_per_second"][size] for record in records) for size in sizes}
    return Measured(settings, speed=speed, **_scores(records))


def _scores(records: list[dict[str, Any]]) -> dict[str, Any]:
    """What a point has of the answers, and not of the time."""
    return {
        "accuracy": _figure(record["accuracy"] for record in records),
        "tokens_per_forward": _figure(record["tokens_per_forward"] for record in records),
        "families": {family: _figure(r["families"][family] for r in records) for family in records[0]["families"]},
    }


def _figure(values: Iterable[float]) -> Figure:
    return Figure(tuple(values))
