"""A server in its own process, and its clients: many that send requests and measure, or arrive at random times."""

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

import numpy as np

from refusion_jax.cli.errors import Failure


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
