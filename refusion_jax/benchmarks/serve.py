"""Measures the server under load: tokens and requests per second, and how long clients wait.

  python -m refusion_jax.bench serve --checkpoint=runs/quickstart --setup='refusion slot_size=4'
  python -m refusion_jax.bench serve --size=small --new_tokens=64 --clients=8,32 --setup=sequential
  python -m refusion_jax.bench serve --size=small --new_tokens=256 --rate=2 --slo_first_ms=500 --slo_between_ms=50

The checkpoint is a run on the built-in problems (configs/quickstart.py), or one step of it; without one the weights are
random and never end an answer. A real server decodes held-out problems for --clients clients, each of which asks for
one answer after the other; first they wait for whole answers, then they read streams. Before each repeat this process
decodes the same prompts without a server: of_decode is the server's rate relative to that. Clients are threads of this
process: they use the server's cores, but not its device.

With --rate streamed requests arrive at random times instead (a Poisson process), with lengths like those of ShareGPT;
goodput is the share whose first text and later tokens came in time.
"""

import contextlib
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from absl import flags
from etils import epath
from rich.console import Console
from rich.table import Table

from refusion_jax.benchmarks._clients import Seen, arrivals, ask_all, serving
from refusion_jax.benchmarks.decode import SIZES, random_model, read_setup, timed
from refusion_jax.checkpoints.contents import load_tokenizer
from refusion_jax.checkpoints.load import load_model
from refusion_jax.cli import flag_values
from refusion_jax.cli.errors import needs
from refusion_jax.data import tasks
from refusion_jax.data.tokenizer import SentencePieceTokenizer
from refusion_jax.decoding.requests import prepare
from refusion_jax.model import huggingface
from refusion_jax.systems.registry import default_system

_ROOM = 1024  # tokens of a text, for random weights
_STREAMED = {"stream": True, "stream_options": {"include_usage": True}}  # fields of a request
_SHOWN = {"clients": "clients", "rate": "rate", "how": "how", "accuracy": "right", "tokens_per_second": "tokens/s"}
_SHOWN |= {"of_decode": "of decode", "goodput": "goodput", "first_ms": "first, ms", "between_ms": "between, ms"}
_SHOWN |= {"whole_ms": "answer, ms", "whole_ms_95": "95 %, ms"}


def define_flags(own: flags.FlagValues) -> None:
    """The flags of this benchmark."""
    flags.DEFINE_string("checkpoint", None, "A run on the built-in problems, or one step of it", flag_values=own)
    flags.DEFINE_enum("size", "tiny", [*SIZES], "Shape of random weights, without a checkpoint", flag_values=own)
    flags.DEFINE_list("clients", ["1", "8", "32"], "Numbers of clients, each measured", flag_values=own)
    flags.DEFINE_integer("requests", 400, "Requests of all clients together, each time", 1, 100_000, flag_values=own)
    flags.DEFINE_integer("rows", 8, "Rows of the server's batch", 1, 4096, flag_values=own)
    flags.DEFINE_integer("new_tokens", 32, "Tokens of an answer, at most; problems take 25", 1, 2**20, flag_values=own)
    flags.DEFINE_integer("repeats", 1, "Interleaved repeats of each; the median counts", 1, 1000, flag_values=own)
    flags.DEFINE_float("rate", 0.0, "Requests per second, at random times; not with --clients", 0.0, flag_values=own)
    flags.DEFINE_float("slo_first_ms", 1000.0, "With --rate: target for the first text", 0.0, flag_values=own)
    flags.DEFINE_float("slo_between_ms", 100.0, "With --rate: target for each later token", 0.0, flag_values=own)
    method = next(iter(default_system().decoders))
    flags.DEFINE_string("setup", method, "A decoder and settings of its own", flag_values=own)


def main(own: flags.FlagValues) -> None:
    """Prints one JSON object per measurement, then a table."""
    clients = flag_values.read_counts("clients", own.clients)
    read_setup(own.setup, {"max_new_tokens": own.new_tokens}, own.checkpoint)  # raises before anything is started
    with needs("serve"):
        import fastapi  # noqa: F401  # by the server
    with contextlib.ExitStack() as stack:
        checkpoint = own.checkpoint or _random(own.size, stack.enter_context(tempfile.TemporaryDirectory()))
        method, *settings = own.setup.split()
        settings += [f"method={method}", f"batch_size={own.rows}", f"max_new_tokens={own.new_tokens}"]
        flags_given = [f"--checkpoint={checkpoint}", "--port=0", *(f"--decode.{setting}" for setting in settings)]
        address = stack.enter_context(serving(*flags_given))
        records = [_at_rate(address, own)] if own.rate else [*_by_clients(address, checkpoint, clients, own)]
    shown = {name: title for name, title in _SHOWN.items() if name in records[0]}
    table = Table(*shown.values())
    for record in records:
        values = (record[name] for name in shown)
        table.add_row(*(f"{x:,.{0 if x >= 100 else 2}f}" if isinstance(x, float) else str(x) for x in values))
    Console().print(table)


def _by_clients(address, checkpoint: str, clients: list[int], own: flags.FlagValues) -> Iterator[dict[str, Any]]:
    """Yields a record for each number of clients, for whole answers and streams, interleaved with decoding here."""
    problems = list(tasks.MIXTURE.problems("test", own.requests, seed=0))
    bodies = [{"prompt": problem.query, "max_tokens": own.new_tokens} for problem in problems]
    asked = {"whole": [body | {"stream": False} for body in bodies], "stream": [body | _STREAMED for body in bodies]}
    decode = _decoding(checkpoint, [problem.query for problem in problems], own)
    decode()  # compiles; not counted, like the clients' first answers
    ask_all(address, max(clients), asked["whole"])
    for count in clients:
        repeats = {how: [] for how in asked}
        for _ in range(own.repeats):
            plain = decode()
            for how, these in asked.items():
                began = time.perf_counter()
                seen = ask_all(address, count, these)  # over new connections: the server closes idle ones
                repeats[how].append((seen, time.perf_counter() - began, plain))
        for how, some in repeats.items():
            answers, seconds, plain = some[-1][0], *np.array([measured for _, *measured in some]).T
            right = [one.text == p.response for p, one in zip(problems, answers, strict=True)]
            tokens = sum(one.tokens for one in answers)
            record = {"benchmark": "serve", "clients": count, "how": how, "requests": len(problems)}
            record |= {"accuracy": float(np.mean(right)), "tokens": tokens}
            record["tokens_per_second"] = float(np.median(tokens / seconds))
            record["of_decode"] = float(np.median(tokens / seconds / plain))
            record["requests_per_second"] = float(np.median(len(problems) / seconds))
            record |= _waits([one for seen, *_ in some for one in seen])
            print(json.dumps(record), flush=True)
            yield record


def _at_rate(address, own: flags.FlagValues) -> dict[str, Any]:
    """The record of requests that arrive at random times."""
    times, bodies = arrivals(own.requests, own.rate, _ROOM if not own.checkpoint else 64, own.new_tokens)
    bodies = [body | _STREAMED for body in bodies]
    ask_all(address, 16, bodies[:16])  # not counted
    began = time.perf_counter()
    seen = ask_all(address, min(own.requests, 512), bodies, times)
    seconds, tokens = time.perf_counter() - began, sum(one.tokens for one in seen)
    good = [1e3 * one.first <= own.slo_first_ms and 1e3 * one.between <= own.slo_between_ms for one in seen]
    record = {"benchmark": "serve", "rate": own.rate, "requests": len(seen), "tokens": tokens}
    record |= {"tokens_per_second": tokens / seconds, "goodput": float(np.mean(good))} | _waits(seen)
    print(json.dumps(record), flush=True)
    return record


def _waits(seen: list[Seen]) -> dict[str, float]:
    """How long clients waited, in milliseconds."""
    found = {}
    for name in ("first", "between", "whole"):
        waits = [1e3 * getattr(one, name) for one in seen]
        found |= {f"{name}_ms": float(np.median(waits)), f"{name}_ms_95": float(np.quantile(waits, 0.95))}
    return found


def _decoding(checkpoint: str, texts: list[str], own: flags.FlagValues) -> Callable[[], float]:
    """A function that decodes texts as the server does, and returns tokens per second."""
    model, tokenizer = load_model(checkpoint), load_tokenizer(epath.Path(checkpoint))
    shared = {"max_new_tokens": own.new_tokens, "batch_size": own.rows}
    shared["cache_length"] = model.config.max_position_embeddings
    settings = read_setup(own.setup, shared, own.checkpoint)
    requests = prepare(tokenizer.encode_prompts(texts), settings, model.config)

    def decode() -> float:
        answers, seconds = timed(model, requests)
        return sum(len(answer.tokens) for answer in answers) / seconds

    return decode


def _random(size: str, directory: str) -> str:
    """Writes random weights and a tokenizer for the built-in problems as a Hugging Face directory."""
    texts = [f"{p.query}\n{p.response}\n" for p in tasks.MIXTURE.problems("train", 2000, seed=0)]
    tokenizer = SentencePieceTokenizer.train(texts, 512)
    ids = {f"{name}_token_id": getattr(tokenizer, f"{name}_id") for name in ("bos", "pad", "mask")}
    ids["eos_token_id"] = tokenizer.pad_id  # decoders never write it
    sizes = {"vocab_size": tokenizer.size, "num_tokens": tokenizer.size, "max_position_embeddings": _ROOM}
    huggingface.save(random_model(size, "float32", **ids, **sizes), directory)
    for name, content in tokenizer.files.items():
        (epath.Path(directory) / name).write_bytes(content)
    return directory
