"""Measures the server under load: tokens and requests per second, and how long clients wait.

  python -m refusion_jax.bench serve --checkpoint=runs/quickstart --setup='refusion slot_size=4'
  python -m refusion_jax.bench serve --checkpoint=runs/quickstart --clients=1,64 --rows=32 --setup=sequential

The checkpoint is a run on the built-in problems (configs/quickstart.py), or one step of it. A real server decodes
held-out ones for --clients clients, each of which asks for one answer after the other; once they wait for whole
answers, once they read streams. Clients are threads of this process; on the device of the server they compute nothing,
on its cores they do. `bench decode --prompts=FILE` measures decoding without a server.
"""

import concurrent.futures
import contextlib
import dataclasses
import http.client
import json
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

from absl import flags
from rich.console import Console
from rich.table import Table

from refusion_jax.benchmarks.decode import read_setup
from refusion_jax.cli import flag_values
from refusion_jax.cli.errors import Failure, UserError, needs
from refusion_jax.data import tasks
from refusion_jax.data.problems import Problem
from refusion_jax.systems.registry import default_system

MAX_NEW_TOKENS = 32  # the longest worked answer takes 25
_OF_CLIENTS = ("requests_per_second", "first_ms", "answer_ms", "answer_ms_95")


def define_flags(own: flags.FlagValues) -> None:
    """The flags of this benchmark."""
    flags.DEFINE_string("checkpoint", None, "A run on the built-in problems, or one step of it", flag_values=own)
    flags.DEFINE_list("clients", ["1", "8", "32"], "Clients at once, each measured", flag_values=own)
    flags.DEFINE_integer("requests", 400, "Of all clients together, each time", 1, 100_000, flag_values=own)
    flags.DEFINE_integer("rows", 8, "Rows of the server's batch", 1, 4096, flag_values=own)
    method = next(iter(default_system().decoders))
    flags.DEFINE_string("setup", method, "A decoder and settings of its own", flag_values=own)


def main(own: flags.FlagValues) -> None:
    """Prints one JSON object a measurement, then a table."""
    if not own.checkpoint:
        raise UserError("--checkpoint=: name a training run's directory, or one step in its checkpoints/")
    clients = flag_values.read_counts("clients", own.clients)
    read_setup(own.setup, {"max_new_tokens": MAX_NEW_TOKENS}, own.checkpoint)  # refused before anything is started
    with needs("serve"):
        import fastapi  # noqa: F401  # by the server
    table = Table("clients", "how", "right", "tokens/s", "requests/s", "first, ms", "answer, ms", "95 %, ms")
    for record in measure(own.checkpoint, own.setup, own.rows, clients, own.requests):
        print(json.dumps(record), flush=True)
        right, tokens = f"{record['accuracy']:.1%}", f"{record['tokens_per_second']:,.0f}"
        table.add_row(
            str(record["clients"]),
            record["how"],
            right,
            tokens,
            *(f"{record[name]:,.1f}" for name in _OF_CLIENTS),
        )
    Console().print(table)


def measure(checkpoint: str, setup: str, rows: int, clients: Sequence[int], requests: int) -> Iterator[dict[str, Any]]:
    """Yields a record of each load."""
    problems = list(tasks.problems("test", requests, seed=0))
    with _serving(checkpoint, setup, rows) as address:
        load(address, problems, max(clients), is_stream=False)  # not counted
        for count in clients:
            for is_stream in (False, True):
                yield load(address, problems, count, is_stream)


def load(address: tuple[str, int], problems: Sequence[Problem], clients: int, is_stream: bool) -> dict[str, Any]:
    """Has clients ask for the answers to all problems, and measures what they see."""
    here = threading.local()

    def ask(problem: Problem) -> _Seen:
        if not hasattr(here, "connection"):
            here.connection = http.client.HTTPConnection(*address, timeout=600)
        return _ask(here.connection, problem, is_stream)

    began = time.perf_counter()
    with concurrent.futures.ThreadPoolExecutor(clients) as pool:
        seen = list(pool.map(ask, problems))
    seconds = time.perf_counter() - began
    whole = sorted(one.whole for one in seen)
    return {
        "benchmark": "serve",
        "clients": clients,
        "how": "stream" if is_stream else "whole",
        "requests": len(problems),
        "accuracy": sum(tasks.is_correct(p, one.text) for p, one in zip(problems, seen, strict=True)) / len(problems),
        "tokens": sum(one.tokens for one in seen),
        "tokens_per_second": sum(one.tokens for one in seen) / seconds,
        "requests_per_second": len(problems) / seconds,
        "first_ms": 1e3 * statistics.median(one.first for one in seen),
        "answer_ms": 1e3 * statistics.median(whole),
        "answer_ms_95": 1e3 * whole[int(0.95 * len(whole))],
    }


@dataclasses.dataclass(frozen=True)
class _Seen:
    text: str
    tokens: int
    first: float  # seconds to the first text
    whole: float  # seconds to its end


def _ask(connection: http.client.HTTPConnection, problem: Problem, is_stream: bool) -> _Seen:
    body = {"prompt": problem.query, "max_tokens": MAX_NEW_TOKENS, "stream": is_stream}
    body |= {"stream_options": {"include_usage": True}} if is_stream else {}
    began, first = time.perf_counter(), None
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    answer = connection.getresponse()
    if answer.status != 200:
        raise Failure(f"the server answers {answer.status}: {answer.read().decode(errors='replace')[:300]}")
    text, tokens = "", 0
    for line in answer if is_stream else [b"data: " + answer.read()]:
        if not line.startswith(b"data: {"):
            continue
        event = json.loads(line.removeprefix(b"data: "))
        text += "".join(choice["text"] for choice in event["choices"])
        first = first or (time.perf_counter() if text else None)
        tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
    ended = time.perf_counter()
    return _Seen(text, tokens, (first or ended) - began, ended - began)


@contextlib.contextmanager
def _serving(checkpoint: str, setup: str, rows: int) -> Iterator[tuple[str, int]]:
    """(host, port) of a server of its own process, while the context lasts."""
    method, *settings = setup.split()
    settings += [f"method={method}", f"batch_size={rows}", f"max_new_tokens={MAX_NEW_TOKENS}"]
    flags = [f"--checkpoint={checkpoint}", "--port=0", *(f"--decode.{setting}" for setting in settings)]
    command = [sys.executable, "-m", "refusion_jax.serve", *flags]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True) as process:
        line = process.stdout.readline()
        if not line:
            raise Failure(f"the server did not start: exit code {process.wait()}")
        host, _, port = line.rpartition("http://")[2].partition("/")[0].rpartition(":")
        try:
            yield host, int(port)
        finally:
            process.send_signal(signal.SIGTERM)
