"""Keeps the finished pieces of a comparison on disk, so that an interrupted one resumes.

Each line of DIR/pieces.jsonl holds a piece: its key and its record. DIR/comparison.json tells which comparison they
belong to.
"""

import fcntl
import json
import os
from pathlib import Path
from typing import Any

from refusion_jax.runtime.errors import UserError
from refusion_jax.runtime.json_input import parse_log, read_object
from refusion_jax.runtime.storage import write_all, write_file

_CALL, _FILE = "comparison.json", "pieces.jsonl"


class Pieces:
    """The `records` of all finished pieces by key. While it is open, no other process can add any."""

    def __init__(self, directory: Path, call: dict[str, Any]):
        """Reads the pieces of earlier sessions, and makes the directory.

        Args:
          directory: of the comparison.
          call: all that the pieces depend on.

        Raises:
          UserError: where the directory holds another comparison, or another process is using it.
        """
        about = directory / _CALL
        if about.exists() and (there := read_object(about)) != call:
            other = sorted(name for name in call if there.get(name) != call[name])
            raise UserError(
                f"--output={directory} holds another comparison (differs in {', '.join(other)}): name another directory"
            )
        if not about.exists():
            write_file(about, json.dumps(call, indent=2) + "\n")
        self._file = os.open(directory / _FILE, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(self._file)
            raise UserError(f"--output={directory}: another process is at work there") from error
        with open(self._file, "rb", closefd=False) as file:
            text = file.read()
        if text and not text.endswith(b"\n"):  # the last line was cut off by a kill
            os.write(self._file, b"\n")
        self.records: dict[str, dict[str, Any]] = {}
        for piece in parse_log(text):
            is_piece = isinstance(piece, dict) and isinstance(piece.get("piece"), str)
            if is_piece and isinstance(piece.get("record"), dict):
                self.records[piece["piece"]] = piece["record"]

    def add(self, key: str, record: dict[str, Any]) -> None:
        """Writes a finished piece to disk."""
        write_all(self._file, json.dumps({"piece": key, "record": record}).encode() + b"\n")
        os.fsync(self._file)
        self.records[key] = record

    def close(self) -> None:
        """Releases the lock."""
        os.close(self._file)
