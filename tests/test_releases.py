"""What the authors of other systems released, what their code computes of it, and what config.json says of any model.

released_models.py says how releases.json was recorded.
"""

import functools
import itertools
import json

import jax
import numpy as np
import pytest
from conftest import all_but, causal, config_with, forward, run, tiny_config
from etils import epath
from flax import nnx
from helpers import write_lines, write_tokenizer
from released_models import CAUSAL, EOS, FILE, MASK, ORDINARY, RECIPES, weights_of
from safetensors.numpy import save_file
from test_huggingface import LLAMA3, assert_same_tensors, change_config, saved, tensors

from refusion_jax import UserError, decode, load_model
from refusion_jax.batch.visibility import BIDIRECTIONAL, Visibility
from refusion_jax.checkpoints.contents import choose_method, find_objective, find_own_tokenizer, read_model_config
from refusion_jax.config.model import adopt_shape
from refusion_jax.data.fast_tokenizer import load_tokenizer_file
from refusion_jax.data.tokenizer import SentencePieceTokenizer
from refusion_jax.model import huggingface, huggingface_config
from refusion_jax.model.families import FAMILIES
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


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_a_drafter_of_pard_is_known_by_a_key_and_not_mistaken_for_the_model_that_it_was(family, tmp_path):
    """Its config.json is that of its family, with the token that its masks are."""
    described = huggingface_config.describe(tiny_config(family=family), "float32") | {"mask_token_id": None}
    del described["refusion_jax"]
    for keys, mask, system in ({}, -1, "ar"), ({"spd_type": "pard", "pard_token": 29}, 29, "pard"):
        (tmp_path / "config.json").write_text(json.dumps(described | keys))
        assert read_model_config(epath.Path(tmp_path)).mask_token_id == mask
        assert find_objective(epath.Path(tmp_path)) == system


def test_adapters_of_a_release_have_its_names_and_are_decoded_as_is_asked(load, tmp_path):
    """As D2F's of LLaDA and Dream: nothing in them says what they were trained for."""
    base, model = load("llada")
    name = "base_model.model.model.transformer.blocks.{}.{}.lora_{}.weight"
    shapes = {"A": [4, 32], "B": [32, 4]}
    targets = {"q_proj": "q_proj", "o_proj": "attn_out"}
    every = itertools.product(range(2), targets.values(), shapes)
    sides = weights_of({name.format(layer, theirs, side): shapes[side] for layer, theirs, side in every})
    save_file(sides, tmp_path / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "base_model_name_or_path": str(base)}
    config |= {"ensure_weight_tying": True}  # of tied matrices, which no adapter here changes
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    adapted = load_model(tmp_path)
    for layer, (ours, theirs) in itertools.product(range(2), targets.items()):
        a, b = (sides[name.format(layer, theirs, side)] for side in "AB")
        was, is_now = (getattr(m.layers, ours)[layer].reshape(32, 32).T for m in (model, adapted))
        np.testing.assert_allclose(is_now, was + 2 * b @ a, rtol=1e-5, atol=1e-5)
    assert [choose_method(epath.Path(tmp_path), method) for method in (None, "d2f")] == ["llada", "d2f"]
    with pytest.raises(UserError, match="was trained with objective=llada"):
        choose_method(base, "d2f")
    to = f"--to={tmp_path}/merged"
    run("convert", "--format=huggingface", f"--from={tmp_path}", "--objective=d2f", to)
    assert choose_method(tmp_path / "merged", None) == "d2f"
    np.testing.assert_array_equal(*(load_model(path).layers.o_proj[...] for path in (tmp_path, tmp_path / "merged")))
    _, err = run("convert", "--format=orbax", f"--from={base}", "--objective=dd", to, code=2)
    assert "--objective=dd: must be one of " in err


def test_adapters_of_a_run_are_merged_into_it_without_its_model_card(trained_run, tmp_path):
    """As `peft` writes them; the run's card would describe how other weights were trained."""
    c, path = read_model_config(epath.Path(trained_run)), tmp_path / "adapters"
    path.mkdir()
    name = "base_model.model.model.layers.{}.self_attn.q_proj.lora_{}.weight"
    shapes = {"A": [2, c.hidden_size], "B": [c.num_attention_heads * c.head_dim, 2]}
    every = [(name.format(layer, side), shapes[side]) for layer in range(c.num_hidden_layers) for side in shapes]
    save_file({name: np.ones(shape, np.float32) for name, shape in every}, path / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "base_model_name_or_path": str(trained_run)}
    (path / "adapter_config.json").write_text(json.dumps(config))
    run("convert", "--format=huggingface", f"--from={path}", f"--to={tmp_path}/export")
    merged, adapted = (nnx.to_pure_dict(nnx.state(load_model(place))) for place in (tmp_path / "export", path))
    jax.tree.map(np.testing.assert_array_equal, merged, adapted)
    assert not (tmp_path / "export" / "README.md").exists()


@pytest.mark.thorough
def test_a_mixture_comes_back_to_the_bit_and_is_known_again(tmp_path):
    """Its query, key and value are one tensor, its first layer has no experts, and its model_type is its family's."""
    path = released(tmp_path / "theirs", "llada2")
    huggingface.save(load_model(path), tmp_path / "ours", "llada2")
    assert_same_tensors(path, tmp_path / "ours")
    assert find_objective(epath.Path(tmp_path / "ours")) == "llada2"
    assert read_model_config(epath.Path(tmp_path / "ours")) == read_model_config(path)
    huggingface.save(load_model(path), tmp_path / "adapted", "refusion")
    assert find_objective(epath.Path(tmp_path / "adapted")) == "refusion"
    before = tensors(path)
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
        ("llada", {"architectures": ["LLaDAMoEModelLM"]}, r'=\["LLaDAMoEModelLM"\] is not .* read \["LLaDAModelLM"\]'),
        ("dream", {"architectures": ["DreamForCausalLM"]}, r'=\["DreamForCausalLM"\] is not .* read \["DreamModel"\]'),
        ("llada", {"include_qkv_bias": True}, "include_qkv_bias=true is not supported"),
        ("dream", {"use_mrope": True}, "use_mrope=true is not supported"),
        ("sdar", {"num_experts": 128}, "num_experts=128 is not understood"),
        ("wedlm", {"qk_norm": False}, "attention_bias=false is not supported"),
        ("sdar", {"model_type": {"x": 1}}, 'model_type={"x": 1} is not supported; of Hugging Face models we'),
        ("sdar", {"model_type": "sdar_vl"}, 'model_type="sdar_vl" is not supported; of Hugging Face models we'),
        ("sdar moe", {"decoder_sparse_step": 2}, "decoder_sparse_step=2 is not supported"),
        ("llada2", {"rotary_dim": 8}, "rotary_dim=8, but partial_rotary_factor makes it 4"),
        ("llada2", {"score_function": "softmax"}, 'score_function="softmax" is not supported'),
        ("llada2", {"moe_shared_expert_intermediate_size": 48}, "moe_shared_expert_intermediate_size=48 is not under"),
        ("llada2", {"n_group": 5}, "n_group=5 must split num_experts=12 evenly, into two or more each"),
        ("llada2", {"topk_group": 1, "num_experts_per_tok": 5}, "topk_group=1 of them must have num_experts_per_tok=5"),
        ("llada2", {"first_k_dense_replace": 3}, "first_k_dense_replace=3 must be 0 to 2"),
        ("llada2", {"partial_rotary_factor": 0.4}, "partial_rotary_factor=0.4 must give an even part of head_dim=8"),
    ],
)
def test_a_field_that_is_not_understood_is_refused_by_name(name, change, said, tmp_path):
    with pytest.raises(UserError, match=said):
        load_model(released(tmp_path / "theirs", name, **change))


SCALED = {"rope_type": "linear", "factor": 4.0}


def read(path, described, *how):
    """The shape that a config.json of this content describes, next to what else a directory holds."""
    (path / "config.json").write_text(json.dumps(described))
    return huggingface_config.read_model_config(epath.Path(path), *how)


CONTRADICTIONS = [  # what config.json says of a family (...: nothing), and what is said of that
    ("llama", {"is_causal": False}, "is_causal=false is not supported"),
    ("llama", {"architectures": ["Other"]}, r'architectures=\["Other"\] is not .* we read \["LlamaForCausalLM"\]'),
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
    ("qwen3", {"rope_parameters": {"long_factor": [1.0] * 64, "rope_type": "longrope"}}, r"\(rope_type=longrope\)"),
    ("qwen3", {"rope_scaling": SCALED, "rope_parameters": {"rope_theta": 9.0}}, "rope_scaling and rope_parameters say"),
    ("qwen3", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor.* is not supported"),
    ("qwen3", {"rope_scaling": LLAMA3 | {"low_freq_factor": 8.0, "original_max_position_embeddings": 32}}, "less than"),
    ("qwen3", {"num_experts": 8}, "num_experts=8: family=qwen3 has none"),
    ("qwen3_moe", {"num_experts_per_tok": 9}, "num_experts_per_tok=9 must be 1 to 4 for family=qwen3_moe"),
    ("qwen3_moe", {"mlp_only_layers": [0]}, r"mlp_only_layers=\[0\] is not supported"),
    ("mistral", {"sliding_window": ...}, "sliding_window=4096 is not supported"),
    ("gemma3_text", {"layer_types": ["full_attention", "sliding_attention"]}, "2 times sliding_attention, or full_att"),
    ("gemma3_text", {"sliding_window": None}, "sliding_window, the reach of local layers, is missing"),
    ("gemma3_text", {"rope_local_base_freq": None}, "local_rope.0: Input should be a valid number"),
    ("gemma3_text", {"rope_parameters": {"rope_theta": 9.0}}, "must be those of full_attention and of sliding_attent"),
    (
        "gemma3_text",
        {"rope_parameters": {"full_attention": {"rope_theta": 9.0}, "sliding_attention": SCALED}},
        "rope_parameters scale those of sliding_attention",
    ),
    ("smollm3", {"attention_bias": True}, "attention_bias=true is not supported"),
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
    read(tmp_path, described)
    described = {key: value for key, value in (described | changes).items() if value is not ...}
    with pytest.raises(UserError, match=said):
        read(tmp_path, described)


@pytest.mark.parametrize("family", ["gemma3_text", "llama", "mistral", "olmo2", "smollm3"])
def test_what_config_json_leaves_out_is_the_familys_default(family, tmp_path):
    shape = tiny_config(family=family, vocab_size=128_256, num_attention_heads=8, **NEEDED.get(family, {}))
    expected = {key: value for key, value in FAMILIES[family].defaults.items() if hasattr(shape, key)}
    described = huggingface_config.describe(shape, "float32")
    described["architectures"] = [name.replace("Llama", "LLaMA") for name in described["architectures"]]  # at first
    config = read(tmp_path, {k: v for k, v in described.items() if k not in expected})
    assert {key: getattr(config, key) for key in expected} == expected


def test_of_several_tokens_that_end_a_text_an_answer_ends_with_the_templates_or_the_tokenizers(tmp_path):
    pieces = SentencePieceTokenizer.train(["hello world, this is a text. " * 3] * 9, 290)
    described = huggingface_config.describe(tiny_config(vocab_size=320, num_tokens=290, mask_token_id=4), "float32")
    for ids, expected in (([9, pieces.eos_id, 8], pieces.eos_id), ([9, 8], 9)):
        assert read(tmp_path, described | {"eos_token_id": ids}, pieces).eos_token_id == expected
    chat = write_tokenizer(tmp_path / "chat", eos_token="<|endoftext|>")  # Gemma 3's ends no turn
    turn, document = load_tokenizer_file(chat, "<mask>").encode_chat(["<|im_end|><|endoftext|>"])[0]
    (tmp_path / "run").mkdir()
    for file, ids, expected in (
        ("config.json", [9, document, turn], turn),
        ("config.json", [9, document], document),
        ("config.json", turn, document),
        ("generation_config.json", [9, document, turn], turn),  # it counts, as in transformers
    ):
        said = described if file == "config.json" else {}
        (tmp_path / "chat" / file).write_text(json.dumps(said | {"eos_token_id": ids}))
        tokenizer = load_tokenizer_file(chat, "<mask>")
        if isinstance(ids, list):
            assert huggingface_config.read_model_config(epath.Path(chat.parent), tokenizer).eos_token_id == expected
        for name, content in tokenizer.files.items():
            (tmp_path / "run" / name).write_bytes(content)
        again = load_tokenizer_file(tmp_path / "run" / "tokenizer.json", "<mask>")
        assert (tokenizer.eos_id, again.eos_id, again.files) == (expected, expected, tokenizer.files)


def test_a_mask_token_that_config_json_leaves_open_is_the_tokenizers(tmp_path):
    source = saved(tmp_path / "theirs", vocab_size=320, num_tokens=290)
    change_config(source, mask_token_id=None)
    tokenizer = SentencePieceTokenizer.train(["hello world, this is a text. " * 3] * 9, 290)
    (source / "tokenizer.model").write_bytes(tokenizer.model)
    assert load_model(source).config.mask_token_id == tokenizer.mask_id


@pytest.mark.parametrize(
    ("changes", "mask", "expected"), [({}, None, 290), ({}, 300, 301), ({"refusion_jax": {}}, None, 320)]
)
def test_without_a_tokenizer_as_many_ids_are_tokens_as_the_export_says_and_all_where_it_does_not(
    changes, mask, expected, tmp_path
):
    described = huggingface_config.describe(tiny_config(vocab_size=320, num_tokens=290, mask_token_id=4), "float32")
    assert read(tmp_path, described | changes, None, mask).num_tokens == expected


def plain_model(path, **changes):
    """A directory of a model whose config.json names no mask token, or the one in `changes`, with a tokenizer."""
    saved(path, vocab_size=320, num_tokens=320)
    change_config(path, **{"mask_token_id": "gone"} | changes)
    return epath.Path(path)


def test_a_mask_in_the_vocabulary_does_not_say_that_a_model_was_trained_with_it_but_refusions_does(tmp_path):
    """Gemma's tokenizer has <mask>."""
    path = plain_model(tmp_path / "theirs")
    for mask, method in ("<mask>", "ar"), ("<|mask|>", "refusion"):
        tokenizer = load_tokenizer_file(write_tokenizer(path, also=[mask]), "<mask>")
        assert tokenizer.name_of(tokenizer.mask_id) == mask
        assert choose_method(path, None) == method


def test_a_model_that_has_learnt_to_read_a_mask_token_is_trained_on_with_it(tmp_path):
    """By whatever name: releases of masked diffusion have their own, which no tokenizer_config.json tells."""
    last = load_tokenizer_file(write_tokenizer(tmp_path, also=["<|mdm_mask|>"]), "<|mdm_mask|>").mask_id
    path = plain_model(tmp_path / "theirs", mask_token_id=last)
    write_tokenizer(path, also=["<|mdm_mask|>"])
    lines = write_lines(tmp_path / "data.jsonl", [{"query": f"What is {i}?", "response": "It."} for i in range(99)])
    config = config_with(**{"init_from": str(path), "data.path": str(lines)})
    adopt_shape(config)
    assert config.data.mask_piece == "<|mdm_mask|>"
    assert load_tokenizer_file(find_own_tokenizer(path), config.data.mask_piece).mask_id == last
    (tmp_path / "config.json").write_text(config.to_json())  # as that of a run, which goes on with the same flags
    (tmp_path / "plain.py").write_text("from refusion_jax.config import default_config as get_config\n")
    flags = [f"--config={tmp_path}/plain.py", f"--config.init_from={path}", f"--config.data.path={lines}"]
    assert "What is" in run("inspect_data", *flags, f"--workdir={tmp_path}")[0]


@pytest.mark.parametrize("old", [{}, {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 4.0}}])
def test_a_rope_where_transformers_5_keeps_it_is_found_also_next_to_the_same_in_older_words(old, tmp_path):
    described = huggingface_config.describe(tiny_config(), "float32")
    del described["rope_theta"]
    config = read(tmp_path, described | {"rope_parameters": SCALED | {"rope_theta": 5e5}} | old)
    assert (config.rope_theta, config.rope_scaling) == (5e5, (4.0,))


def test_llama_3s_length_is_written_as_a_whole_number():
    scaling = huggingface_config.describe(tiny_config(rope_scaling=(8.0, 1.0, 4.0, 32.0)), "float32")["rope_scaling"]
    assert (scaling.pop("rope_type"), str([*scaling.values()])) == ("llama3", "[8.0, 1.0, 4.0, 32]")
