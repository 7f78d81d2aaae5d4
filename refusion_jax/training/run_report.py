"""A page that shows runs: their metrics as charts, answers to tasks, where the time went, and how their configs differ.

The page loads nothing, and its charts take the colours of the reader's theme. Everything it shows is read from the
directories of the runs, and escaped.
"""

import contextlib
import dataclasses
import html
import io
import json
import logging
import re
import statistics
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jinja2
import numpy as np
from etils import epath

from refusion_jax.cli.errors import UserError
from refusion_jax.config import default_config, flatten
from refusion_jax.config.run_config import read_config
from refusion_jax.decoding import player
from refusion_jax.distributed.append_log import read_log
from refusion_jax.distributed.json_files import to_type
from refusion_jax.training import events
from refusion_jax.training.metrics import SAMPLES, read_metrics

BEGINNING = b"<!doctype html><!-- runs, by refusion_jax.report -->"  # of every page
PAGES = jinja2.Environment(
    loader=jinja2.PackageLoader("refusion_jax.training", ""), autoescape=True, undefined=jinja2.StrictUndefined
)
MOST = 8  # runs per page: the colours of more could not be told apart
_POINTS = 300  # per line; more are averaged, within a band from the lowest to the highest

# Colours by name; the dark theme of the page has others.
_COLORS = dict(
    zip(
        ("ink", "pale", "line", *(f"c{i}" for i in range(MOST))),
        "#1b1f24 #5b6470 #c9ced6 #0b62c4 #b35a00 #1a7f4b #8338b8 #b3261e #00717a #a3286b #6b5b00".split(),
        strict=True,
    )
)
_SECTIONS = (  # title, pattern of the names of its metrics, caption
    ("Loss", r"loss(_\w+)?", "Of training, and the parts that it is the weighted sum of."),
    ("Held-out loss", r"eval_(loss\w*|bits_per_byte)", "With the same noise in each step and run."),
    ("Tasks", r"(?!eval_(?:loss|bits_per_byte))eval_.+", "Scores, and how the answers were decoded."),
    ("Optimizer", r"grad_norm|learning_rate", "The norm is that before clipping."),
    ("Throughput", r"tokens_per_second|mfu", "Between logged steps, evaluations and saves left out."),
)
_GROUP = re.compile(r"(eval_loss_.+)_(\d+)")  # the held-out loss of the tokens with one value of a diagnostic
_ABOUT_GROUPS = "Of the tokens with one value of a diagnostic; shares are in quarters, named by their upper end in %."
_SAMPLE = {"step": int, "task": str, "problem": int, "asked": str, "answered": str, "right": str}
_SUMMARY = ("objective", "step", "tokens", "loss", "held-out loss", "tokens/s", "MFU", "goodput", "ended")


class ShownRun(NamedTuple):
    """What the directory of a run holds."""

    name: str  # its number on the page, and its directory
    color: str
    config: dict[str, Any]  # by dotted key
    records: list[dict[str, Any]]  # metrics, in the order of steps
    events: list[dict[str, Any]]
    samples: list[dict[str, Any]]  # answers to tasks, by _SAMPLE

    def values(self, name: str) -> list[tuple[float, float]]:
        """(tokens trained on, value) of a metric."""
        found = [(record.get("tokens"), record.get(name)) for record in self.records]
        return [(x, y) for x, y in found if events.is_number(x) and events.is_number(y)]


class ChartLine(NamedTuple):
    """One metric of one run."""

    label: str
    color: str
    points: list[tuple[float, float]]  # tokens trained on, value


@dataclasses.dataclass
class Chart:
    """Lines over the tokens trained on; `draw` adds the pictures."""

    title: str
    lines: list[ChartLine]
    has_legend: bool  # because its colours are not those of the runs
    svg: str = ""
    png: bytes = b""


def read_run(number: int, workdir: str) -> ShownRun:
    """Reads a run, which may still be in progress; refuses a directory that has nothing to show."""
    path = epath.Path(workdir)
    if not (path / "config.json").exists():
        raise UserError(f"--workdir={workdir}: holds no run (there is no config.json)")
    if not (records := read_metrics(path)):
        raise UserError(f"--workdir={workdir}: there is no record in its metrics.jsonl yet")
    config = flatten(json.loads(read_config(path).to_json()))
    samples = [s for s in read_log(path / SAMPLES) if all(type(s.get(name)) is kind for name, kind in _SAMPLE.items())]
    return ShownRun(f"{number} {workdir}", f"c{number - 1}", config, records, events.read_events(path), samples)


def sections(runs: Sequence[ShownRun]) -> list[tuple[str, str, list[Chart]]]:
    """(title, caption, charts) of each section that has metrics."""
    names = sorted({name for run in runs for record in run.records for name in record})
    grouped = {name: match for name in names if (match := _GROUP.fullmatch(name))}
    found = []
    for title, pattern, about in _SECTIONS:
        own = [name for name in names if re.fullmatch(pattern, name) and name not in grouped]
        found.append((title, about, [_chart(x, [(run.name, run.color, run.values(x)) for run in runs]) for x in own]))
        if title == "Held-out loss":
            found.append((f"{title} by group", _ABOUT_GROUPS, _groups(runs, grouped)))
    shown = [(title, about, [chart for chart in charts if chart.lines]) for title, about, charts in found]
    return [section for section in shown if section[-1]]


def _groups(runs: Sequence[ShownRun], names: dict[str, re.Match]) -> Iterator[Chart]:
    for prefix in dict.fromkeys(match[1] for match in names.values()):
        values = sorted((int(match[2]), name) for name, match in names.items() if match[1] == prefix)
        for run in runs:
            lines = [(str(value), f"c{i % MOST}", run.values(name)) for i, (value, name) in enumerate(values)]
            yield _chart(f"{prefix}{f', {run.name}' if len(runs) > 1 else ''}", lines, has_legend=True)


def _chart(title: str, lines: list[tuple], has_legend: bool = False) -> Chart:
    title = title.encode(errors="replace").decode()  # JSON may hold lone surrogates
    return Chart(title, [ChartLine(*line) for line in lines if line[-1]], has_legend)


def draw(chart: Chart) -> None:
    """Draws a chart: as SVG for the page, which has its own legends, and as PNG with title and legend."""
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # it warns of missing fonts
    pale, line = _COLORS["pale"], _COLORS["line"]
    rc = {"svg.fonttype": "none", "svg.hashsalt": "report", "text.parse_math": False, "font.size": 11}
    rc |= {"text.color": _COLORS["ink"], "axes.labelcolor": pale, "xtick.color": pale, "ytick.color": pale}
    rc |= {"axes.edgecolor": line, "grid.color": line, "axes.spines.top": False, "axes.spines.right": False}
    with matplotlib.rc_context(rc), warnings.catch_warnings(action="ignore"):
        figure, drawn = Figure(figsize=(5.4, 3.2), layout="constrained"), []
        axes = figure.subplots()
        for own in chart.lines:
            parts = np.array_split(np.array(own.points), min(len(own.points), _POINTS))
            x, y, least, most = np.array([(*p.mean(0), p[:, 1].min(), p[:, 1].max()) for p in parts]).T
            style = {"color": _COLORS[own.color], "marker": "o" if len(parts) <= 40 else None}
            drawn += axes.plot(x, y, linewidth=1.6, markersize=3, **style)
            axes.fill_between(x, least, most, color=_COLORS[own.color], alpha=0.15, linewidth=0)
        axes.set_xlabel("tokens trained on")
        axes.xaxis.set_major_formatter(EngFormatter(sep=" "))
        if max(y for own in chart.lines for _, y in own.points) >= 10_000:
            axes.yaxis.set_major_formatter(EngFormatter(sep=" "))
        axes.grid(alpha=0.6)
        figure.savefig(svg := io.StringIO(), format="svg", transparent=True)
        axes.set_title(chart.title, fontsize=11)
        axes.legend(drawn, [own.label for own in chart.lines], fontsize=8)
        figure.savefig(png := io.BytesIO(), format="png", dpi=150)
    chart.svg, chart.png = _inline(svg.getvalue(), chart.title), png.getvalue()


def _inline(svg: str, title: str) -> str:
    """A matplotlib SVG, prepared for embedding: with the page's colours, and as wide as the page allows."""
    opening, _, rest = svg[svg.index("<svg") :].partition(">")
    rest = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>", "", rest, flags=re.DOTALL)
    rest = re.sub(r' id="[a-zA-Z0-9.]+_\d+"', "", rest)  # every figure has the same ones
    for name, color in _COLORS.items():
        rest = rest.replace(color, f"var(--{name})")
    view_box = re.search(r'viewBox="[^"]*"', opening)[0]
    return f'<svg role="img" aria-label="{html.escape(title)}" {view_box}>{rest}'


def _summary(run: ShownRun) -> list[str]:
    """The cells of a run in the summary table, by _SUMMARY: last values, and medians of rates."""

    def shown(name: str, form: str, of: Callable = lambda values: values[-1]) -> str:
        return format(of([y for _, y in found]), form) if (found := run.values(name)) else ""

    ends = [event for event in run.events if event["event"] in ("start", "end")]
    return [
        str(run.config["objective"]),
        f"{run.records[-1]['step']:,} of {run.config['steps']:,}",
        shown("tokens", ",.0f"),
        shown("loss", ".4f"),
        shown("eval_loss", ".4f"),
        shown("tokens_per_second", ",.0f", statistics.median),
        shown("mfu", ".1%", statistics.median),
        f"{events.account(run.events)['goodput']:.1%}" if run.events else "",
        str(ends[-1].get("reason", "not yet")) if ends else "",
    ]


def _goodput(run: ShownRun) -> tuple[str, str, list[tuple[str, float, str]]]:
    """(name, goodput as a line of text, (part, share, colour) of each part of the time)."""
    spent = events.account(run.events)
    colors = dict(zip(events.PARTS, "c0 c5 c2 c6 c7 c1 c4 pale c3".split(), strict=True))
    whole = max(spent["total"], 1e-9)
    parts = [(part, spent[part] / whole, colors[part]) for part in events.PARTS if spent[part] > 0]
    return run.name, events.describe(spent).partition(":")[0], parts


def _answers(runs: Sequence[ShownRun]) -> list[tuple]:
    """(task, problem, asked, right, [(run, sample) of each run]), with the last answer of each run."""
    found: dict[tuple, list[tuple[ShownRun, dict]]] = {}
    for run in runs:
        for s in {(s["task"], s["problem"]): s for s in run.samples}.values():
            found.setdefault((s["task"], s["problem"], s["asked"], s["right"]), []).append((run, s))
    return [(*key, found[key]) for key in sorted(found)]


def played(runs: Sequence[ShownRun]) -> list[tuple[str, list[player.Scene]]]:
    """The scenes in `_answers`, for the player: (task and problem, the decodings of the runs side by side)."""
    found = []
    for task, problem, *_, given in _answers(runs):
        scenes = []
        for run, sample in given:
            with contextlib.suppress(UserError):  # written by another version
                scene = to_type(sample.get("scene"), player.Scene, "scene")
                scenes.append(dataclasses.replace(scene, system=f"{run.name}, step {sample['step']}: {scene.system}"))
        if scenes:
            found.append((f"{task} {problem}", scenes))
    return found


def _differences(runs: Sequence[ShownRun]) -> tuple[list[str], list[tuple[str, list[str]]]]:
    """(head, rows) of the table of config keys that differ: between runs, or between a single run and the defaults."""
    columns = {run.name: run.config for run in runs}
    if len(runs) == 1:
        columns["default"] = flatten(json.loads(default_config().to_json()))
    keys = dict.fromkeys(key for config in columns.values() for key in config)
    rows = [(key, [json.dumps(config.get(key)) for config in columns.values()]) for key in keys]
    return ["key", *columns], [row for row in rows if len(set(row[1])) > 1]


def page(runs: Sequence[ShownRun], shown: Sequence[tuple[str, str, list[Chart]]]) -> str:
    """The HTML page of runs, with sections whose charts have been drawn."""
    return PAGES.get_template("run_report.html").render(
        runs=[(run, _summary(run)) for run in runs],
        summary=_SUMMARY,
        sections=shown,
        goodput=[_goodput(run) for run in runs if run.events],
        answers=_answers(runs),
        played=[id for id, _ in played(runs)],
        differences=_differences(runs),
        colors=_COLORS,
    )
