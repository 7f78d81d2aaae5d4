"""The journal of answers: what a kill, a full disk and another call leave of it, and to which model they belong."""

import dataclasses
import json
import os
import shutil
import types

import pytest
from conftest import settings, tiny_model
from etils import epath
from helpers import SHIPPED
from lm_eval.api.instance import Instance

from refusion_jax import UserError
from refusion_jax.checkpoints.contents import describe_call, read_model_config, weights_stamp
from refusion_jax.cli.errors import Failure
from refusion_jax.decoding.journal import Journal
from refusion_jax.decoding.output import open_output
from refusion_jax.decoding.prompts import read_prompts
from refusion_jax.decoding.requests import prepare
from refusion_jax.evaluation.harness import EvaluatedModel

CALL = {"model": "a", "prompts": "b", "settings": "c"}
ANSWERS = [{"id": i, "text": "\u2028" * i} for i in range(5)]


def written(path, count=3):
    journal = Journal(path, CALL)
    for i in range(count):
        journal.add(i, ANSWERS[i])
    journal.close()
    return path.read_bytes()


def test_answers_outlive_a_kill_at_any_byte(tmp_path):
    path = tmp_path / "j"
    whole = written(path)
    for cut in range(len(whole) + 1):
        path.write_bytes(whole[:cut])
        journal = Journal(path, CALL)
        kept = len(journal.records)
        assert kept == max(whole[:cut].count(b"\n") - 1, 0)
        assert journal.records == dict(enumerate(ANSWERS[:kept]))
        journal.add(4, ANSWERS[4])
        journal.close()
        journal = Journal(path, CALL)
        journal.close()
        assert journal.records == {**dict(enumerate(ANSWERS[:kept])), 4: ANSWERS[4]}


def test_nothing_is_made_before_the_first_answer_and_the_file_alone_remains_after_the_last(tmp_path):
    with open_output(epath.Path(tmp_path / "new" / "out"), print, 1, CALL) as output:
        assert not list(tmp_path.iterdir())
        output.add(0, ANSWERS[3])
        assert [p.name for p in (tmp_path / "new").iterdir()] == ["out.partial"]
    assert [p.name for p in (tmp_path / "new").iterdir()] == ["out"]


def test_lines_that_make_no_sense_are_left_out(tmp_path):
    path = tmp_path / "j"
    junk = [b"\0" * 9, b"[]", b'{"key": true, "record": {}}', b'{"key": 1}', b"[" * 9999]
    path.write_bytes(b"\n".join([json.dumps({"call": CALL}).encode(), *junk, b'{"key": 2, "record": {"id": 2}}', b""]))
    assert Journal(path, CALL).records == {2: {"id": 2}}


def test_what_is_in_the_way_is_not_touched(tmp_path):
    written(tmp_path / "journal")
    (tmp_path / "text").write_text("a letter\nof mine")
    (tmp_path / "short").write_text("x")
    before = (tmp_path / "journal").read_bytes()
    for name, call, said in (
        ("journal", CALL | {"prompts": "x", "settings": "y"}, r"call \(differs in prompts, settings\): repeat that"),
        ("text", CALL, "not a journal of answers: move it away"),
        ("short", CALL, "not a journal of answers: move it away"),
    ):
        with pytest.raises(UserError, match=f"{name} .*{said}"):
            Journal(tmp_path / name, call)
    assert (tmp_path / "journal").read_bytes() == before
    assert (tmp_path / "text").read_text() == "a letter\nof mine"


def test_two_cannot_write_to_one(tmp_path):
    first, second = (Journal(tmp_path / "j", CALL) for _ in range(2))
    first.add(0, ANSWERS[0])
    for begin in (lambda: second.add(1, ANSWERS[1]), lambda: Journal(tmp_path / "j", CALL)):
        with pytest.raises(UserError, match="is being written by another process"):
            begin()


def test_a_full_disk_loses_nothing_that_was_there(tmp_path, full_disk):
    path = tmp_path / "j"
    size = len(written(path))
    full_disk(size + 20)
    journal = Journal(path, CALL)
    with pytest.raises(Failure, match="File too large; it keeps 3 answers"):
        journal.add(3, ANSWERS[3])
    journal.close()
    full_disk(-1)
    assert len(path.read_bytes()) == size + 20
    assert Journal(path, CALL).records == dict(enumerate(ANSWERS[:3]))


def test_the_stamp_changes_with_the_weights_and_the_config_of_a_model_and_of_auxiliary_ones(tmp_path):
    model, verifier = (shutil.copytree(SHIPPED / "model", tmp_path / name) for name in ("model", "verifier"))
    own = settings("apd", new=8)
    own = dataclasses.replace(own, **dict.fromkeys(own.auxiliary_models, str(verifier)))
    stamps = [weights_stamp(model, own)]
    assert weights_stamp(model, own) == stamps[0]
    for directory in (model, verifier):
        for file in (*directory.glob("*.safetensors"), directory / "config.json"):
            os.utime(file, (1, 1))
            stamps.append(weights_stamp(model, own))
    assert len(set(map(str, stamps))) == 5


def test_a_call_whose_lines_name_their_seed_is_another_one(tmp_path):
    """They have other noise, even where it is the seed of all."""
    model, own, calls = SHIPPED / "model", settings("ar", new=8), []
    for named in ({}, {"decode": {"seed": 0}}):
        lines = [json.dumps({"prompt_ids": [5]} | named) + "\n"] * 2
        (tmp_path / "prompts.jsonl").write_text("".join(lines))
        ids, requests = zip(*read_prompts(tmp_path / "prompts.jsonl", None, own), strict=True)
        calls.append(describe_call(model, ids, prepare(requests, own, read_model_config(model))))
    assert calls[0] != calls[1]


def test_the_stamp_of_a_run_is_of_its_content_wherever_it_is(trained_run, tmp_path):
    steps = sorted((trained_run / "checkpoints").iterdir())
    stamps = [str(weights_stamp(step, settings("refusion"))) for step in steps]
    assert len(set(stamps)) == len(steps) > 1
    shutil.copytree(trained_run, tmp_path / "run", copy_function=shutil.copyfile)  # with other times
    copies = [tmp_path / "run" / "checkpoints" / step.name for step in steps]
    assert [str(weights_stamp(step, settings("refusion"))) for step in copies] == stamps


def test_a_run_of_adapters_is_named_with_its_model_where_that_is_gone(trained_run, tmp_path):
    workdir = shutil.copytree(trained_run, tmp_path / "run")
    config = json.loads((workdir / "config.json").read_text())
    config |= {"lora": config["lora"] | {"rank": 4}, "init_from": f"{tmp_path}/gone"}
    (workdir / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=f"^{workdir} holds adapters of another model: {tmp_path}/gone holds no check"):
        weights_stamp(workdir, settings("refusion"))


def test_answers_of_another_tokenizer_are_kept_apart():
    request = Instance("generate_until", {}, ("Add 1 and 2.", {"max_gen_toks": 8}), 0, metadata=("sums", 0, 1))
    keys = set()
    for content in (b"one", b"one", b"another"):
        tokenizer = types.SimpleNamespace(
            files={"tokenizer.json": content}, encode=lambda texts: [[5, 6]], bos_id=-1, thinking=None
        )
        lm = EvaluatedModel(tiny_model(), tokenizer, name="tiny", method="refusion", flags={})
        keys.add(lm.samples([request])[0].key)
    assert len(keys) == 2
