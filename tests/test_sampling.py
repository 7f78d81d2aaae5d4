"""From logits to tokens: what is drawn, and what never is."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import BOS, EOS, MASK, PAD, PROMPTS, logits_of, settings, sharp_model, tiny_model

from refusion_jax import DecodeSettings, Request, decode
from refusion_jax.decoding.sampling import sample
from refusion_jax.decoding.settings import TracedSettings


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


def test_sampling_follows_softmax_and_temperature():
    logits, rows = jnp.array([[[0.0, 1.0, 2.0, -1.0]]]), 20_000
    keys, places = jax.random.split(jax.random.key(0), (rows, 1)), jnp.zeros((rows, 1), int)
    many, draw = jnp.broadcast_to(logits, (rows, 1, 4)), jnp.ones((rows, 1), bool)
    for temperature in (0.5, 2.0):
        drawn = sample(many, draw, keys, places, row_settings(rows, temperature=temperature))
        expected = jax.nn.softmax(logits[0, 0] / temperature)
        # 5 standard deviations of a share of 20 000 draws are at most 0.018
        np.testing.assert_allclose(np.bincount(drawn[:, 0], minlength=4) / rows, expected, atol=0.018)
    warm = row_settings(rows, temperature=9.0)
    assert (sample(many, ~draw, keys, places, warm) == 2).all()  # where nothing is drawn, the best
    assert (sample(many, draw, keys, places, row_settings(rows)) == 2).all()


def test_sampling_depends_on_the_seed():
    model = sharp_model()
    a, b, c = (decode(model, PROMPTS, settings(temperature=1.0, seed=seed)) for seed in (0, 0, 1))
    assert a == b
    assert a != c


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


def test_top_k_and_top_p_keep_the_most_probable():
    logits = jnp.log(jnp.array([[[0.4, 0.3, 0.2, 0.1]]]))
    rows = 20_000
    draw = jnp.ones((rows, 1), bool)
    keys, places = jax.random.split(jax.random.key(0), (rows, 1)), jnp.zeros((rows, 1), int)
    for changes, expected in (
        ({"top_k": 2}, [4 / 7, 3 / 7, 0, 0]),
        ({"top_p": 0.75}, [4 / 9, 3 / 9, 2 / 9, 0]),
        ({"top_p": 0.05}, [1, 0, 0, 0]),
        ({"top_k": 3, "top_p": 0.5}, [4 / 7, 3 / 7, 0, 0]),  # of 4/9, 3/9, 2/9
    ):
        own = row_settings(rows, temperature=1.0, **changes)
        drawn = sample(jnp.broadcast_to(logits, (rows, 1, 4)), draw, keys, places, own)
        # 5 standard deviations of a share of 20 000 draws are at most 0.018
        np.testing.assert_allclose(np.bincount(drawn[:, 0], minlength=4) / rows, expected, atol=0.018)
        assert not (np.bincount(drawn[:, 0], minlength=4) > 0)[np.array(expected) == 0].any()
