"""The work of a `prepare` process: turns one chunk of the input into one shard of rows, in bounded memory.

A shard depends on its chunk and the settings only, so it does not matter which worker makes it, or when.

Axes: D documents.
"""

import collections
import contextlib
import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
from array_record.python.array_record_module import ArrayRecordWriter
from etils import epath

from refusion_jax.data.duplicates import NEAR
from refusion_jax.data.examples import OPENING, Bad, Example, Fields
from refusion_jax.data.filters import Filters, FilterSettings, left_out
from refusion_jax.data.input_splits import InputSplit, read
from refusion_jax.data.interface import Tokenizer
from refusion_jax.data.manifest import Shard, file_checksum
from refusion_jax.data.ngrams import band_digests
from refusion_jax.data.packing import Document, batches, rows_of, tokenize
from refusion_jax.data.rows import encode_row, token_type
from refusion_jax.distributed.storage import replacing

SPLITS = ("train", "held_out")
_SAMPLES = 20  # that are told of what a filter leaves out of a chunk for one reason
_PACKED = 1 << 25  # tokens that are packed at a time: 134 MB
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
    near_dedup: bool = False
    filters: FilterSettings = FilterSettings()


@dataclasses.dataclass
class Report:
    """The outcome of a chunk."""

    examples: int = 0
    dropped: dict[str, int] = dataclasses.field(default_factory=dict)
    shards: dict[str, Shard] = dataclasses.field(default_factory=dict)  # by split; none where it got no row
    left_out: dict[str, int] = dataclasses.field(default_factory=dict)  # turns, see `Tokenizer`
    sources: dict[str, int] = dataclasses.field(default_factory=dict)  # tokens of each --input
    languages: dict[str, int] = dataclasses.field(default_factory=dict)  # documents; "" where it was not looked for
    lengths: dict[int, int] = dataclasses.field(default_factory=dict)  # documents of at most 2^k tokens, by k
    first_bad: str = ""  # where and why, for messages; with on_error="stop" nothing was written then


def digest(example: Example) -> bytes:
    """A 16-byte digest of an example's text."""
    prompt = example.prompt if isinstance(example.prompt, str) else json.dumps(example.prompt)
    content = b"\0".join((type(example.prompt).__name__.encode(), prompt.encode(), example.response.encode()))
    return hashlib.blake2b(content, digest_size=16).digest()


def examples_of(splits: Iterable[InputSplit], fields: Fields, filters: Filters) -> Iterator[tuple[str, Example | Bad]]:
    """(source, example) of a chunk; one of a blocked URL becomes Bad, so that no duplicate of it is lost with it."""
    for part in splits:
        for example in read(part, fields):
            is_blocked = filters.blocked and isinstance(example, Example) and filters.is_blocked(example)
            yield part.source, left_out(example, "blocked_url") if is_blocked else example


def keys(splits: Iterable[InputSplit], settings: Settings, filters: Filters) -> np.ndarray:
    """[K, 3] uint64: digest and number of each complete example of a chunk, for finding duplicates, exact or near."""
    found = bytearray()
    good = (e for _, e in examples_of(splits, settings.fields, filters) if isinstance(e, Example))
    for number, example in enumerate(good):
        if example.starts and example.ends:
            if settings.dedup:
                found += digest(example) + number.to_bytes(8, "little")
            if settings.near_dedup:
                for band in band_digests("\n".join(example.texts)):
                    found += band + (number | NEAR).to_bytes(8, "little")
    return np.frombuffer(found, "<u8").reshape(-1, 3)


class _Stopped(Exception):  # noqa: N818  no error of ours
    """A bad example, with on_error="stop"; nothing is written."""


def make_shard(
    splits: Iterable[InputSplit],
    names: dict[str, epath.Path],
    settings: Settings,
    tokenizer: Tokenizer,
    filters: Filters,
    repeated: set[int],
    drop: Callable[[Bad], object],
) -> Report:
    """Reads, tokenizes, packs and writes a chunk.

    Args:
      splits: of the input.
      names: the file of each split.
      settings: how.
      tokenizer: of the rows.
      filters: of the examples.
      repeated: numbers of the good examples to leave out, with NEAR those that are nearly duplicates.
      drop: hears of each example that is left out; of those that are left out on purpose, of some of each kind.
    """
    report, before = Report(), dict(tokenizer.left_out)
    try:
        with contextlib.ExitStack() as finished:
            shards: dict[str, _ShardWriter] = {}
            for split, document in _documents(splits, settings, tokenizer, filters, repeated, drop, report):
                if split not in shards:
                    temporary = finished.enter_context(replacing(names[split]))
                    shards[split] = _ShardWriter(temporary, settings, token_type(tokenizer.size))
                shards[split].add(document)
            report.shards = {split: shard.close(names[split].name) for split, shard in shards.items()}
    except _Stopped:
        pass
    report.left_out = {role: count - before.get(role, 0) for role, count in tokenizer.left_out.items()}
    return report


def _documents(splits, settings, tokenizer, filters, repeated, drop, report) -> Iterator[tuple[str, Document]]:
    """The documents of a chunk, each with its split in SPLITS; counts in the report what becomes of all examples."""
    drops, sources, languages, lengths = (collections.Counter() for _ in range(4))
    number = 0

    def left(example: Example, number: int) -> Example | Bad:
        if number in repeated:
            return left_out(example, "duplicate")
        if number | NEAR in repeated:
            return left_out(example, "near_duplicate")
        return filters(example) if filters else example

    for batch in batches(examples_of(splits, settings.fields, filters), _characters):
        report.examples += len(batch)
        bad, kept = [], []
        for source, example in batch:
            outcome = example
            if isinstance(example, Example):
                outcome = left(example, number)
                number += 1
            if isinstance(outcome, Bad):
                bad.append(outcome)
            else:
                kept.append((source, _split(example, settings.held_out), outcome))
        made = tokenize([example for *_, example in kept], tokenizer, settings.row_length, _SLICE)
        for (source, split, example), document in zip(kept, made, strict=True):
            if isinstance(document, Bad):
                bad.append(document)
                continue
            sources[source] += len(document)
            lengths[(len(document) - 1).bit_length()] += 1
            languages[example.language] += 1
            yield split, document
        for each in bad:
            drops[each.kind] += 1
            if not each.by_filter:
                report.first_bad = report.first_bad or f"{each.where}: {each.reason}"
            elif drops[each.kind] > _SAMPLES:
                continue
            drop(each)
            if settings.on_error == "stop" and report.first_bad:
                raise _Stopped
    for name, counts in ("dropped", drops), ("sources", sources), ("languages", languages), ("lengths", lengths):
        setattr(report, name, dict(sorted(counts.items())))


def _characters(item: tuple[str, Example | Bad]) -> int:
    example = item[1]
    return len(example.response) if isinstance(example, Example) else 0


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


class _ShardWriter:
    """Packs documents into a shard, some at a time, so that memory does not grow with what a file decompresses to."""

    def __init__(self, path: Path, settings: Settings, dtype: np.dtype):
        """Begins a file."""
        self._path, self._settings, self._dtype = path, settings, dtype
        self._writer = ArrayRecordWriter(str(path), _OPTIONS)
        self._waiting: list[Document] = []
        self._held = self._rows = self._starts = self._segments = self._tokens = 0

    def add(self, document: Document) -> None:
        """Adds a document."""
        self._waiting.append(document)
        self._held += len(document)
        self._starts += document.starts
        if self._held >= _PACKED:
            self._pack()

    def _pack(self) -> None:
        rows = rows_of(self._waiting, self._settings.row_length, self._settings.text_packing)
        for row in rows:
            own = np.concatenate([part.tokens for part in row]).astype(self._dtype)
            self._writer.write(encode_row(own, [len(part) for part in row], [part.prompt_length for part in row]))
        self._rows += len(rows)
        self._segments += sum(map(len, rows))
        self._tokens += self._held
        self._waiting, self._held = [], 0

    def close(self, name: str) -> Shard:
        """Ends the file, which will have this name."""
        self._pack()
        self._writer.close()
        counts = self._rows, self._starts, self._segments, self._tokens
        return Shard(name, *counts, self._path.stat().st_size, file_checksum(self._path))
