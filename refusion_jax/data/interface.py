"""The interfaces of tokenizers and of data sets of rows.

Axis: T row length.
"""

from typing import Protocol

import numpy as np

from refusion_jax.data.examples import Messages


class Tokenizer(Protocol):
    """Converts text to token ids and back. Tokenizers with a chat template are `FastTokenizer`s, which can do more."""

    bos_id: int  # -1 where it has none
    eos_id: int
    pad_id: int  # never EOS; -1 where it has none of its own
    mask_id: int
    thinking: bool | None  # `enable_thinking` of the chat template in training; None: the template did not get it
    adds_mask: bool  # whether its files have no mask token, and one was added to the vocabulary

    @property
    def size(self) -> int:
        """The largest id plus one."""
        ...

    @property
    def has_chat_template(self) -> bool:
        """Whether prompts become turns of a conversation."""
        ...

    @property
    def files(self) -> dict[str, bytes]:
        """The content of the files from which this tokenizer can be loaded, by file name."""
        ...

    def encode(self, texts: list[str]) -> list[list[int]]:
        """Token ids of each text, without special tokens, even where it spells them out."""
        ...

    def encode_prompts(self, texts: list[str | Messages | None]) -> list[list[int]]:
        """Token ids of prompts as the model is trained on them; None means no prompt."""
        ...

    def decode(self, ids: list[int]) -> str:
        """Text of token ids, without special tokens."""
        ...

    def name_of(self, token: int) -> str:
        """How the vocabulary spells a token, also a special one."""
        ...


class RowSource(Protocol):
    """A data set of packed rows, with random access."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        """The arguments of `batch.rows.Rows`, of one row: [T] each."""
        ...

    @property
    def row_length(self) -> int:
        """T."""
        ...

    @property
    def documents(self) -> int:
        """Number of documents; one that was cut counts in every row."""
        ...

    @property
    def fill(self) -> float:
        """Share of positions that hold a real token."""
        ...

    @property
    def shares(self) -> list[tuple[str, int, float]]:
        """(name, rows, weight in training) of each part, in the order of rows; a set without parts has no name."""
        ...

    def fingerprint(self) -> str:
        """Changes whenever a row or weight changes."""
        ...
