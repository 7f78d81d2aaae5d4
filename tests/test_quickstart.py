"""The README's first command, in full: install, pretrain from scratch, decode what was never seen."""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys

import pytest
from conftest import BOS, QUICK_COMPILE, ROOT, TINY_RUN, compiled, config_with, settings, tiny_model
from helpers import Letters

from refusion_jax import quickstart
from refusion_jax.data import families, tasks
from refusion_jax.data.problems import Problem
from refusion_jax.data.sources import read_examples
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


def test_answers_are_announced_where_one_is_right(capsys):
    figures = dict.fromkeys(["problems", "batch_size", "parameters", "train_seconds", "seconds_total"], 1)
    for answer in (b"pear", b"plum"):
        given = [Problem("replace", "", "pear")], decoded((answer, [0, 1, 2, 3]))
        quickstart.show(figures | {"decoders": []}, *given, Letters(), 4)
        assert ("answers in parts" in capsys.readouterr().out) == (answer == b"pear")


def test_examples_are_right_of_three_families_and_show_planning():
    forward, jumpy = [*range(12)], [*range(8, 12), *range(4, 8), *range(4)]
    word, quoted = "pear pear pear", '"pear", "pear", "pear"'
    problems = [Problem("replace", "", right) for right in (word, word, "pear plum")]
    problems += [Problem("reverse", "", word), Problem("quote", "", quoted)]
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

    calls, problems = [], list(tasks.MIXTURE.problems("test", 3, seed=0))
    monkeypatch.setattr(quickstart, "decode", decode)
    quickstart.measure(settings("ar", new=8, batch_size=1), tiny_model(), Words(), problems)
    first, timed = calls
    assert first
    assert not timed


def test_every_answer_fits_into_the_tokens_allowed():
    problems = [p for split in ("train", "test") for p in tasks.MIXTURE.problems(split, 3000, seed=0)]
    tokenizer = SentencePieceTokenizer.train([text for p in problems for text in (p.query, p.response)], 512)
    longest = max(map(len, tokenizer.encode([p.response for p in problems])))
    assert longest + 1 <= quickstart.MAX_NEW_TOKENS  # one for eos


ANSWERS = {
    "add": ("Add 47 and 85.", "7+5+0=12; 4+8+1=13; 132"),
    "sort": ("Sort 7 3 9 1.", "1 3 7 9"),
    "reverse": ("Reverse red blue green.", "green blue red"),
    "replace": ("Replace fig by lime: fig pear fig.", "lime pear lime"),
    "table": ("Table ann fig red, bob kiwi blue, cat pear gold. Column 2.", "fig kiwi pear"),
    "quote": ("Quote ann fig tom.", '"ann", "fig", "tom"'),
    "json": ('From {"name": "ann", "age": 41, "room": 305} take room, name.', '{"room": 305, "name": "ann"}'),
}


def test_the_quickstarts_problems_are_the_same_for_ever():
    drawn = repr([(p.family, p.query, p.response) for p in tasks.MIXTURE.problems("train", 2000, seed=0)])
    digest = hashlib.blake2b(drawn.encode(), digest_size=8).hexdigest()
    assert digest == "021a0ccaf4bb778c", "the figures in benchmarks/results/ are of other problems"


WORKED_OUT = {
    "sum": ("482+377=", "859"),
    "sum_by_steps": ("85+47 by steps=", "5+7+0=12 8+4+1=13 132"),
    "product": ("48*37=", "1776"),
    "product_by_steps": ("48*37 by steps=", "48*7=336 48*3=144 1776"),
    "list": ("4 6 1 5: sort, evens, twice=", "4 4 6 6"),
    "program": ("x=2; y=4; z=1; z=x-z; y=y*x; print(y,z)=", "8 1"),
    "lookup": ("look fo 18 ce 49 bi 65 : bi fo =", "65 18"),
    "brackets": ("repair [ ( ] { } } =", "[ ( ) { } ]"),
    "json": ('repair {"name: ann, door 42 =', '{"name": "ann", "door": 42}'),
    "gaps": ("fill fig _ lemon fig lime _ =", "fig lime lemon fig lime lemon"),
    "maze": ("maze i g , l o , o m , m w , g n , l i : l to w =", "l o m w"),
    "latin": ("latin 4_2_ _234 _413 3142 =", "4321 1234 2413 3142"),
}
DIFFICULTIES = range(1, families.MOST + 1)
MIXTURES = [tasks.MIXTURE, *map(families.mixture, DIFFICULTIES)]


@pytest.mark.parametrize(("mixture", "worked_out"), [(tasks.MIXTURE, ANSWERS), (families.mixture(1), WORKED_OUT)])
def test_each_family_solves_a_problem_worked_out_by_hand(mixture, worked_out):
    assert {name: family.solve(worked_out[name][0]) for name, family in mixture.families.items()} == {
        name: response for name, (_, response) in worked_out.items()
    }


@pytest.mark.parametrize("mixture", MIXTURES)
def test_train_and_test_are_disjoint_and_every_answer_can_be_worked_out_again(mixture):
    train, test = (list(mixture.problems(split, count, seed=0)) for split, count in (("train", 6000), ("test", 1200)))
    assert not {p.query for p in train} & {p.query for p in test}
    for problems in (train, test):
        assert {p.family for p in problems} == set(mixture.families)
    for problem in test:
        assert mixture.families[problem.family].solve(problem.query) == problem.response


@pytest.mark.parametrize("difficulty", [1, 3])
def test_what_is_trained_on_is_not_asked_in_other_words(difficulty):
    """With steps or without, one way round or the other."""

    def numbers(split, count):
        problems = families.mixture(difficulty).problems(split, count, seed=0)
        asked = [p.query for p in problems if p.family.startswith(("sum", "product"))]
        return {("+" in query, frozenset(re.findall("[0-9]+", query))) for query in asked}

    test = numbers("test", 1200)
    assert len(test) > 100
    assert not test & numbers("train", 20_000)


def test_no_problem_of_the_dial_is_answered_by_its_own_query():
    """A damaged text may by chance be whole, but not often; a gap, a maze or a sum never answers itself."""
    problems = list(families.mixture(3).problems("train", 3000, seed=1))
    same = [p for p in problems if p.response in p.query]
    assert {p.family for p in same} <= {"brackets", "list"}, [p for p in same if p.family not in ("brackets", "list")]
    assert len(same) < 150


def test_answers_get_longer_with_the_difficulty():
    def length(difficulty):
        return sum(len(p.query) + len(p.response) for p in families.mixture(difficulty).problems("train", 1500, seed=0))

    lengths = [length(difficulty) for difficulty in DIFFICULTIES]
    assert lengths == sorted(set(lengths))


def test_programs_print_what_python_prints(tmp_path):
    """One process runs them all."""
    problems = [p for p in families.mixture(4).problems("test", 400, seed=0) if p.family == "program"]
    script = tmp_path / "all.py"
    script.write_text("\n".join(p.query[:-1] for p in problems))
    printed = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True).stdout
    assert printed.splitlines() == [p.response for p in problems]


@pytest.mark.parametrize("path", ["tasks", "families"])
def test_held_out_examples_are_never_trained_on(path):
    def queries(split):
        data = config_with(**{"data.path": path + split, "data.examples": 10_000}).data
        return {example.prompt for example in read_examples(data, seed=0)}

    assert len(queries(":held_out")) >= 90  # of a hundred drawn
    assert not queries("") & queries(":held_out")
