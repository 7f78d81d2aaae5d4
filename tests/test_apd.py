"""A model that drafts and one that checks: what is committed, and what a decoder with an auxiliary model asks for."""

import jax.numpy as jnp
import pytest
from conftest import MASK, PAD, PROMPTS, equipped, logits_of, settings, sharp_models, tiny_model
from helpers import SHIPPED

from refusion_jax import UserError, decode, load_model
from refusion_jax.checkpoints.load import load_for
from refusion_jax.decoding.auxiliary import with_auxiliaries
from refusion_jax.systems.registry import decoders_for


def test_a_verifier_without_weight_refuses_nothing_and_all_is_written_at_once():
    out = decode(equipped(sharp_models()[0], "apd"), PROMPTS, settings("apd", drafter_weight=1.0))
    assert out.forwards == [1] * len(PROMPTS)
    assert all(order == sorted(order) for order in out.commit_order)


def test_with_all_weight_it_accepts_just_what_it_would_write_itself():
    """What a forward pass commits after its first draft is the verifier's own choice, given all before it."""
    model = equipped(sharp_models()[1], "apd")
    out = decode(model, PROMPTS, settings("apd", drafter_weight=0.0))
    for prompt, tokens, forwards in zip(PROMPTS, out.tokens, out.forwards, strict=True):
        logits = logits_of(model.verifier, [prompt + tokens + [0] * (32 - len(prompt + tokens))])[0]
        own = logits[:, :30].at[:, jnp.array([PAD, MASK])].set(-jnp.inf).argmax(axis=1)[len(prompt) - 1 :]
        refused = sum(int(a) != b for a, b in zip(own, tokens, strict=False))
        assert refused <= forwards <= len(tokens)  # only a forward pass's first draft can be another
    half = decode(model, PROMPTS, settings("apd", drafter_weight=0.9))
    assert len(PROMPTS) < sum(half.forwards) < sum(map(len, half.tokens))  # some are accepted, others refused


def test_it_needs_a_second_model_of_the_same_vocabulary():
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


def test_a_checkpoint_is_loaded_with_those_that_the_settings_name():
    model = load_for(SHIPPED / "model", settings("apd", verifier=str(SHIPPED / "model")))
    assert model.verifier.config == load_model(SHIPPED / "model").config


def test_models_are_offered_the_decoders_for_them_and_last_those_that_need_more_than_the_model():
    assert decoders_for("llada") == ["llada", "conv", "fast_dllm", "apd"]
    assert decoders_for("dream") == ["dream", "conv", "fast_dllm", "apd"]
    assert decoders_for("r2ft") == decoders_for("llada")  # which trains on its models, and decodes them as before
    assert not {"conv", "fast_dllm", "apd"} & set(decoders_for("ar"))
