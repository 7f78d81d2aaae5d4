"""Answers in a journal belong to one model: other weights, auxiliary models or tokenizers have their own answers."""

import dataclasses
import os
import shutil
import types

import pytest
from conftest import settings, tiny_model
from helpers import SHIPPED

pytest.importorskip("lm_eval")

from lm_eval.api.instance import Instance

from refusion_jax.checkpoints.load import weights_stamp
from refusion_jax.evaluation.harness import EvaluatedModel


def test_the_stamp_changes_with_the_weights_and_with_those_of_auxiliary_models(tmp_path):
    model, verifier = (shutil.copytree(SHIPPED / "model", tmp_path / name) for name in ("model", "verifier"))
    own = settings("apd", new=8)
    own = dataclasses.replace(own, **dict.fromkeys(own.auxiliary_models, str(verifier)))
    stamps = [weights_stamp(model, own)]
    assert weights_stamp(model, own) == stamps[0]
    for directory in (model, verifier):
        (weights,) = directory.glob("*.safetensors")
        os.utime(weights, (1, 1))
        stamps.append(weights_stamp(model, own))
    assert len(set(map(str, stamps))) == 3


def test_the_stamp_of_a_run_is_of_its_content_wherever_it_is(trained_run, tmp_path):
    steps = sorted((trained_run / "checkpoints").iterdir())
    stamps = [str(weights_stamp(step, settings("refusion"))) for step in steps]
    assert len(set(stamps)) == len(steps) > 1
    shutil.copytree(trained_run, tmp_path / "run", copy_function=shutil.copyfile)  # with other times
    copies = [tmp_path / "run" / "checkpoints" / step.name for step in steps]
    assert [str(weights_stamp(step, settings("refusion"))) for step in copies] == stamps


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
