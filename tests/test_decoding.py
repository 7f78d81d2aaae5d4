import dataclasses
import functools
import itertools
import os

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference_decoder
from conftest import BOS, EOS, MASK, PAD, ROOT, tiny_config, tiny_model
from flax import nnx
from hypothesis import strategies as st

from refusion_jax import DecodeSettings, UserError, decode
from refusion_jax.decoding import batching, memory, refusion
from refusion_jax.decoding import cache as kv
from refusion_jax.decoding.batching import Answer, read_answer, stream
from refusion_jax.decoding.phases import CHECK, DONE, PLAN, PROPOSE, VERIFY
from refusion_jax.decoding.requests import Given, Request, prepare, sizes_for
from refusion_jax.decoding.sampling import probability, sample
from refusion_jax.decoding.settings import Dials, Static
from refusion_jax.model.transformer import KeyValues, logical_axes
from refusion_jax.sharding import MESH_AXES, make_mesh, sharding

RANDOM_CASES = int(os.environ.get("REFUSION_RANDOM_CASES", "2400"))

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


def phases_of(model, requests: list[Request], static: Static) -> list[tuple[list[str], Answer]]:
    """Decodes all requests as one batch: (the phases each went through, its answer)."""
    graphdef, params = nnx.split(model)
    B = len(requests)
    state = batching._empty(graphdef, params, B, static)
    newcomers = batching.newcomers(dict(enumerate(range(B))), requests, B, B, static)
    state = batching._admit(graphdef, params, state, *newcomers, static)
    state, phases_seen = run_and_look(graphdef, params, state, static)
    seen, record = np.asarray(phases_seen), jax.device_get((state.record, state.forwards, state.rounds))
    names = {PLAN: "plan", VERIFY: "verify", PROPOSE: "propose", CHECK: "check"}
    of_row = [[names[phases[row]] for phases in seen if phases[row] != DONE] for row in range(B)]
    return [
        (of_row[row], read_answer(request, *jax.tree.map(lambda x, row=row: x[row], record), static))
        for row, request in enumerate(requests)
    ]


@functools.partial(jax.jit, static_argnames=("graphdef", "static"))
def run_and_look(graphdef, params, state, static):
    """The loop of the decoder, which also notes the phases [steps, B] that rows are in before each forward."""
    seen = jnp.full((200, len(state.done)), DONE)
    model = nnx.merge(graphdef, params)

    def step(loop):
        state, i, seen = loop
        return refusion.step(model, state, static), i + 1, seen.at[i].set(state.work.phase)

    state, _, seen = jax.lax.while_loop(lambda loop: ~loop[0].done.all(), step, (state, 0, seen))
    return state, seen


def strategies(slot_size: int):
    """Requests with random prompts or templates, lengths and settings, which one compilation serves."""
    ids = st.lists(st.integers(5, 29), min_size=1, max_size=6)
    piece = ids | st.integers(1, 9)
    template = st.lists(piece, min_size=1, max_size=4).filter(lambda t: any(isinstance(x, int) for x in t)).map(tuple)
    chance = st.floats(0.02, 0.98)
    sizes = st.integers(1, 3).flatmap(lambda s: st.tuples(st.integers(1, 6 // s), st.just(s)))  # slots a block, blocks
    settings = st.builds(
        lambda size, slot, token, planning, infilling: DecodeSettings(
            *("refusion", size[0] * size[1] * slot_size, slot_size, size[1], slot, token),
            overlap_planning=planning,
            overlap_infilling=infilling,
        ),
        *(sizes, chance, chance, st.booleans(), st.booleans()),
    )
    return st.builds(
        lambda prompt, template, settings: Request([BOS, *prompt], template, settings),
        *(ids, st.just(()) | template, settings),
    )


@pytest.mark.parametrize("slot_size", [1, 3, 4])
@hypothesis.settings(
    max_examples=RANDOM_CASES // 24, deadline=None, derandomize=True, database=None, phases=[hypothesis.Phase.generate]
)
@hypothesis.given(data=st.data())
def test_random_requests_decode_as_the_plain_method_does(slot_size, data):
    """The same tokens, commit order, rounds and, where nothing is overlapped, phases; else no more forwards."""
    model = sharp_models()[data.draw(st.integers(0, 4))]
    requests = prepare([data.draw(strategies(slot_size)) for _ in range(8)], DecodeSettings(), model.config)
    sizes = {"slots": 40, "block_slots": 40, "widths": (8, 32, 64), "cache_length": 128}
    static = dataclasses.replace(sizes_for(requests, model.config), **sizes)
    for request, (phases, answer) in zip(requests, phases_of(model, requests, static), strict=True):
        expected = reference_decoder.refusion(model, request)
        if expected["margin"] < 1e-5:
            continue  # float32 noise may decide it
        got = {name: getattr(answer, name) for name in ("tokens", "commit_order", "rounds")}
        assert got == {name: expected[name] for name in got}, request
        assert len(phases) == answer.forwards <= expected["forwards"]
        if not request.settings.overlap_planning and not request.settings.overlap_infilling:
            assert phases == expected["phases"]


@functools.cache
def sharp_models():
    return [sharp_model(seed) for seed in range(5)]


@pytest.mark.parametrize(("blocks", "slot", "token"), THRESHOLDS)
def test_refusion_decodes_as_the_plain_method_without_a_cache(blocks, slot, token):
    s = settings(blocks=blocks, slot=slot, token=token)
    for model in sharp_models()[:3]:
        expected = [reference_decoder.refusion(model, Request(prompt, settings=s)) for prompt in PROMPTS]
        for planning, infilling in itertools.product((False, True), repeat=2):
            out = decode(model, PROMPTS, dataclasses.replace(s, overlap_planning=planning, overlap_infilling=infilling))
            for name in ("tokens", "commit_order", "rounds"):
                assert getattr(out, name) == [e[name] for e in expected]
            for got, e in zip(out.forwards, expected, strict=True):
                assert got <= e["forwards"] if planning or infilling else got == e["forwards"]


def test_where_all_drafts_are_accepted_overlapping_nearly_halves_the_forwards():
    always = {"slot": 0.0, "token": 0.0}  # every draft is accepted
    one_by_one = {"slot": 1.0, "token": 0.0}  # so it is, and only one slot is planned at a time
    for thresholds, blocks in ((always, 10), (one_by_one, 1), (one_by_one, 5)):
        s = settings(new=40, blocks=blocks, eos_id=29, **thresholds)
        model = tiny_model()
        overlapped = decode(model, PROMPTS, s)
        plain = decode(model, PROMPTS, dataclasses.replace(s, overlap_planning=False))
        assert overlapped.tokens == plain.tokens
        assert plain.forwards == [2 * rounds for rounds in plain.rounds]
        assert max(a / b for a, b in zip(overlapped.forwards, plain.forwards, strict=True)) <= 0.55


def test_overlapped_infilling_saves_forwards():
    s = settings(slot=0.7, token=0.4, size=8)
    saved = 0
    for model in sharp_models():
        overlapped, plain = (decode(model, PROMPTS, dataclasses.replace(s, overlap_infilling=x)) for x in (True, False))
        assert (overlapped.tokens, overlapped.commit_order) == (plain.tokens, plain.commit_order)
        assert all(a <= b for a, b in zip(overlapped.forwards, plain.forwards, strict=True))
        saved += sum(plain.forwards) - sum(overlapped.forwards)
    assert saved > 0


def test_the_cases_above_meet_every_phase_and_every_way_to_end():
    """Otherwise the comparison would prove little."""
    expected = [
        reference_decoder.refusion(model, Request(prompt, settings=settings(blocks=blocks, slot=slot, token=token)))
        for model in sharp_models()[:3]
        for blocks, slot, token in THRESHOLDS
        for prompt in PROMPTS
    ]
    counts = [
        sum("check" in e["phases"] for e in expected),
        sum(e["phases"].count("check") < e["rounds"] for e in expected),
        sum(EOS in e["tokens"] for e in expected),
        sum(EOS not in e["tokens"] for e in expected),
        sum(e["commit_order"] != sorted(e["commit_order"]) for e in expected),
        sum(e["forwards"] < len(e["commit_order"]) for e in expected),
    ]
    assert min(counts) > 10, counts


def left_to_right(model, prompt: list[int], s: DecodeSettings) -> dict:
    """`sequential` and `ar` without a cache: one token a forward."""
    text = reference_decoder.Text(model, Request(prompt, settings=s))
    for offset in range(s.max_new_tokens):
        place = len(prompt) + offset
        if s.method == "sequential" and offset % s.slot_size == 0:
            p = text.probabilities("first", [(MASK, place)])
        else:  # the last committed token is fed once more, and seen once: by itself
            last = text.tokens.pop(), text.places.pop()
            text.seen.pop()
            p = {place: text.probabilities("next", [last])[last[1]]}
            text.commit([last])
        token = text.best(p)[place]
        text.commit([(token, place)])
        if token == EOS:
            break
    return text.result(0)


@pytest.mark.parametrize("method", ["sequential", "ar"])
def test_one_token_a_forward_equals_forwards_without_a_cache(method):
    s = settings(method)
    for seed in range(3):
        model = sharp_model(seed)
        out = decode(model, PROMPTS, s)
        for i, prompt in enumerate(PROMPTS):
            expected = left_to_right(model, prompt, s)
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
        alone = decode(model, [Request(prompt, noise=i, settings=s)], s)  # noise belongs to its place in the call
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
    compiled = batching._run._cache_size()
    decode(model, PROMPTS[::-1], settings(method, slot=0.1, token=0.9, temperature=0.5, seed=9))
    assert batching._run._cache_size() == compiled
    decode(model, PROMPTS, settings(method, new=8))
    assert batching._run._cache_size() == compiled + 1  # sizes do: the counter counts


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
    logits, rows = jnp.array([[[0.0, 1.0, 2.0, -1.0]]]), 20_000
    keys, places = jax.random.split(jax.random.key(0), rows), jnp.zeros((rows, 1), int)
    many, draw = jnp.broadcast_to(logits, (rows, 1, 4)), jnp.ones((rows, 1), bool)
    for temperature in (0.5, 2.0):
        drawn = sample(many, draw, keys, places, Dials.of([DecodeSettings(temperature=temperature)] * rows))
        expected = jax.nn.softmax(logits[0, 0] / temperature)
        # 5 standard deviations of a share of 20 000 draws are at most 0.018
        np.testing.assert_allclose(np.bincount(drawn[:, 0], minlength=4) / rows, expected, atol=0.018)
    warm = Dials.of([DecodeSettings(temperature=9.0)] * rows)
    assert (sample(many, ~draw, keys, places, warm) == 2).all()  # where nothing is drawn, the best
    assert (sample(many, draw, keys, places, Dials.of([DecodeSettings()] * rows)) == 2).all()


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


def test_nothing_is_transferred_while_the_device_decodes():
    """Requests go in and records come out between runs of the loop; inside it there is no way to the host."""
    model = sharp_model()
    requests = prepare(PROMPTS, settings(), model.config)
    graphdef, params = nnx.split(model)
    static = sizes_for(requests, model.config)
    state = batching._empty(graphdef, params, 4, static)
    newcomers = batching.newcomers({0: 0, 1: 1}, requests, 2, 4, static)
    state = batching._admit(graphdef, params, state, *newcomers, static)
    wanted = jnp.int32(4)
    with jax.transfer_guard("disallow_explicit"):
        state = batching._run(graphdef, params, state, wanted, static)
    assert state.done.all()
    lowered = batching._run.lower(graphdef, params, state, wanted, static).as_text()
    assert "while" in lowered
    assert not [word for word in ("callback", "infeed", "outfeed") if word in lowered]


def test_freed_rows_are_filled_again_and_answers_come_as_they_finish():
    """A queue much longer than the batch, of requests of very different lengths, compiles one loop."""
    model = sharp_model()
    lengths = [4, 32, 8, 4, 24, 4, 4, 16] * 4
    s = settings(new=32, eos_id=29)
    requests = [
        Request([BOS, 5 + i % 20], settings=dataclasses.replace(s, max_new_tokens=n)) for i, n in enumerate(lengths)
    ]
    requests = prepare(requests, s, model.config)
    compiled = batching._run._cache_size(), batching._admit._cache_size()
    order, answers = zip(*stream(model, requests, 8), strict=True)
    assert (batching._run._cache_size(), batching._admit._cache_size()) == (compiled[0] + 1, compiled[1] + 1)
    assert sorted(order) == list(range(32))
    assert order.index(3) < order.index(1)  # the short one behind overtakes the long one before
    for i, answer in zip(order, answers, strict=True):
        alone = decode(model, [requests[i]], s)
        assert (answer.tokens, answer.forwards) == (alone.tokens[0], alone.forwards[0])


@pytest.mark.parametrize("length", [1, 255, 256, 257, 600])
def test_prompts_of_any_length_are_prefilled_in_chunks(length):
    """What stands in the cache is that of one forward over the whole prompt, whatever the padding."""
    model = tiny_model(max_position_embeddings=1024)
    given = np.zeros((2, 672), np.int32)
    given[:, :length] = np.random.default_rng(0).integers(5, 29, length)
    given[0, length:] = 7  # padding without meaning
    positions = np.broadcast_to(np.arange(672), given.shape)
    prompt = Given(given, positions, np.full(2, length))
    cache = jax.jit(lambda m, g: kv.prefill(m, g, 256))(model, prompt)
    none = KeyValues(*(jnp.zeros((2, 2, 0, 2, 8)),) * 2)
    causal = jnp.broadcast_to(jnp.tril(jnp.ones((length, length), bool)), (2, length, length))
    _, whole = model.extend(given[:, :length], positions[:, :length], none, jnp.zeros(2, int), causal)
    for ours, expected in zip(jax.tree.leaves(cache.entries), jax.tree.leaves(whole), strict=True):
        np.testing.assert_allclose(ours[:, :, :length], expected, atol=2e-6)


def test_the_cache_holds_the_text_and_one_forward_and_nothing_more():
    model = tiny_model()
    requests = prepare(PROMPTS, settings(new=64, blocks=2), model.config)
    static = sizes_for(requests, model.config)
    assert static.widths[-1] == 64  # a block of 32 and the next one
    assert static.cache_length == 96 + 64  # 8 + 64 tokens, rounded up to 96
    cache = kv.Cache.empty(model, 3, static.cache_length)
    stored = sum(x.nbytes for x in jax.tree.leaves(cache.entries))
    assert stored == 3 * static.cache_length * kv.bytes_per_token(model.config, "float32")


def test_a_batch_that_cannot_fit_is_refused_before_it_is_compiled(monkeypatch):
    model = tiny_model()
    requests = prepare(PROMPTS, settings(new=64, blocks=2), model.config)
    compiled = batching._run._cache_size()
    monkeypatch.setattr(memory, "free_bytes", lambda device: 2_350_000)
    with pytest.raises(UserError, match="--decode.batch_size=8: 8 rows of 160 tokens, of 256 bytes.*size=4 would fit"):
        next(stream(model, requests, 64))
    monkeypatch.setattr(memory, "free_bytes", lambda device: 1000)
    with pytest.raises(UserError, match="lower --decode.cache_length"):
        next(stream(model, requests, 64))
    assert batching._run._cache_size() == compiled


def test_help_states_the_bytes_of_a_token_as_they_are():
    c = tiny_config(num_hidden_layers=36, num_key_value_heads=8, head_dim=128)
    assert kv.bytes_per_token(c, "bfloat16") == 147_456
    assert 147_456 * 64 * 512 / 2**30 == 4.5
    assert "147,456 bytes a token, 4.5 GiB for 64 rows of\n512" in (ROOT / "refusion_jax/generate.py").read_text()


@pytest.mark.parametrize("method", ["refusion", "sequential"])
def test_templates_keep_what_is_given_and_fill_the_gaps(method):
    for model in sharp_models():
        given = ([7, 8], 10, [9, EOS, 11], 3, [12], 8)
        s = settings(method, slot=0.5, token=0.3)
        out = decode(model, [Request([BOS, 5], given), Request([], ([BOS], 6, [14]))], s)
        text = out.tokens[0]
        assert text[:2] == [7, 8]
        assert text[12:15] == [9, EOS, 11]
        assert text[18] == 12
        assert EOS not in text[2:12] + text[15:18]  # a gap that has text behind it cannot end it
        assert len(text) == 27 or text.index(EOS, 19) == len(text) - 1
        gaps = {*range(4, 14), *range(17, 20)}
        assert gaps <= set(out.commit_order[0]) <= gaps | set(range(21, 29))
        assert len(out.tokens[1]) == 8
        assert out.tokens[1][-1] == 14
        assert sorted(out.commit_order[1]) == list(range(1, 7))


def test_what_stands_behind_a_gap_changes_what_is_written_into_it():
    model = sharp_model(1)
    a, b = (decode(model, [Request([BOS, 5], (8, behind))], settings()) for behind in ([9, 9], [21, 22]))
    assert a.tokens[0][:8] != b.tokens[0][:8]


def test_a_mesh_changes_no_answer():
    """Rows over `data`, heads and weights over `tensor`; the cache with them."""
    model = sharp_model()
    mesh = make_mesh(dict.fromkeys(MESH_AXES, 1) | {"data": 2, "tensor": 2}, jax.devices()[:4])
    graphdef, params = nnx.split(model)
    place = lambda x, names: jax.device_put(x, sharding(mesh, *names))  # noqa: E731
    split = nnx.merge(graphdef, jax.tree.map(place, nnx.to_pure_dict(params), logical_axes(model)))
    for method in ("refusion", "ar"):
        s = settings(method, blocks=2, slot=0.7, batch_size=4)
        assert decode(split, PROMPTS, s) == decode(model, PROMPTS, s)
    with jax.set_mesh(mesh):
        static = sizes_for(prepare(PROMPTS, s, model.config), model.config)
        state = batching._empty(*nnx.split(split), 4, static)
    assert state.cache.entries.keys.sharding.shard_shape(state.cache.entries.keys.shape)[1:4:2] == (2, 1)


def test_top_k_and_top_p_keep_the_most_probable():
    logits = jnp.log(jnp.array([[[0.4, 0.3, 0.2, 0.1]]]))
    rows = 20_000
    draw = jnp.ones((rows, 1), bool)
    keys, places = jax.random.split(jax.random.key(0), rows), jnp.zeros((rows, 1), int)
    for changes, expected in (
        ({"top_k": 2}, [4 / 7, 3 / 7, 0, 0]),
        ({"top_p": 0.75}, [4 / 9, 3 / 9, 2 / 9, 0]),
        ({"top_p": 0.05}, [1, 0, 0, 0]),
        ({"top_k": 3, "top_p": 0.5}, [4 / 7, 3 / 7, 0, 0]),  # of 4/9, 3/9, 2/9
    ):
        dials = Dials.of([DecodeSettings(temperature=1.0, **changes)] * rows)
        drawn = sample(jnp.broadcast_to(logits, (rows, 1, 4)), draw, keys, places, dials)
        # 5 standard deviations of a share of 20 000 draws are at most 0.018
        np.testing.assert_allclose(np.bincount(drawn[:, 0], minlength=4) / rows, expected, atol=0.018)
        assert not (np.bincount(drawn[:, 0], minlength=4) > 0)[np.array(expected) == 0].any()


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
