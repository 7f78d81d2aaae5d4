"""Finds documents that repeat an earlier one, exactly or nearly: those of which a key was seen earlier.

A document has a key of its text and, for near-duplicates, one per band of its MinHash: it is left out if it shares one
with any document before it, whether that is kept or not.

Axis: K keys, each [3] uint64: a digest of 128 bits, and the number of its document in the chunk, plus NEAR for a band.
The keys of a chunk are sorted by digest, so that those in a range of digests are a slice, and equal ones by number.
"""

import bisect
import io

import numpy as np
from etils import epath

from refusion_jax.cli.paths import is_remote
from refusion_jax.distributed.storage import write_file

NEAR = 1 << 63
_PARTITION = 1 << 20  # keys compared at a time: 33 MB


def save_keys(progress: epath.Path, index: int, keys: np.ndarray) -> None:
    """Saves the keys, [K, 3] uint64, of a chunk."""
    _save(progress / f"digests-{index:05}.npy", keys[np.lexsort((keys[:, 2], keys[:, 1], keys[:, 0]))])


def load(progress: epath.Path, name: str, index: int) -> np.ndarray:
    """The "digests" (keys) or "duplicates" (numbers) of a chunk; files on a disk are mapped, not read as a whole."""
    path = progress / f"{name}-{index:05}.npy"
    if is_remote(path):
        return np.load(io.BytesIO(path.read_bytes()), allow_pickle=False)
    return np.load(path, mmap_mode="r", allow_pickle=False)


def save_repeated(progress: epath.Path, index: int, numbers: np.ndarray) -> None:
    """Saves the numbers of those documents of a chunk that repeat earlier ones."""
    _save(progress / f"duplicates-{index:05}.npy", np.unique(numbers))


def partitions(progress: epath.Path, chunks: int) -> int:
    """The number of ranges of digests, each of which fits in memory, for the keys of so many chunks."""
    return 1 + sum((progress / f"digests-{i:05}.npy").stat().length for i in range(chunks)) // 24 // _PARTITION


def in_partition(keys: np.ndarray, partition: int, partitions: int) -> np.ndarray:
    """The keys of a chunk whose digests are in range `partition` of `partitions`."""
    edges = (part * 2**64 // partitions for part in (partition, partition + 1))
    start, end = (bisect.bisect_left(keys, edge, key=lambda row: int(row[0])) for edge in edges)
    return keys[start:end]


def repeated(parts: list[np.ndarray]) -> list[np.ndarray]:
    """The numbers of those documents of each chunk that have a key of an earlier one, in it or in a chunk before it."""
    chunk, keys = np.repeat(np.arange(len(parts)), [len(part) for part in parts]), np.concatenate(parts)
    order = np.lexsort((keys[:, 1], keys[:, 0]))  # stable: the first one in the input stays first
    keys, chunk = keys[order], chunk[order]
    again = np.flatnonzero((keys[1:, :2] == keys[:-1, :2]).all(axis=1)) + 1
    again = again[np.argsort(chunk[again], kind="stable")]
    return np.split(keys[again, 2], np.searchsorted(chunk[again], np.arange(1, len(parts))))


def mark_repeated(progress: epath.Path, chunks: int) -> None:
    """Finds and saves the repeated documents of all chunks, one partition at a time."""
    count, found = partitions(progress, chunks), [[] for _ in range(chunks)]
    for partition in range(count):
        parts = [np.array(in_partition(load(progress, "digests", i), partition, count)) for i in range(chunks)]
        for numbers, own in zip(found, repeated(parts), strict=True):
            numbers.append(own)
    for index, numbers in enumerate(found):
        save_repeated(progress, index, np.concatenate(numbers))


def _save(path: epath.Path, array: np.ndarray) -> None:
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=False)
    write_file(path, buffer.getvalue())
