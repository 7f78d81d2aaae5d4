"""What is refused, and what fails: asked of the application in this process, whose engine decodes nothing."""

import asyncio
import json
import re
import threading

import httpx
import pytest
from starlette.testclient import TestClient

from refusion_jax import DecodeSettings, load_model, load_tokenizer
from refusion_jax.cli.errors import Failure
from refusion_jax.decoding.requests import Answer
from refusion_jax.serving import errors
from refusion_jax.serving.access import Access, allowed_hosts
from refusion_jax.serving.app import make_app
from refusion_jax.serving.engine import Engine
from refusion_jax.serving.errors import largest_body
from refusion_jax.serving.jobs import BusyError
from refusion_jax.serving.service import Service

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


LARGEST = largest_body(64)
BAD = {
    "not an object": (b"[]", 400, "^must be an object$"),
    "not JSON": (b'{"prompt": ', 400, "not JSON"),
    "too deep": (b'{"prompt": ' + b"[" * 10**5 + b"]" * 10**5 + b"}", 400, ""),
    "no prompt": ({}, 400, "prompt: Field required"),
    "no text": ({"prompt": 3}, 400, "prompt: must be a text, a list of token ids, or a list of either"),
    "half a character": (b'{"prompt": "\\ud800"}', 400, "not JSON: .*hex escape"),
    "outside the vocabulary": ({"prompt": [1, 512]}, 400, "prompt: holds an id outside 0 to 511"),
    "outside it, and not continued": ({"prompt": [1, 512], "max_tokens": 0}, 400, "prompt: holds an id outside"),
    "too long, and not continued": ({"prompt": [1] * 65, "max_tokens": 0}, 400, "prompt: has 65 tokens, of at most 64"),
    "a gap of nothing": ({"prompt": "a", "suffix": "b", "max_tokens": 0}, 400, "suffix: needs max_tokens"),
    "many stops": ({"prompt": "a", "stop": ["a"] * 17}, 400, "stop: at most 16"),
    "half a name": (b'{"prompt": "a", "decode": {"\\ud800": 1}}', 400, "not JSON: .*hex escape"),
    "one of several": ({"prompt": ["a", "b" * 99]}, 400, "prompt\\[1\\]: has \\d+ tokens"),
    "no effect": ({"prompt": "a", "frequency_penalty": 1}, 400, "frequency_penalty: is not supported here"),
    "tools": ({"prompt": "a", "tools": [{}]}, 400, "tools: is not supported here"),
    "not finite": (b'{"prompt": "a", "temperature": NaN}', 400, "temperature: .* finite"),
    "too many tokens": ({"prompt": "a", "max_tokens": 33}, 400, "max_tokens=33: this server decodes at most 32"),
    "too many answers": ({"prompt": ["a"] * 600, "n": 2}, 400, "prompt: with n=2 .* at most 512"),
    "a bad setting": ({"prompt": "a", "decode": {"slot_threshold": 2}}, 400, "slot_threshold=2: must be at most 1"),
    "a wrong type": ({"prompt": "a", "decode": {"order": []}}, 400, "order=\\[\\]: must be of type str"),
    "a compiled one": (
        {"prompt": "a", "decode": {"slot_size": 2}},
        400,
        "decode: 'slot_size' is no setting that .* may have; .* infill",
    ),
    "by another name": ({"prompt": "a", "decode": {"seed": 1}}, 400, "decode.seed: is the field 'seed'"),
    "wider forwards": ({"prompt": "a", "decode": {"serial_blocks": 1}}, 400, "larger forwards than were compiled"),
    "more than it may have": ({"prompt": "a", "max_tokens": 4, "min_tokens": 5}, 400, "min_tokens=5: .* at most 4 "),
    "another model": ({"prompt": "a", "model": "gpt"}, 404, "model 'gpt' is not served here; 'tiny' is"),
    "too large": (b'{"prompt": "' + b"a" * LARGEST + b'"}', 413, f"at most {LARGEST} bytes"),
    "too long to tokenize": ({"prompt": "a" * 10**6}, 400, "prompt: has 1000000 characters, .* more than 64 tokens"),
    "one of two types": ({"prompt": "a", "guided_json": 5}, 400, "^guided_json: Input should be an object"),
    "no text to stop at": ({"prompt": "a", "stop": [1]}, 400, "stop.0: "),
    "watched, but no stream": ({"prompt": "a", "watch": True}, 400, "^watch: is for a stream$"),
    "no schema": ({"prompt": "a", "response_format": {"type": "json_schema"}}, 400, "^response_format: json_schema"),
    "no format": ({"prompt": "a", "response_format": {"type": "xml"}}, 400, "^response_format.type: "),
    "no choice": ({"prompt": "a", "guided_choice": []}, 400, "^guided_choice: "),
    "two grammars": (
        {"prompt": "a", "guided_choice": ["a"], "guided_regex": "a"},
        400,
        "^guided_choice: guided_regex says already",
    ),
    "text after a grammar": (
        {"prompt": "a", "guided_json": {}, "suffix": "b", "max_tokens": 4},
        400,
        "^suffix: an answer that has to follow a grammar",
    ),
    "another grammar": (
        {"prompt": "a", "structured_outputs": {"grammar": "root ::= x"}},
        400,
        "^structured_outputs: grammar: is not supported here",
    ),
    "unknown ones": ({"prompt": "a", **{f"a{i}": 0 for i in range(50_000)}}, 400, "^a0: is not supported here$"),
}


@pytest.mark.parametrize(("body", "status", "why"), BAD.values(), ids=BAD)
def test_what_cannot_be_done_is_refused_with_the_field_at_fault(client, body, status, why):
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    answer = client.post("/v1/completions", content=raw, headers=HEADERS)
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert re.search(why, error["message"]), error
    assert error["type"] == "invalid_request_error"


def test_what_asks_for_nothing_is_let_through_and_routes_that_are_not_there_are_refused(client, service, monkeypatch):
    answer = Answer([7, 8], [1, 2], [7, 8], 2, 2, "length")
    monkeypatch.setattr(service.engine, "submit", lambda jobs: [job.report(answer, True) for job in jobs])
    neutral = {"presence_penalty": 0.0, "best_of": 1, "logit_bias": {}, "suffix": None, "user": "me", "tools": []}
    neutral |= {"metadata": {"a": "b"}, "store": True, "service_tier": "auto", "request_id": "1"}
    neutral |= {"skip_special_tokens": True, "priority": 0, "top_k": -1}
    assert client.post("/v1/completions", json={"prompt": "a", "max_tokens": 4, **neutral}).status_code == 200
    asked = [{"role": "developer", "content": "Sort.", "name": "me"}, {"role": "user", "content": "3 1"}]
    asked.append({"role": "tool", "content": "1 3", "tool_call_id": "7"})
    answer = client.post("/v1/chat/completions", json={"messages": asked, "max_tokens": 4})
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


def test_bodies_of_any_kind_are_refused(client):
    """A million keys, messages or numbers, texts of megabytes."""
    bodies = [{"prompt": "a", **{f"k{i}": 0 for i in range(10**6)}}, {"prompt": ["a" * 10**6] * 10}]
    bodies += [{"prompt": [1] * 340_000}, {"prompt": ["a"] * 200_000}, {"messages": [{"b": i} for i in range(70_000)]}]
    bodies += [{"prompt": "a", "stop": [{}] * 250_000}, {"prompt": "a", "decode": {f"a{i}": 0 for i in range(80_000)}}]
    paths = ["/v1/chat/completions" if "messages" in body else "/v1/completions" for body in bodies]
    answers = [client.post(path, json=body) for path, body in zip(paths, bodies, strict=True)]
    assert [answer.status_code for answer in answers] == [413, 413, 400, 400, 400, 400, 400]


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
    body = {"prompt": "a", "guided_choice": ["b"]} if slow == "compiling" else {"prompt": "a" * 10**5}
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
    monkeypatch.setattr(service.engine, "submit", lambda jobs: [job.fail(Failure("no memory")) for job in jobs])
    body = {"prompt": "a"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "a"}]}
    body = {"input": "a"} if path == "/v1/responses" else body
    answer = client.post(path, json=body)
    expected = {"message": "no memory", "type": "server_error", "param": None, "code": 500}
    assert (answer.status_code, answer.json()["error"]) == (500, expected)
    last = client.post(path, json=body | {"stream": True}).text.strip().split("\n\n")[-1]
    assert "no memory" in last
    assert "server_error" in last


def test_a_page_whose_name_resolves_to_this_machine_is_refused(client):
    for host, status in (("evil.example", 400), ("localhost", 200), ("127.0.0.1:8000", 200), ("[::1]:8000", 200)):
        assert client.get("/health", headers={"Host": host}).status_code == status
    assert allowed_hosts("::1", ["mine"]) == ["mine", "localhost", "127.0.0.1", "[::1]", "::1"]
    assert allowed_hosts("0.0.0.0", []) == []
