import contextlib
import dataclasses
from types import SimpleNamespace

import jax
import pytest
from conftest import config_with, tiny_config
from etils import epath
from flax import nnx
from helpers import CONFIGS, load_config

from refusion_jax import DecodeSettings, UserError, config
from refusion_jax.cli.settings import declared
from refusion_jax.config.keys import keys
from refusion_jax.config.model import adopt_steps, model_config
from refusion_jax.config.run_config import check_same_run, claim
from refusion_jax.decoding.requests import prepare
from refusion_jax.distributed import sharding
from refusion_jax.model.transformer import Transformer
from refusion_jax.systems.api import all_settings
from refusion_jax.systems.registry import decoders, trainable


@pytest.mark.parametrize("name", CONFIGS)
def test_every_config_file_passes_the_checks_and_keeps_to_the_known_keys(name):
    config.check(load_config(name)())


def test_a_variant_changes_the_config():
    assert load_config("small")("stdlib").data.path == "stdlib"


@pytest.mark.parametrize("name", trainable())
def test_the_quickstart_has_a_variant_for_every_system(name):
    made = load_config("quickstart")(name)
    config.check(made)
    assert made.objective == name


def test_decoders_go_by_the_block_that_their_model_was_trained_with():
    """Through the model of the run; what the user sets goes first, and without either it is the paper's."""
    made = config_with(objective="block_diffusion", **{"block_diffusion.block_size": 8})
    assert model_config(made).block_size == 8
    assert model_config(config_with(objective="llada")).block_size == 0
    for method, name, untold, trained in (
        ("block_diffusion", "block_size", 32, 8),
        ("d2f", "block_length", 16, 8),
        ("idlm", "stride", 4, 9),
    ):
        for block, given, expected in ((0, {}, untold), (8, {}, trained), (8, {name: 5}, 5)):
            requests = prepare([[5, 6]], DecodeSettings(method, **given), tiny_config(block_size=block))
            assert getattr(requests[0].settings, name) == expected


def test_help_tells_which_decoders_have_a_setting_and_what_differs_between_them():
    told = all_settings()
    assert told["slot_size"].help == "dense, dense_plan, refusion, sequential: Tokens per slot"
    assert told["block_length"].help.startswith("fast_dllm: Tokens of a block")  # what differs goes first
    assert "0: the whole answer (default: 32); d2f: " in told["block_length"].help
    assert not told["max_new_tokens"].help.startswith("refusion")  # all have it


# Parameters with and without the embeddings, in billions, as Qwen3's technical report rounds them (arXiv 2505.09388).
PUBLISHED = {"0.6b": (0.6, 0.44), "1.7b": (1.7, 1.4), "4b": (4.0, 3.6), "8b": (8.2, 6.95), "14b": (14.8, 13.2)}
PUBLISHED["32b"] = (32.8, 31.2)
EXACT = {"0.6b": 596_049_920, "1.7b": 1_720_574_976, "4b": 4_022_468_096, "8b": 8_190_735_360}
EXACT |= {"14b": 14_768_307_200, "32b": 32_762_123_264}


@pytest.mark.parametrize("size", PUBLISHED)
def test_the_real_sizes_are_the_published_ones(size):
    made = load_config("refusion_8b")(size)
    config.check(made)
    model = tiny_config(**made.model)
    weights = nnx.to_pure_dict(nnx.state(nnx.eval_shape(lambda: Transformer(model, nnx.Rngs(0)))))
    total = sum(x.size for x in jax.tree.leaves(weights))
    outer = weights["embed_tokens"].size * (1 if model.tie_word_embeddings else 2)
    assert total == EXACT[size]
    assert (total / 1e9, (total - outer) / 1e9) == pytest.approx(PUBLISHED[size], abs=0.051)


def test_every_key_and_every_decode_setting_has_a_meaning():
    assert all(own.help for own in (*keys().values(), *all_settings().values()))
    for decoder in decoders().values():
        assert set(declared(decoder.settings)) == {field.name for field in dataclasses.fields(decoder.settings)}


def test_the_keys_that_must_hold_are_there():
    flat = set(config.flatten(config.default_config().to_dict()))
    promised = "seed steps batch_size row_length objective learning_rate schedule weight_decay clip_norm accumulation"
    promised += " remat dtype slots.sizes slots.eps slots.mdm_weight data.path data.tokenizer checkpoint.every"
    promised += " checkpoint.keep log_every mesh.replica mesh.data mesh.fsdp mesh.tensor mesh.sequence"
    promised += " model.hidden_size model.num_hidden_layers model.num_attention_heads model.num_key_value_heads"
    promised += " model.head_dim model.intermediate_size model.vocab_size model.rope_theta model.rms_norm_eps"
    assert {*promised.split(), "model.tie_word_embeddings"} <= flat


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"objective": "gan"}, "objective=gan: unknown; known: ar, .*refusion"),
        ({"steps": 0}, "steps=0: must be at least 1"),
        ({"eval.decode": "temprature=1"}, "'temprature' is not a setting; did you mean temperature?"),
        ({"learning_rate": 0.0}, "learning_rate=0.0: must be above 0"),
        ({"batch_size": 30, "accumulation": 4}, "batch_size=30: must be a multiple of accumulation=4"),
        ({"slots.sizes": (4, 0)}, "slots.sizes=.*one or more whole sizes of 1 to"),
        ({"slots.eps": 1.0}, "slots.eps=1.0: must be below 1"),
        ({"profile_steps": (3, 2)}, "profile_steps=.*must be a first and a last step"),
        ({"profile_steps": (1001, 1002)}, "profile_steps=.*must begin within steps=1000"),
        ({"model.rope_scaling": (float("inf"),)}, "rope_scaling=.*must be 1 or 4 numbers above 0"),
        ({"model.rope_scaling": (8.0, 4.0, 1.0, 64.0)}, "rope_scaling=.*: low_freq_factor must be less than high"),
        ({"model.local_rope": (1e4, 6)}, r"model.local_rope=\(10000.0, 6\): family=qwen3 has none"),
        ({"model.query_pre_attn_scalar": 9}, "model.query_pre_attn_scalar=9: family=qwen3 has none"),
        ({"model.family": "smollm3"}, "model.no_rope_layer_interval=0 must be 1 to 32768 for family=smollm3"),
        ({"warmup_steps": 2000}, "warmup_steps=2000: must not exceed steps=1000"),
        ({"schedule": "wsd", "warmup_steps": 1000}, "warmup_steps=1000: must be below steps=1000 for schedule=wsd"),
        ({"schedule": "wsd"}, "decay_steps=0: must be 1 to 1000 for schedule=wsd"),
        ({"model.num_key_value_heads": 3}, "num_attention_heads=4: must be a multiple of num_key_value_heads=3"),
        ({"model.head_dim": 7}, "model.head_dim=7: must be even"),
        ({"mesh.data": -1}, "mesh.fsdp=-1: at most one axis can be -1, and mesh.data is"),
        ({"mesh.tensor": 0}, "mesh.tensor=0: must be at least 1, or -1"),
    ],
)
def test_an_impossible_value_is_refused_by_name(changes, said):
    with pytest.raises(UserError, match=said):
        config.check(config_with(**changes))


def test_what_fits_into_the_steps_of_epochs_is_decided_by_the_rows():
    c = config_with(epochs=2.0, warmup_steps=2000, batch_size=8)
    config.check(c)
    adopt_steps(c, rows=10_000)
    assert c.steps == 2500
    with pytest.raises(UserError, match="warmup_steps=2000: must not exceed steps=25"):
        adopt_steps(c, rows=100)


def test_a_store_that_is_not_reached_is_refused_by_its_key():
    with pytest.raises(UserError, match="--config.data.path=az://y cannot be reached"):
        config.check_stores(config_with(**{"data.path": "my/rows, az://y"}))


def test_a_missing_key_is_refused():
    c = config_with()
    del c.model.head_dim
    with pytest.raises(UserError, match="--config: model.head_dim is missing"):
        config.check(c)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"batch_size": 12}, r"batch_size=12: does not divide into 8 parts \(mesh.replica x mesh.data x"),
        ({"batch_size": 40, "accumulation": 2}, "x accumulation.*the next size that does is 48"),
        ({"mesh.tensor": 8, "model.num_attention_heads": 8}, "num_key_value_heads=2: does not divide into 8 parts"),
        ({"mesh.sequence": 8, "row_length": 1001}, "row_length=1001: does not divide.*the next size that does is 1008"),
        ({"mesh.tensor": 2, "model.vocab_size": 4095}, "model.vocab_size=4095.*the next size that does is 4096"),
        ({"mesh.fsdp": 8, "model.hidden_size": 100}, "model.hidden_size=100: does not divide into 8 parts"),
        (
            {"mesh.sequence": 8, "row_length": 1024, "objective": "dense", "dense.copies": 0.3},
            "row_length=1024: objective=dense makes inputs of 1332 tokens of it, not divisible by mesh.sequence=8",
        ),
    ],
)
def test_sizes_that_the_mesh_does_not_divide_are_refused_with_the_next_that_works(keys, said):
    c = config_with(**keys)
    with pytest.raises(UserError, match=said):
        config.check_mesh(c, sharding.make_mesh(c.mesh))


def test_a_mesh_takes_all_devices_or_is_refused():
    sizes = dict.fromkeys(sharding.MESH_AXES, 1)
    mesh = sharding.make_mesh(sizes | {"fsdp": -1, "tensor": 2})
    assert dict(mesh.shape) == sizes | {"fsdp": 4, "tensor": 2}
    assert sharding.describe(mesh) == "8 cpu (fsdp=4, tensor=2)"
    assert sharding.describe(sharding.make_mesh(sizes, jax.devices()[:1])) == "1 cpu"
    for shape, said in (
        ({"fsdp": 3}, "mesh.fsdp=3 does not multiply to the 8 devices here; one axis may be -1"),
        ({"fsdp": -1, "tensor": 3}, "mesh.fsdp=-1, mesh.tensor=3 does not multiply to the 8 devices here$"),
        ({}, "a mesh of one dev"),
    ):
        with pytest.raises(UserError, match=said):
            sharding.make_mesh(sizes | shape)


def test_a_run_goes_on_whose_config_has_a_key_that_is_gone_if_it_changes_nothing(tmp_path):
    """Every run's config holds the keys of all systems; of those that still are, none may differ."""
    was = config.default_config()
    with was.unlocked():
        was.llada.eps, was.card.gone, was.versions = 1e-3, True, {"jax": "0.0.1"}
    (tmp_path / "config.json").write_text(was.to_json())
    assert check_same_run(epath.Path(tmp_path), config.default_config()) == []
    with pytest.raises(UserError, match=r"differs in card.beta, seed\): .* or another --workdir$"):
        check_same_run(epath.Path(tmp_path), config_with(seed=1, **{"card.beta": 2.0}))
    with pytest.raises(UserError, match="or --allow_change=clip_norm,data.examples$"):
        check_same_run(epath.Path(tmp_path), config_with(clip_norm=2.0, **{"data.examples": 9}))
    for eps, said in ((1e-3, ""), (0.5, "another version, with llada.eps=0.5, which this one does not have")):
        was.objective, was.llada.eps = "llada", eps
        (tmp_path / "config.json").write_text(was.to_json())
        with pytest.raises(UserError, match=said) if said else contextlib.nullcontext():
            check_same_run(epath.Path(tmp_path), config_with(objective="llada"))
    was.steps = None
    (tmp_path / "config.json").write_text(was.to_json())
    with pytest.raises(UserError, match="config.json cannot be read: steps is null"):
        check_same_run(epath.Path(tmp_path), config.default_config())


def test_a_run_goes_on_without_the_keys_that_have_no_effect_in_it(tmp_path):
    """Earlier versions took them on the command line, where they are refused."""
    claim(epath.Path(tmp_path), config_with(optimizer="adafactor", beta1=0.5), tiny_config(), SimpleNamespace(files={}))
    assert check_same_run(epath.Path(tmp_path), config_with(optimizer="adafactor")) == []
    with pytest.raises(UserError, match=r"differs in beta1, optimizer\)"):
        check_same_run(epath.Path(tmp_path), config_with())


def test_a_run_goes_on_from_another_directory_from_where_its_models_have_other_paths(tmp_path, monkeypatch):
    (tmp_path / "below").mkdir()
    monkeypatch.chdir(tmp_path)
    own = config_with(objective="dflash", init_from="base", **{"dflash.reads": "target"})
    claim(epath.Path("run"), own, tiny_config(), SimpleNamespace(files={}))
    monkeypatch.chdir(tmp_path / "below")
    moved = {"init_from": "../base", "dflash.reads": "../target"}
    assert check_same_run(epath.Path("../run"), config_with(objective="dflash", **moved)) == []
    with pytest.raises(UserError, match=r"differs in dflash.reads"):
        check_same_run(epath.Path("../run"), config_with(objective="dflash", **moved | {"dflash.reads": "target"}))
