"""What of a conversation is trained: the tokens of the assistant's answers, each with its end, and no others."""

import collections

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
from helpers import write_tokenizer

from refusion_jax.data.examples import Fields, to_examples
from refusion_jax.data.fast_tokenizer import load_tokenizer_file
from refusion_jax.data.packing import pack, rows_of, tokenize
from refusion_jax.data.rows import decode_row, encode_row
from refusion_jax.data.tokenizer import MASK_PIECE, SentencePieceTokenizer

ROW = 1024
SPELLED = st.sampled_from(["<|im_end|>", "<|im_start|>assistant\n", "What is the number?", " ", "\n\n", "grüße ☃"])
LETTERS = st.text(st.characters(codec="utf-8", exclude_characters="\0\u2581"), min_size=1, max_size=6)
CONTENT = st.lists(SPELLED | LETTERS, min_size=1, max_size=3).map("".join)
TURN = st.tuples(st.sampled_from(["user", "assistant", "tool"]), CONTENT)
OPENING = st.lists(st.tuples(st.just("system"), CONTENT), max_size=1)
TALK = st.tuples(OPENING, CONTENT, st.lists(TURN, max_size=4), CONTENT).map(
    lambda t: [*t[0], ("user", t[1]), *t[2], ("assistant", t[3])]
)


@pytest.fixture(scope="module", params=["template", "plain"])
def tokenizer(request, tmp_path_factory):
    if request.param == "plain":
        return SentencePieceTokenizer.train(["What is the number? It is the number."] * 20, 300)
    return load_tokenizer_file(write_tokenizer(tmp_path_factory.mktemp("tokenizer")), MASK_PIECE)


@hypothesis.settings(max_examples=60)
@hypothesis.given(st.lists(TALK, min_size=1, max_size=4), st.sampled_from(["last", "all"]))
def test_the_assistants_tokens_and_their_ends_are_trained_and_no_others(tokenizer, talks, turns):
    items = [{"messages": [{"role": role, "content": text} for role, text in talk]} for talk in talks]
    examples = [example for item in items for example in to_examples(item, "here", Fields(turns=turns))]
    documents = list(tokenize(examples, tokenizer, ROW))
    answers = [(talk, at) for talk in talks for at, (role, _) in enumerate(talk) if role == "assistant"]
    asked = [(talk, at) for talk, at in answers if turns == "all" or at == len(talk) - 1]
    prompts = tokenizer.encode_prompts([tuple(talk[:at]) for talk, at in asked])
    expected = collections.Counter((tuple(ids), talk[at][1]) for ids, (talk, at) in zip(prompts, asked, strict=True))
    packed, written = pack(documents, ROW), rows_of(documents, ROW)
    for index, parts in enumerate(written):  # as `prepare` writes the same rows
        tokens = np.concatenate([part.tokens for part in parts]).astype("<u2")
        record = encode_row(tokens, [len(part) for part in parts], [part.prompt_length for part in parts])
        for name, values in decode_row(record, ROW, np.dtype("<u2")).items():
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
