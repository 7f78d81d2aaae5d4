"""Mixtures of experts: the same as a loop over all of them, on one device and on meshes, in training and decoding."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import PROMPTS, all_but, causal, config_with, logits_of, settings, sharp_model, tiny_config, tiny_model
from flax import nnx
from test_huggingface import saved
from test_train_step import assert_same_training, train

from refusion_jax import UserError, decode, load_model
from refusion_jax.config import check
from refusion_jax.decoding.requests import prepare
from refusion_jax.distributed import sharding
from refusion_jax.model import experts, huggingface, int8
from refusion_jax.model.flops import count_weights, train_flops_per_token
from refusion_jax.model.lora import Lora, add_adapters
from refusion_jax.model.transformer import Transformer
from refusion_jax.planning.report import plan_train
from refusion_jax.systems.registry import find_system

E, CHOSEN, D, F, B, T = 8, 3, 16, 24, 8, 12
MOE = {"family": "qwen3_moe", "num_experts": E, "num_experts_per_tok": CHOSEN, "moe_intermediate_size": F}
GROUPS, OPEN, SCALE = 4, 2, 2.5
LLADA2 = MOE | {"family": "llada2_moe", "n_group": GROUPS, "topk_group": OPEN, "routed_scaling_factor": SCALE}
LLADA2 |= {"num_hidden_layers": 3, "first_k_dense_replace": 1, "num_shared_experts": 2, "partial_rotary_factor": 0.5}
SHAPES = pytest.mark.parametrize("shape", [MOE, LLADA2], ids=lambda shape: shape["family"])
MESHES = [{}, {"expert": 2, "fsdp": 2, "tensor": 2}, {"expert": 4, "sequence": 2}]


def inputs(config):
    keys = jax.random.split(jax.random.key(0), 6)
    shapes = {"router": (D, E), "gate_proj": (E, D, F), "up_proj": (E, D, F), "down_proj": (E, F, D)}
    shapes |= {"expert_bias": (E,)} if config == SIGMOID else {}
    weights = {name: jax.random.normal(key, shapes[name]) / 4 for name, key in zip(shapes, keys[1:], strict=False)}
    return jax.random.normal(keys[0], (B, T, D)), weights


def best_by_softmax(logits, w):
    """The weight of every expert, 0 for those that were not chosen."""
    scores = jax.nn.softmax(logits)
    weight = jnp.where(scores >= jnp.sort(scores)[..., -CHOSEN, None], scores, 0)
    return weight / jnp.sum(weight, axis=-1, keepdims=True)


def best_by_sigmoid(logits, w):
    """The same of groups: the bias counts for the choice, of groups by their best two and then of experts."""
    scores = jax.nn.sigmoid(logits)
    rank = (scores + w["expert_bias"][None, None]).reshape(*scores.shape[:2], GROUPS, -1)
    best = jnp.sum(jnp.sort(rank)[..., -2:], axis=-1, keepdims=True)
    rank = jnp.where(best >= jnp.sort(best, axis=-2)[..., -OPEN, None, :], rank, -1e9).reshape(scores.shape)
    weight = jnp.where(rank >= jnp.sort(rank)[..., -CHOSEN, None], scores, 0)
    return SCALE * weight / jnp.sum(weight, axis=-1, keepdims=True)


def loop(x, w):
    """Each expert on all tokens; those that did not choose it weigh 0."""
    weight = (best_by_sigmoid if "expert_bias" in w else best_by_softmax)(x @ w["router"], w)
    y = jnp.zeros_like(x)
    for e in range(E):
        own = weight[..., e, None]
        y += own * ((jax.nn.silu(x @ w["gate_proj"][e]) * (x @ w["up_proj"][e])) @ w["down_proj"][e])
    return y


SOFTMAX, SIGMOID = tiny_config(**MOE), tiny_config(**LLADA2)
TPU, CPU = 1, 4  # tiles of each
# Each kind of router with each tile, and each mesh but the last with both.
CASES = [(SOFTMAX, MESHES[0], CPU), (SOFTMAX, MESHES[1], TPU), (SOFTMAX, MESHES[2], TPU)]
CASES += [(SIGMOID, MESHES[0], TPU), (SIGMOID, MESHES[1], CPU)]


@functools.cache
def value_and_gradients(config, mixture):
    """Of a mixture's outputs and weights."""
    return jax.jit(jax.value_and_grad(lambda x, w: jnp.sum(jnp.sin(mixture(x, w))), (0, 1)))(*inputs(config))


@pytest.mark.parametrize(
    ("config", "mesh", "tile"), all_but(CASES[::3], CASES), ids=lambda x: getattr(x, "family", str(x))
)
def test_value_and_gradient_are_those_of_a_loop_over_experts(config, mesh, tile, monkeypatch):
    monkeypatch.setattr(experts, "_tile", lambda _: tile)
    devices = jax.devices()[: math.prod(mesh.values())]

    def ours(x, w):
        return experts.mixture(x, w, config, jax.nn.silu, None)[0]

    with jax.default_matmul_precision("highest"):
        expected = value_and_gradients(config, loop)
        with jax.set_mesh(sharding.make_mesh(mesh, devices)):
            found = value_and_gradients(config, ours)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * np.abs(b).max()), found, expected)


FULL = {"remat": "full", "accumulation": 2, "mesh.expert": 2, "mesh.fsdp": 4}
PRODUCTS = {"remat": "products", "accumulation": 4, "mesh.expert": 2, "mesh.tensor": 2, "mesh.sequence": 2}


@pytest.mark.parametrize(("shape", "how"), [pytest.param(SOFTMAX, PRODUCTS, marks=pytest.mark.slow), (SIGMOID, FULL)])
@pytest.mark.thorough
def test_neither_devices_nor_accumulation_nor_remat_change_a_step(shape, how):
    step = functools.partial(train, 1, dataclasses.replace(shape, router_aux_loss_coef=0.1), learning_rate=1e-6)
    (metrics,), state = step()
    assert_same_training(step(), step(**how))
    assert metrics["loss_router"] > CHOSEN  # where all have as much to do it is that
    gradient = state.opt_state[1][0].mu
    assert np.abs(gradient["layers"]["router"]).max() > 0
    assert not np.any(gradient["layers"].get("expert_bias", 0))  # it counts for the choice alone, and stays as it is


@pytest.mark.filterwarnings("ignore")  # of theirs
def test_the_router_loss_is_that_of_transformers_over_real_tokens(tmp_path):
    torch = pytest.importorskip("torch", reason="pip install -e '.[compare]' brings torch and transformers")
    transformers = pytest.importorskip("transformers")
    theirs = transformers.Qwen3MoeForCausalLM.from_pretrained(saved(tmp_path / "theirs", **MOE), dtype=torch.float32)
    tokens = np.random.default_rng(0).integers(0, 30, (2, 17))
    real = np.arange(17)[None] < np.array([[17], [11]])
    with torch.no_grad():
        expected = theirs(
            torch.tensor(tokens), attention_mask=torch.tensor(real.astype(int)), output_router_logits=True
        )
    tokens, places, real = (jnp.asarray(x, jnp.int32) for x in (tokens, np.broadcast_to(np.arange(17), (2, 17)), real))
    _, load = load_model(tmp_path / "theirs").hidden_and_load(tokens, places, causal(real))
    found = jnp.sum(experts.balance(load.counts, CHOSEN) * load.probabilities)
    np.testing.assert_allclose(found, expected.aux_loss.numpy(), rtol=1e-5)


def test_configs_and_adapters_that_cannot_be_are_refused_in_one_line():
    with pytest.raises(UserError, match=r"--config.model.num_experts=0 must be 1 to 16384 for family=qwen3_moe"):
        check(config_with(**{"model.family": "qwen3_moe"}))
    model = tiny_model(**MOE)
    with pytest.raises(
        UserError, match=r"lora.targets=.\*_proj: experts have no adapters, and gate_proj is theirs; of"
    ):
        add_adapters(model.layers, Lora(2, 4.0, ".*_proj"), nnx.Rngs(0))
    with pytest.raises(UserError, match=r"lora.rank=2: first_k_dense_replace=1: models whose first layers have no"):
        add_adapters(tiny_model(**LLADA2).layers, Lora(2, 4.0, "q_proj"), nnx.Rngs(0))
    add_adapters(model.layers, Lora(2, 4.0, "(q|k|v|o)_proj"), nnx.Rngs(0))
    assert logits_of(model, [[1] * 4]).shape == (1, 4, 32)


@pytest.mark.parametrize(
    ("shape", "weights"), [pytest.param(MOE, "same", marks=pytest.mark.slow), (LLADA2, "int8")], ids=["qwen3", "llada2"]
)
@pytest.mark.thorough
def test_decoding_with_a_cache_is_decoding_without_one_also_on_a_mesh(shape, weights, tmp_path):
    huggingface.save(sharp_model(**shape), tmp_path / "model")
    own = settings("ar", new=8)
    model = load_model(tmp_path / "model", weights=weights)
    expected = decode(model, PROMPTS, own)
    for request, tokens in zip(prepare(PROMPTS, own, model.config), expected.tokens, strict=True):
        assert tokens == find_system("ar").references["ar"](model, request)["tokens"]
    mesh = sharding.make_mesh({"expert": 2, "fsdp": 2, "tensor": 2})
    assert decode(load_model(tmp_path / "model", mesh=mesh, weights=weights), PROMPTS, own) == expected


@SHAPES
@pytest.mark.thorough
def test_experts_in_int8_are_those_of_the_rounded_weights(shape):
    model = tiny_model(**shape)
    narrow = model.rounded("int8")
    state = nnx.to_pure_dict(nnx.state(narrow))
    state = jax.tree.map(lambda w: int8.widened(w, jnp.float32), state, is_leaf=int8.is_rounded)
    wide = nnx.merge(nnx.graphdef(model), state)
    logits = [logits_of(m, np.arange(24).reshape(2, 12)) for m in (narrow, wide, model)]
    np.testing.assert_allclose(*logits[:2], atol=1e-4)
    assert np.abs(logits[0] - logits[2]).max() > 1e-3


@SHAPES
def test_flops_are_those_of_the_experts_that_a_token_goes_to(shape):
    sparse = tiny_config(**shape, tie_word_embeddings=True)
    total, active = count_weights(sparse)
    assert total - active == 2 * (E - CHOSEN) * 3 * D * F  # both have two layers with experts
    model = nnx.eval_shape(lambda: Transformer(sparse, nnx.Rngs(0)))
    of_products = [
        p.size
        for p in jax.tree.leaves(nnx.state(model), is_leaf=lambda p: isinstance(p, nnx.Variable))
        if not {"norm", "bias"} & set(p.logical_axes)
    ]
    assert total == sum(of_products)
    assert train_flops_per_token(sparse, 0) == 6 * active


@pytest.mark.tpu_compile
@pytest.mark.usefixtures("tpu_compiler")
@pytest.mark.thorough
def test_a_step_with_experts_on_64_chips_compiles_and_counts_what_the_model_needs():
    """FLOPs are counted as if all experts had as much to do."""
    sizes = {"hidden_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 8, "head_dim": 128} | MOE
    sizes |= {"num_experts": 64, "num_experts_per_tok": 4, "moe_intermediate_size": 512, "vocab_size": 8192}
    mesh = {"mesh.expert": 4, "mesh.fsdp": 16}
    config = config_with(
        **{f"model.{name}": value for name, value in sizes.items()}, **mesh, batch_size=128, row_length=1024,
        dtype="bfloat16", remat="full",
    )  # fmt: skip
    record = plan_train(config, "v5p:4x4x4", 1, memory_only=True)
    assert record["fits"]
    assert record["gathers_by_all_reduce"] == 0
    assert record["flops_per_chip"] == pytest.approx(record["model_flops_per_chip"] * 4 / 3, rel=0.1)  # recomputed
    total, active = 4 * 3 * 1024 * 512 * 64, 4 * 3 * 1024 * 512 * 4
    assert record["weights"] - record["active_weights"] == total - active
    moved = sum(c["bytes"] for c in record["collectives"])
    assert moved < 1.1e9  # 2.5e9 where experts are gathered as other weights are, with mesh.expert=1
