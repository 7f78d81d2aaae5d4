"""What a model is asked by a task of our own: worked examples, the chat template, thinking on and off."""

import json
from pathlib import Path

import pytest
from conftest import run
from helpers import tiny_qwen3, write_lines, write_tokenizer

from refusion_jax import load_model, load_tokenizer
from refusion_jax.evaluation import benchmark
from refusion_jax.evaluation.harness import EvaluatedModel

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
