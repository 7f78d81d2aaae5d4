"""`evaluate --data`: what it measures on prepared rows, for systems with and without a known likelihood."""

import json

import pytest
from conftest import TINY_RUN, run
from helpers import evaluate_on_two
from local_task import GENERATE

from refusion_jax import UserError, load_model, load_tokenizer
from refusion_jax.evaluation import benchmark
from refusion_jax.evaluation.harness import EvaluatedModel


@pytest.fixture(scope="module")
def unknown(tmp_path_factory):
    """A run of a system whose likelihood is not known."""
    workdir = tmp_path_factory.mktemp("unknown") / "run"
    run("train", *TINY_RUN, "--config.objective=dream", "--config.steps=6", f"--workdir={workdir}")
    return workdir


@pytest.fixture
def prepared(unknown, tmp_path):
    """Rows of that run's tokenizer."""
    lines = [{"query": f"Add {i} and 3.", "response": f"{i + 3} it is, and more of it."} for i in range(90)]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, lines)))
    flags = [f"--input={tmp_path}/data.jsonl", f"--tokenizer={unknown}/tokenizer.model", "--row_length=32"]
    run("prepare", *flags, f"--output={tmp_path}/prepared")
    return tmp_path / "prepared"


def held_out(checkpoint, prepared, output, *flags, devices=1) -> dict:
    run("evaluate", f"--checkpoint={checkpoint}", f"--data={prepared}", f"--output={output}", *flags, devices=devices)
    return json.loads((output / "results.json").read_text())["held_out"]


@pytest.mark.thorough
def test_the_loss_is_measured_where_the_likelihood_is_not_known_on_any_number_of_devices(unknown, prepared, tmp_path):
    one = held_out(unknown, prepared, tmp_path / "one")
    assert one["eval_loss"] > 0
    assert "eval_bits_per_byte" not in one
    three = held_out(unknown, prepared, tmp_path / "three", "--mesh.data=3", devices=3)
    assert three["eval_loss"] == pytest.approx(one["eval_loss"], rel=1e-5)


@pytest.mark.slow
def test_two_hosts_score_as_one(trained_run, prepared, tmp_path):
    """The texts in random orders of slots, each drawn by the text's own number."""
    flags = ["--decode.slot_size=4", "--order=random", "--draws=2"]
    one = held_out(trained_run, prepared, tmp_path / "one", *flags)
    where = [f"--checkpoint={trained_run}", f"--data={prepared}", f"--output={tmp_path}/two"]
    evaluate_on_two(*where, *flags)
    two = json.loads((tmp_path / "two" / "results.json").read_text())["held_out"]
    assert two == {name: pytest.approx(x, rel=1e-6) if isinstance(x, float) else x for name, x in one.items()}


def test_settings_that_scoring_has_no_use_for_are_refused(trained_run, prepared, tmp_path):
    flags = [f"--checkpoint={trained_run}", f"--data={prepared}", f"--output={tmp_path}/out"]
    for setting in ("--decode.temperature=0.5", "--decode.max_new_tokens=9", "--num_fewshot=3", "--chat"):
        _, err = run("evaluate", *flags, setting, code=2)
        assert (
            err.strip()
            == f"error: {setting.split('=')[0]}: is of no use with --data, whose text is scored, not decoded"
        )
    assert not (tmp_path / "out").exists()
    found = held_out(trained_run, prepared, tmp_path / "out", "--decode.slot_size=4", "--limit=3", "--decode.seed=1")
    assert found["slot_size"] == 4
    assert found["eval_bits_per_byte_is_bound"] is False


@pytest.mark.parametrize("kind", ["loglikelihood_rolling", "multiple_choice"])
def test_a_task_that_needs_an_unknown_likelihood_is_refused_before_anything_is_decoded(unknown, tasks, kind):
    text = GENERATE.split("generation_kwargs")[0].replace("generate_until", kind)
    if kind == "multiple_choice":
        text = text[: text.index("doc_to_target")] + 'doc_to_choice: ["1", "2"]\ndoc_to_target: 1\n'
    plan = benchmark.Plan(["sums"], include_path=tasks(text))
    lm = EvaluatedModel(load_model(unknown), load_tokenizer(unknown), name="tiny", method="dream", flags={})
    with pytest.raises(UserError, match="--tasks=sums: needs the likelihood of texts, which is not known for dream"):
        benchmark.check_requests(lm, plan, benchmark.load_tasks(plan))
