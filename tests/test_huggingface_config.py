"""What config.json says of a model: read, or refused where it would be another computation."""

import json
import types

import pytest
from conftest import tiny_config
from etils import epath
from helpers import write_tokenizer
from test_huggingface import LLAMA3

from refusion_jax import UserError
from refusion_jax.data.fast_tokenizer import load_tokenizer_file
from refusion_jax.data.tokenizer import SentencePieceTokenizer
from refusion_jax.model import huggingface_config

SCALED = {"rope_type": "linear", "factor": 4.0}
CONTRADICTIONS = [  # what config.json says of a family (...: nothing), and what is said of that
    ("llama", {"is_causal": False}, "is_causal=false is not supported"),
    ("llama", {"sliding_window": 4}, "sliding_window=4 is not supported"),
    ("llama", {"query_pre_attn_scalar": 3}, "query_pre_attn_scalar=3 is not supported"),
    ("llama", {"rope_local_base_freq": 9.0, "layer_types": ["full_attention"] * 2}, "rope_local_base_freq=9.0 is not"),
    ("llama", {"num_key_value_heads": 0}, "num_key_value_heads: Input should be greater than 0"),
    ("llama", {"head_dim": 0}, "head_dim: Input should be greater than 0"),
    ("llama", {"rotary_dim": 4}, "rotary_dim=4, but partial_rotary_factor makes it 8"),
    ("llama", {"layer_types": ["full_attention"]}, "we read num_hidden_layers=2 times full_attention"),
    ("qwen3", {"layer_types": ["sliding_attention", "full_attention"]}, "layer_types=.* times full_attention$"),
    ("qwen3", {"rope_scaling": {"factor": 4.0}}, 'rope_scaling={"factor": 4.0} is not supported'),
    ("qwen3", {"rope_scaling": SCALED | {"type": "default"}}, "rope_scaling=.* is not supported"),
    ("qwen3", {"rope_scaling": SCALED | {"rope_type": ["linear"]}}, "rope_scaling=.* is not supported"),
    ("qwen3", {"rope_scaling": SCALED, "rope_parameters": {"rope_theta": 9.0}}, "rope_scaling and rope_parameters say"),
    ("qwen3", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor.* is not supported"),
    ("qwen3", {"rope_scaling": LLAMA3 | {"low_freq_factor": 8.0, "original_max_position_embeddings": 32}}, "less than"),
    ("qwen3_moe", {"num_experts": 4, "num_local_experts": 2}, "num_local_experts=2 and num_experts=4 contradict"),
    ("mistral", {"sliding_window": ...}, "sliding_window=4096 is not supported"),
    ("gemma3_text", {"layer_types": ["full_attention"] * 3}, "we read num_hidden_layers=2 times full_attention, or"),
    ("gemma3_text", {"sliding_window": None}, "sliding_window is missing"),
    ("gemma3_text", {"rope_local_base_freq": None}, "local_rope.0: Input should be a valid number"),
    (
        "gemma3_text",
        {"rope_parameters": {"rope_theta": 9.0}},
        "must be those of full_attention and of sliding_attention",
    ),
    (
        "gemma3_text",
        {"rope_parameters": {"full_attention": {"rope_theta": 9.0}, "sliding_attention": SCALED}},
        "rope_parameters scale those of sliding_attention",
    ),
    ("smollm3", {"attention_bias": True}, "attention_bias=true is not supported"),
    ("smollm3", {"use_sliding_window": True, "sliding_window": 64}, "use_sliding_window=true is not supported"),
    ("smollm3", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types=.* times full_attention$"),
    ("smollm3", {"no_rope_layers": [0, 1]}, r"no_rope_layers=\[0, 1\] is not .* num_hidden_layers=2 times 1, or 0"),
    ("smollm3", {"no_rope_layers": [1]}, r"no_rope_layers=\[1\] is not supported"),
    ("smollm3", {"no_rope_layer_interval": 0}, "no_rope_layer_interval=0 must be 1 to 32768 for family=smollm3"),
    ("llama", {"no_rope_layers": [1, 0]}, r"no_rope_layers=\[1, 0\] is not supported"),
]

NEEDED = {
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8},
    "smollm3": {"no_rope_layer_interval": 4},
}


@pytest.mark.parametrize(("family", "changes", "said"), CONTRADICTIONS)
def test_what_would_be_another_computation_is_refused(family, changes, said, tmp_path):
    """What transformers computes otherwise, or refuses."""
    described = huggingface_config.describe(tiny_config(family=family, **NEEDED.get(family, {})), "float32")
    (tmp_path / "config.json").write_text(json.dumps(described))
    huggingface_config.read_model_config(epath.Path(tmp_path))
    described = {key: value for key, value in (described | changes).items() if value is not ...}
    (tmp_path / "config.json").write_text(json.dumps(described))
    with pytest.raises(UserError, match=said):
        huggingface_config.read_model_config(epath.Path(tmp_path))


DEFAULTS = {"num_key_value_heads": 4, "tie_word_embeddings": True, "rope_theta": 2e6, "no_rope_layer_interval": 4}
DEFAULTS |= {"pad_token_id": 128004, "bos_token_id": 128000, "eos_token_id": 128001, "rms_norm_eps": 1e-6}


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ("gemma3_text", {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 1}),
        ("llama", {"rms_norm_eps": 1e-6, "bos_token_id": 1, "eos_token_id": 2}),
        ("mistral", {"bos_token_id": 1, "eos_token_id": 2}),
        ("olmo2", {"rms_norm_eps": 1e-5, "pad_token_id": 1, "eos_token_id": 50279}),
        ("smollm3", DEFAULTS),
    ],
)
def test_what_config_json_leaves_out_is_the_familys_default(family, expected, tmp_path):
    shape = tiny_config(family=family, vocab_size=128_256, num_attention_heads=8, **NEEDED.get(family, {}))
    described = huggingface_config.describe(shape, "float32")
    (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in described.items() if k not in expected}))
    config = huggingface_config.read_model_config(epath.Path(tmp_path))
    assert {key: getattr(config, key) for key in expected} == expected


def test_of_several_tokens_that_end_a_text_an_answer_ends_with_the_templates_or_the_tokenizers(tmp_path):
    pieces = SentencePieceTokenizer.train(["hello world, this is a text. " * 3] * 9, 290)
    described = huggingface_config.describe(tiny_config(vocab_size=320, num_tokens=290, mask_token_id=4), "float32")
    chat = load_tokenizer_file(write_tokenizer(tmp_path, eos_token="<|endoftext|>"), "<mask>")  # Gemma 3's ends no turn
    (turn,) = chat.encode_chat(["<|im_end|>"])[0]
    for tokenizer, ids, expected in (
        (pieces, [9, pieces.eos_id, 8], pieces.eos_id),
        (pieces, [9, 8], 9),
        (chat, [9, chat.eos_id, turn], turn),
        (chat, [9, chat.eos_id], chat.eos_id),
    ):
        (tmp_path / "config.json").write_text(json.dumps(described | {"eos_token_id": ids}))
        assert huggingface_config.read_model_config(epath.Path(tmp_path), tokenizer).eos_token_id == expected


@pytest.mark.parametrize(
    ("changes", "mask", "expected"), [({}, None, 290), ({}, 300, 301), ({"refusion_jax": {}}, None, 320)]
)
def test_without_a_tokenizer_as_many_ids_are_tokens_as_the_export_says_and_all_where_it_does_not(
    changes, mask, expected, tmp_path
):
    described = huggingface_config.describe(tiny_config(vocab_size=320, num_tokens=290, mask_token_id=4), "float32")
    (tmp_path / "config.json").write_text(json.dumps(described | changes))
    assert huggingface_config.read_model_config(epath.Path(tmp_path), None, mask).num_tokens == expected


def test_a_rope_theta_where_transformers_5_keeps_it_is_found(tmp_path):
    described = huggingface_config.describe(tiny_config(), "float32")
    del described["rope_theta"]
    described["rope_parameters"] = {"rope_theta": 5e5, "rope_type": "default"}
    (tmp_path / "config.json").write_text(json.dumps(described))
    assert huggingface_config.read_model_config(epath.Path(tmp_path)).rope_theta == 5e5


def test_llama_3s_length_is_written_as_a_whole_number():
    scaling = huggingface_config.describe(tiny_config(rope_scaling=(8.0, 1.0, 4.0, 32.0)), "float32")["rope_scaling"]
    assert (scaling.pop("rope_type"), str([*scaling.values()])) == ("llama3", "[8.0, 1.0, 4.0, 32]")


def test_a_tokenizer_of_many_more_ids_than_rows_is_another_models(tmp_path):
    described = huggingface_config.describe(tiny_config(), "float32")
    (tmp_path / "config.json").write_text(json.dumps(described))
    own = types.SimpleNamespace(size=32 + 1024, eos_id=2, mask_id=4)
    assert huggingface_config.read_model_config(epath.Path(tmp_path), own).vocab_size == 1152
    own.size += 1
    with pytest.raises(UserError, match="a tokenizer of 1057 ids is not that of 32 rows"):
        huggingface_config.read_model_config(epath.Path(tmp_path), own)
