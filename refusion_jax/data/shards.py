"""The work of a `prepare` process: turns one chunk of the input into one shard of rows, in bounded memory.

A shard depends on its chunk and the settings only, so it does not matter which worker makes it, or when.

Axes: D documents.
"""

import collections
import dataclasses
import hashlib
import itertools
import json
from collections.abc import Iterable, Iterator

import numpy as np
from array_record.python.array_record_module import ArrayRecordWriter
from etils import epath

from refusion_jax.data.examples import OPENING, Bad, Example, Fields
from refusion_jax.data.input_splits import InputSplit, read
from refusion_jax.data.interface import Tokenizer
from refusion_jax.data.manifest import Shard, file_checksum
from refusion_jax.data.packing import encode_prompts, fit
from refusion_jax.data.rows import encode_row, token_type
from refusion_jax.distributed.storage import replacing

SPLITS = ("train", "held_out")
_BATCH = 1 << 19  # characters tokenized at a time: their ids are Python numbers for a moment, 40 bytes each
_SLICE = 1 << 16  # characters; a longer text is tokenized in slices
_OPTIONS = "group_size:1,zstd:1"  # every row is compressed alone, so that reading one reads one


@dataclasses.dataclass(frozen=True)
class Settings:
    """All that the rows depend on besides the input."""

    tokenizer: str  # its file
    mask_piece: str
    thinking: str  # unset | true | false, of the chat template
    row_length: int
    text_packing: str  # best_fit | split
    on_error: str  # stop | skip
    dedup: bool
    held_out: float
    fields: Fields


@dataclasses.dataclass
class Report:
    """The outcome of a chunk."""

    examples: int = 0
    dropped: dict[str, int] = dataclasses.field(default_factory=dict)
    shards: dict[str, Shard] = dataclasses.field(default_factory=dict)  # by split; none where it got no row
    first_bad: str = ""  # where and why, for messages; with on_error="stop" nothing was written then


@dataclasses.dataclass
class _Documents:
    """Tokenized documents of one split, concatenated."""

    tokens: list[np.ndarray] = dataclasses.field(default_factory=list)
    lengths: list[int] = dataclasses.field(default_factory=list)
    prompts: list[int] = dataclasses.field(default_factory=list)
    is_text: list[bool] = dataclasses.field(default_factory=list)
    starts: int = 0


def digest(example: Example) -> bytes:
    """A 16-byte digest of an example's text."""
    prompt = example.prompt if isinstance(example.prompt, str) else json.dumps(example.prompt)
    content = b"\0".join((type(example.prompt).__name__.encode(), prompt.encode(), example.response.encode()))
    return hashlib.blake2b(content, digest_size=16).digest()


def examples_of(splits: Iterable[InputSplit], fields: Fields) -> Iterator[Example | Bad]:
    """All examples of a chunk."""
    return itertools.chain.from_iterable(read(part, fields) for part in splits)


def digests(splits: Iterable[InputSplit], fields: Fields) -> np.ndarray:
    """[D, 3] uint64: digest and number of each complete example of a chunk, for finding duplicates."""
    found = bytearray()
    good = (e for e in examples_of(splits, fields) if isinstance(e, Example))
    for number, example in enumerate(good):
        if example.starts and example.ends:
            found += digest(example) + number.to_bytes(8, "little")
    return np.frombuffer(found, "<u8").reshape(-1, 3)


def make_shard(
    splits: Iterable[InputSplit],
    names: dict[str, epath.Path],
    settings: Settings,
    tokenizer: Tokenizer,
    duplicates: set[int],
    dropped: list[Bad],
) -> Report:
    """Reads, tokenizes, packs and writes a chunk.

    Args:
      splits: of the input.
      names: the file of each split.
      settings: how.
      tokenizer: of the rows.
      duplicates: numbers of the good examples to leave out.
      dropped: gets what was left out.
    """
    report, made = Report(), {split: _Documents() for split in SPLITS}
    drops = collections.Counter()

    def drop(bad: Bad) -> bool:
        report.first_bad = report.first_bad or f"{bad.where}: {bad.reason}"
        drops[bad.kind] += 1
        dropped.append(bad)
        return settings.on_error == "stop"

    number = -1
    batches: dict[str, list[Example]] = {split: [] for split in SPLITS}
    held = dict.fromkeys(SPLITS, 0)
    for example in examples_of(splits, settings.fields):
        report.examples += 1
        if isinstance(example, Bad):
            if drop(example):
                return report
            continue
        number += 1
        if number in duplicates:
            drops["duplicate"] += 1
            continue
        split = _split(example, settings.held_out)
        batches[split].append(example)
        held[split] += len(example.response)
        if held[split] >= _BATCH or len(batches[split]) >= 4096:
            if any(drop(bad) for bad in _tokenize(batches[split], made[split], tokenizer, settings)):
                return report
            batches[split], held[split] = [], 0
    for split, batch in batches.items():
        if any(drop(bad) for bad in _tokenize(batch, made[split], tokenizer, settings)):
            return report
    for split, documents in made.items():
        if documents.lengths:
            report.shards[split] = _write(names[split], documents, settings, token_type(tokenizer.size))
    report.dropped = dict(sorted(drops.items()))
    return report


def _split(example: Example, held_out: float) -> str:
    """The split of a document, by a hash of its content; of a text's opening, so that its parts stay together."""
    if not held_out:
        return "train"
    if example.prompt is None:
        opening = example.opening or example.response[:OPENING].encode()[:OPENING]
        key = hashlib.blake2b(opening, digest_size=16).digest()
    else:
        key = digest(example)
    is_held_out = int.from_bytes(key[:7], "little") < held_out * (1 << 56)
    return "held_out" if is_held_out else "train"


def _tokenize(batch, documents: _Documents, tokenizer, settings: Settings) -> Iterator[Bad]:
    """Adds a batch to the documents, and yields examples that the tokenizer refuses or that do not fit into a row."""
    prompts = encode_prompts(batch, tokenizer)
    yield from (prompt for prompt in prompts if isinstance(prompt, Bad))
    batch = [example for example, prompt in zip(batch, prompts, strict=True) if isinstance(prompt, list)]
    prompts = [prompt for prompt in prompts if isinstance(prompt, list)]
    slices = [_slices(example.response) for example in batch]
    encoded = _encode(tokenizer, [text for own in slices for text in own])
    dtype, eos = token_type(tokenizer.size), [tokenizer.eos_id]
    short: list[list[int]] = []  # one array of many small parts is quicker than many arrays

    def flush():
        if short:
            total = sum(map(len, short))
            documents.tokens.append(np.fromiter(itertools.chain.from_iterable(short), dtype, total))
            short.clear()

    for example, prompt, own in zip(batch, prompts, slices, strict=True):
        prompt, end = prompt if example.starts else [], eos if example.ends else []
        if example.prompt is not None:
            response = list(itertools.chain.from_iterable(itertools.islice(encoded, len(own))))
            length = len(prompt) + len(response) + len(end)
            if length > settings.row_length:
                reason = f"{len(prompt)} prompt and {length - len(prompt)} response tokens do not fit in --row_length"
                yield Bad(example.where, f"{reason}={settings.row_length}", "longer than a row")
                continue
            short += prompt, response, end
        else:
            short.append(prompt)
            length = len(prompt) + len(end)
            for ids in itertools.islice(encoded, len(own)):
                short.append(ids)
                length += len(ids)
                if len(own) > 1:
                    flush()  # a long text's ids are not held as Python numbers
            short.append(end)
        documents.lengths.append(length)
        documents.prompts.append(len(prompt))
        documents.is_text.append(example.prompt is None)
        documents.starts += example.starts
    flush()


def _encode(tokenizer, texts: list[str]) -> Iterator[list[int]]:
    """Token ids of each text, encoding a bounded number of characters at a time."""
    group, size = [], 0
    for text in texts:
        group.append(text)
        size += len(text)
        if size >= _BATCH:
            yield from tokenizer.encode(group)
            group, size = [], 0
    if group:
        yield from tokenizer.encode(group)


def _slices(text: str) -> list[str]:
    """Cuts a long text behind a newline, before a space, or anywhere."""
    if len(text) <= _SLICE:
        return [text]
    found, start = [], 0
    while start < len(text):
        end = start + _SLICE
        if end < len(text):
            newline, space = text.rfind("\n", start, end), text.rfind(" ", start + 1, end)
            end = newline + 1 if newline > start else space if space > start else end
        found.append(text[start:end])
        start = end
    return found


def _write(name: epath.Path, documents: _Documents, settings: Settings, dtype: np.dtype) -> Shard:
    """Packs a shard and writes it atomically."""
    tokens = np.concatenate(documents.tokens)
    documents.tokens.clear()
    rows = _pack(documents, settings)
    with replacing(name) as temporary:
        writer = ArrayRecordWriter(str(temporary), _OPTIONS)
        for row in rows:
            starts, lengths, prompts = zip(*row, strict=True)
            own = np.concatenate([tokens[s : s + n] for s, n in zip(starts, lengths, strict=True)])
            writer.write(encode_row(own.astype(dtype, copy=False), lengths, prompts))
        writer.close()
        checksum, size = file_checksum(temporary), temporary.stat().st_size
    segments = sum(map(len, rows))
    return Shard(name.name, len(rows), documents.starts, segments, len(tokens), size, checksum)


def _pack(documents: _Documents, settings: Settings) -> list[list[tuple[int, int, int]]]:
    """Rows of (start in the tokens, length, prompt length)."""
    T = settings.row_length
    starts = np.cumsum([0, *documents.lengths[:-1]]).tolist()
    whole, parts, room = [], [], T
    for start, length, prompt, is_text in zip(
        starts, documents.lengths, documents.prompts, documents.is_text, strict=True
    ):
        end = start + length
        if is_text and settings.text_packing == "split":  # into the room that the text before has left
            while start < end:
                taken = min(room, end - start)
                parts.append((start, taken, min(prompt, taken)))
                start, prompt, room = start + taken, 0, room - taken or T
        else:
            while start < end:  # once, unless it is a text longer than a row
                taken = min(T, end - start)
                whole.append((start, taken, min(prompt, taken)))
                start, prompt = start + taken, 0
    rows, used = [], T
    for part in parts:
        if used == T:
            rows.append([])
            used = 0
        rows[-1].append(part)
        used += part[1]
    return rows + [[whole[i] for i in row] for row in fit([length for _, length, _ in whole], T)]
