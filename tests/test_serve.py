"""The server, asked by real clients: OpenAI's, lm-eval's and plain HTTP."""

import asyncio
import collections
import concurrent.futures
import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time

import httpx
import openai
import pytest
import uvicorn
from conftest import ROOT, run, serving, start
from helpers import wait_until
from local_task import CHOICES, GENERATE, evaluate, task_writer
from local_task import TEXTS as TEXTS_TASK
from prometheus_client.parser import text_string_to_metric_families

import refusion_jax
from refusion_jax import DecodeSettings, Request, decode, load_model, load_tokenizer, log_likelihood
from refusion_jax.cli.errors import UserError
from refusion_jax.evaluation.likelihood import token_scores
from refusion_jax.serving.access import allowed_hosts
from refusion_jax.serving.address import listen
from refusion_jax.serving.connections import TimedConnection
from refusion_jax.serving.errors import largest_body

SETTINGS = {"slot_size": 4, "serial_blocks": 2, "infill": "exact", "slot_threshold": 0.05}
TEXTS = [f"{word} {number} 3 9." for word in ("Sort", "Add", "Quote", "Reverse") for number in range(4)]


@pytest.fixture(scope="module")
def address(trained_run):
    flags = [f"--decode.{name}={value}" for name, value in SETTINGS.items()]
    with serving(f"--checkpoint={trained_run}", "--model_name=tiny", "--decode.batch_size=4", *flags) as address:
        yield address


@pytest.fixture(scope="module")
def client(address):
    with openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def library(trained_run):
    """(model, tokenizer) of the run that is served."""
    return load_model(trained_run), load_tokenizer(trained_run)


def decoded(library, texts, **changes):
    """What the library makes of prompts, each on its own."""
    model, tokenizer = library
    own = DecodeSettings("refusion", **SETTINGS | {"max_new_tokens": 16} | changes)
    outs = [decode(model, [prompt], own) for prompt in tokenizer.encode_prompts(texts)]
    return [(tokenizer.decode(out.tokens[0]), out.tokens[0], out.commit_order[0]) for out in outs]


def post(address, path, **how):
    return httpx.post(f"{address}{path}", timeout=60, **how)


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_many_clients_at_once_get_what_each_prompt_gives_alone(client, library, temperature):
    def ask(text):
        return client.completions.create(
            model="tiny", prompt=text, max_tokens=16, temperature=temperature, seed=7, extra_body={"commits": True}
        )

    with concurrent.futures.ThreadPoolExecutor(8) as clients:
        answers = list(clients.map(ask, TEXTS))
    for answer, (text, tokens, order) in zip(
        answers, decoded(library, TEXTS, temperature=temperature, seed=7), strict=True
    ):
        (choice,) = answer.choices
        assert choice.text == text
        assert answer.usage.completion_tokens == len(tokens)
        assert [position for position, _ in choice.commits] == order
        assert choice.finish_reason == ("stop" if tokens[-1] == library[1].eos_id else "length")
    assert len({answer.choices[0].text for answer in answers}) > 2


def test_a_stream_is_the_answer_in_pieces_as_its_beginning_becomes_certain(client, library):
    expected = decoded(library, TEXTS, temperature=1.5, max_new_tokens=24)
    several = 0
    for prompt, (text, tokens, order) in zip(TEXTS, expected, strict=True):
        usage = {"include_usage": True, "continuous_usage_stats": True}
        how = {"max_tokens": 24, "temperature": 1.5, "stream_options": usage}
        *events, last = client.completions.create(
            model="tiny", prompt=prompt, stream=True, seed=0, extra_body={"commits": True}, **how
        )
        assert last.usage.completion_tokens == events[-1].usage.completion_tokens == len(tokens)
        choices = [event.choices[0] for event in events]
        assert "".join(choice.text for choice in choices) == text
        assert [position for choice in choices for position, _ in choice.commits] == order
        assert [choice.finish_reason for choice in choices[:-1]] == [None] * (len(choices) - 1)
        assert choices[-1].finish_reason
        several += len(choices) > 1
    assert several


def test_a_chat_is_the_prompt_of_its_turns(client, library):
    model, tokenizer = library
    turns = [("user", "Sort 3 1."), ("assistant", "1 3"), ("user", "Sort 5 2.")]
    (prompt,) = tokenizer.encode_prompts([tuple(turns)])
    out = decode(model, [prompt], DecodeSettings("refusion", **SETTINGS, max_new_tokens=16))
    messages = [{"role": role, "content": content} for role, content in turns]
    messages[-1]["content"] = [{"type": "text", "text": "Sort 5 "}, {"type": "text", "text": "2."}]
    messages[1] |= {"refusal": None, "tool_calls": None}  # as OpenAI's client hands its own answers back
    whole = client.chat.completions.create(model="tiny", messages=messages, max_completion_tokens=16)
    assert whole.choices[0].message.content == tokenizer.decode(out.tokens[0])
    assert whole.usage.prompt_tokens == len(prompt)
    events = list(client.chat.completions.create(model="tiny", messages=messages, max_tokens=16, stream=True))
    assert events[0].choices[0].delta.role == "assistant"
    assert "".join(e.choices[0].delta.content or "" for e in events) == whole.choices[0].message.content


def test_the_newer_api_gives_the_answer_of_a_chat(client, address):
    turns = [{"role": "user", "content": "Sort 3 1."}, {"role": "assistant", "content": "1 3"}]
    turns.append({"role": "user", "content": [{"type": "input_text", "text": "Sort 5 2."}]})
    asked = [*turns[:2], {"role": "user", "content": "Sort 5 2."}]
    chat = client.chat.completions.create(
        model="tiny", messages=[{"role": "system", "content": "Be short."}, *asked], max_tokens=32, seed=0
    )
    how = {"model": "tiny", "instructions": "Be short.", "input": turns, "max_output_tokens": 32, "store": False}
    whole = client.responses.create(**how)
    assert whole.output_text == chat.choices[0].message.content
    assert whole.status == {"stop": "completed", "length": "incomplete"}[chat.choices[0].finish_reason]
    used = whole.usage.input_tokens, whole.usage.output_tokens
    assert used == (chat.usage.prompt_tokens, chat.usage.completion_tokens)
    several = 0
    for text in TEXTS:
        how = {"input": text, "max_output_tokens": 24, "temperature": 1.5}
        *events, last = client.responses.create(model="tiny", stream=True, **how)
        pieces = [event.delta for event in events if event.type == "response.output_text.delta"]
        assert "".join(pieces) == last.response.output_text
        several += len(pieces) > 1
    assert several
    answer = post(address, "/v1/responses", json={"input": "a", "text": {"format": {"type": "json_schema"}}})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == "response_format: json_schema.schema is missing"


def test_several_prompts_and_answers_in_one_request(client, library):
    ids = library[1].encode_prompts(TEXTS[:2])
    how = {"model": "tiny", "max_tokens": 12, "temperature": 2.0, "n": 2, "seed": 3}
    by_text, by_ids = (client.completions.create(prompt=prompt, **how) for prompt in (TEXTS[:2], ids))
    assert [choice.text for choice in by_text.choices] == [choice.text for choice in by_ids.choices]
    assert [choice.index for choice in by_text.choices] == [0, 1, 2, 3]
    assert by_text.usage.prompt_tokens == sum(map(len, ids))
    alone = client.completions.create(prompt=TEXTS[1], **how)
    assert [choice.text for choice in alone.choices] == [choice.text for choice in by_text.choices[2:]]
    twice = client.completions.create(prompt=[TEXTS[1]] * 3, **how)
    assert [choice.text for choice in twice.choices[:2]] == [choice.text for choice in alone.choices]
    assert len({choice.text for choice in twice.choices}) == 6


def test_without_a_seed_every_answer_is_drawn_anew_and_told_with_its_seed(client):
    how = {"model": "tiny", "prompt": TEXTS[1], "max_tokens": 12, "temperature": 3.0, "n": 2}
    drawn = [client.completions.create(**how) for _ in range(8)]
    texts = [[choice.text for choice in answer.choices] for answer in drawn]
    assert len({text for some in texts for text in some}) > 12
    again = client.completions.create(**how, seed=drawn[3].seed, stream=True)
    said = ["", ""]
    for event in again:
        said[event.choices[0].index] += event.choices[0].text
        assert event.seed == drawn[3].seed
    assert said == texts[3]
    chat = {"model": "tiny", "messages": [{"role": "user", "content": TEXTS[1]}], "max_tokens": 12, "temperature": 3.0}
    assert len({client.chat.completions.create(**chat).choices[0].message.content for _ in range(4)}) > 1


def test_an_answer_ends_with_its_tokens_or_before_its_stop_string(client, library):
    answers = zip(TEXTS, decoded(library, TEXTS, temperature=1.5), strict=True)
    prompt, (text, tokens, _) = max(answers, key=lambda one: len(one[1][0]))
    how = {"model": "tiny", "prompt": prompt, "temperature": 1.5, "seed": 0}
    short = client.completions.create(max_tokens=5, **how)  # of a row that writes 16
    assert short.choices[0].text == library[1].decode(tokens[:5])
    assert (short.usage.completion_tokens, short.choices[0].finish_reason) == (5, "length")
    stop = text[len(text) // 2 :][:2]
    for stream in (False, True):
        said = client.completions.create(max_tokens=16, stop=["never", stop], stream=stream, **how)
        choices = [event.choices[0] for event in said] if stream else said.choices
        assert "".join(choice.text for choice in choices) == text[: text.index(stop)]
        assert choices[-1].finish_reason == "stop"


def test_text_behind_the_answer_is_seen_as_in_a_template(client, library):
    model, tokenizer = library
    (prompt,), (suffix,) = tokenizer.encode_prompts([TEXTS[0]]), tokenizer.encode([" then 4"])
    own = DecodeSettings("refusion", **SETTINGS, max_new_tokens=16)
    out = decode(model, [Request(prompt, template=(8, suffix))], own)
    answer = client.completions.create(model="tiny", prompt=TEXTS[0], suffix=" then 4", max_tokens=8)
    assert answer.choices[0].text == tokenizer.decode(out.tokens[0][:8])


def test_settings_of_decoding_are_for_one_request(client, library):
    drawn = {"temperature": 3.0, "seed": 1, "max_tokens": 16, "model": "tiny", "prompt": TEXTS[0]}
    few, greedy = (
        client.completions.create(**how).choices[0].text
        for how in (drawn | {"extra_body": {"top_k": 1}}, drawn | {"temperature": 0.0})
    )
    assert few == greedy
    how = {"model": "tiny", "prompt": TEXTS[0], "max_tokens": 16}
    plain = client.completions.create(**how)
    careful = client.completions.create(**how, extra_body={"decode": {"slot_threshold": 1.0}})
    assert careful.choices[0].rounds > plain.choices[0].rounds
    assert client.completions.create(**how).choices == plain.choices


def test_scores_of_several_answers_are_those_of_each_alone(client):
    """The texts of a response are packed into the same forwards."""
    how = {"model": "tiny", "max_tokens": 6, "logprobs": 1, "echo": True}
    together = client.completions.create(prompt=TEXTS[:5], **how)
    for text, choice in zip(TEXTS, together.choices, strict=False):
        (alone,) = client.completions.create(prompt=text, **how).choices
        assert choice.logprobs.tokens == alone.logprobs.tokens
        for scores in zip(choice.logprobs.token_logprobs[1:], alone.logprobs.token_logprobs[1:], strict=True):
            assert scores[0] == pytest.approx(scores[1], abs=1e-4)


def test_log_probabilities_are_the_likelihood_of_the_answer_and_of_the_echoed_prompt(client, library):
    model, tokenizer = library
    (ids,) = tokenizer.encode_prompts([TEXTS[0]])
    answer = client.completions.create(model="tiny", prompt=ids, max_tokens=9, logprobs=1, echo=True)
    (choice,) = answer.choices
    assert choice.text.startswith(tokenizer.decode(ids))
    found, count = choice.logprobs.token_logprobs, answer.usage.completion_tokens
    ((_, tokens, _),) = decoded(library, TEXTS[:1])
    assert found[0] is None
    assert len(found) == len(choice.logprobs.top_logprobs) == len(ids) + count
    (of_prompt, of_answer) = log_likelihood(model, [ids[:1], ids], [ids[1:], tokens[:count]], slot_size=4)
    assert sum(found[1 : len(ids)]) == pytest.approx(of_prompt, abs=1e-3)
    assert sum(found[len(ids) :]) == pytest.approx(of_answer, abs=1e-3)
    for own, top in list(zip(found, choice.logprobs.top_logprobs, strict=True))[1:]:
        assert own in top.values()
        assert len(top) == 1 + (own != max(top.values()))


def test_a_chat_tells_the_log_probabilities_of_a_completion(client, library):
    turns = [{"role": "user", "content": TEXTS[0]}]
    how = {"model": "tiny", "max_tokens": 9}
    (chat,) = client.chat.completions.create(messages=turns, **how, logprobs=True, top_logprobs=1).choices
    (ids,) = library[1].encode_prompts([(("user", TEXTS[0]),)])
    (plain,) = client.completions.create(prompt=ids, **how, logprobs=1).choices
    assert [one.token for one in chat.logprobs.content] == plain.logprobs.tokens
    found = [one.logprob for one in chat.logprobs.content]
    assert found == pytest.approx(plain.logprobs.token_logprobs, abs=1e-4)
    for one, own in zip(chat.logprobs.content, found, strict=True):
        assert one.top_logprobs[0].logprob >= own - 1e-6


def test_a_prompt_begins_as_in_training_unless_the_client_says_otherwise(client, library):
    """Text or ids: with the BOS token, which is none of what was sent; a text that fills the context lacks it."""
    model, tokenizer = library
    (begun,) = tokenizer.encode_prompts([TEXTS[0]])
    assert begun[0] == tokenizer.bos_id
    how = {"model": "tiny", "max_tokens": 1, "logprobs": 1, "echo": True}

    def scored(prompt, **more):
        (choice,) = client.completions.create(prompt=prompt, **how, extra_body=more).choices
        return choice.logprobs.tokens, choice.logprobs.token_logprobs

    (scores,) = token_scores(model, [begun[:1]], [begun[1:]], "refusion", slot_size=4)
    for prompt in (TEXTS[0], begun[1:]):
        texts, found = scored(prompt)
        assert "".join(texts[:-1]) == TEXTS[0]
        assert found[:-1] == pytest.approx([one.log_p for one in scores], abs=1e-3)
    assert scored(begun)[1][1:] == pytest.approx(found, abs=1e-3)
    (scores,) = token_scores(model, [begun[1:2]], [begun[2:]], "refusion", slot_size=4)
    for prompt in (TEXTS[0], begun[1:]):
        assert scored(prompt, add_special_tokens=False)[1][1:-1] == pytest.approx([s.log_p for s in scores], abs=1e-3)
    assert len(scored([7] * 63)[1]) == 64  # as many as the model reads


SUMS = GENERATE.replace("temperature: 0.7", "temperature: 0.0").replace(
    ", decode: {{slot_size: 4, token_threshold: 0.3}}", ""
)


def test_lm_eval_measures_over_http_what_evaluate_measures(address, library, tmp_path, monkeypatch):
    """By the command of the README: its own client, for which the server tokenizes, scores and decodes token ids."""
    model, tokenizer = library
    write = task_writer(tmp_path, monkeypatch)
    for text in (SUMS, CHOICES, TEXTS_TASK):
        directory = write(text)
        name = re.search("task: (.*)", text)[1]
        (directory / "task.yaml").rename(directory / f"{name}.yaml")
    (command,) = re.findall(r"^lm_eval .*", (ROOT / "refusion_jax/serving/README.md").read_text(), re.MULTILINE)
    command = command.replace("http://127.0.0.1:8000", address).replace("runs/quickstart", "tiny")
    command = command.replace("my_tasks", str(directory)).replace("my_task", "sums,choices,texts")
    command += f" --limit 12 --batch_size 4 --log_samples --output_path {tmp_path}/out"
    done = subprocess.run([sys.executable, "-m", *command.split()], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (results,) = (json.loads(path.read_text())["results"] for path in (tmp_path / "out").rglob("results_*.json"))

    def sent(name):
        (path,) = (tmp_path / "out").rglob(f"samples_{name}_*.jsonl")
        return sorted(map(json.loads, path.read_text().splitlines()), key=lambda sample: sample["doc_id"])

    own = {
        name: evaluate(library, tmp_path / name, name, directory, 12, {"slot_size": 4}, **SETTINGS) for name in results
    }
    assert [sample["resps"] for sample in sent("sums")] == [sample["resps"] for sample in own["sums"][1]]
    for name, metric in (("sums", "exact_match,last"), ("choices", "acc,none"), ("texts", "bits_per_byte,none")):
        assert results[name][metric] == pytest.approx(own[name][0]["results"][name][metric], rel=1e-4)
    for sample in sent("choices"):  # whose slots begin with the text, not with the choice
        for given, [[nats, _]] in zip(sample["arguments"].values(), sample["resps"], strict=True):
            context, text = given.values()
            (begun,), (whole,) = tokenizer.encode([context]), tokenizer.encode([context + text])
            (scores,) = token_scores(model, [[tokenizer.bos_id]], [whole], "refusion", slot_size=4)
            assert float(nats) == pytest.approx(sum(one.log_p for one in scores[len(begun) :]), abs=1e-3)


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
    "scores of a stream": ({"prompt": "a", "stream": True, "logprobs": 1}, 400, "logprobs: .* not for a stream"),
    "another model": ({"prompt": "a", "model": "gpt"}, 404, "model 'gpt' is not served here; 'tiny' is"),
    "too large": (b'{"prompt": "' + b"a" * LARGEST + b'"}', 413, f"at most {LARGEST} bytes"),
    "too long to tokenize": ({"prompt": "a" * 10**6}, 400, "prompt: has 1000000 characters, .* more than 64 tokens"),
    "no text to stop at": ({"prompt": "a", "stop": [1]}, 400, "stop.0: "),
    "unknown ones": ({"prompt": "a", **{f"a{i}": 0 for i in range(50_000)}}, 400, "^a0: is not supported here$"),
}


@pytest.mark.parametrize(("body", "status", "why"), BAD.values(), ids=BAD)
def test_what_cannot_be_done_is_refused_with_the_field_at_fault(address, body, status, why):
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    answer = post(address, "/v1/completions", content=raw, headers={"Content-Type": "application/json"})
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert re.search(why, error["message"]), error
    assert error["type"] == "invalid_request_error"


def test_what_asks_for_nothing_is_let_through_and_routes_that_are_not_there_are_refused(address):
    neutral = {"presence_penalty": 0.0, "best_of": 1, "logit_bias": {}, "suffix": None, "user": "me", "tools": []}
    neutral |= {"ignore_eos": True, "metadata": {"a": "b"}, "store": True, "service_tier": "auto", "request_id": "1"}
    neutral |= {"skip_special_tokens": True, "priority": 0, "top_k": -1}
    assert post(address, "/v1/completions", json={"prompt": "a", "max_tokens": 4, **neutral}).status_code == 200
    asked = [{"role": "developer", "content": "Sort.", "name": "me"}, {"role": "user", "content": "3 1"}]
    asked.append({"role": "tool", "content": "1 3", "tool_call_id": "7"})
    answer = post(address, "/v1/chat/completions", json={"messages": asked, "max_tokens": 4})
    assert answer.status_code == 200, answer.text
    assert httpx.get(f"{address}/v1/models/tiny").json()["id"] == "tiny"
    assert httpx.get(f"{address}/v1/models/gpt").json()["error"]["code"] == 404
    answer = post(address, "/v1/embeddings", json={})
    assert (answer.status_code, answer.json()["error"]["message"]) == (404, "Not Found")
    assert httpx.get(f"{address}/v1/models").json()["data"][0]["id"] == "tiny"


def test_text_becomes_tokens_and_text_again(address, library):
    tokenizer = library[1]
    tokens = post(address, "/tokenize", json={"prompt": TEXTS[0]}).json()["tokens"]
    assert tokens == tokenizer.encode_prompts([TEXTS[0]])[0]
    assert post(address, "/detokenize", json={"tokens": tokens}).json() == {"prompt": TEXTS[0]}
    assert post(address, "/detokenize", json={"tokens": [512]}).status_code == 400
    special = httpx.get(f"{address}/tokenizer_info").json()
    for name, token in (("eos_token", tokenizer.eos_id), ("bos_token", tokenizer.bos_id)):
        asked = post(address, "/tokenize", json={"prompt": special[name], "add_special_tokens": False})
        assert asked.json()["tokens"] == [token]


def test_a_page_whose_name_resolves_to_this_machine_is_refused(address):
    for host, status in (("evil.example", 400), ("localhost", 200), ("127.0.0.1:8000", 200), ("[::1]:8000", 200)):
        assert httpx.get(f"{address}/health", headers={"Host": host}).status_code == status
    assert allowed_hosts("::1", ["mine"]) == ["mine", "localhost", "127.0.0.1", "[::1]", "::1"]
    assert allowed_hosts("0.0.0.0", []) == []


def test_what_operators_read(address):
    before = figures(address)
    how = {"json": {"prompt": "a", "max_tokens": 8, "stream": True}, "headers": {"X-Request-Id": "mine-7"}}
    answer = post(address, "/v1/completions", **how)
    assert answer.headers["x-request-id"] == "mine-7"
    last = [json.loads(line[6:]) for line in answer.text.split("\n\n") if line.startswith("data: {")][-1]
    plain = post(address, "/v1/completions", json={"prompt": "a", "max_tokens": 8}, headers={"X-Request-Id": "a b"})
    assert re.fullmatch(r"[0-9a-f]{32}", plain.headers["x-request-id"])
    usage, (choice,) = plain.json()["usage"], plain.json()["choices"]
    gained = {name: value - before[name] for name, value in figures(address).items()}
    assert gained["vllm:prompt_tokens_total"] == 2 * usage["prompt_tokens"]
    assert gained["vllm:generation_tokens_total"] == 2 * usage["completion_tokens"]
    assert gained["vllm:time_to_first_token_seconds_count"] == 1
    assert gained["vllm:e2e_request_latency_seconds_count"] == 2
    assert gained["refusion_jax:tokens_per_forward_count"] == 2
    per_forward = usage["completion_tokens"] / choice["forwards"]
    assert gained["refusion_jax:tokens_per_forward_sum"] == pytest.approx(2 * per_forward)
    assert last["choices"][0]["forwards"] == choice["forwards"]
    assert gained["vllm:request_success_total"] == 2
    assert figures(address)["vllm:num_requests_running"] == figures(address)["vllm:num_requests_waiting"] == 0
    assert httpx.get(f"{address}/ready").json() == {"ready": True}
    assert httpx.get(f"{address}/version").json() == {"version": refusion_jax.__version__}


def figures(address):
    """What /metrics tells, added up over labels."""
    found = collections.Counter()
    for family in text_string_to_metric_families(httpx.get(f"{address}/metrics").text):
        for sample in family.samples:
            found[sample.name] += sample.value
    return found


def test_keys_origins_and_a_log(trained_run, monkeypatch):
    monkeypatch.setenv("REFUSION_API_KEY", "first,second")
    flags = ["--cors=https://page.example", "--allowed_host=proxy.example", "--access_log", "--decode.batch_size=1"]
    server = start("serve", "--port=0", f"--checkpoint={trained_run}", "--decode.max_new_tokens=8", *flags)
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


def test_bodies_of_any_kind_freeze_nobody(address):
    """A million keys, messages or numbers, texts of megabytes: others are answered meanwhile."""
    bodies = [{"prompt": "a", **{f"k{i}": 0 for i in range(10**6)}}, {"prompt": ["a" * 10**6] * 10}]
    bodies += [{"prompt": [1] * 340_000}, {"prompt": ["a"] * 200_000}, {"messages": [{"b": i} for i in range(70_000)]}]
    bodies += [{"prompt": "a", "stop": [{}] * 250_000}, {"prompt": "a", "decode": {f"a{i}": 0 for i in range(80_000)}}]
    sent = [json.dumps(body).encode() for body in bodies]
    paths = ["/v1/chat/completions" if "messages" in body else "/v1/completions" for body in bodies]
    slowest = 0.0
    how = {"headers": {"Content-Type": "application/json"}}
    with concurrent.futures.ThreadPoolExecutor(len(sent)) as clients, httpx.Client(timeout=60) as health:
        asked = [clients.submit(post, address, path, content=raw, **how) for path, raw in zip(paths, sent, strict=True)]
        while not all(answer.done() for answer in asked):
            began = time.monotonic()
            assert health.get(f"{address}/health").status_code == 200
            slowest = max(slowest, time.monotonic() - began)
    assert slowest < 2  # on a busy machine
    assert [answer.result().status_code for answer in asked] == [413, 413, 400, 400, 400, 400, 400]


def test_a_client_that_goes_away_leaves_its_rows_to_others(address):
    """One that streams and one that waits ask for a thousand answers and hang up: all rows are free again at once.

    Before that one hangs up in the middle of its request; `serving` sees that the server says nothing of it.
    """
    body = json.dumps({"prompt": ["Sort 3 1."] * 1000, "temperature": 2.0, "stream": True}).encode()
    host, port = address.removeprefix("http://").split(":")
    for stream in (b"true", b"false"):
        asked = body.replace(b"true", stream)
        with socket.create_connection((host, int(port))) as connection:
            head = ["POST /v1/completions HTTP/1.1", "Host: localhost", "Content-Type: application/json"]
            head.append(f"Content-Length: {len(asked)}")
            with socket.create_connection((host, int(port))) as half:
                half.sendall("\r\n".join(head).encode() + b"\r\n\r\n" + asked[:9])
            connection.sendall("\r\n".join(head).encode() + b"\r\n\r\n" + asked)
            wait_until(lambda: httpx.get(f"{address}/health").json()["waiting"] > 100)
        wait_until(lambda: httpx.get(f"{address}/health").json() == {"rows": 4, "decoding": 0, "waiting": 0}, seconds=2)


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        ([], "--checkpoint=DIR is needed"),
        (["--checkpoint={run}", "--port=70000"], "--port"),
        (["--checkpoint={run}", "--host=no.such.host.invalid"], "--host=no.such.host.invalid: no address"),
        (["--checkpoint={run}", "--port={taken}"], "--port=\\d+: Address already in use"),
        (["--checkpoint={run}", "--decode.max_new_tokens=64"], "--decode.cache_length=64: leaves no room for a prompt"),
        (["--checkpoint={run}", "--decode.cache_length=99"], "--decode.cache_length=99: the model reads 64"),
        (
            ["--checkpoint={run}", "--decode.method=apd"],
            "--decode.method=apd",
        ),
        (["--checkpoint={run}", "--decode.steps=3"], "--decode.steps=3: the decoder 'refusion' has only"),
        (["--checkpoint=/nowhere"], "/nowhere"),
    ],
)
def test_bad_flags_are_told_in_one_line(flags, why, trained_run):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        names = {"run": trained_run, "taken": taken.getsockname()[1]}
        out, err = run("serve", *(flag.format(**names) for flag in flags), code=2)
    assert out == ""
    assert err.count("\n") == 1
    assert re.search(why, err), err


def test_a_port_is_taken_before_a_model_is_loaded():
    """By whoever asks for it first, though clients are served later."""
    with listen("127.0.0.1", 0) as first:
        with pytest.raises(UserError, match=r"--port=\d+: Address already in use"):
            listen("127.0.0.1", first.getsockname()[1])


def test_a_server_that_is_asked_to_end_answers_what_it_has_begun(trained_run):
    """On SIGTERM, as supervisors send it."""
    flags = [f"--decode.{name}={value}" for name, value in SETTINGS.items()]  # as compiled above
    flags += [f"--checkpoint={trained_run}", "--decode.batch_size=4", "--seed=5"]
    server = start("serve", "--port=0", *flags)
    try:
        address = re.search(r"http://\S+(?=/v1)", server.stdout.readline())[0]
        how = {"json": {"prompt": TEXTS[0], "max_tokens": 16, "temperature": 3.0}}
        first, second = (post(address, "/v1/completions", **how).json() for _ in range(2))
        assert (first["choices"], first["seed"]) == (second["choices"], 5)
        how = {"json": {"prompt": TEXTS[0], "max_tokens": 32, "n": 64, "temperature": 2.0}}
        with concurrent.futures.ThreadPoolExecutor(1) as client:
            answer = client.submit(post, address, "/v1/completions", **how)
            wait_until(lambda: httpx.get(f"{address}/health").json()["decoding"])
            server.send_signal(signal.SIGTERM)
            assert len(answer.result().json()["choices"]) == 64
        assert server.communicate(timeout=60) == ("", "")
        assert server.returncode == 0
    finally:
        server.kill()


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
