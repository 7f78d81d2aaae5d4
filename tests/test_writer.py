"""What is certain of a text that is still written, and is told to a client."""

import random

import hypothesis
from helpers import Bytes
from hypothesis import strategies as st

from refusion_jax.decoding.requests import Answer
from refusion_jax.decoding.stops import Stops
from refusion_jax.serving.writer import Writer


@hypothesis.given(
    st.text("ab\u00e9\U0001f600", min_size=1, max_size=12),
    st.lists(st.tuples(st.integers(0, 11), st.integers(1, 4)), max_size=3),
    st.integers(1, 24),
    st.randoms(use_true_random=False),
    st.booleans(),
)
@hypothesis.example("ab\U0001f600c", [(1, 1), (0, 3)], 24, random.Random(0), True)  # the longer stop comes later
def test_pieces_add_up_to_the_answer_and_are_never_taken_back(text, cuts, limit, random, in_order):
    """Tokens are bytes, committed in any order and shown at any time; stop strings are parts of the text."""
    stops = [text[at : at + length] for at, length in cuts if at < len(text)]
    tokens, order = list(text.encode()), list(range(len(text.encode())))
    if not in_order:
        random.shuffle(order)
    writer, said, reason = Writer(Bytes(), Stops(tuple(stops)), limit), "", None
    for done in sorted(random.sample(range(len(order)), random.randint(0, len(order)))) + [len(order)]:
        known = order[:done]
        begun = next((at for at in range(len(tokens)) if at not in known), len(tokens))
        is_finished = done == len(order)
        answer = Answer(tokens[:begun], known, [tokens[at] for at in known], 1, 1, "length" if is_finished else "stop")
        piece = writer.read(answer, is_finished)
        said, reason = said + piece.text, piece.finish_reason
        if reason:
            break
    whole = Bytes().decode(tokens[:limit])
    assert said == Stops(tuple(stops)).cut(whole)[0]
    assert Bytes().decode(piece.tokens).startswith(said)  # also where a character of several tokens is the last
    assert reason == ("stop" if any(stop in whole for stop in stops) else "length")


@hypothesis.given(st.text("ab", max_size=9), st.lists(st.text("ab", min_size=1, max_size=5), max_size=3))
def test_what_may_begin_a_stop_string_is_held_back_and_no_more(text, stops):
    beginnings = {stop[:length] for stop in stops for length in range(1, len(stop))}
    held = max((length for length in range(len(text) + 1) if text[len(text) - length :] in beginnings), default=0)
    assert Stops(tuple(stops)).without_beginning(text) == text[: len(text) - held]
