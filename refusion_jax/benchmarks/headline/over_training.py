"""The page on training: data efficiency, the learning rates that were tried, and the studies of the systems."""

import collections
import statistics
import textwrap
from typing import Any

from refusion_jax.benchmarks.headline.curves import MARGIN, WITHIN, model_name

WIDTH = 120  # columns of prose


def bits(runs: list[dict[str, Any]], title: str, what: str) -> list[str]:
    """Bits per byte over training, where systems have a likelihood; and when the best is where each of the others ends.

    Args:
      runs: of `results.json`.
      title: of the section.
      what: begins its first sentence.
    """
    found = collections.defaultdict(lambda: collections.defaultdict(list))
    tokens, bounded = collections.defaultdict(list), set()
    for run in runs:
        for record in run["losses"]:
            if "eval_bits_per_byte" in record:
                found[model_name(run)][record["step"]].append(record["eval_bits_per_byte"])
                tokens[record["step"]].append(record["tokens"])
                bounded |= {model_name(run)} if record.get("eval_bits_per_byte_is_bound") else set()
    if not found:
        return []
    means = {system: {step: statistics.mean(own[step]) for step in sorted(own)} for system, own in found.items()}
    shown = {step: f"{statistics.mean(tokens[step]) / 1e6:.2f} M tokens" for step in sorted(tokens)}
    rows = [f"| system | {' | '.join(shown.values())} |", "| --- " * (1 + len(shown)) + "|"]
    for system, own in means.items():
        cells = ["≤ " * (system in bounded) + f"{own[step]:.3f}" if step in own else "" for step in shown]
        rows.append(f"| {system} | {' | '.join(cells)} |")
    prose = (
        f"{what}, by tokens of training; the mean of the seeds. Exact where a system writes token by token or slot by "
        f"slot, in reading order; ≤ marks a bound, by one draw a text."
    )
    last = {system: own[max(own)] for system, own in means.items()}
    best = min(last, key=last.get)
    told = []
    for system, end in last.items():
        sooner = next(step for step, value in means[best].items() if value <= end)
        if system != best:
            told.append(f"* {best} has reached the final {end:.3f} of {system} after {shown[sooner]}, or before.")
    return [title, textwrap.fill(prose, WIDTH), "\n".join(rows), *(["\n".join(told)] if told else [])]


def sweep(results: dict[str, Any]) -> list[str]:
    """The learning rates that were tried."""
    if not results["sweep"]:
        return []
    rows = ["| system | learning rate | held-out loss |", "| --- | --- | --- |"]
    for trial in results["sweep"]:
        loss = trial["losses"][-1].get("eval_loss", float("nan"))
        rows.append(f"| {trial['system']} | {trial['learning_rate']:g} | {loss:.4f} |")
    why = (
        "Short runs, one a rate; the least held-out loss decides. Where the highest or the lowest rate is best, "
        "the search goes on. Losses of different systems do not compare."
    )
    return ["### Learning rates", textwrap.fill(why, WIDTH), "\n".join(rows)]


def studies(results: dict[str, Any]) -> list[str]:
    """The studies of the systems, by training step; and which setting is best at the last one."""
    parts = []
    for title in dict.fromkeys(record["study"] for record in results["studies"]):
        own = [record for record in results["studies"] if record["study"] == title]
        steps = sorted({record["step"] for record in own})
        ways = collections.defaultdict(lambda: collections.defaultdict(list))
        for r in own:
            figures = r["accuracy"], r["tokens_per_forward"]
            ways[r["system"], r["settings"] or "its own"][r["step"]].append(figures)
        means = {
            way: {step: tuple(map(statistics.mean, zip(*figures, strict=True))) for step, figures in by_step.items()}
            for way, by_step in ways.items()
        }
        rows = [
            f"| system | setting | {' | '.join(f'step {step}' for step in steps)} |",
            "| --- " * (2 + len(steps)) + "|",
        ]
        for (system, settings), figures in means.items():
            cells = [f"{figures[s][0]:.1%} ({figures[s][1]:.2f})" if s in figures else "" for s in steps]
            rows.append(f"| {system} | {settings} | {' | '.join(cells)} |")
        told = [_best_of(system, means, steps[-1]) for system in dict.fromkeys(system for system, _ in means)]
        text = "\n".join(filter(None, told))
        parts += [
            f"### Study: {title}",
            "Right, and in brackets tokens a forward.",
            "\n".join(rows),
            *([text] if text else []),
        ]
    return parts


def _best_of(system: str, means: dict[tuple[str, str], dict[int, tuple[float, float]]], step: int) -> str:
    """The most accurate setting of a system at a step, and the widest near it; "" if there is but one."""
    own = {settings: figures[step] for (name, settings), figures in means.items() if name == system and step in figures}
    if len(own) < 2:
        return ""
    best = max(own, key=lambda settings: own[settings][0])
    wide = max((s for s in own if own[s][0] >= own[best][0] - WITHIN), key=lambda settings: own[settings][1])
    line = f"* {system} at step {step}: no setting is more accurate than {best}: {_told(own[best])}"
    if wide == best:
        line += f", and none within {MARGIN} of it writes more tokens a forward."
    else:
        line += f". Within {MARGIN} of it, the most tokens a forward are those of {wide}: {_told(own[wide])}."
    return textwrap.fill(line, WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def _told(figures: tuple[float, float]) -> str:
    accuracy, tokens = figures
    return f"{accuracy:.1%}, {tokens:.2f} tokens a forward"
