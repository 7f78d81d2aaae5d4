"""What the authors of other systems released: directories of their layout, and what their own code computes of them.

released_models.py says how releases.json was recorded.
"""

import functools
import json

import numpy as np
import pytest
from conftest import all_but, causal, forward
from etils import epath
from released_models import CAUSAL, EOS, FILE, MASK, ORDINARY, RECIPES, weights_of
from safetensors.numpy import save_file
from test_huggingface import tensors

from refusion_jax import UserError, decode, load_model
from refusion_jax.batch.visibility import BIDIRECTIONAL, Visibility
from refusion_jax.checkpoints.load import choose_method, find_objective, read_model_config
from refusion_jax.model import huggingface
from refusion_jax.systems.registry import find_decoder

RECORDS = json.loads(FILE.read_text())
# How load_model understands each: its system, family, whether masks are read one token earlier, its block size.
UNDERSTOOD = {
    "llada": ("llada", "llama", False, 0),
    "dream": ("dream", "qwen2", True, 0),
    "block_diffusion": ("block_diffusion", "qwen2", False, 8),
    "sdar": ("sdar", "qwen3", False, 4),
    "sdar moe": ("sdar", "qwen3_moe", False, 4),
    "llada2": ("llada2", "llada2_moe", False, 32),
    "llada2.1": ("llada2", "llada2_moe", False, 32),
    "idlm": ("idlm", "qwen3", False, 3),
    "wedlm": ("wedlm", "qwen3", False, 0),
    "wedlm 2.5": ("wedlm", "qwen2", False, 0),
}


def released(path, name: str, **changes):
    """The directory of a release, nothing left open; a change to "gone" takes a field of config.json away."""
    path.mkdir()
    config = RECIPES[name]["config"] | RECIPES[name].get("open", {}) | changes
    (path / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v != "gone"}))
    save_file(weights_of(RECORDS[name]["tensors"]), path / "model.safetensors")
    return epath.Path(path)


@pytest.fixture(scope="module")
def load(tmp_path_factory):
    """A function of the name of a release: (its directory, its model)."""

    @functools.cache
    def loaded(name: str):
        path = released(tmp_path_factory.mktemp("release") / "theirs", name)
        return path, load_model(path)

    return loaded


@pytest.mark.parametrize("name", RECIPES)
def test_a_release_is_understood_and_computes_what_its_authors_code_does(name, load):
    path, model = load(name)
    c = model.config
    assert (find_objective(path), c.family, c.shifted, c.block_size) == UNDERSTOOD[name]
    assert (c.mask_token_id, c.eos_token_id, choose_method(path, None)) == (MASK, EOS, UNDERSTOOD[name][0])

    record = RECORDS[name]
    tokens, expected = np.array(record["tokens"]), np.array(record["logits"])
    segments = np.ones(tokens.shape, np.int32)
    visibility = causal(segments) if name in CAUSAL else Visibility.of(BIDIRECTIONAL, segments)
    logits = forward(model, tokens, np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape), visibility)
    np.testing.assert_allclose(logits[:, ::5], expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())


@pytest.mark.parametrize("name", all_but(["dream"], [n for n in RECIPES if RECIPES[n]["settings"]]))
def test_a_release_is_decoded_token_by_token_as_by_its_authors_code(name, load):
    """Through the last whole block: theirs decode a block to its end, and ours through max_new_tokens.

    Left out are answers with tokens that we never choose or stop at, and prompts of just one block of Fast-dLLM v2,
    which their code does not take as input.
    """
    (_, model), method, compared = load(name), RECIPES[name].get("method", UNDERSTOOD[name][0]), 0
    for s in RECIPES[name]["settings"]:
        block = s.get("block_size", max(1, model.config.block_size))
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
    open_ = dict.fromkeys(("mask_token_id", "block_size", "bd_size"), "gone")
    for name, changes, mask, block, eos in [
        ("block_diffusion", {}, 151665, 32, EOS),
        ("dream", {}, 151666, 0, EOS),
        ("wedlm", {"mask_token_id": None}, 151665, 0, EOS),
        ("sdar", {}, 151669, 4, EOS),
        ("sdar moe", {}, 151669, 4, EOS),
        ("llada2", {"eos_token_id": "gone"}, 156895, 32, 156892),
    ]:
        config = read_model_config(released(tmp_path / name, name, vocab_size=160_000, **open_ | changes))
        assert (config.mask_token_id, config.block_size, config.eos_token_id) == (mask, block, eos)


@pytest.mark.thorough
def test_a_mixture_comes_back_to_the_bit_and_is_known_again(tmp_path):
    """Its query, key and value are one tensor, its first layer has no experts, and its model_type is its family's."""
    path = released(tmp_path / "theirs", "llada2")
    huggingface.save(load_model(path), tmp_path / "ours", "llada2")
    before, after = tensors(path), tensors(tmp_path / "ours")
    assert before.keys() == after.keys()
    assert all(np.array_equal(tensor, after[name]) for name, tensor in before.items())
    assert find_objective(epath.Path(tmp_path / "ours")) == "llada2"
    assert read_model_config(epath.Path(tmp_path / "ours")) == read_model_config(path)
    huggingface.save(load_model(path), tmp_path / "adapted", "refusion")
    assert find_objective(epath.Path(tmp_path / "adapted")) == "refusion"
    for parts, tensor, said in [
        (tmp_path / "more", "model.layers.0.mlp.gate.expert_bias", " has no place in the model"),
        (tmp_path / "other", "model.layers.1.attention.query_key_value.bias", " has no place in the model"),
    ]:
        released(parts, "llada2")
        save_file(before | {tensor: np.ones(12, "f")}, parts / "model.safetensors")
        with pytest.raises(UserError, match=tensor + said):
            load_model(parts)
    save_file({k: v for k, v in before.items() if ".1.attention.query_key_value" not in k}, path / "model.safetensors")
    with pytest.raises(UserError, match=r"holds no tensor model.layers.1.attention.query_key_value.weight"):
        load_model(path)


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("llada", {"block_type": "sequential"}, 'block_type="sequential" is not supported'),
        ("llada", {"include_qkv_bias": True}, "include_qkv_bias=true is not supported"),
        ("dream", {"use_mrope": True}, "use_mrope=true is not supported"),
        ("sdar", {"num_experts": 128}, "num_experts=128 is not understood"),
        ("wedlm", {"qk_norm": False}, "attention_bias=false is not supported"),
        ("sdar", {"model_type": "sdar_vl"}, 'model_type="sdar_vl" is not supported; of Hugging Face models we'),
        ("sdar moe", {"decoder_sparse_step": 2}, "decoder_sparse_step=2 is not supported"),
        ("llada2", {"rotary_dim": 8}, "rotary_dim=8, but partial_rotary_factor makes it 4"),
        ("llada2", {"score_function": "softmax"}, 'score_function="softmax" is not supported'),
        ("llada2", {"moe_shared_expert_intermediate_size": 48}, "moe_shared_expert_intermediate_size=48 is not under"),
        ("llada2", {"n_group": 5}, "n_group=5 must split num_experts=12 evenly, into two or more each"),
        ("llada2", {"topk_group": 1, "num_experts_per_tok": 5}, "topk_group=1 of them must have num_experts_per_tok=5"),
        ("llada2", {"first_k_dense_replace": 3}, "first_k_dense_replace=3 must be 0 to 2"),
        ("llada2", {"partial_rotary_factor": 0.4}, "partial_rotary_factor=0.4 must give an even part of head_dim=8"),
        ("llada2", {"partial_rotary_factor": 1.5}, "partial_rotary_factor=1.5 must"),
    ],
)
def test_a_field_that_is_not_understood_is_refused_by_name(name, change, said, tmp_path):
    with pytest.raises(UserError, match=said):
        load_model(released(tmp_path / "theirs", name, **change))
