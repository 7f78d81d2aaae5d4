"""The speed proxy: the trained model's answers, at the cost of both models."""

import jax
import jax.numpy as jnp
import pytest
from conftest import PROMPTS, causal, settings, sharp_model

from refusion_jax import decode
from refusion_jax.benchmarks.headline.speed_proxy import SpeedProxy, proxy_model


def pair() -> SpeedProxy:
    """A model of width 16, with a proxy of width 128."""
    model = sharp_model(1)
    return SpeedProxy(model, proxy_model(128, 2, model))


@pytest.mark.parametrize("method", ["refusion", "llada"])
@pytest.mark.thorough
def test_a_proxy_changes_no_answer(method):
    """Of a decoder with a cache of both, and of one without."""
    both, s = pair(), settings(method, new=8, infill="exact", head_rows=20)
    assert decode(both, PROMPTS[:1], s) == decode(both.model, PROMPTS[:1], s)


def test_every_forward_is_computed_by_both():
    """By what XLA counts of a forward pass on top of a cache, and of one without."""
    both = pair()

    def flops(model):
        tokens = jnp.array(PROMPTS[0])[None]
        places, seen = jnp.arange(tokens.size)[None], jnp.ones((1, tokens.size, tokens.size), bool)

        def forward(model):
            cached = model.extend(tokens, places, model.empty_cache(1, 32), jnp.zeros((1,), jnp.int32), seen)
            return cached, model(tokens, places, causal(jnp.ones_like(tokens)))

        return jax.jit(forward).lower(model).compile().cost_analysis()["flops"]

    alone, other, together = map(flops, (both.model, both.proxy, both))
    assert other > 2 * alone
    assert together == pytest.approx(alone + other, rel=0.05)
    assert both.weight_bytes == both.proxy.weight_bytes > 2 * both.model.weight_bytes
    assert both.empty_cache(1, 32).proxy.keys.shape == (2, 1, 1, 32, 64)
