"""`bench serve`: a real server under a small load."""

import itertools
import json
import os
import time
import types

import pytest
from conftest import run
from helpers import http_server

from refusion_jax.benchmarks import _soak


@pytest.mark.thorough
def test_every_client_gets_the_same_answers(trained_run):
    flags = ["--clients=1,3", "--requests=8", "--rows=4", "--setup=refusion slot_size=4"]
    out, _ = run("bench", "serve", f"--checkpoint={trained_run}", *flags)
    loads = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    assert [(load["clients"], load["how"]) for load in loads] == [
        (n, how) for n in (1, 3) for how in ("whole", "stream")
    ]
    for load in loads:  # the same problems, and so the same answers
        assert (load["requests"], load["tokens"], load["accuracy"]) == (8, loads[0]["tokens"], loads[0]["accuracy"])
        assert 0 < load["first_ms"] <= load["whole_ms"] <= load["whole_ms_95"]
        assert load["of_decode"] > 0


@pytest.mark.thorough
def test_requests_arrive_at_random_and_goodput_is_the_share_in_time(trained_run):
    flags = ["--rate=50", "--requests=12", "--rows=4", "--setup=refusion slot_size=4"]
    out, _ = run("bench", "serve", f"--checkpoint={trained_run}", *flags, "--slo_first_ms=1e6", "--slo_between_ms=1e6")
    (load,) = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    assert (load["requests"], load["goodput"]) == (12, 1)
    assert 0 < load["first_ms"] <= load["whole_ms"]


def test_clients_of_all_kinds_tell_wrong_answers_from_right_ones(monkeypatch):
    """Of a server that says something else to every fifth request, and refuses what is none."""
    asked, ticks = [], itertools.count()
    clock = types.SimpleNamespace(monotonic=lambda: next(ticks) / 100, sleep=time.sleep)  # 120 requests, at any speed
    monkeypatch.setattr(_soak, "time", clock)

    def answer(path, _, body):
        if path != "/v1/completions":
            return 200, b"{}"
        asked.append(body)
        if len(body) > 1000 or not body.startswith(b'{"prompt": "Is'):
            return 400, b"{}"
        text = "other" if len(asked) % 5 == 4 else "same"
        said = json.dumps({"choices": [{"text": text}], "usage": {"completion_tokens": 1}}).encode()
        return 200, b"data: " + said + b"\n\ndata: [DONE]\n\n" if b'"stream": true' in body else said

    with http_server(answer) as address:
        host, port = address.removeprefix("http://").split(":")
        record = _soak.soak((host, int(port)), os.getpid(), 3, 0.02, [{"prompt": f"Is {i}?"} for i in range(3)])
    seen = record["seen"]
    assert set(seen) <= {"whole", "stream", "hang up", "malformed", "large", "wrong: whole 200", "wrong: stream 200"}
    assert seen["whole"] > seen["wrong: whole 200"] > 0
    assert sum(seen.values()) == len(asked) - 3
    assert len(record["memory_mib"]) == 3
    assert 0 < record["health_ms"] <= record["health_ms_most"]
