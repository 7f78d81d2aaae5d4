"""manifest.json, the description of a prepared directory. It is written last, and so marks finished directories."""

import dataclasses
import hashlib
from typing import Annotated, Literal

from etils import epath
from pydantic import Field

from refusion_jax.cli.errors import UserError
from refusion_jax.distributed.json_files import read_json
from refusion_jax.distributed.storage import opened

FILE = "manifest.json"
LONGEST_ROW = 2**24  # tokens
PROGRESS = ".progress"  # directory of an unfinished `prepare`

_Count = Annotated[int, Field(ge=0)]


@dataclasses.dataclass(frozen=True)
class Shard:
    """One ArrayRecord file of rows."""

    file: Annotated[str, Field(pattern=r"^rows-\d+\.array_record$")]  # in the directory of the manifest
    rows: _Count
    documents: _Count  # number that begin here
    segments: _Count  # parts of documents: a text longer than a row has several
    tokens: _Count  # real ones, without padding
    bytes: _Count
    checksum: str  # BLAKE2b-128 of the file


@dataclasses.dataclass(frozen=True)
class Manifest:
    """A prepared data set."""

    row_length: Annotated[int, Field(ge=2, le=LONGEST_ROW)]
    token_bytes: Literal[2, 4]
    vocabulary: Annotated[int, Field(ge=1)]  # ids of the tokenizer
    tokenizer: str  # hash of its files, see tokenizer_hash
    rows: _Count
    documents: _Count
    segments: _Count
    tokens: _Count
    fill: float  # share of positions that hold a real token
    dropped: dict[str, int]  # examples left out, by reason
    held_out: float  # share of documents in DIR/held_out
    input: dict[str, int]  # files, bytes, examples
    command: str  # the command that creates the same files
    plan: str  # hash of the input files (paths, sizes) and all flags that shape the rows
    shards: tuple[Shard, ...]
    left_out: dict[str, int] = dataclasses.field(default_factory=dict)  # turns that the chat template left out, by role
    sources: dict[str, int] = dataclasses.field(default_factory=dict)  # tokens of each --input, held-out ones included
    languages: dict[str, int] = dataclasses.field(default_factory=dict)  # documents; "": not detected
    lengths: dict[int, int] = dataclasses.field(default_factory=dict)  # documents of at most 2^k tokens, by k
    times: str = ""  # hash of the modification times of the input files
    format: Literal["refusion_jax rows 1"] = "refusion_jax rows 1"


def file_checksum(path: epath.PathLike) -> str:
    """The checksum of a file of rows, as in `Shard`; UserError if it cannot be read."""
    with opened(path) as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def is_prepared(path: str) -> bool:
    """Whether this is a directory that `prepare` wrote or began to write."""
    directory = epath.Path(path)
    return (directory / FILE).exists() or (directory / PROGRESS).exists()


def read_manifest(path: str | epath.Path) -> Manifest:
    """The manifest of a finished directory; UserError if `prepare` has not finished, or the file cannot be read."""
    directory = epath.Path(path)
    if not (directory / FILE).exists():
        unfinished = (directory / PROGRESS).exists()
        what = "is not finished: give `prepare` the same flags again to resume" if unfinished else "holds no rows"
        raise UserError(f"{path} {what} (there is no {FILE})")
    return read_json(directory / FILE, Manifest)
