"""Plots of a comparison: one line for each decoder, with a band over seeds."""

import importlib.util
from pathlib import Path
from typing import Any

from refusion_jax.benchmarks.headline.curves import Curve, curves, model_name, name_of
from refusion_jax.benchmarks.headline.experiment import BATCH_SIZES
from refusion_jax.benchmarks.headline.results import Results

_TRAINING = [  # file, key of the records, label
    ("loss", "eval_loss", "held-out loss (each system's own)"),
    ("bits_per_byte", "eval_bits_per_byte", "bits per byte of held-out answers (bounds for masked diffusion)"),
]


def draw(results: Results, directory: Path) -> list[Path]:
    """Writes the plots as SVG files, and returns their paths: none where matplotlib is not installed.

    Args:
      results: of the comparison.
      directory: for the files.
    """
    if importlib.util.find_spec("matplotlib") is None:
        return []
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    matplotlib.rcParams["svg.hashsalt"] = "headline"  # equal figures give equal files
    directory.mkdir(parents=True, exist_ok=True)
    found = curves(results)
    plots = {"tokens_per_forward": ("tokens per forward", lambda p: p.tokens_per_forward)}
    for size in map(str, BATCH_SIZES):
        plots[f"tokens_per_second_{size}"] = (f"tokens per second, {size} at a time", lambda p, s=size: p.speed[s])
    drawn = {}
    for name, (label, figure) in plots.items():
        fig, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
        for curve in found:
            _plot_curve(axes, curve, figure)
        axes.set(xlabel=label, ylabel="exact match", xscale="log")
        axes.legend(fontsize="small")
        drawn[f"accuracy_by_{name}"] = fig
    drawn["accuracy_by_family"] = _by_family(pyplot, found)
    for name, kept, label in _TRAINING:
        drawn[f"{name}_by_tokens"] = _over_tokens(pyplot, results, kept, label)
    for topology in dict.fromkeys(record["topology"] for record in results.tpu_estimates):
        own = [record for record in results.tpu_estimates if record["topology"] == topology]
        drawn[f"estimate_{topology.replace(':', '_')}"] = _estimates(pyplot, topology, own)
    for name, fig in drawn.items():
        fig.savefig(directory / f"{name}.svg", metadata={"Date": None})
        pyplot.close(fig)
    return [directory / f"{name}.svg" for name in drawn]


def _plot_curve(axes, curve: Curve, figure) -> None:
    """Points in the order of x; the band reaches from the least to the most accurate seed."""
    points = sorted(curve.points, key=lambda point: figure(point).mean)
    x = [figure(point).mean for point in points]
    (line,) = axes.plot(x, [point.accuracy.mean for point in points], marker="o", markersize=3, label=curve.name)
    least, most = ([getattr(point.accuracy, end) for point in points] for end in ("least", "most"))
    axes.fill_between(x, least, most, color=line.get_color(), alpha=0.15)


def _by_family(pyplot, found: list[Curve]):
    """Accuracy of each decoder in each family, at its fastest point near its best accuracy, as colours."""
    names = list(found[0].points[0].families)
    cells = [[curve.fastest(str(BATCH_SIZES[0])).families[name].mean for name in names] for curve in found]
    fig, axes = pyplot.subplots(figsize=(9, 1.5 + 0.35 * len(found)), layout="constrained")
    image = axes.imshow(cells, vmin=0, vmax=1, aspect="auto", cmap="viridis")
    axes.set_xticks(range(len(names)), names, rotation=45, ha="right")
    axes.set_yticks(range(len(found)), [curve.name for curve in found])
    fig.colorbar(image, label="exact match")
    return fig


def _name(record: dict[str, Any]) -> str:
    return name_of(record["system"], record["decoder"], record["start"])


def _over_tokens(pyplot, results: Results, name: str, label: str):
    """One of the records of training over tokens."""
    fig, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    colors = {}
    for run in results.runs:
        records = [record for record in run["losses"] if name in record]
        if not records:
            continue
        is_new = (model := model_name(run)) not in colors
        (line,) = axes.plot(
            [record["tokens"] for record in records],
            [record[name] for record in records],
            color=colors.get(model),
            label=model if is_new else None,
        )
        colors[model] = line.get_color()
    axes.set(xlabel="tokens trained on", ylabel=label, yscale="log")
    if colors:
        axes.legend(fontsize="small")
    return fig


def _estimates(pyplot, topology: str, own: list[dict[str, Any]]):
    """Estimated speedup of each decoder over one token per forward, by batch size."""
    fig, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    for record in own:
        sizes, ratios = zip(*[(b["batch_size"], b["speedup"]) for b in record["batches"]], strict=True)
        axes.plot(sizes, ratios, marker="o", markersize=3, label=_name(record))
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set(xlabel=f"rows at once on {topology}", ylabel="times one token per forward", xscale="log", yscale="log")
    axes.set_title("estimate, not calibrated")
    axes.legend(fontsize="small")
    return fig
