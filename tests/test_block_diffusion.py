"""Block diffusion: complementary copies computed by hand, and what a forward pass reveals."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import BOS, EOS, MASK, PROMPTS, settings, sharp_model, tiny_model
from helpers import with_eos

from refusion_jax import decode
from refusion_jax.batch.masking import shuffle_documents
from refusion_jax.batch.rows import Rows
from refusion_jax.decoding import cache as kv
from refusion_jax.decoding.requests import Given
from refusion_jax.systems import block_diffusion

KEYS = jax.random.split(jax.random.key(0), 4)
corrupt = jax.jit(block_diffusion.ComplementaryMasks(MASK, 4, eos_id=EOS).corrupt)
prefill = jax.jit(kv.prefill, static_argnums=(2, 3))


@pytest.mark.parametrize("seed", range(4))
def test_every_token_is_masked_in_one_of_both_copies_and_blocks_are_one_documents(seed):
    """Blocks of four: the second is the first document's, and repeats its end in place of the other's beginning."""
    tokens, segments = np.arange(5, 17), np.array([1] * 6 + [2] * 6)
    response = np.array([0, 0, 1, 1, 1, 1, 0, 1, 1, 1, 1, 1], bool)
    rows, keys = with_eos(Rows(*(jnp.asarray(x)[None] for x in (tokens, segments, response)))), KEYS[seed : seed + 1]
    tokens, segments, response = (np.asarray(x[0]) for x in jax.tree.leaves(shuffle_documents(rows, keys)))
    source = np.array([0, 1, 2, 3, 4, 5, 5, 5, 8, 9, 10, 11])
    seen, owner, trained = tokens[source], segments[source], response[source]
    batch = corrupt(rows, keys)
    first, second, clean = np.split(np.asarray(batch.inputs[0]), 3)
    np.testing.assert_array_equal(clean, tokens)
    np.testing.assert_array_equal(batch.visibility.segment_ids[0], [*owner, *owner, *segments])
    np.testing.assert_array_equal(batch.positions[0, :12], [0, 1, 2, 3, 4, 5, 6, 7, 2, 3, 4, 5])
    np.testing.assert_array_equal((first == MASK), (second != MASK) & trained)
    for copy in (first, second):
        np.testing.assert_array_equal(copy[copy != MASK], seen[copy != MASK])
    weight = np.asarray(batch.weights["mdm"][0])
    labelled = np.zeros(36, bool)
    for copy, x in enumerate((first, second)):
        for n in range(1, 12):
            follows_own = n % 4 > 0 or owner[n - 1] == segments[n - 1] == segments[n]
            labelled[12 * copy + n - 1] = trained[n] and x[n] == MASK and follows_own
    np.testing.assert_allclose(weight, labelled / labelled.sum(), rtol=1e-6)
    # Of the third block, the first token follows one that it does not own.
    assert labelled.sum() == trained[:8].sum() + trained[9:].sum()
    np.testing.assert_array_equal(np.asarray(batch.labels[0])[labelled], np.tile([*seen[1:], 0], 3)[labelled])


def test_prefilled_blocks_are_those_of_a_forward_over_everything():
    """Two chunks of two blocks, against one; the third row ends inside a block, whose entries are not looked at."""
    model, length = tiny_model(), [16, 12, 10]
    tokens = jnp.array(np.random.default_rng(0).integers(5, 30, (3, 16)), jnp.int32)
    given = Given(tokens, jnp.broadcast_to(jnp.arange(16)[None], (3, 16)), jnp.array(length))
    pieces, whole = (prefill(model, given, chunk, 4).entries for chunk in (8, 16))
    for row, n in enumerate((16, 12, 8)):
        for a, b in zip(jax.tree.leaves(pieces), jax.tree.leaves(whole), strict=True):
            np.testing.assert_allclose(a[:, row, :, :n], b[:, row, :, :n], atol=1e-5)
    causal = prefill(model, given, 16, 1).entries
    assert abs(causal.keys[1, 0] - whole.keys[1, 0]).max() > 1e-3


@pytest.mark.parametrize("block_size", [24, 96])
def test_a_long_prompt_is_prefilled_in_whole_blocks(block_size):
    """On a CPU in shorter chunks than are allowed."""
    model, given = tiny_model(), Given(*(jnp.arange(192)[None] % n for n in (25, 192)), jnp.array([192]))
    pieces, whole = (prefill(model, given, n, block_size).entries for n in (block_size, 192))
    assert kv.tokens_at_once(192, block_size) < 192
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), pieces, whole)


def test_where_all_is_sure_a_sub_block_takes_a_forward():
    """A prompt of 4 and 12 new tokens in blocks of 8, sub-blocks of 2: two forwards, a commit, four forwards."""
    s = settings("block_diffusion", new=12, block_size=8, sub_block=2, threshold=0.0, eos_id=29)
    out = decode(sharp_model(), PROMPTS[:1], s)
    assert len(out.tokens[0]) == 12
    assert out.commit_order[0] == list(range(4, 16))
    assert out.forwards == [2 + 1 + 4]


def test_where_nothing_is_sure_a_forward_reveals_one():
    out = decode(
        sharp_model(), PROMPTS[:1], settings("block_diffusion", new=12, block_size=8, threshold=1.0, eos_id=29)
    )
    assert out.forwards == [len(out.commit_order[0])]  # the commit pass reveals one, too
    assert out.commit_order[0] != sorted(out.commit_order[0])


def test_a_mask_token_in_a_prompt_is_left_there():
    out = decode(sharp_model(), [[BOS, MASK, 7]], settings("block_diffusion"))
    assert min(out.commit_order[0]) == 3
