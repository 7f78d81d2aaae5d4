"""Decoders that reveal masks anywhere: schedules, merged masks, neighbours, caches, a second model."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import BOS, MASK, PROMPTS, equipped, settings, sharp_model, sharp_models, tiny_model
from helpers import packed, tiny_qwen3, write_tokenizer
from test_huggingface import change_config

from refusion_jax import UserError, decode
from refusion_jax.checkpoints.load import load_for
from refusion_jax.data.fast_tokenizer import load_tokenizer_file
from refusion_jax.decoding.auxiliary import joined, with_auxiliaries
from refusion_jax.decoding.requests import Request, prepare
from refusion_jax.systems import dream
from refusion_jax.systems.api import decoder_for
from refusion_jax.systems.conv import known_nearby
from refusion_jax.systems.llada import fed_places
from refusion_jax.systems.masked import MaskedText
from refusion_jax.systems.registry import decoders_for


def test_the_merged_places_of_the_docstring():
    """In three blocks; and those of several gaps, which are counted through."""
    config = sharp_models()[0].config
    requests = [[5, 6, 7]] * 3 + [Request([BOS], (4, [7, 8], 5))]
    requests = prepare(requests, settings("llada", new=7, block_length=2, merge=3), config)
    decoder = decoder_for(requests, config)
    layout = jax.tree.map(jnp.asarray, decoder.lay_out(requests))
    state = decoder.start_text(MaskedText, layout, jax.random.split(jax.random.key(0), len(requests)))
    is_fed = np.asarray(fed_places(state, jnp.array([2, 4, 8, 2]), 3))
    drawn = ["".join(".x"[int(fed)] for fed in row) for row in is_fed]
    assert [row[:10] for row in drawn[:3]] == ["xxxxx.x.x.", "xxxxxxx.x.", "x" * 10]
    assert drawn[3][:12] == "xxx" + ".x" + "xx" + "..x.x"


def test_the_counts_of_the_docstring_of_conv():
    """p q M M c M, k = 5."""
    known = jnp.array([[1, 1, 0, 0, 1, 0]], bool)
    assert known_nearby(known, jnp.array([[2, 3, 5]]), jnp.array([2])).tolist() == [[3, 2, 1]]


@pytest.mark.thorough
def test_cached_equals_uncached_in_one_layer_whose_keys_depend_on_their_own_tokens_alone():
    model, own = sharp_model(3, num_hidden_layers=1), {"block_length": 6, "threshold": 0.4}
    exact, *cached = (decode(model, PROMPTS, settings("fast_dllm", reuse=x, **own)) for x in ("none", "dual", "prefix"))
    assert cached == [exact] * 2


def test_a_verifier_without_weight_refuses_nothing_and_all_is_written_at_once():
    out = decode(equipped(sharp_models()[0], "apd"), PROMPTS, settings("apd", drafter_weight=1.0))
    assert out.forwards == [1] * len(PROMPTS)
    assert all(order == sorted(order) for order in out.commit_order)


def test_apd_needs_a_second_model_of_the_same_vocabulary():
    model = sharp_models()[0]
    with pytest.raises(UserError, match="verifier=: the decoder 'apd' needs a model here"):
        decode(model, PROMPTS, settings("apd"))
    with pytest.raises(UserError, match="verifier=: the decoder 'apd' needs a model here"):
        load_for("/no/model/is/read", settings("apd"))
    with pytest.raises(UserError, match="of another vocabulary: num_tokens is 20, not 30"):
        with_auxiliaries(model, verifier=tiny_model(num_tokens=20))


@pytest.mark.parametrize("padded", [30, 48])
def test_the_vocabulary_of_the_verifier_may_be_padded_otherwise(padded):
    model, same, verifier = sharp_models()[1], tiny_model(7), tiny_model(7, vocab_size=padded)
    for name in ("embed_tokens", "lm_head"):
        table = jnp.zeros(getattr(verifier, name).shape)
        getattr(verifier, name)[...] = table.at[:30].set(getattr(same, name)[:30])
    for own in (settings("apd"), settings("apd", temperature=1.0)):
        one, two = (decode(with_auxiliaries(model, verifier=x), PROMPTS, own) for x in (verifier, same))
        assert one == two


@pytest.mark.parametrize(("weight", "forwards"), [(0.6, 16), (1.0, 1)])
def test_a_verifier_never_agrees_to_an_id_that_it_lacks_unless_it_has_no_say(weight, forwards):
    """Both write token 29 everywhere, which in the verifier is a row after its tokens; its own best is 9."""
    models = tiny_model(), tiny_model(num_tokens=29)
    for model in models:
        model.layers.o_proj[...] *= 0
        model.layers.down_proj[...] *= 0
        embedding, head = jnp.ones_like(model.embed_tokens[...]), jnp.zeros_like(model.lm_head[...])
        model.embed_tokens[...], model.lm_head[...] = embedding, head.at[29].set(1.0).at[9].set(0.5)
    model = joined(models[0], {"verifier": models[1]})
    for temperature in (0.0, 1e-3):
        out = decode(model, PROMPTS, settings("apd", drafter_weight=weight, temperature=temperature))
        assert (out.tokens, out.forwards) == ([[29] * 16] * len(PROMPTS), [forwards] * len(PROMPTS))


def test_a_verifier_may_have_fewer_ids_if_all_that_both_have_mean_the_same(tmp_path):
    """As Dream 7B and Qwen2.5-0.5B, whose vocabulary Dream continues with two special tokens."""
    big, small = tmp_path / "big", tmp_path / "small"
    tiny_qwen3(big)
    ids = load_tokenizer_file(write_tokenizer(big, also=["<|beginoftext|>", "<|mask|>"]), "<mask>").mask_id
    change_config(big, mask_token_id=ids, refusion_jax={"objective": "dream", "shifted": True})
    tiny_qwen3(small, vocab_size=ids, num_tokens=ids - 1)
    change_config(small, mask_token_id=None, eos_token_id=5)
    model = load_for(big, s := settings("apd", verifier=str(small)))
    assert (model.config.num_tokens, model.verifier.config.num_tokens) == (ids + 1, ids)
    assert len(decode(model, [[70, 80]], s).tokens[0]) == 16
    with pytest.raises(UserError, match="was trained with objective=dream; apd needs a model of ar"):
        load_for(small, settings("apd", verifier=str(big)))


def test_models_are_offered_the_decoders_for_them_and_last_those_that_need_more_than_the_model():
    assert decoders_for("llada") == ["llada", "conv", "fast_dllm", "apd"]
    assert decoders_for("dream") == ["dream", "conv", "fast_dllm", "apd"]
    assert decoders_for("r2ft") == decoders_for("llada")  # which trains on its models, and decodes them as before
    assert not {"conv", "fast_dllm", "apd"} & set(decoders_for("ar"))


cart_weights = jax.jit(dream.cart_weights)
OBJECTIVE = dream.ShiftedDiffusion(mask_id=MASK, padding=0.0, shuffle=False, cart_p=0.5)


def test_weights_of_dream_are_the_double_sum_of_the_paper():
    rng = np.random.default_rng(0)
    segments = np.array([[1] * 9 + [2] * 14 + [0] * 3])
    clean = (rng.random(segments.shape) < 0.5) & (segments > 0)
    expected = np.zeros(segments.shape)
    for n in range(26):
        for i in range(26):
            if i != n and clean[0, i] and segments[0, i] == segments[0, n]:
                expected[0, n] += 0.3 * 0.7 ** (abs(n - i) - 1) / 2
    np.testing.assert_allclose(cart_weights(jnp.asarray(clean), jnp.asarray(segments), 0.3), expected, atol=1e-6)


def test_a_masked_token_is_the_label_of_the_token_before_it_and_the_weights_are_a_mean_over_masks():
    rows = packed([(2, 6), (0, 6)], 16)
    seen, corrupt = set(), jax.jit(OBJECTIVE.corrupt)
    for seed in range(5):
        batch = corrupt(rows, jax.random.split(jax.random.key(seed), 1))
        masked = np.flatnonzero(batch.inputs[0] == MASK)
        seen |= set(masked)
        cart = cart_weights((rows.segment_ids > 0) & (batch.inputs != MASK), rows.segment_ids, 0.5)[0]
        np.testing.assert_array_equal(batch.labels[0, masked - 1], rows.tokens[0, masked])
        expected = np.zeros(16)
        expected[masked - 1] = cart[masked] / max(len(masked), 1)
        np.testing.assert_allclose(batch.weights["mdm"][0], expected, rtol=1e-6)
    assert seen == {*range(2, 8), *range(9, 14)}  # neither prompts nor the first token of a document


@pytest.mark.parametrize(("masks", "steps"), [(16, 16), (16, 4), (7, 3), (5, 9), (32, 512)])
def test_a_schedule_commits_everything_in_no_more_steps_than_asked_for(masks, steps):
    counts = dream.schedule(masks, steps)
    assert sum(counts) == masks
    assert len(counts) <= steps
    assert min(counts) > 0


def test_a_text_cannot_begin_with_a_gap():
    with pytest.raises(UserError, match="prompt 0: begins with a gap"):
        decode(tiny_model(shifted=True), [Request([], (2, [BOS, 5], 3))], settings("dream"))
