"""What all prompts of a call begin with is prefilled once: the same answers, and nothing computed again."""

import dataclasses
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import BOS, PROMPTS, all_but, equipped, settings, sharp_model, tiny_model

from refusion_jax import Request, decode
from refusion_jax.decoding import cache as kv
from refusion_jax.decoding import prefixes, queue
from refusion_jax.decoding.prefixes import Prefixes
from refusion_jax.decoding.requests import Given, SharedPrefix, prepare
from refusion_jax.model.key_values import KeyValues
from refusion_jax.systems import registry
from refusion_jax.systems.api import decoder_for, stream

HEADER = [BOS, *(5 + i * i % 23 for i in range(79))]


def given_of(model, prompts, capacity=128) -> Given:
    return jax.tree.map(jnp.asarray, Given.of(prepare(prompts, settings("ar"), model.config), capacity))


@jax.jit
def prefilled(model, given) -> KeyValues:
    return kv.prefill(model, given, chunk_length=32).entries


@pytest.mark.parametrize("cache", ["same", "int8"])
def test_what_is_known_is_copied_and_the_rest_is_what_it_would_have_been_to_the_bit(cache):
    model = tiny_model().rounded(cache=cache)
    given = given_of(model, [[*HEADER, *prompt] for prompt in PROMPTS[:3]])
    plain = prefilled(model, given)
    row = jax.tree.map(lambda x: jnp.repeat(x[:, 2:3], 3, axis=1), plain)
    shared = prefilled(model, dataclasses.replace(given, shared=SharedPrefix(row, jnp.int32(64))))
    for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(shared), strict=True):
        for i, length in enumerate(given.length):
            np.testing.assert_array_equal(a[:, i, :, :length], b[:, i, :, :length])


def test_what_is_known_is_not_computed_again():
    model = tiny_model()
    given = given_of(model, [[*HEADER, *prompt] for prompt in PROMPTS[:3]])
    ones = jax.tree.map(lambda x: jnp.ones_like(x), prefilled(model, given))
    entries = prefilled(model, dataclasses.replace(given, shared=SharedPrefix(ones, jnp.int32(64))))
    assert np.all(entries.keys[:, :, :, :64] == 1)
    assert not np.any(entries.keys[:, 0, :, 64 : int(given.length[0])] == 1)


def test_blocks_come_back_as_they_were_written_and_what_has_no_place_is_dropped():
    L, R, K, C, H, N, S = 2, 2, 3, 10, 4, 6, 4
    keys = np.arange(L * R * K * C * H, dtype=np.float32).reshape(L, R, K, C, H)
    entries = KeyValues(jnp.array(keys), jnp.array(-keys))
    store = jax.jit(prefixes.write)(prefixes.empty_store(entries, N, S), entries, jnp.array([[0, 3], [5, N]]))
    found = jax.jit(prefixes.copy, static_argnums=2)(store, jnp.array([[0, 3], [5, 0]]), C)
    np.testing.assert_array_equal(found.keys[:, 0, :, :8], keys[:, 0, :, :8])
    np.testing.assert_array_equal(found.values[:, 1, :, :4], -keys[:, 1, :, :4])
    np.testing.assert_array_equal(found.keys[:, 1, :, 4:8], keys[:, 0, :, :4])
    assert found.keys.shape == keys.shape
    assert not np.any(store.keys[:, [1, 2, 4]])


def test_blocks_have_a_name_for_what_stands_before_their_end_and_never_the_last_token():
    model, store = tiny_model(), Prefixes(8, 2)

    def shared(*requests):
        names = map(store.blocks_of, prepare(list(requests), settings("refusion"), model.config))
        return sum(len({*some}) == 1 for some in zip(*names, strict=False))

    assert shared([5, 6, 7, 8, 9], [5, 6, 7, 4, 9]) == 1
    assert shared([5, 6, 7, 8], [5, 6, 7, 8]) == 1
    assert shared([5, 6, 7, 8, 9], [5, 6, 7, 8]) == 1
    assert shared([5, 6, 7, 8, 9], [5, 6, 7, 8, 4]) == 2
    assert shared([8, 6, 7, 8, 9], [5, 6, 7, 8, 9]) == 0
    gap = Request([5, 6], ([7], 4, [8, 9]))
    assert shared(gap, [5, 6, 7, 8, 9]) == 1  # 8 stands elsewhere
    assert shared(gap, dataclasses.replace(gap)) == 2


def test_the_store_holds_what_it_says_and_forgets_what_was_not_used_for_longest():
    """Against a list of names; admissions of one to three random texts over few tokens, so that many begin alike."""
    draw, held, used = random.Random(0), [None] * 6, {}
    store, found = Prefixes(6, 1), 0
    for now in range(3000):
        waiting = [[] for _ in range(draw.randint(1, 3))]
        for blocks in waiting:
            for _ in range(draw.randint(0, 4)):
                blocks.append((*(blocks[-1] if blocks else ()), draw.choice("aaab")))
        texts = [waiting[number] for number in store.group(waiting, most=2)]
        known = store.known(texts[0])
        assert all(store.known(blocks) == known for blocks in texts)
        next_blocks = [blocks[known] for blocks in texts if len(blocks) > known]
        assert len({*next_blocks}) == len(next_blocks) <= len(texts) <= 2
        copied, written = store.use(texts, known, M=4)
        for blocks, places in zip(texts, copied, strict=True):
            assert [held[place] for place in places[:known]] == blocks[:known]
        used |= {block: now for blocks in texts for block in blocks}
        for blocks, places in zip(texts, written, strict=True):
            assert set(places[:known].tolist()) <= {6}
            for block, place in zip(blocks, places.tolist(), strict=False):
                if place < 6:
                    kept = [used[other] for other in held if other and other != held[place]]
                    assert held[place] is None or used[held[place]] <= min(kept, default=now)
                    held[place] = block
        found += known > 0
    assert found > 500


@pytest.mark.thorough
def test_prompts_with_different_headers_each_find_theirs(monkeypatch):
    """Three headers take turns: the first prompt of each is prefilled whole, of the others only what follows it."""
    model = sharp_model()
    own = settings("ar", new=4, batch_size=8)
    header = [[BOS, 5 + kind, *HEADER[2:64]] for kind in range(3)]
    prompts = [[*header[i % 3], 6 + i, *[7] * 31] for i in range(24)]
    requests = prepare(prompts, own, model.config)
    copied, newcomers = [], queue.newcomers

    def seen(requests, *others):
        new = newcomers(requests, *others)
        copied.append(len(requests) * new.known)
        return new

    monkeypatch.setattr(queue, "newcomers", seen)
    monkeypatch.setattr(queue, "_KEPT", 1)
    answers = dict(stream(model, requests))
    assert sum(copied) == 21 * 64
    for i, prompt in enumerate(prompts):
        assert answers[i].tokens == decode(model, [prompt], own).tokens[0]


def test_newcomers_are_prefilled_with_those_that_know_as_much_and_alike_ones_after_the_first(monkeypatch):
    """Two prompts with known beginnings cost no more than one; eight alike ones are computed once."""
    model, own = sharp_model(), settings("ar", new=4, batch_size=64)
    header = [[BOS, 5 + kind, *HEADER[2:64]] for kind in range(3)]
    old = prepare([[*header[kind], 9] for kind in (0, 1)], own, model.config)
    new = prepare([[*header[kind], 7] for kind in (0, 2, 1, 2, 0, 2)], own, model.config)
    admitted, admit = [], queue._admit
    monkeypatch.setattr(
        queue, "_admit", lambda *args: admitted.append((len(args[4].rows), int(args[4].known))) or admit(*args)
    )
    batch = queue.RunningBatch(model, decoder_for(new, model.config), new[0], rows=64, blocks=64)
    batch.admit(old)
    rows = batch.admit(new)
    assert admitted == [(2, 0), (4, 64), (1, 0), (2, 64)]
    assert batch.known[rows].tolist() == [64, 0, 64, 64, 64, 64]


# The others compile for minutes together.
@pytest.mark.parametrize("name", all_but(["ar"], registry.decoders(), pytest.mark.slow))
def test_answers_are_those_of_each_prompt_alone(name):
    model = equipped(sharp_model(), name)
    prompts, own = [[*HEADER, *prompt] for prompt in PROMPTS], settings(name, batch_size=2)
    out = decode(model, prompts, own)
    for i, prompt in enumerate(prompts):
        alone = decode(model, [prompt], own)
        assert (alone.tokens[0], alone.commit_order[0]) == (out.tokens[i], out.commit_order[i])
