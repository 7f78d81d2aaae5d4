"""Documents packed into rows, and what of a conversation is trained: the assistant's answers and their ends."""

import collections
import itertools
import tracemalloc

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
from helpers import write_tokenizer

from refusion_jax import UserError
from refusion_jax.data.examples import Bad, Example, Fields, to_examples
from refusion_jax.data.fast_tokenizer import load_tokenizer_file
from refusion_jax.data.packing import Document, pack, rows_of, tokenize, usable
from refusion_jax.data.rows import decode_row, encode_row
from refusion_jax.data.tokenizer import MASK_PIECE, SentencePieceTokenizer

ROW = 16


def document(tokens, prompt_length):
    return Document(np.array([*tokens], np.int32), prompt_length)


@st.composite
def documents(draw):
    lengths = draw(st.lists(st.integers(1, ROW), min_size=1, max_size=40))
    return [document(range(100 * i, 100 * i + n), draw(st.integers(0, n - 1))) for i, n in enumerate(lengths, 1)]


@hypothesis.given(documents())
def test_every_document_is_in_one_row_once_whole_and_marked_and_rows_are_as_full_as_best_fit_decreasing_has_them(docs):
    rows = pack(docs, ROW)
    found, fill = [], []
    for tokens, segments, response in zip(rows.tokens, rows.segment_ids, rows.is_response, strict=True):
        used = int(np.sum(segments > 0))
        fill.append(used)
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
    assert sorted(fill) == sorted(best_fit_decreasing([len(d.tokens) for d in docs]))
    assert rows.documents == len(docs)
    assert rows.fill == pytest.approx(sum(len(d.tokens) for d in docs) / (len(rows) * ROW))


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
    texts = [document(n * [letter], 0) for n, letter in ((3, 1), (6, 2), (2, 3))]
    rows = ["".join(".abc"[t] for part in row for t in part.tokens) for row in rows_of(texts, 4)]
    assert rows == ["bbbb", "aaa", "bbcc"]


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
    why = rf"a.jsonl:2: .* do not fit in row_length=12; {len(whole)} would hold them .--config.data.on_error=skip"
    with pytest.raises(UserError, match=why):
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


TALK_ROW = 1024
SPELLED = st.sampled_from(["<|im_end|>", "<|im_start|>assistant\n", "What is the number?", " ", "\n\n", "grüße ☃"])
LETTERS = st.text(st.characters(codec="utf-8", exclude_characters="\0\u2581"), min_size=1, max_size=6)
CONTENT = st.lists(SPELLED | LETTERS, min_size=1, max_size=3).map("".join)
TURN = st.tuples(st.sampled_from(["user", "assistant", "tool"]), CONTENT)
OPENING = st.lists(st.tuples(st.just("system"), CONTENT), max_size=1)
TALK = st.tuples(OPENING, CONTENT, st.lists(TURN, max_size=4), CONTENT).map(
    lambda t: [*t[0], ("user", t[1]), *t[2], ("assistant", t[3])]
)


@pytest.fixture(scope="module", params=["template", "plain"])
def chat_tokenizer(request, tmp_path_factory):
    if request.param == "plain":
        return SentencePieceTokenizer.train(["What is the number? It is the number."] * 20, 300)
    return load_tokenizer_file(write_tokenizer(tmp_path_factory.mktemp("tokenizer")), MASK_PIECE)


@hypothesis.settings(max_examples=60)
@hypothesis.given(st.lists(TALK, min_size=1, max_size=4), st.sampled_from(["last", "all"]))
def test_the_assistants_tokens_and_their_ends_are_trained_and_no_others(chat_tokenizer, talks, turns):
    tokenizer = chat_tokenizer
    items = [{"messages": [{"role": role, "content": text} for role, text in talk]} for talk in talks]
    examples = [example for item in items for example in to_examples(item, "here", Fields(turns=turns))]
    documents = list(tokenize(examples, tokenizer, TALK_ROW))
    answers = [(talk, at) for talk in talks for at, (role, _) in enumerate(talk) if role == "assistant"]
    asked = [(talk, at) for talk, at in answers if turns == "all" or at == len(talk) - 1]
    prompts = tokenizer.encode_prompts([tuple(talk[:at]) for talk, at in asked])
    expected = collections.Counter((tuple(ids), talk[at][1]) for ids, (talk, at) in zip(prompts, asked, strict=True))
    packed, written = pack(documents, TALK_ROW), rows_of(documents, TALK_ROW)
    for index, parts in enumerate(written):  # as `prepare` writes the same rows
        dtype = np.dtype(["<u2", "<u4"][len(talks) % 2])
        tokens = np.concatenate([part.tokens for part in parts]).astype(dtype)
        record = encode_row(tokens, [len(part) for part in parts], [part.prompt_length for part in parts])
        for name, values in decode_row(record, TALK_ROW, dtype).items():
            np.testing.assert_array_equal(values, packed[index][name])
    found = collections.Counter()
    for row in map(packed.__getitem__, range(len(packed))):
        assert not row["is_response"][row["segment_ids"] == 0].any()
        for segment in range(1, row["segment_ids"].max() + 1):
            tokens, trained = (row[name][row["segment_ids"] == segment] for name in ("tokens", "is_response"))
            response = tokens[trained].tolist()
            assert response[-1] == tokenizer.eos_id
            assert tokens.tolist() == [*tokens[~trained], *response]
            found[tuple(tokens[~trained].tolist()), tokenizer.decode(response[:-1])] += 1
    assert found == expected
