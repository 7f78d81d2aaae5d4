import collections
import itertools
import tracemalloc

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from refusion_jax import UserError
from refusion_jax.data.examples import Bad, Example
from refusion_jax.data.packing import Document, pack, rows_of, tokenize, usable
from refusion_jax.data.tokenizer import SentencePieceTokenizer

ROW = 16


def document(tokens, prompt_length):
    return Document(np.array([*tokens], np.int32), prompt_length)


@st.composite
def documents(draw):
    lengths = draw(st.lists(st.integers(1, ROW), min_size=1, max_size=40))
    return [document(range(100 * i, 100 * i + n), draw(st.integers(0, n - 1))) for i, n in enumerate(lengths, 1)]


@hypothesis.given(documents())
def test_every_document_is_in_one_row_once_whole_and_marked(docs):
    rows = pack(docs, ROW)
    found = []
    for tokens, segments, response in zip(rows.tokens, rows.segment_ids, rows.is_response, strict=True):
        used = int(np.sum(segments > 0))
        assert (segments[:used] > 0).all()
        assert (segments[used:] == 0).all()
        assert (np.diff(segments[:used]) >= 0).all()
        assert set(segments[:used].tolist()) == set(range(1, int(segments.max()) + 1))
        assert not tokens[used:].any()
        assert not response[used:].any()
        for segment in range(1, int(segments.max()) + 1):
            inside = segments == segment
            prompt_length = int(np.sum(inside & ~response))
            assert response[inside].tolist() == [i >= prompt_length for i in range(int(inside.sum()))]
            found.append(document(tokens[inside], prompt_length))
    assert collections.Counter(map(repr, found)) == collections.Counter(map(repr, docs))
    assert rows.documents == len(docs)
    assert rows.fill == pytest.approx(sum(len(d.tokens) for d in docs) / (len(rows) * ROW))


@hypothesis.given(documents())
def test_rows_are_packed_as_tightly_as_best_fit_decreasing_promises(docs):
    """No more than one row in all is at most half full, or two of them would have gone into one."""
    fill = np.sum(pack(docs, ROW).segment_ids > 0, axis=1)
    assert np.sum(fill <= ROW // 2) <= 1
    expected = best_fit_decreasing([len(d.tokens) for d in docs])
    assert sorted(fill.tolist()) == sorted(expected)


def best_fit_decreasing(lengths):
    """The textbook's quadratic way: how full each row gets."""
    fill = []
    for length in sorted(lengths, reverse=True):
        fitting = [i for i, used in enumerate(fill) if used + length <= ROW]
        if fitting:
            fill[max(fitting, key=lambda i: fill[i])] += length
        else:
            fill.append(length)
    return fill


def test_the_fingerprint_changes_with_any_token():
    docs = [document([5, 6, 7], 1), document([8, 9], 0)]
    same, other = pack(docs, ROW), pack([docs[0], document([8, 10], 0)], ROW)
    assert pack(docs, ROW).fingerprint() == same.fingerprint() != other.fingerprint()


def test_texts_are_cut_as_the_docstring_draws_it():
    texts = [Document(np.full(n, letter, np.int32), 0, is_text=True) for n, letter in ((3, 1), (6, 2), (2, 3))]

    def drawn(packing):
        return ["".join(".abc"[t] for part in row for t in part.tokens) for row in rows_of(texts, 4, packing)]

    assert drawn("best_fit") == ["bbbb", "aaa", "bbcc"]
    assert drawn("split") == ["aaab", "bbbb", "bcc"]


@pytest.fixture(scope="module")
def tokenizer():
    return SentencePieceTokenizer.train(["one two three four five six seven"] * 20, 300)


def test_a_long_text_is_cut_into_rows_and_loses_nothing(tokenizer):
    text = "one two three four five six seven " * 9
    for size in (None, 50):
        docs = tokenize([Example(None, text, "here")], tokenizer, 10, size)
        rows = rows_of(docs, 10)
        assert len(rows) > 3
        assert [part.prompt_length for row in rows for part in row] == [1] + [0] * (len(rows) - 1)
        tokens = [token for row in rows for part in row for token in part.tokens.tolist()]
        assert (tokens[0], tokens[-1]) == (tokenizer.bos_id, tokenizer.eos_id)
        assert tokenizer.decode(tokens) == text


def test_a_response_longer_than_the_row_is_refused_with_what_would_hold_it_or_left_out(tokenizer, caplog):
    short, long = Example("one", "two", "a.jsonl:1"), Example("one", "two three four five " * 4, "a.jsonl:2")
    (whole,) = tokenize([long], tokenizer, 999)
    with pytest.raises(UserError, match=rf"a.jsonl:2: .* do not fit in row_length=12; {len(whole)} would hold"):
        usable(tokenize([short, long, long], tokenizer, 12), "stop")
    assert len(usable(tokenize([short, long], tokenizer, len(whole)), "stop")) == 2
    assert len(usable(tokenize([short, long, long], tokenizer, 12), "skip")) == 1
    assert "left out 2 examples" in caplog.text
    with pytest.raises(UserError, match="no example that can be used; the first problem: a.jsonl:2: "):
        usable(tokenize([long], tokenizer, 12), "skip")


def test_examples_that_are_left_out_are_counted_and_not_kept(caplog):
    good, bad = Example("one", "two", "a.jsonl:1"), (Bad(f"a.jsonl:{line}", "bad") for line in range(2, 30_002))
    tracemalloc.start()
    try:
        assert usable(itertools.chain([good], bad), "skip") == [good]
        assert tracemalloc.get_traced_memory()[1] < 1 << 19
    finally:
        tracemalloc.stop()
    assert "left out 30000 examples; the first: a.jsonl:2: bad" in caplog.text
