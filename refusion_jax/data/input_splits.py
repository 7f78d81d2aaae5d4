"""Reads input files as examples, in splits of bounded size that can be read independently.

A split is a range of a file: of bytes (a line belongs to the split in which it begins; plain text is cut after a
newline) or of row groups of a Parquet file. Splits are a function of the files and the requested size.
"""

import codecs
import dataclasses
import glob
import io
import os
import re
import sysconfig
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from etils import epath

from refusion_jax.cli.errors import UserError, first_line, needs, refusing
from refusion_jax.cli.paths import is_remote
from refusion_jax.data.examples import OPENING, Bad, Example, Fields, Line, checked, decode, load_json, to_examples

_LINE = 1 << 24  # most bytes of a line: its values may take 37 times as much
_LIST = 24 << 20  # bytes of a JSON list, which is read as a whole: its values may take 50 times as much memory
_HELD_OUT = 50  # one in so many files of the standard library is held out
_STREAMS = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd"}  # that pyarrow decompresses
_KINDS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "json", ".parquet": "parquet"}
_KINDS |= {".warc": "warc", ".wet": "warc"}
_COMPRESSED_KINDS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".warc": "warc", ".wet": "warc"}
_HUB = "hf://datasets/"
_RECORD = 1 << 24  # most bytes of a record of a web archive
_ENDLESS = 1 << 62  # bytes: longer than any file, even decompressed


@dataclasses.dataclass(frozen=True)
class InputSplit:
    """A part of an input file."""

    path: str
    kind: str  # text | jsonl | json | parquet | warc
    start: int  # bytes or row groups
    end: int
    size: int  # approximate bytes
    source: str = ""  # the --input that matches it


def pinned(pattern: str, flag: str = "--input") -> str:
    """A data set of the Hugging Face Hub, given by a flag, pinned to the current commit of its revision.

    It is hf://datasets/ORG/NAME[@REVISION][/FILES], by default of main; any other pattern is returned as it is.
    """
    if not pattern.startswith("hf://"):
        return pattern
    if not pattern.startswith(_HUB):
        raise UserError(f"{flag}={pattern}: is not a data set; those are {_HUB}ORG/NAME")
    with needs("hub"):
        from huggingface_hub import HfApi, HfFileSystem
    with refusing(f"{flag}={pattern}"):  # the Hub, the network or the name may be at fault
        found = HfFileSystem().resolve_path(pattern)
        commit = HfApi().dataset_info(found.repo_id, revision=found.revision).sha
    return "/".join(filter(None, [f"{_HUB}{found.repo_id}@{commit}", found.path_in_repo]))


def find_files(pattern: str) -> list[str]:
    """The sorted files of a path, a glob, or a directory (all files below it except hidden ones).

    `stdlib` means the source code of Python's standard library, and `stdlib:held_out` files that it leaves out.
    """
    if pattern in ("stdlib", "stdlib:held_out"):
        return _standard_library(pattern != "stdlib")
    path = epath.Path(pattern)
    if path.is_dir():
        found = sorted(map(str, _walk(path, ())))
        return [path for path in found if whole(path).kind != "text"] if pattern.startswith(_HUB) else found
    if not is_remote(pattern):
        if Path(pattern).is_file():  # even if its name contains * or ?
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
    """All files below a directory, except hidden ones; links to directories above it are skipped."""
    real = str(directory) if is_remote(directory) else os.path.realpath(directory)
    for path in directory.iterdir() if real not in above else ():
        if path.name.startswith("."):
            continue
        if path.is_dir():
            yield from _walk(path, (*above, real))
        else:
            yield path


def whole(path: str) -> InputSplit:
    """A file as one split. Compressed files are JSON Lines or web archives."""
    size = epath.Path(path).stat().length
    *_, inner, last = ["", "", *map(str.lower, Path(path).suffixes)]
    kind, end = _KINDS.get(last, "text"), size
    if last in _STREAMS and inner in _COMPRESSED_KINDS:
        kind, end = _COMPRESSED_KINDS[inner], _ENDLESS
    return InputSplit(path, kind, 0, max(len(_row_groups(path)), 1) if kind == "parquet" else end, size)


def splits_of(path: str, size: int, of_records: int | None = None) -> list[InputSplit]:
    """A file in splits of about `size` bytes or, if it holds many records, of about `of_records`.

    A file that cannot be read as its kind is one split.
    """
    file = whole(path)
    if file.kind != "text":
        size = max(of_records or size, 1)
    if file.kind in ("text", "jsonl") and file.end < _ENDLESS:
        starts = range(0, max(file.size, 1), size)
        return [InputSplit(path, file.kind, s, min(s + size, file.size), min(size, file.size - s)) for s in starts]
    if file.kind != "parquet" or not (groups := _row_groups(path)):
        return [file]
    splits, start, held = [], 0, 0
    for end, group in enumerate(groups, 1):
        held += group
        if held >= size or end == len(groups):
            splits.append(InputSplit(path, file.kind, start, end, held))
            start, held = end, 0
    return splits


def _row_groups(path: str) -> list[int]:
    from refusion_jax.data.tables import row_group_sizes  # pyarrow, 60 MB, only if there is such a file

    return row_group_sizes(path)


def read(part: InputSplit, fields: Fields) -> Iterator[Example | Bad]:
    """The examples of a split, in order; unreadable ones become Bad instead of raising."""
    try:
        match part.kind:
            case _ if part.size == 0:
                yield Bad(part.path, "the file is empty", "empty file")
            case "text":
                yield from _text(part)
            case "jsonl":
                yield from _json_lines(part, fields)
            case "json":
                yield from _json_list(part, fields)
            case "parquet":
                from refusion_jax.data.tables import read_row_groups

                yield from read_row_groups(part.path, part.start, part.end, fields)
            case "warc":
                yield from _archive(part.path, fields)
    except OSError as error:
        yield Bad(part.path, error.strerror or first_line(error), "unreadable file")


def _json_lines(part: InputSplit, fields: Fields) -> Iterator[Example | Bad]:
    with _opened(part.path) as raw, io.BufferedReader(raw) as file:  # fsspec's readline has no bound
        if part.start:
            file.seek(part.start - 1)
        start = part.start and part.start - 1 + _pass_line(file)
        at, number = start, 0
        while at < part.end and (line := file.readline(_LINE)):
            at, number = at + len(line), number + 1
            where = Line(part.path, start, number)
            if len(line) == _LINE and not line.endswith(b"\n"):
                yield Bad(where, f"a line of more than {_LINE >> 20} MiB", "too long a line")
                at += _pass_line(file)
            elif line.removeprefix(codecs.BOM_UTF8).strip():
                item = load_json(line, where)
                yield from [item] if isinstance(item, Bad) else to_examples(item, where, fields)


def _opened(path: str) -> BinaryIO:
    """A file, decompressed as it is read."""
    raw = epath.Path(path).open("rb")
    if not (codec := _STREAMS.get(Path(path).suffix.lower())):
        return raw
    import pyarrow

    return pyarrow.CompressedInputStream(pyarrow.PythonFile(raw, "r"), codec)


def _pass_line(file: io.BufferedReader) -> int:
    """Skips to the end of the line, and returns the number of skipped bytes."""
    passed = len(block := file.readline(_LINE))
    while len(block) == _LINE and not block.endswith(b"\n"):
        passed += len(block := file.readline(_LINE))
    return passed


def _text(part: InputSplit) -> Iterator[Example | Bad]:
    size = epath.Path(part.path).stat().length
    with epath.Path(part.path).open("rb") as file:
        start, end = _text_cut(file, part.start, size), _text_cut(file, part.end, size)
        file.seek(0)
        opening = file.read(len(codecs.BOM_UTF8) + OPENING).removeprefix(codecs.BOM_UTF8)[:OPENING] if start else b""
        file.seek(start)
        raw = file.read(end - start)
    text = decode(raw, part.path if start == 0 else f"{part.path}: from byte {start}")
    if isinstance(text, Bad):
        yield text
    elif "\0" in text:  # UTF-16 without a byte order mark, or not text
        yield Bad(part.path, "holds a byte of 0, as text in UTF-8 does not", "not UTF-8")
    elif start == 0 or text:
        yield checked(None, text, part.path, starts=start == 0, ends=end == size, opening=opening)


def _text_cut(file, offset: int, size: int) -> int:
    """Where to cut a text near an offset: after the next newline, or if none is near, between characters."""
    if offset in (0, size):
        return offset
    file.seek(offset)
    block = file.read(1 << 16)
    newline = block.find(b"\n")
    inside = next((i for i, byte in enumerate(block[:4]) if byte & 0xC0 != 0x80), 0)  # of a UTF-8 character
    return offset + (newline + 1 if newline >= 0 else inside)


def _json_list(part: InputSplit, fields: Fields) -> Iterator[Example | Bad]:
    path = part.path
    if part.size > _LIST:
        yield Bad(
            path, f"a list of more than {_LIST >> 20} MiB; make it one object per line (.jsonl)", "too long a list"
        )
        return
    items = load_json(epath.Path(path).read_bytes(), path)
    if isinstance(items, Bad):
        yield items
    elif not isinstance(items, list):
        yield Bad(path, "a .json file must hold a list of objects; one per line is .jsonl", "not a list")
    else:
        for number, item in enumerate(items, 1):
            yield from to_examples(item, f"{path}: item {number}", fields)


def _archive(path: str, fields: Fields) -> Iterator[Example | Bad]:
    """Texts of WET records, and of the main part of WARC's HTML pages; OSError if the file is damaged."""
    with needs("archives"):
        from fastwarc.warc import ArchiveIterator, WarcRecordType
        from resiliparse.extract.html2text import extract_plain_text
        from resiliparse.parse.encoding import bytes_to_str, detect_encoding
    with epath.Path(path).open("rb") as file:
        for record in ArchiveIterator(file):
            where = f"{path}: record at byte {record.stream_pos}"
            is_text = record.record_type == WarcRecordType.conversion
            is_page = record.record_type == WarcRecordType.response and "html" in (record.http_content_type or "")
            raw = record.reader.read(_RECORD + 1) if is_text or is_page else b""
            if record.record_type == WarcRecordType.unknown:  # such as records with wrong line endings
                yield Bad(where, "a record of no WARC-Type that is known", "unreadable file")
            elif len(raw) > _RECORD:
                yield Bad(where, f"a record of more than {_RECORD >> 20} MiB", "too long a record")
            elif (is_text or is_page) and len(raw) < record.content_length:
                yield Bad(where, "the file ends in this record", "unreadable file")
            elif is_text or is_page:
                page = bytes_to_str(raw, record.http_charset or detect_encoding(raw)) if is_page else ""
                text = extract_plain_text(page, main_content=True) if is_page else decode(raw, where)
                item = {"text": text, "url": record.headers.get("WARC-Target-URI")}
                yield from [text] if isinstance(text, Bad) else to_examples(item, where, fields)
