"""The page that `generate --watch` writes; tests/test_systems.py watches every decoder."""

import dataclasses
import json
import re
import shutil
import subprocess

import pytest
from conftest import run
from helpers import Letters, write_lines

from refusion_jax import DecodeSettings
from refusion_jax.decoding.player import BEGINNING, Player
from refusion_jax.decoding.prompts import to_record
from refusion_jax.decoding.queue import Answer
from refusion_jax.decoding.requests import Request
from refusion_jax.decoding.stops import Stops

HOSTILE = "</script><img src=x onerror=alert(1)>"
DATA = re.compile('<script type="application/json" id="data">(.*?)</script>')


def page_of(request: Request, answer: Answer, *counts: int, stop: str = "\0") -> str:
    """The page of one answer, of which so many tokens were committed after 0, 1, .. forwards."""
    player = Player(Letters())
    for forwards, count in enumerate(counts):
        player.watch(0, dataclasses.replace(answer, forwards=forwards, commit_order=answer.commit_order[:count]))
    player.add(0, request, answer, to_record("a", answer, Letters(), Stops((stop,))))
    return player.page()


def test_a_page_plays_what_generate_answers(trained_run, tmp_path):
    lines = [{"prompt": "Sort 7 3 9."}, {"prompt": HOSTILE, "id": "bad"}, {"template": ["Add", 5, "; ", 6], "id": 2}]
    prompts, page = write_lines(tmp_path / "in.jsonl", lines), tmp_path / "new" / "page.html"
    flags = [f"--checkpoint={trained_run}", f"--input={prompts}", "--decode.max_new_tokens=8", "--decode.slot_size=4"]
    page.parent.mkdir()
    page.write_bytes(BEGINNING + b" an older one")
    out, err = run("generate", *flags, f"--watch={page}")
    assert (out, err) == run("generate", *flags)
    text = page.read_text()
    assert text.encode().startswith(BEGINNING)
    assert HOSTILE not in text
    scenes = json.loads(DATA.search(text)[1])
    assert scenes[1]["prompt"] == HOSTILE
    for scene, record in zip(scenes, map(json.loads, out.splitlines()), strict=True):
        assert scene["id"] == record["id"]
        assert len(scene["counts"]) == record["forwards"] + 1
        cells = [cell for slot in scene["groups"] for cell in slot]
        written = [word for word, order, after in cells if order < len(record["commit_order"]) and not after]
        assert "".join(written).removesuffix("</s>") == record["text"]
    assert [len(slot) for slot in scenes[2]["groups"]][1:3] == [4, 1]  # a slot ends with its gap


def test_a_cell_tells_what_it_holds_and_when():
    settings = DecodeSettings("refusion", slot_size=2, max_new_tokens=6)
    answer = Answer(list(b"AB</"), [4, 5, 2, 3], list(b"</AB"), 2, 1, "length")
    page = page_of(Request([65, 66], settings=settings), answer, 0, 2, 4, stop="/")
    (scene,) = json.loads(DATA.search(page)[1])
    assert scene["groups"] == [[["A", 2, 0], ["B", 3, 0]], [["<", 0, 0], ["/", 1, 1]]]
    assert (scene["prompt"], scene["counts"]) == ("AB", [0, 2, 4])
    assert "<" not in DATA.search(page)[1]


def test_the_page_loads_nothing_and_makes_no_markup_of_text(tmp_path):
    answer = Answer([65], [1], [65], 1, 1, "length")
    page = page_of(Request([66], settings=DecodeSettings("ar", max_new_tokens=1)), answer, 0, 1)
    assert len(page) < 20_000
    for loads in ("http:", "https:", "//", "src=", "href", "url(", "@import", "innerHTML", "outerHTML", "write("):
        assert loads not in page, loads
    assert "default-src 'none'" in page
    if not shutil.which("node"):
        pytest.skip("needs node to check the script")
    (tmp_path / "page.js").write_text(re.search("<script>(.*)</script>", page, re.DOTALL)[1])
    checked = subprocess.run(["node", "--check", tmp_path / "page.js"], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr
