"""Measures what sharing a prefix saves: prompts that all begin with the same --prefix_length tokens.

  python -m refusion_jax.bench prefix --size=small --prefix_length=512

Two queues with prompts of the same lengths are decoded in turns, on the same random weights: one whose prompts share a
prefix, such as a system prompt, whose keys and values are computed for the first rows and copied for the others; and
one whose prompts differ from the first token on. For both it prints the seconds until every prompt has its first new
tokens (as few as the decoder writes at once), the prompt tokens that were fed to the model with the padding of chunks,
their GFLOP, and the bytes of the cache.
"""

import json
import time

import numpy as np
from absl import flags

from refusion_jax.benchmarks.decode import SIZES, random_model
from refusion_jax.cli.errors import UserError
from refusion_jax.decoding.cache import bytes_per_token
from refusion_jax.decoding.memory import admissions
from refusion_jax.decoding.requests import Request, prepare, shared_prefix
from refusion_jax.decoding.running_batch import batch_rows, mesh_of
from refusion_jax.model.flops import train_flops_per_token
from refusion_jax.model.transformer import Transformer
from refusion_jax.systems.api import DecodeSettings, decoder_for, stream
from refusion_jax.systems.registry import default_system


def define_flags(own: flags.FlagValues) -> None:
    """The flags of this benchmark."""
    flags.DEFINE_string("size", "small", f"Shape of random weights: {', '.join(SIZES)}", flag_values=own)
    flags.DEFINE_enum("dtype", "float32", ["float32", "bfloat16"], "Of weights and computation", flag_values=own)
    flags.DEFINE_integer("prefix_length", 512, "Tokens that all begin with", lower_bound=2, flag_values=own)
    flags.DEFINE_integer("own_length", 32, "Tokens that follow, of each its own", lower_bound=1, flag_values=own)
    flags.DEFINE_integer("batch_size", 8, "Prompts decoded at once", lower_bound=1, flag_values=own)
    flags.DEFINE_integer("prompts", 16, "How many", lower_bound=2, flag_values=own)
    flags.DEFINE_integer(
        "repeats", 3, "Runs of each queue, in turns; the median counts", lower_bound=1, flag_values=own
    )


def main(own: flags.FlagValues) -> None:
    """Prints one JSON object a queue."""
    if own.size not in SIZES:
        raise UserError(f"--size={own.size}: unknown; known: {', '.join(SIZES)}")
    model = random_model(own.size, own.dtype)
    rng = np.random.default_rng(0)
    prefix = rng.integers(5, 400, own.prefix_length).tolist()
    prompts = [prefix + rng.integers(5, 400, own.own_length).tolist() for _ in range(own.prompts)]
    apart = [[5 + i % 400, *prompt[1:]] for i, prompt in enumerate(prompts)]
    settings = DecodeSettings(next(iter(default_system().decoders)), max_new_tokens=1, batch_size=own.batch_size)
    queues = {name: prepare(some, settings, model.config) for name, some in (("shared", prompts), ("apart", apart))}
    seconds = {name: [] for name in queues}
    for turn in range(own.repeats + 1):
        for name, requests in queues.items():
            began = time.perf_counter()
            list(stream(model, requests))
            if turn:
                seconds[name].append(time.perf_counter() - began)
    for name, requests in queues.items():
        record = {"benchmark": "prefix", "queue": name, "seconds": float(np.median(seconds[name]))}
        print(json.dumps(record | costs(model, requests, own.batch_size)), flush=True)


def costs(model: Transformer, requests: list[Request], batch_size: int) -> dict:
    """Tokens that the prefills of a queue feed, if every admission is full, and the bytes of its cache."""
    c, decoder = model.config, decoder_for(requests, model.config)
    rows = batch_rows(len(requests), batch_size, mesh_of(model))
    at_once, longest = admissions(rows, mesh_of(model))[-1], max(len(request.given[0]) for request in requests)
    known, chunks = shared_prefix(requests) // decoder.chunk, -(-longest // decoder.chunk)
    prefills = -(-len(requests) // at_once)
    fed = at_once * decoder.chunk * (chunks + (prefills - 1) * (chunks - known))
    return {
        "prompts": len(requests),
        "given_tokens": sum(len(request.given[0]) for request in requests),
        "tokens_fed": fed,
        "gflop": fed * (train_flops_per_token(c, longest / 2) / 3 - 2 * c.hidden_size * c.vocab_size) / 1e9,
        "cache_bytes": rows * decoder.cache_length * bytes_per_token(c, model.cache_dtype),
    }
