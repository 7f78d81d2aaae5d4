"""Sentencepiece tokenizers, in which BOS, EOS, padding and mask tokens always have ids."""

import io
import re
from collections.abc import Iterable

import sentencepiece

from refusion_jax.cli.errors import UserError, refusing
from refusion_jax.data.interface import Tokenizer

MASK_PIECE = "<mask>"
_LONGEST_LINE = 2048  # characters; longer lines of the corpus are cut
_MOST_LINES = 500_000  # enough for any vocabulary of ours; more only takes longer


class SentencePieceTokenizer(Tokenizer):
    """A sentencepiece model with the four special tokens.

    With a model from `train`, encoding is lossless (unknown characters become byte pieces) except for U+2581, which
    sentencepiece itself uses for the space. Special tokens are never produced from text: "<mask>" in a document is six
    ordinary characters.
    """

    def __init__(self, model: bytes, origin: str, mask_piece: str | int = MASK_PIECE):
        """Wraps the content of a model's file, `origin` in messages; `mask_piece` is the mask token's piece or id."""
        self.model, self.left_out = model, {}
        self.threads = -1  # for encoding; -1: one per core
        if not model:  # the library accepts it, and then fails in every call
            raise UserError(f"{origin} is not a sentencepiece model: it is empty")
        with refusing(f"{origin} is not a sentencepiece model"):
            self._pieces = sentencepiece.SentencePieceProcessor(model_proto=model)
            self._pieces.decode(list(range(self.size)))  # each piece is text
        self.bos_id, self.eos_id, self.pad_id = self._pieces.bos_id(), self._pieces.eos_id(), self._pieces.pad_id()
        if isinstance(mask_piece, int):
            self.mask_id = mask_piece if 0 <= mask_piece < self.size else self._pieces.unk_id()
        else:
            self.mask_id = self._pieces.piece_to_id(mask_piece)
        if self.mask_id == self._pieces.unk_id():
            raise UserError(
                f"{origin} has no mask token {mask_piece!r}: name its own with --mask_piece (for `train` "
                f"--config.data.mask_piece), train one that has it, or take a tokenizer.json, to which one is added"
            )
        for name in ("bos", "eos", "pad"):
            if getattr(self, f"{name}_id") < 0:
                raise UserError(f"{origin} has no {name} token; train it with {name}_id set")
        (self._letter,) = self.encode(["a"])

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int, mask_piece: str = MASK_PIECE) -> "SentencePieceTokenizer":
        """Trains byte-pair pieces with byte fallback on texts; same texts, same tokenizer.

        At most `vocab_size` pieces, of which 261 are bytes and special tokens; a small corpus yields fewer. UserError
        if that is too few for the corpus.
        """
        lines = (line for text in texts for line in text.splitlines(keepends=True))
        pieces = [line[i : i + _LONGEST_LINE] for line in lines for i in range(0, len(line), _LONGEST_LINE)]
        stride = -(-len(pieces) // _MOST_LINES)
        model = io.BytesIO()
        try:
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=iter(pieces[::stride]),
                model_writer=model,
                model_type="bpe",
                vocab_size=vocab_size,
                hard_vocab_limit=False,
                max_sentence_length=4 * _LONGEST_LINE,  # bytes; longer ones would be skipped silently
                character_coverage=0.9995,
                byte_fallback=True,
                split_digits=True,  # one token a digit: arithmetic is learnable
                normalization_rule_name="identity",
                add_dummy_prefix=False,
                remove_extra_whitespaces=False,
                allow_whitespace_only_pieces=True,  # indentation
                pad_id=0,
                bos_id=1,
                eos_id=2,
                unk_id=3,
                control_symbols=[mask_piece],
                num_threads=1,
                minloglevel=2,
            )
        except RuntimeError as error:
            reason = str(error).rstrip(". ").rsplit("] ", 1)[-1]
            if least := re.search(r"required_chars\. \d+ vs (\d+)", reason):
                reason = f"it takes a vocab_size of at least {least[1]}"
            raise UserError(f"cannot train a tokenizer of {vocab_size} pieces on this corpus: {reason}") from error
        return cls(model.getvalue(), "the trained tokenizer", mask_piece)

    @property
    def size(self) -> int:
        return self._pieces.vocab_size()

    def encode(self, texts: list[str]) -> list[list[int]]:
        if len(texts) == 1:  # given as a list it would start a thread: 90 us of processor time instead of 9
            return [self._pieces.encode(texts[0])]
        return self._pieces.encode(texts, num_threads=self.threads)

    @property
    def files(self) -> dict[str, bytes]:
        return {"tokenizer.model": self.model}

    def decode(self, ids: list[int]) -> str:
        return self._pieces.decode(ids)

    def name_of(self, token: int) -> str:
        return self._pieces.id_to_piece(token)

    def spelling(self, token: int) -> bytes:
        if self._pieces.is_byte(token):
            return byte_of(self.name_of(token))
        is_special = self._pieces.is_control(token) or self._pieces.is_unknown(token) or self._pieces.is_unused(token)
        return b"" if is_special else self.name_of(token).replace("\u2581", " ").encode()


def byte_of(piece: str) -> bytes:
    """The byte that a piece such as <0x0A> stands for."""
    return bytes([int(piece[1:-1], 16)])
