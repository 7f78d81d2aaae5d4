"""Compares algorithms of infilling: exact match on held-out problems, and tokens a forward.

  python -m refusion_jax.bench infill --checkpoint=runs/quickstart
  python -m refusion_jax.bench infill --checkpoint=runs/quickstart/checkpoints/900 --slot_sizes=8 \
      --way='refusion infill=exact slot_threshold=0.5' --way='refusion token_threshold=0.5'

The checkpoint is a run on the built-in problems (configs/quickstart.py), or one step of it; several steps, each a
--checkpoint, compare the ways over training. Each --way is the name of a decoder followed by its own settings; the
default is one token a forward, and the authors' infilling and exact infilling with several thresholds. An answer counts
as right if the whole worked answer is right. Ways that differ in traced settings only share a queue and its compiled
programs. `tokens_per_forward` counts the forwards that each answer took part in.
"""

import collections
import itertools
import json

from absl import flags
from rich.console import Console
from rich.table import Table

from refusion_jax.benchmarks._problems import MAX_NEW_TOKENS, checkpoints_of, held_out
from refusion_jax.benchmarks.decode import read_way
from refusion_jax.checkpoints.load import load_for, load_tokenizer
from refusion_jax.cli import flag_values
from refusion_jax.cli.settings import scope
from refusion_jax.data import tasks
from refusion_jax.decoding.requests import Request, prepare
from refusion_jax.systems.api import stream
from refusion_jax.systems.registry import default_system

_SLOT_THRESHOLDS = (0.9, 0.6, 0.3)


def default_ways() -> list[str]:
    """One token a forward, the authors' infilling and exact infilling, by the default system's decoders."""
    method, one_by_one = default_system().decoders
    theirs = [f"{method} slot_threshold={s} token_threshold={t}" for s in _SLOT_THRESHOLDS for t in (0.9, 0.3, 0)]
    exact = [
        f"{method} infill=exact slot_threshold={s} infill_blend={b}" for s in _SLOT_THRESHOLDS for b in (0, 0.3, 0.5)
    ]
    return [one_by_one, *theirs, *exact]


def define_flags(own: flags.FlagValues) -> None:
    """The flags of this benchmark."""
    flags.DEFINE_multi_string(
        "checkpoint", None, "A run on the built-in problems, or one step of it; each measured", flag_values=own
    )
    flags.DEFINE_list("slot_sizes", ["4", "8"], "Tokens a slot, each measured", flag_values=own)
    flags.DEFINE_integer("problems", 300, "How many held-out problems to decode", 1, 100_000, flag_values=own)
    flags.DEFINE_integer("batch_size", 64, "Prompts decoded at once", lower_bound=1, flag_values=own)
    flags.DEFINE_multi_string("way", None, "A decoder and settings of its own", flag_values=own)


def main(own: flags.FlagValues) -> None:
    """Prints one JSON object a slot size, checkpoint and way, then a table."""
    checkpoints, ways = checkpoints_of(own), list(dict.fromkeys(own.way or default_ways()))
    slot_sizes = flag_values.read_counts("slot_sizes", own.slot_sizes)
    table = Table("slot size", "checkpoint", "way", "exact match", "tokens/forward")
    for size, checkpoint in itertools.product(slot_sizes, checkpoints):
        for record in measure(checkpoint, ways, size, own.problems, own.batch_size):
            print(json.dumps(record), flush=True)
            score = f"{record['accuracy']:.1%}", f"{record['tokens_per_forward']:.2f}"
            table.add_row(str(size), checkpoint, record["way"], *score)
    Console().print(table)


def measure(checkpoint: str, ways: list[str], slot_size: int, count: int, batch_size: int) -> list[dict]:
    """Exact match and tokens a forward of each way, with slots of one size."""
    tokenizer = load_tokenizer(checkpoint)
    problems = held_out(count)
    prompts = tokenizer.encode_prompts([problem.query for problem in problems])
    shared = {"max_new_tokens": MAX_NEW_TOKENS, "slot_size": slot_size, "batch_size": batch_size}
    settings = {way: read_way(way, shared, checkpoint) for way in ways}
    right, tokens, forwards = (collections.Counter() for _ in range(3))
    compiled = {
        way: tuple(getattr(own, n) for n in sorted(scope(type(own), "compiled"))) for way, own in settings.items()
    }
    for program in dict.fromkeys(compiled.values()):
        own_ways = [way for way in ways if compiled[way] == program]
        model = load_for(checkpoint, settings[own_ways[0]])
        jobs = [(way, i) for way in own_ways for i in range(count)]
        requests = [Request(prompts[i], settings=settings[way], noise=i) for way, i in jobs]
        for job, answer in stream(model, prepare(requests, requests[0].settings, model.config)):
            way, i = jobs[job]
            right[way] += tasks.is_correct(problems[i], tokenizer.decode(answer.tokens))
            tokens[way] += len(answer.tokens)
            forwards[way] += answer.forwards
    return [
        {
            "benchmark": "infill",
            "checkpoint": checkpoint,
            "slot_size": slot_size,
            "way": way,
            "problems": count,
            "accuracy": right[way] / count,
            "tokens_per_forward": tokens[way] / forwards[way],
        }
        for way in ways
    ]
