"""`bench replay`: the trained model's answers, at the price of both."""

import json

import jax
import jax.numpy as jnp
import pytest
from conftest import PROMPTS, causal, run, settings, sharp_model
from flax import nnx

from refusion_jax import UserError, decode
from refusion_jax.benchmarks.replay import find_checkpoint
from refusion_jax.benchmarks.replay.beside import Beside, of_size


def pair() -> Beside:
    """A model of width 16, and one of width 128 beside it."""
    model = sharp_model(1)
    return Beside(model, of_size(128, 2, model))


@pytest.mark.parametrize("method", ["refusion", "llada"])
def test_a_model_beside_the_trained_one_changes_no_answer(method):
    """Of a decoder with a cache of both, and of one without."""
    both, s = pair(), settings(method, new=8, infill="exact", head_rows=20)
    assert decode(both, PROMPTS[:1], s) == decode(both.trained, PROMPTS[:1], s)


def test_every_forward_is_computed_by_both():
    """By what XLA counts of a forward on top of a cache, and of one without."""
    both = pair()

    def flops(model):
        graphdef, params = nnx.split(model)
        tokens = jnp.array(PROMPTS[0])[None]
        places, seen = jnp.arange(tokens.size)[None], jnp.ones((1, tokens.size, tokens.size), bool)

        def forward(params):
            model, length = nnx.merge(graphdef, params), jnp.zeros((1,), jnp.int32)
            cached = model.extend(tokens, places, model.empty_cache(1, 32), length, seen)
            return cached, model(tokens, places, causal(jnp.ones_like(tokens)))

        return jax.jit(forward).lower(params).compile().cost_analysis()["flops"]

    alone, other, together = map(flops, (both.trained, both.other, both))
    assert other > 2 * alone
    assert together == pytest.approx(alone + other, rel=0.05)
    assert both.weight_bytes == both.other.weight_bytes > 2 * both.trained.weight_bytes
    assert both.empty_cache(1, 32).other.keys.shape == (2, 1, 1, 32, 64)


def test_the_benchmark_measures_every_size_beside_the_last_way(trained_run):
    flags = ["--shapes=128x1", "--batch_sizes=2", "--prompts_per_row=1", "--repeats=1"]
    ways = ["--way=sequential slot_size=4", "--way=sequential"]
    out, _ = run("bench", "replay", f"--checkpoint={trained_run}", *flags, *ways)
    records = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    assert [record["way"] for record in records] == ["sequential slot_size=4", "sequential"] * 2
    alone, beside = records[::2]
    assert alone["tokens"] == beside["tokens"]
    assert beside["parameters"] > 12 * 128**2
    assert [record["speedup"] for record in records[1::2]] == [1, 1]


def test_a_way_that_serves_none_of_the_runs_is_refused(trained_run):
    assert find_checkpoint([str(trained_run)], "sequential") == str(trained_run)
    with pytest.raises(UserError, match="which decodes with"):
        find_checkpoint([str(trained_run)], "llada")
