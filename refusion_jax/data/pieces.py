"""Reads input files as examples, in pieces of bounded size that can be read independently.

A piece is a range of a file: of bytes (a line belongs to the piece in which it begins; plain text is cut behind a
newline), of row groups of a Parquet file, or of records of an ArrayRecord file. Pieces are a function of the files and
the requested size.
"""

import codecs
import dataclasses
import glob
import os
import re
import sysconfig
import zlib
from collections.abc import Iterator
from pathlib import Path

from array_record.python.array_record_module import ArrayRecordReader
from etils import epath

from refusion_jax.cli.errors import UserError
from refusion_jax.cli.paths import is_remote
from refusion_jax.data.examples import (
    OPENING,
    Bad,
    Example,
    Fields,
    Line,
    checked,
    decode,
    load_json,
    parse,
    to_example,
)
from refusion_jax.distributed.json_input import LONGEST_LINE, kind_of
from refusion_jax.distributed.storage import LARGEST_FILE

_HELD_OUT = 50  # one file of so many of the standard library is held out
_COMPRESSED = {".gz", ".bz2", ".xz", ".zst", ".zip"}
_KINDS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "json", ".parquet": "parquet"}
_KINDS |= {".array_record": "array_record", ".arrayrecord": "array_record"}


@dataclasses.dataclass(frozen=True)
class Piece:
    """A part of an input file."""

    path: str
    kind: str  # text | jsonl | json | parquet | array_record
    start: int  # bytes, row groups or records
    end: int
    size: int  # bytes, about


def find_files(pattern: str) -> list[str]:
    """The sorted files of a path, a glob, or a directory (all files below it except hidden ones).

    `stdlib` means the source code of Python's standard library, and `stdlib:held_out` files that it leaves out.
    """
    if pattern in ("stdlib", "stdlib:held_out"):
        return _standard_library(pattern != "stdlib")
    path = epath.Path(pattern)
    if path.is_dir():
        return sorted(map(str, _walk(path, ())))
    if not is_remote(pattern):
        if Path(pattern).is_file():  # whatever is in its name
            return [pattern]
        return [p for p in sorted(glob.glob(pattern, recursive=True)) if Path(p).is_file()]
    if "**" in pattern:
        raise UserError(f"{pattern}: give the directory instead of **; all files below it are read")
    if found := re.match(r"(.*?)/([^/]*[*?\[].*)", pattern):
        return sorted(str(p) for p in epath.Path(found[1]).glob(found[2]) if p.is_file())
    return [pattern] if path.is_file() else []


def _standard_library(held_out: bool) -> list[str]:
    """The files of the standard library that are held out, by a hash of their path, or all the others."""
    root = Path(sysconfig.get_path("stdlib"))
    skipped = {"site-packages", "test", "tests", "idle_test", "lib2to3", "__pycache__"}
    found = [p for p in sorted(root.rglob("*.py")) if not skipped & set(p.relative_to(root).parts)]
    return [
        str(p)
        for p in found
        if (zlib.crc32(p.relative_to(root).as_posix().encode()) % _HELD_OUT == 0) == held_out
        and p.stat().st_size  # it has empty __init__.py files
    ]


def _walk(directory: epath.Path, above: tuple[str, ...]) -> Iterator[epath.Path]:
    """All files below a directory, except hidden ones; a link to a directory above it is passed by."""
    real = str(directory) if is_remote(directory) else os.path.realpath(directory)
    if real in above:
        return
    for path in directory.iterdir():
        if path.name.startswith("."):
            continue
        if path.is_dir():
            yield from _walk(path, (*above, real))
        elif is_remote(path) or Path(path).is_file():  # to etils a pipe is a file, too
            yield path


def whole(path: str) -> Piece:
    """A file as one piece."""
    size = epath.Path(path).stat().length
    kind = _KINDS.get(Path(path).suffix.lower(), "text")
    return Piece(path, kind, 0, max(len(_units(path, kind, size)), 1) if kind == "parquet" else size, size)


def cut(path: str, size: int) -> list[Piece]:
    """A file in pieces of about `size` bytes; a file that cannot be read as its kind is one piece."""
    piece = whole(path)
    if piece.kind in ("text", "jsonl"):
        starts = range(0, max(piece.size, 1), size)
        return [Piece(path, piece.kind, s, min(s + size, piece.size), min(size, piece.size - s)) for s in starts]
    if piece.kind == "json" or not (units := _units(path, piece.kind, piece.size)):
        return [piece]
    pieces, start, held = [], 0, 0
    for end, unit in enumerate(units, 1):
        held += unit
        if held >= size or end == len(units):
            pieces.append(Piece(path, piece.kind, start, end, held))
            start, held = end, 0
    return pieces


def _units(path: str, kind: str, size: int) -> list[int]:
    """Bytes of each row group or record; empty if the file cannot be read, which is reported when it is read."""
    try:
        if kind == "parquet":
            from refusion_jax.data.tables import row_group_sizes  # pyarrow, 60 MB, only where there is such a file

            return row_group_sizes(path)
        records = _records(path)
        return [size // records] * records
    except Exception:  # noqa: BLE001  these libraries raise anything on a broken file
        return []


def _records(path: str) -> int:
    reader = ArrayRecordReader(path)
    records = reader.num_records()  # 0 of a broken file
    reader.close()
    return records


def read(piece: Piece, fields: Fields) -> Iterator[Example | Bad]:
    """The examples of a piece, in order; what cannot be read becomes Bad instead of raising."""
    path = piece.path
    if piece.size == 0:
        yield Bad(path, "the file is empty", "empty file")
        return
    if Path(path).suffix.lower() in _COMPRESSED:
        yield Bad(path, "is compressed; unpack it first", "compressed file")
        return
    reader = {"text": _text, "jsonl": _json_lines, "json": _json_list, "array_record": _array_records}.get(piece.kind)
    try:
        if reader is None:
            from refusion_jax.data.tables import read_row_groups

            yield from read_row_groups(path, piece.start, piece.end, fields)
        else:
            yield from reader(piece, fields)
    except (OSError, RuntimeError) as error:  # ArrayRecord raises RuntimeError
        yield Bad(path, getattr(error, "strerror", None) or " ".join(str(error).split())[:200], "unreadable file")


def _json_lines(piece: Piece, fields: Fields) -> Iterator[Example | Bad]:
    with epath.Path(piece.path).open("rb") as file:
        start = 0
        if piece.start:
            file.seek(piece.start - 1)
            _skip_line(file)
            start = file.tell()
        offset, number = start, 0
        while offset < piece.end and (line := file.readline(LONGEST_LINE)):
            number += 1
            where = Line(piece.path, start, number)
            if len(line) == LONGEST_LINE and not line.endswith(b"\n"):
                offset += _skip_line(file)
                yield Bad(where, f"longer than {LONGEST_LINE >> 20} MiB", "line too long")
            elif line.removeprefix(codecs.BOM_UTF8).strip():
                yield parse(line, where, fields)
            offset += len(line)


def _skip_line(file) -> int:
    """Skips to behind the next newline, and returns the number of bytes skipped."""
    skipped = 0
    while block := file.readline(1 << 20):
        skipped += len(block)
        if block.endswith(b"\n"):
            break
    return skipped


def _text(piece: Piece, fields: Fields) -> Iterator[Example | Bad]:
    del fields
    size = epath.Path(piece.path).stat().length
    with epath.Path(piece.path).open("rb") as file:
        start, end = _text_cut(file, piece.start, size), _text_cut(file, piece.end, size)
        file.seek(0)
        opening = file.read(len(codecs.BOM_UTF8) + OPENING).removeprefix(codecs.BOM_UTF8)[:OPENING] if start else b""
        file.seek(start)
        raw = file.read(end - start)
    text = decode(raw, piece.path if start == 0 else f"{piece.path}: from byte {start}")
    if isinstance(text, Bad):
        yield text
    elif start == 0 or text:
        yield checked(Example(None, text, piece.path, starts=start == 0, ends=end == size, opening=opening))


def _text_cut(file, offset: int, size: int) -> int:
    """Where to cut a text near an offset: behind the next newline, or if none is near, between characters."""
    if offset in (0, size):
        return offset
    file.seek(offset)
    block = file.read(1 << 16)
    newline = block.find(b"\n")
    inside = next((i for i, byte in enumerate(block[:4]) if byte & 0xC0 != 0x80), 0)  # of a UTF-8 character
    return offset + (newline + 1 if newline >= 0 else inside)


def _json_list(piece: Piece, fields: Fields) -> Iterator[Example | Bad]:
    path = piece.path
    if piece.size > LARGEST_FILE:
        yield Bad(path, f"a .json list of more than {LARGEST_FILE >> 20} MiB; make it .jsonl", "file too large")
        return
    items = load_json(epath.Path(path).read_bytes(), path)
    if isinstance(items, Bad):
        yield items
    elif not isinstance(items, list):
        reason = f"a .json file must hold a list of objects, not {kind_of(items)}; one a line is .jsonl"
        yield Bad(path, reason, "not a list")
    else:
        for number, item in enumerate(items, 1):
            yield to_example(item, f"{path}: item {number}", fields)


def _array_records(piece: Piece, fields: Fields) -> Iterator[Example | Bad]:
    """Each record is a JSON object, or a text."""
    reader = ArrayRecordReader(piece.path)
    if not reader.num_records():  # it does not raise where the file is broken
        yield Bad(piece.path, "not a whole ArrayRecord file, or one without records", "unreadable file")
        return
    for index in range(piece.start, min(piece.end, reader.num_records())):
        where = f"{piece.path}: record {index + 1}"
        try:
            (record,) = reader.read([index])
        except Exception as error:  # noqa: BLE001  raises no exception of its own
            yield Bad(where, f"cannot be read: {' '.join(str(error).split())[:200]}", "unreadable file")
            continue
        if record.lstrip()[:1] == b"{":
            yield parse(record, where, fields)
        else:
            text = decode(record, where)
            yield text if isinstance(text, Bad) else checked(Example(None, text, where))
    reader.close()
