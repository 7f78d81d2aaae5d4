"""The transformer, its weights, cache and head in int8, its layers as one CPU decodes them; the checker of shapes."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from beartype.roar import BeartypeCallHintViolation
from conftest import PROMPTS, causal, equipped, forward, logits_of, settings, sharp_model, tiny_config, tiny_model
from flax import nnx
from helpers import SHIPPED
from jaxtyping import TypeCheckError

from refusion_jax import UserError, decode, load_model
from refusion_jax.batch.rows import Rows
from refusion_jax.batch.visibility import CAUSAL
from refusion_jax.decoding import cache as kv
from refusion_jax.decoding import queue
from refusion_jax.decoding.requests import prepare
from refusion_jax.distributed.sharding import make_mesh, sharding
from refusion_jax.model import flops, layers, one_cpu
from refusion_jax.model.approximate_head import rounded_head, shortlisted_logits
from refusion_jax.model.attention import attention
from refusion_jax.model.families import FAMILIES
from refusion_jax.model.int8 import Int4Array, Int8Array, widened
from refusion_jax.model.layers import linear_outputs_first, rope_rotation, rotate
from refusion_jax.model.lora import INPUTS, Lora, add_adapters
from refusion_jax.model.stack import norm
from refusion_jax.model.transformer import Transformer, abstract_transformer
from refusion_jax.systems import registry
from refusion_jax.systems.api import decoder_for

TOKENS = jnp.array([[5, 6, 7, 8, 9, 10, 11, 12, 0, 0]])
POSITIONS = jnp.array([[0, 3, 1, 2, 0, 2, 1, 3, 0, 1]])  # physical order is not text order
SEGMENTS = jnp.array([[1, 1, 1, 1, 2, 2, 2, 2, 0, 0]])


def test_attention_equals_a_plain_loop():
    q, k, v = (np.array(jax.random.normal(jax.random.key(i), (2, 5, n, 8))) for i, n in enumerate((6, 3, 3)))
    mask = np.random.default_rng(0).random((2, 5, 5)) < 0.6
    mask |= np.eye(5, dtype=bool)
    got = jax.jit(attention)(q, k, v, mask)
    for b, t, n in np.ndindex(2, 5, 6):
        keys, values = k[b, mask[b, t], n // 2], v[b, mask[b, t], n // 2]
        weights = np.exp(keys @ q[b, t, n] / np.sqrt(8))
        np.testing.assert_allclose(got[b, t, n], weights @ values / weights.sum(), atol=1e-5)


def test_attention_of_a_query_that_sees_nothing_is_finite_with_finite_gradients():
    q = jnp.ones((1, 2, 2, 4))
    mask = jnp.array([[[True, False], [False, False]]])
    summed = jax.value_and_grad(lambda q, k, v: attention(q, k, v, mask).sum(), argnums=(0, 1, 2))
    value, grads = jax.jit(summed)(q, q, q)
    assert all(np.isfinite(x).all() for x in (value, *grads))


@pytest.mark.parametrize("kind", ["cpu", "TPU v5"])
def test_rotation_and_its_gradient_are_those_of_complex_numbers(kind, monkeypatch):
    """The halves of the first 4 values of a head are real and imaginary parts; the last 2 stay."""
    monkeypatch.setattr(layers, "device_kind_here", lambda: kind)
    x = jax.random.normal(jax.random.key(0), (2, 3, 5, 6))
    w = jax.random.normal(jax.random.key(1), x.shape)
    rotation = rope_rotation(jnp.array([[3, 0, 7], [1, 2, 900]]), size=4, theta=100.0)

    def expected(x):
        turned = (x[..., :2] + 1j * x[..., 2:4]) * (rotation[0] + 1j * rotation[1])
        return jnp.concatenate([turned.real, turned.imag, x[..., 4:]], axis=-1)

    np.testing.assert_allclose(rotation[0][0, 0, 0], np.cos([3.0, 3.0 / 10]), rtol=1e-6)

    def with_gradient(turn):
        turned, pull = jax.vjp(turn, x)
        return turned, *pull(w)

    got, wanted = (jax.jit(with_gradient, static_argnums=0)(turn) for turn in (lambda x: rotate(x, rotation), expected))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), got, wanted)


@pytest.mark.parametrize("dtype", ["float32", "int8"])
@pytest.mark.parametrize("tokens", [1, 2, 6, 13, 64, 65])  # one, few (some padded) and many differ on a CPU
def test_the_head_is_contracted_along_its_last_axis(tokens, dtype):
    x, head = jax.random.normal(jax.random.key(0), (1, tokens, 5)), jax.random.normal(jax.random.key(1), (7, 5))
    stored = Int8Array.of(head, [-1]) if dtype == "int8" else head
    expected = np.asarray(x) @ np.asarray(widened(stored, jnp.float32)).T
    np.testing.assert_allclose(linear_outputs_first(x, stored), expected, rtol=1e-5, atol=1e-5)


@functools.cache
def loss_and_counts(remat):
    """(loss and gradient, products, sigmoids) of a model."""
    model = Transformer(tiny_config(), nnx.Rngs(0), remat=remat)

    def loss(model):
        return jnp.sum(model(TOKENS, POSITIONS, causal(SEGMENTS)) ** 2)

    program = str(jax.make_jaxpr(jax.grad(loss))(model))
    value, gradient = jax.jit(jax.value_and_grad(loss))(model)
    return (value, jax.tree.leaves(gradient)), program.count("dot_general"), program.count("logistic")


@pytest.mark.parametrize(
    ("remat", "again"), [("products", 0), ("outputs", 4), ("attention", 6), ("full", 8), ("offload", 8)]
)
def test_recomputing_layers_changes_neither_loss_nor_gradient(remat, again):
    """And it happens: so many of a layer's nine products, and what stands between them."""
    (none, products, sigmoids), (other, other_products, other_sigmoids) = map(loss_and_counts, ("none", remat))
    assert (other_products - products, other_sigmoids - sigmoids) == (again, 1)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), none, other)


def test_bfloat16_computes_in_bfloat16_but_keeps_float32_weights_and_logits():
    exact, rough = tiny_model(), Transformer(tiny_config(), nnx.Rngs(0), dtype="bfloat16")
    logits = forward(rough, TOKENS, POSITIONS, causal(SEGMENTS))
    assert logits.dtype == jnp.float32
    assert {x.dtype for x in jax.tree.leaves(nnx.state(rough))} == {jnp.dtype("float32")}
    difference = np.abs(logits - forward(exact, TOKENS, POSITIONS, causal(SEGMENTS)))
    assert 0 < difference.max() < 0.15  # 2^-8 relative, a few roundings deep


@pytest.mark.parametrize(("weights", "tokens", "rank"), [("same", 1, 0), ("same", 5, 2), ("int8", 1, 0)])
def test_layers_apart_and_transposed_as_one_cpu_decodes_them_compute_the_same(weights, tokens, rank, monkeypatch):
    monkeypatch.setattr(one_cpu, "_LEAST", 0)  # small models count, too
    model = tiny_model(family="smollm3", no_rope_layer_interval=2)  # its second layer is another than its first
    if rank:  # adapters, as tasks are scored with while they are trained
        add_adapters(model.layers, Lora(rank, 4.0, ".*_proj"), nnx.Rngs(1))
        for name in INPUTS:
            b = getattr(model.layers, f"{name}_b")
            b[...] = jax.random.normal(jax.random.key(2), b.shape)
    twin = one_cpu.for_one_cpu(model, weights)
    layers = twin.layers if weights == "int8" else twin.layers[0]
    assert layers.down_proj.shape[1:] == model.layers.down_proj.shape[:0:-1]
    x = jax.random.randint(jax.random.key(0), (1, tokens), 0, 29)
    expected, got = (logits_of(each.rounded(weights), x) for each in (model, twin))
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("method", ["ar", "dense", "refusion"])
def test_no_forward_on_one_cpu_copies_the_cache(method, monkeypatch):
    """XLA copies all of it where new entries may be written before the last layer reads the old ones."""
    monkeypatch.setattr(one_cpu, "_LEAST", 0)
    model, own = one_cpu.for_one_cpu(sharp_model()), settings(method, new=24, cache_length=640)
    (request,) = prepare([PROMPTS[0]], own, model.config)
    decoder = decoder_for([request], model.config)
    some = queue.newcomers({0: request}, 1, 2, decoder)
    graphdef, weights = nnx.split(model)
    program = jax.jit(queue.decode_once, static_argnames=("graphdef", "rows", "decoder"))
    compiled = program.lower(graphdef, weights, some, 2, decoder).compile().as_text()
    shape = f"f32[{model.config.num_hidden_layers},2,{model.config.num_key_value_heads},{decoder.cache_length},"
    made = [line.split(" = ")[1].partition(" ")[2] for line in compiled.splitlines() if f" = {shape}" in line]
    assert any("update" in operation for operation in made)
    assert all(operation.startswith("copy(%broadcast") for operation in made if operation.startswith("copy("))  # empty


def test_what_is_transposed_is_kept_until_the_weights_change(monkeypatch):
    monkeypatch.setattr(one_cpu, "_LEAST", 0)
    model = sharp_model()
    twin = one_cpu.for_one_cpu(model)
    assert one_cpu.for_one_cpu(model) is twin is one_cpu.for_one_cpu(twin)
    own = settings("ar", new=4)
    before = decode(model, PROMPTS[:1], own)
    model.lm_head[...] *= -1
    after = decode(model, PROMPTS[:1], own)
    assert one_cpu.for_one_cpu(model) is not twin
    assert before != after == decode(nnx.clone(model), PROMPTS[:1], own)


@pytest.mark.parametrize("tied", [False, True])
def test_flops_are_those_xla_counts(tied):
    """XLA counts everything: norms and softmax, a little more, and the masked scores of each block of queries."""
    length = 1024
    config = tiny_config(
        num_hidden_layers=1,  # XLA counts the body of a scan once
        hidden_size=128,
        intermediate_size=512,
        head_dim=32,
        vocab_size=1024,
        tie_word_embeddings=tied,
    )
    tokens = jnp.zeros((2, length), jnp.int32)
    forward = jax.jit(lambda model: model(tokens, tokens, causal(tokens)))
    counted = forward.lower(tiny_model(**vars(config))).compile().cost_analysis()["flops"] / tokens.size
    masked = 4 * config.num_attention_heads * config.head_dim * (128 - 1) / 2  # of blocks of 128 queries
    ours = flops.train_flops_per_token(config, CAUSAL.keys_seen(length)) / 3
    assert 1.0 <= counted / (ours + masked) < 1.1


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


# The others compile for minutes together.
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name != "ar")) for name in registry.decoders()]
)
def test_a_decoder_in_int8_is_its_plain_reference_in_int8(name):
    model, own = equipped(sharp_model(), name), settings(name, **BOTH)
    out, compared = decode(model, PROMPTS, own), 0
    for i, request in enumerate(prepare(PROMPTS, own, model.config)):
        expected = registry.system_of(name).references[name](model, request)
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


def test_a_model_is_loaded_in_a_precision_that_there_is(tmp_path):
    for how, said in (
        *(({"dtype": name}, f"dtype={name}: must be float32 or bfloat16") for name in ("int8", "x")),
        ({"weights": "int4"}, "known: same, int8"),
    ):
        with pytest.raises(UserError, match=said):
            load_model(tmp_path, **how)


@pytest.mark.parametrize("axis", [1, 2, -1])
def test_int4_keeps_the_bound_of_its_groups(axis):
    x = np.random.default_rng(0).standard_t(3, (2, 64, 6, 32)).astype(np.float32)
    rounded = Int4Array.of(jax.numpy.asarray(x), [axis])
    assert rounded.values.size * 2 == x.size
    error = np.moveaxis(np.abs(np.asarray(rounded.widened(np.float32)) - x), axis, -1)
    size = 32 if x.shape[axis] % 32 == 0 else x.shape[axis]
    error, x = (each.reshape(-1, size) for each in (error, np.moveaxis(x, axis, -1)))
    assert np.all(error <= np.abs(x).max(axis=1, keepdims=True) / 14 * (1 + 1e-5))


V, D = 64, 16


@functools.partial(jax.jit, static_argnames="rows")
def shortlisted(x, head, rows):
    return shortlisted_logits(x, head, rounded_head(head), rows)


def head_and_tokens(tokens: int = 12) -> tuple[jax.Array, jax.Array]:
    head = jax.random.normal(jax.random.key(0), (V, D)) * jnp.linspace(0.1, 3.0, V)[:, None]  # rows of many sizes
    return head, jax.random.normal(jax.random.key(1), (4, tokens // 4, D))


def test_the_best_rows_by_the_rounded_head_are_exact_and_the_others_impossible():
    head, x = head_and_tokens()
    logits = np.asarray(shortlisted(x, head, rows=8))
    rounded = np.round(head / np.abs(head).max(axis=1, keepdims=True) * 127) * np.abs(head).max(axis=1, keepdims=True)
    tokens = np.round(x / np.abs(x).max(axis=2, keepdims=True) * 127)
    best = np.argsort(-(tokens @ rounded.T), axis=2)[:, :, :8]
    exact = np.take_along_axis(np.asarray(x @ head.T), best, axis=2)
    np.testing.assert_allclose(np.take_along_axis(logits, best, axis=2), exact, rtol=1e-5, atol=1e-5)
    assert np.isfinite(logits).sum() == 8 * x.shape[0] * x.shape[1]


def test_eight_rows_of_64_never_miss_the_best():
    head, x = head_and_tokens(4000)
    logits = shortlisted(x, head, rows=8)
    np.testing.assert_array_equal(logits.argmax(axis=2), (x @ head.T).argmax(axis=2))


@pytest.mark.parametrize("shape", [{"data": 2, "tensor": 4}, {"fsdp": 4, "tensor": 2}], ids=["tensor", "fsdp"])
def test_the_shards_of_a_vocabulary_find_what_one_chip_finds(shape):
    head, x = head_and_tokens()
    mesh = make_mesh(shape)
    x4 = jnp.tile(x, (2, 1, 1))[:4]
    expected = shortlisted(x4, head, rows=8)
    with jax.set_mesh(mesh):
        split = jax.device_put(head, sharding(mesh, "vocab", "embed"))
        logits = shortlisted(x4, split, rows=8)
    np.testing.assert_array_equal(np.isfinite(logits), np.isfinite(expected))
    np.testing.assert_allclose(logits, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.thorough
def test_greedy_answers_are_those_of_the_exact_head():
    model, s = sharp_model(), settings("ar")
    assert decode(model, PROMPTS, dataclasses.replace(s, head_rows=8)).tokens == decode(model, PROMPTS, s).tokens


def test_as_many_rows_as_the_vocabulary_are_the_exact_head():
    assert sharp_model().with_head_rows(32).head_rows == 0


ROWS = Rows(np.ones((2, 5), np.int32), np.ones((2, 5), np.int32), np.ones((2, 5), bool))


@pytest.mark.parametrize(("family", "rounded"), [("llama", 2), ("gemma3_text", 1)])
def test_a_norm_in_bfloat16_is_rounded_no_more_often_than_transformers_rounds_it(family, rounded):
    rng = np.random.default_rng(0)
    x, scale = (jnp.asarray(rng.normal(size=shape), jnp.bfloat16) for shape in ((4, 64), (64,)))
    wide, c = np.asarray(x, np.float64), tiny_config(family=family)
    offset = FAMILIES[family].norm_offset
    expected = wide / np.sqrt(np.mean(wide**2, -1, keepdims=True) + c.rms_norm_eps) * (np.float64(scale) + offset)
    np.testing.assert_allclose(np.asarray(norm(x, scale, c), np.float64), expected, rtol=rounded * 1.01 * 2**-8)


def test_a_wrong_shape_is_reported_where_it_is_made():
    q, mask = jnp.ones((2, 5, 4, 8)), jnp.ones((2, 5, 5), bool)
    k = v = jnp.ones((2, 5, 2, 8))
    attention(q, k, v, mask)
    for wrong in ((q, k.swapaxes(1, 2), v, mask), (q, k, v, mask[:1]), (q, k, v, mask.astype(jnp.int32))):
        with pytest.raises(BeartypeCallHintViolation):
            jax.jit(attention)(*wrong)


def test_a_dataclass_of_wrong_shapes_is_reported():
    with pytest.raises(TypeCheckError):
        dataclasses.replace(ROWS, is_response=ROWS.is_response.T)
    with pytest.raises(TypeCheckError):
        Rows(ROWS.tokens.astype(np.int64), ROWS.segment_ids, ROWS.is_response)
