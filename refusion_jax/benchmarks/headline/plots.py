"""Plots of a comparison: one line for each decoder, with a band over seeds."""

import contextlib
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from refusion_jax.benchmarks.headline.curves import Curve, Figure, Measured, curves
from refusion_jax.benchmarks.headline.experiment import BATCH_SIZES
from refusion_jax.benchmarks.headline.results import Results, Trained

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

    @contextlib.contextmanager
    def plot(name: str, **labels: Any) -> Iterator[matplotlib.axes.Axes]:
        fig, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
        yield axes
        axes.set(**labels)
        if axes.lines:
            axes.legend(fontsize="small")
        paths.append(directory / f"{name}.svg")
        fig.savefig(paths[-1], metadata={"Date": None})
        pyplot.close(fig)

    speeds = {"tokens_per_forward": ("tokens per forward", lambda point: point.figure("tokens_per_forward"))}
    for size in map(str, BATCH_SIZES):
        label = f"tokens per second, {size} at a time"
        speeds[f"tokens_per_second_{size}"] = label, lambda point, size=size: point.speed[size]
    for name, (label, speed) in speeds.items():
        with plot(f"accuracy_by_{name}", xlabel=label, ylabel="exact match", xscale="log") as axes:
            for curve in curves(results):
                _plot_accuracy(axes, curve, speed)
    for name, (key, label) in _TRAINING.items():
        with plot(f"{name}_by_tokens", xlabel="tokens trained on", ylabel=label, yscale="log") as axes:
            _plot_training(axes, results.runs, key)
    for topology in dict.fromkeys(record.topology for record in results.tpu_estimates):
        with plot(
            f"estimate_{topology.replace(':', '_')}",
            title="estimate, not calibrated",
            xlabel=f"rows at once on {topology}",
            ylabel="times one token per forward",
            xscale="log",
            yscale="log",
        ) as axes:
            for record in results.tpu_estimates:
                if record.topology == topology:
                    sizes, speedups = ([getattr(b, key) for b in record.batches] for key in ("batch_size", "speedup"))
                    axes.plot(sizes, speedups, label=record.name, **_DOTS)
    return paths


def _plot_accuracy(axes: Any, curve: Curve, speed: Callable[[Measured], Figure]) -> None:
    """A line of accuracy over mean speed; the band reaches from the least to the most accurate seed."""
    points = sorted(curve.points, key=lambda point: speed(point).mean)
    x = [speed(point).mean for point in points]
    (line,) = axes.plot(x, [point.accuracy.mean for point in points], label=curve.name, **_DOTS)
    least = [point.accuracy.least for point in points]
    most = [point.accuracy.most for point in points]
    axes.fill_between(x, least, most, color=line.get_color(), alpha=0.15)


def _plot_training(axes: Any, runs: Sequence[Trained], key: str) -> None:
    """A line for each run that measured `key`; the seeds of a model share a colour."""
    colors = {}
    for run in runs:
        if measured := [(step.tokens, y) for step in run.losses if (y := getattr(step, key)) is not None]:
            style = {"color": colors[run.model]} if run.model in colors else {"label": run.model}
            (line,) = axes.plot(*zip(*measured, strict=True), **style, **_DOTS)
            colors[run.model] = line.get_color()
