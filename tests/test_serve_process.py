"""A server as a process: its flags, keys, log, connections and end."""

import asyncio
import concurrent.futures
import contextlib
import functools
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time

import httpx
import pytest
import uvicorn
from conftest import ROOT, environment, run, start
from helpers import wait_until

from refusion_jax.serving.address import listen
from refusion_jax.serving.connections import TimedConnection


def test_a_port_belongs_to_who_asks_for_it_first_though_clients_are_served_later(trained_run):
    with listen("127.0.0.1", 0) as first:
        _, err = run("serve", f"--checkpoint={trained_run}", f"--port={first.getsockname()[1]}", code=2)
    assert re.fullmatch(r"error: --host=127.0.0.1 --port=\d+: Address already in use\n", err)


@pytest.mark.parametrize("own", [(), ("--api_key=first,second,",)])
def test_keys_origins_and_a_log(trained_run, monkeypatch, own):
    monkeypatch.setenv("REFUSION_API_KEY", "third" if own else "first,second")
    flags = ["--cors=https://page.example", "--allowed_host=proxy.example", "--access_log", "--decode.batch_size=1"]
    flags += ["--decode.max_new_tokens=8", *own]
    server = start("serve", "--port=0", f"--checkpoint={trained_run}", *flags)
    try:
        address = re.search(r"http://\S+(?=/v1)", server.stdout.readline())[0]
        assert httpx.get(f"{address}/health", headers={"Host": "proxy.example"}).status_code == 200
        for path in ("/v1/models", "/metrics", "/version", "/none"):
            for given in ({}, {"Authorization": "Bearer third"}, {"Authorization": "Basic first"}):
                answer = httpx.get(f"{address}{path}", headers=given)
                if path != "/none":
                    assert (answer.status_code, answer.json()["error"]["type"]) == (401, "invalid_request_error")
        names = {"X-Request-Id": "mine-8", "Origin": "https://page.example"}
        for key in ("first", "second"):
            answer = httpx.get(f"{address}/v1/models", headers=names | {"Authorization": f"Bearer {key}"})
            assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == "https://page.example"
        asked = {"Origin": "https://evil.example", "Access-Control-Request-Method": "POST"}
        assert httpx.options(f"{address}/v1/completions", headers=asked).status_code == 400
        server.send_signal(signal.SIGTERM)
        out, err = server.communicate(timeout=60)
        assert (server.returncode, err) == (0, "")
    finally:
        server.kill()
    lines = [json.loads(line) for line in out.splitlines()]
    assert "/health" not in {line["path"] for line in lines}
    (first, second) = (line for line in lines if line["request_id"] == "mine-8")
    assert first["path"] == "/v1/models"
    assert (first["method"], first["status"]) == ("GET", 200)


@pytest.mark.thorough
def test_a_server_of_several_is_ready_when_it_says_so_and_answers_what_it_has_begun_when_it_is_to_end(trained_run):
    """Started by the README's commands, and ended as supervisors do it."""
    readme = (ROOT / "refusion_jax/serving/README.md").read_text()
    (commands,) = re.findall(r"```sh\n(.*?--port=\$port.*?)```", readme, re.DOTALL)
    with listen("127.0.0.1", 0) as free:
        port = free.getsockname()[1]
    flags = "--seed=5 --decode.batch_size=4 --decode.serial_blocks=2 --decode.slot_threshold=0.05 --port="
    for own, here in (("python", sys.executable), ("runs/quickstart", str(trained_run)), ("--port=", flags)):
        commands = commands.replace(own, here)
    commands = commands.replace("8001 8002", str(port)) + "\necho $!; wait $!"
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(["bash", "-c", commands], cwd=ROOT, env=environment(1), **pipes) as shell:
        lines = iter(shell.stdout.readline, "")
        assert next(lines).startswith("serving ")
        assert next(lines) == '{"ready":true}\n'
        server, address = int(next(lines)), f"http://127.0.0.1:{port}"
        try:
            body = {"model": "quickstart", "prompt": "Sort 3 1 2.", "temperature": 3.0}
            ask = functools.partial(httpx.post, f"{address}/v1/completions", timeout=None)
            kept = http.client.HTTPConnection("127.0.0.1", port)
            for idle in (0, 5.5):  # as long as clients keep a connection
                time.sleep(idle)
                kept.request("GET", "/health")
                assert kept.getresponse().read()
            kept.close()
            first, second = (ask(json=body | {"max_tokens": 16}).json() for _ in range(2))
            assert (first["choices"], first["seed"]) == (second["choices"], 5)
            with concurrent.futures.ThreadPoolExecutor(1) as client:
                answer = client.submit(ask, json=body | {"max_tokens": 32, "n": 64})
                wait_until(lambda: httpx.get(f"{address}/health").json()["decoding"])
                os.kill(server, signal.SIGTERM)
                assert len(answer.result().json()["choices"]) == 64
            assert shell.communicate() == ("", "")
            assert shell.returncode == 0
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(server, signal.SIGKILL)


def test_a_connection_ends_whose_request_is_not_whole_in_time_and_a_slow_answer_does_not():
    async def app(scope, receive, send):
        if scope["type"] == "http":
            await asyncio.sleep(1)  # the request has been read
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
            await send({"type": "http.response.body"})

    quick = type("Quick", (TimedConnection,), {"seconds": 0.5})
    with listen("127.0.0.1", 0) as listening:
        server = uvicorn.Server(uvicorn.Config(app, http=quick, lifespan="off", log_level="warning"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
        thread.start()
        address = listening.getsockname()
        head = b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 2\r\n\r\n"
        for part in (b"", head[:-2], head + b"1"):
            with socket.create_connection(address, timeout=10) as half:
                half.sendall(part)
                assert half.recv(1) == b""
        with socket.create_connection(address, timeout=10) as kept:
            for _ in range(2):
                kept.sendall(head + b"12")
                assert kept.recv(1 << 12).startswith(b"HTTP/1.1 200 OK")
            kept.sendall(head)
            assert kept.recv(1) == b""
        server.should_exit = True
        thread.join()
