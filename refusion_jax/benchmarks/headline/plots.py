"""Plots of a comparison: one line for each decoder, with a band over seeds."""

import functools
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from refusion_jax.benchmarks.headline.curves import Curve, Figure, Measured, curves
from refusion_jax.benchmarks.headline.experiment import BATCH_SIZES
from refusion_jax.benchmarks.headline.results import Results, TpuEstimate, Trained

_TRAINING = {  # file: (field of the logged steps, label)
    "loss": ("eval_loss", "held-out loss (each system's own)"),
    "bits_per_byte": ("eval_bits_per_byte", "bits per byte of held-out answers (bounds for masked diffusion)"),
}
_DOTS = {"marker": "o", "markersize": 3}


def draw(results: Results, directory: Path) -> list[Path]:
    """Writes the plots as SVG files, and returns their paths; none if matplotlib is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        return []
    import matplotlib
    from matplotlib import pyplot

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "headline"  # equal figures give equal files
    directory.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, plot, labels in _plots(results):
        fig, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
        plot(axes)
        axes.set(**labels)
        if axes.lines:
            axes.legend(fontsize="small")
        paths.append(directory / f"{name}.svg")
        fig.savefig(paths[-1], metadata={"Date": None})
        pyplot.close(fig)
    return paths


def _plots(results: Results) -> Iterator[tuple[str, Callable[[Any], None], dict[str, str]]]:
    """(name, what draws its lines, labels and scales of its axes) of each plot."""
    found = curves(results)
    speeds = {"tokens_per_forward": ("tokens per forward", lambda point: point.figure("tokens_per_forward"))}
    for size in map(str, BATCH_SIZES):
        label = f"tokens per second, {size} at a time"
        speeds[f"tokens_per_second_{size}"] = label, lambda point, size=size: point.speed[size]
    for name, (label, speed) in speeds.items():
        labels = {"xlabel": label, "ylabel": "exact match, validation problems", "xscale": "log"}
        yield f"accuracy_by_{name}", functools.partial(_plot_accuracies, found, speed), labels
    for name, (key, label) in _TRAINING.items():
        labels = {"xlabel": "tokens trained on", "ylabel": label, "yscale": "log"}
        yield f"{name}_by_tokens", functools.partial(_plot_training, results.runs, key), labels
    for topology in dict.fromkeys(record.topology for record in results.tpu_estimates):
        own = [record for record in results.tpu_estimates if record.topology == topology]
        labels = {"title": "estimate, not calibrated", "xlabel": f"rows at once on {topology}"}
        labels |= {"ylabel": "times one token per forward", "xscale": "log", "yscale": "log"}
        yield f"estimate_{topology.replace(':', '_')}", functools.partial(_plot_estimates, own), labels


def _plot_accuracies(found: Sequence[Curve], speed: Callable[[Measured], Figure], axes: Any) -> None:
    """Lines of accuracy over mean speed; bands reach from the least to the most accurate seed."""
    for curve in found:
        points = sorted(curve.points, key=lambda point: speed(point).mean)
        x, accuracies = [speed(point).mean for point in points], [point.accuracy for point in points]
        (line,) = axes.plot(x, [one.mean for one in accuracies], label=curve.name, **_DOTS)
        bounds = [one.least for one in accuracies], [one.most for one in accuracies]
        axes.fill_between(x, *bounds, color=line.get_color(), alpha=0.15)


def _plot_training(runs: Sequence[Trained], key: str, axes: Any) -> None:
    """A line for each run that measured `key`; the seeds of a model share a colour."""
    colors = {}
    for run in runs:
        if measured := [(step.tokens, y) for step in run.losses if (y := getattr(step, key)) is not None]:
            style = {"color": colors[run.model]} if run.model in colors else {"label": run.model}
            (line,) = axes.plot(*zip(*measured, strict=True), **style, **_DOTS)
            colors[run.model] = line.get_color()


def _plot_estimates(records: Sequence[TpuEstimate], axes: Any) -> None:
    """A line of the speedup over the batch size for each decoder."""
    for record in records:
        sizes, speedups = ([getattr(b, key) for b in record.batches] for key in ("batch_size", "speedup"))
        axes.plot(sizes, speedups, label=record.name, **_DOTS)
