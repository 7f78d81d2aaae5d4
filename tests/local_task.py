"""A task of lm_eval on small data of our own, for the tests."""

import json
from collections.abc import Callable
from pathlib import Path

import datasets

from refusion_jax.evaluation import benchmark
from refusion_jax.evaluation.harness import EvaluatedModel
from refusion_jax.evaluation.hosts import open_journal

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

CHOICES = """
task: choices
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: ["3 9", "9", "1 2 3"]
doc_to_target: 0
target_delimiter: ""
metric_list: [{{metric: acc}}]
"""

TEXTS = """
task: texts
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{question}}}}"
metric_list: [{{metric: bits_per_byte, aggregation: bits_per_byte}}]
"""

QUESTIONS = [{"question": f"Sort {i} {i % 7} 3 {i * i % 10}.", "answer": f"so #### {i % 10}"} for i in range(40)]


def task_writer(directory: Path, monkeypatch) -> Callable[..., Path]:
    """A function that writes a task file and gives the directory it is in; all of it is under `directory`."""
    monkeypatch.setenv("HF_HOME", str(directory / "huggingface"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(directory / "huggingface" / "datasets"))
    (directory / "data.jsonl").write_text("\n".join(map(json.dumps, QUESTIONS)))

    def write(text: str, data=directory / "data.jsonl", sampled: str = "false", repeats: int = 1) -> Path:
        folder = directory / "tasks"
        folder.mkdir(exist_ok=True)
        (folder / "task.yaml").write_text(text.format(data=data, sampled=sampled, repeats=repeats))
        return folder

    return write


def evaluate(
    loaded, output: Path, name: str, tasks: Path, limit: int | None = None, scoring=None, **options
) -> tuple[dict, list]:
    """(results, samples) of a task, with a journal in `output`."""
    journal = open_journal(output)
    plan = benchmark.Plan([name], include_path=tasks, limit=limit)
    flags = {"batch_size": 8} | options
    lm = EvaluatedModel(*loaded, journal=journal, name="tiny", method="refusion", flags=flags, scoring=scoring)
    try:
        results = benchmark.run_tasks(lm, plan, benchmark.load_tasks(plan))
    finally:
        journal.close()
    return results, results.pop("samples")[name]


def answers(samples: list[dict]) -> dict:
    return {sample["doc_id"]: sample["resps"] for sample in samples}
