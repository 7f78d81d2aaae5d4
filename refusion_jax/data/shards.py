"""The work of a `prepare` process: turns one chunk of the input into one shard of rows, in bounded memory.

A worker's output depends only on the chunk and the settings, and is written as a whole or not at all: it does not
matter which worker makes it, where, when, or how often.
"""

import collections
import contextlib
import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from array_record.python.array_record_module import ArrayRecordWriter
from etils import epath

from refusion_jax.data import duplicates
from refusion_jax.data.examples import OPENING, Bad, Example, Fields
from refusion_jax.data.fast_tokenizer import load_tokenizer_file
from refusion_jax.data.filters import Filters, FilterSettings, filtered_out
from refusion_jax.data.input_splits import InputSplit, read
from refusion_jax.data.manifest import PROGRESS, Shard, file_checksum
from refusion_jax.data.ngrams import band_digests
from refusion_jax.data.packing import TOO_LONG, Document, batches, rows_of, tokenize
from refusion_jax.data.rows import encode_row, token_type
from refusion_jax.data.tokenizer import SentencePieceTokenizer
from refusion_jax.distributed.storage import replacing, write_file

_SAMPLES = 20  # reported per chunk and reason of the examples that a filter leaves out
_PACKED = 1 << 25  # tokens that are packed at a time: 134 MB
_SLICE = 1 << 16  # characters; a longer text is tokenized in slices
_OPTIONS = "group_size:1,zstd:1"  # every row is compressed separately, so that reading one row reads only it


@dataclasses.dataclass(frozen=True)
class PrepareSettings:
    """Everything that the rows depend on, except the input."""

    tokenizer: str  # its file
    mask_piece: str
    thinking: str  # unset | true | false, of the chat template
    row_length: int
    on_error: str  # stop | skip
    dedup: bool
    held_out: float
    fields: Fields
    near_dedup: bool = False
    filters: FilterSettings = FilterSettings()
    min_tokens: int = 0
    max_tokens: int = 0  # 0: any number

    def leaves_out(self, document: Document | Bad) -> bool:
        """Whether a document has fewer tokens than `min_tokens` or more than `max_tokens`."""
        if isinstance(document, Bad):
            return document.kind == TOO_LONG and 0 < self.max_tokens <= self.row_length
        return not self.min_tokens <= len(document) <= (self.max_tokens or len(document))


@dataclasses.dataclass
class Report:
    """The outcome of a chunk."""

    examples: int = 0
    dropped: dict[str, int] = dataclasses.field(default_factory=dict)
    shards: dict[str, Shard] = dataclasses.field(default_factory=dict)  # by split; none for a split without rows
    left_out: dict[str, int] = dataclasses.field(default_factory=dict)  # turns, see `Tokenizer`
    sources: dict[str, int] = dataclasses.field(default_factory=dict)  # tokens of each --input
    languages: dict[str, int] = dataclasses.field(default_factory=dict)  # documents; "": not detected
    lengths: dict[int, int] = dataclasses.field(default_factory=dict)  # documents of at most 2^k tokens, by k
    first_bad: str = ""  # where and why, for messages; with on_error="stop" nothing is written


def digest(example: Example) -> bytes:
    """A 16-byte digest of an example's text; equal for a prompt that is a string and for one user turn."""
    prompt = example.prompt
    if isinstance(prompt, tuple) and [role for role, _ in prompt] == ["user"]:
        prompt = prompt[0][1]
    written = prompt if isinstance(prompt, str) else json.dumps(prompt)
    content = b"\0".join((type(prompt).__name__.encode(), written.encode(), example.response.encode()))
    return hashlib.blake2b(content, digest_size=16).digest()


class _Stopped(Exception):  # noqa: N818  not an error
    """A bad example, with on_error="stop"; nothing is written."""


class Worker:
    """Reads, filters, tokenizes and packs one chunk at a time."""

    def __init__(self, settings: PrepareSettings, output: str):
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the workers are the parallelism
        self._settings, self._output = settings, epath.Path(output)
        self._tokenizer = load_tokenizer_file(settings.tokenizer, settings.mask_piece, settings.thinking)
        self._filters = Filters(settings.filters)
        if isinstance(self._tokenizer, SentencePieceTokenizer):
            self._tokenizer.threads = 1

    def write_keys(self, index: int, chunk: list[InputSplit]) -> Report:
        """Saves digests of a chunk's complete examples, by which exact and near-duplicates are found."""
        found, before = bytearray(), None
        good = (example for _, example in self._examples(chunk) if isinstance(example, Example))
        for number, example in enumerate(good):
            if example.starts and example.ends:
                if self._settings.dedup:
                    found += digest(example) + number.to_bytes(8, "little")
                if self._settings.near_dedup and example.where != before:  # a conversation counts by its first answer
                    for band in band_digests(example.opening.decode() or "\n".join(example.texts)):
                        found += band + (number | duplicates.NEAR).to_bytes(8, "little")
                before = example.where
        duplicates.save_keys(self._output / PROGRESS, index, np.frombuffer(found, "<u8").reshape(-1, 3))
        return Report()

    def write_shard(self, index: int, chunk: list[InputSplit]) -> Report:
        """Makes the shards of a chunk, then writes its report."""
        progress, settings = self._output / PROGRESS, self._settings
        name = f"rows-{index:05}.array_record"
        places = {"train": self._output / name, "held_out": self._output / "held_out" / name}
        looked = settings.dedup or settings.near_dedup
        repeated = set(duplicates.load(progress, "duplicates", index).tolist()) if looked else set()
        report = Report()
        self._tokenizer.left_out = report.left_out  # the tokenizer counts there
        with replacing(progress / f"dropped-{index:05}.jsonl") as dropped, open(dropped, "w") as file:

            def drop(bad: Bad) -> None:
                file.write(json.dumps({"where": str(bad.where), "kind": bad.kind, "reason": bad.reason}) + "\n")

            with contextlib.suppress(_Stopped), contextlib.ExitStack() as finished:
                shards: dict[str, _ShardWriter] = {}
                for split, document in self._documents(chunk, repeated, report, drop):
                    if split not in shards:
                        temporary = finished.enter_context(replacing(places[split]))
                        shards[split] = _ShardWriter(temporary, settings, token_type(self._tokenizer.size))
                    shards[split].add(document)
                report.shards = {split: shard.close(name) for split, shard in shards.items()}
        outcome = "stopped" if report.first_bad and settings.on_error == "stop" else "done"
        write_file(progress / f"{outcome}-{index:05}.json", json.dumps(dataclasses.asdict(report)).encode())
        return report

    def _examples(self, chunk: list[InputSplit]) -> Iterator[tuple[str, Example | Bad]]:
        """(source, example); one of a blocked URL becomes Bad first, so that its duplicates elsewhere are kept."""
        for part in chunk:
            for example in read(part, self._settings.fields):
                is_blocked = (
                    self._filters.blocked and isinstance(example, Example) and self._filters.is_blocked(example)
                )
                yield part.source, filtered_out(example, "blocked_url") if is_blocked else example

    def _judged(
        self, chunk: list[InputSplit], repeated: set[int]
    ) -> Iterator[tuple[str, Example | Bad, Example | Bad]]:
        """(source, example, what the filters make of it); Bad if its number, plain or plus NEAR, is in `repeated`."""
        number, near, settings = 0, None, self._settings
        for source, example in self._examples(chunk):
            outcome = example
            if isinstance(example, Example):
                if number | duplicates.NEAR in repeated:
                    near = example.where  # and the answers that follow in this conversation
                if number in repeated:
                    outcome = filtered_out(example, "duplicate")
                elif example.where == near:
                    outcome = filtered_out(example, "near_duplicate")
                elif self._filters or settings.min_tokens or settings.max_tokens:
                    outcome = self._filters(example)
                number += 1
            yield source, example, outcome

    def _documents(
        self, chunk: list[InputSplit], repeated: set[int], report: Report, drop: Callable[[Bad], object]
    ) -> Iterator[tuple[str, Document]]:
        """(split, document) of a chunk, without the examples in `repeated`, see `_judged`.

        `report` counts the outcomes of all examples; `drop` gets some of those left out on purpose, of each kind.
        """
        drops, sources, languages, lengths = (collections.Counter() for _ in range(4))
        settings = self._settings
        for batch in batches(self._judged(chunk, repeated), lambda item: getattr(item[1], "characters", 0)):
            report.examples += len(batch)
            bad = [outcome for *_, outcome in batch if isinstance(outcome, Bad)]
            kept = [item for item in batch if isinstance(item[2], Example)]
            made = tokenize([outcome for *_, outcome in kept], self._tokenizer, settings.row_length, _SLICE)
            for (source, example, outcome), document in zip(kept, made, strict=True):
                if settings.leaves_out(document):
                    document = filtered_out(outcome, "length")
                if isinstance(document, Bad):
                    bad.append(document)
                    continue
                sources[source] += len(document)
                lengths[(len(document) - 1).bit_length()] += 1
                languages[outcome.language] += 1
                yield _split(example, settings.held_out), document
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


def _split(example: Example, held_out: float) -> str:
    """The split of a document, by a hash of its content, or of what the parts of a text or conversation share."""
    if not held_out:
        return "train"
    if example.opening or example.prompt is None:
        opening = example.opening or example.response[:OPENING].encode()[:OPENING]
        key = hashlib.blake2b(opening, digest_size=16).digest()
    else:
        key = digest(example)
    is_held_out = int.from_bytes(key[:7], "little") < held_out * (1 << 56)
    return "held_out" if is_held_out else "train"


class _ShardWriter:
    """Packs documents into a shard in parts, so that memory does not grow with the decompressed size of a file."""

    def __init__(self, path: Path, settings: PrepareSettings, dtype: np.dtype):
        self._path, self._settings, self._dtype = path, settings, dtype
        self._writer = ArrayRecordWriter(str(path), _OPTIONS)
        self._waiting: list[Document] = []
        self._held = self._rows = self._starts = self._segments = self._tokens = 0

    def add(self, document: Document) -> None:
        self._waiting.append(document)
        self._held += len(document)
        self._starts += document.starts
        if self._held >= _PACKED:
            self._pack()

    def _pack(self) -> None:
        rows = rows_of(self._waiting, self._settings.row_length)
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
