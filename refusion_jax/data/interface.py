"""What everybody else asks of a tokenizer and of a data set of rows, whichever kind they have.

Axis: T row length.
"""

from typing import Protocol

import numpy as np

from refusion_jax.data.examples import Messages


class Tokenizer(Protocol):
    """Text to token ids and back; one with a chat template is a `FastTokenizer`, which can do more."""

    bos_id: int  # -1 where it has none, as pad_id
    eos_id: int
    pad_id: int
    mask_id: int

    @property
    def size(self) -> int:
        """One more than the largest id."""
        ...

    @property
    def has_chat_template(self) -> bool:
        """Whether prompts become turns of a conversation."""
        ...

    @property
    def files(self) -> dict[str, bytes]:
        """What a run's directory must hold to read this tokenizer again, by file name."""
        ...

    def encode(self, texts: list[str]) -> list[list[int]]:
        """Token ids of each text, without special tokens, even where it spells them out."""
        ...

    def encode_prompts(self, texts: list[str | Messages | None]) -> list[list[int]]:
        """Prompts as the model is trained on them; None is no prompt at all."""
        ...

    def decode(self, ids: list[int]) -> str:
        """Text of token ids; special tokens leave no trace."""
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
        """Number of documents, counting each row's part of one that was cut."""
        ...

    @property
    def fill(self) -> float:
        """Share of positions that hold a real token."""
        ...

    @property
    def shares(self) -> list[tuple[str, int, float]]:
        """(name, rows, weight in training) of each part, in the order of the rows; what has no parts has no name."""
        ...

    def fingerprint(self) -> str:
        """Changes whenever a row, or a weight, does."""
        ...
