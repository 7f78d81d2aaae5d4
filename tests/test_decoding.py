import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference_decoder
from conftest import BOS, EOS, MASK, PAD, tiny_model
from flax import nnx

from refusion_jax import DecodeSettings, UserError, decode
from refusion_jax.decoding import api
from refusion_jax.decoding.sampling import probability, sample

THRESHOLDS = [(1, 0.6, 0.4), (1, 0.7, 0.02), (1, 0.2, 0.7), (2, 0.4, 0.2), (4, 0.9, 0.01)]
PROMPTS = [
    [BOS, 5, 9, 13],
    [BOS, 22],
    [BOS, 7, 7, 7, 8, 19, 25, 11],
    [BOS, 6, 28, 3],
    [BOS, 14, 15, 16, 17, 18],
    [BOS, 29, 27, 9],
]


def sharp_model(seed: int = 0):
    """A random model sure enough of itself that thresholds decide."""
    model = tiny_model(seed)
    model.layers.o_proj[...] *= 8.0
    model.layers.down_proj[...] *= 4.0
    model.lm_head[...] *= 3.0
    model.lm_head[...] = model.lm_head[...].at[EOS].multiply(1.5)  # so that some answers end
    return model


def settings(method="refusion", new=16, size=4, blocks=1, slot=0.6, token=0.4, **changes) -> DecodeSettings:
    return DecodeSettings(method, new, size, blocks, slot, token, **changes)


@pytest.mark.parametrize(("blocks", "slot", "token"), THRESHOLDS)
def test_refusion_decodes_as_the_plain_method_without_a_cache(blocks, slot, token):
    s = settings(blocks=blocks, slot=slot, token=token)
    for seed in range(3):
        model = sharp_model(seed)
        out = decode(model, PROMPTS, s)
        for i, prompt in enumerate(PROMPTS):
            expected = reference_decoder.refusion(model, prompt, s)
            got = {name: getattr(out, name)[i] for name in ("tokens", "commit_order", "forwards", "rounds")}
            assert got == {name: expected[name] for name in got}, f"model {seed}, prompt {i}"


def test_the_cases_above_meet_every_phase_and_every_way_to_end():
    """Otherwise the comparison would prove little."""
    expected = [
        reference_decoder.refusion(sharp_model(seed), prompt, settings(blocks=blocks, slot=slot, token=token))
        for seed in range(3)
        for blocks, slot, token in THRESHOLDS
        for prompt in PROMPTS
    ]
    counts = [
        sum(e["infills"] > 0 for e in expected),
        sum(e["infills"] < e["rounds"] for e in expected),
        sum(EOS in e["tokens"] for e in expected),
        sum(EOS not in e["tokens"] for e in expected),
        sum(e["commit_order"] != sorted(e["commit_order"]) for e in expected),
        sum(e["forwards"] < len(e["commit_order"]) for e in expected),
    ]
    assert min(counts) > 10, counts


@pytest.mark.parametrize("method", ["sequential", "ar"])
def test_one_token_a_forward_equals_forwards_without_a_cache(method):
    s = settings(method)
    for seed in range(3):
        model = sharp_model(seed)
        out = decode(model, PROMPTS, s)
        for i, prompt in enumerate(PROMPTS):
            expected = reference_decoder.left_to_right(model, prompt, s)
            assert out.tokens[i] == expected["tokens"]
            assert out.commit_order[i] == expected["commit_order"]
            assert out.forwards[i] == len(out.tokens[i]) == expected["forwards"]


@pytest.mark.parametrize("method", ["refusion", "sequential", "ar"])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_batch_of_mixed_prompts_decodes_each_as_if_alone(method, temperature):
    model = sharp_model()
    s = settings(method, temperature=temperature)
    together = decode(model, PROMPTS, s)
    in_pairs = decode(model, PROMPTS, dataclasses.replace(s, batch_size=2))
    assert together == in_pairs
    for i, prompt in enumerate(PROMPTS):
        alone = decode(model, [prompt], s)
        if temperature == 0 or i == 0:  # sampling noise belongs to a prompt's place in the call
            assert {f: v[0] for f, v in vars(alone).items()} == {f: v[i] for f, v in vars(together).items()}


@pytest.mark.parametrize("method", ["refusion", "sequential", "ar"])
def test_every_position_is_committed_once_and_nothing_behind_eos_is_answered(method):
    for seed in range(3):
        out = decode(sharp_model(seed), PROMPTS, settings(method))
        for i, prompt in enumerate(PROMPTS):
            places, tokens = out.commit_order[i], out.tokens[i]
            assert len(set(places)) == len(places) == len(out.commit_tokens[i])
            in_order = [t for _, t in sorted(zip(places, out.commit_tokens[i], strict=True))]
            assert in_order[: len(tokens)] == tokens
            answered = set(range(len(prompt), len(prompt) + len(tokens)))
            assert answered <= set(places)
            if out.finish_reason[i] == "eos":
                assert tokens.index(EOS) == len(tokens) - 1
            else:
                assert EOS not in tokens
                assert len(tokens) == 16


@pytest.mark.parametrize("method", ["refusion", "sequential", "ar"])
def test_changing_thresholds_temperature_seed_and_prompts_compiles_nothing(method):
    model = sharp_model()
    decode(model, PROMPTS, settings(method))
    compiled = api._run._cache_size()
    decode(model, PROMPTS[::-1], settings(method, slot=0.1, token=0.9, temperature=0.5, seed=9))
    assert api._run._cache_size() == compiled
    decode(model, PROMPTS, settings(method, new=8))
    assert api._run._cache_size() == compiled + 1  # sizes do: the counter counts


@pytest.mark.parametrize("method", ["refusion", "sequential", "ar"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_mask_padding_and_ids_without_meaning_are_never_chosen(method, temperature):
    model = sharp_model()
    banned = [MASK, PAD, 30, 31]  # the last two are padding rows of the vocabulary
    favoured = model.lm_head[...][jnp.array([7, 9, 11, 13])]
    model.lm_head[...] = model.lm_head[...].at[jnp.array(banned)].set(3 * favoured)
    logits = model(jnp.array(PROMPTS[:1]), jnp.arange(4)[None], jnp.ones((1, 4), int))
    assert np.isin(jnp.argmax(logits, axis=-1), banned).any(), "the model does not even want them"
    out = decode(model, PROMPTS, settings(method, temperature=temperature))
    assert not {token for tokens in out.commit_tokens for token in tokens} & set(banned)


def test_sampling_follows_softmax_and_temperature():
    logits = jnp.array([[[0.0, 1.0, 2.0, -1.0]]])
    keys = jax.random.split(jax.random.key(0), 20_000)
    for temperature in (0.5, 2.0):
        drawn = sample(jnp.broadcast_to(logits, (20_000, 1, 4)), keys, jnp.float32(temperature))
        expected = jax.nn.softmax(logits[0, 0] / temperature)
        # 5 standard deviations of a share of 20 000 draws are at most 0.018
        np.testing.assert_allclose(np.bincount(drawn[:, 0], minlength=4) / 20_000, expected, atol=0.018)
    assert sample(logits, keys[:1], jnp.float32(0.0)).item() == 2


def test_sampling_depends_on_the_seed():
    model = sharp_model()
    a, b, c = (decode(model, PROMPTS, settings(temperature=1.0, seed=seed)) for seed in (0, 0, 1))
    assert a == b
    assert a != c


def test_probability_is_softmax_at_the_token():
    logits = jax.random.normal(jax.random.key(0), (2, 3, 5))
    tokens = jnp.array([[0, 1, 2], [3, 4, 0]])
    expected = np.take_along_axis(np.array(jax.nn.softmax(logits)), np.array(tokens)[..., None], axis=-1)[..., 0]
    np.testing.assert_allclose(probability(logits, tokens), expected, rtol=1e-5)


def test_the_loop_talks_to_the_host_once_a_batch():
    """Prompts go in, the record comes out; inside the loop nothing may be transferred."""
    model = sharp_model()
    lowered = api._run.lower(
        *nnx.split(model),
        np.ones((2, 32), np.int32),
        np.full(2, 3, np.int32),
        np.ones(2, bool),
        jax.random.split(jax.random.key(0), 2),
        *reversed(api.split_settings(settings(), model.config)),
    ).as_text()
    assert "while" in lowered
    assert not [word for word in ("callback", "infeed", "outfeed") if word in lowered]


def test_no_prompts_give_no_answers():
    assert decode(sharp_model(), [], settings()).tokens == []


def test_without_a_number_of_new_tokens_the_context_is_used_up_to_128():
    model = tiny_model(max_position_embeddings=50)
    out = decode(model, [[BOS] * 9], DecodeSettings("sequential", slot_size=8, eos_id=29))
    assert len(out.commit_order[0]) <= 40
    assert DecodeSettings(slot_size=8, serial_blocks=2).fill_in(45).max_new_tokens == 32
    assert DecodeSettings(slot_size=8).fill_in(1000).max_new_tokens == 128
    assert DecodeSettings(max_new_tokens=64).fill_in(1000).max_new_tokens == 64


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"max_new_tokens": 24, "slot_size": 8, "serial_blocks": 2}, "--decode.max_new_tokens=24.*32 would"),
        ({"max_new_tokens": -1}, "--decode.max_new_tokens=-1: must be at least 0"),
        ({"slot_size": 0}, "--decode.slot_size=0: must be at least 1"),
        ({"temperature": -0.1}, "--decode.temperature=-0.1: must be at least 0"),
        ({"method": "beam"}, "--decode.method=beam: unknown; known: refusion, sequential, ar"),
    ],
)
def test_impossible_settings_are_refused(changes, said):
    with pytest.raises(UserError, match=said):
        DecodeSettings(**changes)


@pytest.mark.parametrize(
    ("prompt", "changes", "said"),
    [
        ([], {}, "prompt 1: is empty"),
        ([BOS, 32], {}, "prompt 1: holds an id outside 0 to 31"),
        ([BOS] * 20, {"cache_length": 30}, "prompt 1: has 20 tokens, and 16 new ones do not fit.*cache of 30"),
        ([BOS], {"mask_id": 32}, "--decode.mask_id=32 is no token of this model"),
    ],
)
def test_prompts_that_cannot_be_decoded_are_refused(prompt, changes, said):
    with pytest.raises(UserError, match=said):
        decode(tiny_model(), [[BOS, 5], prompt], settings(**changes))
