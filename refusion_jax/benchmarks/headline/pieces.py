"""Keeps the finished pieces of a comparison on disk, so that an interrupted one resumes.

Each line of DIR/pieces.jsonl holds a piece: its key and its record. DIR/comparison.json tells which comparison they
belong to.
"""

import json
from pathlib import Path
from typing import Any

from refusion_jax.cli.errors import UserError
from refusion_jax.distributed.json_files import read_json
from refusion_jax.distributed.json_input import parse_log
from refusion_jax.distributed.line_log import LineLog
from refusion_jax.distributed.storage import write_file

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
        if about.exists() and (there := read_json(about)) != call:
            other = sorted(name for name in call if there.get(name) != call[name])
            raise UserError(
                f"--output={directory} holds another comparison (differs in {', '.join(other)}): name another directory"
            )
        if not about.exists():
            write_file(about, json.dumps(call, indent=2) + "\n")
        self._log = LineLog(directory / _FILE, create=True)
        self.records: dict[str, dict[str, Any]] = {}
        for piece in parse_log(self._log.read()[0]):
            is_piece = isinstance(piece, dict) and isinstance(piece.get("piece"), str)
            if is_piece and isinstance(piece.get("record"), dict):
                self.records[piece["piece"]] = piece["record"]

    def add(self, key: str, record: dict[str, Any]) -> None:
        """Writes a finished piece to disk."""
        self._log.append(json.dumps({"piece": key, "record": record}).encode())
        self._log.sync()
        self.records[key] = record

    def close(self) -> None:
        """Releases the lock."""
        self._log.close()
