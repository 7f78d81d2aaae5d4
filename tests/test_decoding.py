"""The decoders against the plain method: the same tokens, order of commitment and phases."""

import dataclasses
import functools
import itertools
import os

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import BOS, EOS, PROMPTS, settings, sharp_model, sharp_models, tiny_model
from flax import nnx
from hypothesis import strategies as st

from refusion_jax import DecodeSettings, decode
from refusion_jax.decoding import queue as batching
from refusion_jax.decoding.queue import Answer, read_answer
from refusion_jax.decoding.requests import Request, prepare
from refusion_jax.systems.api import decoder_for
from refusion_jax.systems.refusion.decoder import PlanAndInfill
from refusion_jax.systems.refusion.phases import CHECK, DONE, PLAN, PROPOSE, RECOMPUTE, VERIFY
from refusion_jax.systems.refusion.reference import plan_and_infill

RANDOM_CASES = int(os.environ.get("REFUSION_RANDOM_CASES", "2400"))


THRESHOLDS = [(1, 0.6, 0.4), (1, 0.7, 0.02), (1, 0.2, 0.7), (2, 0.4, 0.2), (4, 0.9, 0.01)]


def phases_of(model, requests: list[Request], decoder: PlanAndInfill) -> list[tuple[list[str], Answer]]:
    """Decodes all requests as one batch: (the phases each went through, its answer)."""
    graphdef, params = nnx.split(model)
    B = len(requests)
    state = batching._empty(graphdef, params, decoder.lay_out(requests[:1]), B, decoder)
    newcomers = batching.newcomers(dict(enumerate(range(B))), requests, B, B, decoder)
    state = batching._admit(graphdef, params, state, newcomers, decoder)
    state, phases_seen = run_and_look(graphdef, params, state, decoder)
    seen, record = np.asarray(phases_seen), jax.device_get((state.record, state.forwards, state.rounds))
    names = {PLAN: "plan", VERIFY: "verify", PROPOSE: "propose", CHECK: "check", RECOMPUTE: "recompute"}
    of_row = [[names[phases[row]] for phases in seen if phases[row] != DONE] for row in range(B)]
    return [
        (of_row[row], read_answer(request, *jax.tree.map(lambda x, row=row: x[row], record), decoder.ids.eos_id))
        for row, request in enumerate(requests)
    ]


@functools.partial(jax.jit, static_argnames=("graphdef", "decoder"))
def run_and_look(graphdef, params, state, decoder):
    """The loop of the decoder, which also notes the phases [steps, B] that rows are in before each forward."""
    seen = jnp.full((200, len(state.active)), DONE)
    model = nnx.merge(graphdef, params)

    def step(loop):
        state, i, seen = loop
        return decoder.step(model, state), i + 1, seen.at[i].set(state.work.phase)

    state, _, seen = jax.lax.while_loop(lambda loop: loop[0].active.any(), step, (state, 0, seen))
    return state, seen


def strategies(slot_size: int):
    """Requests with random prompts or templates, lengths and settings, which one compilation serves."""
    ids = st.lists(st.integers(5, 29), min_size=1, max_size=6)
    piece = ids | st.integers(1, 9)
    template = st.lists(piece, min_size=1, max_size=4).filter(lambda t: any(isinstance(x, int) for x in t)).map(tuple)
    chance = st.floats(0.02, 0.98)
    sizes = st.integers(1, 3).flatmap(lambda s: st.tuples(st.integers(1, 6 // s), st.just(s)))  # slots a block, blocks
    settings = st.builds(
        lambda size, slot, token, infill, blend, recompute, planning, infilling: DecodeSettings(
            max_new_tokens=size[0] * size[1] * slot_size,
            slot_size=slot_size,
            serial_blocks=size[1],
            slot_threshold=slot,
            token_threshold=token,
            infill=infill,
            infill_blend=blend,
            recompute=recompute,
            overlap_planning=planning,
            overlap_infilling=infilling,
        ),
        *(sizes, chance, chance, st.sampled_from(["threshold", "threshold", "exact"]), st.just(0.0) | chance),
        *(st.booleans(), st.booleans(), st.booleans()),
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
    decoder = dataclasses.replace(decoder_for(requests, model.config), **sizes)
    for request, (phases, answer) in zip(requests, phases_of(model, requests, decoder), strict=True):
        expected = plan_and_infill(model, request)
        if expected["margin"] < 1e-5:
            continue  # float32 noise may decide it
        got = {name: getattr(answer, name) for name in ("tokens", "commit_order", "rounds")}
        assert got == {name: expected[name] for name in got}, request
        assert len(phases) == answer.forwards <= expected["forwards"]
        if not request.settings.overlap_planning and not request.settings.overlap_infilling:
            assert phases == expected["phases"]


@pytest.mark.parametrize(("blocks", "slot", "token"), THRESHOLDS)
def test_refusion_decodes_as_the_plain_method_without_a_cache(blocks, slot, token):
    s = settings(blocks=blocks, slot=slot, token=token)
    for model in sharp_models()[:3]:
        expected = [plan_and_infill(model, Request(prompt, settings=s)) for prompt in PROMPTS]
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
        plan_and_infill(model, Request(prompt, settings=settings(blocks=blocks, slot=slot, token=token)))
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
