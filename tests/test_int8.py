"""Weights and cache in int8: how far off they are, that they take half, and that all else stays as it is."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import PROMPTS, equipped, settings, sharp_model, tiny_config, tiny_model
from flax import nnx
from helpers import SHIPPED

from refusion_jax import decode, load_model
from refusion_jax.decoding import cache as kv
from refusion_jax.decoding.requests import prepare
from refusion_jax.distributed.sharding import make_mesh
from refusion_jax.model.abstract import abstract_transformer
from refusion_jax.model.int8 import Int4Array, Int8Array, widened
from refusion_jax.systems import registry

QUICK = ("ar",)  # the others compile for minutes together
BOTH = {"weights": "int8", "cache": "int8"}


def nbytes(tree) -> int:
    return sum(x.size * jnp.dtype(x.dtype).itemsize for x in jax.tree.leaves(tree))


def test_every_output_channel_of_every_product_has_a_scale_of_its_own():
    """What is rounded is off by half a step of its own channel at most, however different the channels are."""
    model = tiny_model()
    model.layers.o_proj[...] *= jnp.linspace(0.01, 10, 16)[None, None, None]
    model.embed_tokens[...] *= jnp.linspace(0.01, 10, 32)[:, None]
    rounded = model.rounded("int8")
    shapes = {"q_proj": (2, 1, 4, 8), "o_proj": (2, 1, 1, 16), "down_proj": (2, 1, 16), "up_proj": (2, 1, 32)}
    pairs = [(getattr(model.layers, name), getattr(rounded.layers, name), shape) for name, shape in shapes.items()]
    for before, after, shape in [*pairs, (model.embed_tokens, rounded.embed_tokens, (32, 1))]:
        before, after = before.get_value(), after.get_value()
        assert after.scale.shape == shape
        assert np.all(np.abs(widened(after, jnp.float32) - before) <= 0.501 * after.scale)
        summed = [axis for axis, size in enumerate(shape) if size == 1 and before.shape[axis] > 1]
        assert np.all(np.max(np.abs(after.values), axis=tuple(summed)) == 127)
    norm = rounded.layers.q_norm.get_value()
    assert norm.dtype == "float32"


def test_weights_and_cache_of_an_8b_model_are_half_of_bfloat16s():
    c = tiny_config(
        vocab_size=151_936, hidden_size=4096, num_hidden_layers=36, num_attention_heads=32, num_key_value_heads=8,
        head_dim=128, intermediate_size=12_288,
    )  # fmt: skip
    mesh = make_mesh({"tensor": 8})
    wide, narrow = (abstract_transformer(c, "bfloat16", mesh, weights=kept)[1] for kept in ("same", "int8"))
    assert nbytes(narrow) < 0.501 * nbytes(wide)
    scale = narrow["layers"]["down_proj"].scale  # of the whole hidden size on every chip: its axis is not split
    assert scale.sharding.shard_shape(scale.shape) == scale.shape == (36, 1, 4096)
    heads = narrow["layers"]["q_proj"].scale
    assert heads.sharding.shard_shape(heads.shape) == (36, 1, 4, 128)
    assert kv.bytes_per_token(c, jnp.dtype("int8")) / kv.bytes_per_token(c, jnp.dtype("bfloat16")) < 0.52


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_a_rounded_cache_holds_what_the_estimate_says(dtype):
    model = tiny_model(head_dim=64).rounded(cache=dtype)  # two groups of int4, with a scale each
    cache = kv.Cache.empty(model, 3, 10)
    assert isinstance(cache.entries.keys, Int8Array)
    assert nbytes(cache.entries) == 30 * kv.bytes_per_token(model.config, model.cache_dtype)


def test_rounded_keys_and_values_are_seen_alike_in_whichever_forward():
    """Eight tokens in one forward, or five and then three, on a cache in int8: so no answer depends on the chunks."""
    model, tokens = tiny_model(), jax.random.randint(jax.random.key(0), (2, 8), 5, 29)
    positions = jnp.broadcast_to(jnp.arange(8), (2, 8))
    below = jnp.broadcast_to(jnp.tril(jnp.ones((8, 8), bool)), (2, 8, 8))

    @functools.partial(jax.jit, static_argnums=1)
    def logits(model, cuts=()):
        cache, parts = kv.Cache.empty(model, 2, 16), []
        for begin, end in zip((0, *cuts), (*cuts, 8), strict=True):
            size = end - begin
            part, cache = kv.extend(model, cache, tokens[:, begin:end], positions[:, begin:end], below[:, :size, :size])
            cache = kv.commit(cache, jnp.full(2, size))
            parts.append(part)
        return jnp.concatenate(parts, axis=1)

    rounded = model.rounded(cache="int8")
    np.testing.assert_allclose(logits(rounded, (5,)), logits(rounded), atol=2e-5)
    off = np.abs(logits(rounded) - logits(model)).max()
    assert 1e-4 < off < 0.1 * np.abs(logits(model)).max()


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in registry.decoders()]
)
def test_a_decoder_in_int8_is_its_plain_reference_in_int8(name):
    system = next(s for s in registry.systems().values() if name in s.decoders)
    model, own = equipped(sharp_model(), name), settings(name, **BOTH)
    out, compared = decode(model, PROMPTS, own), 0
    for i, request in enumerate(prepare(PROMPTS, own, model.config)):
        expected = system.references[name](model, request)
        if expected["margin"] >= 1e-5:
            compared += 1
            assert (out.tokens[i], out.commit_order[i]) == (expected["tokens"], expected["commit_order"])
    assert compared > 3
    assert decode(model, PROMPTS, settings(name)).tokens != out.tokens or name != "ar"  # it has been rounded


@pytest.mark.thorough
def test_a_model_is_rounded_as_it_is_read_and_split_over_a_mesh():
    model, own = load_model(SHIPPED / "model"), settings("ar", new=8, **BOTH)
    expected = decode(model, PROMPTS[:3], own)
    mesh = make_mesh({"data": 2, "tensor": 2}, jax.devices()[:4])
    read = load_model(SHIPPED / "model", mesh=mesh, weights="int8")
    assert nbytes(nnx.state(read)) < 0.35 * nbytes(nnx.state(model))  # of float32
    assert decode(read, PROMPTS[:3], dataclasses.replace(own, weights="same")) == expected
    assert decode(load_model(SHIPPED / "model", weights="int8"), PROMPTS[:3], own) == expected


@pytest.mark.parametrize("axis", [1, 2, -1])
def test_int4_keeps_the_bound_of_its_groups(axis):
    x = np.random.default_rng(0).standard_t(3, (2, 64, 6, 32)).astype(np.float32)
    rounded = Int4Array.of(jax.numpy.asarray(x), [axis])
    assert rounded.values.size * 2 == x.size
    error = np.moveaxis(np.abs(np.asarray(rounded.widened(np.float32)) - x), axis, -1)
    size = 32 if x.shape[axis] % 32 == 0 else x.shape[axis]
    error, x = (each.reshape(-1, size) for each in (error, np.moveaxis(x, axis, -1)))
    assert np.all(error <= np.abs(x).max(axis=1, keepdims=True) / 14 * (1 + 1e-5))
