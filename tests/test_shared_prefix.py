"""What all prompts of a call begin with is prefilled once: the same answers, and nothing computed again."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import BOS, PROMPTS, equipped, settings, sharp_model, tiny_model
from flax import nnx

from refusion_jax import Request, decode
from refusion_jax.decoding import cache as kv
from refusion_jax.decoding import queue
from refusion_jax.decoding.requests import Given, SharedPrefix, prefill_chunk, prepare, shared_prefix
from refusion_jax.model.key_values import KeyValues
from refusion_jax.systems import registry
from refusion_jax.systems.api import decoder_for, stream

HEADER = [BOS, *(5 + i * i % 23 for i in range(79))]
QUICK = ("ar",)  # the others compile for minutes together


def given_of(model, prompts, capacity=128) -> Given:
    return jax.tree.map(jnp.asarray, Given.of(prepare(prompts, settings("ar"), model.config), capacity))


@functools.partial(jax.jit, static_argnums=0)
def _prefilled(graphdef, params, given) -> KeyValues:
    return kv.prefill(nnx.merge(graphdef, params), given, chunk_length=32).entries


def prefilled(model, given) -> KeyValues:
    return _prefilled(*nnx.split(model), given)


@pytest.mark.parametrize("cache", ["same", "int8"])
def test_whole_chunks_are_copied_and_the_rest_is_what_it_would_have_been_to_the_bit(cache):
    model = tiny_model().rounded(cache=cache)
    given = given_of(model, [[*HEADER, *prompt] for prompt in PROMPTS[:3]])
    plain = prefilled(model, given)
    row = jax.tree.map(lambda x: x[:, 2:3], plain)
    shared = prefilled(model, dataclasses.replace(given, shared=SharedPrefix(row, jnp.int32(64))))
    for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(shared), strict=True):
        for i, length in enumerate(given.length):
            np.testing.assert_array_equal(a[:, i, :, :length], b[:, i, :, :length])


def test_what_is_known_is_not_computed_again():
    model = tiny_model()
    given = given_of(model, [[*HEADER, *prompt] for prompt in PROMPTS[:3]])
    ones = jax.tree.map(lambda x: jnp.ones_like(x[:, :1]), prefilled(model, given))
    entries = prefilled(model, dataclasses.replace(given, shared=SharedPrefix(ones, jnp.int32(64))))
    assert np.all(entries.keys[:, :, :, :64] == 1)
    assert not np.any(entries.keys[:, 0, :, 64 : int(given.length[0])] == 1)


def test_requests_share_what_stands_at_the_same_places_but_never_their_last_token():
    model = tiny_model()

    def shared(*requests):
        return shared_prefix(prepare(list(requests), settings("refusion"), model.config))

    assert shared([5, 6, 7, 8], [5, 6, 9, 8], [5, 6, 7, 8, 9]) == 2
    assert shared([5, 6, 7], [5, 6, 7]) == 2
    assert shared([5, 6, 7], [5, 6]) == 1
    assert shared([5, 6, 7]) == 0
    assert shared([8, 6], [5, 6]) == 0
    gap = Request([5], ([6], 4, [7, 8]))
    assert shared(gap, [5, 6, 7, 8]) == 2  # 7 stands elsewhere
    assert shared(gap, dataclasses.replace(gap)) == 3


def test_a_long_prefix_ends_with_a_chunk_and_a_short_one_changes_nothing():
    model, own = tiny_model(), settings("ar")
    assert prefill_chunk(prepare([[*HEADER, 7], [*HEADER, 8, 9]], own, model.config)) == 64
    assert prefill_chunk(prepare([[*HEADER, 7]], own, model.config)) == 96
    assert prefill_chunk(prepare([[*HEADER[:40], *range(5, 28), 7] * 2, HEADER[:40]], own, model.config)) == 128


def test_a_prefix_outlives_the_answer_in_whose_row_it_stands():
    """The caller stops the first answers at once, before a row of a batch of 16 is filled again."""
    model = sharp_model()
    prompts = [[*HEADER, 5 + i % 20, 6 + i // 20] for i in range(32)]
    own = settings("ar", new=96, eos_id=29, batch_size=16)
    requests = prepare(prompts, own, model.config)
    whole = dict(stream(model, requests))
    ended = dict(stream(model, requests, is_over=lambda index, tokens: index == 0))
    assert ended.pop(0).finish_reason == "stop"
    assert all(answer == whole[index] for index, answer in ended.items())


def test_prompts_with_different_headers_each_find_theirs_in_some_row(monkeypatch):
    """Three headers take turns: the first prompt of each is prefilled whole, of the others only what follows it."""
    model = sharp_model()
    own = settings("ar", new=4, batch_size=8)
    header = [[BOS, 5 + kind, *HEADER[2:64]] for kind in range(3)]
    prompts = [[*header[i % 3], 6 + i, *[7] * 31] for i in range(24)]
    assert prefill_chunk(prepare(prompts, own, model.config)) == 96
    requests = prepare(prompts, own, model.config)
    decoder = dataclasses.replace(decoder_for(requests, model.config), chunk=32)
    copied, newcomers = [], queue.newcomers

    def seen(requests, *sizes):
        copied.append(len(requests) * newcomers(requests, *sizes).shared)
        return newcomers(requests, *sizes)

    monkeypatch.setattr(queue, "newcomers", seen)
    answers = dict(stream(model, requests, decoder))
    assert sum(copied) == 21 * 64
    for i, prompt in enumerate(prompts):
        assert answers[i].tokens == decode(model, [prompt], own).tokens[0]


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in registry.decoders()]
)
def test_answers_are_those_of_each_prompt_alone(name):
    model = equipped(sharp_model(), name)
    prompts, own = [[*HEADER, *prompt] for prompt in PROMPTS], settings(name, batch_size=2)
    out = decode(model, prompts, own)
    for i, prompt in enumerate(prompts):
        alone = decode(model, [prompt], own)
        assert (alone.tokens[0], alone.commit_order[0]) == (out.tokens[i], out.commit_order[i])
