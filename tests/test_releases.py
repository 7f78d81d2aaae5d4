"""What the authors of other systems released: directories of their layout, and what their own code computes of them.

releases.json holds what record_releases.py recorded.
"""

import json

import numpy as np
import pytest
from conftest import causal, forward
from etils import epath
from record_releases import CAUSAL, EOS, FILE, MASK, ORDINARY, RECIPES, weights_of
from safetensors.numpy import save_file

from refusion_jax import UserError, decode, load_model
from refusion_jax.batch.visibility import BIDIRECTIONAL, Visibility
from refusion_jax.checkpoints.load import choose_method, find_objective, read_model_config
from refusion_jax.systems.registry import find_decoder

RECORDS = json.loads(FILE.read_text())
# How load_model understands each: its system, family, whether masks are read one token earlier, its block size.
UNDERSTOOD = {
    "llada": ("llada", "llama", False, 0),
    "dream": ("dream", "qwen2", True, 0),
    "block_diffusion": ("block_diffusion", "qwen2", False, 8),
    "sdar": ("sdar", "qwen3", False, 4),
    "idlm": ("idlm", "qwen3", False, 3),
    "wedlm": ("wedlm", "qwen3", False, 0),
    "wedlm 2.5": ("wedlm", "qwen2", False, 0),
}


def released(path, name: str, **changes):
    """The directory of a release; a change to "gone" takes a field of its config.json away."""
    path.mkdir()
    config = RECIPES[name]["config"] | changes
    (path / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v != "gone"}))
    save_file(weights_of(RECORDS[name]["tensors"]), path / "model.safetensors")
    return epath.Path(path)


@pytest.mark.parametrize("name", RECIPES)
def test_a_release_is_understood_and_computes_what_its_authors_code_does(name, tmp_path):
    path = released(tmp_path / "theirs", name, **({"mask_token_id": MASK} if name == "block_diffusion" else {}))
    model = load_model(path)
    c = model.config
    assert (find_objective(path), c.family, c.shifted, c.block_size) == UNDERSTOOD[name]
    assert (c.mask_token_id, c.eos_token_id, choose_method(path, None)) == (MASK, EOS, UNDERSTOOD[name][0])

    record = RECORDS[name]
    tokens, expected = np.array(record["tokens"]), np.array(record["logits"])
    segments = np.ones(tokens.shape, np.int32)
    visibility = causal(segments) if name in CAUSAL else Visibility.of(BIDIRECTIONAL, segments)
    logits = forward(model, tokens, np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape), visibility)
    np.testing.assert_allclose(logits[:, ::5], expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())


@pytest.mark.parametrize("name", [name for name in RECIPES if RECIPES[name]["settings"]])
def test_a_release_is_decoded_token_by_token_as_by_its_authors_code(name, tmp_path):
    """Through the last whole block: theirs decode a block to its end, and ours through max_new_tokens.

    Left out are answers with tokens that we never choose or stop at, and prompts of just one block of Fast-dLLM v2,
    which their code does not feed.
    """
    path = released(tmp_path / "theirs", name, **({"mask_token_id": MASK} if name == "block_diffusion" else {}))
    model, method, compared = load_model(path), UNDERSTOOD[name][0], 0
    block = max(1, model.config.block_size)
    for s in RECIPES[name]["settings"]:
        settings = find_decoder(method).settings(**{"method": method, "max_new_tokens": 16} | s)
        cases = [case for case in RECORDS[name]["cases"] if case["settings"] == s]
        out = decode(model, [case["prompt"] for case in cases], settings)
        for tokens, case in zip(out.tokens, cases, strict=True):
            start = len(case["prompt"])
            count = (start + 16) // block * block - start
            if max(case["answer"][:16]) < ORDINARY and not (name == "block_diffusion" and start == block):
                compared += 1
                assert tokens[:count] == case["answer"][:count]
    assert compared >= 8


def test_what_a_config_json_leaves_open_is_what_the_authors_code_assumes(tmp_path):
    fast = {"vocab_size": 160_000, "bd_size": "gone", "mask_token_id": "gone"}
    for name, changes, mask, block in [
        ("block_diffusion", fast, 151665, 32),
        ("dream", {"vocab_size": 160_000, "mask_token_id": "gone"}, 151666, 0),
        ("wedlm", {"vocab_size": 160_000, "mask_token_id": "gone"}, 151665, 0),
        ("sdar", {"block_size": "gone"}, MASK, 4),
    ]:
        path = released(tmp_path / name, name, **changes)
        config = read_model_config(path)
        assert (config.mask_token_id, config.block_size) == (mask, block)


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("llada", {"block_type": "sequential"}, 'block_type="sequential" is not supported'),
        ("llada", {"include_qkv_bias": True}, "include_qkv_bias=true is not supported"),
        ("dream", {"use_mrope": True}, "use_mrope=true is not supported"),
        ("sdar", {"num_experts": 128}, "num_experts=128 is not understood"),
        ("wedlm", {"qk_norm": False}, "attention_bias=false is not supported"),
        ("sdar", {"model_type": "sdar_vl"}, 'model_type="sdar_vl" is not supported; of Hugging Face models we'),
    ],
)
def test_a_field_that_is_not_understood_is_refused_by_name(name, change, said, tmp_path):
    with pytest.raises(UserError, match=said):
        load_model(released(tmp_path / "theirs", name, **change))
