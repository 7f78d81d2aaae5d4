"""Pages: slots as they fill, by `generate --watch` and the server, and what `inspect_data` shows of rows and data."""

import io
import itertools
import json
import re
import shutil
from importlib import resources

import httpx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import MASK, TINY_RUN, config_with, equipped, forward, run, serving, settings, sharp_model
from flax import nnx
from helpers import Bytes, Letters, check_page, loss_terms, tiny_qwen3, write_lines
from rich.console import Console

from refusion_jax import DecodeSettings
from refusion_jax.batch.rows import Rows
from refusion_jax.checkpoints.contents import load_tokenizer
from refusion_jax.checkpoints.run_directory import write_model_config
from refusion_jax.checkpoints.weights import save_params
from refusion_jax.config import make_objective
from refusion_jax.config.model import model_config
from refusion_jax.config.run_config import read_config
from refusion_jax.data.fast_tokenizer import first_difference
from refusion_jax.data.prepared import PreparedRows
from refusion_jax.decoding.player import BEGINNING, REFUSED, REPAIRED, VERIFIED, WAITING, Decodings, page
from refusion_jax.decoding.prompts import spelled
from refusion_jax.decoding.requests import Answer, Request, prepare
from refusion_jax.decoding.trajectory import Told, Trajectory
from refusion_jax.distributed.sharding import make_mesh
from refusion_jax.systems import registry
from refusion_jax.systems.api import stream
from refusion_jax.training import data_page, recovery
from refusion_jax.training.inspection import BEGINNING as ROW_BEGINNING
from refusion_jax.training.inspection import corrupted, row_page, show_row, training_batch
from refusion_jax.training.program import train_program

HOSTILE = "</script><img src=x onerror=alert(1)>"
DATA = re.compile('<script type="application/json" id="data">(.*?)</script>')


def part(*forwards: tuple[int, int, dict, dict]) -> Trajectory:
    """(number, tokens committed before it, drafts, plan) of forwards of a row; places to tokens, and probabilities."""
    told = []
    for kind in (2, 3):
        places = np.full((len(forwards), 9), -1, np.int32)
        tokens, chances = np.zeros_like(places), np.zeros(places.shape, np.float32)
        for row, one in enumerate(forwards):
            for column, (place, token) in enumerate(one[kind].items()):
                places[row, column] = place
                tokens[row, column], chances[row, column] = token if kind == 3 else (token, 0)
        told.append(Told(*map(jnp.array, (tokens, places)), jnp.array(chances) if kind == 3 else None))
    numbers, before = (jnp.array([one[i] for one in forwards], jnp.int32) for i in (0, 1))
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


def test_a_page_shows_an_answer_that_the_prefill_ends():
    request = Request([66], settings=DecodeSettings("dense", max_new_tokens=1))
    (row,) = rows_of(page_of(request, Answer([65], [1], [65], 0, 0, "eos")))
    (scene,) = row["scenes"]
    assert (scene["groups"], scene["counts"], scene["drafts"]) == ([[["A", 0, 0]]], [1], [])


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


SETTINGS = {"slot_size": 4, "serial_blocks": 2, "infill": "exact", "slot_threshold": 0.05, "batch_size": 2}
CHAT = {"messages": [{"role": "user", "content": "Sort 7 3 9 1."}], "max_tokens": 32, "stream": True}


@pytest.fixture(scope="module")
def address(trained_run):
    """A server that has a key."""
    flags = [f"--decode.{name}={value}" for name, value in SETTINGS.items()]
    with serving(f"--checkpoint={trained_run}", "--api_key=secret", "--decode.seed=5", *flags) as address:
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


def test_the_batch_that_is_shown_gives_the_loss_that_was_logged(trained_run):
    """The first step's: its weights are those of the seed."""
    config = read_config(trained_run)
    tokenizer, _, batch = training_batch(config, trained_run, 0)
    mesh = make_mesh({}, jax.devices()[:1])
    shape = model_config(config, tokenizer)
    program = train_program(config, shape, mesh)
    model = nnx.merge(program.graphdef, program.initial_state().params)
    terms = loss_terms(forward(model, batch.inputs, batch.positions, batch.visibility), batch)
    coefficients = make_objective(config, shape.mask_token_id).coefficients
    logged = json.loads((trained_run / "metrics.jsonl").read_text().splitlines()[0])
    assert logged["step"] == 1
    for name, term in terms.items():
        assert float(term) == pytest.approx(logged[f"loss_{name}"], rel=1e-5)
    assert float(sum(coefficients[n] * t for n, t in terms.items())) == pytest.approx(logged["loss"], rel=1e-5)


def test_a_row_is_shown_in_the_tokens_of_the_model_that_a_run_begins_with(trained_run):
    config = read_config(trained_run)
    config.data.examples, config.init_from = 50, str(trained_run)  # a tokenizer that is trained on these is another
    tokenizer, *_ = training_batch(config, None, 0)
    assert tokenizer.files == {"tokenizer.model": (trained_run / "tokenizer.model").read_bytes()}


def test_the_rows_of_a_step_after_a_roll_back_are_those_after_the_ones_left_out(trained_run, tmp_path):
    config, workdir = read_config(trained_run), tmp_path / "run"
    shutil.copytree(trained_run, workdir)
    (workdir / recovery.FILE).write_text("[[20, 23]]")
    for step, trained_on in ((19, 19), (20, 23), (30, 33)):
        shown, straight = (training_batch(config, *where)[1] for where in ((workdir, step), (trained_run, trained_on)))
        np.testing.assert_array_equal(shown.tokens, straight.tokens)


@pytest.mark.parametrize("objective", ["refusion", "ar", "llada"])
def test_any_systems_row_can_be_looked_at(objective, trained_run):
    flags = [flag for flag in TINY_RUN if "steps" not in flag]
    which = ["--step=4", "--place=5", "--labels", f"--workdir={trained_run}", f"--config.objective={objective}"]
    out, _ = run("inspect_data", *flags, *which)
    assert out.startswith(f"row 5 of the batch of step 4, objective {objective}\ndocument 1 of ")
    assert "must predict" in out
    assert ("▒" in out) == (objective != "ar")
    assert ("document 2 of 2: left out by this system" in out) == (objective == "llada")  # it is padding now


def test_shuffled_documents_are_shown_next_to_their_own_text(trained_run):
    """`block_diffusion` shuffles the documents of a row, and gives each of them without masks as well, in the end."""
    config, moved = read_config(trained_run), 0
    config.objective = "block_diffusion"
    shown = training_batch(config, trained_run, 0)
    for place in range(4):
        show_row(console := Console(file=io.StringIO(), soft_wrap=True), *shown, place, labels=False)
        lines = console.file.getvalue().splitlines()
        texts, given = ([line[7:] for line in lines if line.startswith(word)] for word in ("text ", "given "))
        assert len(texts) == len(given)
        assert all(own.endswith(text) for text, own in zip(texts, given, strict=True)), lines
        moved += len(texts) > 1
        is_first = shown[2].visibility.segment_ids[place] == 1  # each block has a mask ratio of its own
        ratios = shown[2].diagnostics["mask_ratio"][place][is_first & (shown[2].inputs[place] == shown[0].mask_id)]
        assert all(f"{ratio:.4g}" in lines[0] for ratio in (ratios.min(), ratios.max()))
    assert moved


def test_a_document_whose_tokens_an_objective_changes_is_not_left_out(trained_run):
    config = read_config(trained_run)
    config.objective = "ar"
    tokenizer, rows, batch = training_batch(config, trained_run, 0)
    noisy = batch.replace(inputs=batch.inputs.at[:, ::3].set(5))
    told = []
    for shown in (batch, noisy):
        show_row(console := Console(file=io.StringIO(), soft_wrap=True), tokenizer, rows, shown, 0, labels=False)
        told.append([line for line in console.file.getvalue().splitlines() if not line.startswith("given ")])
    assert told[0] == told[1]
    assert "left out" not in str(told)


@pytest.mark.parametrize("objective", ["refusion", "block_diffusion"])
def test_the_page_of_a_row_holds_what_the_model_is_fed(objective, trained_run, tmp_path):
    (page := tmp_path / "row.html").write_bytes(ROW_BEGINNING + b" an older one")
    flags = [flag for flag in TINY_RUN if "steps" not in flag] + [f"--config.objective={objective}"]
    out, _ = run("inspect_data", *flags, "--step=4", "--place=6", f"--workdir={trained_run}", f"--html={page}")
    assert page.read_bytes().startswith(ROW_BEGINNING)
    shown = json.loads(DATA.search(page.read_text())[1])
    assert out.startswith(shown["title"] + "\n")
    config = read_config(trained_run)
    config.objective = objective
    tokenizer, rows, batch = training_batch(config, trained_run, 3)
    batch = jax.tree.map(lambda x: np.asarray(x)[6], batch)
    seen = batch.visibility
    for name, values in (
        *(("inputs", batch.inputs), ("positions", batch.positions)),
        *(("documents", seen.segment_ids), ("ranks", seen.rank), ("groups", seen.group)),
        ("labels", np.where(sum(batch.weights.values()) > 0, batch.labels, -1)),
    ):
        np.testing.assert_array_equal(shown[name], values, err_msg=name)
    for name, own in (("weights", batch.weights), ("diagnostics", batch.diagnostics)):
        own = {key.replace("_", " "): value for key, value in own.items()}
        assert shown[name].keys() == own.keys()
        for key, values in own.items():
            np.testing.assert_allclose(shown[name][key], values, rtol=1e-4)
    masked = [tokenizer.mask_id] * shown["kinds"].count("masked")
    assert [x for x, kind in zip(shown["inputs"], shown["kinds"], strict=True) if kind == "masked"] == masked
    assert len(masked) == np.sum(batch.inputs == tokenizer.mask_id) > 0
    texts = [rows.tokens[6][rows.segment_ids[6] == document].tolist() for document in range(9)]
    for document, at, token, kind in zip(
        *(shown[x] for x in ("documents", "positions", "inputs", "kinds")), strict=True
    ):
        if kind in ("prompt", "clean"):
            assert token == (texts[document][at:] or texts[document][-1:])[0]  # which may be padded with its last one


def test_text_of_a_row_becomes_no_markup(trained_run, tmp_path):
    config = read_config(trained_run)
    config.objective = "ar"
    tokenizer, _, _ = training_batch(config, trained_run, 0)
    tokens = np.array(tokenizer.encode([HOSTILE]), np.int32)
    rows = Rows(tokens, np.ones_like(tokens), np.ones(tokens.shape, bool))
    batch = corrupted(config, tokenizer, rows, jax.random.split(jax.random.key(0), 1))
    page = row_page(HOSTILE, tokenizer, rows, batch, 0)
    data = DATA.search(page)[1]
    assert "<" not in data
    assert json.loads(data)["title"] == HOSTILE
    assert "<" in json.loads(data)["texts"].values()
    template = resources.files("refusion_jax.training").joinpath("row_page.html").read_text()
    assert DATA.sub("", page) == DATA.sub("", template)
    assert "default-src 'none'" in template
    check_page(template, tmp_path)


def test_a_page_tells_what_is_in_prepared_data_and_what_training_on_it_takes(tmp_path, trained_run):
    lines = [{"text": f"{HOSTILE} {i} is it"} for i in (1, 2, 2, 3)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + "no JSON\n")
    output, page = tmp_path / "out", tmp_path / "data.html"
    flags = [f"--input={tmp_path}/a.jsonl", f"--tokenizer={trained_run}/tokenizer.model", "--row_length=64", "--dedup"]
    run("prepare", *flags, f"--output={output}", "--on_error=skip", "--workers=1")
    run("inspect_data", f"--data={output}", f"--html={page}", "--config=configs/refusion_8b.py", "--config.epochs=3")
    text = page.read_text()
    assert text.encode().startswith(data_page.BEGINNING)
    assert HOSTILE not in text
    cells = [cell for cell in re.split(r"\s*<[^>]+>\s*", text) if cell]
    told = {("documents", "3"), ("tokens", f"{PreparedRows(str(output)).manifest.tokens:,}"), ("duplicate", "1")}
    told |= {("not JSON", "1"), ("parameters", "8,190,735,360")}
    assert told <= set(itertools.pairwise(cells))
    assert text.count("Held-out documents are counted, too.") == 3  # in sources, lengths and languages
    assert {"chip-hours of an epoch on v5p", "epochs in 1 steps"} <= {*cells}  # of 3 epochs, not of the config's steps
    config = config_with(objective="dflash", row_length=64, **{"dflash.reads": str(tmp_path)})
    data, tokenizer, shape = PreparedRows(str(output)), load_tokenizer(trained_run), model_config(config)
    save_params(tmp_path, {"nothing": jnp.zeros(1)})
    write_model_config(tmp_path, shape)
    epoch = train_program(config, shape, make_mesh({}, jax.devices()[:1])).flops_per_row * len(data)
    assert f"{epoch:.3g}" in data_page.data_page(data, tokenizer, config)  # as in training, with the target model's
    run("inspect_data", f"--data={output}", "--row=0", f"--html={page}", code=2)  # no page of a row stands there


def test_inspect_data_shows_rows_in_the_tokens_of_the_model_that_is_read(tmp_path):
    """As `train` does, where neither the config nor the run has a tokenizer."""
    tiny_qwen3(tmp_path)
    config = config_with(objective="dflash", row_length=512, **{"data.path": "tasks", "data.examples": 50})
    config.dflash.reads = str(tmp_path)
    assert first_difference(training_batch(config, None, 0)[0], load_tokenizer(tmp_path)) is None
