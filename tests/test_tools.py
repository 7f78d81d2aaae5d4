"""Tool calls, asked for by OpenAI's client and read from what a model writes under a grammar."""

import json
import random
import re

import httpx
import jsonschema
import pytest
import tokenizers
from conftest import serving
from helpers import tiny_qwen3, write_tokenizer

from refusion_jax.cli.errors import UserError
from refusion_jax.data.fast_tokenizer import FastTokenizer
from refusion_jax.data.tokenizer import MASK_PIECE
from refusion_jax.serving.tools import CallReader, check_template
from refusion_jax.serving.writer import Delta

pytest.importorskip("llguidance", reason="pip install llguidance for answers under a grammar")

TEMPLATE = (  # as Qwen's writes them
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for call in m.tool_calls or [] %}"
    '\n<tool_call>\n{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    "\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)
SIZE = {"enum": ["S", "XL"]}
WEATHER = {
    "type": "object",
    "properties": {"where": {"$ref": "#/$defs/place"}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["where", "days"],
    "additionalProperties": False,
    "$defs": {"place": {"enum": ["Rome", "Oslo"]}},
}
SHIRT = {"type": "object", "properties": {"size": SIZE}, "required": ["size"], "additionalProperties": False}
SCHEMAS = {"weather": WEATHER, "shirt": SHIRT}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": f"A {name}", "parameters": schema}}
    for name, schema in SCHEMAS.items()
]
ASK = [{"role": "user", "content": "What now?"}]
BY_NAME = {"type": "function", "function": {"name": "shirt"}}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """What Qwen3's is like: the marks of a call are tokens, and text."""
    directory = tmp_path_factory.mktemp("qwen")
    tiny_qwen3(directory)
    marked = tokenizers.Tokenizer.from_file(f"{directory}/tokenizer.json")
    marked.add_tokens(["<tool_call>", "</tool_call>"])
    marked.save(f"{directory}/tokenizer.json")
    tokenizer = FastTokenizer(directory / "tokenizer.json", MASK_PIECE)
    ids = {f"{name}_token_id": getattr(tokenizer, f"{name}_id") for name in ("pad", "bos", "eos", "mask")}
    sizes = json.loads((directory / "config.json").read_text()) | ids | {"max_position_embeddings": 1024}
    (directory / "config.json").write_text(json.dumps(sizes))
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    return directory


@pytest.fixture(scope="module")
def address(directory):
    flags = ["--model_name=tiny", "--decode.method=ar", "--decode.cache_length=1024", "--decode.batch_size=2"]
    with serving(f"--checkpoint={directory}", *flags) as address:
        yield address


def ask(client, messages=ASK, **how):
    how = {"tools": TOOLS, "temperature": 1.0, "seed": 3, "max_tokens": 256} | how
    return client.chat.completions.create(model="tiny", messages=messages, **how)


def called(calls):
    """(name, arguments) of calls, which are valid and have names of their own."""
    assert len({call.id for call in calls}) == len(calls)
    found = [(call.function.name, json.loads(call.function.arguments)) for call in calls]
    for name, arguments in found:
        jsonschema.validate(arguments, SCHEMAS[name])
    return found


def test_a_model_that_has_to_call_does_and_what_it_calls_is_valid(client):
    """Random weights, at temperature 1; streams have the same calls."""
    for how, names in (
        ({"tool_choice": "required", "n": 6}, {"weather", "shirt"}),
        ({"tool_choice": BY_NAME, "n": 2}, {"shirt"}),
    ):
        choices = ask(client, **how).choices
        ended = [choice for choice in choices if choice.finish_reason == "tool_calls"]
        assert len(ended) >= len(choices) // 2  # one that calls on and on is cut
        whole = [called(choice.message.tool_calls) for choice in ended]
        assert not any("index" in call.to_dict() for choice in ended for call in choice.message.tool_calls)
        assert {name for calls in whole for name, _ in calls} == names
        assert (max(map(len, whole)) > 1) == (len(names) > 1)
        assert {choice.message.content for choice in ended} == {None}
        streamed, reasons = [{} for _ in choices], {}
        for event in ask(client, **how, stream=True):
            (choice,) = event.choices
            reasons[choice.index] = choice.finish_reason
            streamed[choice.index] |= {call.index: call for call in choice.delta.tool_calls or []}
        assert [reasons[choice.index] for choice in choices] == [choice.finish_reason for choice in choices]
        assert [called(streamed[choice.index].values()) for choice in ended] == whole
    size = {"type": "json_schema", "json_schema": {"name": "size", "schema": SIZE}}  # of an answer that is not a call
    (one,) = ask(client, tool_choice="required", parallel_tool_calls=False, response_format=size).choices
    assert (one.finish_reason, len(one.message.tool_calls)) == ("tool_calls", 1)
    how = {"tools": TOOLS, "tool_choice": BY_NAME, "temperature": 1.0, "seed": 3, "max_tokens": 256}
    with client.chat.completions.stream(model="tiny", messages=ASK, **how) as events:
        (done,) = [event for event in events if event.type == "tool_calls.function.arguments.done"]
    jsonschema.validate(json.loads(done.arguments), SHIRT)


@pytest.mark.parametrize("text", ["<tool_call>, 5 < 6", "<|im_end|> is text"])
def test_marks_and_names_of_special_tokens_can_be_asked_for(client, text):
    (one,) = ask(client, extra_body=word(text)).choices
    assert (one.message.content, one.finish_reason) == (text, "stop")


def test_calls_among_text_are_told_apart_and_text_is_text(client):
    text = 'So:\n<tool_call>\n{"name": "shirt", "arguments": {"size": "XL"}}\n</tool_call>'

    def answer(text, **how):
        (choice,) = ask(client, extra_body=word(text), **how).choices
        return choice.message.content, choice.message.tool_calls, choice.finish_reason

    content, calls, reason = answer(text)
    assert (content, called(calls), reason) == ("So:", [("shirt", {"size": "XL"})], "tool_calls")
    assert answer(text, tool_choice="none") == (text, None, "stop")
    for other in (text.replace("shirt", "shoe"), text.replace("}}", "}"), "So: <tool"):
        assert answer(other) == (other, None, "stop")
    size = {"type": "json_schema", "json_schema": {"name": "size", "schema": SHIRT}}
    choices = ask(client, response_format=size, n=24).choices
    said = [choice.message for choice in choices if choice.finish_reason != "length"]
    assert {bool(message.tool_calls) for message in said} == {True, False}
    for message in said:
        called(message.tool_calls or [])
        if not message.tool_calls:
            jsonschema.validate(json.loads(message.content), SHIRT)


def test_a_prompt_is_what_the_template_makes_of_tools_calls_and_results(client, directory):
    """What OpenAI's client has parsed comes back in its messages, and has no effect."""
    parsed = {"parsed_arguments": {"size": "S"}}
    call = {"id": "7", "type": "function", "function": {"name": "shirt", "arguments": '{"size": "S"}', **parsed}}
    turns = [*ASK, {"role": "assistant", "tool_calls": [call], "parsed": {"a": 1}}]
    turns.append({"role": "tool", "tool_call_id": "7", "content": "ok"})
    tokenizer = FastTokenizer(directory / "tokenizer.json", MASK_PIECE)
    as_object = call | {"function": {"name": "shirt", "arguments": {"size": "S"}}}
    rendered = [ASK[0], {"role": "assistant", "content": "", "tool_calls": [as_object]}, turns[2]]
    (expected,) = tokenizer.encode_chat([tokenizer.render_chat(rendered, tools=TOOLS)])
    assert ask(client, turns, max_tokens=1).usage.prompt_tokens == len(expected)
    assert '"A weather"' in tokenizer.render_chat(rendered, tools=TOOLS)
    (plain,) = tokenizer.encode_chat([tokenizer.render_chat(ASK)])
    assert ask(client, tool_choice="none", max_tokens=1).usage.prompt_tokens == len(plain)


def test_the_newer_api_calls_and_hears_results_as_chats_do(client, address):
    """Whole, and as OpenAI's client puts a stream together."""
    flat = [{"type": "function", **tool["function"]} for tool in TOOLS]
    how = {"tool_choice": {"type": "function", "name": "shirt"}, "tools": flat, "temperature": 0.0}
    how |= {"model": "tiny", "max_output_tokens": 256}
    (expected,) = ask(client, tool_choice=BY_NAME, temperature=0.0).choices[0].message.tool_calls
    whole = client.responses.create(input=ASK, **how)
    with client.responses.stream(input=ASK, **how) as events:
        told = [event for event in events if "function_call_arguments" in event.type]
        streamed = events.get_final_response()
    for response in (whole, streamed):
        (call,) = response.output
        assert (call.type, call.name, call.arguments) == ("function_call", "shirt", expected.function.arguments)
        assert (response.status, response.usage.output_tokens) == ("completed", whole.usage.output_tokens)
    assert "".join(event.delta for event in told[:-1]) == told[-1].arguments == expected.function.arguments
    heard = {"type": "function_call_output", "call_id": call.call_id, "output": "ok"}
    again = client.responses.create(input=[*ASK, call, heard], **how | {"tool_choice": "none", "max_output_tokens": 4})
    turns = [*ASK, {"role": "assistant", "tool_calls": [expected]}, {"role": "tool", "content": "ok"}]
    assert again.usage.input_tokens == ask(client, turns, tool_choice="none", max_tokens=1).usage.prompt_tokens
    assert again.output[0].content[0].text == again.output_text
    (chat,) = ask(client, turns, tool_choice="none", max_tokens=4, temperature=0.0).choices
    assert again.output_text == chat.message.content
    for given, message in (
        ({"tools": [{"type": "web_search"}]}, "tools.0.type: "),
        ({"input": [{"type": "reasoning"}]}, "input.0: must be a message, a "),
        ({"input": [heard | {"output": 3}]}, "input.0.function_call_output.output: "),
    ):
        answer = httpx.post(f"{address}/v1/responses", json={"input": "a"} | given)
        assert (answer.status_code, answer.json()["error"]["message"][: len(message)]) == (400, message)


def test_a_client_sees_how_much_of_its_prompt_was_known(client, address):
    """The turns of a conversation begin alike, and all of them with the tools."""
    turns = [{"role": "user", "content": "What is the number? " * 30}]
    first = ask(client, turns, max_tokens=4, tool_choice="none").usage
    again = ask(client, [*turns, *ASK], max_tokens=4, tool_choice="none", n=2, stream=False).usage
    assert again.prompt_tokens_details.cached_tokens > first.prompt_tokens - 48 > 64
    figures = httpx.get(f"{address}/metrics").text
    (hits,) = re.findall(r"^vllm:prefix_cache_hits_total\{.*\} (.*)$", figures, re.MULTILINE)
    assert float(hits) >= 2 * again.prompt_tokens_details.cached_tokens


def test_wherever_an_answer_is_cut_its_calls_are_the_same():
    call = '<tool_call>\n{"name": "f", "arguments": {"a": "<tool_call>"}}\n</tool_call>'
    text = f"a < b <tool\n\n{call}\n{call} c\n<tool_call>{{}}</tool_call>\n{call[:-12]}"
    draw = random.Random(0)
    for reason in ("stop", "length"):
        for _ in range(200):
            cuts = [0, *sorted(draw.choices(range(len(text)), k=draw.randint(0, 9))), len(text)]
            reader, said, calls = CallReader(["f"], are_several=True), "", []
            for begin, end in zip(cuts, cuts[1:], strict=False):
                delta = reader.read(Delta(text[begin:end]))
                said, calls = said + delta.text, calls + delta.calls
            last = reader.read(Delta("", reason))
            assert said + last.text == "a < b <tool c\n<tool_call>{}</tool_call>"
            assert last.finish_reason == ("tool_calls" if reason == "stop" else "length")
            calls += last.calls
            assert [one["function"]["arguments"] for one in calls] == ['{"a": "<tool_call>"}'] * 3
            assert [one["index"] for one in calls] == [0, 1, 2]


def test_a_model_whose_template_knows_no_tools_is_not_given_any(directory, tmp_path):
    path = write_tokenizer(tmp_path)
    for template in (None, TEMPLATE.replace("tool_call>", "call>"), TEMPLATE.replace("tool | tojson", "1")):
        if template:
            (tmp_path / "chat_template.jinja").write_text(template)
        with pytest.raises(UserError, match="^tools: this model has no chat template that "):
            check_template(FastTokenizer(path, MASK_PIECE))
    check_template(FastTokenizer(directory / "tokenizer.json", MASK_PIECE))


def tool(**function):
    return {"tools": [{"type": "function", "function": function}]}


def word(text):
    return {"structured_outputs": {"choice": [text]}}


def said_to_call(name, arguments):
    return {"role": "assistant", "tool_calls": [{"function": {"name": name, "arguments": arguments}}]}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools.0.type: "),
        (tool(name="a b"), "tools.0.function.name: "),
        ({"tools": TOOLS, "tool_choice": "some"}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice: required needs tools"),
        (tool(name="a") | {"tool_choice": BY_NAME}, "tool_choice: names none of the tools"),
        ({"tools": TOOLS, "tool_choice": "required", **word("a")}, "tools: structured_outputs.choice says already"),
        (tool(name="a", parameters={"properties": 3}) | {"tool_choice": "required"}, "tools: "),
        ({"messages": [{"role": "user"}]}, "messages.0: content: is missing"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content.0.type: Input"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages.0.content: Input should"),
        ({"messages": [{"role": "user", "content": "", "tool_calls": [{"function": {}}]}]}, "messages.0.tool_calls.0."),
        ({"messages": [said_to_call("a", "[1]")]}, "messages.0.tool_calls.0.function.arguments: "),
        ({"messages": [said_to_call("a", "[")]}, "messages.0.tool_calls.0.function.arguments: is not JSON: "),
    ],
)
def test_malformed_tools_are_refused_in_one_sentence(address, fields, message):
    answer = httpx.post(f"{address}/v1/chat/completions", json={"messages": ASK, "max_tokens": 8} | fields, timeout=60)
    assert answer.status_code == 400, answer.text
    said = answer.json()["error"]["message"]
    assert said.startswith(message)
    assert "\n" not in said
    assert len(said) < 400
