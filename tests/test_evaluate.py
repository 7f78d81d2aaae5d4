"""Tasks of lm_eval with our decoders: the score is that of the samples, whatever the batch, a kill or the hosts."""

import json
import os
import re
import signal
import time
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # before datasets is imported: nothing is asked of the network

import datasets
import numpy as np
import pytest
from conftest import SHARED, run, start

from refusion_jax import UserError, load_model, load_tokenizer, log_likelihood
from refusion_jax.evaluation import benchmark
from refusion_jax.evaluation.harness import EvaluatedModel
from refusion_jax.evaluation.journal import Journal

GENERATE = """
task: sums
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer.split('####')[-1].strip()}}}}"
generation_kwargs: {{max_gen_toks: 20, until: ["\\n\\n"], do_sample: {sampled}, temperature: 0.7}}
repeats: {repeats}
filter_list:
  - name: last
    filter:
      - {{function: regex, regex_pattern: "([0-9])", group_select: -1}}
      - {{function: take_first}}
metric_list:
  - {{metric: exact_match, aggregation: mean, higher_is_better: true}}
metadata: {{version: 2.5, decode: {{slot_size: 4, token_threshold: 0.3}}}}
"""

CHOOSE = """
task: choices
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: ["one", "two words", "a third"]
doc_to_target: 1
metadata: {{version: 1.0}}
"""

ROLLING = """
task: texts
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{question}}}}"
metric_list:
  - {{metric: bits_per_byte, aggregation: bits_per_byte, higher_is_better: false}}
metadata: {{version: 1.0}}
"""


QUESTIONS = [{"question": f"Sort {i} {i % 7} 3 {i * i % 10}.", "answer": f"so #### {i % 10}"} for i in range(40)]


@pytest.fixture(scope="module")
def loaded(trained_run):
    return load_model(trained_run), load_tokenizer(trained_run)


@pytest.fixture
def tasks(tmp_path, monkeypatch):
    """Writes a task of our own into a directory that it returns."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "huggingface"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "huggingface" / "datasets"))
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, QUESTIONS)))

    def write(text: str, data=tmp_path / "data.jsonl", sampled: str = "false", repeats: int = 1) -> Path:
        directory = tmp_path / "tasks"
        directory.mkdir(exist_ok=True)
        (directory / "task.yaml").write_text(text.format(data=data, sampled=sampled, repeats=repeats))
        return directory

    return write


def evaluate(
    loaded, output: Path, name: str, tasks: Path, limit: int | None = None, scoring=None, **options
) -> tuple[dict, list]:
    """(results, samples) of a task, with a journal in `output`."""
    journal = Journal(output, 0)
    plan = benchmark.Plan([name], include_path=tasks, limit=limit)
    flags = {"batch_size": 8} | options
    lm = EvaluatedModel(*loaded, journal, name="tiny", method="refusion", flags=flags, scoring=scoring)
    try:
        results = benchmark.run_tasks(lm, plan, benchmark.load_tasks(plan))
    finally:
        journal.close()
    return results, results.pop("samples")[name]


def answers(samples: list[dict]) -> dict:
    return {sample["doc_id"]: sample["resps"] for sample in samples}


def test_the_score_is_that_of_the_logged_samples_at_any_batch_size(loaded, tasks, tmp_path):
    directory = tasks(GENERATE)
    results, samples = evaluate(loaded, tmp_path / "first", "sums", directory)
    assert len(samples) == 40
    found = [(re.findall("[0-9]", s["resps"][0][0]) or ["none"])[-1] == s["target"] for s in samples]
    assert results["results"]["sums"]["exact_match,last"] == np.mean(found)
    assert results["versions"]["sums"] == 2.5
    assert results["lm_eval_version"] == "0.4.13"
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


def test_killed_it_goes_on_and_decodes_no_finished_sample_again(loaded, trained_run, tasks, tmp_path):
    directory = tasks(GENERATE)
    flags = [f"--checkpoint={trained_run}", f"--include_path={directory}", "--tasks=sums", f"--output={tmp_path}/out"]
    flags += ["--decode.batch_size=1"]
    process = start("evaluate", *flags)
    journal = tmp_path / "out" / "journal" / "answers.0.jsonl"
    deadline = time.monotonic() + 200
    while not (journal.exists() and journal.read_bytes().count(b"\n") >= 5):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    finished = journal.read_bytes().count(b"\n")
    assert 5 <= finished < 40
    with journal.open("ab") as file:
        file.write(b'{"key": "cut o')
    out, _ = run("evaluate", *flags)
    assert f"40 samples, {finished} of them decoded before" in out
    assert journal.read_bytes().count(b"\n") == 40
    straight, expected = evaluate(loaded, tmp_path / "straight", "sums", directory, batch_size=1)
    resumed = json.loads((tmp_path / "out" / "results.json").read_text())
    assert resumed["decoding"]["resumed"] == finished
    samples = map(json.loads, (tmp_path / "out" / "samples_sums.jsonl").read_text().splitlines())
    assert answers(samples) == answers(expected)
    assert resumed["results"] == straight["results"]
    assert resumed["decoding"]["forwards"] == straight["decoding"]["forwards"]


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


def test_choices_and_texts_are_scored_by_the_exact_likelihood(loaded, tasks, tmp_path):
    model, tokenizer = loaded
    _, samples = evaluate(loaded, tmp_path / "choices", "choices", tasks(CHOOSE), limit=5, scoring={"slot_size": 4})
    for sample in samples:
        prompt = tokenizer.encode_prompts([sample["doc"]["question"]])[0]
        for (context, choice), ((nats, _),) in zip(sample["arguments"], sample["resps"], strict=True):
            whole = tokenizer.encode_prompts([context + choice])[0]
            assert abs(float(nats) - log_likelihood(model, [prompt], [whole[len(prompt) :]], slot_size=4)[0]) < 1e-3
    results, samples = evaluate(loaded, tmp_path / "texts", "texts", tasks(ROLLING), limit=5)
    ids = [tokenizer.encode([sample["doc"]["question"]])[0] for sample in samples]
    total = sum(log_likelihood(model, [[model.config.bos_token_id]] * len(ids), ids))
    size = sum(len(sample["doc"]["question"].encode()) for sample in samples)
    assert results["results"]["texts"]["bits_per_byte,none"] == pytest.approx(-total / size / np.log(2), rel=1e-4)


def test_bad_input_is_named(loaded, trained_run, tasks, tmp_path):
    directory = tasks(GENERATE)
    problem = {"prompt": "def f():\n", "test": "def check(f): pass", "entry_point": "f"}
    (tmp_path / "humaneval.jsonl").write_text(json.dumps(problem))
    for plan, message in (
        (benchmark.Plan(["humaneval"], task_data=tmp_path), "--tasks=humaneval runs code .* --allow_code_execution"),
        (benchmark.Plan(["gpqa"]), "--tasks=gpqa: it cannot be loaded: .* put it into DIR/gpqa.jsonl"),
        (benchmark.Plan(["humaneval"], task_data=tmp_path, num_fewshot=2), "--num_fewshot=2: humaneval is a task with"),
    ):
        with pytest.raises(UserError, match=message):
            benchmark.load_tasks(plan)
    with pytest.raises(UserError, match="--decode.max_new_tokens=60: the model reads 64 tokens"):
        evaluate(loaded, tmp_path / "long", "sums", directory, max_new_tokens=60)
    flags = [f"--checkpoint={trained_run}", f"--include_path={directory}", f"--output={tmp_path}/out"]
    for more, message in (
        (["--tasks=sumz"], "--tasks=sumz: no such task; did you mean .*sums"),
        (["--tasks=sums", "--chat"], "--chat: the tokenizer of .* has no chat template"),
    ):
        _, err = run("evaluate", *flags, *more, code=2)
        assert re.search(message, err), err
        assert len(err.strip().splitlines()) == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.skipif(not (SHARED / "data").exists(), reason=f"no GSM8K in {SHARED}")
def test_six_hundred_questions_of_gsm8k(loaded, tasks, tmp_path):
    directory = tasks(GENERATE, data=SHARED / "data" / "gsm8k_test_dev.jsonl")
    results, samples = evaluate(loaded, tmp_path / "all", "sums", directory, batch_size=64)
    found = [(re.findall("[0-9]", s["resps"][0][0]) or ["none"])[-1] == s["target"] for s in samples]
    assert len(found) == 600
    assert results["results"]["sums"]["exact_match,last"] == np.mean(found)
    _, alone = evaluate(loaded, tmp_path / "alone", "sums", directory, batch_size=1)
    assert answers(alone) == answers(samples)


@pytest.mark.slow
def test_two_hosts_answer_as_one(loaded, trained_run, tasks, tmp_path, monkeypatch):
    directory = tasks(GENERATE)
    flags = [f"--checkpoint={trained_run}", f"--include_path={directory}", "--tasks=sums", f"--output={tmp_path}/two"]
    monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", f"127.0.0.1:{20000 + os.getpid() % 20000}")
    monkeypatch.setenv("JAX_NUM_PROCESSES", "2")
    processes = []
    for index in range(2):
        monkeypatch.setenv("JAX_PROCESS_ID", str(index))
        processes.append(start("evaluate", *flags, "--limit=12"))
    for process in processes:
        out, err = process.communicate(timeout=300)
        assert process.returncode == 0, out + err
    one, expected = evaluate(loaded, tmp_path / "one", "sums", directory, limit=12)
    two = json.loads((tmp_path / "two" / "results.json").read_text())
    samples = list(map(json.loads, (tmp_path / "two" / "samples_sums.jsonl").read_text().splitlines()))
    assert answers(samples) == answers(expected)
    assert two["results"] == one["results"]
    assert two["decoding"]["forwards"] == one["decoding"]["forwards"]
    assert len({record["host"] for sample in samples for record in sample["decoding"]}) == 2
