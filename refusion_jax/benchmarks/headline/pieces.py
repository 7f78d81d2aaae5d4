"""The finished pieces of a comparison, kept as they come: one that is killed goes on where it was, and redoes none.

DIR/pieces.jsonl begins with a line that says of which comparison the pieces are; each other line holds one piece, its
key and its record.
"""

import fcntl
import json
import os
from pathlib import Path
from typing import Any

from refusion_jax.runtime.errors import UserError
from refusion_jax.runtime.json_input import parse_log, read_object
from refusion_jax.runtime.storage import write_file

_CALL, _FILE = "comparison.json", "pieces.jsonl"


class Pieces:
    """The records by key, `records`. While it is open no other process can add to them."""

    def __init__(self, directory: Path, call: dict[str, Any]):
        """Reads what a session before has left, and makes the directory.

        Args:
          directory: of the comparison.
          call: what every piece depends on.

        Raises:
          UserError: where the directory holds another comparison, or a process is at work in it.
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
        with open(self._file, encoding="utf-8", closefd=False) as file:
            text = file.read()
        if text and not text.endswith("\n"):  # a kill cut off the last line
            os.write(self._file, b"\n")
        self.records: dict[str, dict[str, Any]] = {}
        for piece in parse_log(text):
            if isinstance(piece, dict) and isinstance(piece.get("piece"), str) and "record" in piece:
                self.records[piece["piece"]] = piece["record"]

    def add(self, key: str, record: dict[str, Any]) -> None:
        """Keeps a finished piece; it is on the disk when this returns."""
        os.write(self._file, json.dumps({"piece": key, "record": record}).encode() + b"\n")
        os.fsync(self._file)
        self.records[key] = record

    def close(self) -> None:
        """Lets others add to them."""
        os.close(self._file)
