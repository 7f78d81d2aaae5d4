"""The README's first command, in full: install, pretrain from scratch, decode what was never seen."""

import json
import os
import re
import shutil
import subprocess

import pytest
from conftest import BOS, QUICK_COMPILE, ROOT, TINY_RUN, compiled, settings, tiny_model
from helpers import Letters

from refusion_jax import quickstart
from refusion_jax.data import tasks
from refusion_jax.data.tokenizer import SentencePieceTokenizer
from refusion_jax.systems.api import Decoded


def launch(workdir, *flags: str, **variables: str) -> dict:
    """What quickstart.sh reports of a run, which it prints, too."""
    own = ("XLA_FLAGS", "NPROC", "JAX_COMPILATION_CACHE_DIR", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS")
    env = {k: v for k, v in os.environ.items() if k not in own} | {"WORKDIR": str(workdir)} | variables
    line = ["bash", "launch/quickstart.sh", *flags]
    done = subprocess.run(line, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    report = json.loads((workdir / "report.json").read_text())
    for method in ("refusion", "sequential"):
        assert set(report[method]) == {"accuracy", "tokens_per_forward", "tokens_per_second"}
        assert f"{report[method]['accuracy']:.1%}" in done.stdout
    assert report["problems"] == 200
    assert report["sequential"]["tokens_per_forward"] == 1
    assert 0 < report["train_seconds"] < report["seconds_total"]
    page = (workdir / "decodings.html").read_text()
    assert re.findall('"system":"(.*?)"', page) == ["refusion", "sequential"] * 3
    return report | {"printed": done.stdout}


@pytest.mark.thorough
def test_a_finished_run_is_decoded_by_both_decoders(trained_run, tmp_path):
    """A run again goes straight to decoding; that a model learns is what test_train.py shows in seconds."""
    shutil.copytree(trained_run, tmp_path / "run")
    shared = {name: os.environ[name] for name in ("JAX_COMPILATION_CACHE_DIR",)} | {"XLA_FLAGS": QUICK_COMPILE}
    out = launch(tmp_path / "run", *TINY_RUN[1:], **shared)["printed"]
    assert "training is complete" in out
    assert "step " not in out.split("training is complete")[0]


@pytest.mark.slow  # minutes; with a user's own settings of the compiler
def test_a_model_learns_the_problems_and_decodes_them_several_tokens_at_a_time(tmp_path):
    report = launch(tmp_path / "run")
    assert report["refusion"]["accuracy"] >= 0.9
    assert report["sequential"]["accuracy"] >= 0.9
    assert report["refusion"]["tokens_per_forward"] > 4
    assert report["parameters"] > 500_000


def decoded(*answers: tuple[bytes, list[int]]) -> Decoded:
    """Answers given as their letters and the places in the order of writing, after prompts of ten tokens."""
    tokens, orders = [list(text) for text, _ in answers], [[10 + place for place in order] for _, order in answers]
    n = len(answers)
    return Decoded(tokens, orders, tokens, [5] * n, [3] * n, ["eos"] * n)


def test_slots_are_shown_in_text_order_with_the_time_of_their_writing():
    dropped = [12, 13, 14, 15]  # after the end, and written first
    answer = decoded((b"ABCDEFGHIJ", [*dropped, 4, 5, 6, 7, 0, 1, 2, 3, 8, 9]))
    assert quickstart.written_parts(answer, 0, Letters(), 4) == [(2, "ABCD"), (1, "EFGH"), (3, "IJ")]


def test_examples_are_right_of_three_families_and_show_planning():
    forward, jumpy = [*range(12)], [*range(8, 12), *range(4, 8), *range(4)]
    word, quoted = "pear pear pear", '"pear", "pear", "pear"'
    problems = [tasks.Problem("replace", "", right) for right in (word, word, "pear plum")]
    problems += [tasks.Problem("reverse", "", word), tasks.Problem("quote", "", quoted)]
    texts = [word.encode()] * 4 + [quoted.encode()]
    answers = decoded(*zip(texts, (forward, jumpy, jumpy, jumpy[4:], forward), strict=True))
    assert quickstart.examples(problems, answers, Letters(), 4) == [1, 3, 4]


def test_nothing_is_compiled_while_the_time_is_taken(monkeypatch):
    class Words(Letters):
        def encode_prompts(self, texts):
            return [[BOS, 5 + len(text) % 20] for text in texts]

    def decode(*what, real=quickstart.decode):
        with compiled() as programs:
            out = real(*what)
        calls.append(programs)
        return out

    calls, problems = [], list(tasks.problems("test", 3, seed=0))
    monkeypatch.setattr(quickstart, "decode", decode)
    quickstart.measure(settings("ar", new=8, batch_size=1), tiny_model(), Words(), problems)
    first, timed = calls
    assert first
    assert not timed


def test_every_answer_fits_into_the_tokens_allowed():
    problems = [p for split in ("train", "test") for p in tasks.problems(split, 3000, seed=0)]
    tokenizer = SentencePieceTokenizer.train([text for p in problems for text in (p.query, p.response)], 512)
    longest = max(map(len, tokenizer.encode([p.response for p in problems])))
    assert longest + 1 <= quickstart.MAX_NEW_TOKENS  # one for eos
