"""What can be asked for, what is refused, and from logits to tokens: what is drawn, and what never is."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import BOS, EOS, MASK, PAD, PROMPTS, logits_of, settings, sharp_model, sharp_models, tiny_model

from refusion_jax import DecodeSettings, Request, UserError, decode
from refusion_jax.decoding.requests import prepare
from refusion_jax.decoding.sampling import sample
from refusion_jax.decoding.settings import TracedSettings
from refusion_jax.systems.api import decoder_for


def test_templates_keep_what_is_given_and_fill_the_gaps():
    for model in sharp_models():
        given = ([7, 8], 10, [9, EOS, 11], 3, [12], 8)
        s = settings(slot=0.5, token=0.3)
        out = decode(model, [Request([BOS, 5], given), Request([], ([BOS], 6, [14]))], s)
        text = out.tokens[0]
        assert text[:2] == [7, 8]
        assert text[12:15] == [9, EOS, 11]
        assert text[18] == 12
        assert EOS not in text[2:12] + text[15:18]  # a gap that has text after it cannot end it
        assert len(text) == 27 or text.index(EOS, 19) == len(text) - 1
        gaps = {*range(4, 14), *range(17, 20)}
        assert gaps <= set(out.commit_order[0]) <= gaps | set(range(21, 29))
        assert len(out.tokens[1]) == 8
        assert out.tokens[1][-1] == 14
        assert sorted(out.commit_order[1]) == list(range(1, 7))


def test_a_default_length_is_of_no_interest_to_a_template_and_told_where_it_does_not_fit():
    model = sharp_model()
    own = settings("llada", new=0, steps=6, block_length=8)
    filled = Request([BOS, 5], ([7], 16))
    assert decode(model, [filled], own) == decode(model, [filled], settings("llada", new=16, steps=6, block_length=8))
    with pytest.raises(UserError, match=r"prompt 1: steps=16: must be a multiple of the 5 blocks .* its 216 tok"):
        prepare([[BOS], [BOS] * 216], settings("llada", new=0, steps=16, block_length=8), model.config)


def test_prompts_may_be_arrays_and_noise_is_what_the_request_says():
    model, own = sharp_model(), settings("sequential", temperature=1.5)
    array = Request(np.array([BOS, 5, 9]), (np.int64(4), np.array([7, 8])), noise=3)
    out = decode(model, [[BOS], array, Request([BOS, 5, 9], (4, [7, 8]), noise=3)], own)
    assert out.tokens[1] == out.tokens[2]
    assert json.loads(json.dumps(out.tokens)) == out.tokens
    prompts = [[BOS, 5], np.array([BOS, 5])]
    assert len(set(map(tuple, decode(model, prompts * 3, own).tokens))) > 1  # by default, each has its own


@pytest.mark.parametrize("method", ["refusion", "ar", "llada"])
def test_an_answer_can_end_with_any_token_that_is_said_to_end_it(method):
    """Also with the padding of the model; not with its mask."""
    model = sharp_model()
    model.lm_head[...] = model.lm_head[...].at[PAD].set(3 * model.lm_head[EOS])
    out = decode(model, PROMPTS, settings(method, eos_id=PAD))
    assert "eos" in out.finish_reason
    assert all((tokens[-1] == PAD) == (why == "eos") for tokens, why in zip(out.tokens, out.finish_reason, strict=True))
    with pytest.raises(UserError, match=f"eos_id={MASK}: is the mask token"):
        decode(model, PROMPTS, settings(method, eos_id=MASK))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"max_new_tokens": 24, "slot_size": 8, "serial_blocks": 2}, "max_new_tokens=24.*32 would"),
        ({"max_new_tokens": -1}, "max_new_tokens=-1: must be at least 0"),
        ({"slot_size": 0}, "slot_size=0: must be at least 1"),
        ({"temperature": -0.1}, "temperature=-0.1: must be at least 0"),
        ({"method": "beam"}, "method=beam: unknown; known: .*ar, .*refusion, sequential"),
    ],
)
def test_impossible_settings_are_refused(changes, said):
    """Whether they are numbers of Python's or of numpy's."""
    with pytest.raises(UserError, match=f"^{said}"):
        DecodeSettings(**{name: x if isinstance(x, str) else np.asarray(x)[()] for name, x in changes.items()})


@pytest.mark.parametrize(
    ("prompt", "changes", "said"),
    [
        ([], {}, "prompt 1: is empty"),
        ([BOS, 30], {}, "prompt 1: holds an id outside 0 to 29"),  # the embedding has rows up to 31
        *((x, {}, "prompt 1: must be a list of token ids") for x in ("text", 7, [5.5], [[5], [6, 7]], [5, True])),
        ([BOS] * 20, {"cache_length": 30}, "prompt 1: has 20 tokens, and 16 new ones do not fit.*cache of 30"),
        ([BOS], {"mask_id": 32}, "mask_id=32: is not a token of this model: give one of 0 to 31"),
    ],
)
def test_prompts_that_cannot_be_decoded_are_refused(prompt, changes, said):
    with pytest.raises(UserError, match=f"^{said}"):
        decode(tiny_model(), [[BOS, 5], prompt], settings(**changes))


def test_the_default_length_of_an_answer_depends_on_its_own_prompt_alone():
    model, asked = tiny_model().config, DecodeSettings("ar", cache_length=64)
    long, short = prepare([[BOS] * 50, [BOS]], asked, model)
    (alone,) = prepare([[BOS]], asked, model)
    assert short.settings == alone.settings
    assert (long.length, short.length) == (64, 64)
    filled = [DecodeSettings(**own).fill_in(room) for own, room in (({}, 1000), ({"serial_blocks": 2}, 45))]
    assert [own.max_new_tokens for own in filled] == [128, 32]


def test_the_prompts_of_a_call_share_decoder_and_batch():
    model = tiny_model().config
    for other in ("refusion", "card"):
        mixed = prepare([Request([BOS], settings=settings("llada")), Request([BOS], settings=settings(other))],
                        settings("llada"), model)  # fmt: skip
        with pytest.raises(UserError, match="^prompt 1: method must be the same for all prompts of a call"):
            decoder_for(mixed, model)
    (own,) = prepare([Request([BOS], settings=settings(temperature=0.5))], settings(batch_size=3), model)
    assert (own.settings.temperature, own.settings.batch_size) == (0.5, 3)


def row_settings(rows, **changes):
    """[rows, 1] of the same settings."""
    return jax.tree.map(lambda x: x[:, None], TracedSettings.of([DecodeSettings(**changes)] * rows))


@pytest.mark.parametrize("method", ["refusion", "ar"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_mask_padding_and_ids_without_meaning_are_never_chosen(method, temperature):
    model = sharp_model()
    banned = [MASK, PAD, 30, 31]  # the last two are padding rows of the vocabulary
    favoured = model.lm_head[...][jnp.array([7, 9, 11, 13])]
    model.lm_head[...] = model.lm_head[...].at[jnp.array(banned)].set(3 * favoured)
    assert np.isin(logits_of(model, PROMPTS[:1]).argmax(axis=-1), banned).any(), "the model does not even want them"
    out = decode(model, PROMPTS, settings(method, temperature=temperature))
    assert not {token for tokens in out.commit_tokens for token in tokens} & set(banned)


@pytest.mark.parametrize("extreme", [{"temperature": 1e-40}, {"temperature": 1.0, "top_p": 1e-42}], ids=str)
def test_the_smallest_numbers_draw_the_most_probable_token(extreme):
    keys, places = jax.random.split(jax.random.key(0), (64, 1)), jnp.zeros((64, 1), int)
    logits = 9 * jax.random.normal(jax.random.key(1), (64, 1, 30))
    logits = logits.at[:, :, 3].set(-jnp.inf)
    drawn = sample(logits, jnp.ones((64, 1), bool), keys, places, row_settings(64, **extreme))
    np.testing.assert_array_equal(drawn, jnp.argmax(logits, axis=-1))


def test_draws_follow_temperature_top_k_and_top_p():
    p, rows = np.array([0.1, 0.4, 0.3, 0.2]), 20_000
    logits, draw = jnp.broadcast_to(jnp.log(p), (rows, 1, 4)), jnp.ones((rows, 1), bool)
    keys, places = jax.random.split(jax.random.key(0), (rows, 1)), jnp.zeros((rows, 1), int)
    for changes, weights in (
        ({"temperature": 0.5}, p**2),
        ({"temperature": 2.0}, p**0.5),
        ({"top_k": 2}, [0, 4, 3, 0]),
        ({"top_p": 0.75}, [0, 4, 3, 2]),
        ({"top_p": 0.05}, [0, 1, 0, 0]),
        ({"top_k": 3, "top_p": 0.5}, [0, 4, 3, 0]),  # of 4/9, 3/9, 2/9
    ):
        drawn = sample(logits, draw, keys, places, row_settings(rows, **{"temperature": 1.0} | changes))
        shares, expected = np.bincount(drawn[:, 0], minlength=4) / rows, np.array(weights) / np.sum(weights)
        np.testing.assert_allclose(shares, expected, atol=0.018)  # 5 standard deviations of 20,000 draws, at most
        assert not shares[expected == 0].any()
    assert (sample(logits, ~draw, keys, places, row_settings(rows, temperature=9.0)) == 1).all()  # not drawn: the best
    assert (sample(logits, draw, keys, places, row_settings(rows)) == 1).all()


@pytest.mark.parametrize("method", ["llada", "sdar"])
def test_a_place_that_is_proposed_again_is_drawn_anew(method):
    """Of two draws the more probable one is committed; the other place is proposed once more.

    To this model all texts are the same, so what is committed last is a draw like any other. With the noise of the
    first forward it would be the less probable one of two: the best token at 0.37 of the places, not at 0.61.
    """
    model = tiny_model(3)
    same = model.embed_tokens
    same[...] = jnp.broadcast_to(same[...][:1], same.shape)
    logits = logits_of(model, PROMPTS[:1])[0, 0]
    expected = np.array(jax.nn.softmax(logits / 0.2).at[jnp.array([PAD, EOS, MASK, 30, 31])].set(0))
    expected /= expected.sum()

    rows = 600
    own = settings(method, new=2, temperature=0.2, threshold=1.0, block_length=2, block_size=4)
    prompt = Request([BOS, 5, 6, 7, 8], least=2)  # no EOS in two tokens, which lie in the same block of the text
    drawn = [tokens[-1] for tokens in decode(model, [prompt] * rows, own).commit_tokens]
    # 5 standard deviations of a share of 600 draws are at most 0.102
    np.testing.assert_allclose(np.bincount(drawn, minlength=32) / rows, expected, atol=0.102)
