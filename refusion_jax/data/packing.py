"""Turns examples into packed rows: tokenizes, cuts or refuses long ones, and fits documents into rows.

Axes: R rows of the data set, T row length.
"""

import bisect
import collections
import dataclasses
import hashlib
from collections.abc import Iterable, Sequence

import numpy as np
from absl import logging

from refusion_jax.cli.errors import UserError
from refusion_jax.data.examples import Bad, Example
from refusion_jax.data.interface import Tokenizer


@dataclasses.dataclass(frozen=True)
class Document:
    """Token ids of one document: a prompt, then a response."""

    tokens: list[int]
    prompt_length: int


@dataclasses.dataclass(frozen=True)
class PackedRows:
    """A data set of packed rows, with random access."""

    tokens: np.ndarray  # [R, T] int32
    segment_ids: np.ndarray  # [R, T] int32: 1, 2, ... by document; 0 is padding, at the end
    is_response: np.ndarray  # [R, T] bool

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        return {f.name: getattr(self, f.name)[index] for f in dataclasses.fields(self)}

    @property
    def row_length(self) -> int:
        """Tokens of a row."""
        return self.tokens.shape[1]

    @property
    def documents(self) -> int:
        """Number of documents."""
        return int(self.segment_ids.max(axis=1).sum())

    @property
    def fill(self) -> float:
        """Share of positions that hold a real token."""
        return float(np.mean(self.segment_ids > 0))

    @property
    def shares(self) -> list[tuple[str, int, float]]:
        """One part, without a name."""
        return [("", len(self), 1.0)]

    def fingerprint(self) -> str:
        """Changes whenever a row changes."""
        digest = hashlib.blake2b(digest_size=16)
        for field in dataclasses.fields(self):
            digest.update(np.ascontiguousarray(getattr(self, field.name)))
        return digest.hexdigest()


def usable(examples: Iterable[Example | Bad], on_error: str) -> list[Example]:
    """The good examples. A bad one raises UserError (on_error="stop"), or all bad ones are counted and left out."""
    good, bad = [], []
    for example in examples:
        (bad if isinstance(example, Bad) else good).append(example)
        if bad and on_error == "stop":
            raise UserError(f"{bad[0].where}: {bad[0].reason}")
    _report(bad)
    if not good:
        raise UserError("the data holds no example that can be used")
    return good


def encode_prompts(examples: Sequence[Example], tokenizer: Tokenizer) -> list[list[int] | Bad]:
    """The prompt of each example as the model is trained on it, or why there is none: a template may refuse it."""
    prompts = [example.prompt for example in examples]
    try:
        return tokenizer.encode_prompts(prompts) if prompts else []
    except UserError as error:
        if len(examples) == 1:
            return [Bad(examples[0].where, str(error), "refused by the tokenizer")]
    half = len(examples) // 2
    return encode_prompts(examples[:half], tokenizer) + encode_prompts(examples[half:], tokenizer)


def tokenize(examples: list[Example], tokenizer: Tokenizer, row_length: int, on_error: str) -> list[Document]:
    """Documents of at most row_length tokens.

    The tokenizer says how a prompt begins (with bos, or a chat template); a response ends with eos. A text without
    prompt is cut into rows where it is longer than one; a prompt with a response is never cut.

    Raises:
      UserError: where a prompt and its response do not fit in a row (on_error="stop"), or where nothing is left.
    """
    prompts = encode_prompts(examples, tokenizer)
    examples = usable((e if isinstance(p, list) else p for e, p in zip(examples, prompts, strict=True)), on_error)
    prompts = [prompt for prompt in prompts if isinstance(prompt, list)]
    responses = tokenizer.encode([example.response for example in examples])
    documents, bad = [], []
    longest = 0
    for example, prompt, response in zip(examples, prompts, responses, strict=True):
        response = [*response, tokenizer.eos_id]
        tokens = prompt + response
        if example.prompt is None:
            for start in range(0, len(tokens), row_length):
                documents.append(Document(tokens[start : start + row_length], len(prompt) if start == 0 else 0))
        elif len(tokens) <= row_length:
            documents.append(Document(tokens, len(prompt)))
        else:
            longest = max(longest, len(tokens))
            bad.append(Bad(example.where, f"{len(prompt)} prompt and {len(response)} response tokens"))
    if bad and on_error == "stop":
        others = f" (nor do {len(bad) - 1} others)" if len(bad) > 1 else ""
        raise UserError(
            f"{bad[0].where}: {bad[0].reason} do not fit in row_length={row_length}{others}; "
            f"--config.row_length={longest} would hold all, --config.data.on_error=skip leaves them out"
        )
    _report(bad)
    if not documents:
        raise UserError(f"no document fits in row_length={row_length}; the shortest needs more")
    return documents


def fit(lengths: Sequence[int], row_length: int) -> list[list[int]]:
    """Fits documents into rows by best-fit decreasing; deterministic.

    Longest first, each document goes to the row it fills best (Johnson 1973: at most 11/9 of the optimum).

    Args:
      lengths: tokens of each document, at most row_length.
      row_length: room in a row.

    Returns:
      The indices of the documents in each row.
    """
    rows: list[list[int]] = []
    free: dict[int, list[int]] = collections.defaultdict(list)  # room left -> rows with that room
    rooms: list[int] = []  # keys of `free`, sorted
    for document in np.argsort(-np.asarray(lengths, np.int64), kind="stable").tolist():
        length = lengths[document]
        at = bisect.bisect_left(rooms, length)
        if at == len(rooms):
            room, row = row_length, len(rows)
            rows.append([])
        else:
            room = rooms[at]
            row = free[room].pop()
            if not free[room]:
                rooms.pop(at)
        rows[row].append(document)
        room -= length
        if not free[room]:
            bisect.insort(rooms, room)
        free[room].append(row)
    return rows


def pack(documents: list[Document], row_length: int) -> PackedRows:
    """Fits whole documents into rows, see `fit`."""
    rows = fit([len(document.tokens) for document in documents], row_length)
    shape = (len(rows), row_length)
    tokens, segment_ids, is_response = np.zeros(shape, np.int32), np.zeros(shape, np.int32), np.zeros(shape, bool)
    for index, row in enumerate(rows):
        start = 0
        for segment, document in enumerate((documents[i] for i in row), 1):
            end = start + len(document.tokens)
            tokens[index, start:end] = document.tokens
            segment_ids[index, start:end] = segment
            is_response[index, start + document.prompt_length : end] = True
            start = end
    return PackedRows(tokens, segment_ids, is_response)


def _report(bad: list[Bad]) -> None:
    if bad:
        logging.warning("left out %d examples; the first: %s: %s", len(bad), bad[0].where, bad[0].reason)
