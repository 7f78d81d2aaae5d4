"""Decoders, compiled for TPUs that are not here: what they keep in memory, and what a forward pass moves."""

import dataclasses
import functools
import json
import re

import jax
import jax.numpy as jnp
import pytest
from conftest import run
from flax import nnx
from test_tpu import config_of, pytestmark  # noqa: F401  the marks are for the tests below

from refusion_jax import DecodeSettings
from refusion_jax.benchmarks.headline.tpu_estimates import forward_costs
from refusion_jax.config.model import model_config
from refusion_jax.decoding.sampling import SAMPLED
from refusion_jax.distributed import sharding
from refusion_jax.distributed.chips import find_chip, free_tokens
from refusion_jax.distributed.xla_options import version_mismatch
from refusion_jax.model import key_values
from refusion_jax.model.cache_kernel import cache_attention
from refusion_jax.model.key_values import key_counts
from refusion_jax.model.shape import ModelConfig
from refusion_jax.model.transformer import Transformer
from refusion_jax.planning import hlo
from refusion_jax.planning.compiler import compile_program, tpu_devices
from refusion_jax.planning.costs import collective_kind, count
from refusion_jax.planning.programs import lower_decode
from refusion_jax.planning.report import decoding_loop, to_table

ROWS, CACHE, PLACES = 8, 1024 + 32, 8 * 2 * 32  # a block is written after the text; all rows plan the next, too


@pytest.mark.thorough
def test_a_decoder_that_does_not_fit_is_told_the_batch_that_does():
    """One that compiles in a fifth of the time; the default's is looked into below."""
    flags = ["--config=configs/refusion_8b.py:0.6b", "--topology=v5e:2x2", "--config.model.num_hidden_layers=4"]
    flags += ["--what=decode", "--decode.method=sequential", "--memory_only", "--json"]
    flags += ["--decode.batch_size=1040"]  # of which 520 and 260 are a whole number of rows for each chip
    out, err = run("plan", *flags, code=2)
    record = json.loads(out)
    assert (record["what"], record["fits"]) == ("decode", False)
    # How many passes a prefill takes depends on the prompts; one is counted: 256 tokens of 32 rows, on four chips.
    weights, seen = 4 * 1024 * (2 * 16 * 128 + 2 * 8 * 128 + 3 * 3072), 4 * 4096 * 16 * 128
    prefill = record["flops_per_chip"] - record["forward_flops_per_chip"]
    assert prefill == pytest.approx(8 * 256 * (2 * weights + 4 * seen), rel=0.1)
    assert to_table(record).columns[0].header == "one chip, one pass of the prefill and one forward"
    warning = f"{line}\n" if (line := version_mismatch()) else ""
    assert re.fullmatch(rf"{re.escape(warning)}error: needs .* --decode.batch_size=(520|260) makes it fit\n", err)


@functools.cache
def decoder_of_8b() -> hlo.Module:
    """What the chips of a v5e:2x4 run that decode eight rows of 8B together, each with its share of the heads."""
    config = config_of("refusion_8b", "8b", **{"mesh.tensor": 8, "mesh.fsdp": 1})
    settings = DecodeSettings("refusion", batch_size=ROWS, cache_length=1024, max_new_tokens=64, serial_blocks=2)
    return compile_program(lower_decode, (config.to_json(), "v5e:2x4", 1, settings), memory_only=True).module


def all_that_runs_in(module: hlo.Module, name: str, seen: set[str]) -> list[hlo.Instruction]:
    """The instructions of a computation, and of those that it calls."""
    if name in seen:
        return []
    seen.add(name)
    found = list(module.computations[name].instructions.values())
    for i in list(found):
        for inner in (i.attribute("body"), i.attribute("condition"), *i.called, *i.branches):
            found += all_that_runs_in(module, inner, seen) if inner else []
    return found


@pytest.mark.thorough
def test_the_8b_decoder_copies_no_cache_and_gathers_no_weights_in_its_loop():
    module = decoder_of_8b()
    inside = all_that_runs_in(module, decoding_loop(module), set())
    assert len(inside) > 1000
    keys = 36 * CACHE * ROWS * 128 * 2  # bytes of a chip: layers, entries, rows, one head in bfloat16
    copied = [s for i in inside if i.opcode.startswith("copy") for s in i.shapes]
    assert not [s for s in copied if CACHE in s.dims or s.bytes >= keys / 8]  # all the new entries are keys / 33
    assert {collective_kind(i) for i in inside} == {None, "all-reduce"}


@pytest.mark.thorough
def test_a_forward_of_8b_moves_hardly_more_than_its_weights_and_the_live_cache():
    """Bytes are what the operations of the loop's compiled body read from and write to HBM; of the shapes of a forward
    the dearest counts, and of the lengths of the cache the whole. `bench headline` estimates speeds from them."""
    module, config = decoder_of_8b(), config_of("refusion_8b", "8b")
    costs = count(dataclasses.replace(module, entry=decoding_loop(module)), chips_per_slice=8)
    c = model_config(config)
    priced = forward_costs(c, ROWS, PLACES / ROWS, CACHE, chips=8)
    assert costs.bytes <= 1.1 * (priced.weight_bytes + priced.cache_bytes)
    assert costs.bytes == pytest.approx(priced.weight_bytes + priced.cache_bytes, rel=0.03)
    # The output head takes a portion of the places at once; how often the data says, and one is counted.
    portion = free_tokens(2 * 10**9, find_chip("v5e:2x4").device_kind)
    others = 2 * c.hidden_size * c.vocab_size / 8 * (PLACES - portion)
    assert costs.flops == pytest.approx(priced.weight_flops + priced.attention_flops - others, rel=0.01)
    assert sum(c.bytes for c in costs.collectives) == pytest.approx(priced.network_bytes, rel=0.01)


LAYERS, KEYS, HEAD = 2, 2080, 128


def lower_forward(rows: int, tokens: int) -> jax.stages.Lowered:
    """A forward on top of a cache of KEYS entries per row, on one chip: one key head, as a chip has of 8B on eight.

    By XLA alone, as with a cache in int8; it runs in a process of its own, where nothing else is compiled.
    """
    key_values.is_for_kernel = lambda *_: False
    mesh = sharding.make_mesh({}, tpu_devices("v5e:2x2", 1)[:1])
    config = ModelConfig(1024, 512, LAYERS, 4, 1, HEAD, 1024, 1e4, 1e-6, True, 4096, 1000, 0, 1, 2, 3)
    model = nnx.eval_shape(lambda: Transformer(config, nnx.Rngs(0), "bfloat16"))

    def inputs():
        fed = jnp.zeros((rows, tokens), jnp.int32)
        return fed, fed, model.empty_cache(rows, KEYS), fed[:, 0], jnp.ones((rows, tokens, tokens), bool)

    arguments = sharding.placed((model, *jax.eval_shape(inputs)), sharding.sharding(mesh))
    with jax.set_mesh(mesh):
        return jax.jit(Transformer.extend_hidden).lower(*arguments)


def test_attention_over_a_part_of_the_cache_reads_no_more_than_this_part():
    """An index of the layer followed by a slice of its entries reads all of them: 34 MB a layer in every branch."""
    module = compile_program(lower_forward, (32, 8), memory_only=True).module
    (choice,) = [i for c in module.computations.values() for i in c.instructions.values() if i.opcode == "conditional"]
    read = [count(dataclasses.replace(module, entry=branch), chips_per_slice=4).bytes for branch in choice.branches]
    quarter, half, _ = (2 * 32 * entries * HEAD * 2 for entries in key_counts(KEYS))  # bytes of keys and values
    assert quarter <= read[0] <= 1.4 * quarter
    assert half <= read[1] <= 1.4 * half


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("topology", "method", "rows"), [("v5e:2x4", "ar", 128), ("v5e:2x4", "dense", 128), ("v6e:2x4", "refusion", 8)]
)
def test_a_greedy_forward_of_many_rows_moves_the_weights_and_the_cache_once(topology, method, rows):
    """Not so if scores are in float32, if the cache is copied, or if what samples counts, which takes several GB."""
    config = config_of("refusion_8b", "8b", **{"mesh.tensor": 8, "mesh.fsdp": 1})
    settings = DecodeSettings(method, batch_size=rows, cache_length=2048, max_new_tokens=64)
    module = compile_program(lower_decode, (config.to_json(), topology, 1, settings), memory_only=True).module
    loop = dataclasses.replace(module, entry=decoding_loop(module))
    priced = forward_costs(model_config(config), rows, 1, 2048, chips=8)
    least = priced.weight_bytes + priced.cache_bytes
    assert count(loop, 8, SAMPLED).bytes <= 1.25 * least <= count(loop, 8).bytes + (method == "ar") * least


@pytest.mark.slow
@pytest.mark.parametrize("topology", ["v4:2x2x1", "v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1"])
def test_the_kernel_for_the_cache_fits_the_vector_memory(topology):
    """Compiled to machine code, with the tokens that `refusion` and `ar` feed for a row."""
    mesh = sharding.make_mesh({"fsdp": -1}, tpu_devices(topology, 1))
    B, N, K, S, H, L = 64, 8, 2, 2048, 128, 2

    def array(shape, *axes, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding.sharding(mesh, *axes))

    cache = array((L, B, K, S, H), "layers", "batch")
    layer, length = array((), dtype=jnp.int32), array((B,), "batch", dtype=jnp.int32)
    for T in (64, 1):
        q, k = (array((B, T, heads, H), "batch") for heads in (N, K))
        arguments = q, k, k, array((B, T, T), "batch", dtype=bool), cache, cache, layer, length, length
        with jax.set_mesh(mesh):
            assert "tpu_custom_call" in jax.jit(cache_attention).lower(*arguments).compile().as_text()
