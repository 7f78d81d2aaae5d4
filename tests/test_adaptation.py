"""From somebody else's weights and tokenizer to a model of ours, and back, by low-rank adapters, too."""

import json
import math
import os
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from conftest import TINY_RUN, config_with, logits_of, run, tiny_model
from etils import epath
from flax import nnx
from helpers import write_lines, write_tokenizer
from safetensors.numpy import load_file, save_file
from test_huggingface import change_config
from test_releases import released

from refusion_jax import DecodeSettings, UserError, decode, load_model, load_tokenizer
from refusion_jax.checkpoints.contents import read_model_config, weights_stamp
from refusion_jax.checkpoints.run_directory import read_adapters, read_objective, saved_steps
from refusion_jax.data.dataset import load_dataset
from refusion_jax.data.fast_tokenizer import load_tokenizer_file, tokenizer_hash
from refusion_jax.data.tokenizer import SentencePieceTokenizer
from refusion_jax.model import huggingface
from refusion_jax.model.lora import INPUTS, Lora, add_adapters


@pytest.fixture
def source(tmp_path):
    """A tiny Qwen3 that has never heard of a mask token, with its tokenizer, and data to adapt it to."""
    path = tmp_path / "Qwen3-tiny"
    path.mkdir()
    huggingface.save(tiny_model(vocab_size=320, num_tokens=320), path)
    config = json.loads((path / "config.json").read_text())
    del config["mask_token_id"]
    (path / "config.json").write_text(json.dumps(config))
    write_tokenizer(path)
    lines = [{"query": f"What is {i}?", "response": f"It is the number {i}."} for i in range(200)]
    write_lines(tmp_path / "data.jsonl", lines)
    return path


def recipe(source, workdir, **changes):
    """Flags that make the 8B recipe a tiny one."""
    c = json.loads((source / "config.json").read_text())
    flags = {f"model.{key}": value for key, value in c.items() if key in MODEL_KEYS}
    flags |= {"init_from": source, "data.tokenizer": source / "tokenizer.json"}
    flags |= {"data.path": source.parent / "data.jsonl", "row_length": 128, "batch_size": 4, "dtype": "float32"}
    flags |= {"steps": 2, "learning_rate": 1e-9, "log_every": 1, "checkpoint.every": 1} | changes
    config = ["--config=configs/refusion_8b.py:8b", f"--workdir={workdir}"]
    return ["train", *config, *(f"--config.{key}={value}" for key, value in flags.items())]


MODEL_KEYS = "hidden_size num_hidden_layers num_attention_heads num_key_value_heads head_dim intermediate_size"
MODEL_KEYS = [*MODEL_KEYS.split(), "vocab_size", "rope_theta", "tie_word_embeddings"]


def test_adaptation_starts_from_the_weights_resumes_without_them_and_exports(source, tmp_path):
    workdir = tmp_path / "run"
    run(*recipe(source, workdir, **{"data.thinking": "false"}))
    before, after = (nnx.to_pure_dict(nnx.state(load_model(path))) for path in (source, workdir))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-7), before, after)  # two steps of 1e-9
    tokenizer = load_tokenizer(workdir)
    assert tokenizer.render_chat([{"role": "user", "content": "hi"}]).endswith("assistant\n<think>\n\n</think>\n\n")
    assert load_model(workdir).config.mask_token_id == tokenizer.mask_id == tokenizer.size - 1
    context = json.loads((source / "config.json").read_text())["max_position_embeddings"]
    assert context > 128  # the rows

    resume = recipe(source, workdir, steps=4, **{"data.thinking": "false"})
    next(source.glob("*.safetensors")).unlink()
    run(*resume)
    assert saved_steps(workdir)[-1] == 4

    step = workdir / "checkpoints" / "4"
    run("convert", "--format=huggingface", f"--from={step}", f"--to={tmp_path}/export", "--dtype=bfloat16")
    assert load_tokenizer(tmp_path / "export").thinking is False
    exported = json.loads((tmp_path / "export" / "config.json").read_text())
    assert exported["mask_token_id"] == tokenizer.mask_id
    assert exported["max_position_embeddings"] == context
    out, _ = run("generate", f"--checkpoint={tmp_path}/export", "--prompt=What is 5?", "--decode.max_new_tokens=8")
    assert isinstance(json.loads(out)["text"], str)


@pytest.mark.thorough
def test_adapters_are_trained_alone_saved_alone_and_merged_on_export(source, tmp_path, monkeypatch):
    flags = {"lora.rank": 4, "lora.full": ".*norm|none", "learning_rate": 0.01, "steps": 4, "dtype": "bfloat16"}
    flags["schedule"] = "constant"
    relative = os.path.relpath(source)
    out, _ = run(*recipe(source, tmp_path / "run", init_from=relative, **flags))
    monkeypatch.chdir(tmp_path)  # from where it names nothing
    assert re.search(r"parameters, [0-9,]+ of them trained, on", out)
    saved = load_items(tmp_path / "run" / "checkpoints" / "4")
    assert {name for name in saved["layers"] if "norm" not in name} == {f"{w}_{x}" for w in INPUTS for x in "ab"}
    assert "embed_tokens" not in saved
    before, after = (nnx.to_pure_dict(nnx.state(load_model(path))) for path in (source, tmp_path / "run"))
    np.testing.assert_array_equal(before["embed_tokens"], after["embed_tokens"])
    for name in (*INPUTS, "q_norm"):
        assert not np.array_equal(before["layers"][name], after["layers"][name]), name
    a, b = saved["layers"]["o_proj_a"], saved["layers"]["o_proj_b"]
    update = 16 / 4 * np.einsum("lnhr,lrd->lnhd", a, b)
    np.testing.assert_allclose(after["layers"]["o_proj"], before["layers"]["o_proj"] + update, atol=1e-6)

    # A run that is interrupted goes on as one that is not: with the source's weights and its own adapters.
    shutil.copytree(tmp_path / "run", tmp_path / "parts")
    shutil.rmtree(tmp_path / "parts" / "checkpoints" / "4")
    config = tmp_path / "parts" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"init_from": relative}))  # as it was written once
    out, _ = run(*recipe(source, tmp_path / "parts", **flags))
    assert "step 3 of 4" in out
    jax.tree.map(np.testing.assert_array_equal, load_items(tmp_path / "parts" / "checkpoints" / "4"), saved)

    _, err = run("convert", "--format=peft", f"--from={tmp_path}/run", f"--to={tmp_path}/peft", code=2)
    assert "--format=peft holds only adapters, but attention_norm was trained, too" in err
    with (tmp_path / "run" / "metrics.jsonl").open("a") as metrics:
        metrics.write('{"step": 5, "lo')  # as a kill leaves it
    run("convert", "--format=huggingface", f"--from={tmp_path}/run", f"--to={tmp_path}/export")
    card = (tmp_path / "export" / "README.md").read_text()
    assert f"`objective=refusion` from {source} on `" in card
    assert ": 4 of 4 steps of " in card
    assert "custom_generate=DIR, trust_remote_code=True" in card
    assert (tmp_path / "export" / "custom_generate" / "generate.py").is_file()
    assert r'| `lora.full` | ".*norm\|none" |' in card
    assert re.search(r"^\| `loss` \| [0-9.]+ \|$", card, re.MULTILINE)
    exported = nnx.to_pure_dict(nnx.state(load_model(tmp_path / "export")))
    jax.tree.map(np.testing.assert_array_equal, exported, after)


@pytest.mark.filterwarnings("ignore")  # of theirs
@pytest.mark.thorough
def test_adapters_go_to_peft_and_come_back(source, tmp_path):
    flags = {"lora.rank": 4, "lora.targets": "(q|o|down)_proj", "learning_rate": 0.05, "steps": 4}
    run(*recipe(source, tmp_path / "run", init_from=os.path.relpath(source), **flags))
    run("convert", "--format=peft", f"--from={tmp_path}/run", f"--to={tmp_path}/peft")
    merged, again = (nnx.to_pure_dict(nnx.state(load_model(tmp_path / name))) for name in ("run", "peft"))
    jax.tree.map(np.testing.assert_array_equal, again, merged)

    own = DecodeSettings("refusion", max_new_tokens=8)
    asked = ["--prompt=What is 5?", "--decode.max_new_tokens=8"]  # decoded as it was trained, not as its base
    first, second = (run("generate", f"--checkpoint={tmp_path}/{name}", *asked) for name in ("run", "peft"))
    assert first == second
    card = (tmp_path / "peft" / "README.md").read_text()
    assert "custom_generate" not in card
    assert "`peft` adds it to that model" in card
    stamps = [weights_stamp(tmp_path / name, own) for name in ("run", "peft")]
    for file in source.glob("*.safetensors"):  # of the model that both adapt
        os.utime(file, (1, 1))
    assert all(weights_stamp(tmp_path / name, own) != was for name, was in zip(("run", "peft"), stamps, strict=True))

    for name in ("run", "peft"):
        _, err = run("convert", "--format=orbax", f"--from={tmp_path}/{name}", f"--to={tmp_path}/ours", code=2)
        assert f"/{name} holds no model of Hugging Face; --format=huggingface merges adapters" in err
    _, err = run("convert", "--format=peft", f"--from={source}", f"--to={tmp_path}/ours", code=2)
    assert "holds no checkpoint; give the --workdir of a training run" in err
    run(*recipe(source, tmp_path / "more", init_from=tmp_path / "peft", **flags | {"steps": 2}))
    _, err = run("convert", "--format=peft", f"--from={tmp_path}/more", f"--to={tmp_path}/ours", code=2)
    assert f"--format=peft: what the run adapts, {tmp_path}/peft, is not a directory in the form of transformers" in err
    own = json.loads((tmp_path / "more" / "config.json").read_text())
    for base in (tmp_path / "run", released(tmp_path / "llada", "llada")):  # whose tensors have names of their own
        (tmp_path / "more" / "config.json").write_text(json.dumps(own | {"init_from": str(base)}))
        _, err = run("convert", "--format=peft", f"--from={tmp_path}/more", f"--to={tmp_path}/ours", code=2)
        assert f"what the run adapts, {base}, is not a directory in the form of transformers" in err
    config = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(source)  # from wherever it is read
    for name, value, said in (
        ("use_dora", True, "use_dora=true is not supported"),
        ("layer_replication", [[0, 2]], r"layer_replication=\[\[0, 2\]\] is not supported"),
        ("init_lora_weights", "pissa", "init_lora_weights: Input should be True, False, 'gaussian', 'orthogonal' or"),
        ("lora_alpha", float("inf"), "lora_alpha: Input should be a finite number"),
    ):
        (tmp_path / "peft" / "adapter_config.json").write_text(json.dumps(config | {name: value}))
        with pytest.raises(UserError, match=f"adapter_config.json cannot be read: .*{said}"):
            load_model(tmp_path / "peft")
    (tmp_path / "peft" / "adapter_config.json").write_text("3")
    with pytest.raises(UserError, match="adapter_config.json cannot be read: Input should be"):
        load_model(tmp_path / "peft")
    (tmp_path / "peft" / "adapter_config.json").write_text(json.dumps(config))

    peft = pytest.importorskip("peft")
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    base = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, attn_implementation="eager")
    theirs = peft.PeftModel.from_pretrained(base, tmp_path / "peft")
    tokens = np.random.default_rng(0).integers(5, 300, (2, 17))
    with torch.no_grad():
        expected = theirs(torch.tensor(tokens)).logits.numpy()
    got = logits_of(load_model(tmp_path / "run"), tokens)
    rows = expected.shape[2]
    np.testing.assert_allclose(got[..., :rows], expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())
    theirs.save_pretrained(tmp_path / "theirs")
    back = nnx.to_pure_dict(nnx.state(load_model(tmp_path / "theirs")))
    jax.tree.map(np.testing.assert_array_equal, back, merged)


def load_items(step):
    """The saved weights of a checkpoint, as they are there."""
    metadata = ocp.StandardCheckpointHandler().metadata(step / "params")
    as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), metadata)
    with ocp.PyTreeCheckpointer() as checkpointer:
        return checkpointer.restore(step / "params", restore_args=as_numpy)


ADAPTERS = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "layers_to_transform": [1]}


def test_prompts_of_adapters_are_written_by_the_tokenizer_that_lies_with_them(source, tmp_path):
    """With the template that they were trained with; what ends a text, and the mask token, is the model's."""
    path, turns = epath.Path(tmp_path), [{"role": "user", "content": "hi"}]
    (path / "adapter_config.json").write_text(json.dumps(ADAPTERS | {"base_model_name_or_path": str(source)}))
    theirs = load_tokenizer(source)
    assert load_tokenizer(path).files == theirs.files
    (document,), (turn,) = theirs.encode_chat(["<|endoftext|>", "<|im_end|>"])
    change_config(source, eos_token_id=[document, turn], mask_token_id=7)
    template = "{% for m in messages %}Q: {{ m.content }}<|im_end|>{% endfor %}A:"
    write_tokenizer(tmp_path, chat_template=template, eos_token="<|endoftext|>")
    tokenizer, config = load_tokenizer(path), read_model_config(path)
    assert tokenizer.render_chat(turns) == "Q: hi<|im_end|>A:"
    assert (tokenizer.eos_id, tokenizer.mask_id) == (config.eos_token_id, config.mask_token_id) == (turn, 7)


def test_adapters_of_some_layers_alone_are_refused_by_the_tensor_that_is_missing(source, tmp_path):
    """As `peft` writes them with `layers_to_transform`, next to the config.json of the model, as some trainers do."""
    shutil.copy(source / "config.json", tmp_path)
    (tmp_path / "adapter_config.json").write_text(json.dumps(ADAPTERS | {"base_model_name_or_path": str(source)}))
    q_proj = load_file(source / "model-00001-of-00001.safetensors")["model.layers.1.self_attn.q_proj.weight"]
    sides = {"A": np.zeros((2, q_proj.shape[1]), np.float32), "B": np.zeros((q_proj.shape[0], 2), np.float32)}
    names = {side: f"base_model.model.model.layers.{{}}.self_attn.q_proj.lora_{side}.weight" for side in sides}
    save_file({names[side].format(1): x for side, x in sides.items()}, tmp_path / "adapter_model.safetensors")
    with pytest.raises(UserError, match=re.escape(f"{tmp_path} holds no tensor {names['A'].format(0)}")):
        load_model(tmp_path)


@pytest.mark.thorough
def test_a_model_that_was_never_adapted_is_decoded_left_to_right_and_one_line_says_so(source, tmp_path):
    flags = ["--prompt=What is 5?", "--decode.max_new_tokens=4"]
    out, err = run("generate", f"--checkpoint={source}", *flags)
    assert json.loads(out)["commit_order"] == sorted(json.loads(out)["commit_order"])
    assert json.loads(out)["forwards"] == len(json.loads(out)["tokens"])
    assert err.count(f"{source}/config.json names no mask token: a plain language model") == 1
    run("convert", "--format=orbax", f"--from={source}", f"--to={tmp_path}/ours")
    assert run("generate", f"--checkpoint={tmp_path}/ours", *flags)[0] == out


def test_an_embedding_smaller_than_the_tokenizer_is_padded_and_its_padding_never_predicted(source):
    tokenizer = load_tokenizer(source)
    for file in source.glob("*.safetensors*"):
        file.unlink()
    (source / "config.json").unlink()
    rows = tokenizer.size - 1  # none for the mask token
    huggingface.save(tiny_model(vocab_size=rows, num_tokens=rows, mask_token_id=-1), source)
    model = load_model(source)
    assert model.config.vocab_size == model.embed_tokens[...].shape[0] == 384
    assert model.config.num_tokens == tokenizer.size
    assert model.config.mask_token_id == rows
    assert not model.embed_tokens[...][rows:].any()
    prompts = tokenizer.encode_prompts([f"What is {i}?" for i in range(4)])
    out = decode(model, prompts, DecodeSettings("ar", max_new_tokens=16, temperature=2.0))
    assert max(token for tokens in out.commit_tokens for token in tokens) < rows


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model.hidden_size": 32}, "--config.model.hidden_size=32: "),
        ({"model.hidden_size": 32, "model.head_dim": 4}, " and other values of head_dim; a config file"),
        ({"model.vocab_size": 310}, "--config.model.vocab_size=310: "),
        ({"init_from": "nowhere"}, "--config.init_from=nowhere is not a directory"),
        ({"lora.rank": 4, "init_from": ""}, "--config.lora.rank=4: adapters need weights to adapt"),
        ({"lora.rank": 4, "lora.targets": "proj"}, "--config.lora.targets=proj: names none of q_proj, "),
        ({"lora.rank": 4, "lora.full": "("}, "--config.lora.full=(: is not a regular expression: "),
        ({"lora.rank": 4, "lora.full": "input_layernorm"}, "--config.lora.full=input_layernorm: names none of "),
    ],
)
def test_what_cannot_be_adapted_is_refused_before_anything_is_written(source, tmp_path, changes, said):
    _, err = run(*recipe(source, tmp_path / "run", **changes), code=2)
    assert err.startswith("error: ")
    assert said in err
    assert len(err.splitlines()) == 1, err
    assert not (tmp_path / "run").exists()


@pytest.mark.thorough
def test_the_shape_is_that_of_the_weights_to_start_from_even_when_they_are_gone(source, tmp_path):
    for file in source.glob("*.safetensors*"):
        file.unlink()
    scaled = {"family": "llama", "rope_scaling": (8.0, 1.0, 4.0, 32.0), "tie_word_embeddings": True}
    huggingface.save(tiny_model(vocab_size=320, num_tokens=320, mask_token_id=-1, **scaled), source)
    flags = {"init_from": source, "data.tokenizer": source / "tokenizer.json", "data.path": tmp_path / "data.jsonl"}
    flags |= {"row_length": 128, "batch_size": 4, "log_every": 1, "checkpoint.every": 10}
    (tmp_path / "plain.py").write_text("from refusion_jax.config import default_config as get_config\n")
    train = ["train", f"--config={tmp_path}/plain.py", f"--workdir={tmp_path}/run"]
    train += [f"--config.{key}={value}" for key, value in flags.items()]
    run(*train, "--config.steps=1")
    shape = load_model(tmp_path / "run").config
    assert (shape.family, shape.rope_scaling, shape.hidden_size) == ("llama", (8.0, 1.0, 4.0, 32.0), 16)
    for file in (source / "config.json", *source.glob("*.safetensors*")):
        file.unlink()
    out, _ = run(*train, "--config.epochs=2", "--config.steps=1")  # the rows decide, not the steps that there are
    rows = int(re.search(r" in (\d+) rows", out)[1])
    assert f"trained to step {math.ceil(2 * rows / 4)};" in out
    assert "training is complete" in run(*train, "--config.epochs=2")[0]
    write_lines(tmp_path / "more.jsonl", [{"query": f"What is {i}?", "response": "A number."} for i in range(600)])
    more = [f"--config.data.path={tmp_path}/more.jsonl", "--allow_change=data"]
    out, _ = run(*train, "--config.epochs=2", *more)
    more_rows = int(re.search(r" in (\d+) rows", out)[1])
    assert f"trained to step {math.ceil(2 * more_rows / 4)};" in out
    run("convert", "--format=huggingface", f"--from={tmp_path}/run", f"--to={tmp_path}/export")
    assert json.loads((tmp_path / "export" / "config.json").read_text())["model_type"] == "llama"


@pytest.mark.thorough
def test_weights_of_a_run_are_trained_on_with_the_tokenizer_of_that_run(trained_run, tmp_path):
    write_lines(tmp_path / "other.jsonl", [{"query": f"Wozu {i}?", "response": f"Darum {i}."} for i in range(300)])
    flags = [*TINY_RUN, f"--config.init_from={trained_run}", f"--config.data.path={tmp_path}/other.jsonl"]
    flags += ["--config.steps=5", "--config.checkpoint.every=5"]
    run("train", *flags, f"--workdir={tmp_path}/run")
    assert load_tokenizer(tmp_path / "run").files == load_tokenizer(trained_run).files
    other = SentencePieceTokenizer.train(["Wozu? Darum! Warum nicht?"] * 9, 300)
    (tmp_path / "other.model").write_bytes(other.model)
    flags += [f"--config.data.tokenizer={tmp_path}/other.model", f"--workdir={tmp_path}/refused"]
    _, err = run("train", *flags, code=2)
    assert f"--config.init_from={trained_run}: its tokenizer is another one than that of the data (token " in err
    assert not (tmp_path / "refused").exists()


@pytest.mark.thorough
def test_adapters_of_a_run_stay_those_of_the_step_that_they_began_with(trained_run, tmp_path):
    base, newest = tmp_path / "base", tmp_path / "60"
    shutil.copytree(trained_run, base)
    (base / "checkpoints" / "60").rename(newest)
    flags = [*TINY_RUN, f"--config.init_from={os.path.relpath(base)}", "--config.lora.rank=2"]
    flags.append(f"--workdir={tmp_path}/run")
    run("train", *flags, "--config.steps=5")
    before = nnx.to_pure_dict(nnx.state(load_model(tmp_path / "run")))
    newest.rename(base / "checkpoints" / "60")  # as if it had been trained on
    jax.tree.map(np.testing.assert_array_equal, nnx.to_pure_dict(nnx.state(load_model(tmp_path / "run"))), before)
    assert "; step 5 of 6" in run("train", *flags, "--config.steps=6")[0]
    after = nnx.to_pure_dict(nnx.state(load_model(tmp_path / "run")))
    np.testing.assert_array_equal(after["embed_tokens"], before["embed_tokens"])


def test_thinking_is_as_in_training_for_whoever_reads_the_tokenizer_again(source, tmp_path):
    """Unset, a template does not get `enable_thinking`, as the authors of ReFusion train."""
    turns, block = [{"role": "user", "content": "hi"}], "<think>\n\n</think>\n\n"
    for thinking, end in (("unset", ""), ("true", ""), ("false", block)):
        config = config_with(**{"data.thinking": thinking, "row_length": 128})
        config.data.path, config.data.tokenizer = f"{source.parent}/data.jsonl", f"{source}/tokenizer.json"
        tokenizer, rows = load_dataset(config, tmp_path)
        assert (block in tokenizer.decode(rows[0]["tokens"].tolist())) == bool(end)
        for name, content in tokenizer.files.items():
            (tmp_path / name).write_bytes(content)
        again = load_tokenizer_file(tmp_path / "tokenizer.json", "<mask>")
        assert again.render_chat(turns).endswith("<|im_start|>assistant\n" + end)
        assert again.render_chat(turns, thinking=True).endswith("<|im_start|>assistant\n")
        assert tokenizer_hash(again) == tokenizer_hash(tokenizer)
    with pytest.raises(UserError, match="thinking=true: .*tokenizer.json has no chat template"):
        load_tokenizer_file(write_tokenizer(tmp_path / "plain", chat_template=None), "<mask>", "true")


@pytest.mark.parametrize("targets", [".*_proj", "(q|o)_proj"])
def test_merged_weights_compute_what_adapters_do(targets):
    lora = Lora(rank=3, alpha=6.0, targets=targets)
    model = tiny_model()
    tokens = jnp.arange(24).reshape(2, 12) % 30
    plain = logits_of(model, tokens)
    add_adapters(model.layers, lora, nnx.Rngs(1))
    np.testing.assert_array_equal(logits_of(model, tokens), plain)  # B is 0
    graphdef, params = nnx.split(model)
    params = nnx.to_pure_dict(params)
    for name in lora.names:
        shape = params["layers"][f"{name}_b"].shape
        params["layers"][f"{name}_b"] = 0.1 * jax.random.normal(jax.random.key(len(name)), shape)
    adapted = logits_of(nnx.merge(graphdef, params), tokens)
    merged = lora.merge(lora.without_adapters(params), lora.split(params)[0])
    assert merged["layers"].keys() == nnx.to_pure_dict(nnx.state(tiny_model()))["layers"].keys()
    merged_model = nnx.merge(nnx.graphdef(tiny_model()), merged)
    np.testing.assert_allclose(logits_of(merged_model, tokens), adapted, atol=1e-5)
    assert not np.allclose(adapted, plain, atol=1e-2)


def test_adapters_of_a_damaged_config_are_one_line(tmp_path):
    section = {"rank": 4, "alpha": 8.0, "targets": ".*_proj", "full": ""}
    config = {"lora": section, "init_from": "there", "steps": 3, "objective": "ar"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_adapters(epath.Path(tmp_path)) == (Lora(**section), epath.Path("there"))
    assert read_objective(epath.Path(tmp_path)) == "ar"
    (tmp_path / "config.json").write_text(json.dumps(config | {"lora": section | {"targets": []}}))
    with pytest.raises(UserError, match="config.json cannot be read: lora.targets: "):
        read_adapters(epath.Path(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps(config | {"objective": []}))
    with pytest.raises(UserError, match="config.json cannot be read: objective: "):
        read_objective(epath.Path(tmp_path))
