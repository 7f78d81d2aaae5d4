"""Low-rank adapters: what they compute, where they live, and what they cost."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import config_with, logits_of, tiny_config, tiny_model
from etils import epath
from flax import nnx

from refusion_jax import UserError
from refusion_jax.checkpoints.run_directory import read_adapters, read_objective
from refusion_jax.distributed import sharding
from refusion_jax.model.lora import INPUTS, Lora, add_adapters
from refusion_jax.training.program import train_program


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


def test_only_what_is_trained_has_optimizer_state_and_float32_and_all_of_it_is_split_as_its_weight():
    changes = {"lora.rank": 4, "lora.full": "final_norm", "init_from": "somewhere", "dtype": "bfloat16"}
    shape = tiny_config(num_attention_heads=4, num_key_value_heads=2)
    config = config_with(**changes, batch_size=8, row_length=32)
    mesh = sharding.make_mesh({"fsdp": 2, "tensor": 2}, jax.devices()[:4])
    program = train_program(config, shape, mesh)
    state, lora = program.target, program.lora
    assert state.params.keys() == {"layers", "final_norm"}
    assert state.params["layers"].keys() == {f"{name}_{side}" for name in INPUTS for side in "ab"}
    assert {x.dtype for x in jax.tree.leaves(state.params)} == {jnp.dtype("float32")}
    assert {x.dtype for x in jax.tree.leaves(state.frozen)} == {jnp.dtype("bfloat16")}
    trained, moments = (sum(x.size for x in jax.tree.leaves(t)) for t in (state.params, state.opt_state))
    assert 2 * trained <= moments < 2 * trained + 8  # two moments of each, and a few counters

    def where(tree):
        return jax.tree.map(lambda x: (x.shape, x.sharding.is_fully_replicated), tree)

    assert where(lora.targets_like(program.base)) == where(state.params)
    found = state.params["layers"]["q_proj_a"].sharding.shard_shape(state.params["layers"]["q_proj_a"].shape)
    assert found[1] * 2 == shape.hidden_size
    found = state.params["layers"]["q_proj_b"].sharding.shard_shape(state.params["layers"]["q_proj_b"].shape)
    assert found[2] * 2 == shape.num_attention_heads


@pytest.mark.parametrize(("key", "value"), [("rank", -4), ("alpha", float("nan")), ("targets", "("), ("full", [])])
def test_adapters_of_a_doctored_run_are_one_line(key, value, tmp_path):
    section = {"rank": 4, "alpha": 8.0, "targets": ".*_proj", "full": ""}
    config = {"lora": section, "init_from": "there", "steps": 3, "objective": "ar"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_adapters(epath.Path(tmp_path)) == (Lora(**section), epath.Path("there"))
    assert read_objective(epath.Path(tmp_path)) == "ar"
    (tmp_path / "config.json").write_text(json.dumps(config | {"lora": section | {key: value}}))
    with pytest.raises(UserError, match=f"config.json cannot be read: lora.{key}: "):
        read_adapters(epath.Path(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps(config | {"objective": [value]}))
    with pytest.raises(UserError, match="config.json cannot be read: objective: "):
        read_objective(epath.Path(tmp_path))
