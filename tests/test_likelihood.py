"""The likelihood of a text is exact: it sums to one, and is what multiplying one token at a time gives."""

import itertools

import jax
import numpy as np
import pytest
from conftest import MASK, PROMPTS, logits_of, sharp_model, tiny_model
from flax import nnx

from refusion_jax import DecodeSettings, UserError, decode, load_model, log_likelihood
from refusion_jax.checkpoints.run_directory import write_model_config
from refusion_jax.checkpoints.weights import save_params
from refusion_jax.evaluation.likelihood import likelihoods, token_scores
from refusion_jax.model import huggingface
from refusion_jax.systems.interface import ScoredText
from refusion_jax.systems.refusion.likelihood import slot_scoring

LENGTH = 64


def log_probabilities(model, tokens, positions, last):
    """Those of the token after `last` tokens, each of which sees all before it."""
    logits = logits_of(model, tokens[None], positions[None])[0, last]
    return jax.nn.log_softmax(logits[: model.config.num_tokens])


def step_by_step(model, prompt, continuation, slot_size, order) -> float:
    """One forward per token: the chain rule as it is written in the paper."""
    seen, total = [(token, at) for at, token in enumerate(prompt)], 0.0

    def read(sequence):
        tokens, positions = np.zeros((2, LENGTH), np.int32)
        tokens[: len(sequence)], positions[: len(sequence)] = zip(*sequence, strict=True)
        return log_probabilities(model, tokens, positions, len(sequence) - 1)

    for slot in order:
        for i in range(slot * slot_size, min((slot + 1) * slot_size, len(continuation))):
            at = len(prompt) + i
            asked = [*seen, (MASK, at)] if i == slot * slot_size else seen
            total += float(read(asked)[continuation[i]])
            seen = [*seen, (continuation[i], at)]
    return total


ORDERS = [(4, [0]), (2, [0, 1]), (2, [1, 0]), (1, [2, 0, 3, 1]), (3, [1, 0]), (3, "left_to_right"), (1, "random")]


@pytest.mark.parametrize("number", range(len(ORDERS)), ids=lambda number: str(ORDERS[number]))
@pytest.mark.parametrize("method", ["refusion", "dense"])
def test_the_probabilities_of_all_continuations_sum_to_one(method, number):
    """After a prompt, and after none."""
    (slot_size, order), prompt = ORDERS[number], [3, 1] * ((number + (method == "dense")) % 2)
    model = tiny_model(vocab_size=8, num_tokens=5)
    texts = list(itertools.product(range(5), repeat=4))
    options = {"slot_size": slot_size, "order": order, "keys": [0] * len(texts), "method": method}
    nats = log_likelihood(model, [prompt] * len(texts), texts, **options)
    assert abs(np.exp(nats).sum() - 1) < 1e-5
    assert np.ptp(nats) > 0.1  # and they are not all alike


def test_left_to_right_models_sum_to_one_as_well():
    """Of one token more than the model reads, as it is not fed the last."""
    texts = list(itertools.product(range(5), repeat=3))
    model = tiny_model(vocab_size=8, num_tokens=5, max_position_embeddings=3)
    nats = log_likelihood(model, [[3]] * len(texts), texts, method="ar")
    assert abs(np.exp(nats).sum() - 1) < 1e-5


@pytest.mark.parametrize("top", [1, 5, 40])
def test_the_most_probable_tokens_of_a_place_are_those_of_the_model(top):
    model, text = sharp_model(), [*PROMPTS[2], 7, 12, 28]
    (scores,) = token_scores(model, [text[:8]], [text[8:]], "ar", 1, top)
    for last, score in enumerate(scores, 7):
        tokens = np.pad(text, (0, LENGTH - len(text)))
        expected = np.array(log_probabilities(model, tokens, np.arange(LENGTH), last))
        ids, found = zip(*score.best, strict=True)
        assert ids == (*np.argsort(-expected, kind="stable")[: min(top, 30)],)
        np.testing.assert_allclose([score.log_p, *found], expected[[text[last + 1], *ids]], atol=1e-4)


def test_it_is_the_product_of_one_token_after_the_other():
    model = sharp_model()
    rng = np.random.default_rng(0)
    texts = [rng.integers(5, 30, size=rng.integers(1, 20)).tolist() for _ in PROMPTS]
    for slot_size, backwards in ((4, False), (4, True), (1, True), (32, False)):
        for prompt, text in zip(PROMPTS, texts, strict=True):
            slots = range(-(-len(text) // slot_size))
            order = list(slots)[::-1] if backwards else list(slots)
            got = log_likelihood(model, [prompt], [text], slot_size=slot_size, order=np.array(order))[0]
            assert abs(got - step_by_step(model, prompt, text, slot_size, order)) < 1e-4


def test_a_dense_model_has_that_of_its_next_tokens_in_reading_order_and_of_its_masks_in_others():
    model, texts = sharp_model(), [[9, 14, 6, 21, 8]] * len(PROMPTS)
    next_tokens = log_likelihood(model, PROMPTS, texts, method="ar")
    for method in ("prompt_lookup", "pard", "dflash", "idlm"):  # which write what the model writes
        assert log_likelihood(model, PROMPTS, texts, method=method) == next_tokens
    assert log_likelihood(model, PROMPTS, texts, slot_size=2, method="dense") == pytest.approx(next_tokens)
    for order in ([0, 1, 2], [2, 0, 1]):
        options = {"slot_size": 2, "order": order}
        by_masks = log_likelihood(model, PROMPTS, texts, **options)
        assert log_likelihood(model, PROMPTS, texts, **options, method="dense") == by_masks
        assert by_masks != pytest.approx(next_tokens)


@pytest.mark.parametrize("form", ["ours", "Hugging Face"])
def test_a_checkpoint_that_names_its_system_is_scored_by_it_and_not_decoded_as_another_unless_asked(form, tmp_path):
    """`refusion` is the default where a model does not say what trained it."""
    model, texts = sharp_model(), [[9, 14, 6, 21, 8]] * len(PROMPTS)
    for objective in (None, "ar", "dream"):
        place = tmp_path / str(objective)
        if form == "ours":
            save_params(place, nnx.to_pure_dict(nnx.state(model)))
            write_model_config(place, model.config, objective)
        else:
            huggingface.save(model, place, objective)
        loaded, size = load_model(place), {"max_new_tokens": 8, "slot_size": 4}
        if objective == "dream":
            with pytest.raises(UserError, match="the likelihood of dream models is not known"):
                log_likelihood(loaded, PROMPTS, texts)
        else:
            expected = log_likelihood(model, PROMPTS, texts, method=objective or "refusion")
            assert log_likelihood(loaded, PROMPTS, texts) == expected
        assert log_likelihood(loaded, PROMPTS, texts, method="ar") == log_likelihood(model, PROMPTS, texts, method="ar")
        as_refusion = decode(loaded, PROMPTS, DecodeSettings("refusion", **size)).tokens
        if objective:
            with pytest.raises(UserError, match=f"no method .* objective={objective}: give method='{objective}'"):
                decode(loaded, PROMPTS, DecodeSettings(**size))
        else:
            assert decode(loaded, PROMPTS, DecodeSettings(**size)).tokens == as_refusion


def test_packed_is_one_by_one():
    model = sharp_model()
    rng = np.random.default_rng(1)
    prompts = [rng.integers(5, 30, size=rng.integers(0, 40)).tolist() for _ in range(30)]
    texts = [rng.integers(5, 30, size=rng.integers(0, 60)).tolist() for _ in range(30)]
    for options in ({"slot_size": 4}, {"slot_size": 8, "order": "random", "draws": 3}):
        together = likelihoods(model, prompts, texts, **options)
        for number in range(0, 30, 4):
            one = likelihoods(model, prompts[number : number + 1], texts[number : number + 1], **options, keys=[number])
            assert abs(one[0].nats - together[number].nats) < 1e-4
            assert abs(one[0].error - together[number].error) < 1e-4


def test_random_orders_are_a_function_of_seed_and_text():
    model = sharp_model()
    text = list(range(5, 25))
    prompts, texts = [[7]] * 3, [text] * 3
    options = {"slot_size": 2, "order": "random"}
    first, second, third = log_likelihood(model, prompts, texts, **options)
    assert len({first, second, third}) == 3
    assert log_likelihood(model, prompts, texts, **options) == [first, second, third]
    assert log_likelihood(model, [[7]], [text], **options, keys=[2]) == pytest.approx([third])
    assert log_likelihood(model, [[7]], [text], **options, seed=1)[0] != first
    mean = likelihoods(model, [[7]], [text], **options, draws=20)[0]
    assert mean.error > 0
    assert abs(mean.nats - np.mean([first, second, third])) < 20 * mean.error


def test_the_greedy_continuation_is_known_as_such():
    model = sharp_model()
    for method in ("refusion", "ar"):
        best = []
        for _ in range(3):
            options = [likelihoods(model, [[7, 8]], [[*best, t]], 1, method=method)[0] for t in range(30)]
            greedy = [token for token, option in enumerate(options) if option.is_greedy]
            assert greedy == [int(np.argmax([option.nats for option in options]))] or len(greedy) == 1
            best += greedy
    assert likelihoods(model, [[7]], [[]])[0].nats == 0.0


def test_the_feed_of_the_docstring():
    feed = slot_scoring(ScoredText(np.array([9]), np.array([1, 2, 3, 4]), 2, [1, 0], 99, (0,), "text"))
    assert feed.tokens.tolist() == [9, 3, 4, 1, 2, 99, 99]
    assert feed.positions.tolist() == [0, 3, 4, 1, 2, 1, 3]
    assert feed.rank.tolist() == [0, 2, 4, 6, 8, 5, 1]
    assert (feed.labels * (feed.weights > 0)).tolist() == [0, 4, 0, 2, 0, 1, 3]


def test_of_masked_diffusion_it_is_a_bound_with_its_error():
    """The bound of a text of one token is exact: it is always the one that is masked."""
    model = tiny_model(vocab_size=8, num_tokens=5)
    one = likelihoods(model, [[3]] * 5, [[token] for token in range(5)], method="llada", draws=3)
    assert all(scored.is_bound and scored.error < 1e-6 for scored in one)
    assert abs(sum(np.exp(scored.nats) for scored in one) - 1) < 1e-5
    few, many = (likelihoods(model, [[3]], [[1, 4, 0, 2]], method="llada", draws=n)[0] for n in (20, 500))
    assert 0 < many.error < few.error
    assert abs(few.nats - many.nats) < 4 * few.error


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"order": [0, 0]}, r"order=\[0, 0\] must name each of its 2 slots"),
        ({"order": [1]}, "must name each of its 2 slots"),
        ({"order": "backwards"}, "must be left_to_right, random, or a list"),
        ({"order": None}, "order: must be a list of slot indices"),
        ({"seed": -1}, "seed=-1: must be at least 0"),
        ({"slot_size": 0}, "slot_size=0: must be at least 1"),
        ({"slot_size": 2.0}, "slot_size=2.0: must be at least 1, a whole number"),
        ({"prompts": ["text"]}, "text 0: must be a list of token ids"),
        ({"continuations": []}, "continuations: 0 of them, for 1 prompts"),
        ({"continuations": [[5.5]]}, "text 0: must be a list of token ids"),
        ({"continuations": [[5, 30, 5]]}, "text 0: holds an id outside 0 to 29"),
        ({"continuations": [[5] * 300]}, "text 0: has 301 tokens, and the model reads 256"),
        ({"method": "ar", "continuations": [[5] * 257]}, "text 0: has 258 tokens, and the model reads 256"),
        ({"method": "ar", "prompts": [[]]}, "text 0: a left-to-right model needs at least one token"),
    ],
    ids=str,
)
def test_what_cannot_be_scored_is_refused(change, message):
    call = {"model": tiny_model(), "prompts": [[7]], "continuations": [[5, 6, 7]], "slot_size": 2} | change
    with pytest.raises(UserError, match=message):
        log_likelihood(**call)
