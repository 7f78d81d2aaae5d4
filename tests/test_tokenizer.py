import random
import re

import hypothesis
import hypothesis.strategies as st
import pytest
import sentencepiece

from refusion_jax import UserError
from refusion_jax.data import tasks
from refusion_jax.data.fast_tokenizer import load_tokenizer_file
from refusion_jax.data.tokenizer import SentencePieceTokenizer


def corpus():
    return [text for p in tasks.problems("train", 500, seed=0) for text in (p.query, p.response)]


@pytest.fixture(scope="module")
def tokenizer():
    return SentencePieceTokenizer.train(corpus(), 400)


def any_text():
    """All of Unicode but surrogates, which are no text, and U+2581, which sentencepiece uses for the space."""
    return st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\u2581\0"))


@hypothesis.given(any_text())
@hypothesis.example("  two  spaces\tand tabs\r\n\n and indentation\n    here ")
@hypothesis.example("<mask></s><s><pad><unk> are plain characters")
@hypothesis.example("Grüße, 東京, 👩‍🚀, é")
def test_encoding_loses_nothing_and_makes_no_special_token(tokenizer, text):
    (ids,) = tokenizer.encode([text])
    assert tokenizer.decode(ids) == b"".join(map(tokenizer.spelling, ids)).decode() == text
    assert not set(ids) & {tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id, tokenizer.mask_id}


def test_special_tokens_have_ids_of_their_own_and_leave_no_text(tokenizer):
    special = [tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id, tokenizer.mask_id]
    assert len(set(special)) == 4
    assert all(0 <= i < tokenizer.size for i in special)
    (ids,) = tokenizer.encode(["plum"])
    assert tokenizer.decode([tokenizer.bos_id, *ids, tokenizer.mask_id, tokenizer.eos_id]) == "plum"
    assert not any(map(tokenizer.spelling, special))
    with pytest.raises(UserError, match="prompts='plum': must be a list of texts"):
        tokenizer.encode_prompts("plum")


def test_digits_are_tokens_of_their_own_however_common_a_number_is():
    tokenizer = SentencePieceTokenizer.train(["room 305 is room 305"] * 50, 300)
    assert [len(ids) for ids in tokenizer.encode(["room", "305"])] == [1, 3]


def test_the_same_corpus_gives_the_same_tokenizer(tokenizer):
    assert SentencePieceTokenizer.train(corpus(), 400).model == tokenizer.model


def test_pieces_are_learnt_from_long_lines_of_any_script():
    rng = random.Random(0)
    words = ["".join(chr(rng.randrange(0x4E00, 0x4F00)) for _ in range(3)) for _ in range(60)]
    lines = ["".join(rng.choices(words, k=700)) for _ in range(20)]  # 2,100 characters, 6,300 bytes
    tokenizer = SentencePieceTokenizer.train(lines, 700)
    assert tokenizer.size == 700
    assert len(tokenizer.encode(lines[:1])[0]) < len(lines[0])


def test_a_vocabulary_too_small_for_the_bytes_is_refused():
    wanted = r"cannot train a tokenizer of 100 pieces on this corpus: it takes a vocab_size of at least (\d+)$"
    with pytest.raises(UserError, match=wanted) as refused:
        SentencePieceTokenizer.train(corpus(), 100)
    least = int(re.search(wanted, str(refused.value))[1])
    assert SentencePieceTokenizer.train(corpus(), least).size == least


def test_files_that_will_not_do_are_named(tmp_path):
    with pytest.raises(UserError, match="none.model cannot be read: No such file"):
        load_tokenizer_file(tmp_path / "none.model", "<mask>")
    (tmp_path / "text.model").write_text("not a model")
    piece = "\u2581number"
    model = SentencePieceTokenizer.train([piece[1:] + piece] * 20, 300).model
    (tmp_path / "torn.model").write_bytes(model.replace(piece.encode(), b"\xff" * len(piece.encode())))
    with pytest.raises(UserError, match="torn.model is not a sentencepiece model"):
        load_tokenizer_file(tmp_path / "torn.model", "<mask>")
    with pytest.raises(UserError, match="text.model is not a sentencepiece model"):
        load_tokenizer_file(tmp_path / "text.model", "<mask>")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"pad_id": 3}, "has no mask token '<mask>': name its own with --mask_piece"),
        ({"control_symbols": ["<mask>"]}, "has no pad token"),
    ],
)
def test_a_tokenizer_without_a_special_token_is_refused(tmp_path, options, said):
    prefix = tmp_path / "other"
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(corpus()), model_prefix=str(prefix), vocab_size=80, minloglevel=2, **options
    )
    with pytest.raises(UserError, match=said):
        load_tokenizer_file(prefix.with_suffix(".model"), "<mask>")


def test_a_mask_piece_of_another_name_is_trained_and_found_again():
    tokenizer = SentencePieceTokenizer.train(corpus(), 400, "[MASK]")
    assert SentencePieceTokenizer(tokenizer.model, "it", "[MASK]").mask_id == tokenizer.mask_id
    with pytest.raises(UserError, match="has no mask token '<mask>'"):
        SentencePieceTokenizer(tokenizer.model, "it")
