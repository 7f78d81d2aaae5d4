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

import concurrent.futures
import contextlib
import dataclasses
import http.client
import json
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from absl import flags
from etils import epath
from rich.console import Console
from rich.table import Table

from refusion_jax.benchmarks.decode import SIZES, random_model, read_setup, timed
from refusion_jax.checkpoints.contents import load_tokenizer
from refusion_jax.checkpoints.load import load_model
from refusion_jax.cli import flag_values
from refusion_jax.cli.errors import Failure, needs
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


@dataclasses.dataclass(frozen=True)
class Seen:
    """What a client saw of an answer."""

    text: str
    tokens: int
    first: float  # seconds to the first text
    whole: float  # seconds to the end

    @property
    def between(self) -> float:
        """Average seconds between two tokens after the first text; pieces of a stream have several tokens."""
        return (self.whole - self.first) / max(self.tokens - 1, 1)


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


@contextlib.contextmanager
def serving(*given: str) -> Iterator[tuple[str, int]]:
    """(host, port) of `serve`, started with these flags, while the context lasts."""
    line = [sys.executable, "-m", "refusion_jax.serve", *given]
    with subprocess.Popen(line, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True) as process:
        told = re.search(r"([^/ ]+):(\d+)/v1$", process.stdout.readline())
        if not told:
            raise Failure(f"the server did not start: exit code {process.wait()}")
        try:
            yield told[1], int(told[2])
        finally:
            process.send_signal(signal.SIGTERM)


def ask_all(
    address: tuple[str, int], clients: int, bodies: Sequence[dict[str, Any]], times: Sequence[float] = ()
) -> list[Seen]:
    """Runs clients that each keep a connection, and send the next request as soon as they have the last answer.

    With `times`, requests are sent at these seconds from now, whether or not earlier ones have been answered.
    """
    own, asked = threading.local(), []
    began = time.perf_counter()

    def answer(body: dict[str, Any]) -> Seen:
        if not hasattr(own, "connection"):
            own.connection = http.client.HTTPConnection(*address, timeout=600)
        if times:  # over a new connection, since the server closes idle ones
            own.connection.close()
        return ask(own.connection, body)

    with concurrent.futures.ThreadPoolExecutor(clients) as pool:
        for number, body in enumerate(bodies):
            if times:
                time.sleep(max(0.0, began + times[number] - time.perf_counter()))
            asked.append(pool.submit(answer, body))
    return [one.result() for one in asked]


def ask(connection: http.client.HTTPConnection, body: dict[str, Any]) -> Seen:
    """What a client sees of the answer to a request for completions; Failure if the server refuses it."""
    text, tokens, first = "", 0, None
    began = time.perf_counter()
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    answer = connection.getresponse()
    if answer.status != 200:
        raise Failure(f"the server answers {answer.status}: {answer.read(300).decode(errors='replace')}")
    for line in answer if body["stream"] else [b"data: " + answer.read()]:
        if line.startswith(b"data: {"):
            event = json.loads(line.removeprefix(b"data: "))
            text += "".join(choice["text"] for choice in event["choices"])
            first = first or (time.perf_counter() if text else None)
            tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
    ended = time.perf_counter()
    return Seen(text, tokens, (first or ended) - began, ended - began)


def arrivals(count: int, rate: float, room: int, most: int) -> tuple[list[float], list[dict[str, Any]]]:
    """(seconds at which `count` requests arrive, `rate` per second; their prompts and lengths), always the same.

    Arrivals are a Poisson process. Prompts and answers have log-normal lengths with the medians and tails of ShareGPT's
    conversations, about 60 and 150 tokens; answers are cut to `most` tokens, and both together to `room`.
    """
    draw = np.random.default_rng(0)
    times = np.cumsum(draw.exponential(1 / rate, count))
    answers = np.clip(draw.lognormal(np.log(150), 1.0, count), 1, min(most, room - 1)).astype(int)
    prompts = np.clip(draw.lognormal(np.log(60), 1.5, count), 1, room - answers).astype(int)
    bodies = [
        {"prompt": draw.integers(5, 300, length).tolist(), "max_tokens": int(new), "add_special_tokens": False}
        for length, new in zip(prompts, answers, strict=True)
    ]
    return times.tolist(), bodies
