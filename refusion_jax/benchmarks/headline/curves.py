"""Curves of accuracy against speed: the points of a decoder on the models of one system, averaged over seeds."""

import collections
import dataclasses
import itertools
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence

from refusion_jax.benchmarks.headline.results import CurveKey, Results, Scored
from refusion_jax.systems.interface import Claim
from refusion_jax.systems.registry import systems

WITHIN = 0.01  # decoders are compared at their fastest point within this of their best accuracy
PROXY = "proxy"  # in place of a batch size: one prompt at a time, at the speed proxy's cost
MARGIN = f"{100 * WITHIN:.0f} percentage point"  # the same in words


class Figure(tuple[float, ...]):
    """The values of one figure, one per seed or repeat."""

    mean, least, most = property(statistics.mean), property(min), property(max)


@dataclasses.dataclass(frozen=True)
class Measured:
    """The measurements of a decoder at one setting."""

    settings: str
    scores: Sequence[Scored]  # on the validation problems, one for each seed
    tests: Sequence[Scored]  # the same on the test problems, if the setting was chosen
    speed: Mapping[str, Figure]  # tokens per second by batch size, over the seeds
    timed: Mapping[str, Figure]  # of the first seed, by batch size or PROXY, over interleaved repeats

    def figure(self, name: str) -> Figure:
        return Figure(getattr(score, name) for score in self.scores)

    @property
    def accuracy(self) -> Figure:
        """Share of answers that match exactly."""
        return self.figure("accuracy")

    @property
    def on_tests(self) -> "Measured":
        """The same with the scores on the test problems, if there are any."""
        return dataclasses.replace(self, scores=self.tests or self.scores)

    def of_family(self, name: str) -> Figure:
        return Figure(score.families[name] for score in self.scores)


@dataclasses.dataclass(frozen=True)
class Curve(CurveKey):
    """The operating points of a decoder, on the models of one system."""

    points: tuple[Measured, ...]

    @property
    def is_default(self) -> bool:
        """Whether the decoder is the first of its system."""
        return self.decoder == next(iter(systems()[self.system].decoders), "")

    @property
    def near_best(self) -> list[Measured]:
        """The points within WITHIN of the best accuracy, with a margin for rounding."""
        least = max(point.accuracy.mean for point in self.points) - WITHIN - 1e-9
        return [point for point in self.points if point.accuracy.mean >= least]

    def is_timed(self, batch_size: str) -> bool:
        """Whether points were timed in interleaved repeats."""
        return any(batch_size in point.timed for point in self.near_best)

    def fastest(self, batch_size: str) -> Measured:
        """The fastest point within WITHIN of the best accuracy, with its score on the test problems if there is one.

        With PROXY as the batch size: the fastest of the points that were timed with the proxy.
        """
        if batch_size == PROXY:
            timed = (point for point in self.near_best if PROXY in point.timed)
            return max(timed, key=lambda point: point.timed[PROXY].mean).on_tests
        return max(self.near_best, key=lambda point: point.speed[batch_size].mean).on_tests

    def times_as_fast(self, rival: "Curve", batch_size: str) -> float:
        """Tokens per second divided by a rival's: medians of the repeats, each at its fastest point near its best."""
        own, other = (curve.fastest(batch_size).timed[batch_size] for curve in (self, rival))
        return statistics.median(x / y for x, y in zip(own, other, strict=True))


def under_parallelism(curve: Curve, best: float) -> float:
    """Accuracy under parallelism (AUP, arXiv 2601.07568): the area under accuracy in % over tokens per forward.

    An accuracy y counts exp(-3 (1 - y / best)) times, except in the rectangle up to the slowest point; points more than
    5 % below that one do not count. Prefills count as forwards, since some decoders draft in them. Validation problems.
    """
    reached = sorted((p.figure("tokens_per_forward_with_prefill").mean, 100 * p.accuracy.mean) for p in curve.points)
    width, first = reached[0]
    heights = [(x, y * math.exp(-3 * (1 - y / (100 * best)))) for x, y in reached if y >= first - 5] if best else []
    return width * first + sum((x - w) * (y + z) / 2 for (w, z), (x, y) in itertools.pairwise(heights))


def curves(results: Results) -> list[Curve]:
    """All curves, in the order of measurement."""
    timed = collections.defaultdict(dict)
    for record in results.timings:
        own = timed[record.curve, record.settings]
        own |= {size: Figure(speeds) for size, speeds in record.tokens_per_second.items()}
    for record in results.proxy_timings:
        (speeds,) = record.tokens_per_second.values()
        timed[record.curve, record.settings][PROXY] = Figure(speeds)

    points, tests = _by_setting(results.points), _by_setting(results.tests)
    found = collections.defaultdict(list)
    for key, scores in points.items():
        curve, settings = key
        speed = {size: Figure(s.tokens_per_second[size] for s in scores) for size in scores[0].tokens_per_second}
        found[curve].append(Measured(settings, scores, tests[key], speed, timed[key]))
    return [Curve(*curve, tuple(own)) for curve, own in found.items()]


def _by_setting(records: Iterable[Scored]) -> Mapping[tuple[tuple[str, str, str], str], list[Scored]]:
    found = collections.defaultdict(list)
    for record in records:
        found[record.curve, record.settings].append(record)
    return found


def claimed(found: Sequence[Curve]) -> list[tuple[Claim, Curve, Curve]]:
    """(claim of a paper, curve of the system's default decoder, curve of the rival's default decoder) for each claim.

    An adapted model is compared with an adapted rival, if there is one.
    """
    of = {(curve.system, curve.start): curve for curve in found if curve.is_default}
    pairs = [
        (claim, of[key], of.get((claim.rival, key[1])) or of.get((claim.rival, "")))
        for name, system in systems().items()
        for claim in system.claims
        for key in sorted(of)
        if key[0] == name
    ]
    return [(claim, own, rival) for claim, own, rival in pairs if rival]


def fastest_points(found: Sequence[Curve], batch_sizes: Sequence[str]) -> list[tuple[Curve, Measured]]:
    """The fastest point of each curve near its best accuracy, at each batch size: what the page shows."""
    fastest = [(curve, curve.fastest(size)) for curve in found for size in batch_sizes]
    return list({(curve.name, point.settings): (curve, point) for curve, point in fastest}.values())
