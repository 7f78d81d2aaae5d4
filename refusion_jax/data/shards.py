"""The work of a `prepare` process: turns one chunk of the input into one shard of rows, in bounded memory.

A shard depends on its chunk and the settings only, so it does not matter which worker makes it, or when.

Axes: D documents.
"""

import collections
import dataclasses
import hashlib
import itertools
import json
from collections.abc import Callable, Iterable, Iterator

import numpy as np
from array_record.python.array_record_module import ArrayRecordWriter
from etils import epath

from refusion_jax.data.examples import OPENING, Bad, Example, Fields
from refusion_jax.data.input_splits import InputSplit, read
from refusion_jax.data.interface import Tokenizer
from refusion_jax.data.manifest import Shard, file_checksum
from refusion_jax.data.packing import Document, batches, rows_of, tokenize
from refusion_jax.data.rows import encode_row, token_type
from refusion_jax.distributed.storage import replacing

SPLITS = ("train", "held_out")
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
    left_out: dict[str, int] = dataclasses.field(default_factory=dict)  # turns, see `Tokenizer`
    first_bad: str = ""  # where and why, for messages; with on_error="stop" nothing was written then


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
    drop: Callable[[Bad], object],
) -> Report:
    """Reads, tokenizes, packs and writes a chunk.

    Args:
      splits: of the input.
      names: the file of each split.
      settings: how.
      tokenizer: of the rows.
      duplicates: numbers of the good examples to leave out.
      drop: hears of each example that is left out.
    """
    report, documents = Report(), {split: [] for split in SPLITS}
    drops, number, before = collections.Counter(), 0, dict(tokenizer.left_out)
    for batch in batches(examples_of(splits, settings.fields), _characters):
        report.examples += len(batch)
        bad = [example for example in batch if isinstance(example, Bad)]
        good = [example for example in batch if isinstance(example, Example)]
        unique = [example for at, example in enumerate(good, number) if at not in duplicates]
        number += len(good)
        made = tokenize(unique, tokenizer, settings.row_length, _SLICE)
        for example, document in zip(unique, made, strict=True):
            if isinstance(document, Bad):
                bad.append(document)
            else:
                documents[_split(example, settings.held_out)].append(document)
        drops.update(each.kind for each in bad)
        drops.update({"duplicate": len(good) - len(unique)})
        for each in bad:
            drop(each)
            report.first_bad = report.first_bad or f"{each.where}: {each.reason}"
            if settings.on_error == "stop":
                return report
    for split, own in documents.items():
        if own:
            report.shards[split] = _write(names[split], own, settings, token_type(tokenizer.size))
    report.left_out = {role: count - before.get(role, 0) for role, count in tokenizer.left_out.items()}
    report.dropped = {kind: count for kind, count in sorted(drops.items()) if count}
    return report


def _characters(example: Example | Bad) -> int:
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


def _write(name: epath.Path, documents: list[Document], settings: Settings, dtype: np.dtype) -> Shard:
    """Packs a shard and writes it atomically."""
    rows = rows_of(documents, settings.row_length, settings.text_packing)
    with replacing(name) as temporary:
        writer = ArrayRecordWriter(str(temporary), _OPTIONS)
        for row in rows:
            own = np.concatenate([part.tokens for part in row]).astype(dtype)
            writer.write(encode_row(own, [len(part) for part in row], [part.prompt_length for part in row]))
        writer.close()
        checksum, size = file_checksum(temporary), temporary.stat().st_size
    starts, segments, tokens = sum(d.starts for d in documents), sum(map(len, rows)), sum(map(len, documents))
    return Shard(name.name, len(rows), starts, segments, tokens, size, checksum)
