"""Plots of a comparison: one line for each decoder, with a band over seeds."""

import importlib.util
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from refusion_jax.benchmarks.headline.curves import Curve, curves
from refusion_jax.benchmarks.headline.experiment import BATCH_SIZES
from refusion_jax.benchmarks.headline.results import Results, curve_of, name_of

_TRAINING = {  # file: (key of the records, label)
    "loss": ("eval_loss", "held-out loss (each system's own)"),
    "bits_per_byte": ("eval_bits_per_byte", "bits per byte of held-out answers (bounds for masked diffusion)"),
}


class _Line(NamedTuple):
    name: str  # lines of one name have one colour
    x: Sequence[float]
    y: Sequence[float]
    band: tuple[Sequence[float], Sequence[float]] | None = None  # the least and the most of the seeds


def draw(results: Results, directory: Path) -> list[Path]:
    """Writes the plots as SVG files, and returns their paths: none where matplotlib is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        return []
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "headline"  # equal figures give equal files
    directory.mkdir(parents=True, exist_ok=True)
    found, paths = curves(results), []

    def plot(name: str, lines: Iterable[_Line], **labels: str) -> None:
        paths.append(directory / f"{name}.svg")
        _plot(paths[-1], lines, **labels)

    labels = {"ylabel": "exact match", "xscale": "log"}
    lines = [_by_accuracy(c, [p.figure("tokens_per_forward").mean for p in c.points]) for c in found]
    plot("accuracy_by_tokens_per_forward", lines, xlabel="tokens per forward", **labels)
    for size in map(str, BATCH_SIZES):
        lines = [_by_accuracy(c, [p.speed[size].mean for p in c.points]) for c in found]
        plot(f"accuracy_by_tokens_per_second_{size}", lines, xlabel=f"tokens per second, {size} at a time", **labels)
    for name, (key, label) in _TRAINING.items():
        lines = []
        for run in results.runs:
            records = [record for record in run["losses"] if key in record]
            model = name_of(run["system"], run["system"], run["start"])
            lines.append(_Line(model, [r["tokens"] for r in records], [r[key] for r in records]))
        plot(f"{name}_by_tokens", lines, xlabel="tokens trained on", ylabel=label, yscale="log")
    for topology in dict.fromkeys(record["topology"] for record in results.tpu_estimates):
        lines = []
        for record in results.tpu_estimates:
            if record["topology"] == topology:
                sizes, speedups = ([b[key] for b in record["batches"]] for key in ("batch_size", "speedup"))
                lines.append(_Line(name_of(*curve_of(record)), sizes, speedups))
        labels = {"title": "estimate, not calibrated", "xlabel": f"rows at once on {topology}"}
        labels |= {"ylabel": "times one token per forward", "xscale": "log", "yscale": "log"}
        plot(f"estimate_{topology.replace(':', '_')}", lines, **labels)
    return paths


def _by_accuracy(curve: Curve, x: list[float]) -> _Line:
    """Points in the order of x; the band reaches from the least to the most accurate seed."""
    figures = sorted(zip(x, (point.accuracy for point in curve.points), strict=True), key=lambda pair: pair[0])
    y, least, most = ([getattr(accuracy, name) for _, accuracy in figures] for name in ("mean", "least", "most"))
    return _Line(curve.name, [x for x, _ in figures], y, (least, most))


def _plot(path: Path, lines: Iterable[_Line], **labels: Any) -> None:
    from matplotlib import pyplot

    fig, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    colors = {}
    for line in lines:
        label = None if line.name in colors or not line.x else line.name
        (drawn,) = axes.plot(line.x, line.y, marker="o", markersize=3, label=label, color=colors.get(line.name))
        if line.x:
            colors[line.name] = drawn.get_color()
        if line.band:
            axes.fill_between(line.x, *line.band, color=drawn.get_color(), alpha=0.15)
    axes.set(**labels)
    if colors:
        axes.legend(fontsize="small")
    fig.savefig(path, metadata={"Date": None})
    pyplot.close(fig)
