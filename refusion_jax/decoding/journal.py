"""A file of finished answers, written as they come, from which a killed call resumes.

The first line describes the call, unless its caller does. Each further line is one answer: {"key": 3, "record":
{...}}. Lines are written to the file at once and synchronized to disk about once a second.
"""

import contextlib
import os
import time
from pathlib import Path
from typing import Any

from refusion_jax.cli.errors import Failure, UserError
from refusion_jax.distributed.append_log import AppendLog, parse_log

_SYNC_SECONDS = 1.0  # answers of this long may be lost if the machine fails; a killed process loses none


class Journal:
    """The finished answers of one call; `records` maps the key of each prompt to its output record.

    No file is created before the first `add`, or without a path. While it is open, other processes cannot write to it.
    """

    def __init__(self, path: Path | None, call: dict[str, str] | None = None):
        """Reads the answers of an interrupted call; refuses a file that another process writes, or that is no journal.

        `call` holds everything that the answers depend on, as short texts by name; another call's journal is refused.
        None: the caller checks that, or the keys say all that an answer depends on.
        """
        self.path, self._call = path, call
        self._log: AppendLog | None = None
        self._synced, self._is_empty = time.monotonic(), True
        self.records: dict[int | str, dict[str, Any]] = {}
        if path and os.path.lexists(path):
            self._log = AppendLog(path, create=False)
            lines, cut_off = self._log.read()
            self._is_empty = not lines
            if call is not None and not (not lines and b'{"call": '.startswith(cut_off[:9])):
                _check_call(path, lines, call)
            self.records = _records(lines)

    def add(self, key: int | str, record: dict[str, Any]) -> None:
        """Writes an answer; Failure if it cannot, and earlier ones stay. Refuses a file that another process writes."""
        if self.path:
            self._write({"key": key, "record": record})
        self.records[key] = record

    def _write(self, entry: dict[str, Any]) -> None:
        try:
            if self._log is None:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self._log = AppendLog(self.path)
            if self._is_empty and self._call is not None:
                self._log.append({"call": self._call})
            self._is_empty = False
            self._log.append(entry)
            if time.monotonic() - self._synced > _SYNC_SECONDS:
                self._log.sync()
                self._synced = time.monotonic()
        except OSError as error:
            raise Failure(
                f"{self.path} cannot be written: {error.strerror}; it keeps {len(self.records)} answers, and the same "
                f"command resumes"
            ) from error

    def close(self) -> None:
        if self._log is not None:
            self._log.close()
            self._log = None


def read_records(path: Path, call: dict[str, str] | None = None) -> dict[int | str, dict[str, Any]]:
    """The answers in a journal that another process may be writing, if it exists; refuses that of another `call`."""
    with contextlib.suppress(FileNotFoundError):
        content = path.read_bytes()
        if call is not None and b"\n" in content:
            _check_call(path, content, call)
        return _records(content)
    return {}


def _check_call(path: Path, content: bytes, wanted: dict[str, str]) -> None:
    call = next(parse_log(content.partition(b"\n")[0]), {}).get("call")
    if not isinstance(call, dict):
        raise UserError(f"{path} is in the way, and is not a journal of answers: move it away")
    if other := [name for name, value in wanted.items() if call.get(name) != value]:
        raise UserError(
            f"{path} holds answers of another call (differs in {', '.join(other)}): repeat that call to finish it, or "
            f"delete the file"
        )


def _records(content: bytes) -> dict[int | str, dict[str, Any]]:
    """The records by key; malformed lines are skipped."""
    return {
        entry["key"]: entry["record"]
        for entry in parse_log(content)
        if type(entry.get("key")) in (int, str) and isinstance(entry.get("record"), dict)
    }
