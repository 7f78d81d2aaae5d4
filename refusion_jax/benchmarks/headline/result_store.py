"""Keeps what a comparison has trained and measured on disk, so that an interrupted one resumes.

Each line of DIR/measurements.jsonl holds the key and the record of one training run or measurement. DIR/comparison.json
tells which comparison they belong to.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

from refusion_jax.cli.errors import UserError
from refusion_jax.distributed.append_log import AppendLog
from refusion_jax.distributed.json_files import parse_json, read_json
from refusion_jax.distributed.storage import write_file


@dataclasses.dataclass(frozen=True)
class _Line:
    key: str
    record: dict[str, Any]


class ResultStore:
    """The finished `records` by key. While it is open, no other process can add any."""

    def __init__(self, directory: Path, call: dict[str, Any]):
        """Reads the records of earlier sessions, and makes the directory.

        Args:
          directory: of the comparison.
          call: all that the records depend on.

        Raises:
          UserError: where the directory holds another comparison, or another process is using it.
        """
        about, path = directory / "comparison.json", directory / "measurements.jsonl"
        if about.exists() and (there := read_json(about)) != call:
            other = sorted(name for name in call if there.get(name) != call[name])
            raise UserError(
                f"--output={directory} holds another comparison (differs in {', '.join(other)}): name another directory"
            )
        if not about.exists():
            write_file(about, json.dumps(call, indent=2) + "\n")
        self._log = AppendLog(path)
        lines = [
            parse_json(line, _Line, f"{path}:{number}")
            for number, line in enumerate(self._log.read()[0].splitlines(), 1)
        ]
        self.records = {line.key: line.record for line in lines}

    def add(self, key: str, record: dict[str, Any]) -> None:
        """Writes a record to disk."""
        self._log.append({"key": key, "record": record})
        self._log.sync()
        self.records[key] = record

    def close(self) -> None:
        """Releases the lock."""
        self._log.close()
