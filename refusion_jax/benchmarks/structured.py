"""Measures answers under a grammar: how many are valid, and how many tokens one forward commits, against one by one.

  python -m refusion_jax.bench structured --checkpoint=runs/quickstart --setup='refusion slot_size=8'

The checkpoint is a run on the built-in problems (configs/quickstart.py), or one step of it. Asked are the held-out ones
whose answers are JSON, each with the schema of its own answer: its keys, short words, numbers of a few digits. The
trained weights are greedy; random ones of the same shape, which agree with no schema, are sampled at temperature 1. All
decode without a grammar (free), under it as the server does (drafts), and under it one token per forward.
"""

import dataclasses
import json
import re
import time
from typing import Any

import numpy as np
from absl import flags
from etils import epath
from flax import nnx
from rich.console import Console
from rich.table import Table

from refusion_jax.benchmarks.decode import read_setup
from refusion_jax.checkpoints.load import load_model, load_tokenizer
from refusion_jax.cli.errors import UserError, needs
from refusion_jax.data import tasks
from refusion_jax.decoding import queue
from refusion_jax.decoding.answers import Answer
from refusion_jax.decoding.constrained import Constrained, batch_type
from refusion_jax.decoding.decoder import Decoder
from refusion_jax.decoding.requests import Request, prepare
from refusion_jax.model.transformer import Transformer
from refusion_jax.systems.api import decoder_for
from refusion_jax.systems.registry import default_system

_NEW_TOKENS = 32  # prompts have up to 28, and the context of the quickstart 64
_HOW = ("free", "drafts", "one by one")
_FIGURES = {"valid": ".1%", "right": ".1%", "tokens_per_forward": ".2f", "tokens_per_second": ",.0f"}
_NUMBER = {"type": "integer", "minimum": 10, "maximum": 999}
_WORD = {"type": "string", "pattern": "^[a-z]{2,6}$"}


def define_flags(own: flags.FlagValues) -> None:
    """The flags of this benchmark."""
    flags.DEFINE_string("checkpoint", None, "A run on the built-in problems, or one step of it", flag_values=own)
    flags.DEFINE_integer("requests", 500, "Answers of each kind", 1, 100_000, flag_values=own)
    flags.DEFINE_integer("rows", 8, "Decoded at once", 1, 4096, flag_values=own)
    flags.DEFINE_integer("repeats", 3, "Interleaved repeats; the median counts", 1, 1000, flag_values=own)
    method = next(iter(default_system().decoders))
    flags.DEFINE_string("setup", method, "A decoder and settings of its own", flag_values=own)


def main(own: flags.FlagValues) -> None:
    """Prints one JSON object per measurement, then a table."""
    if not own.checkpoint:
        raise UserError("--checkpoint=: name a training run's directory, or one step in its checkpoints/")
    settings = read_setup(own.setup, {"max_new_tokens": _NEW_TOKENS, "batch_size": own.rows}, own.checkpoint)
    with needs("serve"):
        from refusion_jax.serving.grammar import Grammars
    model, tokenizer = load_model(own.checkpoint), load_tokenizer(epath.Path(own.checkpoint))
    drawn = [one for one in tasks.problems("test", 20 * own.requests + 100, seed=0) if one.family == "json"]
    problems = drawn[: own.requests]
    prompts = tokenizer.encode_prompts([problem.query for problem in problems])
    answers = [json.loads(problem.response) for problem in problems]
    grammars = Grammars(tokenizer, tokenizer.eos_id)
    compiled = [grammars.compile("schema", "json", schema_of(answer)) for answer in answers]
    table = Table("weights", "how", *_FIGURES)
    for weights, temperature in (("trained", 0.0), ("random", 1.0)):
        served = model if weights == "trained" else Transformer(model.config, nnx.Rngs(0), model.dtype)
        sampled = dataclasses.replace(settings, temperature=temperature)
        free = prepare([*map(Request, prompts)], sampled, model.config)
        bound = [dataclasses.replace(one, grammar=own) for one, own in zip(free, compiled, strict=True)]
        seconds: dict[str, list[float]] = {how: [] for how in _HOW}
        decoded = {}
        for repeat in range(own.repeats + 1):  # the first compiles
            for how in _HOW:
                began = time.perf_counter()
                decoded[how] = decode(served, free if how == "free" else bound, how)
                if repeat:
                    seconds[how].append(time.perf_counter() - began)
        for how, outs in decoded.items():
            texts = [tokenizer.decode(out.tokens) for out in outs]
            tokens = sum(len(out.tokens) for out in outs)
            figures = {
                "valid": sum(map(is_valid, texts, answers)) / len(texts),
                "right": sum(map(tasks.is_correct, problems, texts)) / len(texts),
                "tokens": tokens,
                "tokens_per_forward": tokens / sum(out.forwards for out in outs),
                "tokens_per_second": tokens / float(np.median(seconds[how])),
            }
            print(json.dumps({"benchmark": "structured", "weights": weights, "how": how, **figures}), flush=True)
            table.add_row(weights, how, *(format(figures[name], form) for name, form in _FIGURES.items()))
    Console().print(table)


def decode(model: Transformer, requests: list[Request], how: str) -> list[Answer]:
    """The answers, in the order of the requests, decoded as one of _HOW says."""
    decoder: Decoder = decoder_for(requests, model.config)
    if how == "one by one":
        free = decoder_for([dataclasses.replace(one, grammar=None) for one in requests], model.config)
        decoder = Constrained.of(free, requests, model.config, reach=1)
    size, kind = requests[0].settings.batch_size, batch_type(decoder)
    answers = dict(queue.stream(model, decoder, requests, size, batch_type=kind))
    return [answers[number] for number in range(len(requests))]


def schema_of(answer: dict[str, Any]) -> dict[str, Any]:
    """A schema of objects with the keys of this one, in their order."""
    kinds = {key: _NUMBER if isinstance(value, int) else _WORD for key, value in answer.items()}
    return {"type": "object", "properties": kinds, "required": [*kinds], "additionalProperties": False}


def is_valid(text: str, answer: dict[str, Any]) -> bool:
    """Whether a text is of `schema_of(answer)`, by other means than the grammar's."""
    numbers = {key for key, value in answer.items() if isinstance(value, int)}
    try:
        found = json.loads(text)
        return [*found] == [*answer] and all(
            type(value) is int and 10 <= value <= 999
            if key in numbers
            else re.fullmatch("[a-z]{2,6}", value) is not None
            for key, value in found.items()
        )
    except (ValueError, TypeError):
        return False
