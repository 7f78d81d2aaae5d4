"""Lossless decoders: that drafts change no text, greedy or drawn, wherever they come from."""

import collections
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import (
    BOS,
    MASK,
    PROMPTS,
    causal,
    config_with,
    equipped,
    forward,
    settings,
    sharp_models,
    tiny_config,
    tiny_model,
)
from etils import epath
from flax import nnx
from helpers import tiny_qwen3

from refusion_jax import UserError, decode, load_model
from refusion_jax.batch.rows import Rows
from refusion_jax.checkpoints.load import find_tokenizer, load_for
from refusion_jax.checkpoints.run_directory import write_model_config
from refusion_jax.checkpoints.weights import save_params
from refusion_jax.decoding.auxiliary import with_auxiliaries
from refusion_jax.decoding.requests import Request
from refusion_jax.distributed.sharding import make_mesh
from refusion_jax.systems import pard, prompt_lookup
from refusion_jax.training.program import train_program


@pytest.mark.thorough
def test_a_forward_feeds_as_much_as_pays_and_writes_what_one_token_after_the_other_is():
    """Of other numbers, and other decoders, tests/test_systems.py says so."""
    saved = 0
    for model in sharp_models()[:3]:
        out, ar = (decode(model, PROMPTS, settings(m, fed_tokens=0)) for m in ("dense", "ar"))
        assert (out.tokens, out.commit_order) == (ar.tokens, ar.commit_order)
        assert all(a <= b for a, b in zip(out.forwards, ar.forwards, strict=True))
        saved += sum(ar.forwards) - sum(out.forwards)
    assert saved > 0


@pytest.mark.parametrize(
    ("method", "changes", "prompt"),
    [
        ("prompt_lookup", {"draft_length": 3}, [BOS, 9, 22, 9]),
        pytest.param("pard", {"draft_length": 3}, [BOS, 9, 13], marks=pytest.mark.thorough),
        pytest.param("dflash", {"draft_length": 3}, [BOS, 9, 13], marks=pytest.mark.slow),
        pytest.param("idlm", {"stride": 3}, [BOS, 9, 13], marks=pytest.mark.thorough),
        pytest.param("dense", {"fed_tokens": 8}, [BOS, 9, 13], marks=pytest.mark.slow),
        pytest.param("dense", {"fed_tokens": 24}, [BOS, 9, 13], marks=pytest.mark.thorough),
    ],
)
def test_drawn_texts_are_distributed_as_next_token_predictions(method, changes, prompt):
    """Three tokens at temperature 1, within top_k: the joint distribution of 512 draws, by a chi-square test.

    What drafts and next tokens have in common is about half of their probability: some are accepted, some refused.
    """
    model, k = tiny_model(3), 2

    def p(text):
        logits = forward(model, jnp.array([text]), jnp.arange(len(text))[None], causal(jnp.ones((1, len(text)), int)))
        logits = np.array(logits[0, -1])
        logits[[MASK, 0, 30, 31]] = -np.inf
        logits[np.argsort(logits)[:-k]] = -np.inf
        return {token: share for token, share in enumerate(np.array(jax.nn.softmax(logits))) if share > 0}

    expected = {
        (a, b, c): pa * pb * pc
        for a, pa in p(prompt).items()
        for b, pb in p([*prompt, a]).items()
        for c, pc in p([*prompt, a, b]).items()
    }
    runs, unseen = 512, min(set(range(5, 30)).difference(*expected))
    s = settings(method, new=4, temperature=1.0, top_k=k, batch_size=runs, eos_id=unseen, **changes)
    seen = collections.Counter(tuple(t[:3]) for t in decode(equipped(model, method), [prompt] * runs, s).tokens)
    assert seen.keys() <= expected.keys()
    statistic = sum((seen[text] - runs * share) ** 2 / (runs * share) for text, share in expected.items())
    assert len(expected) == 8
    assert statistic < 24.4  # the 99.9 % quantile with 7 degrees of freedom


@pytest.mark.parametrize(
    ("method", "changes", "forwards"),
    [
        ("idlm", {"stride": 4}, 1 + 4),  # one token, then four per forward
        pytest.param("dense", {"fed_tokens": 24}, 2, marks=pytest.mark.thorough),
    ],
)
def test_a_model_that_ignores_its_place_accepts_every_draft(method, changes, forwards):
    """Attention and mlp silenced, every token followed by one token: each forward yields as many as it may."""
    model = tiny_model()
    model.layers.o_proj[...] *= 0
    model.layers.down_proj[...] *= 0
    embedding, head = jnp.ones_like(model.embed_tokens[...]), jnp.zeros_like(model.lm_head[...])
    model.embed_tokens[...], model.lm_head[...] = embedding, head.at[9].set(1.0)
    out = decode(model, PROMPTS, settings(method, new=17, **changes))
    assert out.tokens == [[9] * 17] * len(PROMPTS)
    assert out.forwards == [forwards] * len(PROMPTS)


@pytest.mark.thorough
def test_a_drafter_that_is_the_model_itself_has_its_first_draft_accepted():
    for model in sharp_models()[:3]:
        s = settings("pard", draft_length=3)
        equal = with_auxiliaries(model, drafter=model)
        out = decode(equal, PROMPTS, s)
        expected = [pard.reference(equal, Request(prompt, settings=s)) for prompt in PROMPTS]
        assert out.forwards == [one["forwards"] for one in expected]
        assert all(2 * forwards <= len(tokens) + 1 for forwards, tokens in zip(out.forwards, out.tokens, strict=True))


@pytest.mark.thorough
def test_a_drafter_learns_what_the_model_writes_and_the_model_stays_as_it_is(tmp_path):
    model, shape = sharp_models()[0], tiny_config()
    weights = nnx.to_pure_dict(nnx.state(model))
    save_params(tmp_path, weights)
    write_model_config(tmp_path, model.config)
    ar = decode(model, PROMPTS, settings("ar"))
    rows = Rows(*np.zeros((2, len(PROMPTS), 24), np.int32), np.zeros((len(PROMPTS), 24), bool))
    for row, (prompt, answer) in enumerate(zip(PROMPTS, ar.tokens, strict=True)):
        size = len(prompt) + len(answer)
        rows.tokens[row, :size], rows.segment_ids[row, :size] = prompt + answer, 1
        rows.is_response[row, len(prompt) : size] = True

    own = {"dflash.reads": str(tmp_path), "dflash.draft_length": 4, "batch_size": len(PROMPTS), "row_length": 24}
    config = config_with(objective="dflash", schedule="constant", learning_rate=0.01, **own)
    with jax.set_mesh(mesh := make_mesh({}, jax.devices()[:1])):
        program = train_program(config, shape, mesh)
        state = program.initial_state(program.given_weights(None))
        for _ in range(200):
            state, metrics = program.step(state, rows)
    assert metrics["loss"] < 0.1
    jax.tree.map(np.testing.assert_array_equal, state.frozen["reads"], weights)
    drafter = nnx.merge(nnx.split(tiny_model())[0], state.params)  # which are all that a checkpoint holds
    out = decode(with_auxiliaries(model, drafter=drafter), PROMPTS, settings("dflash", draft_length=4))
    assert out.tokens == ar.tokens
    assert sum(out.forwards) < 0.4 * sum(ar.forwards)


@pytest.mark.thorough
def test_drafts_are_what_followed_the_longest_match_and_of_equal_ones_the_latest():
    names, (example,) = "pabcx", re.findall(r"^    text +((?:\w )+)", prompt_lookup.__doc__, re.MULTILINE)
    (drafts,) = re.findall(r"^    drafts +((?:\w ?)+)$", prompt_lookup.__doc__, re.MULTILINE)
    cases = [
        (example, 3, drafts),
        ("p a b x a b c b", 3, "c b c"),  # `b` stood last before `c b`, which then repeats
        ("p a b c a b x a b", 1, "x a b"),
        ("a b c b a", 2, "b c b"),
        ("p a b c", 3, ""),
        ("p", 3, ""),
    ]
    for text, ngram, expected in cases:
        ids = [names.index(name) for name in text.split()]
        padded = jnp.array([ids + [ids[-1]] * 4])  # what comes after the text is never seen
        found, drafted = prompt_lookup.look_up(padded, jnp.array([len(ids)]), 3, ngram)
        assert [names[t] for t in found[0, : int(drafted[0])]] == expected.split(), text


@pytest.mark.thorough
def test_a_drafter_may_have_been_adapted_and_must_have_the_same_text_for_each_token(tmp_path):
    """Its tokenizer then has the mask token that the model's has not, and its ids are the tokenizer's."""
    plain, adapted = tmp_path / "plain", tmp_path / "adapted"
    for path, ids in (
        (plain, {"bos_token_id": 272, "eos_token_id": 274}),
        (adapted, {"pad_token_id": 272, "eos_token_id": 274}),
    ):
        tiny_qwen3(path)
        config = json.loads((path / "config.json").read_text())
        config = {key: value for key, value in config.items() if not key.endswith("_token_id")}
        (path / "config.json").write_text(json.dumps(config | ids))
    tokenizer = find_tokenizer(epath.Path(adapted))
    (adapted / "tokenizer.json").write_bytes(tokenizer.files["tokenizer.json"])
    assert (adapted / "tokenizer.json").read_bytes() != (plain / "tokenizer.json").read_bytes()
    s = settings("pard", drafter=str(adapted), draft_length=3)
    prompts = tokenizer.encode(["What is the number?", "It"])
    assert decode(load_for(plain, s), prompts, s).tokens == decode(load_model(plain), prompts, settings("ar")).tokens
    swapped = json.loads((adapted / "tokenizer.json").read_text())
    vocab = swapped["model"]["vocab"]
    vocab["!"], vocab["?"] = vocab["?"], vocab["!"]
    (adapted / "tokenizer.json").write_text(json.dumps(swapped))
    with pytest.raises(UserError, match="has another tokenizer than .*: token [0-9]+ is other text"):
        load_for(plain, s)
