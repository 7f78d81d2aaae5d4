"""A comparison as Markdown: the table, conclusions computed from the figures, and which of the papers' claims hold."""

import collections
import math
import statistics
import textwrap
from collections.abc import Iterable, Sequence

from refusion_jax.benchmarks.headline.curves import (
    MARGIN,
    PROXY,
    Curve,
    Figure,
    Measured,
    claimed,
    curves,
    under_parallelism,
)
from refusion_jax.benchmarks.headline.experiment import BATCH_SIZES
from refusion_jax.benchmarks.headline.measure import PROXY_PROBLEMS, PROXY_REPEATS, REPEATS
from refusion_jax.benchmarks.headline.results import Results, Trained
from refusion_jax.systems.interface import Claim
from refusion_jax.systems.registry import systems

_ONE, _MANY = map(str, BATCH_SIZES)
_SHOWN = (1, 4, 16, 64, 256)  # batch sizes of the estimates
_BUSY = 1.5  # load per core above which other processes must be running
_CEILING = 0.99  # accuracies above it count as equal
_WIDTH = 120  # columns of prose


def report(results: Results, plots: Sequence[str] = ()) -> str:
    """The whole page; `plots` are paths of images to show, relative to it."""
    found = sorted(curves(results), key=lambda curve: -curve.fastest(_ONE).accuracy.mean)
    parts = [
        f"## The headline, budget `{results.about['budget']}`",
        _conditions(results),
        f"```bash\n{results.about['command']}\n```",
        _table(found, results),
        "### What follows",
        _conclusions(found, results),
        "### What the papers claim",
        claims(found),
        *_proxy_speeds(found, results),
        "### By family",
        _families(found),
        *(["### Plots", "\n".join(f'<img src="{path}" width="49%">' for path in plots)] if plots else []),
        *_bits(results.runs),
        *_estimates(results),
        *_sweep(results.sweep),
    ]
    return "\n\n".join(parts) + "\n"


def _conditions(results: Results) -> str:
    about = results.about
    c, m, tokens = about["config"], about["machine"], results.runs[0].tokens
    load = max(record.load for record in (*results.points, *results.timings))
    lines = [
        f"Each system trains a transformer of width {c['model']['hidden_size']} with "
        f"{c['model']['num_hidden_layers']} layers on {tokens:,} tokens ({c['steps']:,} steps of {c['batch_size']} "
        f"rows of {c['row_length']}). Each of its decoders then answers {about['problems']} validation problems of "
        f"difficulty {c['data']['difficulty']} in at most {about['new_tokens']} tokens, with every setting that is "
        f"compared.",
        f"The tables show each decoder with its fastest setting for one prompt at a time among those within {MARGIN} "
        f"of its best validation accuracy. Accuracy and tokens per forward are means over the seeds, with the minimum "
        f"and maximum in brackets, on a test set with as many problems of each family. Tokens per second are measured "
        f"with the models of the first seed on {about['timed']} validation problems: mean, minimum and maximum of "
        f"{REPEATS} interleaved repeats. Ratios of speeds are medians over the repeats. Only tokens of the answer "
        f"count. AUP is the area under the curve of validation accuracy over tokens per forward, prefill included, "
        f"with less weight on accuracies below the best one (arXiv 2601.07568).",
        f"Measured on {m['cores']} cores of {m['processor']} ({m['device']}; {m['memory_gib']} GiB; load average "
        f"{load:.1f} at most), jax {about['versions']['jax']}, at commit "
        f"{', '.join(filter(None, results.commits)) or 'unknown'}.",
    ]
    if starts := {run.start for run in results.runs} - {""}:
        (start,) = starts
        lines.append(
            f"“from {start}” is a model that starts from the weights of {start} after half of the steps and trains for "
            f"the other half on new problems: on as many tokens in total. Its training time is that of its own half."
        )
    if results.auxiliaries:
        lines.append(
            f"Drafters and verifiers ({len(results.auxiliaries)}) are trained as well, each for one model: the columns "
            f"leave out their training; their forward passes cost time, but do not count in tokens per forward."
        )
    if len(results.machines) > 1:
        lines.append(f"Speeds were measured in several places and do not compare: {'; '.join(results.machines)}.")
    if load > _BUSY * m["cores"]:
        lines.append("Other work shared the machine, more at some times than at others: its speeds do not compare.")
    if about["budget"] == "tiny":
        lines.append(
            "**This budget is a smoke test: its runs are too short to learn the problems. It shows that the comparison "
            "runs, and nothing about the systems.**"
        )
    return "\n\n".join(map(prose, lines))


def _table(found: list[Curve], results: Results) -> str:
    runs = {(run.system, run.start): run for run in results.runs}
    best = max(point.accuracy.mean for curve in found for point in curve.points)
    rows = []
    for curve in found:
        point, run = curve.fastest(_ONE), runs[curve.system, curve.start]
        rows.append(
            [
                curve.name,
                str(len(point.scores)),
                _told(point.accuracy, ".1%"),
                _told(point.figure("tokens_per_forward"), ",.2f"),
                f"{point.figure('tokens_per_forward_without_eos').mean:.2f}",
                f"{point.figure('tokens_per_forward_with_prefill').mean:.2f}",
                f"{under_parallelism(curve, best):.0f}",
                _told(point.timed[_ONE]),
                _told(point.timed[_MANY]),
                point.settings or "its own",
                f"{run.learning_rate:g}",
                f"{run.seconds:.0f}",
            ]
        )
    names = ["system", "seeds", "exact match", "tokens/forward", "without EOS", "with the prefill", "AUP"]
    names += ["tokens/s at 1", "tokens/s at 16", "setting", "learning rate", "training, s"]
    return table(names, rows)


def _told(figure: Figure, form: str = ",.0f") -> str:
    """The mean and, for several values, their range in brackets."""
    spread = f" ({figure.least:{form}} to {figure.most:{form}})" if len(figure) > 1 else ""
    return f"{figure.mean:{form}}{spread}"


def _conclusions(found: list[Curve], results: Results) -> str:
    """Which decoders no other one beats in accuracy and speed; and which ones beat those that papers claim to lead."""
    lines = []
    for size in (_ONE, _MANY):
        better = {curve.name: _better_than(curve, found, size) for curve in found}
        front = ", ".join(
            f"{curve.name} ({point.accuracy.mean:.1%}, {point.timed[size].mean:,.0f} tokens/s)"
            for curve in found
            if not better[curve.name]
            for point in [curve.fastest(size)]
        )
        lines.append(
            f"{size} prompt{'s' * (size != _ONE)} at a time, each decoder at its fastest setting within {MARGIN} "
            f"of its own best, the Pareto front of exact match and tokens per second is {front}."
        )
        lines += [
            f"{curve.name}, {size} at a time ({curve.fastest(size).accuracy.mean:.1%}): at least as accurate and "
            f"as fast are {', '.join(better[curve.name])}."
            for curve in found
            if better[curve.name] and systems()[curve.system].claims and curve.is_default
        ]
    same = sum(record.same_text for record in results.points) / len(results.points)
    lines.append(f"In {same:.1%} of all cases an answer was the same at a batch size of {_ONE} and of {_MANY}.")
    return "\n".join(prose(f"* {line}", indent="  ") for line in lines)


def _better_than(own: Curve, found: list[Curve], size: str) -> list[str]:
    """The decoders that are at least as accurate and as fast, with their figures."""
    told = []
    for curve in found:
        accuracy, ratio = curve.fastest(size).accuracy.mean, curve.times_as_fast(own, size)
        if curve is not own and accuracy >= own.fastest(size).accuracy.mean and ratio >= 1:
            told.append(f"{curve.name} ({accuracy:.1%}, {ratio:.2f}x the tokens/s)")
    return told


def verdict(claim: Claim, own: Measured, rival: Measured, speed: float) -> tuple[bool, float, bool]:
    """(whether a claim holds, accuracy as a multiple of the rival's, whether both are at the ceiling).

    Each decoder is at its fastest point within curves.WITHIN of its best accuracy. At the ceiling, the claim about
    accuracy counts as met.
    """
    here, there = own.accuracy.mean, rival.accuracy.mean
    accuracy, ceiling = here / there if there else math.inf if here else 1.0, min(here, there) >= _CEILING
    return (accuracy >= claim.accuracy or ceiling) and speed >= claim.speed, accuracy, ceiling


def claims(found: list[Curve]) -> str:
    """A table of the papers' claims, with the speeds of the models themselves and, if there are any, of the proxy."""
    rows = []
    for claim, own, rival in claimed(found):
        for size, weights in ((_ONE, "their own"), (PROXY, "of the speed proxy")):
            if own.is_timed(size) and rival.is_timed(size):
                speed = own.times_as_fast(rival, size)
                holds, accuracy, ceiling = verdict(claim, own.fastest(size), rival.fastest(size), speed)
                accuracies = f"{claim.accuracy:.2f}x", f"{accuracy:.2f}x{' (ceiling)' * ceiling}"
                speeds = f"{claim.speed:.2f}x", f"{speed:.2f}x"
                rows.append((own.name, rival.name, weights, *accuracies, *speeds, "yes" if holds else "no"))
    names = ["system", "versus", "weights", "accuracy, claimed", "measured", "tokens/s at 1, claimed"]
    names += ["measured", "holds"]
    return table(names, rows) if rows else "No system here has a claim about another one of them."


def _proxy_speeds(found: list[Curve], results: Results) -> list[str]:
    """A paragraph about the speed proxy, and a table of speeds at its cost."""
    if not results.proxy_timings:
        return []
    first = results.proxy_timings[0]
    about = (
        f"Weights of the speed proxy: each forward pass of these decoders is also computed by a model of "
        f"{first.parameters / 1e6:.1f} M random parameters ({first.shape}), while the trained model decides what "
        f"is written (refusion_jax/benchmarks/headline/speed_proxy.py): the speed of a model of that size that writes "
        f"the same answers, one prompt at a time. Each decoder has its fastest setting with the proxy, within {MARGIN} "
        f"of its best accuracy; at most {PROXY_PROBLEMS} problems in {PROXY_REPEATS} interleaved repeats."
    )
    rows = []
    for curve in found:
        if curve.is_timed(PROXY):
            point = curve.fastest(PROXY)
            row = curve.name, point.settings or "its own", _told(point.accuracy, ".1%")
            rows.append((*row, _told(point.figure("tokens_per_forward"), ",.2f"), _told(point.timed[PROXY])))
    names = "system", "setting", "exact match", "tokens/forward", "tokens/s at 1, by proxy"
    return [prose(about), table(names, rows)]


def _families(found: list[Curve]) -> str:
    names = list(found[0].points[0].scores[0].families)
    rows = [[c.name, *(f"{c.fastest(_ONE).of_family(name).mean:.0%}" for name in names)] for c in found]
    return table(["system", *names], rows)


def _estimates(results: Results) -> list[str]:
    if not results.tpu_estimates:
        return []
    about = (
        "**An uncalibrated estimate; nothing here ran on a TPU.** It is computed (refusion_jax/benchmarks/headline/"
        "tpu_estimates.py) from the number of forward passes of these answers and from their compiled width, for a "
        f"model of {results.tpu_estimates[0].model.upper()} parameters in bfloat16 whose heads are split over all "
        f"chips. Each batch size has the fastest setting within {MARGIN} of the best accuracy. In brackets: the "
        "speedup over writing the same answers at one token per forward."
    )
    parts = ["### The same decoding on TPUs", prose(about)]
    for topology in dict.fromkeys(record.topology for record in results.tpu_estimates):
        own = [record for record in results.tpu_estimates if record.topology == topology]
        own.sort(key=lambda record: -record.batches[0].tokens_per_second)
        rows = []
        for record in own:
            first, shown = record.batches[0], [b for b in record.batches if b.batch_size in _SHOWN]
            speeds = (f"{b.tokens_per_second:,.0f} ({b.speedup:.2f}x)" for b in shown)
            row = record.name, first.settings or "its own", f"{first.tokens_per_forward:.2f}"
            rows.append((*row, *speeds, str(record.faster_up_to or "none")))
        sizes = (f"tokens/s at {size}" for size in _SHOWN)
        names = f"{topology}, estimate", "setting at 1", "tokens/forward at 1", *sizes, "faster up to a batch of"
        parts.append(table(names, rows))
    return parts


def _bits(runs: Sequence[Trained]) -> list[str]:
    """Bits per byte over training, for systems with a likelihood; and when the best reaches where the others end."""
    found = collections.defaultdict(lambda: collections.defaultdict(list))
    tokens, bounded = collections.defaultdict(list), set()
    for run in runs:
        for record in run.losses:
            if record.eval_bits_per_byte is not None:
                found[run.model][record.step].append(record.eval_bits_per_byte)
                tokens[record.step].append(record.tokens)
                bounded |= {run.model} if record.eval_bits_per_byte_is_bound else set()
    if not found:
        return []
    means = {system: {step: statistics.mean(own[step]) for step in sorted(own)} for system, own in found.items()}
    shown = {step: f"{statistics.mean(tokens[step]) / 1e6:.2f} M tokens" for step in sorted(tokens)}
    rows = [
        [system, *("≤ " * (system in bounded) + f"{own[step]:.3f}" if step in own else "" for step in shown)]
        for system, own in means.items()
    ]
    about = (
        "Bits per byte of held-out answers, given their prompts, after a number of training tokens; mean over the "
        "seeds. Exact for systems that write token by token or slot by slot, in reading order; ≤ marks an estimate of "
        "an upper bound, from one random draw per text."
    )
    last = {system: own[max(own)] for system, own in means.items()}
    best = min(last, key=last.get)
    told = []
    for system, end in last.items():
        sooner = next(step for step, value in means[best].items() if value <= end)
        if system != best:
            told.append(f"* {best} has reached the final {end:.3f} of {system} after {shown[sooner]}, or before.")
    return [
        "### Data efficiency",
        prose(about),
        table(["system", *shown.values()], rows),
        *(["\n".join(told)] if told else []),
    ]


def _sweep(trials: Sequence[Trained]) -> list[str]:
    if not trials:
        return []
    rows = [(trial.system, f"{trial.learning_rate:g}", f"{trial.final_loss:.4f}") for trial in trials]
    why = (
        "A short run for each rate; the lowest held-out loss decides. If the highest or the lowest rate is best, "
        "further ones are tried. Losses of different systems do not compare."
    )
    return ["### Learning rates", prose(why), table(("system", "learning rate", "held-out loss"), rows)]


def table(names: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table, with a line for each row."""
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (names, ["---"] * len(names), *rows))


def prose(text: str, indent: str = "") -> str:
    """A paragraph; with an indent, an item of a list. Words are never split, not even at a hyphen."""
    return textwrap.fill(text, _WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
