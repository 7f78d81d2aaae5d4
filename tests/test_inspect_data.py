"""`inspect_data` shows what training sees."""

import io
import itertools
import json
import re
import shutil
from importlib import resources

import jax
import numpy as np
import pytest
from conftest import TINY_RUN, forward, run
from flax import nnx
from helpers import check_page, loss_terms
from rich.console import Console

from refusion_jax.batch.rows import Rows
from refusion_jax.config import make_objective
from refusion_jax.config.model import model_config
from refusion_jax.config.run_config import read_config
from refusion_jax.data.prepared import PreparedRows
from refusion_jax.distributed.sharding import make_mesh
from refusion_jax.training import data_page, recovery
from refusion_jax.training.inspection import BEGINNING, corrupted, row_page, show_row, training_batch
from refusion_jax.training.program import train_program

DATA = re.compile('<script type="application/json" id="data">(.*?)</script>')
HOSTILE = "</script><img src=x onerror=alert(1)>"


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
def test_any_system_s_row_can_be_looked_at(objective, trained_run):
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
    (page := tmp_path / "row.html").write_bytes(BEGINNING + b" an older one")
    flags = [flag for flag in TINY_RUN if "steps" not in flag] + [f"--config.objective={objective}"]
    out, _ = run("inspect_data", *flags, "--step=4", "--place=6", f"--workdir={trained_run}", f"--html={page}")
    assert page.read_bytes().startswith(BEGINNING)
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
    run("inspect_data", f"--data={output}", f"--html={page}", "--config=configs/refusion_8b.py")
    text = page.read_text()
    assert text.encode().startswith(data_page.BEGINNING)
    assert HOSTILE not in text
    cells = [cell for cell in re.split(r"\s*<[^>]+>\s*", text) if cell]
    told = {("documents", "3"), ("tokens", f"{PreparedRows(str(output)).manifest.tokens:,}"), ("duplicate", "1")}
    told |= {("not JSON", "1"), ("parameters", "8,190,427,136")}
    assert told <= set(itertools.pairwise(cells))
    assert "chip-hours of an epoch on v5p" in cells
    run("inspect_data", f"--data={output}", "--row=0", f"--html={page}", code=2)  # no page of a row stands there
