"""Fast-dLLM: what its caches change, and what its threshold commits."""

import pytest
from conftest import PROMPTS, settings, sharp_model

from refusion_jax import decode


def decoded(layers: int, reuse: str):
    own = settings("fast_dllm", reuse=reuse, block_length=6, threshold=0.4)
    return decode(sharp_model(3, num_hidden_layers=layers), PROMPTS, own)


@pytest.mark.parametrize("reuse", ["dual", "prefix"])
@pytest.mark.thorough
def test_cached_equals_uncached_in_one_layer_whose_keys_depend_on_their_own_tokens_alone(reuse):
    assert decoded(1, reuse) == decoded(1, "none")


@pytest.mark.parametrize("reuse", ["dual", "prefix"])
def test_in_more_layers_a_cache_approximates(reuse):
    """Measured here: of six answers of random weights, which are worse than any trained model's, most differ."""
    exact, approximate = decoded(2, "none"), decoded(2, reuse)
    same = [a == b for a, b in zip(exact.tokens, approximate.tokens, strict=True)]
    assert not all(same)
    firsts = zip(exact.commit_order, approximate.commit_order, strict=True)
    assert all(a[0] == b[0] for a, b in firsts)  # the first forward is over the whole text, with or without


def test_a_threshold_nobody_reaches_commits_one_token_a_forward_and_one_that_all_reach_a_block():
    model = sharp_model(3, num_hidden_layers=1)
    slow = decode(model, PROMPTS[:2], settings("fast_dllm", block_length=4, threshold=1.0, new=8))
    fast = decode(model, PROMPTS[:2], settings("fast_dllm", block_length=4, threshold=0.0, new=8))
    assert slow.forwards == [len(order) for order in slow.commit_order]
    assert fast.forwards == [-(-len(order) // 4) for order in fast.commit_order]
