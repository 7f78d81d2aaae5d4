"""Decodes held-out problems with a model trained on the built-in tasks, and reports how well and how fast.

  python -m refusion_jax.quickstart --workdir=runs/quickstart

Prints accuracy (the whole worked answer must be right), tokens per forward and tokens per second (one prompt at a time,
unless --decode.batch_size says otherwise) for every decoder of the system that the model was trained for (those that
need a second model only if they are given one); then three answers in parts (for a slot model, slots), in the order of
writing. The same figures go to DIR/report.json, and a page that plays these answers, as each decoder writes them, to
DIR/decodings.html.
"""

import itertools
import json
import time
from pathlib import Path

import jax
from absl import flags
from flax import nnx
from rich.console import Console
from rich.table import Table

from refusion_jax.checkpoints.contents import choose_method, load_tokenizer
from refusion_jax.checkpoints.load import load_for
from refusion_jax.cli import command, flag_values
from refusion_jax.cli.errors import UserError
from refusion_jax.config.run_config import read_config
from refusion_jax.data import tasks
from refusion_jax.data.interface import Tokenizer
from refusion_jax.data.problems import Problem
from refusion_jax.decoding.player import page
from refusion_jax.decoding.requests import prepare
from refusion_jax.decoding.settings import Settings
from refusion_jax.distributed.storage import write_file
from refusion_jax.model.interface import LanguageModel
from refusion_jax.systems.api import Decoded, DecodeSettings, all_settings, decode, play
from refusion_jax.systems.registry import decoders_for
from refusion_jax.training.metrics import read_metrics

_WORKDIR = flags.DEFINE_string("workdir", "runs/quickstart", "Directory of the training run")
_PROBLEMS = flags.DEFINE_integer("problems", 200, "How many held-out problems to decode", 3, 100_000)
_DEFAULTS = {"batch_size": 1}
command.define_settings(
    {name: own for name, own in all_settings().items() if name not in ("method", "max_new_tokens")},
    defaults=_DEFAULTS,
)
_STARTED = flags.DEFINE_float("started", None, "Unix time at which the whole command began; now by default")

MAX_NEW_TOKENS = 32  # the longest worked answer takes 25


def measure(
    settings: Settings, model: LanguageModel, tokenizer: Tokenizer, problems: list[Problem]
) -> tuple[dict[str, float], Decoded]:
    """Accuracy and speed of one decoder, without compilation."""
    prompts = tokenizer.encode_prompts([problem.query for problem in problems])
    # Compiles for the longest prompt; with at least two, since a single one would have no prefix cache.
    decode(model, sorted(prompts, key=len)[-max(settings.batch_size, 2) :], settings)
    began = time.monotonic()
    out = decode(model, prompts, settings)
    seconds = time.monotonic() - began
    right = [tokenizer.decode(t) == p.response for p, t in zip(problems, out.tokens, strict=True)]
    tokens = sum(map(len, out.tokens))
    return {
        "accuracy": sum(right) / len(right),
        "tokens_per_forward": tokens / sum(out.forwards),
        "tokens_per_second": tokens / seconds,
    }, out


def show(figures: dict, problems: list[Problem], decoded: Decoded, tokenizer: Tokenizer, size: int) -> list[int]:
    """Prints the table and the answers of `examples`, which it returns."""
    console = Console(markup=False, highlight=False)
    table = Table(
        title=f"{figures['problems']} held-out problems, {figures['batch_size']} at a time, "
        f"by a model of {figures['parameters']:,} parameters"
    )
    for column in ("decoding", "exact match", "tokens per forward", "tokens per second"):
        table.add_column(column, justify="left" if column == "decoding" else "right")
    for method in figures["decoders"]:
        f = figures[method]
        table.add_row(
            method, f"{f['accuracy']:.1%}", f"{f['tokens_per_forward']:.2f}", f"{f['tokens_per_second']:,.0f}"
        )
    console.print(table)
    shown = examples(problems, decoded, tokenizer, size)
    if shown:
        console.print("Right answers in parts; the number tells which was written first, second, third ...")
    for i in shown:
        cost = f"({len(decoded.tokens[i])} tokens by {decoded.forwards[i]} forwards)"
        console.print(f"\n{problems[i].query}  {cost}", style="bold")
        for order, text in written_parts(decoded, i, tokenizer, size):
            console.print(f"  {order:>2}  {text}")
    console.print(f"\ntraining took {figures['train_seconds']:.0f} s, this command {figures['seconds_total']:.0f} s")
    return shown


def examples(problems: list[Problem], decoded: Decoded, tokenizer: Tokenizer, size: int) -> list[int]:
    """Three right answers to show, from three families: those written least in reading order, then the longest."""
    orders = [part_order(decoded, i, size) for i in range(len(problems))]
    by_interest = [(sum(b < a for a, b in itertools.pairwise(order)), len(order)) for order in orders]
    most = {}
    for i, problem in enumerate(problems):
        is_right = tokenizer.decode(decoded.tokens[i]) == problem.response
        if is_right and by_interest[i] >= by_interest[most.get(problem.family, i)]:
            most[problem.family] = i
    return sorted(most.values(), key=by_interest.__getitem__, reverse=True)[:3]


def part_order(decoded: Decoded, index: int, size: int) -> list[int]:
    """The parts of an answer, of `size` tokens each, in the order of writing, without those dropped after its end."""
    first = min(decoded.commit_order[index])
    places = (position - first for position in decoded.commit_order[index])
    return list(dict.fromkeys(place // size for place in places if place < len(decoded.tokens[index])))


def written_parts(decoded: Decoded, index: int, tokenizer: Tokenizer, size: int) -> list[tuple[int, str]]:
    """(when it was written, from 1; its text) for each part of an answer, in text order."""
    order, tokens = part_order(decoded, index, size), decoded.tokens[index]
    return [(1 + order.index(i), tokenizer.decode(tokens[i * size : (i + 1) * size])) for i in sorted(order)]


def main() -> None:
    workdir = Path(_WORKDIR.value)
    started = time.time() if _STARTED.value is None else _STARTED.value
    flag_values.check_output("workdir", workdir, directory=True)
    choose_method(workdir, None)  # raises if there is no model that we can decode
    seconds = next((r["seconds"] for r in reversed(read_metrics(workdir)) if type(r.get("seconds")) is float), None)
    if seconds is None:
        raise UserError(f"--workdir={workdir}: holds no metrics.jsonl of a training run")
    tokenizer, given = load_tokenizer(workdir), _DEFAULTS | command.given()
    names = decoders_for(read_config(workdir).objective)
    settings = {name: DecodeSettings(name, max_new_tokens=MAX_NEW_TOKENS, **given) for name in names}
    names = [n for n in names if all(getattr(settings[n], other) for other in settings[n].auxiliary_models)]
    models = {name: load_for(workdir, settings[name]) for name in names}

    problems = list(tasks.MIXTURE.problems("test", _PROBLEMS.value, seed=0))
    measured = {name: measure(settings[name], models[name], tokenizer, problems) for name in names}
    figures = {name: own for name, (own, _) in measured.items()} | {
        "decoders": names,
        "problems": len(problems),
        "batch_size": settings[names[0]].batch_size,
        "seconds_total": time.time() - started,
        "train_seconds": seconds,
        "parameters": sum(x.size for x in jax.tree.leaves(nnx.state(models[names[0]]))),
    }
    write_file(workdir / "report.json", json.dumps(figures, indent=2) + "\n")
    decoded, size = measured[names[0]][1], settings[names[0]].unit
    shown = show(figures, problems, decoded, tokenizer, size) or range(3)  # if there are none, wrong ones are played
    prompts = tokenizer.encode_prompts([problems[i].query for i in shown])
    recordings = [play(models[n], prepare(prompts, settings[n], models[n].config), tokenizer, n) for n in names]
    scenes = [(i, [of.scenes[i] for of in recordings]) for i in range(len(shown))]
    write_file(workdir / "decodings.html", page(scenes))


if __name__ == "__main__":
    command.run(main)
