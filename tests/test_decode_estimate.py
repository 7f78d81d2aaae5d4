"""Estimates of decoding on TPUs: properties that any estimate must have, and figures by hand."""

import itertools

import pytest
from conftest import tiny_config

from refusion_jax.benchmarks.headline.tpu_estimates import BATCH_SIZES, faster_up_to, forward_costs, tpu_estimates
from refusion_jax.distributed.chips import find_chip

MODEL = tiny_config(hidden_size=1024, intermediate_size=4096, vocab_size=32_768, num_hidden_layers=8)
CHIP = find_chip("v5e:2x4")
WEIGHTS = 8 * 1024 * (32 + 32 + 32) + 8 * 3 * 1024 * 4096 + 32_768 * 1024  # attention, mlp, output head


def test_one_token_per_forward_is_bound_by_weights_at_batch_1():
    costs = forward_costs(MODEL, rows=1, places=1, context=100)
    assert costs.weight_bytes == 2 * WEIGHTS
    assert costs.seconds(CHIP) == pytest.approx(2 * WEIGHTS / CHIP.hbm_bandwidth, rel=0.01)


def test_a_large_batch_is_bound_by_arithmetic():
    costs = forward_costs(MODEL, rows=4096, places=16, context=0)
    attention = 8 * 2 * 2 * 4 * 8 * 16 * 16  # layers, products, FLOPs, heads, head size, queries, keys
    assert costs.weight_flops + costs.attention_flops == 4096 * (2 * 16 * WEIGHTS + attention)
    assert costs.seconds(CHIP) == pytest.approx(4096 * 2 * 16 * WEIGHTS / CHIP.peak_flops, rel=0.01)


def test_chips_share_the_work_and_wait_for_each_other():
    alone, shared = (forward_costs(MODEL, 64, 16, 100, chips) for chips in (1, 2))
    for name in ("weight_flops", "weight_bytes", "attention_flops", "cache_bytes"):
        assert getattr(shared, name) == getattr(alone, name) / 2
    assert not alone.network_bytes
    assert shared.network_bytes == (2 * 8 + 1) * 2 * (64 * 16 * 1024 * 2) / 2  # each value there and back


def point(settings: str, forwards: int, width: int) -> dict:
    about = {"system": "s", "decoder": "d", "start": "", "settings": settings, "tokens": 200, "forwards": forwards}
    return about | {"width": width, "prompt_tokens": 20.0, "has_cache": True}


def batches(*points: dict) -> list[dict]:
    """The estimates on a v5e:2x4, by batch size."""
    return tpu_estimates(list(points), problems=10)[0]["batches"]


@pytest.mark.parametrize("name", ["forwards", "width", "prompt_tokens"])
def test_more_work_is_never_faster(name):
    found = [batches(point("", 20, 16) | {name: amount}) for amount in (1, 2, 16, 100, 1000)]
    for estimates in zip(*found, strict=True):
        speeds = [estimate["tokens_per_second"] for estimate in estimates]
        assert speeds == sorted(speeds, reverse=True)


def test_a_larger_batch_is_never_slower_and_the_advantage_of_few_forwards_ends():
    found = batches(point("four tokens per forward", 50, 16))
    for key in ("tokens_per_second", "one_token_per_forward"):
        speeds = [estimate[key] for estimate in found]
        assert all(before <= after * 1.001 for before, after in itertools.pairwise(speeds))
    assert found[0]["speedup"] == pytest.approx((20 + 1) / (5 + 1), rel=0.05)  # the prefill counts as one
    assert found[-1]["speedup"] < 1  # at four places per token


def test_the_fastest_setting_of_a_decoder_counts_at_every_batch_size():
    few, many = point("few forwards", 20, 64), point("few places", 80, 4)
    best = batches(few, many)
    for i, batch in enumerate(best):
        assert batch["tokens_per_second"] == max(batches(p)[i]["tokens_per_second"] for p in (few, many))
    assert (best[0]["settings"], best[-1]["settings"]) == ("few forwards", "few places")
    assert [batch["batch_size"] for batch in best] == list(BATCH_SIZES)
    assert best[0]["tokens_per_forward"] == 10


def test_an_advantage_ends_where_it_is_first_lost():
    found = [{"batch_size": 2**i, "speedup": ratio} for i, ratio in enumerate((3.0, 2.0, 1.0, 1.1))]
    assert faster_up_to(found) == 2
    assert faster_up_to(found[2:]) == 0


def test_first_drafts_in_the_prefill_are_not_free():
    """20 tokens by one forward, their drafts made in the prefill: twice the weights are read, not once."""
    first, *_ = batches(point("drafts of the prefill", forwards=10, width=1))
    assert first["tokens_per_forward"] == 20
    assert first["speedup"] == pytest.approx((20 + 1) / 2, rel=0.05)
