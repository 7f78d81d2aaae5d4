"""A server as a process and under load, and in this process, decoding nothing: what is refused, and what fails."""

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
from starlette.testclient import TestClient

from refusion_jax import DecodeSettings, load_model, load_tokenizer
from refusion_jax.cli.errors import Failure
from refusion_jax.decoding.requests import Answer
from refusion_jax.distributed.host import listen
from refusion_jax.serving import errors, reply
from refusion_jax.serving.access import Access, allowed_hosts
from refusion_jax.serving.app import make_app
from refusion_jax.serving.connections import TimedConnection
from refusion_jax.serving.engine import BusyError, Engine
from refusion_jax.serving.service import Service


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
        assert (server.returncode, err) == (0, f"loading {trained_run}\n")
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
    flags = "--decode.seed=5 --decode.batch_size=4 --decode.serial_blocks=2 --decode.slot_threshold=0.05 --port="
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
            assert shell.communicate() == ("", f"loading {trained_run}\n")
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


HEADERS = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def service(trained_run):
    model = load_model(trained_run)
    sizes = {"slot_size": 4, "serial_blocks": 2, "max_new_tokens": 32, "cache_length": 64}
    engine = Engine(model, DecodeSettings("refusion", **sizes), rows=2)

    def decodes_nothing(jobs):
        raise BusyError("nothing is decoded here")

    engine.submit = decodes_nothing
    return Service("tiny", model, load_tokenizer(trained_run), engine)


@pytest.fixture(scope="module")
def app(service):
    return make_app(service, Access(hosts=allowed_hosts("127.0.0.1", [])), "1")


@pytest.fixture(scope="module")
def client(app):
    return TestClient(app, base_url="http://localhost")


LARGEST, GAP = (1 << 20) + 128 * 64, {"suffix": "b", "max_tokens": 4}
CHOICE = {"structured_outputs": {"choice": ["b"]}}
FORM = {"type": "json_schema", "name": "a"}
NO = FORM | {"schema": {"type": "no"}}
BAD = {
    "not an object": (b"[]", 400, "^must be an object$"),
    "not JSON": (b'{"prompt": ', 400, "not JSON"),
    "no prompt": ({}, 400, "prompt: Field required"),
    "no text": ({"prompt": 3}, 400, "prompt: must be a text, a list of token ids, or a list of either"),
    "outside the vocabulary": ({"prompt": [1, 512]}, 400, "prompt: holds an id outside 0 to 511"),
    "outside it, and not continued": ({"prompt": [1, 512], "max_tokens": 0}, 400, "prompt: holds an id outside"),
    "too long, and not continued": ({"prompt": [1] * 65, "max_tokens": 0}, 400, "prompt: has 65 tokens; at most 64"),
    "a gap of nothing": ({"prompt": "a", "suffix": "b", "max_tokens": 0}, 400, "suffix: needs max_tokens"),
    "many stops": ({"prompt": "a", "stop": ["a"] * 17}, 400, "stop: .* at most 16"),
    "one of several": ({"prompt": ["a", "b" * 99]}, 400, "prompt\\[1\\]: has \\d+ tokens"),
    "no effect": ({"prompt": "a", "frequency_penalty": 1}, 400, "frequency_penalty: is not supported here"),
    "tools": ({"prompt": "a", "tools": [{}]}, 400, "tools: is not supported here"),
    "not finite": (b'{"prompt": "a", "temperature": NaN}', 400, "temperature: .* finite"),
    "too many tokens": ({"prompt": "a", "max_tokens": 33}, 400, "33 tokens are .* at most 32 .*max_new_tokens"),
    "too many answers": ({"prompt": ["a"] * 600, "n": 2}, 400, "prompt: with n=2 .* at most 512"),
    "a bad setting": ({"prompt": "a", "decode": {"slot_threshold": 2}}, 400, "slot_threshold=2: must be at most 1"),
    "a wrong type": ({"prompt": "a", "decode": {"order": []}}, 400, "order=\\[\\]: must be of type str"),
    "a compiled one": (
        {"prompt": "a", "decode": {"slot_size": 2}},
        400,
        "decode: 'slot_size' is not a setting that .* may have; .* infill",
    ),
    "by another name": ({"prompt": "a", "decode": {"seed": 1}}, 400, "decode.seed: is the field 'seed'"),
    "wider forwards": ({"prompt": "a", "decode": {"serial_blocks": 1}}, 400, "larger forward passes than were"),
    "more than it may have": ({"prompt": "a", "max_tokens": 4, "min_tokens": 5}, 400, "min_tokens=5: .* at most 4 "),
    "another model": ({"prompt": "a", "model": "gpt"}, 404, "model 'gpt' is not served here; 'tiny' is"),
    "too large": (b'{"prompt": "' + b"a" * LARGEST + b'"}', 413, f"at most {LARGEST} bytes"),
    "one of two types": ({"prompt": "a", "structured_outputs": {"json": 5}}, 400, "^structured_outputs.json: Input "),
    "no text to stop at": ({"prompt": "a", "stop": [1]}, 400, "stop.0: "),
    "watched, but no stream": ({"prompt": "a", "watch": True}, 400, "^watch: is for a stream$"),
    "no schema": ({"prompt": "a", "response_format": {"type": "json_schema"}}, 400, "^response_format: json_schema"),
    "no format": ({"prompt": "a", "response_format": {"type": "xml"}}, 400, "^response_format.type: "),
    "no choice": ({"prompt": "a", "structured_outputs": {"choice": []}}, 400, "^structured_outputs.choice: "),
    "two grammars": ({"prompt": "a", **CHOICE, "response_format": {"type": "json_object"}}, 400, "^response_format: s"),
    "text after a grammar": ({"prompt": "a", **CHOICE, **GAP}, 400, "^suffix: .* has to follow a grammar"),
    "scores before a text": ({"prompt": "a", "logprobs": 0, **GAP}, 400, "^suffix: logprobs .* are not known$"),
    "another grammar": (
        {"prompt": "a", "structured_outputs": {"grammar": "root ::= x"}},
        400,
        "^structured_outputs: grammar: is not supported here",
    ),
    "turns by another name": ({"input": "a" * 65}, 400, "^input: has \\d+ tokens"),
    "no schema by another name": ({"input": "a", "text": {"format": FORM}}, 400, "^text.format: json_schema without"),
    "a grammar by another name": ({"input": "a", "text": {"format": NO}}, 400, "^text.format: cannot be followed"),
    "unknown ones": ({"prompt": "a", **{f"a{i}": 0 for i in range(50_000)}}, 400, "^a0: is not supported here$"),
}


@pytest.mark.parametrize(("body", "status", "why"), BAD.values(), ids=BAD)
def test_what_cannot_be_done_is_refused_with_the_field_at_fault(client, body, status, why):
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    path = "/v1/responses" if b'"input"' in raw else "/v1/completions"
    answer = client.post(path, content=raw, headers=HEADERS)
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert re.search(why, error["message"]), error
    assert error["type"] == "invalid_request_error"
    is_too_long = "maximum context length is 64 tokens" in error["message"]
    assert is_too_long == bool(re.search("has \\d+ tokens", error["message"]))
    assert error["code"] == ("context_length_exceeded" if is_too_long else status)


def test_what_asks_for_nothing_is_let_through_and_routes_that_are_not_there_are_refused(client, service, monkeypatch):
    answer = Answer([7, 8], [1, 2], [7, 8], 2, 2, "length")
    monkeypatch.setattr(service.engine, "submit", lambda jobs: [job.report(answer, True) for job in jobs])
    neutral = {"presence_penalty": 0.0, "best_of": 1, "logit_bias": {}, "suffix": None, "user": "me", "tools": []}
    neutral |= {"metadata": {"a": "b"}, "store": True, "service_tier": "auto", "request_id": "1"}
    neutral |= {"skip_special_tokens": True, "priority": 0, "top_k": -1, "repetition_penalty": 1.0, "min_p": 0}
    assert client.post("/v1/completions", json={"prompt": "a", "max_tokens": 4, **neutral}).status_code == 200
    asked = [{"role": "developer", "content": "Sort.", "name": "me"}, {"role": "user", "content": "3 1"}]
    asked.append({"role": "tool", "content": "1 3", "tool_call_id": "7"})
    for include in ([], ["reasoning.encrypted_content"]):
        neutral = {"include": include, "truncation": "disabled", "reasoning": {"summary": "auto"}}
        neutral |= {"client_metadata": {"turn": "1"}}
        assert client.post("/v1/responses", json={"input": "a", "max_output_tokens": 4, **neutral}).status_code == 200
    neutral = {"modalities": ["text"], "stream_options": {"include_obfuscation": False}}
    answer = client.post("/v1/chat/completions", json={"messages": asked, "max_tokens": 4, **neutral})
    assert answer.status_code == 200, answer.text
    assert client.get("/v1/models/tiny").json()["id"] == "tiny"
    assert client.get("/v1/models/gpt").json()["error"]["code"] == 404
    answer = client.post("/v1/embeddings", json={})
    assert (answer.status_code, answer.json()["error"]["message"]) == (404, "Not Found")
    assert client.get("/v1/models").json()["data"][0]["id"] == "tiny"
    assert [client.head(path).status_code for path in ("/health", "/ready", "/metrics")] == [200, 200, 200]


def test_text_becomes_tokens_and_text_again(client, service):
    tokenizer, text = service.tokenizer, "Sort 3 1 2."
    tokens = client.post("/tokenize", json={"prompt": text}).json()["tokens"]
    assert tokens == tokenizer.encode_prompts([text])[0]
    assert client.post("/detokenize", json={"tokens": tokens}).json() == {"prompt": text}
    assert client.post("/detokenize", json={"tokens": [512]}).status_code == 400
    special = client.get("/tokenizer_info").json()
    for name, token in (("eos_token", tokenizer.eos_id), ("bos_token", tokenizer.bos_id)):
        asked = client.post("/tokenize", json={"prompt": special[name], "add_special_tokens": False})
        assert asked.json()["tokens"] == [token]


@pytest.mark.parametrize(("slow", "at_once"), [("refusing", 1), ("tokenizing", 40), ("compiling", 4)])
def test_others_are_answered_while_requests_take_long(app, service, monkeypatch, slow, at_once):
    """Large bodies, which are read and refused one by one; structured answers leave threads for the others."""
    held, release = [], threading.Event()

    def hold(*args):
        held.append(args)
        assert release.wait(timeout=300), "nobody else was answered"
        raise Failure("held")

    owners = {"refusing": (errors, "_explained"), "tokenizing": (service, "completion")}
    monkeypatch.setattr(*owners.get(slow, (service.engine, "constrained")), hold)
    body = {"prompt": "a", **CHOICE} if slow == "compiling" else {"prompt": "a" * 10**5}
    body |= {"temperature": "hot"} if slow == "refusing" else {}

    async def ask() -> None:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=None) as client:
            long = [asyncio.ensure_future(client.post("/v1/completions", json=body)) for _ in range(50)]
            while len(held) < at_once:
                await asyncio.sleep(0.001)
            for _ in range(20):
                assert (await client.get("/health")).status_code == 200
            if slow == "compiling":
                assert (await client.post("/v1/completions", json={"prompt": "a"})).status_code == 503
            assert len(held) == at_once
            release.set()
            assert {(await one).json()["error"]["message"] for one in long} == {"held"}

    asyncio.run(ask())


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses"])
def test_a_failure_of_decoding_is_told_as_the_servers_fault(client, service, monkeypatch, path):
    """In a stream after a silence, which comments fill."""
    fail = [Failure("no memory")]
    monkeypatch.setattr(reply, "SILENCE", 0.01)
    monkeypatch.setattr(service.engine, "submit", lambda jobs: threading.Timer(0.2, jobs[0].fail, fail).start())
    body = {"prompt": "a"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "a"}]}
    body = {"input": "a"} if path == "/v1/responses" else body
    answer = client.post(path, json=body)
    expected = {"message": "no memory", "type": "server_error", "param": None, "code": 500}
    assert (answer.status_code, answer.json()["error"]) == (500, expected)
    events = client.post(path, json=body | {"stream": True}).text.strip().split("\n\n")
    assert ":" in events
    last = [event for event in events if event != ":"][-1]
    assert "no memory" in last
    assert "server_error" in last


def test_a_page_whose_name_resolves_to_this_machine_is_refused(client):
    for host, status in (("evil.example", 400), ("localhost", 200), ("127.0.0.1:8000", 200), ("[::1]:8000", 200)):
        assert client.get("/health", headers={"Host": host}).status_code == status
    assert allowed_hosts("::1", ["mine"]) == ["mine", "localhost", "127.0.0.1", "[::1]", "::1"]
    assert allowed_hosts("0.0.0.0", []) == []
