"""The contract of a system, held by every registered one: what it trains on leaks nothing and depends on nothing but
its own rows; what it decodes is its plain reference, whatever else is in the batch."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import (
    BOS,
    EOS,
    MASK,
    PROMPTS,
    all_but,
    config_with,
    equipped,
    settings,
    sharp_model,
    sharp_models,
    tiny_model,
)
from flax import nnx
from helpers import places_of_documents, rows_of, with_eos
from quick_compile import compile_few_shapes

from refusion_jax import UserError, decode
from refusion_jax.batch.batch import is_labelled
from refusion_jax.batch.rows import Rows, text_positions
from refusion_jax.config import make_objective
from refusion_jax.decoding.requests import Answer, Request, prepare
from refusion_jax.decoding.trajectory import forwards_of
from refusion_jax.distributed import sharding
from refusion_jax.model.transformer import logical_axes
from refusion_jax.systems import registry
from refusion_jax.systems.api import decoder_for, stream
from refusion_jax.training.train_step import init_state, make_train_step, state_shardings

TRAINABLE = registry.trainable()
DECODERS = list(registry.decoders())
# Documents are followed by repeats of their EOS.
PADDED = ["block_diffusion", *(name for name in TRAINABLE if "padding" in registry.systems()[name].keys)]
RECORDED = ["refusion", "prompt_lookup", "d2f"]  # that tell of drafts and plans, or of one of them
# Thorough where they compile for long: others of their kinds run, and so does a new system.
LONG = "apd block_diffusion card conv d2f dense_plan dflash dream fast_dllm idlm llada2 llada2_edit pard".split()
LONG += "prompt_lookup r2ft sdar sequential wedlm".split()
QUICK = {*TRAINABLE, *DECODERS}.difference(LONG)
TEMPLATES = [Request([BOS, 5], ([7, MASK], 5, [9], 6)), Request([], ([BOS], 6, [14, 9]))]
SHIFTED = {"shifted": True}  # the model says so
# What a decoder is tried with besides the settings of conftest: its own settings of how it goes on and ends.
VARIANTS = {
    # tests/test_decoding.py and tests/test_speculation.py try more of these.
    "refusion": [{"size": 1, "new": 8}],
    "prompt_lookup": [],
    "d2f": [{"block_length": 4, "threshold": 0.3}, {"block_length": 2, "threshold": 0.4, **SHIFTED}],
    "dream": [{"steps": 4, **SHIFTED}, {"confidence": "margin"}, {"confidence": "maskgit", "steps": 7, **SHIFTED}],
    "fast_dllm": [
        {"reuse": "prefix", "block_length": 4, "threshold": 0.3},
        {"block_length": 7, "threshold": 0.3, **SHIFTED},
        {"reuse": "none", "threshold": 0.5},
    ],
    "apd": [{"lookahead": 5, "drafter_weight": 0.3}, {"drafter_weight": 0.9, **SHIFTED}],
    "conv": [{"steps": 4, "conv_window": 5}, {"conv_window": 2, **SHIFTED}],
    "idlm": [{"stride": 6, "new": 15}],
    "pard": [{"draft_length": 3}, {"draft_length": 1}],
    "dflash": [],
    "block_diffusion": [{"block_size": 8, "sub_block": 3, "threshold": 0.3}, {"block_size": 3, "threshold": 0.6}],
    "wedlm": [{"window": 5, "entropy_threshold": 1.5, "distance_penalty": 0.1}, {"window": 4, "new": 15}],
    "dense": [{"fed_tokens": 24, "new": 15, "size": 3}],
    "dense_plan": [{"slot": 0.2}, {"slot": 0.5, "blocks": 2, "order": "left_to_right"}, {"infill_blend": 0.0}],
    "card": [{"draft_length": 5, "threshold": 0.5}, {"passes": 2, "threshold": 0.3}, {"passes": 1}],
    "llada": [
        {"block_length": 5, "merge": 3},
        {"steps": 4, **SHIFTED},
        {"block_length": 4},
        {"block_length": 8, "steps": 6},
    ],
}
# Write what `ar` writes from the same weights, in no more forwards.
LOSSLESS = ("prompt_lookup", "pard", "dflash", "idlm", "dense")
# Decoders whose first variant has other numbers alone, and the program of the default: slow, as all further ones are.
SAME_PROGRAM = ("apd", "block_diffusion", "card", "d2f", "idlm", "pard", "wedlm")

ROWS = rows_of([(2, 5), (1, 8), (0, 5)], [(5, 7), (0, 12)])  # every token of a row has an id of its own


@functools.cache
def objective_of(name: str):
    """(objective, its checked `corrupt`, compiled once for all tests)."""
    objective = make_objective(config_with(objective=name, **{"slots.sizes": (2, 3, 4)}), MASK, EOS)
    return objective, jax.jit(objective.batch)


def batch_of(name: str, seed: int, some: Rows = ROWS):
    """The batch of rows whose noise comes from a seed."""
    objective, corrupt = objective_of(name)
    keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(seed), jnp.arange(len(some.tokens)))
    return objective, corrupt(some, keys)


@pytest.mark.parametrize("name", TRAINABLE)
def test_what_must_be_predicted_is_never_seen_by_any_path_and_every_token_of_a_response_is(name):
    """Through any number of layers: the closure of the mask reaches no token that is the label.

    But for the EOS of a document where a system pads, which may show a repeat of it. Learnt is, in some draw, every
    token but the first of a document, which nothing before it predicts; the end of text is one of them.
    """
    some, repeated, learnt = with_eos(ROWS), [EOS] if name in PADDED else [], set()
    for seed in range(20):
        _, batch = batch_of(name, seed, some)
        reach = np.asarray(batch.visibility.mask())
        for _ in range(5):
            reach = reach | (reach.astype(int) @ reach.astype(int) > 0)
        label, inputs, is_learnt = map(np.asarray, (batch.labels, batch.inputs, is_labelled(batch)))
        leak = reach & (inputs[:, None, :] == label[:, :, None]) & is_learnt[:, :, None]
        leaked = np.unique(label[leak.any(axis=2) & ~np.isin(label, repeated)])
        assert not leaked.size, f"the model sees the tokens {leaked} where it is to predict them"
        learnt |= {*label[is_learnt].tolist()}
    starts = np.asarray(text_positions(some.segment_ids)) == 0
    expected = {*np.asarray(some.tokens)[np.asarray(some.is_response) & ~starts].tolist()}
    assert not expected - learnt, f"never predicted: the tokens {expected - learnt}, where {EOS} is the end of text"


@functools.partial(jax.jit, static_argnums=0)
def _influence(graph, params, embedded, positions, visibility):
    """The gradient of every logit's sum with respect to the embeddings [T, D], which have places, not ids."""

    def logits_of(embedded):
        model = nnx.merge(graph, params | {"embed_tokens": embedded})
        return model.hidden(jnp.arange(len(embedded))[None], positions, visibility)[0].sum(axis=-1)

    return jax.jacrev(logits_of)(embedded)


@pytest.mark.parametrize("name", all_but(QUICK, TRAINABLE))
def test_the_model_sees_just_what_the_mask_shows(name):
    """By gradient, in two layers: a token influences a logit where the closure of the mask has it, and nowhere else."""
    _, batch = batch_of(name, 1)
    embedded = jax.random.normal(jax.random.key(0), (batch.inputs.shape[1], 16))
    seen = jax.tree.map(lambda x: x[:1], batch.visibility)
    model = nnx.split(tiny_model(num_hidden_layers=2))
    influence = np.abs(_influence(*model, embedded, batch.positions[:1], seen)).sum(axis=2) > 0
    mask = np.asarray(batch.visibility.mask())[0]
    reach = mask | (mask.astype(int) @ mask.astype(int) > 0)
    real = np.asarray(batch.visibility.segment_ids)[0] > 0
    np.testing.assert_array_equal(influence[real], reach[real])


@functools.partial(jax.jit, static_argnums=0)
def _cross_entropy(graph, params, batch):
    return nnx.merge(graph, params).cross_entropy(batch)[0]


@pytest.mark.parametrize("name", TRAINABLE)
def test_documents_keep_their_numbers_in_the_row(name):
    """A token of `ROWS` tells its place there, and so its document."""
    _, batch = batch_of(name, 2)
    inputs, segments = np.asarray(batch.inputs), np.asarray(batch.visibility.segment_ids)
    row, place = np.nonzero((segments > 0) & (inputs >= 5) & (inputs != MASK))
    assert len(row)
    own = np.asarray(ROWS.segment_ids)[row, inputs[row, place] - 5]
    np.testing.assert_array_equal(segments[row, place], own)


@pytest.mark.parametrize("name", TRAINABLE)
def test_a_document_is_predicted_packed_as_it_is_alone(name):
    _, batch = batch_of(name, 2)
    model = nnx.split(tiny_model())
    packed = np.asarray(_cross_entropy(*model, batch))
    for row, own in places_of_documents(batch.visibility.segment_ids):
        pad = (0, batch.inputs.shape[1] - len(own))  # one length, one compilation
        cut = lambda x, row=row, own=own, pad=pad: jnp.asarray(np.pad(np.asarray(x)[row, own], pad)[None])  # noqa: E731
        alone = jax.tree.map(cut, batch)
        alone = _cross_entropy(*model, alone.replace(visibility=alone.visibility.replace(pattern=None)))
        np.testing.assert_allclose(np.asarray(alone)[0, : len(own)], packed[row, own], atol=1e-5)


@pytest.mark.parametrize("name", TRAINABLE)
def test_a_row_is_corrupted_by_its_own_key_whatever_the_other_rows_are(name):
    some = jax.tree.map(lambda x: jnp.stack([x[1], x[0]]), ROWS)  # the other one in the place of the first
    objective, corrupt = objective_of(name)
    keys = jax.random.split(jax.random.key(3), 3)
    one, other = corrupt(ROWS, keys[:2]), corrupt(some, keys[jnp.array([2, 0])])
    for field in ("inputs", "positions", "labels"):
        np.testing.assert_array_equal(getattr(other, field)[1], getattr(one, field)[0], f"{field} depend on more")
    np.testing.assert_array_equal(other.visibility.mask()[1], one.visibility.mask()[0])


@pytest.mark.parametrize("name", TRAINABLE)
def test_weights_are_normalized_over_the_batch(name):
    """Rows of padding change no weight; the same rows and noise twice halve each, unless `combine` normalizes."""
    padded = jax.tree.map(lambda x: jnp.concatenate([x, jnp.zeros_like(x)]), ROWS)
    doubled = jax.tree.map(lambda x: jnp.concatenate([x, x]), ROWS)
    _, batch = batch_of(name, 4)
    _, longer = batch_of(name, 4, padded)
    keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(4), jnp.array([0, 1, 0, 1]))
    twice = objective_of(name)[1](doubled, keys)
    for term, weight in batch.weights.items():
        assert np.isfinite(weight).all(), f"weights of {term} are not finite"
        np.testing.assert_allclose(longer.weights[term][:2], weight, rtol=1e-6)
        assert not longer.weights[term][2:].any()
        if not batch.combine:
            np.testing.assert_allclose(twice.weights[term], np.tile(weight / 2, (2, 1)), rtol=1e-6)


@pytest.mark.parametrize("name", TRAINABLE)
def test_inputs_and_labels_are_tokens_and_the_pattern_is_that_which_is_counted(name):
    objective, batch = batch_of(name, 5)
    counts = np.any([weight != 0 for weight in batch.weights.values()], axis=0)
    for tokens in (batch.inputs, np.asarray(batch.labels)[counts]):  # others would be learnt as some token
        assert 0 <= np.min(tokens) <= np.max(tokens) < tiny_model().config.num_tokens
    if batch.visibility.pattern:
        assert batch.visibility.pattern == objective.pattern
        same = batch.visibility.segment_ids[:, :, None] == batch.visibility.segment_ids[:, None]
        expected = same & objective.pattern.dense(batch.inputs.shape[1])[None]
        np.testing.assert_array_equal(batch.visibility.mask(), expected)


def one_step(name: str, accumulation: int, devices: int, **mesh_shape: int):
    """(metrics, gradient) of one step on eight rows, by gradient descent of rate 1."""
    mesh = sharding.make_mesh(mesh_shape, jax.devices()[:devices])
    model = tiny_model(num_hidden_layers=1)
    (graph, params), axes = nnx.split(model), logical_axes(model)
    objective, _ = objective_of(name)
    step = make_train_step(graph, objective, optax.sgd(1.0), lambda _: 1.0, 0, accumulation)
    state = init_state(nnx.to_pure_dict(params), optax.sgd(1.0))
    shardings = state_shardings(mesh, axes, state)
    with jax.set_mesh(mesh):
        some = jax.tree.map(lambda x: jnp.tile(x, (4, 1)), ROWS)
        some = jax.device_put(some, sharding.sharding(mesh, "batch", "length"))
        after, metrics = jax.jit(step, out_shardings=(shardings, None))(jax.device_put(state, shardings), some)
    return jax.device_get(
        (metrics, jax.tree.map(lambda old, new: old - new, state.params, jax.device_get(after.params)))
    )


# One compiles its two programs in the time there is; tests/test_train_step.py has two others.
@pytest.mark.parametrize("name", all_but(["r2ft"], TRAINABLE, pytest.mark.slow))
@pytest.mark.thorough
def test_neither_devices_nor_accumulation_change_a_step(name):
    metrics, gradient = one_step(name, accumulation=1, devices=1)
    split_metrics, split_gradient = one_step(name, accumulation=2, devices=8, data=2, fsdp=2, tensor=2)
    assert np.isfinite(metrics["grad_norm"])
    assert metrics["grad_norm"] > 0
    for key, value in metrics.items():
        np.testing.assert_allclose(split_metrics[key], value, rtol=1e-5, err_msg=key)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-6)
    jax.tree.map(close, split_gradient, gradient)


def requests_for(name: str, model, **changes) -> list[Request]:
    """The prompts, half of which may not end soon, and templates where a decoder takes them; some hold mask tokens."""
    s, texts = settings(name, **changes), [*PROMPTS, [BOS, MASK, 7]]
    prompts = [Request(prompt, least=i % 2 * 6) for i, prompt in enumerate(texts)]
    try:
        decoder_for(prepare(TEMPLATES, s, model.config), model.config)
    except UserError as error:
        if "it cannot fill templates" not in str(error):
            raise
        return prepare(prompts, s, model.config)
    return prepare([*prompts, *TEMPLATES], s, model.config)


def variants_of(name: str) -> list:
    """A decoder as it is, and its variants; those after the first, or all, compile for minutes together.

    A decoder without variants here is tried at the settings that it is measured at: a new system needs no edit.
    """
    system = registry.system_of(name)
    trained = {key: own.default for key, own in system.keys.items()}
    points = registry.find_decoder(name).settings.operating_points(16, trained)
    cases = [{}, *VARIANTS.get(name, points[1:])]
    marks = [pytest.mark.thorough] * (1 if name in SAME_PROGRAM else 2) + [pytest.mark.slow] * len(cases)
    quick = 0 if name in LONG else 1 if name in VARIANTS else 2
    marks[:quick] = [()] * quick
    return [pytest.param(name, case, marks=mark) for case, mark in zip(cases, marks, strict=False)]


def check_commits(request: Request, answer: Answer) -> None:
    """Every position is committed once, and the answer is what was committed."""
    places = {at for start, length in request.gaps for at in range(start, start + length)}
    order, tokens = answer.commit_order, answer.commit_tokens
    assert len(set(order)) == len(order) == len(tokens)
    assert set(order) <= places
    text = dict(zip(order, tokens, strict=True)) | dict(zip(*request.given[::-1], strict=True))
    whole = [text[at] for at in sorted(text) if at >= len(request.prompt)]
    assert answer.tokens == whole[: len(answer.tokens)]
    assert EOS not in answer.tokens[: request.least]
    if answer.finish_reason == "length":
        assert set(order) == places


@pytest.mark.usefixtures("two_shapes")
@pytest.mark.parametrize(("name", "changes"), [case for name in DECODERS for case in variants_of(name)])
def test_a_decoder_is_its_plain_reference_and_commits_every_position_once(name, changes):
    reference = registry.system_of(name).references[name]
    compared = saved = 0
    own = {key: value for key, value in changes.items() if key not in SHIFTED}
    for model in (equipped(model, name) for model in sharp_models()[:2]):
        if changes.keys() & SHIFTED:
            model = nnx.merge(*nnx.split(model))
            model.config = dataclasses.replace(model.config, shifted=True)
        requests = requests_for(name, model, **own)
        answers = dict(stream(model, requests))
        for i, request in enumerate(requests):
            check_commits(request, answers[i])
            expected = reference(model, request)
            if expected["margin"] < 1e-5:
                continue  # float32 noise may decide it
            compared += 1
            for field in ("tokens", "commit_order", "rounds"):
                assert getattr(answers[i], field) == expected[field], (request.name, field)
            assert answers[i].forwards <= expected["forwards"]
            if name in LOSSLESS:
                ar = registry.find_system("ar").references["ar"](model, request)
                assert (expected["tokens"], expected["commit_order"]) == (ar["tokens"], ar["commit_order"])
                assert answers[i].forwards <= ar["forwards"]
                saved += ar["forwards"] - answers[i].forwards
    assert compared > 10
    assert saved or name not in LOSSLESS
    graphdef, params = nnx.split(model)
    diverged = nnx.merge(graphdef, jax.tree.map(lambda weight: weight * jnp.nan, params))
    with pytest.raises(UserError, match=f"the decoder '{name}' commits what is not a token"):
        list(stream(diverged, requests))


@pytest.mark.parametrize("name", all_but(QUICK, DECODERS))
def test_neither_its_row_nor_the_others_nor_the_capacity_change_an_answer(name):
    """Requests in one order and the opposite, in batches and caches of two sizes, by forwards of two widths and one."""
    model = equipped(sharp_model(), name)
    for temperature in (0.0, 0.8):
        requests = requests_for(name, model, temperature=temperature)
        compile_few_shapes(2)  # as for the tests before
        out = decode(model, requests, settings(name, temperature=temperature, batch_size=8))
        compile_few_shapes()
        sizes = {"batch_size": 2, "cache_length": 96}
        again = decode(model, requests[::-1], settings(name, temperature=temperature, **sizes))
        for field in ("tokens", "commit_order", "commit_tokens", "rounds", "finish_reason"):
            assert getattr(again, field) == getattr(out, field)[::-1], field


def recorded(model, requests, **how) -> tuple[dict, dict]:
    """(answers, the forwards of each by their numbers)."""
    parts: dict[int, list] = {}
    answers = dict(stream(model, requests, record=lambda i, part: parts.setdefault(i, []).append(part), **how))
    return answers, {i: forwards_of(parts[i]) for i in answers}


def check_forwards(answer: Answer, forwards: dict) -> None:
    """Every forward is there once, and tells of no place that was committed before it."""
    assert sorted(forwards) == list(range(1, answer.forwards + 1))
    counts = [forwards[number].committed for number in sorted(forwards)]
    assert counts == sorted(counts)
    for forward in forwards.values():
        before = set(answer.commit_order[: forward.committed])
        assert not before & {*forward.drafts, *forward.plan}
        assert all(0 <= p <= 1.001 for _, p in forward.plan.values())


@pytest.mark.parametrize(
    "name", all_but(["refusion"], RECORDED) + all_but((), [n for n in DECODERS if n not in RECORDED], pytest.mark.slow)
)
def test_an_answer_is_the_same_when_watched_and_every_forward_is_seen_and_recorded(name):
    model, seen = equipped(sharp_model(), name), {}
    requests = requests_for(name, model, batch_size=2, cache_length=96)

    def watch(i, now):
        seen.setdefault(i, {})[now.forwards] = len(now.commit_order)

    answers, forwards = recorded(model, requests, watch=watch, every=1)
    assert answers == dict(stream(model, requests))
    assert recorded(model, requests) == (answers, forwards)  # many forwards at a time
    for i, answer in answers.items():
        check_forwards(answer, forwards[i])
        counts = [forwards[i][number].committed for number in range(1, answer.forwards + 1)]
        assert seen[i] == dict(enumerate([*counts, len(answer.commit_order)]))
        if name in ("refusion", "dense_plan"):  # what is committed was fed, and read as it is
            order = list(zip(answer.commit_order, answer.commit_tokens, strict=True))
            for number, (start, end) in enumerate(itertools.pairwise([*counts, None]), 1):
                assert set(order[start:end]) <= forwards[i][number].drafts.items()
