import dataclasses
import json
import os
import stat
import tempfile
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from conftest import logits_of, refused, run, sharp_model, tiny_config, tiny_model, unprivileged
from etils import epath
from flax import nnx
from helpers import python
from safetensors.numpy import load_file, save_file

from refusion_jax import DecodeSettings, UserError, decode, load_model, load_tokenizer
from refusion_jax.checkpoints.contents import choose_method, read_model_config
from refusion_jax.config.model import check_fits
from refusion_jax.data.tokenizer import SentencePieceTokenizer
from refusion_jax.distributed import sharding
from refusion_jax.model import huggingface
from refusion_jax.model.tensor_files import Tensors
from refusion_jax.model.transformer import abstract_transformer

SHAPES = {
    "1:1, tied": {"num_attention_heads": 4, "num_key_value_heads": 4, "tie_word_embeddings": True},
    "2:1": {"num_attention_heads": 4, "num_key_value_heads": 2, "rope_theta": 10_000.0},
    "8:1, wide heads": {"num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 12, "rope_theta": 1e6},
    "experts": {"family": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 3, "moe_intermediate_size": 12}
    | {"norm_topk_prob": False},
}


def tensors(path) -> dict[str, np.ndarray]:
    return {name: t for file in path.glob("*.safetensors") for name, t in load_file(file).items()}


def assert_same_tensors(one, other):
    before, after = tensors(one), tensors(other)
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert tensor.dtype == after[name].dtype
        np.testing.assert_array_equal(tensor, after[name])


def saved(path, dtype="float32", **changes):
    """A random model as a Hugging Face directory."""
    model = tiny_model(**changes)
    state = jax.tree.map(lambda x: x.astype(dtype), nnx.state(model))
    nnx.update(model, state)
    path.mkdir()
    huggingface.save(model, path)
    return path


@pytest.mark.parametrize("shape", SHAPES)
def test_the_round_trip_is_the_same_to_the_bit(tmp_path, shape):
    source, model = saved(tmp_path / "theirs", **SHAPES[shape]), tiny_model(**SHAPES[shape])
    assert load_model(source).config == model.config
    jax.tree.map(np.testing.assert_array_equal, *(nnx.state(each) for each in (load_model(source), model)))
    huggingface.save(load_model(source), tmp_path / "back")
    assert_same_tensors(source, tmp_path / "back")


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
GEMMA = {"sliding_window": 64, "query_pre_attn_scalar": 12, "head_dim": 8, "num_hidden_layers": 3}
FAMILIES = {
    "gemma3_text": GEMMA | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    "gemma3_text scaled": GEMMA
    | {"rope_scaling": {"rope_type": "linear", "factor": 8.0}, "tie_word_embeddings": False},
    "llama": {"tie_word_embeddings": True},  # as SmolLM2
    "llama 3": {"rope_parameters": LLAMA3 | {"original_max_position_embeddings": 32, "rope_theta": 5e5}},
    "mistral": {"sliding_window": None, "head_dim": 12},
    "olmo2": {"rms_norm_eps": 1e-5},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 12, "rope_theta": 1e6, "num_attention_heads": 8, "num_key_value_heads": 1},
    "qwen3 tied": {"num_key_value_heads": 4, "tie_word_embeddings": True},
    "qwen3_moe": {"head_dim": 8, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    "qwen3_moe normalized": {"head_dim": 8, "num_experts": 4, "moe_intermediate_size": 12, "norm_topk_prob": True}
    | {"num_experts_per_tok": 3},
    "smollm3": {"num_hidden_layers": 5, "rope_theta": 5e6},  # the fourth layer is without RoPE
    "smollm3 scaled": {"rope_scaling": {"rope_type": "linear", "factor": 8.0}, "no_rope_layers": [1, 0, 1]}
    | {"tie_word_embeddings": False},
}


@pytest.mark.filterwarnings("ignore")  # of theirs
@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_is_read_and_written_as_transformers_does(name, tmp_path):
    """Directories that transformers writes, of random models: the same logits, and the same tensors when written."""
    torch = pytest.importorskip("torch", reason="pip install -e '.[compare]' brings torch and transformers")
    transformers = pytest.importorskip("transformers")
    shape = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 2, "intermediate_size": 32, "pad_token_id": 0}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "bos_token_id": 1}
    config = transformers.AutoConfig.for_model(name.split()[0], **shape | {"eos_token_id": 2} | FAMILIES[name])
    torch.manual_seed(0)
    theirs = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for parameter in theirs.parameters():  # biases are 0 at first, and norms 1
            parameter += 0.1 * torch.randn_like(parameter)
        theirs.save_pretrained(tmp_path / "theirs")
        tokens = np.random.default_rng(0).integers(0, 32, (2, 50))
        expected = theirs(torch.tensor(tokens)).logits.numpy()
    ours = load_model(tmp_path / "theirs")
    np.testing.assert_allclose(logits_of(ours, tokens), expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())
    huggingface.save(ours, tmp_path / "ours")
    assert_same_tensors(tmp_path / "theirs", tmp_path / "ours")
    again = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "ours", dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        np.testing.assert_array_equal(again(torch.tensor(tokens)).logits.numpy(), expected)


@pytest.mark.filterwarnings("ignore")  # of theirs
@pytest.mark.parametrize(("system", "pad"), [("refusion", 0), ("dense", 31)])  # a token, and no token
@pytest.mark.parametrize("family", ["smollm3", "gemma3_text"])
def test_transformers_decodes_an_export_as_its_system_does(family, system, pad, tmp_path):
    """By the code that it carries: prompts padded on the left, answers to EOS, texts as long as local layers read."""
    torch = pytest.importorskip("torch", reason="pip install -e '.[compare]' brings torch and transformers")
    transformers = pytest.importorskip("transformers")
    is_local = family == "gemma3_text"
    shape = {"local_rope": (1e4, 2), "max_position_embeddings": 41} if is_local else {"no_rope_layer_interval": 2}
    own = sharp_model(num_hidden_layers=3, family=family, pad_token_id=pad, **shape)  # masks are probable, too
    huggingface.save(own, tmp_path / "model", system)
    export = tmp_path / "export"
    run("convert", "--format=huggingface", f"--from={tmp_path}/model", f"--to={export}")
    model = load_model(export)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(export, dtype=torch.float32)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(5, model.config.num_tokens, 3 + i % 7).tolist() for i in range(24)]
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    code = {"custom_generate": str(export), "trust_remote_code": True}
    texts = theirs.generate(input_ids=ids, attention_mask=mask, max_new_tokens=32, num_beams=1, **code)
    answers = decode(model, prompts, DecodeSettings(system, max_new_tokens=32, batch_size=8)).tokens
    assert len({len(answer) for answer in answers}) > 1
    for text, answer in zip(texts[:, width:].tolist(), answers, strict=True):
        assert text[: len(answer)] == answer
        assert set(text[len(answer) :]) <= {model.config.pad_token_id}
    config, eos, new = transformers.GenerationConfig, model.config.eos_token_id, texts[:, width:]
    given = {"do_sample": False, "pad_token_id": 3, "generation_config": config(do_sample=True, max_new_tokens=32)}
    generate = theirs.load_custom_generate(str(export), trust_remote_code=True)  # called as by transformers 4
    again = generate(theirs, ids[:4], attention_mask=mask[:4], eos_token_id=eos, **given, **code)[:, width:]
    assert torch.equal(again, torch.where(new == model.config.pad_token_id, 3, new)[:4, : again.shape[1]])
    for asked, said in (
        ({"do_sample": True}, "do_sample=False"),
        ({"generation_config": config(do_sample=True)}, "do_sample=False"),
        ({"num_beams": 4}, "num_beams: this decoding"),
        ({"generation_config": config(repetition_penalty=2.0)}, "repetition_penalty: this decoding"),
        ({"generation_config": config(eos_token_id=5)}, "eos_token_id: this decoding"),
        *([({"max_new_tokens": 40}, "49 tokens is more than the 41 that local layers read")] if is_local else []),
    ):
        with pytest.raises(ValueError, match=said):
            theirs.generate(input_ids=ids[:1], **asked, **code)


def test_beyond_the_window_of_local_layers_nothing_is_decoded_or_trained(tmp_path):
    """Attention to all of a context that the window holds is attention in the window; longer ones are refused."""
    path = saved(tmp_path / "theirs", family="gemma3_text", local_rope=(1e4, 6), max_position_embeddings=64)
    change_config(path, max_position_embeddings=1024)
    model = load_model(path)
    assert model.config.max_position_embeddings == 64
    with pytest.raises(UserError, match="cache_length=65: the model's local layers attend to 64 tokens"):
        decode(model, [[1, 5, 6]], DecodeSettings(method="ar", cache_length=65))
    longer = dataclasses.replace(model.config, max_position_embeddings=65)
    with pytest.raises(UserError, match="--config.row_length must be at most 64"):
        check_fits(epath.Path(path), longer, None)


def test_many_shards_are_read_and_written_as_one(tmp_path, monkeypatch):
    one = saved(tmp_path / "one")
    monkeypatch.setattr(huggingface, "SHARD_BYTES", 4096)
    many = saved(tmp_path / "many")
    files = sorted(path.name for path in many.glob("*.safetensors"))
    assert len(files) > 3
    assert files[0] == f"model-00001-of-{len(files):05}.safetensors"
    index = json.loads((many / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(tensors(one))
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors(one).values())
    jax.tree.map(np.testing.assert_array_equal, *(nnx.to_pure_dict(nnx.state(load_model(p))) for p in (one, many)))


@pytest.mark.parametrize("shape", [{"family": "olmo2"}, {"family": "qwen2"}, {"family": "qwen3"}, SHAPES["experts"]])
def test_weights_go_straight_to_a_mesh_and_missing_rows_become_zeros(shape, tmp_path):
    path = saved(tmp_path / "theirs", **shape)
    mesh = sharding.make_mesh({"expert": 2, "fsdp": 2, "tensor": 2})
    _, target = abstract_transformer(tiny_config(vocab_size=40, **shape), "float32", mesh)
    params = huggingface.load_params(path, target)
    jax.tree.map(
        lambda x, t: x.sharding == t.sharding or pytest.fail(f"{x.sharding}, not {t.sharding}"), params, target
    )
    plain = nnx.to_pure_dict(nnx.state(load_model(path)))
    np.testing.assert_array_equal(params["embed_tokens"][:32], plain["embed_tokens"])
    assert not params["embed_tokens"][32:].any()
    jax.tree.map(np.testing.assert_array_equal, params["layers"], plain["layers"])


def test_the_dtype_and_what_transformers_has_no_words_for_survive_both_directions(tmp_path):
    tokenizer = SentencePieceTokenizer.train(["hello world, this is a text. " * 3] * 9, 290, mask_piece="<own>")
    changes = {"vocab_size": 320, "num_tokens": tokenizer.size, "shifted": True, "block_size": 16}
    source = saved(tmp_path / "theirs", "bfloat16", **changes)
    huggingface.save(load_model(source, "bfloat16"), source, objective="dream")
    (source / "tokenizer.model").write_bytes(tokenizer.model)
    run("convert", "--format=orbax", f"--from={source}", f"--to={tmp_path}/ours")
    run("convert", "--format=huggingface", f"--from={tmp_path}/ours", f"--to={tmp_path}/again")
    assert_same_tensors(source, tmp_path / "again")
    assert {tensor.dtype.name for tensor in tensors(source).values()} == {"bfloat16"}
    assert json.loads((tmp_path / "again" / "config.json").read_text())["torch_dtype"] == "bfloat16"
    for path in (source, tmp_path / "ours", tmp_path / "again"):
        config = read_model_config(epath.Path(path))
        assert (config.shifted, config.block_size) == (True, 16)
        assert load_tokenizer(path).mask_id == config.mask_token_id == tokenizer.mask_id
        assert choose_method(epath.Path(path), None) == "dream"
        with pytest.raises(UserError, match="was trained with objective=dream, which decodes with dream"):
            choose_method(epath.Path(path), "refusion")


def change_config(path, **changes):
    config = json.loads((path / "config.json").read_text()) | changes
    (path / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v != "gone"}))


def change_tensors(path, change):
    (file,) = path.glob("*.safetensors")
    changed = change(load_file(file))
    save_file(changed, file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": dict.fromkeys(changed, file.name)}))


def cut_off(path):
    (file,) = path.glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-10])


Q = "model.layers.1.self_attn.q_proj.weight"


def to_fp8(path):
    scale = {f"{Q}_scale_inv": np.ones((2, 1), np.float32)}
    change_tensors(path, lambda tensors: tensors | scale | {Q: tensors[Q].astype(ml_dtypes.float8_e4m3fn)})
    change_config(path, quantization_config={"quant_method": "fp8", "weight_block_size": [16, 16]})


BAD = {
    "fp8": (to_fp8, 'config.json: quantization_config={"quant_method": "fp8", "weight_block_size": [16, 16]} is not'),
    "missing shard": (
        lambda p: next(p.glob("*.safetensors")).unlink(),
        "model-00001-of-00001.safetensors cannot be read: No such file",
    ),
    "truncated": (cut_off, "model-00001-of-00001.safetensors is damaged: "),
    "wrong shape": (lambda p: change_tensors(p, lambda t: t | {Q: t[Q][1:]}), f"{Q} has shape (31, 16), but"),
    "not floats": (
        lambda p: change_tensors(p, lambda t: t | {Q: t[Q].astype(np.int8)}),
        f"model-00001-of-00001.safetensors: {Q} has dtype I8; we read F64, F32, F16, BF16",
    ),
    "not finite": (
        lambda p: change_tensors(p, lambda t: t | {Q: np.where(t[Q] == t[Q].max(), np.nan, t[Q])}),
        f"model-00001-of-00001.safetensors: {Q} holds values that are not finite as float32",
    ),
    "head next to tied weights": (
        lambda p: change_config(p, tie_word_embeddings=True),
        "lm_head.weight has no place in the model that config.json describes",
    ),
    "missing tensor": (lambda p: change_tensors(p, lambda t: {k: t[k] for k in t if k != Q}), f"holds no tensor {Q}"),
    "no size": (
        lambda p: change_config(p, hidden_size="gone"),
        "config.json cannot be read: hidden_size: Field required",
    ),
    "no mask token": (lambda p: change_config(p, mask_token_id="gone"), "has no mask_token_id; name one with --mask"),
    "mask out of range": (lambda p: change_config(p, mask_token_id=99), "mask_token_id=99 is not a row of the embed"),
    "more tokens than rows": (
        lambda p: change_config(p, refusion_jax={"num_tokens": 99}),
        "num_tokens=99 are more than vocab_size=32",
    ),
    "no config": (lambda p: (p / "config.json").unlink(), "holds no model of Hugging Face; "),
}


@pytest.mark.parametrize("case", BAD)
def test_a_directory_that_will_not_do_is_refused_and_nothing_is_written(case, tmp_path):
    spoil, said = BAD[case]
    source = saved(tmp_path / "theirs")
    spoil(source)
    assert said in refused("convert", "--format=orbax", f"--from={source}", f"--to={tmp_path}/new/ours")
    assert sorted(p.name for p in tmp_path.rglob("*") if p.parent != source) == ["theirs"]


def test_a_tensor_stands_in_one_place_and_in_that_of_the_index(tmp_path):
    names, tensor = ["a.safetensors", "b.safetensors"], np.ones((2, 2), np.float32)
    index = tmp_path / "model.safetensors.index.json"

    def refused(places: dict[str, str], said: str) -> None:
        index.write_text(json.dumps({"weight_map": places}))
        with pytest.raises(UserError, match=said):
            Tensors(tmp_path)

    for name in names:
        save_file({"x": tensor, name[0]: tensor}, tmp_path / name)
    refused({"x": names[0], "a": names[0], "b": names[1]}, "x is in b.safetensors, not in a.safetensors")
    refused({"x": names[0], "a": "../a.safetensors"}, "index.json cannot be read: weight_map.a: String should match")
    save_file({"b": tensor}, tmp_path / "b.safetensors")
    refused({"x": names[1], "a": names[0], "b": names[1]}, "x is in a.safetensors, not in b.safetensors")
    save_file({"x": tensor}, tmp_path / "model.safetensors")
    refused({"x": names[0], "a": names[0], "b": names[1]}, "two models, model.safetensors and that of model")
    index.unlink()
    file, entry = tmp_path / "model.safetensors", {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 4]}
    for header in ({"x": entry}, {"": {}}):
        content = json.dumps(header).encode()
        file.write_bytes(len(content).to_bytes(8, "little") + content + bytes(4))
        with pytest.raises(UserError, match="model.safetensors is damaged: "):
            Tensors(tmp_path).read("x", (2, 2))
    save_file({"x": tensor.astype(ml_dtypes.float8_e4m3fn)}, file)
    assert huggingface.read_dtype(epath.Path(tmp_path)) == "float32"  # and `load_params` names the tensor


def test_tied_weights_that_are_saved_twice_are_read(tmp_path):
    path = saved(tmp_path / "theirs", tie_word_embeddings=True)
    change_tensors(path, lambda t: t | {"lm_head.weight": t["model.embed_tokens.weight"]})
    assert load_model(path).config.tie_word_embeddings


def test_exports_may_be_read_by_whom_the_umask_says_and_others_are_told_what_stops_them():
    with tempfile.TemporaryDirectory() as directory:
        before = os.umask(0o027)
        try:
            path = saved(Path(directory) / "theirs")
        finally:
            os.umask(before)
        (file,) = path.glob("*.safetensors")
        assert stat.S_IMODE(file.stat().st_mode) == 0o640
        os.chmod(directory, 0o755)
        path.chmod(0o755)
        file.chmod(0)
        with unprivileged(), pytest.raises(UserError, match="safetensors cannot be read: Permission denied"):
            Tensors(path)


MEASURE = """
import sys, threading, time
from pathlib import Path
import jax
from refusion_jax.distributed.sharding import make_mesh
from refusion_jax.model import huggingface, huggingface_config
from refusion_jax.model.transformer import abstract_transformer

def anonymous():
    fields = dict(line.split(":") for line in open("/proc/self/status") if ":" in line)
    return int(fields["RssAnon"].split()[0]) * 1024

path, peak, running = Path(sys.argv[1]), 0, True
config = huggingface_config.read_model_config(path)
_, target = abstract_transformer(config, "float32", make_mesh({}, jax.devices()[:1]))

def watch():
    global peak
    while running:
        peak = max(peak, anonymous())
        time.sleep(0.002)

watcher, before = threading.Thread(target=watch, daemon=True), anonymous()
watcher.start()
params = jax.block_until_ready(huggingface.load_params(path, target))
running = False
watcher.join()
peak = max(peak, anonymous())
sizes = [x.nbytes for x in jax.tree.leaves(params)]
print((peak - before - sum(sizes)) / params["embed_tokens"].nbytes)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="measures memory through Linux's /proc")
@pytest.mark.thorough
def test_reading_needs_little_more_memory_than_the_arrays_themselves(tmp_path):
    """Besides them one tensor at a time: below 1.3 of the largest, here the embedding of 64 MiB."""
    path = saved(tmp_path / "theirs", vocab_size=32768, num_tokens=32768, hidden_size=512, intermediate_size=1024)
    assert 0 < float(python("-c", MEASURE, path, JAX_PLATFORMS="cpu", XLA_FLAGS="").stdout) < 1.3
