"""Tasks of lm_eval with our decoders: what is asked, and scores whatever the batch, a kill or the hosts."""

import functools
import json
import os
import re
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
from conftest import run, start
from helpers import ended, evaluate_on_two, start_hosts, tiny_qwen3, wait_until, workers, write_lines, write_tokenizer
from lm_eval.api.instance import Instance
from lm_eval.models.utils import normalize_gen_kwargs
from local_task import CHOICES, GENERATE, TEXTS, answers, evaluate

import refusion_jax
from refusion_jax import UserError, load_model, load_tokenizer, log_likelihood
from refusion_jax.decoding import queue
from refusion_jax.decoding.stops import Stops
from refusion_jax.evaluation import benchmark
from refusion_jax.evaluation.harness import EvaluatedModel


@pytest.fixture(scope="module")
def loaded(trained_run):
    return load_model(trained_run), load_tokenizer(trained_run)


def test_the_score_is_that_of_the_logged_samples_at_any_batch_size(loaded, tasks, tmp_path):
    directory = tasks(GENERATE)
    results, samples = evaluate(loaded, tmp_path / "first", "sums", directory)
    assert len(samples) == 40
    found = [(re.findall("[0-9]", s["resps"][0][0]) or ["none"])[-1] == s["target"] for s in samples]
    assert results["results"]["sums"]["exact_match,last"] == np.mean(found)
    assert results["versions"]["sums"] == 2.5
    assert (results["packages"]["lm_eval"], results["packages"]["refusion-jax"]) == ("0.4.13", refusion_jax.__version__)
    assert results["settings"]["sums"]["token_threshold"] == 0.3
    records = [record for sample in samples for record in sample["decoding"]]
    decoding = results["decoding"]
    assert decoding["forwards"] == sum(record["forwards"] for record in records)
    assert decoding["mean_tokens"] == np.mean([record["tokens"] for record in records])
    assert decoding["tokens_per_forward"] * decoding["forwards"] == pytest.approx(sum(r["tokens"] for r in records))
    assert decoding["tokens_per_second"] > 0
    assert decoding["truncated_share"] == np.mean([record["finish_reason"] == "length" for record in records])
    assert decoding["resumed"] == 0

    _, alone = evaluate(loaded, tmp_path / "alone", "sums", directory, limit=10, batch_size=1)
    assert answers(alone) == {i: text for i, text in answers(samples).items() if i < 10}

    again, _ = evaluate(loaded, tmp_path / "first", "sums", directory)
    assert again["decoding"].pop("resumed") == again["decoding"]["tasks"]["sums"].pop("resumed") == 40
    assert decoding.pop("resumed") == decoding["tasks"]["sums"].pop("resumed") == 0
    for key in ("results", "versions", "decoding", "settings"):
        assert again[key] == results[key]


def kept_by(host: int, output: Path) -> list[bytes]:
    """The answers in the journal of a host, once it is there; its first line says whose they are."""
    journal = output / "journal" / f"answers.{host}.jsonl"
    return journal.read_bytes().splitlines(keepends=True)[1:] if journal.exists() else []


@pytest.mark.thorough
def test_killed_it_goes_on_and_decodes_no_finished_sample_again(loaded, trained_run, tasks, tmp_path):
    directory, output = tasks(GENERATE), tmp_path / "out"
    flags = [f"--checkpoint={trained_run}", f"--include_path={directory}", "--tasks=sums", f"--output={output}"]
    flags.append("--decode.batch_size=1")
    process, journal = start("evaluate", *flags), output / "journal" / "answers.0.jsonl"
    wait_until(lambda: len(kept_by(0, output)) >= 5, process)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    kept = journal.read_bytes().count(b"\n") - 1
    assert 5 <= kept < 40
    with journal.open("ab") as file:
        file.write(b'{"key": "cut o')
    out, _ = run("evaluate", *flags)
    assert f"40 samples, {kept} of them decoded before" in out
    assert len(kept_by(0, output)) == 40
    straight, expected = evaluate(loaded, tmp_path / "straight", "sums", directory, batch_size=1)
    resumed = json.loads((output / "results.json").read_text())
    assert resumed["decoding"]["resumed"] == kept
    samples = map(json.loads, (output / "samples_sums.jsonl").read_text().splitlines())
    assert answers(samples) == answers(expected)
    assert resumed["results"] == straight["results"]
    assert resumed["decoding"]["forwards"] == straight["decoding"]["forwards"]


@pytest.mark.thorough
def test_samples_drawn_for_one_problem_differ_and_flags_go_first(loaded, tasks, tmp_path):
    directory = tasks(GENERATE, sampled="true", repeats=3)
    _, samples = evaluate(loaded, tmp_path / "drawn", "sums", directory, limit=6)
    assert all(len(sample["resps"][0]) == 3 for sample in samples)
    assert any(len(set(sample["resps"][0])) > 1 for sample in samples)
    flags = {"temperature": 0.0, "max_new_tokens": 8}
    results, same = evaluate(loaded, tmp_path / "greedy", "sums", directory, limit=6, **flags)
    assert all(len(set(sample["resps"][0])) == 1 for sample in same)
    assert results["settings"]["sums"]["max_new_tokens"] == 8
    assert results["decoding"]["mean_tokens"] <= 8


@pytest.mark.parametrize(
    "options",
    [
        {"max_new_tokens": 8},
        {"max_tokens": 5, "max_new_tokens": 6},
        {"max_completion_tokens": "7", "max_gen_toks": None},
    ],
    ids=str,
)
def test_an_answer_is_as_long_as_lm_eval_reads_it_from_a_task(loaded, options):
    request = Instance("generate_until", {}, ("Add 1 and 2.", options), 0, metadata=("sums", 0, 1))
    (sample,) = EvaluatedModel(*loaded, name="tiny", method="ar", flags={}).samples([request])
    assert sample.limit == normalize_gen_kwargs(options)["max_gen_toks"]


def test_an_answer_ends_where_its_first_stop_string_begins_and_its_row_sooner(loaded, tasks, tmp_path, monkeypatch):
    how = {"limit": 20, "temperature": 2.0}  # at which the model writes long nonsense
    whole, expected = evaluate(loaded, tmp_path / "whole", "sums", tasks(GENERATE), **how)
    letters = [letter for [[text]] in answers(expected).values() for letter in text if letter.isalnum()]
    common = max(letters, key=letters.count)
    stops = Stops((common, f"no {common}"))
    directory = tasks(GENERATE.replace('until: ["\\n\\n"]', f"until: {json.dumps(stops.texts)}"))
    monkeypatch.setattr(queue, "LOOK", 2)
    ended, samples = evaluate(loaded, tmp_path / "ended", "sums", directory, **how)
    assert answers(samples) == {i: [[stops.cut(text)[0]]] for i, [[text]] in answers(expected).items()}
    reasons = [sample["decoding"][0]["finish_reason"] for sample in samples]
    assert reasons.count("stop") == sum(stops.cut(text)[1] for [[text]] in answers(expected).values()) > 0
    assert ended["decoding"]["forwards"] <= whole["decoding"]["forwards"]
    assert ended["decoding"]["truncated_share"] == reasons.count("length") / 20
    for sample in samples:
        if sample["decoding"][0]["finish_reason"] == "stop":  # what follows the stop string is no part of the answer
            assert sample["decoding"][0]["tokens"] <= len(sample["resps"][0][0].encode())  # a byte each at least


def test_choices_and_texts_are_scored_by_the_exact_likelihood(loaded, tasks, tmp_path, capsys):
    model, tokenizer = loaded
    _, samples = evaluate(loaded, tmp_path / "choices", "choices", tasks(CHOICES), limit=5, scoring={"slot_size": 4})
    assert "Tokenizing" not in capsys.readouterr().err  # a progress bar of lm_eval
    for sample in samples:
        prompt = tokenizer.encode_prompts([sample["doc"]["question"]])[0]
        for (context, choice), ((nats, _),) in zip(sample["arguments"], sample["resps"], strict=True):
            whole = tokenizer.encode_prompts([context + choice])[0]
            assert abs(float(nats) - log_likelihood(model, [prompt], [whole[len(prompt) :]], slot_size=4)[0]) < 1e-3
    results, samples = evaluate(loaded, tmp_path / "texts", "texts", tasks(TEXTS), limit=5)
    ids = [tokenizer.encode([sample["doc"]["question"]])[0] for sample in samples]
    total = sum(log_likelihood(model, [[model.config.bos_token_id]] * len(ids), ids))
    size = sum(len(sample["doc"]["question"].encode()) for sample in samples)
    assert results["results"]["texts"]["bits_per_byte,none"] == pytest.approx(-total / size / np.log(2), rel=1e-4)


def test_bad_input_is_named(loaded, trained_run, tasks, tmp_path, monkeypatch):
    directory = tasks(GENERATE)
    # Without the thousands of lm_eval's own, which take seconds:
    monkeypatch.setattr(benchmark, "TaskManager", functools.partial(benchmark.TaskManager, include_defaults=False))
    problem = {"prompt": "def f():\n", "test": "def check(f): pass", "entry_point": "f"}
    (tmp_path / "humaneval.jsonl").write_text(json.dumps(problem))
    for plan, message in (
        (benchmark.Plan(["humaneval"], task_data=tmp_path), "--tasks=humaneval runs code .* --allow_code_execution"),
        (benchmark.Plan(["sumz"], include_path=directory), "--tasks=sumz: no such task; did you mean .*sums"),
        (benchmark.Plan(["gpqa"]), "--tasks=gpqa: it cannot be loaded: .* put it into DIR/gpqa.jsonl"),
        (benchmark.Plan(["sums"], directory, tmp_path), "--task_data=.*: no task reads .*; they read sums.jsonl"),
        (benchmark.Plan(["humaneval"], task_data=tmp_path, num_fewshot=2), "--num_fewshot=2: humaneval is a task with"),
    ):
        with pytest.raises(UserError, match=message):
            benchmark.load_tasks(plan)
    lm = EvaluatedModel(*loaded, name="tiny", method="refusion", flags={})
    for old, new, message in (
        ('"{{{{question}}}}"', "3", "--tasks=sums: it cannot be run: AssertionError: Context is not a string"),
        ('["\\n\\n"]', "[3]", r"--tasks=sums: until=\[3\] must be texts"),
        ("{{{{question}}}}", "{{{{ nobody }}}}", "--tasks=sums: it cannot be loaded: .* 'nobody' is undefined"),
        ("'####'", "'####' if question != 'Sort 5 5 3 5.' else nobody", "--tasks=sums: it cannot be run"),
        ("repeats: {repeats}", "repeats: 0", "--tasks=sums: it cannot be run"),
        ("exact_match", "nope", "--tasks=sums: there is no metric nope"),
        ("task: sums", "task: 3", "--include_path=.*/tasks: cannot be searched for tasks: TypeError"),
    ):
        assert old in GENERATE
        plan = benchmark.Plan(["sums"], include_path=tasks(GENERATE.replace(old, new)))
        with pytest.raises(UserError, match=message):
            benchmark.check_requests(lm, plan, benchmark.load_tasks(plan))
    directory = tasks(GENERATE)
    with pytest.raises(UserError, match="--decode.max_new_tokens=60: the model reads 64 tokens"):
        evaluate(loaded, tmp_path / "long", "sums", directory, max_new_tokens=60)
    with pytest.raises(UserError, match="a continuation of 70 tokens cannot be scored: the model reads 64"):
        lm._loglikelihood_tokens([(("", ""), [1], [5] * 70)])
    left_to_right = EvaluatedModel(*loaded, name="tiny", method="ar", flags={})  # windows as of lm_eval's own models
    assert left_to_right._loglikelihood_tokens([(("", ""), [1], [5] * 64)])
    with pytest.raises(UserError, match="a continuation of 65 tokens cannot be scored: the model reads 64"):
        left_to_right._loglikelihood_tokens([(("", ""), [1], [5] * 65)])
    flags = [f"--checkpoint={trained_run}", f"--include_path={directory}", f"--output={tmp_path}/out"]
    _, err = run("evaluate", *flags, "--tasks=sums", "--chat", code=2)
    assert re.fullmatch("error: --chat: the tokenizer of .* has no chat template.*\n", err), err
    assert not (tmp_path / "out").exists()


def saved_meanwhile(part: str, call: str) -> str:
    """A program that runs a command, and before one of its calls the run saves another step."""
    return f"""
import pathlib, shutil, sys
from refusion_jax import {part} as part
from refusion_jax.cli import command

def saving(*how, call=part.{call}):
    steps = pathlib.Path(sys.argv[1].partition("=")[2], "checkpoints")
    shutil.copytree(steps / "60", steps / "70")
    return call(*how)

part.{call} = saving
command.run(part.main)
"""


@pytest.mark.thorough
def test_answers_that_a_prefill_writes_take_no_forwards(tmp_path, trained_run, tasks):
    workdir = shutil.copytree(trained_run, tmp_path / "dense")
    config = json.loads((workdir / "config.json").read_text())
    (workdir / "config.json").write_text(json.dumps(config | {"objective": "dense"}))
    directory = tasks(GENERATE.replace("max_gen_toks: 20", "max_gen_toks: 1"))
    flags = [f"--checkpoint={workdir}", f"--include_path={directory}", "--tasks=sums", f"--output={tmp_path}/out"]
    out, _ = run("evaluate", *flags, "--limit=2")
    assert re.search(r"\n2 samples, 0 of them decoded before; [\d,]+ tokens/s, no forwards, 1 tokens each, ", out), out


@pytest.mark.thorough
def test_results_and_model_cards_name_the_step_that_was_read_while_the_run_goes_on(tmp_path, trained_run, tasks):
    workdir = shutil.copytree(trained_run, tmp_path / "run")
    flags = [f"--checkpoint={workdir}", f"--include_path={tasks(GENERATE)}", f"--output={tmp_path}/out"]
    run("-c", saved_meanwhile("evaluate", "load_for"), *flags, "--tasks=sums", "--limit=1")
    results = json.loads((tmp_path / "out/results.json").read_text())
    assert results["config"]["checkpoint"] == f"{workdir}/checkpoints/60"
    shutil.rmtree(workdir / "checkpoints" / "70")
    flags = [f"--from={workdir}", f"--to={tmp_path}/export", "--format=huggingface"]
    run("-c", saved_meanwhile("convert", "contents.read_dtype"), *flags)
    assert ": 60 of " in (tmp_path / "export" / "README.md").read_text()


GROUP = """
group: both
task: [sums, others]
aggregate_metric_list: [{metric: exact_match, filter_list: last, weight_by_size: true}]
"""


@pytest.mark.parametrize("names", [["both"], ["some"], ["sums", "others"]], ids=["group", "tag", "tasks"])
def test_members_of_a_group_take_their_own_data(tasks, tmp_path, names):
    directory = tasks(GENERATE.replace("task: sums", "task: sums\ntag: some"), data="/none/here.jsonl")
    text = (directory / "task.yaml").read_text()
    (directory / "others.yaml").write_text(text.replace("task: sums", "task: others"))
    (directory / "group.yaml").write_text(GROUP)
    (tmp_path / "local").mkdir()
    plan = benchmark.Plan(names, include_path=directory, task_data=tmp_path / "local")
    with pytest.raises(UserError, match=f"--tasks={names[0]}: it cannot be loaded: .* DIR/(TASK|sums).jsonl"):
        benchmark.load_tasks(plan)
    for name in ("sums", "others"):
        (tmp_path / "local" / f"{name}.jsonl").write_text(json.dumps({"question": name, "answer": "#### 1"}))
    loaded = {task.config.task: list(task.test_docs()) for task in benchmark.members(benchmark.load_tasks(plan))}
    assert loaded == {name: [{"question": name, "answer": "#### 1"}] for name in ("sums", "others")}


def test_the_score_of_a_group_is_in_the_results(loaded, tasks, tmp_path):
    """Of "others" half as many problems are asked, so that it counts half as much."""
    directory = tasks(GENERATE)
    text = (directory / "task.yaml").read_text().replace("data.jsonl", "few.jsonl")
    (directory / "others.yaml").write_text(text.replace("task: sums", "task: others"))
    (directory / "group.yaml").write_text(GROUP)
    (tmp_path / "few.jsonl").write_text("".join((tmp_path / "data.jsonl").read_text().splitlines(keepends=True)[20:]))
    lm = EvaluatedModel(*loaded, name="tiny", method="refusion", flags={"batch_size": 8})
    for names in (["both"], ["others", "both"]):
        plan = benchmark.Plan(names, include_path=directory)
        found = benchmark.run_tasks(lm, plan, benchmark.load_tasks(plan))
        scores = {name: values["exact_match,last"] for name, values in found["results"].items()}
        assert scores["both"] == pytest.approx((2 * scores["sums"] + scores["others"]) / 3)
        assert found["groups"]["both"]["exact_match,last"] == scores["both"]
        assert set(found["samples"]) == set(found["decoding"]["tasks"]) == {"sums", "others"}


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGKILL, 137), (signal.SIGTERM, 143)])
def test_two_hosts_of_which_one_is_killed_answer_as_one(loaded, trained_run, tasks, tmp_path, number, code):
    directory = tasks(GENERATE)
    flags = [f"--checkpoint={trained_run}", f"--include_path={directory}", "--tasks=sums", f"--output={tmp_path}/two"]
    flags += ["--decode.batch_size=1"]
    process = start_hosts(2, *flags, devices=1, COMMAND="evaluate")
    wait_until(lambda: len(kept_by(1, tmp_path / "two")) > 1, process)
    os.kill(workers(process)[1], number)
    out, err = ended(process)
    assert process.returncode == code, out + err
    kept = [kept_by(host, tmp_path / "two") for host in range(2)]
    assert 2 <= len(kept[1]) < 20, "too late to show anything"
    assert not (tmp_path / "two" / "results.json").exists()
    evaluate_on_two(*flags)
    one, expected = evaluate(loaded, tmp_path / "one", "sums", directory, batch_size=1)
    two = json.loads((tmp_path / "two" / "results.json").read_text())
    assert two["decoding"]["resumed"] == len(kept[0]) + len(kept[1])
    assert all(kept_by(host, tmp_path / "two")[: len(kept[host])] == kept[host] for host in range(2))
    samples = list(map(json.loads, (tmp_path / "two" / "samples_sums.jsonl").read_text().splitlines()))
    assert answers(samples) == answers(expected)
    assert two["results"] == one["results"]
    # The same tokens, if in other forwards: the rows of each host have speculative tokens of their own.
    assert two["decoding"]["mean_tokens"] == one["decoding"]["mean_tokens"]
    assert len({record["host"] for sample in samples for record in sample["decoding"]}) == 2


TASK = """
task: words
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}/test.jsonl, train: {data}/train.jsonl}}}}
test_split: test
fewshot_split: train
fewshot_config: {{sampler: first_n}}
output_type: generate_until
doc_to_text: "Q: {{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{max_gen_toks: 8, until: ["\\n"]}}
metric_list:
  - {{metric: exact_match, aggregation: mean, higher_is_better: true}}
"""


@pytest.fixture
def checkpoint(tmp_path) -> Path:
    """A tiny model with a chat template."""
    path = tmp_path / "model"
    tiny_qwen3(path)
    return path


@pytest.fixture
def directory(tmp_path, tasks) -> Path:
    """A task of ours with worked examples."""
    lines = [{"question": f"What is {i}?", "answer": f"It is {i}."} for i in range(10)]
    write_lines(tmp_path / "train.jsonl", lines[:5])
    write_lines(tmp_path / "test.jsonl", lines[5:])
    return tasks(TASK, data=tmp_path)


@pytest.mark.parametrize("of_tokenizer", [None, "<|im_start|>"])
def test_a_prompt_begins_as_in_training_whatever_bos_the_models_config_names(checkpoint, of_tokenizer):
    """A context of no tokens is the only place for that of the config, where the tokenizer has none."""
    write_tokenizer(checkpoint, bos_token=of_tokenizer, chat_template=None)
    tokenizer = load_tokenizer(checkpoint)
    lm = EvaluatedModel(load_model(checkpoint), tokenizer, name="tiny", method="refusion", flags={})
    assert lm.model.config.bos_token_id >= 0
    assert lm.tok_encode("Add 1 and 2.") == tokenizer.encode_prompts(["Add 1 and 2."])[0]
    assert lm.tok_encode("Add 1.", add_special_tokens=False) == tokenizer.encode(["Add 1."])[0]
    expected = tokenizer.bos_id if of_tokenizer else lm.model.config.bos_token_id
    assert lm.prefix_token_id == expected


PLAIN = "Q: What is 0? It is 0.\n\nQ: What is 1? It is 1.\n\nQ: What is 5?"
TURNS = "".join(
    f"<|im_start|>user\nQ: What is {i}?<|im_end|>\n<|im_start|>assistant\nIt is {i}.<|im_end|>\n" for i in (0, 1)
)
CHAT = TURNS + "<|im_start|>user\nQ: What is 5?<|im_end|>\n<|im_start|>assistant\n"
NO_THINKING = "<think>\n\n</think>\n\n"


@pytest.mark.parametrize(
    ("how", "examples", "prompt"),
    [
        ({}, 2, PLAIN),
        ({"chat": True, "thinking": False}, 2, CHAT + NO_THINKING),
        ({"chat": True, "thinking": True}, 2, CHAT),
        ({"chat": True, "thinking": True}, 0, CHAT.removeprefix(TURNS)),
    ],
    ids=["text", "turns", "thinking", "no examples"],
)
def test_a_task_is_asked_with_examples_as_text_or_as_turns(checkpoint, directory, how, examples, prompt):
    tokenizer = load_tokenizer(checkpoint)
    lm = EvaluatedModel(load_model(checkpoint), tokenizer, name="tiny", method="refusion", flags={}, **how)
    plan = benchmark.Plan(["words"], include_path=directory, num_fewshot=examples, limit=1)
    (task,) = benchmark.load_tasks(plan)
    benchmark.check_requests(lm, plan, [task])
    (instance,) = task.instances
    assert instance.args[0] == prompt
    (sample,) = lm.samples(task.instances)
    begin = tokenizer.encode_chat(["<|im_start|>"])[0]
    assert (list(sample.request.prompt[:1]) == begin) == bool(how)  # the mark, not the letters that spell it


@pytest.mark.thorough
def test_the_command_asks_in_turns_with_examples_and_thinking(checkpoint, directory, tmp_path):
    flags = [f"--checkpoint={checkpoint}", "--tasks=words", f"--include_path={directory}", f"--output={tmp_path}/out"]
    run("evaluate", *flags, "--num_fewshot=2", "--thinking", "--limit=3")
    samples = list(map(json.loads, (tmp_path / "out" / "samples_words.jsonl").read_text().splitlines()))
    assert samples[0]["arguments"][0][0] == CHAT
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert results["n-shot"] == {"words": 2}
    assert results["decoding"]["samples"] == 3
    assert results["settings"]["words"]["thinking"] is results["settings"]["words"]["chat"] is True
