"""Compares decoders and their settings, side by side in one process on the same weights.

  python -m refusion_jax.bench decode --batch_sizes=1,8,32
  python -m refusion_jax.bench decode --checkpoint=runs/quickstart --decode.max_new_tokens=32 --decode.slot_size=4
  python -m refusion_jax.bench decode --checkpoint=tests/golden/model --prompts=tests/golden/decode.jsonl
  python -m refusion_jax.bench decode --size=1.7b --dtype=bfloat16 --decode.max_new_tokens=512 --batch_sizes=1

Each --setup is the name of a decoder followed by its own settings, such as --setup='sequential slot_size=4'; by default
--decode.method, or all decoders of the system that trained the model are measured. Settings of all setups are flags.
Without a checkpoint the weights are random, in the shape that --size names. For each setup it prints tokens per second,
forwards, tokens per forward and milliseconds per forward; `bytes` of weights and cache in their dtypes (weights=int8
cache=int8); and `of_bandwidth`, the share of the documented memory bandwidth that is needed to read these bytes once
per forward, null where it is unknown. Compilation time is printed separately.
"""

import dataclasses
import functools
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import flags, logging
from etils import epath
from flax import nnx
from rich.console import Console
from rich.table import Table

from refusion_jax.checkpoints.contents import choose_method, find_tokenizer
from refusion_jax.checkpoints.load import load_auxiliaries, load_model
from refusion_jax.cli import command, flag_values
from refusion_jax.cli.errors import UserError, naming
from refusion_jax.cli.progress import track
from refusion_jax.cli.settings import declared
from refusion_jax.decoding.auxiliary import joined
from refusion_jax.decoding.memory import token_bytes
from refusion_jax.decoding.prompts import read_prompts
from refusion_jax.decoding.queue import batch_rows
from refusion_jax.decoding.requests import Answer, Request, prepare
from refusion_jax.decoding.settings import Settings
from refusion_jax.distributed.chips import memory_bandwidth
from refusion_jax.model.interface import LanguageModel
from refusion_jax.model.shape import ModelConfig
from refusion_jax.model.transformer import Transformer
from refusion_jax.systems.api import all_settings, decoder_for, own_settings, read_settings, stream
from refusion_jax.systems.registry import default_system, find_decoder, system_of

# hidden size, layers, heads, key/value heads, head size, mlp size, vocabulary, tied embeddings; Qwen3's from 0.6b on
SIZES = {
    "tiny": (128, 3, 4, 2, 32, 384, 512, True),
    "small": (512, 8, 8, 4, 64, 1536, 4096, True),
    "medium": (640, 12, 10, 5, 64, 1792, 4096, True),
    "0.6b": (1024, 28, 16, 8, 128, 3072, 151936, True),
    "1.7b": (2048, 28, 16, 8, 128, 6144, 151936, True),
    "8b": (4096, 36, 32, 8, 128, 12288, 151936, False),
}
_DEFAULTS = {"max_new_tokens": 128}


def define_flags(own: flags.FlagValues) -> None:
    """The flags of this benchmark."""
    number = functools.partial(flags.DEFINE_integer, flag_values=own, lower_bound=1)
    flags.DEFINE_list("batch_sizes", ["1", "8", "32"], "Batch sizes to measure, comma-separated", flag_values=own)
    number("prompts_per_row", 2, "Random prompts per row of the batch")
    number("prompt_length", 32, "Tokens of a random prompt")
    flags.DEFINE_string("checkpoint", None, "Trained weights; random ones by default", flag_values=own)
    flags.DEFINE_enum("size", "tiny", [*SIZES], "Shape of random weights", flag_values=own)
    dtypes = ["float32", "bfloat16"]
    flags.DEFINE_enum("dtype", "float32", dtypes, "Type of weights, cache and computation", flag_values=own)
    flags.DEFINE_string("prompts", None, "JSONL as for generate --input; random prompts by default", flag_values=own)
    flags.DEFINE_multi_string(
        "setup",
        None,
        "A decoder and settings of its own, such as 'ar top_k=5'; may be given several times",
        flag_values=own,
    )
    flags.DEFINE_integer("repeats", 3, "Interleaved repeats of each setup; the median counts", 1, flag_values=own)
    shared = {name: setting for name, setting in all_settings().items() if name != "batch_size"}
    command.define_settings(shared, own, _DEFAULTS)  # of all setups


def main(own: flags.FlagValues) -> None:
    """Prints one JSON object per setup and batch size, then a table."""
    batch_sizes = flag_values.read_counts("batch_sizes", own.batch_sizes)
    if own["size"].present and own.checkpoint:
        raise UserError(f"--size={own.size}: has no effect with --checkpoint, which has its own")
    model = load_model(own.checkpoint, own.dtype) if own.checkpoint else random_model(own.size, own.dtype)
    system = system_of(choose_method(epath.Path(own.checkpoint), None)) if own.checkpoint else default_system()
    given = command.given(own)
    if (only := given.pop("method", None)) and own.setup:
        raise UserError(f"--decode.method={only}: --setup names the decoders")
    names = own.setup or ([only] if only else system.decoders)
    table = Table("setup", "batch", "tokens/s", "tokens/forward", "ms/forward", "of bandwidth")
    for batch_size in batch_sizes:
        shared = _DEFAULTS | given | {"batch_size": batch_size}
        setups = {setup: read_setup(setup, shared, own.checkpoint) for setup in names}
        for name in given if batch_size == batch_sizes[0] else ():
            if not any(hasattr(settings, name) for settings in setups.values()):
                logging.warning("--decode.%s has no effect: no setup has it", name)
        if own.prompts:
            tokenizer = find_tokenizer(epath.Path(own.checkpoint)) if own.checkpoint else None
            found = read_prompts(Path(own.prompts), tokenizer, next(iter(setups.values())))
            # Settings of lines do not count.
            prompts = [dataclasses.replace(request, settings=None, noise=None) for _, request in found]
        else:
            prompts = random_prompts(own.prompts_per_row * batch_size, own.prompt_length, model.config)
        models = dict.fromkeys(setups, model)
        for setup, settings in setups.items() if own.checkpoint else ():
            models[setup] = joined(model, load_auxiliaries(own.checkpoint, settings, own.dtype))
        for record in measure(models, setups, prompts, own.repeats):
            print(json.dumps(record), flush=True)
            table.add_row(
                record["setup"],
                str(batch_size),
                f"{record['tokens_per_second']:,.0f}",
                f"{record['tokens_per_forward']:.2f}",
                f"{record['ms_per_forward']:.2f}",
                "" if record["of_bandwidth"] is None else f"{record['of_bandwidth']:.0%}",
            )
    Console().print(table)


def measure(
    given: dict[str, LanguageModel], setups: dict[str, Settings], prompts: list[Request], repeats: int
) -> Iterator[dict]:
    """A record for each setup, with its model, measured in interleaved repeats."""
    models = {setup: given[setup].rounded(settings.weights, settings.cache) for setup, settings in setups.items()}
    c, device = next(iter(given.values())).config, jax.devices()[0].device_kind
    bandwidth = memory_bandwidth(device)
    seconds: dict[str, list[float]] = {setup: [] for setup in setups}
    answers = {}
    for setup in track([*setups] * (repeats + 1), "decoding", ticks=False):
        answers[setup], took = timed(models[setup], prepare(prompts, setups[setup], c))
        seconds[setup].append(took)

    for setup, settings in setups.items():
        requests, kept = prepare(prompts, settings, c), models[setup]
        decoder = decoder_for(requests, c)
        first, *others = seconds[setup]  # the first call compiles
        rows, took = batch_rows(len(prompts), settings.batch_size, kept.mesh), float(np.median(others))
        forwards = sum(a.forwards for a in answers[setup])
        tokens = sum(len(a.tokens) - r.in_template for a, r in zip(answers[setup], requests, strict=True))
        if not forwards:
            why = "the prefill writes all of these answers, and no forward pass is left to measure"
            raise UserError(f"--setup={setup!r}: {why}; give more --decode.max_new_tokens")
        # Rows share forwards; the queue keeps all rows about equally busy.
        each = took / (forwards / rows)
        moved = kept.weight_bytes + rows * decoder.cache_length * token_bytes(kept)
        yield {
            "benchmark": "decode",
            "setup": setup,
            "batch_size": settings.batch_size,
            "tokens_per_second": tokens / took,
            "forwards": forwards,
            "tokens_per_forward": tokens / forwards,
            "ms_per_forward": 1e3 * each,
            "bytes": moved,
            "of_bandwidth": bandwidth and moved / each / bandwidth,
            "compile_seconds": first - took,
            "width": decoder.width,
            "parameters": sum(x.size for x in jax.tree.leaves(nnx.state(given[setup]))),
            "dtype": str(kept.dtype),
            "device": device,
        }


def timed(model: LanguageModel, requests: Sequence[Request], *decoder: Any, **how: Any) -> tuple[list[Answer], float]:
    """(the answers in order, the seconds that they took); the arguments are those of `stream`."""
    began = time.perf_counter()
    found = dict(stream(model, requests, *decoder, **how))
    seconds = time.perf_counter() - began
    return [found[i] for i in range(len(requests))], seconds


def random_prompts(count: int, length: int, model: ModelConfig) -> list[Request]:
    """Prompts of random tokens, the same in every call."""
    drawn = np.random.default_rng(0).integers(5, min(model.num_tokens, 500), (count, length))
    return [*map(Request, drawn.tolist())]


def read_setup(setup: str, shared: dict[str, Any], checkpoint: str | None = None) -> Settings:
    """The settings of a --setup, a decoder and NAME=VALUE pairs, which override shared ones; UserError for others."""
    method, *pairs = setup.split() or [""]
    changes = read_settings(pairs, f"--setup={setup!r}")
    with naming(f"--setup={setup!r}"):
        if checkpoint:
            choose_method(epath.Path(checkpoint), method)
        own = declared(find_decoder(method).settings)
        return own_settings(method, {name: value for name, value in shared.items() if name in own} | changes)


def shape_of(size: str) -> ModelConfig:
    """The shape of one of SIZES."""
    D, L, N, K, H, F, V, tied = SIZES[size]
    # Random weights must not end answers early: EOS is the padding id, which is never chosen.
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 0, "mask_token_id": 4}
    return ModelConfig(V, D, L, N, K, H, F, 1e6, 1e-6, tied, 40960, V, **special)


def random_model(size: str, dtype: str, **changes: Any) -> Transformer:
    """A model of a named shape, with these changes and random weights, created on the device."""
    config = dataclasses.replace(shape_of(size), **changes)

    @nnx.jit
    def init() -> Transformer:
        model = Transformer(config, nnx.Rngs(0), dtype)
        nnx.update(model, jax.tree.map(lambda x: x.astype(dtype), nnx.state(model)))
        return model

    return init()
