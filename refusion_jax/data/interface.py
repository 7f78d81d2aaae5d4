"""The interfaces of tokenizers and of data sets of rows.

Axis: T row length.
"""

import abc
from collections.abc import Callable
from typing import TypeAlias

import numpy as np

from refusion_jax.cli.errors import UserError
from refusion_jax.data.examples import Messages

Encode: TypeAlias = Callable[[list[str]], list[list[int]]]  # token ids of texts


class Tokenizer(abc.ABC):
    """Converts text to token ids and back. Those with a chat template are `FastTokenizer`s, which can do more."""

    bos_id: int  # begins texts; -1: none does
    eos_id: int
    pad_id: int  # never EOS; -1: there is none
    mask_id: int
    thinking: bool | None = None  # `enable_thinking` of the chat template in training; None: it was not defined
    has_chat_template: bool = False  # whether prompts become turns of a conversation
    left_out: dict[str, int]  # turns that the chat template left out so far, wholly or in part, by role
    _letter: list[int]  # ids of "a"
    adds_mask: bool = False  # whether its files have no mask token, and one was added to the vocabulary

    @property
    @abc.abstractmethod
    def size(self) -> int:
        """The largest id plus one."""

    @property
    @abc.abstractmethod
    def files(self) -> dict[str, bytes]:
        """The content of the files from which this tokenizer can be loaded, by file name."""

    @abc.abstractmethod
    def encode(self, texts: list[str]) -> list[list[int]]:
        """Token ids of each text, without special tokens, even where it spells them out."""

    def encode_prompts(self, texts: list[str | Messages | None]) -> list[list[int]]:
        """Token ids of prompts in the form used in training: BOS, if any, then the text; None means no prompt."""
        if isinstance(texts, str):  # its letters would pass for texts
            raise UserError(f"prompts={texts[:40]!r}: must be a list of texts")
        bos = [self.bos_id] if self.bos_id >= 0 else []
        return [bos + ids for ids in self.encode([plain_prompt(text) for text in texts])]

    @abc.abstractmethod
    def decode(self, ids: list[int]) -> str:
        """Text of token ids, without special tokens."""

    def continuation(self, ids: list[int]) -> str:
        """Text of token ids that follow other text: some tokenizers' `decode` strips a leading space."""
        return self.decode([*self._letter, *ids])[len(self.decode(self._letter)) :]

    def encode_inside(self, texts: list[str], encode: Encode | None = None) -> list[list[int]]:
        """Token ids of texts that follow other text: some tokenizers' `encode` adds a leading space.

        `encode` is by default the tokenizer's.
        """
        encode = encode or self.encode
        if self.continuation(self._letter) == "a":
            return encode(texts)
        # No vocabulary merges a private-use character with others, and no normalization removes it.
        before, *whole = encode(["\ue000", *(f"\ue000{text}" for text in texts)])
        return [ids[len(before) :] for ids in whole]

    @abc.abstractmethod
    def spelling(self, token: int) -> bytes:
        """The bytes that a token adds to a text, perhaps only part of a character; empty for special tokens."""

    @abc.abstractmethod
    def name_of(self, token: int) -> str:
        """How the vocabulary spells a token, including special ones."""


def plain_prompt(prompt: str | Messages | None) -> str:
    """The text of a prompt without chat template: the turns of a conversation with a blank line between."""
    return "\n\n".join(content for _, content in prompt) if isinstance(prompt, tuple) else prompt or ""


class RowSource(abc.ABC):
    """A data set of packed rows, with random access."""

    row_length: int  # T
    documents: int  # a document that was cut counts once per row
    fill: float  # share of positions that hold a real token

    @abc.abstractmethod
    def __len__(self) -> int: ...

    @abc.abstractmethod
    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        """The arguments of `batch.rows.Rows`, of one row: [T] each."""

    @property
    def shares(self) -> list[tuple[str, int, float]]:
        """(name, rows, weight in training) of each part, in the order of rows; the name of a single part is empty."""
        return [("", len(self), 1.0)]

    @abc.abstractmethod
    def fingerprint(self) -> str:
        """Changes whenever a row or weight changes."""
