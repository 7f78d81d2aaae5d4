"""Random access to prepared rows: of one prepared directory, or of several mixed by weight."""

import bisect
import hashlib
import itertools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from array_record.python.array_record_module import ArrayRecordReader
from etils import epath
from grain.sources import ArrayRecordDataSource

from refusion_jax.cli.errors import UserError, refusing
from refusion_jax.data.interface import RowSource
from refusion_jax.data.manifest import Shard, read_manifest
from refusion_jax.data.rows import decode_row
from refusion_jax.distributed.host import allow_open_files


class PreparedRows(RowSource):
    """A prepared directory with random access; each file stays open once it is read."""

    def __init__(self, path: str):
        """Reads the manifest; UserError if it is unfinished, or a file is missing or has other bytes or rows."""
        self.path = path
        self.manifest = m = read_manifest(path)
        self.row_length, self.documents, self.fill = m.row_length, m.segments, m.fill
        self._dtype = np.dtype(f"<u{m.token_bytes}")
        directory = epath.Path(path)
        with ThreadPoolExecutor(16) as threads:  # buckets have latency for each
            list(threads.map(lambda shard: _check_file(directory / shard.file, shard), self.manifest.shards))
        allow_open_files()  # one descriptor per file: the soft limit is often 1024
        # Given its range, a file need not be opened to count its records.
        self._records = ArrayRecordDataSource([f"{directory / s.file}[0:{s.rows}]" for s in self.manifest.shards])

    def __len__(self) -> int:
        return self.manifest.rows

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        return decode_row(self.record(index), self.row_length, self._dtype)

    def record(self, index: int) -> bytes:
        """The stored record of a row; UserError if it is damaged."""
        with refusing(f"{self.path}: row {index} cannot be read"):
            return self._records[index]

    def fingerprint(self) -> str:
        return _digest([shard.checksum for shard in self.manifest.shards])


def _check_file(path: epath.Path, shard: Shard) -> None:
    with refusing(f"{path} is missing or cannot be read"):  # such as zeros, which a machine failure may leave
        if (size := path.stat().length) != shard.bytes:
            raise UserError(f"{path} has {size} bytes instead of {shard.bytes}; prepare the data again")
        reader = ArrayRecordReader(str(path))
        rows = reader.num_records()  # 0 if its end is damaged
        reader.close()
    if rows != shard.rows:
        raise UserError(f"{path} has {rows} rows instead of {shard.rows}; prepare the data again")


class MixedRows(RowSource):
    """The concatenation of several sets of rows."""

    def __init__(self, parts: Sequence[PreparedRows], names: Sequence[str], weights: Sequence[float]):
        """Joins sets, each with a name for the metrics and a share in training relative to the others."""
        self._parts, self._names, self._weights = list(parts), list(names), [float(weight) for weight in weights]
        self._ends = list(itertools.accumulate(map(len, parts)))
        self.row_length, self.documents = parts[0].row_length, sum(part.documents for part in parts)
        self.fill = sum(part.fill * len(part) for part in parts) / len(self)

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        part = bisect.bisect_right(self._ends, index)
        return self._parts[part][index - self._ends[part] + len(self._parts[part])]

    @property
    def shares(self) -> list[tuple[str, int, float]]:
        return list(zip(self._names, map(len, self._parts), self._weights, strict=True))

    def fingerprint(self) -> str:
        return _digest([*(part.fingerprint() for part in self._parts), *map(repr, self._weights)])


def _digest(parts: list[str]) -> str:
    return hashlib.blake2b("\n".join(parts).encode(), digest_size=16).hexdigest()
