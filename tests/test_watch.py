"""The page that `generate --watch` writes; tests/test_systems.py watches every decoder."""

import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import MASK, equipped, run, settings, sharp_model
from helpers import Letters, check_page, write_lines

from refusion_jax import DecodeSettings
from refusion_jax.decoding.player import BEGINNING, REFUSED, REPAIRED, VERIFIED, WAITING, Decodings, page
from refusion_jax.decoding.requests import Answer, Request, prepare
from refusion_jax.decoding.trajectory import Told, Trajectory
from refusion_jax.systems import registry
from refusion_jax.systems.api import stream

HOSTILE = "</script><img src=x onerror=alert(1)>"
DATA = re.compile('<script type="application/json" id="data">(.*?)</script>')


def part(*forwards: tuple[int, int, dict, dict]) -> Trajectory:
    """(number, tokens committed before it, drafts, plan) of forwards of a row; places to tokens, and probabilities."""
    told = []
    for kind in (2, 3):
        places = np.full((len(forwards), 9), -1, np.int32)
        tokens, chances = np.zeros_like(places), np.zeros(places.shape, np.float32)
        for row, forward in enumerate(forwards):
            for column, (place, token) in enumerate(forward[kind].items()):
                places[row, column] = place
                tokens[row, column], chances[row, column] = token if kind == 3 else (token, 0)
        told.append(Told(*map(jnp.array, (tokens, places)), jnp.array(chances) if kind == 3 else None))
    numbers, before = (jnp.array([forward[i] for forward in forwards], jnp.int32) for i in (0, 1))
    return jax.tree.map(np.array, Trajectory.of(numbers, before, told))


def page_of(request: Request, answer: Answer, *parts: Trajectory, kept: int | None = None) -> str:
    """The page of one answer."""
    decodings = Decodings("it", Letters())
    for some in parts:
        decodings.record(0, some)
    decodings.add(0, request, answer, kept)
    return page([("a", [decodings.scenes[0]])])


def rows_of(text: str) -> list[dict]:
    return json.loads(DATA.search(text)[1])


@pytest.mark.thorough
def test_a_page_plays_what_generate_answers(trained_run, tmp_path):
    lines = [{"prompt": "Sort 7 3 9."}, {"prompt": HOSTILE, "id": "bad"}, {"template": ["Add", 5, "; ", 6], "id": 2}]
    prompts, watched = write_lines(tmp_path / "in.jsonl", lines), tmp_path / "new" / "page.html"
    flags = [f"--checkpoint={trained_run}", f"--input={prompts}", "--decode.max_new_tokens=8", "--decode.slot_size=4"]
    watched.parent.mkdir()
    watched.write_bytes(BEGINNING + b" an older one")
    out, err = run("generate", *flags, f"--watch={watched}", "--compare=sequential")
    assert (out, err) == run("generate", *flags)
    text = watched.read_text()
    assert text.encode().startswith(BEGINNING)
    assert HOSTILE not in text
    answers = {"refusion": out, "sequential": run("generate", *flags, "--decode.method=sequential")[0]}
    rows = rows_of(text)
    assert rows[1]["scenes"][0]["prompt"] == HOSTILE
    for number, lines in enumerate(answers.values()):
        for row, record in zip(rows, map(json.loads, lines.splitlines()), strict=True):
            assert row["id"] == record["id"]
            assert [scene["system"] for scene in row["scenes"]] == list(answers)
            scene = row["scenes"][number]
            assert len(scene["counts"]) == len(scene["drafts"]) + 1 == record["forwards"] + 1
            assert scene["counts"][-1] == len(record["commit_order"])
            cells = [cell for slot in scene["groups"] for cell in slot]
            written = [word for word, order, after in cells if order < len(record["commit_order"]) and not after]
            assert "".join(written).removesuffix("</s>") == record["text"]
    assert [len(slot) for slot in rows[2]["scenes"][0]["groups"]][1:3] == [4, 1]  # a slot ends with its gap


def test_a_cell_tells_what_it_holds_and_when():
    settings = DecodeSettings("refusion", slot_size=2, max_new_tokens=6)
    answer = Answer(list(b"AB</"), [4, 5, 2, 3], list(b"</AB"), 3, 1, "length")
    a, b, x, less, slash = b"ABx</"
    first = part((1, 0, {}, {2: (a, 0.9), 3: (x, 0.404), 4: (less, 1.0), 9: (x, 1.0)}))
    others = part((2, 0, {2: a, 3: x, 4: less, 5: x}, {}), (0, 0, {2: x}, {}), (3, 2, {2: a, 3: b}, {}))
    text = page_of(Request([65, 66], settings=settings), answer, first, others, kept=3)
    assert "<" not in DATA.search(text)[1]
    (row,) = rows_of(text)
    (scene,) = row["scenes"]
    assert scene["groups"] == [[["A", 2, 0], ["B", 3, 0]], [["<", 0, 0], ["/", 1, 1]]]
    assert (scene["prompt"], scene["counts"]) == ("AB", [0, 0, 2, 4])
    words = scene["words"]

    def spelled(entries):
        return [(at, words[word], what) for at, word, what in entries]

    assert spelled(scene["plans"][0]) == [(0, "A", 90), (1, "x", 40), (2, "<", 100)]
    assert spelled(scene["drafts"][1]) == [(0, "A", WAITING), (1, "x", REFUSED), (2, "<", VERIFIED), (3, "x", REPAIRED)]
    assert spelled(scene["drafts"][2]) == [(0, "A", VERIFIED), (1, "B", VERIFIED)]


def random_requests(name: str, model, count: int) -> list[Request]:
    """Prompts, lengths and temperatures at random."""
    random, requests = np.random.default_rng(0), []
    for number in range(count):
        own = {"temperature": float(random.choice([0.0, 1.0])), "seed": number}
        prompt = random.integers(3, MASK, random.integers(2, 9)).tolist()
        requests.append(Request(prompt, settings=settings(name, batch_size=8, cache_length=96, **own)))
    return prepare(requests, requests[0].settings, model.config)


@pytest.mark.slow
@pytest.mark.parametrize("name", registry.decoders())
def test_a_page_counts_as_the_decoder_does(name):
    model = equipped(sharp_model(), name)
    requests, decodings = random_requests(name, model, 200), Decodings(name, None)
    for index, answer in stream(model, requests, record=decodings.record):
        decodings.add(index, requests[index], answer)
    for index, answer in stream(model, requests):
        scene, committed = decodings.scenes[index], len(answer.commit_order)
        assert len(scene.counts) - 1 == len(scene.drafts) == len(scene.plans) == answer.forwards
        assert scene.counts == sorted(scene.counts)
        assert scene.counts[-1] == committed
        cells = [cell for slot in scene.groups for cell in slot]
        assert sum(order < committed and not after for _, order, after in cells) == len(answer.tokens)
        taken = [at for drafts in scene.drafts for at, _, what in drafts if what in (VERIFIED, REPAIRED)]
        assert len(set(taken)) == len(taken) <= committed


def test_the_page_loads_nothing_and_makes_no_markup_of_text(tmp_path):
    answer = Answer([65], [1], [65], 1, 1, "length")
    page = page_of(Request([66], settings=DecodeSettings("ar", max_new_tokens=1)), answer, part((1, 0, {}, {})))
    assert len(page) < 20_000
    assert "default-src 'none'" in page
    check_page(page, tmp_path)
