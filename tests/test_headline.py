"""`bench headline`: operating points that decoders accept, results that are stored, and the speed proxy."""

import dataclasses
import json
import re
import signal
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import PROMPTS, ROOT, causal, run, settings, sharp_model, start
from helpers import config_of_mine, load_config, python, wait_until

from refusion_jax import UserError, decode
from refusion_jax.benchmarks.headline.experiment import BUDGETS, Experiment
from refusion_jax.benchmarks.headline.results import open_store
from refusion_jax.benchmarks.headline.speed_proxy import SpeedProxy, proxy_model
from refusion_jax.data import families
from refusion_jax.data.sources import held_out_problems
from refusion_jax.systems.registry import decoders_for, trainable

CONFIGS = load_config("headline")


def asked_for(budget: str, systems=(("ar", 1),), start: str = "") -> Experiment:
    return Experiment(budget, BUDGETS[budget], CONFIGS(budget), "c.py", dict(systems), start, "the command")


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("system", trainable())
def test_every_setting_of_every_dial_can_be_decoded_with(system, budget):
    size, asked = BUDGETS[budget], asked_for(budget)
    points = asked.points(system)
    assert {point.decoder for point in points} == {*decoders_for(system)}
    for point in points:
        settings = point.settings(size.new_tokens, 16)
        assert settings.new_tokens == size.new_tokens  # no decoder writes more than the others
    labels = [(point.decoder, point.label) for point in asked.points(system)]
    assert len(set(labels)) == len(labels)


@pytest.mark.parametrize("budget", ["tiny", "small", pytest.param("gpu", marks=pytest.mark.slow)])
@pytest.mark.thorough
def test_what_chooses_the_settings_does_not_score_them_and_nobody_trains_on_either(budget):
    config, (validation, test) = CONFIGS(budget), asked_for(budget).held_out()
    mixture = families.mixture(config.data.difficulty)
    assert {problem.family for problem in validation} == set(mixture.families)
    trained = {asked(mixture, p) for p in mixture.problems("train", 3000, config.seed)}
    assert not {asked(mixture, p) for p in validation + test} & trained
    assert not {p.query for p in validation} & {p.query for p in test}
    assert Counter(p.family for p in validation) == Counter(p.family for p in test)
    by_loss = {p.query for p in held_out_problems(config.data)}  # which chooses the learning rates
    assert {p.family for p in test if p.query in by_loss} <= {"product", "product_by_steps"}  # too few
    for problems in (validation, test):
        again = Counter((p.family, p.query) for p in problems) - Counter({(p.family, p.query) for p in problems})
        assert {family for family, _ in again} <= {"product"}  # of one digit and two there are not enough
        assert sum(again.values()) < 10
        assert len({p.family for p in problems[: BUDGETS[budget].timed]}) > 8  # no family waits for the end


def asked(mixture, problem):
    """What a problem asks, however it is worded."""
    return mixture.families[problem.family].asks(problem.query)


@pytest.mark.parametrize("best", [3e-3, 9e-3, 0.03, 1e-5])
def test_the_best_learning_rate_is_looked_for_until_it_lies_between_worse_ones(best):
    config, asked, losses = CONFIGS("small"), asked_for("small"), {}
    while rate := asked.next_rate(losses):
        losses[rate] = abs(np.log(rate / best))
    first, more = list(losses)[:4], list(losses)[4:]
    assert first == [multiple * config.learning_rate for multiple in asked.budget.rates]
    assert more == {3e-3: [], 9e-3: [0.016], 0.03: [0.016, 0.032, 0.064], 1e-5: [0.0005, 0.00025, 0.000125]}[best]
    is_found = min(losses) < min(losses, key=losses.get) < max(losses)
    assert is_found or len(more) == 3  # it is below all of them, and the search ends


def test_a_learning_rate_is_tried_by_a_short_run_of_the_same_config():
    config, asked = CONFIGS("small"), asked_for("small")
    run = asked.trial("ar", 0.001)
    assert run.changes["learning_rate"] == 0.001
    assert run.changes["steps"] * asked.budget.sweep == config.steps
    assert asked_for("tiny").next_rate({}) is None


def test_an_adapted_run_sees_as_much_as_a_whole_one_and_none_of_its_start_again(tmp_path):
    config = CONFIGS("small")
    asked = asked_for("small")
    run = asked.adaptation("refusion", asked.whole("ar", 2, 0.004), 0.002, tmp_path)
    assert 2 * run.changes["steps"] == config.steps
    assert run.changes["init_from"] == str(tmp_path / "runs" / "ar_seed2" / "checkpoints" / str(config.steps // 2))
    mixture = families.mixture(config.data.difficulty)
    first, second = (
        {problem.query for problem in mixture.problems("train", 2000, seed)} for seed in (2, run.changes["seed"])
    )
    assert len(first & second) < 0.1 * len(second)  # some families have few problems, and repeat them in any draw
    assert run.name != asked.whole("refusion", 2, 0.002).name


def test_seeds_can_be_added_to_a_comparison_but_nothing_else_changed():
    small = BUDGETS["small"]
    assert dataclasses.replace(small, seeds=1).of_each_run() == small.of_each_run()
    assert dataclasses.replace(small, speed_proxy="").of_each_run() == small.of_each_run()
    assert dataclasses.replace(small, rates=()).of_each_run() != small.of_each_run()


def test_a_system_may_have_its_own_number_of_seeds_and_adapts_no_more_models_than_there_are():
    systems = {"ar": 2, "card": 1, "refusion": 3}
    asked = asked_for("small", systems, "ar")
    assert asked.seeds == [("ar", 0), ("card", 0), ("refusion", 0), ("ar", 1), ("refusion", 1), ("refusion", 2)]
    assert asked.adapted == {"card": 1, "refusion": 2}
    assert not dataclasses.replace(asked, start="").adapted


def test_adapting_needs_a_checkpoint_and_a_record_in_the_middle():
    asked = asked_for("small", {"ar": 1, "card": 1}, "ar")
    config = asked.config
    asked.check()
    config.log_every = config.steps // 2 - 1
    with pytest.raises(UserError, match=f"step {config.steps // 2}, in the middle, is not logged"):
        asked.check()
    config.log_every, config.checkpoint.every = 1, config.steps // 2 - 1
    with pytest.raises(UserError, match=f"needs the checkpoint of step {config.steps // 2}"):
        asked.check()


def test_records_are_kept_and_config_keys_that_are_new_or_gone_make_no_other_comparison(tmp_path):
    store = open_store(tmp_path / "all", {"keys": {"seed": 1, "gone": 2}})
    store.add("one", {"x": 1})
    store.close()
    again = open_store(tmp_path / "all", {"keys": {"seed": 1, "new": {"a": 3}}})
    assert again.records == {"one": {"x": 1}}
    with pytest.raises(UserError, match=r"holds another comparison \(differs in keys\)"):
        open_store(tmp_path / "all", {"keys": {"seed": 2}})


def test_a_config_file_may_bring_a_system(tmp_path):
    config = tmp_path / "mine.py"
    config.write_text(config_of_mine("ar") + FEW_STEPS.replace("STEPS", "8"))
    flags = [f"--output={tmp_path / 'there'}", f"--config={config}", "--systems=mine", "--adapt_from=ar"]
    assert "--adapt_from=ar: is not among --systems=mine" in run("bench", "headline", *flags, code=2)[1]


FEW_STEPS = f"""
import importlib.util
spec = importlib.util.spec_from_file_location("headline", {str(ROOT / "configs" / "headline.py")!r})
headline = importlib.util.module_from_spec(spec)
spec.loader.exec_module(headline)

def get_config():
    c = headline.get_config("tiny")
    c.steps, c.warmup_steps, c.eval.every, c.checkpoint.every, c.log_every = STEPS, 2, 4, 4, 2
    c.batch_size, c.data.examples = 8, 600
    c.model.hidden_size, c.model.num_hidden_layers, c.model.intermediate_size = 32, 1, 64
    return c
"""


TRAINING = """
import sys
from pathlib import Path
from absl import flags
from refusion_jax.benchmarks import headline
from refusion_jax.benchmarks.headline import comparison
from refusion_jax.benchmarks.headline.results import open_store

own = flags.FlagValues()
headline.define_flags(own)
own(["headline", "--budget=small", "--systems=ar:2:0.01", f"--output={sys.argv[1]}"])
asked = headline._experiment(own)
done = {"seconds": 1.0, "tokens": 1, "losses": [{"step": 1, "tokens": 1, "loss": 1.0}]}
comparison.train = lambda run, *_: print("trained", run.name, run.changes) or done
comparison.load_tokenizer = comparison.measure.check_fit = lambda *_: None
comparison.Experiment.held_out = lambda _: ([], [])  # which takes seconds to draw
comparison.Comparison(Path(sys.argv[1]), asked, open_store(Path(sys.argv[1]), {}))._train_all()
"""


def test_while_others_train_the_comparison_itself_asks_for_no_device(tmp_path):
    """A TPU, and the memory of a GPU, belong to one process; where JAX is pointed nowhere, asking is an error."""
    done = python("-c", TRAINING, tmp_path, JAX_PLATFORMS="nowhere")
    assert done.returncode == 0, done.stderr
    trained = [line for line in done.stdout.splitlines() if line.startswith("trained")]
    assert trained[:2] == [f"trained ar_seed{seed} {{'learning_rate': 0.01}}" for seed in (0, 1)]  # at no other rates
    (drafter,) = [line for line in trained if line.startswith("trained ar_seed1_dflash_drafter ")]
    assert f"'dflash.reads': '{tmp_path / 'runs' / 'ar_seed1'}'" in drafter
    assert "'learning_rate': 0.01" in drafter


@pytest.mark.slow
def test_an_interrupted_comparison_goes_on_and_comes_out_as_one_that_was_not(tmp_path):
    """Two systems, two seeds of one, a few steps; the accuracies of two runs with one seed are the same, too."""
    config = tmp_path / "few.py"
    config.write_text(FEW_STEPS.replace("STEPS", "40"))

    def asked(name):
        flags = ["--systems=ar:2,card:1", "--adapt_from=ar", "--speed_proxy=128x1"]
        return ["headline", f"--output={tmp_path / name}", f"--config={config}", *flags]

    out, _ = run("bench", *asked("straight"))
    assert "The headline, budget `tiny`" in out
    assert "| card from ar |" in out.partition("### By family")[0]
    assert (tmp_path / "straight" / "report.md").read_text() in out
    assert len(list((tmp_path / "straight" / "answers").iterdir())) >= 4
    played = re.findall('"system":"(.*?)"', (tmp_path / "straight" / "decodings.html").read_text())
    assert len(played) == 6 * len(set(played)) == 36

    process, kept = start("bench", *asked("killed")), tmp_path / "killed" / "measurements.jsonl"
    wait_until(lambda: kept.exists() and "\n" in kept.read_text(), process, 600)  # one system is trained
    process.send_signal(signal.SIGTERM)
    process.communicate()
    before = kept.read_text()
    run("bench", *asked("killed"))
    assert kept.read_text().startswith(before)

    def outcome(name):
        results = json.loads((tmp_path / name / "results.json").read_text())
        return [
            {
                key: record.get(key)
                for key in ("system", "start", "settings", "accuracy", "families", "forwards", "tokens")
            }
            for record in results["points"]
        ]

    assert outcome("straight") == outcome("killed")
    keys = [json.loads(line)["key"] for line in kept.read_text().splitlines()]
    assert len(set(keys)) == len(keys)


def pair() -> SpeedProxy:
    """A model of width 16, with a proxy of width 128."""
    model = sharp_model(1)
    return SpeedProxy(model, proxy_model(128, 2, model))


@pytest.mark.parametrize("method", ["refusion", "llada"])
@pytest.mark.thorough
def test_a_proxy_changes_no_answer(method):
    """Of a decoder with a cache of both, and of one without."""
    both, s = pair(), settings(method, new=8, infill="exact", head_rows=20)
    assert decode(both, PROMPTS[:1], s) == decode(both.model, PROMPTS[:1], s)


def test_every_forward_is_computed_by_both():
    """By what XLA counts of a forward pass on top of a cache, and of one without."""
    both = pair()

    def flops(model):
        tokens = jnp.array(PROMPTS[0])[None]
        places, seen = jnp.arange(tokens.size)[None], jnp.ones((1, tokens.size, tokens.size), bool)

        def forward(model):
            cached = model.extend(tokens, places, model.empty_cache(1, 32), jnp.zeros((1,), jnp.int32), seen)
            return cached, model(tokens, places, causal(jnp.ones_like(tokens)))

        return jax.jit(forward).lower(model).compile().cost_analysis()["flops"]

    alone, other, together = map(flops, (both.model, both.proxy, both))
    assert other > 2 * alone
    assert together == pytest.approx(alone + other, rel=0.05)
    assert both.weight_bytes == both.proxy.weight_bytes > 2 * both.model.weight_bytes
    assert both.empty_cache(1, 32).proxy.keys.shape == (2, 1, 1, 32, 64)
