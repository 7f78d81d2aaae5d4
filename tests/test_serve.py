"""The server, asked by real clients: OpenAI's, lm-eval's and plain HTTP."""

import collections
import concurrent.futures
import json
import re
import socket
import subprocess
import sys

import httpx
import pytest
from conftest import ROOT, serving
from helpers import wait_until
from local_task import CHOICES, GENERATE, evaluate
from local_task import TEXTS as TEXTS_TASK
from prometheus_client.parser import text_string_to_metric_families

import refusion_jax
from refusion_jax import DecodeSettings, Request, decode, load_model, load_tokenizer, log_likelihood
from refusion_jax.evaluation.likelihood import token_scores

SETTINGS = {"slot_size": 4, "serial_blocks": 2, "infill": "exact", "slot_threshold": 0.05}
TEXTS = [f"{word} {number} 3 9." for word in ("Sort", "Add", "Quote", "Reverse") for number in range(4)]


@pytest.fixture(scope="module")
def address(trained_run):
    flags = [f"--decode.{name}={value}" for name, value in SETTINGS.items()]
    with serving(f"--checkpoint={trained_run}", "--model_name=tiny", "--decode.batch_size=4", *flags) as address:
        assert figures(address)["vllm:spec_decode_num_draft_tokens_total"] == 0  # of an answer that nobody asked for
        yield address


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


def test_the_newer_api_gives_the_answer_of_a_chat(client):
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
    more = {"role": "user", "content": "Sort 3."}
    told = [*asked, {"role": "assistant", "content": whole.output_text}, more]
    chat = client.chat.completions.create(model="tiny", messages=told, max_tokens=8)
    following = client.responses.create(model="tiny", input=[*asked, *whole.output, more], max_output_tokens=8)
    assert following.output_text == chat.choices[0].message.content
    assert following.usage.input_tokens == chat.usage.prompt_tokens
    several = 0
    for text in TEXTS:
        how = {"input": text, "max_output_tokens": 24, "temperature": 1.5}
        *events, last = client.responses.create(model="tiny", stream=True, **how)
        pieces = [event.delta for event in events if event.type == "response.output_text.delta"]
        assert "".join(pieces) == last.response.output_text
        several += len(pieces) > 1
    assert several


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
    long = client.completions.create(**how, seed=drawn[3].seed + 2**62)  # OpenAI's have 63 bits
    assert [choice.text for choice in long.choices] == texts[3]
    chat = {"model": "tiny", "messages": [{"role": "user", "content": TEXTS[1]}], "max_tokens": 12, "temperature": 3.0}
    assert len({client.chat.completions.create(**chat).choices[0].message.content for _ in range(4)}) > 1


def test_an_answer_does_not_end_before_its_least_length(client, library):
    model, tokenizer = library
    own = DecodeSettings("refusion", **SETTINGS, max_new_tokens=16, temperature=1.5)
    answers = zip(TEXTS, decoded(library, TEXTS, temperature=1.5), strict=True)
    prompt, (_, tokens, _) = min(answers, key=lambda one: len(one[1][1]))
    assert len(tokens) < 12
    (ids,) = tokenizer.encode_prompts([prompt])
    how = {"model": "tiny", "prompt": prompt, "temperature": 1.5, "seed": 0, "max_tokens": 16}
    for least, asked in ((12, {"min_tokens": 12}), (16, {"ignore_eos": True})):
        (expected,) = decode(model, [Request(ids, least=least)], own).tokens
        answer = client.completions.create(**how, extra_body=asked)
        assert answer.usage.completion_tokens == len(expected) >= least
        assert answer.choices[0].text == tokenizer.decode(expected)


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


def test_text_after_the_answer_is_seen_as_in_a_template(client, library):
    model, tokenizer = library
    (prompt,), (suffix,) = tokenizer.encode_prompts([TEXTS[0]]), tokenizer.encode([" then 4"])
    own = DecodeSettings("refusion", **SETTINGS, max_new_tokens=16)
    out = decode(model, [Request(prompt, template=(8, suffix))], own)
    answer = client.completions.create(model="tiny", prompt=TEXTS[0], suffix=" then 4", max_tokens=8)
    assert answer.choices[0].text == tokenizer.decode(out.tokens[0][:8])
    assert answer.usage.prompt_tokens == len(prompt) + len(suffix)
    how = {"model": "tiny", "prompt": TEXTS[0], "max_tokens": 9, "logprobs": 1}  # a file's end has no text after it
    assert client.completions.create(**how, suffix="").choices == client.completions.create(**how).choices


def test_settings_of_decoding_are_for_one_request(client, address):
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
    unread = {"token_threshold": 0.3}  # of the other kind of infilling
    answer = post(address, "/v1/completions", json={"prompt": TEXTS[0], "decode": unread})
    assert answer.status_code == 400
    assert "'token_threshold' is not a setting that a request may have" in answer.json()["error"]["message"]


def test_log_probabilities_are_the_likelihood_of_the_answer_and_of_the_echoed_prompt(client, library):
    model, tokenizer = library
    (ids,) = tokenizer.encode_prompts([f"\U0001f680{TEXTS[0]}"])
    for prompt, most in (([*ids[:3], *ids[5:]], 1), (ids, 20)):  # the first character of one is incomplete
        answer = client.completions.create(model="tiny", prompt=prompt, max_tokens=9, logprobs=most, echo=True)
        choice = answer.choices[0]
        assert choice.text.startswith(tokenizer.decode(prompt))
        for token, at, _ in places(choice.logprobs):
            assert choice.text.startswith(token, at) or "\ufffd" in token
    found, count = choice.logprobs.token_logprobs, answer.usage.completion_tokens
    ((_, tokens, _),) = decoded(library, [f"\U0001f680{TEXTS[0]}"])
    assert found[0] is None
    assert len(found) == len(choice.logprobs.top_logprobs) == len(ids) + count
    likely = log_likelihood(model, [ids[:1], ids], [ids[1:], tokens[:count]], slot_size=4)
    assert [sum(found[1 : len(ids)]), sum(found[len(ids) :])] == pytest.approx(likely, abs=1e-3)
    for own, top in list(zip(found, choice.logprobs.top_logprobs, strict=True))[1:]:
        assert own in top.values()
        assert len(top) == most + (own < sorted(top.values())[-most])


def test_a_chat_tells_the_log_probabilities_of_a_completion(client, library):
    turns = [{"role": "user", "content": TEXTS[0]}]
    how = {"model": "tiny", "max_tokens": 9}
    (chat,) = client.chat.completions.create(messages=turns, **how, logprobs=True, top_logprobs=2).choices
    (ids,) = library[1].encode_prompts([(("user", TEXTS[0]),)])
    (plain,) = client.completions.create(prompt=ids, **how, logprobs=1).choices
    assert [one.token for one in chat.logprobs.content] == plain.logprobs.tokens
    written = bytes(byte for one in chat.logprobs.content for byte in one.bytes)
    assert written.decode(errors="replace") == chat.message.content
    found = [one.logprob for one in chat.logprobs.content]
    assert found == pytest.approx(plain.logprobs.token_logprobs, abs=1e-4)
    for one, own in zip(chat.logprobs.content, found, strict=True):
        best, second = one.top_logprobs
        assert best.logprob >= max(own, second.logprob) - 1e-6


def test_a_stream_tells_the_log_probabilities_of_the_whole_answer(client):
    turns = [{"role": "user", "content": TEXTS[0]}]
    how = {"model": "tiny", "max_tokens": 24, "temperature": 1.5, "seed": 3, "extra_body": {"ignore_eos": True}}
    text = how | {"prompt": TEXTS[0], "logprobs": 1, "echo": True}
    chat = how | {"messages": turns, "logprobs": True, "top_logprobs": 1}
    for create, asked in ((client.completions.create, text), (client.chat.completions.create, chat)):
        (whole,) = create(**asked).choices
        asked = asked | {"stream": True, "extra_body": asked["extra_body"] | {"watch": True}}  # after each forward
        pieces = [event.choices[0].logprobs for event in create(**asked)]
        told = [place for one in pieces if one for place in places(one)]
        for ours, expected in zip(told, places(whole.logprobs), strict=True):
            assert ours == (*expected[:2], expected[2] and pytest.approx(expected[2], abs=1e-3))
        assert sum(bool(one and places(one)) for one in pieces) > 1


def places(scores):
    """(token, where its text begins, its log-probability) of each place; in a chat without the second."""
    if hasattr(scores, "content"):
        return [(one.token, None, one.logprob) for one in scores.content]
    return [*zip(scores.tokens, scores.text_offset, scores.token_logprobs, strict=True)]


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


SUMS = GENERATE.replace("0.7", "0.0").replace(", decode: {{slot_size: 4, token_threshold: 0.3}}", "")


@pytest.mark.thorough
def test_lm_eval_measures_over_http_what_evaluate_measures(address, library, tmp_path, tasks):
    """By the command of the README: its own client, for which the server tokenizes, scores and decodes token ids."""
    model, tokenizer = library
    for text in (SUMS, CHOICES, TEXTS_TASK):
        directory = tasks(text)
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
    assert gained["vllm:inter_token_latency_seconds_count"] < usage["completion_tokens"]
    fed, kept = (gained[f"vllm:spec_decode_num_{name}_tokens_total"] for name in ("draft", "accepted"))
    assert 0 < kept <= min(fed, 2 * usage["completion_tokens"])
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


def test_a_client_that_goes_away_leaves_its_rows_to_others(address):
    """One that streams and one that waits ask for a thousand answers and hang up: all rows are free again at once.

    Before that one hangs up in the middle of its request; `serving` sees that the server says nothing of it.
    """
    body = json.dumps({"prompt": ["Sort 3 1."] * 1000, "temperature": 2.0, "stream": True}).encode()
    finished = figures(address)["vllm:request_success_total"]
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
        wait_until(lambda: httpx.get(f"{address}/health").json() == {"rows": 4, "decoding": 0, "waiting": 0})
    assert figures(address)["vllm:request_success_total"] - finished < 1000  # of 2,000
