"""The page on training: data efficiency, the learning rates that were tried, and the ablations of the systems."""

import collections
import statistics
from collections.abc import Sequence

from refusion_jax.benchmarks._markdown import prose, table
from refusion_jax.benchmarks.headline.curves import MARGIN, is_near
from refusion_jax.benchmarks.headline.results import Scored, Trained, name_of


def bits(runs: Sequence[Trained]) -> list[str]:
    """Bits per byte over training, where systems have a likelihood; and when the best is where each other ends."""
    found = collections.defaultdict(lambda: collections.defaultdict(list))
    tokens, bounded = collections.defaultdict(list), set()
    for run in runs:
        system = name_of(run["system"], run["system"], run["start"])
        for record in run["losses"]:
            if "eval_bits_per_byte" in record:
                found[system][record["step"]].append(record["eval_bits_per_byte"])
                tokens[record["step"]].append(record["tokens"])
                bounded |= {system} if record.get("eval_bits_per_byte_is_bound") else set()
    if not found:
        return []
    means = {system: {step: statistics.mean(own[step]) for step in sorted(own)} for system, own in found.items()}
    shown = {step: f"{statistics.mean(tokens[step]) / 1e6:.2f} M tokens" for step in sorted(tokens)}
    rows = [
        [system, *("≤ " * (system in bounded) + f"{own[step]:.3f}" if step in own else "" for step in shown)]
        for system, own in means.items()
    ]
    about = (
        "Bits per byte of held-out answers, given their prompts, by tokens of training; the mean of the seeds. Exact "
        "where a system writes token by token or slot by slot, in reading order; ≤ marks a bound, by one draw per text."
    )
    last = {system: own[max(own)] for system, own in means.items()}
    best = min(last, key=last.get)
    told = []
    for system, end in last.items():
        sooner = next(step for step, value in means[best].items() if value <= end)
        if system != best:
            told.append(f"* {best} has reached the final {end:.3f} of {system} after {shown[sooner]}, or before.")
    return ["### Data efficiency", prose(about), table(["system", *shown.values()], rows), *_list(told)]


def _list(lines: list[str]) -> list[str]:
    return ["\n".join(lines)] if lines else []


def sweep(trials: Sequence[Trained]) -> list[str]:
    """The learning rates that were tried."""
    if not trials:
        return []
    rows = [
        (t["system"], f"{t['learning_rate']:g}", f"{t['losses'][-1].get('eval_loss', float('nan')):.4f}")
        for t in trials
    ]
    why = (
        "A short run for each rate; the least held-out loss decides. Where the highest or the lowest rate is best, "
        "the search goes on. Losses of different systems do not compare."
    )
    return ["### Learning rates", prose(why), table(("system", "learning rate", "held-out loss"), rows)]


def ablations(records: Sequence[Scored]) -> list[str]:
    """The ablations of the systems, by training step; and which setting is best at the last one."""
    parts = []
    for title in dict.fromkeys(record["ablation"] for record in records):
        own = [record for record in records if record["ablation"] == title]
        steps = sorted({record["step"] for record in own})
        setups = collections.defaultdict(lambda: collections.defaultdict(list))
        for r in own:
            figures = r["accuracy"], r["tokens_per_forward"]
            setups[r["system"], r["settings"] or "its own"][r["step"]].append(figures)
        means = {
            setup: {step: tuple(map(statistics.mean, zip(*figures, strict=True))) for step, figures in by_step.items()}
            for setup, by_step in setups.items()
        }
        rows = [
            [*setup, *(f"{figures[s][0]:.1%} ({figures[s][1]:.2f})" if s in figures else "" for s in steps)]
            for setup, figures in means.items()
        ]
        told = [_best_of(system, means, steps[-1]) for system in dict.fromkeys(system for system, _ in means)]
        parts += [
            f"### Ablation: {title}",
            "Right, and in brackets tokens per forward.",
            table(("system", "setting", *(f"step {step}" for step in steps)), rows),
            *_list([line for line in told if line]),
        ]
    return parts


def _best_of(system: str, means: dict[tuple[str, str], dict[int, tuple[float, float]]], step: int) -> str:
    """The most accurate setting of a system at a step, and the widest near it; "" if there is but one."""
    own = {settings: figures[step] for (name, settings), figures in means.items() if name == system and step in figures}
    if len(own) < 2:
        return ""
    best = max(own, key=lambda settings: own[settings][0])
    wide = max((s for s in own if is_near(own[s][0], own[best][0])), key=lambda settings: own[settings][1])
    line = f"* {system} at step {step}: no setting is more accurate than {best}: {_told(own[best])}"
    if wide == best:
        line += f", and none within {MARGIN} of it writes more tokens per forward."
    else:
        line += f". Within {MARGIN} of it, the most tokens per forward are those of {wide}: {_told(own[wide])}."
    return prose(line, indent="  ")


def _told(figures: tuple[float, float]) -> str:
    accuracy, tokens = figures
    return f"{accuracy:.1%}, {tokens:.2f} tokens per forward"
