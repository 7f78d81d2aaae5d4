"""A log of JSON objects, one per line: one process at a time appends to it, and a kill at any byte leaves it usable."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from absl import logging
from etils import epath

from refusion_jax.cli.errors import UserError, first_line
from refusion_jax.distributed.storage import read_file, try_lock


def parse_log(content: bytes) -> Iterator[dict[str, Any]]:
    """The objects in a log; lines that were cut off or are not JSON objects are left out."""
    for line in content.split(b"\n"):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(record, dict):
            yield record


def read_log(path: epath.PathLike) -> Iterator[dict[str, Any]]:
    """The objects in a file; none if it does not exist, UserError if it cannot be read."""
    return parse_log(read_file(path) if epath.Path(path).exists() else b"")


class AppendLog:
    """The file is locked while it is open. A line that a kill has cut off is dropped when the next one is added."""

    def __init__(self, path: Path, keeps_trying: bool = False, create: bool = True):
        """Opens and locks the file; refuses one that cannot be opened, or that another process has open.

        With `keeps_trying`, lines that a full disk refuses are kept, and written with the next.
        """
        self._path, self._keeps_trying = path, keeps_trying
        self._left, self._warned = b"", False
        try:
            self._file = os.open(path, os.O_RDWR | os.O_APPEND | (os.O_CREAT if create else 0), 0o666)
        except OSError as error:
            raise UserError(f"{path} cannot be written: {error.strerror}") from error
        if not try_lock(self._file, path):
            os.close(self._file)
            raise UserError(f"{path} is being written by another process; name another output")

    def read(self) -> tuple[bytes, bytes]:
        """(all whole lines, the rest, which was cut off)."""
        with open(self._file, "rb", closefd=False) as file:
            file.seek(0)
            content = file.read()
        end = content.rfind(b"\n") + 1
        return content[:end], content[end:]

    def append(self, record: dict[str, Any]) -> None:
        """Adds a record as a whole line, which survives a kill of this process.

        OSError if it cannot be written, unless the log keeps trying: then the next call does.
        """
        size = 0 if self._left else os.fstat(self._file).st_size
        if size and os.pread(self._file, 1, size - 1) != b"\n":  # a line that a kill has cut off
            os.ftruncate(self._file, len(self.read()[0]))
        self._left += json.dumps(record, ensure_ascii=False).encode() + b"\n"
        self._write()

    def sync(self) -> None:
        """Waits until the disk has all lines."""
        os.fsync(self._file)

    def close(self) -> None:
        """Writes what is left, if possible, and releases the lock."""
        if self._keeps_trying:
            self._write()
        os.close(self._file)

    def _write(self) -> None:
        try:
            while self._left:
                self._left = self._left[os.write(self._file, self._left) :]
            self._warned = False
        except OSError as error:
            if not self._keeps_trying:
                raise
            if not self._warned:
                logging.warning("%s cannot be written now: %s", self._path, first_line(error))
            self._warned = True
