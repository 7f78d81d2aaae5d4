"""Answers under a grammar: those of a plain loop that takes the best or a drawn token of what is allowed, in fewer
forwards; schemas of strangers; and OpenAI's client."""

import concurrent.futures
import dataclasses
import functools
import json
import random
import re
from typing import Literal

import httpx
import jax
import jax.numpy as jnp
import jsonschema
import numpy as np
import pydantic
import pytest
from conftest import serving, settings, tiny_model
from helpers import write_tokenizer
from test_engine import Told

from refusion_jax import Request, UserError, decode
from refusion_jax.data.fast_tokenizer import FastTokenizer
from refusion_jax.data.tokenizer import MASK_PIECE, SentencePieceTokenizer
from refusion_jax.decoding.reference import ReferenceDecoder
from refusion_jax.decoding.requests import prepare
from refusion_jax.decoding.sampling import sample
from refusion_jax.decoding.settings import TracedSettings
from refusion_jax.serving.engine import Engine
from refusion_jax.serving.grammar import Grammars

pytest.importorskip("llguidance", reason="pip install llguidance for answers under a grammar")

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 3},
        "is_member": {"type": "boolean"},
    },
    "required": ["name", "age", "tags", "is_member"],
    "additionalProperties": False,
}
OBJECT = {"type": "object", "additionalProperties": False}
OK = OBJECT | {"properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}


@pytest.fixture(scope="module", params=["pieces", pytest.param("byte_pairs", marks=pytest.mark.slow)])
def world(request, tmp_path_factory):
    """(random model, its tokenizer, grammars over its tokens)."""
    if request.param == "pieces":
        text = [json.dumps({"name": "Ada", "age": n, "tags": ["red"], "is_member": True}) for n in range(99)]
        tokenizer = SentencePieceTokenizer.train(text, 300)
    else:
        tokenizer = FastTokenizer(write_tokenizer(tmp_path_factory.mktemp("tokenizer")), MASK_PIECE)
    ids = {f"{name}_token_id": getattr(tokenizer, f"{name}_id") for name in ("pad", "bos", "eos", "mask")}
    model = tiny_model(3, vocab_size=320, num_tokens=tokenizer.size, max_position_embeddings=512, **ids)
    model.lm_head[...] *= 4.0
    return model, tokenizer, Grammars(tokenizer, tokenizer.eos_id)


def request_of(world, grammar, method, text="Who?", new=160, **changes):
    _, tokenizer, _ = world
    own = settings(method, new=new, **{"eos_id": -1, "mask_id": -1} | changes)
    (prompt,) = tokenizer.encode([text])
    return Request(prompt, settings=own, noise=0, grammar=grammar)


_sample = jax.jit(sample)


def one_by_one(model, request, slots):
    """The plain loop: (tokens, forwards), one token per forward, over the whole text again each time."""
    (request,) = prepare([request], request.settings, model.config)
    plain, matcher, s = ReferenceDecoder(model, request), request.grammar.deep_copy(), request.settings
    answer, text, key = [], list(request.prompt), jax.random.fold_in(jax.random.key(s.seed), request.noise)
    traced = jax.tree.map(lambda x: x[:, None], TracedSettings.of([s]))
    while len(answer) < s.new_tokens and plain.ids.eos_id not in answer:
        from_mask = slots and len(answer) % s.slot_size == 0
        p = plain.forward("next", text + [plain.ids.mask_id] * from_mask)[-1]
        allowed = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")[: len(p)]
        allowed = np.pad(allowed, (0, len(p) - len(allowed))) > 0
        logits = jnp.log(jnp.where(allowed, plain.choosable(p, len(text)), 0))[None, None]
        token = int(_sample(logits, jnp.ones((1, 1), bool), key[None], jnp.array([[len(text)]]), traced)[0, 0])
        matcher.consume_tokens([token])
        text.append(token)
        answer.append(token)
    return answer, len(plain.phases)


METHODS = [("pieces", method) for method in ("ar", "idlm", "dense", "refusion")]
METHODS += [("byte_pairs", "refusion")]  # each world is compiled for


@pytest.mark.parametrize(("world", "method"), METHODS, indirect=["world"])
def test_an_answer_is_that_of_the_plain_loop_in_fewer_forwards(world, method):
    """Greedy and sampled; two rows decode six requests."""
    model, tokenizer, grammars = world
    person, word = grammars.compile("a", "json", PERSON), grammars.compile("b", "regex", "(ab|ba){3,9}c?")
    one = grammars.compile("c", "choice", ["What is the number?", "What is it?", "\u00e9t\u00e9"])
    asked = [
        request_of(world, grammar, method, text, new=64, temperature=temperature, top_k=top_k, seed=4)
        for grammar, text in ((person, "Who?"), (word, "A word"), (one, "\u00e9?"))
        for temperature, top_k in ((0.0, 0), (1.0, 5))
    ]
    out = decode(model, asked, settings(method, new=64, eos_id=-1, mask_id=-1, batch_size=2))
    expected = [one_by_one(model, request, slots=method == "refusion") for request in asked]
    assert out.tokens == [tokens for tokens, _ in expected]
    assert len({*map(tuple, out.tokens)}) > 3
    for request, tokens, order in zip(asked, out.tokens, out.commit_order, strict=True):
        assert order == list(range(len(request.prompt), len(request.prompt) + len(tokens)))
    assert sum(out.forwards) < 0.8 * sum(forwards for _, forwards in expected)


def schema_of(draw, depth=0):
    """A bounded JSON Schema, drawn from a random.Random."""
    kinds = ["string", "enum", "integer", "boolean", "pattern", "const", "format"]
    kind = draw.choice(kinds + ["array", "object", "any_of"] * (depth < 2))
    if kind == "object":
        names = draw.sample(["id", "first name", "\u00fcber", 'a"b', "items", "x"], draw.randint(1, 4))
        return OBJECT | {
            "properties": {name: schema_of(draw, depth + 1) for name in names},
            "required": draw.sample(names, draw.randint(0, len(names))),
        }
    if kind == "array":
        return {"type": "array", "items": schema_of(draw, depth + 1), "minItems": 1, "maxItems": 3}
    if kind == "any_of":
        return {"anyOf": [schema_of(draw, 2), {"type": "array", "items": schema_of(draw, 2), "maxItems": 2}]}
    return {
        "string": {"type": "string", "maxLength": 4},
        "enum": {"enum": ["red", "dark red", 7, None]},
        "integer": {"type": "integer", "minimum": -20, "exclusiveMaximum": 3000},
        "boolean": {"type": ["boolean", "null"]},
        "pattern": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{1,4}$"},
        "const": {"const": {"a": [1, "two"]}},
        "format": {"type": "string", "format": "date"},
    }[kind]


@pytest.mark.parametrize("world", [pytest.param("pieces", marks=pytest.mark.slow), "byte_pairs"], indirect=True)
@pytest.mark.parametrize("count", [100, pytest.param(500, marks=pytest.mark.slow)])
@pytest.mark.thorough
def test_all_answers_of_random_weights_are_valid(world, count):
    """At temperature 1; what they want has nothing to do with the schemas."""
    model, tokenizer, grammars = world
    schemas = [schema_of(random.Random(seed)) for seed in range(count)]
    asked = [
        request_of(world, grammars.compile("schema", "json", schema), "refusion", str(seed), 440, temperature=1.0)
        for seed, schema in enumerate(schemas)
    ]
    out = decode(model, asked, settings("refusion", new=440, eos_id=-1, mask_id=-1, batch_size=15))
    assert out.finish_reason == ["eos"] * count
    for tokens, schema in zip(out.tokens, schemas, strict=True):
        jsonschema.validate(json.loads(tokenizer.decode(tokens)), schema)
    assert sum(map(len, out.tokens)) > 2 * sum(out.forwards)


@pytest.mark.parametrize("world", ["pieces"], indirect=True)
@pytest.mark.thorough
def test_answers_with_and_without_grammars_do_not_change_each_other(world):
    """In one engine at once: each is what the library makes of it alone."""
    model, _, grammars = world
    own = settings("sequential", new=64, eos_id=-1, mask_id=-1, cache_length=96)
    engine, told, grammar = Engine(model, own, rows=4), Told(), grammars.compile("a", "json", PERSON)
    free = [request_of(world, None, "sequential", str(i), 64, temperature=1.0) for i in range(8)]
    bound = [dataclasses.replace(request, grammar=grammar) for request in free]
    engine.start()
    try:
        program = engine._batch._static
        constrained = engine.constrained(grammar)
        assert constrained is engine.constrained(grammar)
        for i in range(8):
            engine.submit([told.job(("free", i), engine.check(free[i]))])
            constrained.submit([told.job(("bound", i), constrained.check(bound[i]))])
        told.wait(16)
        assert engine.load == {"rows": 5, "decoding": 0, "waiting": 0}
        assert engine._batch._static is program
    finally:
        engine.close()
    answers = dict(told.finished)
    for name, requests in (("free", free), ("bound", bound)):
        assert [answers[name, i].tokens for i in range(8)] == decode(model, requests, own).tokens


@pytest.mark.parametrize(
    ("method", "changes", "message"),
    [
        ("llada", {}, "the decoder 'llada' does not write left to right"),
        ("refusion", {"head_rows": 8}, "leaves out tokens that a grammar may ask for"),
    ],
)
def test_decoders_that_cannot_follow_a_grammar_say_so(world, method, changes, message):
    model, _, grammars = world
    request = request_of(world, grammars.compile("a", "json", OK), method, new=16, **changes)
    with pytest.raises(UserError, match=message):
        decode(model, [request], request.settings)


def test_gaps_and_grammars_are_not_for_one_request(world):
    model, _, grammars = world
    request = request_of(world, grammars.compile("a", "json", OK), "refusion", new=16)
    gap, free = dataclasses.replace(request, template=(4, [7], 8)), dataclasses.replace(request, grammar=None)
    for others in ([gap], [request, free]):
        with pytest.raises(UserError, match="has no gaps and no least length, and its batch no other answers"):
            decode(model, others, request.settings)


NESTED = functools.reduce(lambda inner, _: {"type": "array", "items": inner}, range(3000), {})
REFUSED = {
    "a reference to itself": ("json", {"$ref": "#"}),
    "a file": ("json", {"$ref": "file:///etc/passwd"}),
    "nothing is valid": ("json", {"type": "string", "minLength": 5, "maxLength": 2}),
    "no schema": ("json", {"type": "nothing"}),
    "unknown keyword": ("json", {"type": "array", "uniqueItems": True}),
    "a million words": ("json", {"enum": [f"{i:07}" for i in range(100_000)]}),
    "a deep schema": ("json", NESTED),
    "not JSON": ("json", "{"),
    "half an expression": ("regex", "(a"),
    "back-reference": ("regex", r"(a)\1"),
}
FOLLOWED = {
    "an object that never ends": ("json", {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}),
    "long strings": ("json", {"type": "string", "minLength": 10**9}),
    "many alternatives": ("json", {"anyOf": [{"type": "object", "properties": {"a" * i: {}}} for i in range(400)]}),
    "exponential states": ("regex", "(a|b)*a(a|b){60}"),
}


@pytest.mark.parametrize("name", [*REFUSED, *FOLLOWED])
def test_a_hostile_grammar_is_refused_in_one_sentence_or_followed_in_bounds(world, name):
    """What a stranger sends ends neither the process nor its patience: compiled and begun, or refused."""
    model, _, grammars = world
    kind, given = (REFUSED | FOLLOWED)[name]
    try:
        grammar = grammars.compile("field", kind, given)
        request = request_of(world, grammar, "ar", new=16)
        outcome = decode(model, [request], request.settings).finish_reason[0]
    except UserError as error:
        outcome = str(error)
    if name in FOLLOWED:
        assert outcome in ("length", "eos") or outcome.startswith("the answer cannot continue under its grammar: ")
    else:
        assert outcome.startswith("field: ")
    assert "\n" not in outcome
    assert len(outcome) < 400


# OpenAI's client and plain HTTP, at a server.


@pytest.fixture(scope="module")
def address(trained_run):
    """Which is compiled for structured answers, too, when it says that it serves."""
    flags = ["--model_name=tiny", "--decode.slot_size=4", "--decode.batch_size=8", "--structured"]
    with serving(f"--checkpoint={trained_run}", *flags) as address:
        assert httpx.get(f"{address}/health").json()["rows"] == 10
        yield address


class Answer(pydantic.BaseModel):
    """What the client's own `parse` asks for."""

    ok: bool
    size: Literal["S", "XL"]


@pytest.mark.thorough
def test_the_client_of_openai_gets_what_its_schema_says(client):
    how = {"model": "tiny", "messages": [{"role": "user", "content": "Sort 3 1."}], "temperature": 1.0, "seed": 5}
    parsed = client.chat.completions.parse(**how, n=4, response_format=Answer)
    assert len({choice.message.parsed.model_dump_json() for choice in parsed.choices}) > 1
    assert {choice.finish_reason for choice in parsed.choices} == {"stop"}
    schema = {"name": "ok", "strict": True, "schema": OK}
    how["response_format"] = {"type": "json_schema", "json_schema": schema}
    whole = client.chat.completions.create(**how)
    assert json.loads(whole.choices[0].message.content)["ok"] in (True, False)
    assert whole.usage.completion_tokens > whole.choices[0].forwards
    events = client.chat.completions.create(**how, stream=True)
    assert "".join(e.choices[0].delta.content or "" for e in events) == whole.choices[0].message.content
    how["response_format"] = {"type": "json_object"}
    assert client.chat.completions.create(**how).choices[0].message.content.startswith("{")


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes|no"),
        ({"structured_outputs": {"regex": "a+b{3}", "disable_any_whitespace": True}}, "a+b{3}"),
        ({"structured_outputs": {"json": json.dumps(OK)}}, r'\{"ok": (true|false)\}'),
        ({"structured_outputs": {"json": OK}, "response_format": {"type": "text"}}, r'\{"ok": (true|false)\}'),
    ],
    ids=str,
)
@pytest.mark.thorough
def test_fields_of_vllm_mean_what_they_mean_there(client, fields, pattern):
    def ask(seed):
        how = {"prompt": "Sort 3 1.", "max_tokens": 24, "temperature": 1.0, "seed": seed, "extra_body": fields}
        return client.completions.create(model="tiny", **how).choices[0]

    with concurrent.futures.ThreadPoolExecutor(4) as clients:
        answers = list(clients.map(ask, range(6)))
    assert all(re.fullmatch(pattern, answer.text) for answer in answers if answer.finish_reason == "stop")
    assert sum(answer.finish_reason == "stop" for answer in answers) > 4
