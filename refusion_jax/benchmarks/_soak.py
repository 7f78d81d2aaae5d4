"""A load test with many clients: they ask, read streams, hang up, or send malformed requests."""

import collections
import concurrent.futures
import contextlib
import http.client
import json
import multiprocessing
import os
import random
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from refusion_jax.benchmarks._clients import ask, ask_all

_MALFORMED = [b"", b"[]", b'{"prompt": ', b'{"prompt": NaN}', b'{"prompt": "\xff"}', b'{"messages": 3, "prompt": {}}']
_MALFORMED += [json.dumps({"prompt": "a"} | more).encode() for more in (
    {"temperature": "hot"}, {"max_tokens": -1}, {"max_tokens": 2**24}, {"n": 0}, {"stop": [1]}, {"decode": {"no": 1}},
    {"prompt": [[2**40]]}, {"seed": 1.5}, {"stream": "yes"}, {"guided_regex": "("}, {"frequency_penalty": 1},
)]  # fmt: skip
_LARGE = [json.dumps(body).encode() for body in (
    {"prompt": "a", **{f"k{i}": 0 for i in range(60_000)}}, {"prompt": [1] * 340_000}, {"prompt": "a" * 1_000_000},
    {"prompt": ["a"] * 200_000}, {"prompt": "a", "stop": [{}] * 250_000}, {"prompt": [[1]] * 200_000},
)]  # fmt: skip
_KINDS = {"whole": 40, "stream": 30, "hang up": 10, "malformed": 19, "large": 1}  # percent of requests


def soak(
    address: tuple[str, int], pid: int, clients: int, minutes: float, bodies: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """What many clients see of a server in `minutes`; each body must get the answer that it gets before, alone."""
    bodies = [body | {"seed": 0, "stream": False} for body in bodies]
    alone = [one.text for one in ask_all(address, 1, bodies)]
    seen, memory, ends = [], [], time.monotonic() + 60 * minutes

    def client(number: int) -> None:
        draw = random.Random(number)
        while time.monotonic() < ends:
            (kind,), at = draw.choices([*_KINDS], [*_KINDS.values()]), draw.randrange(len(bodies))
            raw = json.dumps(bodies[at] | {"stream": kind in ("stream", "hang up")}).encode()
            raw = draw.choice({"malformed": _MALFORMED, "large": _LARGE}.get(kind, [raw]))
            try:
                with contextlib.closing(http.client.HTTPConnection(*address, timeout=600)) as connection:
                    got = ask(connection, raw, kind in ("stream", "hang up"), hangs_up=kind == "hang up")
            except (OSError, http.client.HTTPException) as error:
                seen.append(f"lost: {type(error).__name__}")
                continue
            is_right = got.status in (400, 413) if kind in ("malformed", "large") else got.status == 200
            is_right &= kind not in ("whole", "stream") or got.text == alone[at]
            seen.append(kind if is_right else f"wrong: {kind} {got.status}")

    threads = [threading.Thread(target=client, args=(number,)) for number in range(clients)]
    with concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as other:
        health = other.submit(_probe, address, 60 * minutes)
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads) or len(memory) < 3:
            memory.append(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20)
            time.sleep(0.5)
    record = {"minutes": minutes, "clients": clients, "seen": dict(sorted(collections.Counter(seen).items()))}
    record["memory_mib"] = [float(np.median(part)) for part in np.array_split(memory, 3)]
    for name, share in (("health_ms", 0.5), ("health_ms_99", 0.99), ("health_ms_most", 1)):
        record[name] = float(np.quantile(health.result(), share))
    return record


def _probe(address: tuple[str, int], seconds: float) -> list[float]:
    """Repeatedly measures how long /health takes, in milliseconds; to be run in a separate process."""
    found, ends = [], time.monotonic() + seconds
    while (began := time.monotonic()) < ends:
        with contextlib.closing(http.client.HTTPConnection(*address, timeout=600)) as connection:
            connection.request("GET", "/health")
            connection.getresponse().read()
        found.append(1e3 * (time.monotonic() - began))
        time.sleep(0.05)
    return found
