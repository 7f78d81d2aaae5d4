"""Curves of a comparison: a decoder's points on one system's models, the mean of all seeds at each."""

import collections
import dataclasses
import statistics
from collections.abc import Iterable
from typing import Any

WITHIN = 0.01  # of its best accuracy: there each decoder is compared at its fastest


@dataclasses.dataclass(frozen=True)
class Figure:
    """Some seeds' values of one figure."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        """Of the seeds."""
        return statistics.mean(self.values)

    @property
    def least(self) -> float:
        """Of the seeds."""
        return min(self.values)

    @property
    def most(self) -> float:
        """Of the seeds."""
        return max(self.values)


@dataclasses.dataclass(frozen=True)
class Point:
    """A decoder at one setting."""

    settings: str
    accuracy: Figure
    tokens_per_forward: Figure
    speed: dict[str, Figure]  # tokens a second by batch size
    families: dict[str, Figure]


@dataclasses.dataclass(frozen=True)
class Curve:
    """A decoder over its dial, on the models of one system."""

    system: str
    decoder: str
    points: tuple[Point, ...]

    @property
    def name(self) -> str:
        """See `name_of`."""
        return name_of(self.system, self.decoder)

    @property
    def best(self) -> float:
        """The highest accuracy."""
        return max(point.accuracy.mean for point in self.points)

    def fastest(self, batch_size: str) -> Point:
        """The fastest point within WITHIN of the best accuracy."""
        return max(self._near_best, key=lambda point: point.speed[batch_size].mean)

    @property
    def widest(self) -> Point:
        """The point of the most tokens a forward within WITHIN of the best accuracy."""
        return max(self._near_best, key=lambda point: point.tokens_per_forward.mean)

    @property
    def _near_best(self) -> list[Point]:
        return [point for point in self.points if point.accuracy.mean >= self.best - WITHIN]


def name_of(system: str, decoder: str) -> str:
    """A system, and the decoder where that is another's or not its first."""
    return system if system == decoder else f"{system} by {decoder}"


def curves(results: dict[str, Any]) -> list[Curve]:
    """All curves, in the order of measurement."""
    by_curve = collections.defaultdict(lambda: collections.defaultdict(list))
    for record in results["points"]:
        by_curve[record["system"], record["decoder"]][record["settings"]].append(record)
    return [
        Curve(system, decoder, tuple(_point(settings, records) for settings, records in points.items()))
        for (system, decoder), points in by_curve.items()
    ]


def _point(settings: str, records: list[dict[str, Any]]) -> Point:
    return Point(
        settings,
        _figure(record["accuracy"] for record in records),
        _figure(record["tokens_per_forward"] for record in records),
        {size: _figure(r["tokens_per_second"][size] for r in records) for size in records[0]["tokens_per_second"]},
        {family: _figure(r["families"][family] for r in records) for family in records[0]["families"]},
    )


def _figure(values: Iterable[float]) -> Figure:
    return Figure(tuple(values))
