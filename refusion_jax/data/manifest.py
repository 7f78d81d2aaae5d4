"""manifest.json, the description of a prepared directory. It is written last, so that it marks finished ones."""

import dataclasses
import hashlib
import json
from pathlib import PurePosixPath

from etils import epath

from refusion_jax.cli.errors import UserError
from refusion_jax.distributed.json_input import JsonError, build, read_object
from refusion_jax.distributed.storage import write_file

FORMAT = "refusion_jax rows 1"
FILE = "manifest.json"
LONGEST_ROW = 2**24  # tokens
PROGRESS = ".progress"  # directory of an unfinished `prepare`


@dataclasses.dataclass(frozen=True)
class Shard:
    """One ArrayRecord file of rows."""

    file: str  # in the directory of the manifest
    rows: int
    documents: int  # that begin here
    segments: int  # parts of documents: a text longer than a row has several
    tokens: int  # real ones, without padding
    bytes: int
    checksum: str  # BLAKE2b-128 of the file


@dataclasses.dataclass(frozen=True)
class Manifest:
    """A prepared data set."""

    row_length: int
    token_bytes: int  # 2 | 4
    vocabulary: int  # ids of the tokenizer
    tokenizer: str  # hash of its files, see tokenizer_hash
    rows: int
    documents: int
    segments: int
    tokens: int
    fill: float  # share of positions that hold a real token
    dropped: dict[str, int]  # examples left out, by reason
    held_out: float  # share of documents in DIR/held_out
    input: dict[str, int]  # files, bytes, examples
    command: str  # that makes the same files again
    plan: str  # hash of the input files (paths, sizes) and all flags that shape the rows
    shards: tuple[Shard, ...]
    times: str = ""  # hash of the modification times of the input files
    format: str = FORMAT


def file_checksum(path: epath.PathLike) -> str:
    """The checksum of a file of rows, as a `Shard` has it."""
    with epath.Path(path).open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def write_manifest(directory: epath.Path, manifest: Manifest) -> None:
    """Writes the file atomically."""
    text = json.dumps(dataclasses.asdict(manifest), indent=1) + "\n"
    write_file(directory / FILE, text)


def is_prepared(path: str) -> bool:
    """Whether this is a directory that `prepare` wrote or began to write."""
    directory = epath.Path(path)
    return (directory / FILE).exists() or (directory / PROGRESS).exists()


def read_manifest(path: str | epath.Path) -> Manifest:
    """The manifest of a finished directory.

    Raises:
      UserError: where `prepare` has not finished, or the file cannot be read.
    """
    directory = epath.Path(path)
    if not (directory / FILE).exists():
        unfinished = (directory / PROGRESS).exists()
        what = "is not finished: give `prepare` the same flags again, and it goes on" if unfinished else "holds no rows"
        raise UserError(f"{path} {what} (there is no {FILE})")
    content = read_object(directory / FILE)
    if content.get("format") != FORMAT:
        raise UserError(
            f"{directory / FILE} cannot be read: its format is {str(content.get('format'))[:60]!r}, not {FORMAT!r}; "
            f"prepare the data again"
        )
    try:
        manifest = build(Manifest, content)
    except JsonError as error:
        raise UserError(f"{directory / FILE} cannot be read: {error}") from error
    if fault := _fault(manifest):
        raise UserError(f"{directory / FILE} cannot be read: {fault}; prepare the data again")
    return manifest


def _fault(manifest: Manifest) -> str | None:
    """The first implausible value, in words; or None."""
    for name, least in (("row_length", 2), ("vocabulary", 1), ("rows", 0), ("documents", 0), ("segments", 0)):
        if getattr(manifest, name) < least:
            return f"{name} must be at least {least}"
    if manifest.row_length > LONGEST_ROW:
        return f"row_length must be at most {LONGEST_ROW}"
    if manifest.token_bytes not in (2, 4):
        return "token_bytes must be 2 or 4"
    for shard in manifest.shards:
        if shard.file != PurePosixPath(shard.file).name or shard.file in ("", ".", ".."):
            return f"{shard.file[:60]!r} is no file of this directory"
        if min(shard.rows, shard.bytes) < 0:
            return f"rows and bytes of {shard.file} must be at least 0"
    if sum(shard.rows for shard in manifest.shards) != manifest.rows:
        return "its files do not add up to its rows"
    return None
