"""The queue, the batch, its cache and its prefixes: nobody changes anybody else, nothing is computed twice."""

import dataclasses
import random
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import BOS, PROMPTS, all_but, compiled, equipped, extend, settings, sharp_model, tiny_config, tiny_model
from flax import nnx

from refusion_jax import Request, UserError, decode
from refusion_jax.decoding import cache as kv
from refusion_jax.decoding import memory, prefixes, queue
from refusion_jax.decoding.prefixes import Prefixes
from refusion_jax.decoding.requests import Answer, Given, prepare
from refusion_jax.decoding.stops import Stops
from refusion_jax.distributed.sharding import make_mesh, sharding
from refusion_jax.evaluation.generation import check_fits, generate, settings_for
from refusion_jax.model.key_values import KeyValues
from refusion_jax.model.transformer import logical_axes
from refusion_jax.systems import registry
from refusion_jax.systems.api import decoder_for, stream


@pytest.mark.parametrize("method", all_but(["refusion"], ["refusion", "ar"]))
def test_changing_thresholds_temperature_seed_and_prompts_compiles_nothing(method):
    model, own = sharp_model(), {"new": 12}  # a length that no other test has
    with compiled() as programs:
        decode(model, PROMPTS, settings(method, **own))
    assert programs, "nothing is counted"
    with compiled() as programs:
        decode(model, PROMPTS[::-1], settings(method, slot=0.1, token=0.9, temperature=0.5, seed=9, **own))
    assert not programs


def test_from_admission_to_the_records_of_a_batch_there_is_no_way_to_the_host():
    model = sharp_model()
    requests = prepare(PROMPTS, settings(), model.config)
    graphdef, params = nnx.split(model)
    decoder = decoder_for(requests, model.config)
    newcomers = queue.newcomers(dict(enumerate(requests[:2])), 2, 4, decoder)
    program = jax.jit(queue.decode_once, static_argnums=(0, 3, 4))
    text = program.lower(graphdef, params, newcomers, 4, decoder).as_text()
    assert "while" in text
    assert not [word for word in ("callback", "infeed", "outfeed") if word in text]


def test_freed_rows_are_filled_again_and_answers_come_as_they_finish():
    """A queue much longer than the batch, of requests of very different lengths, compiles nothing of its own."""
    model = sharp_model()
    lengths = [4, 32, 8, 4, 32, 4, 4, 8] * 4
    s = settings("ar", new=32, eos_id=29, batch_size=8)
    requests = [
        Request([BOS, 5 + i % 20], settings=dataclasses.replace(s, max_new_tokens=n)) for i, n in enumerate(lengths)
    ]
    requests = prepare(requests, s, model.config)
    list(stream(model, requests[:8]))
    with compiled() as programs:
        order, answers = zip(*stream(model, requests), strict=True)
    assert not programs
    assert sorted(order) == list(range(32))
    assert {lengths[i] for i in order[-8:]} == {4}  # the longest go first, wherever they stand in the call
    for i, answer in zip(order, answers, strict=True):
        alone = decode(model, [requests[i]], s)
        assert (answer.tokens, answer.forwards) == (alone.tokens[0], alone.forwards[0])


@pytest.mark.parametrize(
    ("requests", "sizes"), [(1, [1]), (2, [2]), (3, [4]), (5, [8]), (8, [8]), (9, [8, 1]), (30, [8, 8, 8, 8])]
)
def test_an_admission_prefills_as_many_rows_as_it_admits_up_to_the_next_power_of_two(requests, sizes, monkeypatch):
    """One request of 512 tokens took as long as eight: admission was compiled for an eighth of the rows alone."""
    model, prefilled = sharp_model(), []
    monkeypatch.setattr(queue, "_admit", lambda *args: prefilled.append(len(args[4].rows)) or args[2:4])
    prompts = prepare([[BOS, 5]] * requests, settings("ar", new=8, batch_size=64), model.config)
    batch = queue.RunningBatch(model, decoder_for(prompts, model.config), prompts[0], rows=64)
    rows = batch.admit(prompts)
    assert prefilled == sizes
    assert len(set(rows)) == requests
    assert sorted([*rows, *batch.free]) == list(range(64))


def test_a_batch_that_has_compiled_its_admissions_admits_without_compiling():
    model = sharp_model()
    prompts = prepare([[BOS, 5 + i] for i in range(8)], settings("ar", new=8, batch_size=64), model.config)
    batch = queue.RunningBatch(model, decoder_for(prompts, model.config), prompts[0], rows=64)
    batch.compile_admissions(prompts[0])
    assert len(batch.free) == 64
    with compiled() as programs:
        for count in (1, 2, 3, 8):
            batch.admit(prompts[:count])
    assert not programs


@pytest.mark.thorough
def test_an_answer_that_the_caller_ends_frees_its_row_and_says_what_it_would_have_said():
    """Every other one may end after seven tokens; it is seen within a few forwards, long before the end."""
    model = sharp_model()
    s = settings(new=128, blocks=8, slot=0.95, token=0.95, eos_id=29, batch_size=2)
    requests = prepare([[BOS, 5 + i] for i in range(6)], s, model.config)
    whole = dict(stream(model, requests))
    asked = []

    def is_over(index: int, answer: Answer) -> bool:
        asked.append(index)
        assert whole[index].tokens[: len(answer.tokens)] == answer.tokens
        return index % 2 == 0 and len(answer.tokens) >= 7

    ended = dict(stream(model, requests, watch=is_over))
    for index, answer in ended.items():
        if index % 2:
            assert answer == whole[index]
        else:
            assert answer.finish_reason == "stop"
            assert whole[index].tokens[: len(answer.tokens)] == answer.tokens
            assert 7 <= len(answer.tokens) < 100
            assert answer.forwards <= 48 < whole[index].forwards
    assert len(asked) < sum(answer.forwards for answer in ended.values()) / 8  # no look at every forward


def test_a_stop_string_is_certain_once_no_longer_one_could_begin_before_it():
    stops = Stops(("B", "ABCDE"))
    assert stops.cut("xxABC") == ("xxA", True)
    assert not stops.is_certain("xxAB")
    assert stops.is_certain("xxABCXY")
    assert stops.cut("xxABCDE") == ("xx", True)
    assert not Stops().is_certain("anything")
    with pytest.raises(ValueError, match="is empty"):
        Stops(("B", ""))


@pytest.mark.parametrize("length", [1, 256, 257, 600])
def test_prompts_of_any_length_are_prefilled_in_chunks(length):
    """What stands in the cache is that of one forward over the whole prompt, whatever the padding."""
    model = tiny_model(max_position_embeddings=1024)
    given = np.zeros((2, 672), np.int32)
    given[:, :length] = np.random.default_rng(0).integers(5, 29, length)
    given[0, length:] = 7  # padding without meaning
    positions = np.broadcast_to(np.arange(672, dtype=np.int32), given.shape)
    prompt = Given(given, positions, np.full(2, length, np.int32))
    cache = jax.jit(lambda m, g: kv.prefill(m, g, 256))(model, prompt)
    none = KeyValues(*(jnp.zeros((2, 2, 2, 0, 8)),) * 2)
    causal = jnp.broadcast_to(jnp.tril(jnp.ones((length, length), bool)), (2, length, length))
    tokens, at = jnp.asarray(given[:, :length]), jnp.asarray(positions[:, :length])
    _, whole = extend(model, tokens, at, none, jnp.zeros(2, int), causal)
    for ours, expected in zip(jax.tree.leaves(cache.entries), jax.tree.leaves(kv.stored(whole)), strict=True):
        np.testing.assert_allclose(
            ours[:, :, :, :length], expected, atol=5e-6
        )  # sums in another order: up to 3e-6 with jax 0.12


def test_the_cache_holds_the_text_and_one_forward_and_nothing_more():
    model = tiny_model()
    requests = prepare(PROMPTS, settings(new=64, blocks=2, speculate="auto"), model.config)
    decoder = decoder_for(requests, model.config)
    assert decoder.width == 64  # a block of 32 and the next one
    assert decoder.cache_length == 96 + 32  # 8 + 64 tokens, rounded up to 96, and what a forward pass may commit
    cache = kv.Cache.empty(model, 3, decoder.cache_length)
    stored = sum(x.nbytes for x in jax.tree.leaves(cache.entries))
    assert stored == 3 * decoder.cache_length * kv.bytes_per_token(model.config, "float32")


def test_a_batch_that_cannot_fit_is_refused_before_it_is_compiled(monkeypatch):
    model = tiny_model()
    requests = prepare(PROMPTS, settings(new=64, blocks=2, speculate="auto"), model.config)
    monkeypatch.setattr(memory, "free_bytes", lambda mesh: 2_350_000)
    message = "batch_size=8: 8 rows of 128 tokens, of 256 bytes.*size=4 would fit"
    with compiled() as programs, pytest.raises(UserError, match=message):
        next(stream(model, requests))
    assert not programs
    monkeypatch.setattr(memory, "free_bytes", lambda mesh: 1000)
    with pytest.raises(UserError, match="lower cache_length"):
        next(stream(model, requests))
    monkeypatch.undo()
    with pytest.raises(
        UserError, match="1 rows .* and 1,000,000,000,000 of kept prefixes.*: lower the prefix cache, ca"
    ):
        memory.check_memory(model, model.mesh, 1, decoder_for(requests, model.config), kept=10**12)


@pytest.mark.parametrize(
    ("method", "prompt", "vocabulary"), [("refusion", 8, 50_000), ("llada", 8, 50_000), ("ar", 900, 32)]
)
@pytest.mark.thorough
def test_the_memory_of_a_batch_is_about_what_the_compiler_takes(method, prompt, vocabulary):
    """Between two thirds and twice as much: XLA decides what is in memory at once."""
    model = tiny_model(vocab_size=vocabulary, num_tokens=vocabulary, max_position_embeddings=1024)
    requests = prepare([[BOS] * prompt] * 16, settings(method, new=32, blocks=2, batch_size=16), model.config)
    decoder, mesh = decoder_for(requests, model.config), model.mesh
    graphdef, params = nnx.split(model)
    new = queue.newcomers({0: requests[0]}, R=2, B=16, decoder=decoder)
    with jax.set_mesh(mesh):
        program = jax.jit(queue.decode_once, static_argnums=(0, 3, 4))
        compiled = program.lower(graphdef, nnx.to_pure_dict(params), new, 16, decoder).compile()
    needed = memory.bytes_needed(model, mesh, rows=16, decoder=decoder)
    assert 0.67 < needed / compiled.memory_analysis().temp_size_in_bytes < 2


def test_an_evaluation_is_refused_no_batch_that_fits_with_a_smaller_cache(monkeypatch):
    model = tiny_model()
    whole, small = (
        prepare([[BOS] * 200] * 4, settings(batch_size=4, cache=cache), model.config) for cache in ("same", "int8")
    )
    decoder, mesh = decoder_for(whole, model.config), model.mesh
    free = memory.bytes_needed(model, mesh, 4, decoder) - 1
    monkeypatch.setattr(memory, "free_bytes", lambda mesh: free)
    check_fits(model, small)
    with pytest.raises(UserError, match="batch_size=4: 4 rows of"):
        check_fits(model, whole)


def test_a_long_prompt_leaves_room_for_an_answer_of_whole_blocks_of_the_model():
    model = tiny_config(block_size=32, max_position_embeddings=128)
    own = settings_for({"max_new_tokens": 48}, "d2f", room=128, model=model)
    (request,) = prepare([Request([BOS] * (128 - own.new_tokens), settings=own)], own, model)
    assert (len(request.prompt), request.settings.new_tokens) == (64, 64)


@pytest.mark.thorough
def test_a_mesh_changes_no_answer():
    """Rows over `data`, heads and weights over `tensor`; the cache with them."""
    model = sharp_model()
    mesh = make_mesh({"data": 2, "tensor": 2}, jax.devices()[:4])
    graphdef, params = nnx.split(model)
    place = lambda x, names: jax.device_put(x, sharding(mesh, *names))  # noqa: E731
    split = nnx.merge(graphdef, jax.tree.map(place, nnx.to_pure_dict(params), logical_axes(model)))
    s = settings(blocks=2, slot=0.7, batch_size=4)
    assert decode(split, PROMPTS, s) == decode(model, PROMPTS, s)
    requests = prepare(PROMPTS, s, model.config)
    batch = queue.RunningBatch(split, decoder_for(requests, model.config), requests[0], rows=4)
    batch.admit(requests[:4])
    keys = batch._state.cache.entries.keys
    assert keys.sharding.shard_shape(keys.shape)[1:3] == (2, 1)


def test_no_prompts_give_no_answers():
    assert decode(sharp_model(), [], settings()).tokens == []


def test_the_time_of_an_answer_counts_all_in_which_the_device_may_decode():
    """Also that in which the caller is busy with the answers before it; the next forwards are under way by then."""
    model, own = sharp_model(), settings("ar", new=16, batch_size=4)
    requests = prepare([[BOS, 5 + i] for i in range(12)], own, model.config)
    counted = 0.0
    for _, _, seconds in generate(model, requests, None):
        counted += seconds
        time.sleep(0.1)
    assert counted > 11 * 0.1


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
    shared = prefilled(model, dataclasses.replace(given, known=jnp.int32(64), entries=row))
    for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(shared), strict=True):
        for i, length in enumerate(given.length):
            np.testing.assert_array_equal(a[:, i, :, :length], b[:, i, :, :length])


def test_what_is_known_is_not_computed_again():
    model = tiny_model()
    given = given_of(model, [[*HEADER, *prompt] for prompt in PROMPTS[:3]])
    ones = jax.tree.map(lambda x: jnp.ones_like(x), prefilled(model, given))
    entries = prefilled(model, dataclasses.replace(given, known=jnp.int32(64), entries=ones))
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
    (once,) = prepare([[5, 6, 7]], settings("refusion"), model.config)
    assert store.blocks_of(once) is store.blocks_of(once)  # a long prompt is looked at again and again
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


def test_a_prompt_is_prefilled_in_parts_whatever_comes_after_it(monkeypatch):
    """A gap of 16 tokens before a suffix, in three blocks of slots: an answer without one would have 24."""
    monkeypatch.setattr(queue, "PREFILL_CHUNK", 32)
    model, own = sharp_model(), settings("refusion", cache_length=128)
    gap = Request(HEADER, (16, [7, 8]), dataclasses.replace(own, max_new_tokens=24, serial_blocks=3))
    requests = prepare([gap, [BOS]], own, model.config)
    batch = queue.RunningBatch(model, decoder_for(requests, model.config), gap, rows=1, blocks=8)
    assert batch.prefill(batch.next_part(requests[0])) == 0
    assert batch.next_part(requests[0]) is None
    assert batch.known[batch.admit(requests[:1])] == 32


# The others compile for minutes together.
@pytest.mark.parametrize("name", all_but(["ar"], registry.decoders(), pytest.mark.slow))
def test_answers_are_those_of_each_prompt_alone(name):
    model = equipped(sharp_model(), name)
    prompts, own = [[*HEADER, *prompt] for prompt in PROMPTS], settings(name, batch_size=2)
    out = decode(model, prompts, own)
    for i, prompt in enumerate(prompts):
        alone = decode(model, [prompt], own)
        assert (alone.tokens[0], alone.commit_order[0]) == (out.tokens[i], out.commit_order[i])
