"""Models with their layers apart and transposed, as one CPU decodes them, compute what the models themselves do."""

import jax
import numpy as np
import pytest
from conftest import PROMPTS, logits_of, settings, sharp_model, tiny_model
from flax import nnx

from refusion_jax import decode
from refusion_jax.model import one_cpu
from refusion_jax.model.lora import INPUTS, Lora, add_adapters


@pytest.fixture(autouse=True)
def small_models_count(monkeypatch):
    monkeypatch.setattr(one_cpu, "_LEAST", 0)


@pytest.mark.parametrize(("weights", "tokens", "rank"), [("same", 1, 0), ("same", 5, 2), ("int8", 1, 0)])
def test_logits_are_the_same(weights, tokens, rank):
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


def test_what_is_transposed_is_kept_until_the_weights_change():
    model = sharp_model()
    twin = one_cpu.for_one_cpu(model)
    assert one_cpu.for_one_cpu(model) is twin is one_cpu.for_one_cpu(twin)
    own = settings("ar", new=4)
    before = decode(model, PROMPTS[:1], own)
    model.lm_head[...] *= -1
    after = decode(model, PROMPTS[:1], own)
    assert one_cpu.for_one_cpu(model) is not twin
    assert before != after == decode(nnx.clone(model), PROMPTS[:1], own)
