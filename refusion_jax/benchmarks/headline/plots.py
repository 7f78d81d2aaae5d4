"""Plots of a comparison: one line for each decoder, with a band over seeds."""

import contextlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from refusion_jax.benchmarks.headline.curves import curves
from refusion_jax.benchmarks.headline.experiment import BATCH_SIZES
from refusion_jax.benchmarks.headline.results import Results, curve_of, name_of

_TRAINING = {  # file: (key of the records, label)
    "loss": ("eval_loss", "held-out loss (each system's own)"),
    "bits_per_byte": ("eval_bits_per_byte", "bits per byte of held-out answers (bounds for masked diffusion)"),
}
_DOTS = {"marker": "o", "markersize": 3}


def draw(results: Results, directory: Path) -> list[Path]:
    """Writes the plots as SVG files, and returns their paths: none where matplotlib is not installed."""
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
                points = sorted(curve.points, key=lambda point: speed(point).mean)
                x, y = [speed(point).mean for point in points], [point.accuracy for point in points]
                (line,) = axes.plot(x, [a.mean for a in y], label=curve.name, **_DOTS)
                axes.fill_between(x, [a.least for a in y], [a.most for a in y], color=line.get_color(), alpha=0.15)
    for name, (key, label) in _TRAINING.items():
        with plot(f"{name}_by_tokens", xlabel="tokens trained on", ylabel=label, yscale="log") as axes:
            colors = {}  # by model: its seeds have one
            for run in results.runs:
                records = [record for record in run["losses"] if key in record]
                model = name_of(run["system"], run["system"], run["start"])
                style = _DOTS | ({"color": colors[model]} if model in colors else {"label": model})
                if records:
                    (line,) = axes.plot([r["tokens"] for r in records], [r[key] for r in records], **style)
                    colors[model] = line.get_color()
    for topology in dict.fromkeys(record["topology"] for record in results.tpu_estimates):
        labels = {"title": "estimate, not calibrated", "xlabel": f"rows at once on {topology}"}
        labels |= {"ylabel": "times one token per forward", "xscale": "log", "yscale": "log"}
        with plot(f"estimate_{topology.replace(':', '_')}", **labels) as axes:
            for record in results.tpu_estimates:
                if record["topology"] == topology:
                    sizes, speedups = ([b[key] for b in record["batches"]] for key in ("batch_size", "speedup"))
                    axes.plot(sizes, speedups, label=name_of(*curve_of(record)), **_DOTS)
    return paths
