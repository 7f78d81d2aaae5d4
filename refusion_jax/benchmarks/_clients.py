"""A server in its own process, and its clients: many that ask and measure."""

import concurrent.futures
import contextlib
import dataclasses
import http.client
import json
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

from refusion_jax.cli.errors import Failure


@contextlib.contextmanager
def serving(*given: str) -> Iterator[tuple[tuple[str, int], int]]:
    """(host, port) and process id of `serve`, started with these flags, while the context lasts."""
    line = [sys.executable, "-m", "refusion_jax.serve", *given]
    with subprocess.Popen(line, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True) as process:
        told = re.search(r"([^/ ]+):(\d+)/v1$", process.stdout.readline())
        if not told:
            raise Failure(f"the server did not start: exit code {process.wait()}")
        try:
            yield (told[1], int(told[2])), process.pid
        finally:
            process.send_signal(signal.SIGTERM)


@dataclasses.dataclass(frozen=True)
class Seen:
    """What a client saw of an answer."""

    text: str
    tokens: int
    first: float  # seconds to the first text
    whole: float  # seconds to its end


def ask_all(address: tuple[str, int], clients: int, bodies: Sequence[dict[str, Any]]) -> list[Seen]:
    """What some clients see, each of which takes the next request as soon as it has the answer to the last one.

    Each is a thread with a connection of its own, which is kept.
    """
    own = threading.local()

    def ask(body: dict[str, Any]) -> Seen:
        if not hasattr(own, "connection"):
            own.connection = http.client.HTTPConnection(*address, timeout=600)
        began, first = time.perf_counter(), None
        answer = post(own.connection, json.dumps(body).encode())
        if answer.status != 200:
            raise Failure(f"the server answers {answer.status}: {answer.read().decode(errors='replace')[:300]}")
        text, tokens = "", 0
        for more, event in events(answer, body["stream"]):
            text += more
            first = first or (time.perf_counter() if text else None)
            tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
        ended = time.perf_counter()
        return Seen(text, tokens, (first or ended) - began, ended - began)

    with concurrent.futures.ThreadPoolExecutor(clients) as pool:
        return list(pool.map(ask, bodies))


def post(connection: http.client.HTTPConnection, body: bytes) -> http.client.HTTPResponse:
    """What the server answers to a request for completions."""
    connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
    return connection.getresponse()


def events(answer: http.client.HTTPResponse, is_stream: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    """(text, all of it) of each event of a stream, or of the only one of an answer that is none."""
    for line in answer if is_stream else [b"data: " + answer.read()]:
        if line.startswith(b"data: {"):
            event = json.loads(line.removeprefix(b"data: "))
            yield "".join(choice["text"] for choice in event["choices"]), event
