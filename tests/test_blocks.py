"""Systems that write in blocks: their batches computed by hand, and what a forward pass reveals."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import EOS, MASK, PROMPTS, all_but, config_with, settings, sharp_model, tiny_model
from helpers import drawn_matrix, packed, with_eos

from refusion_jax import decode
from refusion_jax.batch.masking import shuffle_documents
from refusion_jax.batch.rows import Rows
from refusion_jax.config import make_objective
from refusion_jax.config.keys import keys
from refusion_jax.decoding import cache as kv
from refusion_jax.decoding.requests import Given
from refusion_jax.systems import block_diffusion, card, d2f, wedlm

KEYS = jax.random.split(jax.random.key(0), 4)
corrupt = jax.jit(block_diffusion.ComplementaryMasks(MASK, 4, eos_id=EOS).corrupt)
prefill = jax.jit(kv.prefill, static_argnums=(2, 3))


@pytest.mark.parametrize("seed", range(4))
def test_every_token_is_masked_in_one_of_both_copies_and_blocks_are_one_documents(seed):
    """Blocks of four: the second is the first document's, and repeats its end in place of the other's beginning."""
    rows, keys = with_eos(packed([(2, 4), (1, 5)], 12)), KEYS[seed : seed + 1]
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


soft_tail = jax.jit(card.SoftTail(MASK, tail=1.5, beta=1.0, decay=0.5).corrupt)
SOFT_ROWS = packed([(3, 9), (1, 8)], 24)


def test_masks_of_card_lie_in_the_tail_and_are_as_many_as_drawn():
    counts = set()
    for seed in range(20):
        batch = soft_tail(SOFT_ROWS, jax.random.split(jax.random.key(seed), 1))
        masked, ratio = np.asarray(batch.inputs[0]) == MASK, np.asarray(batch.diagnostics["mask_ratio"])[0]
        for first, end, length in ((3, 12, 9), (13, 21, 8)):
            count = masked[first:end].sum()
            counts.add(count)
            assert count == round(ratio[first] * length) >= 1
            tail = min(length, int(1.5 * count))
            assert not masked[first : end - tail].any()
        assert masked.sum() == masked[3:12].sum() + masked[13:21].sum()
    assert len(counts) > 5


def test_weights_of_card_are_the_recursion_of_the_paper():
    segments, response = np.asarray(SOFT_ROWS.segment_ids[0]), np.asarray(SOFT_ROWS.is_response[0])
    for seed in range(3):
        batch = soft_tail(SOFT_ROWS, jax.random.split(jax.random.key(seed), 1))
        masked = np.asarray(batch.inputs[0]) == MASK
        total, labels = {}, sum(response)
        for n, segment in enumerate(segments):
            starts = n == 0 or segments[n - 1] != segment
            before = 0 if starts else total[n - 1]
            own = masked[n] * (1 + (not starts and masked[n - 1]))
            total[n] = own + 0.5 * before
        expected = np.zeros(24)
        for n in np.flatnonzero(response):
            expected[n - 1] = 1 / (1 + total[n]) / labels
        np.testing.assert_allclose(batch.weights["mdm"][0], expected, rtol=1e-6)
        labelled = expected > 0
        np.testing.assert_array_equal(batch.labels[0][labelled], np.arange(101, 125)[labelled])


def test_a_pass_of_card_that_reveals_nothing_is_the_last_unless_the_next_one_draws_again():
    for temperature, passes in ((0.0, 1), (1.0, 3)):
        own = settings("card", new=4, draft_length=4, passes=3, threshold=1.0, temperature=temperature)
        assert decode(sharp_model(), PROMPTS[:2], own).forwards == [passes] * 2


@pytest.mark.thorough
def test_blocks_of_one_are_next_tokens():
    """Without masks in sight it is a causal model that is fed every token twice: as its own, and to be committed."""
    ar, out = decode(sharp_model(), PROMPTS, settings("ar")), decode(
        sharp_model(), PROMPTS, settings("card", draft_length=1)
    )  # fmt: skip
    assert out.tokens == ar.tokens


def test_blocks_of_wedlm_are_reordered_and_weighted_as_by_hand():
    """Two documents in blocks of four, of which the first has its second token in the prompt; any noise."""
    rows = packed([(2, 4), (1, 2)], 10)
    parts, masked = [[0, 1, 2, 3], [4, 5], [6, 7], [8], [9]], 0
    corrupt = jax.jit(wedlm.ReorderedBlocks(MASK, 4).corrupt)
    for seed in range(5):
        batch = corrupt(rows, jax.random.split(jax.random.key(seed), 1))
        inputs, labels, weights = (np.asarray(x[0]) for x in (batch.inputs, batch.labels, batch.weights["mdm"]))
        np.testing.assert_array_equal(inputs[10:], rows.tokens[0])
        np.testing.assert_array_equal(batch.weights["ar"][0] * 6, [0] * 10 + [0, 1, 1, 1, 1, 0, 1, 1, 0, 0])
        for part in parts:
            own = inputs[part] == MASK
            masked += own.sum()
            assert own.tolist() == sorted(own)  # observed first
            assert sorted(labels[part]) == list(np.asarray(rows.tokens[0])[part])  # none lost
            for is_masked in (False, True):  # each in text order
                assert sorted(labels[part][own == is_masked]) == list(labels[part][own == is_masked])
            gamma = np.asarray(batch.diagnostics["mask_ratio"])[0, part]
            np.testing.assert_allclose(weights[part], own / (6 * gamma), rtol=1e-6)
        where = np.asarray(batch.positions[0, :10]) + np.array([100] * 6 + [106] * 3 + [109])
        np.testing.assert_array_equal(where, labels[:10])  # every token keeps its place in the text
    assert masked > 5


@pytest.mark.parametrize(
    ("method", "own", "forwards"),
    [
        # After a prompt of 4, in blocks of 8 and sub-blocks of 2: two forwards, a commit, four forwards.
        ("block_diffusion", {"new": 12, "block_size": 8, "sub_block": 2, "threshold": 0.0}, 2 + 1 + 4),
        ("card", {"draft_length": 4, "threshold": 0.0}, 4 + 3),
        ("wedlm", {"window": 4, "entropy_threshold": 100.0}, 4),
        ("fast_dllm", {"block_length": 4, "threshold": 0.0}, 4),
    ],
)
def test_where_all_is_sure_a_forward_fills_all_that_it_may(method, own, forwards):
    """So an answer takes a forward for each block, and where that does not commit it one more between two."""
    out = decode(sharp_model(), PROMPTS[:1], settings(method, eos_id=29, **own))
    assert (out.finish_reason, out.forwards) == (["length"], [forwards])


@pytest.mark.parametrize(
    ("method", "own"),
    [
        ("block_diffusion", {"new": 12, "block_size": 8, "threshold": 1.0}),
        ("wedlm", {"entropy_threshold": 0.0}),
        ("fast_dllm", {"block_length": 4, "threshold": 1.0}),
    ],
)
def test_where_nothing_is_sure_a_forward_reveals_one(method, own):
    """So does a pass that commits a block."""
    out = decode(sharp_model(), PROMPTS, settings(method, **own))
    assert out.forwards == [len(order) for order in out.commit_order]
    assert any(order != sorted(order) for order in out.commit_order)


OBJECTIVE = d2f.BlockForcing(mask_id=MASK, block_length=2, padding=0.0, most=0.7)
ROWS = packed([(2, 4), (1, 8), (0, 3), (0, 1), (0, 5)], 26)


@pytest.fixture(scope="module")
def batches():
    corrupt = jax.jit(OBJECTIVE.corrupt)
    return [corrupt(ROWS, jax.random.split(jax.random.key(seed), 1)) for seed in range(30)]


def test_the_matrix_of_the_docstring_of_d2f_is_the_mask(batches):
    """The first document is that of the docstring, and the third, without a prompt, begins with a block."""
    mask = np.asarray(batches[0].visibility.mask()[0])
    assert mask[:6, :6].tolist() == drawn_matrix(d2f.__doc__, 6)
    assert not mask[:6, 6:].any()
    assert mask[15:18, 15:18].tolist() == [[True, True, False], [True, True, False], [True, True, True]]


def test_noise_of_d2f_rises_from_block_to_block_between_its_bounds(batches):
    """By a share of what is left at most, whatever stands before the document: the last is a text after another."""
    p = np.stack([np.asarray(batch.diagnostics["mask_ratio"][0]) for batch in batches])
    assert (p >= 0.2).all()
    assert (p <= 0.7).all()
    blocks = np.asarray(batches[0].visibility.rank[0])
    for own in (range(2, 6), range(7, 15), range(15, 18), range(19, 24)):
        most = (0.7 - p[:, own[0]]) / (blocks[own[-1]] - 1)
        for here, after in zip(own, own[1:], strict=False):
            rise = p[:, after] - p[:, here]
            if blocks[here] == blocks[after]:
                np.testing.assert_allclose(rise, 0, atol=1e-6)
            else:
                assert (rise >= -1e-6).all()
                assert (rise <= most + 1e-6).all()
                assert rise.max() > 0.05


def test_weights_of_d2f_are_one_over_p_in_a_mean_over_masks(batches):
    for batch in batches[:5]:
        masked = np.asarray(batch.inputs[0] == MASK)
        assert not masked[~np.asarray(ROWS.is_response[0])].any()
        expected = np.where(masked, 1 / np.asarray(batch.diagnostics["mask_ratio"][0]) / max(masked.sum(), 1), 0)
        np.testing.assert_allclose(batch.weights["mdm"][0], expected, rtol=1e-6)


@pytest.mark.parametrize("name", all_but(["wedlm"], ["wedlm", "dense"]))
def test_ranks_of_the_longest_rows_in_the_largest_slots_fit_into_int32(name):
    """They grow with the product of both: beyond, they would wrap around, and tokens see what comes after them."""
    key, longest = {"wedlm": "wedlm.block_size", "dense": "dense.sizes"}[name], keys()["row_length"].at_most
    most, tokens = keys()[key].at_most, jnp.ones((1, longest), jnp.int32)
    config = config_with(objective=name, **{key: (most,) if name == "dense" else most})
    noise = jax.vmap(jax.random.key)(jnp.zeros(1, jnp.uint32))
    ranks = jax.jit(make_objective(config, MASK).corrupt)(Rows(tokens, tokens, tokens > 0), noise).visibility.rank
    assert ranks.min() >= 0
    assert ranks.max() >= (longest - 1) * most
