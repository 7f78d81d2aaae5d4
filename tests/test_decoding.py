"""The decoders against the plain method: the same tokens, order of commitment, rounds and forward passes."""

import collections
import dataclasses
import itertools
import math
import os
import re

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import BOS, EOS, PROMPTS, settings, sharp_models, tiny_model
from hypothesis import strategies as st

from refusion_jax import DecodeSettings, UserError, decode
from refusion_jax.decoding.requests import Request, prepare
from refusion_jax.decoding.trajectory import forwards_of
from refusion_jax.distributed.chips import free_tokens
from refusion_jax.systems.api import decoder_for, stream
from refusion_jax.systems.refusion.loop import SlotDecoder
from refusion_jax.systems.refusion.phases import PLAN, VERIFY, needs_of
from refusion_jax.systems.refusion.reference import plan_and_infill
from refusion_jax.systems.refusion.settings import ORDERS

pytestmark = pytest.mark.usefixtures("two_shapes")
RANDOM_CASES = int(os.environ.get("REFUSION_RANDOM_CASES", "600"))


MET = collections.Counter()  # phases and outcomes of the random requests
BUDGETS = st.sampled_from(["0", "auto"]) | st.integers(1, 400).map(str)


def strategies(slot_size: int, infill: str):
    """Requests with random prompts or templates, lengths and settings, which one compilation serves."""
    ids = st.lists(st.integers(5, 29), min_size=1, max_size=6)
    piece = ids | st.integers(1, 9)
    template = st.lists(piece, min_size=1, max_size=4).filter(lambda t: any(isinstance(x, int) for x in t)).map(tuple)
    chance = st.floats(0.02, 0.98)
    sizes = st.integers(1, 3).flatmap(lambda s: st.tuples(st.integers(1, 6 // s), st.just(s)))  # slots a block, blocks
    settings = st.builds(
        lambda size, slot, order, token, blend, speculate: DecodeSettings(
            max_new_tokens=size[0] * size[1] * slot_size,
            slot_size=slot_size,
            serial_blocks=size[1],
            slot_threshold=slot,
            order=order,
            token_threshold=token,
            infill=infill,
            infill_blend=blend,
            speculate=speculate,
        ),
        *(sizes, chance, st.sampled_from(["confidence", *ORDERS]), chance),
        *(st.just(0.0) | chance, BUDGETS),
    )
    return st.builds(
        lambda prompt, template, settings, noise: Request([BOS, *prompt], template, settings, noise),
        *(ids, st.just(()) | template, settings, st.integers(0, 3)),
    )


@pytest.mark.parametrize("slot_size", [3, *(pytest.param(size, marks=pytest.mark.slow) for size in (1, 4))])
@hypothesis.settings(max_examples=RANDOM_CASES // 24, phases=[hypothesis.Phase.generate])
@hypothesis.given(data=st.data())
@pytest.mark.thorough
def test_random_requests_decode_as_the_plain_method_does(slot_size, data):
    """The same tokens, commit order, rounds and, where nothing is fed ahead of time, forwards; else no more of them."""
    model, infill = sharp_models()[data.draw(st.integers(0, 4))], data.draw(st.sampled_from(["threshold", "exact"]))
    requests = prepare([data.draw(strategies(slot_size, infill)) for _ in range(8)], DecodeSettings(), model.config)
    sizes = {"slots": 40, "block_slots": 40, "width": 64, "budget": 400, "cache_length": 64 + 40 * slot_size}
    sizes |= {"new_tokens": 64, "chunk": 32}
    decoder = dataclasses.replace(decoder_for(requests, model.config), **sizes)
    for index, answer in stream(model, requests, decoder):
        request = requests[index]
        expected = plan_and_infill(model, request)
        if expected["margin"] < 1e-5:
            continue  # float32 noise may decide it
        got = {name: getattr(answer, name) for name in ("tokens", "commit_order", "rounds")}
        assert got == {name: expected[name] for name in got}, request
        assert answer.forwards <= expected["forwards"]
        assert answer.forwards == expected["forwards"] or request.settings.speculate != "0"
        MET.update(expected["phases"])
        MET["an end" if EOS in answer.tokens else "no end"] += 1
        MET["another order"] += answer.commit_order != sorted(answer.commit_order)
        MET["fewer forwards"] += answer.forwards < len(answer.commit_order)


def test_random_requests_meet_every_phase_and_every_way_to_end():
    """Otherwise the comparison would prove little."""
    if not MET:
        pytest.skip("counts what the test before has met")
    assert len(MET) == 8
    assert min(MET.values()) > 10, MET


@pytest.mark.thorough
def test_slots_are_written_in_the_order_that_is_asked_for():
    """One slot a round: from left to right, or as the seed and the prompt's number have it, whatever its row."""
    model, size, slots = tiny_model(), 4, 8

    def slots_of(answers):
        return [[at // size for at in order[::size]] for order in answers.commit_order]

    prompts = [[BOS, 5, 9, 13]] * 6  # as long as a slot
    s = settings(new=size * slots, size=size, slot=1.0, infill="exact", eos_id=29, order="left_to_right")
    ordered = list(range(1, slots + 1))
    assert slots_of(decode(model, prompts, s)) == [ordered] * 6
    drawn, other = (
        slots_of(decode(model, prompts, dataclasses.replace(s, order="random", seed=seed))) for seed in (0, 1)
    )
    assert all(sorted(row) == ordered for row in drawn)
    assert len({tuple(row) for row in drawn + other}) == 12
    backwards = [Request(prompts[0], settings=dataclasses.replace(s, order="random"), noise=5 - i) for i in range(6)]
    assert slots_of(decode(model, backwards, s)) == drawn[::-1]


ALWAYS = {"slot": 0.0, "token": 0.0}  # every draft is accepted
ONE_BY_ONE = {"slot": 1.0, "token": 0.0}  # so it is, and only one slot is planned at a time


def test_which_slots_a_row_plans_is_what_the_docstring_draws():
    """With room for everything, and without speculation."""
    head, *lines = re.search(r"( *phase +remaining(?:.*\n){5})", SlotDecoder.choose_plan.__doc__)[1].splitlines()
    starts = [head.index(name) for name in ("remaining", "drafts", "with an EOS", "plan with room", "without room")]
    remaining, drafts, with_eos, *planned = (
        np.array([[slot in line[start:end].split() for slot in "abcdefgh"] for line in lines])
        for start, end in itertools.pairwise([*starts, None])
    )
    phase = jnp.array([{"plan": PLAN, "verify": VERIFY}[line.split()[0]] for line in lines])
    model = tiny_model()
    for speculate, expected in zip(("1000", "0"), planned, strict=True):
        own = DecodeSettings(max_new_tokens=16, slot_size=2, serial_blocks=2, speculate=speculate)
        requests = prepare([Request([BOS, 5])] * len(lines), own, model.config)
        decoder = decoder_for(requests, model.config)
        layout, keys = decoder.lay_out(requests), jax.random.split(jax.random.key(0), len(lines))

        @jax.jit
        def choose(layout, keys, decoder=decoder):
            s = decoder.init(model, layout, keys)
            drafted = jnp.where(with_eos[:, :4, None], EOS, s.work.drafts)
            work = s.work.replace(phase=phase, chosen=jnp.array(drafts[:, :4]), drafts=drafted)
            s = s.replace(work=work, remaining=jnp.array(remaining[:, :4]))
            here, following = (s.places.block(s.block + i, 4) for i in (0, 1))
            sizes = decoder.sizes(model, len(lines))
            return here, *decoder.choose_plan(s, needs_of(work, here), here, following, sizes)

        here, plan_block, found, _ = choose(layout, keys)
        is_next = np.asarray(plan_block.start != here.start).all(axis=1)[:, None]
        assert np.array_equal(np.hstack([found & ~is_next, found & is_next]), expected)


@pytest.mark.parametrize("thresholds", [ALWAYS, ONE_BY_ONE])
@pytest.mark.thorough
def test_where_all_drafts_are_accepted_a_budget_nearly_halves_the_forwards(thresholds):
    """The next plan is of the same block of two slots, or of the next block."""
    s, n = settings(new=40, blocks=5, eos_id=29, **thresholds), len(PROMPTS)
    budgets = (dataclasses.replace(s, speculate=budget) for budget in ("1000", "0"))
    out = decode(tiny_model(), [Request(prompt, settings=own) for own in budgets for prompt in PROMPTS], s)
    assert out.tokens[:n] == out.tokens[n:]
    assert out.rounds == [10 if thresholds is ONE_BY_ONE else 5] * 2 * n
    assert out.forwards[:n] == [rounds + 1 for rounds in out.rounds[:n]]
    assert out.forwards[n:] == [2 * rounds for rounds in out.rounds[n:]]


@pytest.mark.thorough
def test_the_automatic_budget_grows_with_each_plan_that_holds(monkeypatch):
    """Where 12 tokens are free and one slot of 4 a round is accepted, the next plan fits into them only at the end.

    One of seven slots is free in any case: it fits into the smaller of two shapes, of 32 tokens.
    """
    monkeypatch.setattr("refusion_jax.systems.refusion.budget.free_tokens", lambda *_: 12)
    # A length of its own: nothing was compiled for it before.
    s = settings(new=44, eos_id=29, batch_size=1, **ONE_BY_ONE)
    auto, fixed = (dataclasses.replace(s, speculate=budget) for budget in ("auto", "12"))
    out = decode(tiny_model(), [Request(prompt, settings=own) for own in (auto, fixed) for prompt in PROMPTS[:2]], s)
    assert out.tokens[:2] == out.tokens[2:]
    assert out.forwards[:2] == [11 + 3] * 2  # two plans have held before one of 32 tokens is worth its time
    assert out.forwards[2:] == [11 + 4] * 2  # the first four of 11 plans take a forward pass of their own


def test_a_budget_is_a_number_of_tokens_or_auto():
    s, model = settings(), tiny_model().config
    decoders = [decoder_for(prepare(PROMPTS, settings(speculate=n), model), model) for n in (30, "30", "31")]
    assert decoders[0] == decoders[1] != decoders[2]
    for wrong in ("some", "-1", -1, 2**31, 1.5):
        with pytest.raises(UserError, match=f"^speculate={wrong}: "):
            dataclasses.replace(s, speculate=wrong)


def test_what_is_free_is_what_a_forward_feeds_while_it_waits_for_its_weights():
    """On a TPU that is what its data sheet says; on this CPU nothing, where the weights lie in the cache."""
    for kind, tokens in (("TPU v5 lite", 241), ("TPU v5", 166), ("NVIDIA H100 80GB HBM3", 295), ("unheard of", 0)):
        assert free_tokens(10**9, kind) == tokens
        assert abs(free_tokens(10**9, kind, itemsize=1) - tokens / 2) < 1  # weights in int8 are there sooner
    assert [free_tokens(size, "cpu") for size in (10**6, 10**9)] == [0, 16]


@pytest.mark.parametrize("least", [0.3, pytest.param(0.0, marks=pytest.mark.slow)])
def test_a_text_that_probably_ends_with_its_drafts_ends_there_without_their_being_verified(least):
    """What is not verified is the plan of the last forward up to the end, and so probable; what is, stays as it was."""
    model, own, early = sharp_models()[1], settings("dense", size=8, eos_id=6), 0
    lossless, parts = decode(model, PROMPTS, own), collections.defaultdict(list)
    requests = prepare(PROMPTS, dataclasses.replace(own, end_threshold=least), model.config)
    for i, answer in stream(model, requests, record=lambda i, part: parts[i].append(part)):
        assert answer.forwards <= lossless.forwards[i]
        if answer.forwards == lossless.forwards[i] or not answer.forwards:
            assert answer.tokens == lossless.tokens[i] or not answer.forwards
            continue
        early += 1
        last = forwards_of(parts[i])[answer.forwards]
        planned = [place for place in answer.commit_order if place in last.plan]
        verified = len(answer.commit_order) - len(planned)
        assert answer.tokens[:verified] == lossless.tokens[i][:verified]
        assert answer.tokens[verified:] == [last.plan[place][0] for place in planned]
        assert answer.tokens[-1] == own.eos_id
        assert math.prod(last.plan[place][1] for place in planned) >= 0.999 * least
    assert early
