import json

import jax
import jax.numpy as jnp
import pytest
from conftest import causal, tiny_config, tiny_model

from refusion_jax.batch.visibility import CAUSAL
from refusion_jax.distributed.chips import peak_flops
from refusion_jax.model import flops
from refusion_jax.training.metrics import read_metrics


def test_the_longest_matching_device_kind_gives_the_peak():
    assert peak_flops("TPU v5 lite") == 197e12
    assert peak_flops("TPU v5") == 459e12
    assert peak_flops("NVIDIA H100 80GB HBM3") == 989e12
    assert peak_flops("NVIDIA H100 PCIe") == 756e12
    assert peak_flops("cpu") is None


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


def test_junk_between_records_costs_no_other(tmp_path):
    junk = [b"{}", b"\xff\x00\n[]", b'{"step": "x"}', b'{"step": 2, "loss": 1.0}']
    lines = [json.dumps({"step": step}).encode() for step in (1, 2, 3)]
    cut_off = b'{"step": 4'
    (tmp_path / "metrics.jsonl").write_bytes(b"\n".join([junk[0], lines[0], *junk[1:], lines[2], cut_off]))
    assert read_metrics(tmp_path) == [{"step": 1}, {"step": 2, "loss": 1.0}, {"step": 3}]
    assert read_metrics(tmp_path, up_to=1) == [{"step": 1}]
    assert read_metrics(tmp_path / "none") == []
