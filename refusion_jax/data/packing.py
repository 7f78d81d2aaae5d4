"""Turns examples into packed rows: tokenizes them, cuts long texts, and fits documents into rows.

Axes: R rows of the data set, T row length.
"""

import bisect
import collections
import dataclasses
import hashlib
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

import numpy as np
from absl import logging

from refusion_jax.cli.errors import UserError
from refusion_jax.data.examples import Bad, Example
from refusion_jax.data.interface import RowSource, Tokenizer

BATCH = 1 << 19  # characters tokenized at a time: their ids are briefly Python numbers of 40 bytes
TOO_LONG = "longer than a row"  # kind of Bad: a prompt and its answer that fit in no row
_LONGEST_TOKEN = 128  # characters, on average; in any vocabulary few tokens are that long
_OVERLONG = Example(None, "", "")  # replaces an example that fits in no row, and might take gigabytes to tokenize
_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True)
class Document:
    """One document, or the part of one that is in a row: a prompt, then a response."""

    tokens: np.ndarray  # int32
    prompt_length: int
    starts: bool = True  # False for the later parts of a text that is read in several

    def __len__(self) -> int:
        return len(self.tokens)


@dataclasses.dataclass(frozen=True)
class PackedRows(RowSource):
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
        return self.tokens.shape[1]

    @property
    def documents(self) -> int:
        return int(self.segment_ids.max(axis=1).sum())

    @property
    def fill(self) -> float:
        return float(np.mean(self.segment_ids > 0))

    def fingerprint(self) -> str:
        digest = hashlib.blake2b(digest_size=16)
        for field in dataclasses.fields(self):
            digest.update(np.ascontiguousarray(getattr(self, field.name)))
        return digest.hexdigest()


def usable(items: Iterable[_T | Bad], on_error: str, flags: str = "--config.data.") -> list[_T]:
    """The usable items. A bad one raises UserError (on_error="stop"), or bad ones are counted and left out.

    `flags` is the prefix of the flag on_error, for the message.
    """
    good, left_out, first = [], 0, ""
    for item in items:
        if not isinstance(item, Bad):
            good.append(item)
            continue
        left_out += 1
        first = first or f"{item.where}: {item.reason}"
        if on_error == "stop":
            raise UserError(f"{first} ({flags}on_error=skip leaves such examples out)")
    if left_out:
        logging.warning("left out %d examples; the first: %s", left_out, first)
    if not good:
        raise UserError(f"the data holds no example that can be used{first and f'; the first problem: {first}'}")
    return good


def tokenize(
    examples: Sequence[Example], tokenizer: Tokenizer, row_length: int, slice_size: int | None = None
) -> Iterator[Document | Bad]:
    """The document of each example; Bad if the tokenizer refuses it, or a prompt and its answer fit in no row.

    The tokenizer decides how a prompt begins (with bos, or a chat template); a response ends with eos. A text without
    prompt may be longer than a row. If `slice_size` is given, longer texts are tokenized in slices of so many
    characters, in bounded memory.
    """
    most = _LONGEST_TOKEN * row_length
    for group in batches(examples, lambda example: example.characters):
        read = [example if example.prompt is None or example.characters <= most else _OVERLONG for example in group]
        prompts, responses = _encode_prompts(read, tokenizer), _encode_responses(read, tokenizer, slice_size)
        for example, prompt, response in zip(group, prompts, responses, strict=True):
            if isinstance(prompt, Bad):
                yield prompt
                continue
            begin = prompt if example.starts else []
            end = [tokenizer.eos_id] if example.ends else []
            tokens = np.concatenate([np.array(begin, np.int32), response, np.array(end, np.int32)])
            if example.prompt is None or (len(tokens) <= row_length and example.characters <= most):
                yield Document(tokens, len(begin), example.starts)
                continue
            what, fix = f"{example.characters:,} characters", ""
            if example.characters <= most:  # otherwise it was not tokenized
                what = f"{len(begin)} prompt and {len(tokens) - len(begin)} response tokens"
                fix = f"; {len(tokens)} would hold them"
            yield Bad(example.where, f"{what} do not fit in row_length={row_length}{fix}", TOO_LONG)


def _encode_responses(examples: Sequence[Example], tokenizer: Tokenizer, slice_size: int | None) -> list[np.ndarray]:
    """The token ids, int32, of each example's response."""
    slices = [
        (number, text, example.starts and not at)
        for number, example in enumerate(examples)
        for at, text in enumerate(_slices(example.response, slice_size))
    ]
    found: list[list[np.ndarray]] = [[] for _ in examples]
    for group in batches(slices, lambda part: len(part[1])):
        for begins, encode in (True, tokenizer.encode), (False, tokenizer.encode_inside):
            some = [(number, text) for number, text, is_first in group if is_first == begins]
            for (number, _), ids in zip(some, encode([text for _, text in some]), strict=True):
                found[number].append(np.array(ids, np.int32))
    return [np.concatenate(own) for own in found]


def _encode_prompts(examples: Sequence[Example], tokenizer: Tokenizer) -> list[list[int] | Bad]:
    """The token ids of each example's prompt, or Bad if the chat template refuses it."""
    prompts = [example.prompt for example in examples]
    try:
        return tokenizer.encode_prompts(prompts)
    except UserError as error:
        if len(examples) == 1:
            return [Bad(examples[0].where, str(error), "refused by the tokenizer")]
    half = len(examples) // 2
    return _encode_prompts(examples[:half], tokenizer) + _encode_prompts(examples[half:], tokenizer)


def batches(items: Iterable[_T], size_of) -> Iterator[list[_T]]:
    """Groups of at most 4096 items, which are not much larger than BATCH in total."""
    group, size = [], 0
    for item in items:
        group.append(item)
        size += size_of(item)
        if size >= BATCH or len(group) == 4096:
            yield group
            group, size = [], 0
    if group:
        yield group


def _slices(text: str, size: int | None) -> list[str]:
    """Cuts a long text after a newline, before a space, or anywhere."""
    if size is None or len(text) <= size:
        return [text]
    found, start = [], 0
    while start < len(text):
        end = start + size
        if end < len(text):
            newline, space = text.rfind("\n", start, end), text.rfind(" ", start + 1, end)
            end = newline + 1 if newline > start else space if space > start else end
        found.append(text[start:end])
        start = end
    return found


def fit(lengths: Sequence[int], row_length: int) -> list[list[int]]:
    """Fits documents into rows by best-fit decreasing; deterministic.

    Longest first, each document goes to the row it fills best (Johnson 1973: at most 11/9 of the optimum). Returns the
    indices of the documents in each row.
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


def rows_of(documents: Iterable[Document], row_length: int) -> list[list[Document]]:
    """The documents of each row, of which only those longer than a row are cut.

    With T = 4 and texts of 3, 6 and 2 tokens, a b and c, the rows are [b b b b], [a a a], [b b c c].
    """
    parts = [part for document in documents for part in _cut(document, row_length)]
    return [[parts[i] for i in row] for row in fit([len(part) for part in parts], row_length)]


def _cut(document: Document, row_length: int) -> list[Document]:
    """Parts of at most row_length tokens."""
    cuts = [0, *range(row_length, len(document), row_length), len(document)]
    return [
        Document(document.tokens[start:end], min(max(document.prompt_length - start, 0), end - start))
        for start, end in itertools.pairwise(cuts)
    ]


def pack(documents: Iterable[Document], row_length: int) -> PackedRows:
    """Fits documents into rows in memory, see `rows_of`."""
    rows = rows_of(documents, row_length)
    shape = (len(rows), row_length)
    tokens, segment_ids, is_response = np.zeros(shape, np.int32), np.zeros(shape, np.int32), np.zeros(shape, bool)
    for index, row in enumerate(rows):
        start = 0
        for segment, part in enumerate(row, 1):
            end = start + len(part)
            tokens[index, start:end] = part.tokens
            segment_ids[index, start:end] = segment
            is_response[index, start + part.prompt_length : end] = True
            start = end
    return PackedRows(tokens, segment_ids, is_response)
