"""The page of the server, and the events that show it slots as they fill."""

import json
import re

import httpx
import pytest
from conftest import serving
from helpers import Bytes, check_page

from refusion_jax.decoding.prompts import spelled

SETTINGS = {"slot_size": 4, "serial_blocks": 2, "infill": "exact", "slot_threshold": 0.05, "batch_size": 2}
CHAT = {"messages": [{"role": "user", "content": "Sort 7 3 9 1."}], "max_tokens": 32, "stream": True}


@pytest.fixture(scope="module")
def address(trained_run):
    """A server that has a key."""
    flags = [f"--decode.{name}={value}" for name, value in SETTINGS.items()]
    with serving(f"--checkpoint={trained_run}", "--api_key=secret", "--seed=5", *flags) as address:
        yield address


def streamed(address, path, **body):
    """The events of a stream, parsed."""
    headers = {"Authorization": "Bearer secret"}
    answer = httpx.post(f"{address}{path}", json=body, headers=headers, timeout=60)
    assert answer.status_code == 200, answer.text
    *events, done = answer.text.strip().split("\n\n")
    assert done == "data: [DONE]"
    return [json.loads(event.removeprefix("data: ")) for event in events]


@pytest.mark.parametrize("path", ["", "docs"])
@pytest.mark.thorough
def test_a_page_is_for_all_by_name_and_loads_nothing(path, address, tmp_path):
    answer = httpx.get(f"{address}/{path}")
    assert answer.status_code == 200
    assert answer.headers["content-security-policy"].startswith(
        "default-src 'none'; connect-src 'self'; img-src data:;"
    )
    assert httpx.get(f"{address}/{path}", headers={"Host": "evil.example"}).status_code == 400
    assert httpx.get(f"{address}/v1/models").status_code == 401
    assert len(answer.content) < 25_000
    for route in re.findall(r'(?:get|ask)\("([\w/.]+)"', answer.text):
        assert httpx.get(f"{address}/{route}").status_code in (200, 401, 405), route
    check_page(answer.text, tmp_path)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT | {"temperature": 2.0}),
        ("/v1/completions", {"prompt": "Sort 7", "suffix": " 1.", "max_tokens": 8, "temperature": 2.0, "stream": True}),
    ],
)
@pytest.mark.thorough
def test_watched_events_are_one_a_forward_and_add_up_to_the_answer(address, path, body):
    plain = streamed(address, path, **body)
    watched = streamed(address, path, **body, watch=True)
    pieces, said, text, forwards = {}, "", "", []
    for choice in (event["choices"][0] for event in watched):
        said += choice["text"] if "text" in choice else choice["delta"].get("content", "")
        pieces |= dict(choice.get("pieces", []))
        if "forwards" in choice:
            forwards.append(choice["forwards"])
    for choice in (event["choices"][0] for event in plain):
        text += choice["text"] if "text" in choice else choice["delta"].get("content", "")
        assert not {"pieces", "forwards"} & choice.keys() or choice["finish_reason"]
    assert said == text
    assert "".join(pieces[at] for at in sorted(pieces)).startswith(text.rstrip("\ufffd"))
    assert len(pieces) > 3
    assert forwards == list(range(plain[-1]["choices"][0]["forwards"] + 1))
    assert len(forwards) > 2


def test_a_character_of_several_tokens_is_spelled_by_its_last_one():
    text = dict(enumerate("a€b".encode()))
    assert [spelled(text, at, Bytes()) for at in text] == ["a", "", "", "€", "b"]
    del text[0]
    assert spelled(text, 4, Bytes()) == "b"
