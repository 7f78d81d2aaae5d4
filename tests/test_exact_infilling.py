"""Exact infilling writes what one token after the other would: greedy it is the best, drawn it is distributed so."""

import dataclasses
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import BOS, EOS, MASK, PAD, PROMPTS, all_but, logits_of, settings, sharp_models, tiny_model

from refusion_jax import DecodeSettings, UserError, decode
from refusion_jax.decoding.requests import Request, prepare
from refusion_jax.evaluation.generation import generate
from refusion_jax.systems.api import own_settings

RANDOM_CASES = int(os.environ.get("REFUSION_RANDOM_CASES", "1200"))
LENGTH = 64  # every plain forward is padded to this: one compilation


def random_requests(rng: np.random.Generator, count: int, slot_size: int) -> list[Request]:
    """Prompts and templates, with settings of their own."""

    def ids(most):
        return rng.integers(5, 30, rng.integers(1, most + 1)).tolist()

    requests = []
    for _ in range(count):
        blocks = int(rng.integers(1, 4))
        s = DecodeSettings(
            max_new_tokens=blocks * int(rng.integers(1, 9 // blocks)) * slot_size,
            slot_size=slot_size,
            serial_blocks=blocks,
            slot_threshold=rng.uniform(0, 0.9),
            infill="exact",
            infill_blend=0.0,
            batch_size=15,  # of which one is admitted at a time: one program
            speculate=str(rng.choice(["0", "auto", "30", "1000"])),
        )
        gaps = [int(rng.integers(1, 10)), ids(3), int(rng.integers(1, 10))]
        requests.append(Request([BOS, *ids(6)], tuple(gaps) if rng.integers(3) == 0 else (), s))
    return requests


@pytest.mark.usefixtures("two_shapes")
@pytest.mark.parametrize("slot_size", [5, *(pytest.param(size, marks=pytest.mark.slow) for size in (2, 4))])
@pytest.mark.thorough
def test_every_token_but_a_slots_first_is_the_best_after_the_one_before_it(slot_size):
    """In one plain causal forward over what was given and then committed, in this order.

    So for every random request; among them are answers that end, those that go on before an end that is there already,
    and those that were written in fewer forwards than they have tokens.
    """
    rng = np.random.default_rng(slot_size)
    ended = went_on = quick = 0
    for model in sharp_models():
        requests = random_requests(rng, RANDOM_CASES // 15, slot_size)
        requests = prepare(requests, requests[0].settings, model.config)
        out = decode(model, requests, requests[0].settings)
        tokens, places = np.zeros((2, len(requests), LENGTH), np.int32)
        for i, request in enumerate(requests):
            given, at = request.given
            n, m = len(given), len(out.commit_order[i])
            tokens[i, : n + m], places[i, : n + m] = given + out.commit_tokens[i], at + out.commit_order[i]
        logits = np.array(logits_of(model, tokens, places))
        logits[:, :, [MASK, PAD, 30, 31]] = -np.inf  # the last two are padding rows of the vocabulary
        for i, request in enumerate(requests):
            n, m = len(request.given[0]), len(out.commit_order[i])
            firsts = {at for start, length in request.gaps for at in range(start, start + length, slot_size)}
            for j in range(n, n + m):
                if places[i, j] not in firsts:
                    assert places[i, j - 1] == places[i, j] - 1
                    row = logits[i, j - 1]
                    if places[i, j] < max(request.given[1]):
                        row[EOS] = -np.inf
                    assert row[tokens[i, j]] >= row.max() - 1e-4, (request, j)
            assert out.forwards[i] <= out.rounds[i] + m  # each forward makes a token final, or a plan
            ended += EOS in out.commit_tokens[i]
            went_on += EOS in out.commit_tokens[i][:-1]
            quick += out.forwards[i] < m
    assert min(ended, went_on, quick) > RANDOM_CASES // 240, (ended, went_on, quick)


@pytest.mark.thorough
def test_drawn_answers_are_distributed_as_one_token_after_the_other():
    """Two slots of three, chosen at once, of two tokens each place may have: a chi-square test of all 64 answers."""
    model, prompt, count = tiny_model(3), [BOS, 9, 13, 21], 4096
    s = DecodeSettings(
        max_new_tokens=6, slot_size=3, slot_threshold=0.0, infill="exact", temperature=1.0, top_k=2, eos_id=0,
        batch_size=512,
    )  # fmt: skip
    drawn = decode(model, [prompt] * count, s)
    assert np.mean(drawn.forwards) < 5.5, "nearly one token per forward: drafts are of no use"

    def two_best(sequences, at):
        """(ids, probabilities) [n, 2] at one place of each sequence."""
        rows = [row + [PAD] * (10 - len(row)) for row in sequences] + [[PAD] * 10] * (32 - len(sequences))
        logits = logits_of(model, rows)[:, at]
        values, ids = jax.lax.top_k(logits.at[:, jnp.array([MASK, PAD, 30, 31])].set(-jnp.inf), 2)
        return np.asarray(ids)[: len(sequences)], np.asarray(jax.nn.softmax(values))[: len(sequences)]

    first = {at: two_best([prompt + [MASK] * 6], at) for at in (4, 7)}  # by the plan, whatever else is drawn
    chance = {(): 1.0}
    for at in range(4, 10):
        ids, p = first[at] if at in first else two_best([prompt + list(known) for known in chance], at - 1)
        ids, p = (np.broadcast_to(x, (len(chance), 2)) for x in (ids, p))
        chance = {
            (*known, int(ids[i, j])): so_far * p[i, j]
            for i, (known, so_far) in enumerate(chance.items())
            for j in range(2)
        }
    seen = dict.fromkeys(chance, 0)
    for tokens in drawn.tokens:
        seen[tuple(tokens)] += 1
    expected = np.array(list(chance.values())) * count
    statistic = np.sum((np.array(list(seen.values())) - expected) ** 2 / expected)
    # 63 degrees of freedom: mean 63, standard deviation 11.2; by chance above 120 in one of 50,000 seeds
    assert expected.min() > 5
    assert statistic < 120


SPECULATIVE = [
    ("refusion", {"infill": "exact", "infill_blend": 0.3}),
    ("refusion", {"infill": "threshold", "top_p": 0.9, "top_k": 10}),
    ("dense_plan", {"slot": 0.3, "order": "left_to_right"}),
]


@pytest.mark.usefixtures("two_shapes")
@pytest.mark.parametrize(("method", "own"), all_but(SPECULATIVE[:1], SPECULATIVE))
def test_neither_the_budget_nor_the_batch_changes_an_answer(method, own):
    """Greedy or drawn; each request twice in one queue of four rows, so among others each time."""
    asked = [*map(Request, PROMPTS), Request([BOS, 5], ([7, 8], 5, [9], 6))]
    ahead, plain = slice(len(asked)), slice(len(asked), None)
    for temperature in (0.0, 1.0):
        s = settings(method, temperature=temperature, blocks=2, batch_size=4, **own)
        both = [dataclasses.replace(s, speculate=budget) for budget in ("1000", "0")]
        requests = [dataclasses.replace(x, settings=one, noise=i) for one in both for i, x in enumerate(asked)]
        out = decode(sharp_models()[0], requests, s)
        for name in ("tokens", "commit_order", "rounds"):
            assert getattr(out, name)[ahead] == getattr(out, name)[plain]
        assert sum(out.forwards[ahead]) < sum(out.forwards[plain])


def test_infilling_is_exact_unless_the_authors_threshold_is_named():
    """And then it is theirs, as in the public call of theirs that names no infilling."""
    model = sharp_models()[1]
    shared = {"max_new_tokens": 16, "slot_size": 4, "slot_threshold": 0.3, "speculate": "0"}

    def answers(**own):
        return decode(model, PROMPTS, DecodeSettings("refusion", **shared, **own))

    ours, theirs = answers(infill="exact", infill_blend=0.5), answers(infill="threshold", token_threshold=0.4)
    assert ours.commit_tokens != theirs.commit_tokens
    assert answers() == ours
    assert answers(token_threshold=0.4) == theirs
    assert answers(token_threshold=0.4, infill="exact") == ours
    assert answers(infill="threshold") == answers(token_threshold=0.9)
    with pytest.raises(UserError, match="^token_threshold=-0.5: must be at least 0, or -1 for 0.9"):
        answers(token_threshold=-0.5)


def test_a_batch_is_infilled_in_one_way_and_an_evaluation_decodes_both():
    """Tasks may set token_threshold, and so choose the authors' infilling for their own samples."""
    model, own = sharp_models()[1], {"max_new_tokens": 16, "slot_size": 4, "speculate": "0"}
    kinds = [DecodeSettings("refusion", **own, **more) for more in ({}, {"token_threshold": 0.4})]
    both = [Request(prompt, settings=kind, noise=0) for prompt in PROMPTS for kind in kinds]
    answers = {i: answer.tokens for i, answer, _ in generate(model, both, None)}
    for some in (range(0, len(both), 2), range(1, len(both), 2)):
        requests = [both[i] for i in some]
        assert [answers[i] for i in some] == decode(model, requests, requests[0].settings).tokens
    with pytest.raises(UserError, match="^prompt 1: infill must be the same for all prompts of a call"):
        decode(model, both, both[0].settings)


def test_thresholds_of_tokens_are_refused_where_they_have_no_use():
    with pytest.raises(UserError, match="infill=threshold: must be 'exact' or 'auto'"):
        settings("dense_plan", infill="threshold")
    with pytest.raises(UserError, match="^token_threshold=0.4: has no effect with infill=exact$"):
        own_settings("dense_plan", {"token_threshold": 0.4})
    assert own_settings("dense_plan", {"token_threshold": -1.0, "infill": "exact"}).infill == "exact"  # the default
