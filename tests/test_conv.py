"""Convolutional decoding: who counts as near, and what that changes."""

import jax.numpy as jnp
import pytest
from conftest import PROMPTS, settings, sharp_models

from refusion_jax import decode
from refusion_jax.systems.conv import known_nearby

pytestmark = pytest.mark.usefixtures("all_shapes")


def test_the_counts_of_the_docstring():
    """p q M M c M, k = 5."""
    known = jnp.array([[1, 1, 0, 0, 1, 0]], bool)
    assert known_nearby(known, jnp.array([[2, 3, 5]]), jnp.array([2])).tolist() == [[3, 2, 1]]


@pytest.mark.thorough
def test_a_window_that_holds_the_whole_text_leaves_the_order_of_confidence():
    """tanh of the same count everywhere, with no block: what the uncut schedule of masked diffusion commits."""
    for model in sharp_models()[:2]:
        conv, plain = (decode(model, PROMPTS, settings(name, steps=8)) for name in ("conv", "llada"))
        for i in range(len(PROMPTS)):
            assert conv.commit_order[i] == plain.commit_order[i]
            assert conv.tokens[i] == plain.tokens[i]
            assert conv.forwards[i] == plain.forwards[i]  # both end where the answer is final


def test_a_narrow_window_writes_next_to_what_is_known():
    """In a window of 3 only masks next to known tokens have any confidence: the text grows at its end."""
    out = decode(sharp_models()[0], PROMPTS, settings("conv", conv_window=3))
    assert all(order == sorted(order) for order in out.commit_order)
