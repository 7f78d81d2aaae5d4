"""Answers as they come, in a file: an evaluation that was killed goes on where it was.

One JSON object a line, under a key that says what was asked of which model. A line that a kill cut off is ignored.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

from refusion_jax.data.json_input import parse_log


def key_of(*parts: object) -> str:
    """The same for the same parts, in any process; parts are made of what JSON knows."""
    return hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=16).hexdigest()


class Journal:
    """What has been answered, by all hosts of all sessions; what is new is written by this one.

    `known` maps keys to records.
    """

    def __init__(self, directory: Path, host: int = 0):
        """Reads what is there, and opens this host's file to append to."""
        directory.mkdir(parents=True, exist_ok=True)
        self.known: dict[str, dict[str, Any]] = {}
        own = directory / f"answers.{host}.jsonl"
        for path in sorted(directory.glob("answers.*.jsonl")):
            content = path.read_bytes()
            whole = content[: content.rfind(b"\n") + 1]
            for record in parse_log(whole):
                self.known[record["key"]] = record
            if path == own and len(whole) < len(content):
                with own.open("r+b") as file:
                    file.truncate(len(whole))
        self._file = own.open("a", encoding="utf-8")

    def add(self, key: str, record: dict[str, Any]) -> None:
        """Writes a record; it outlives this process from now on."""
        self.known[key] = {"key": key, **record}
        print(json.dumps(self.known[key], ensure_ascii=False), file=self._file, flush=True)

    def close(self) -> None:
        """Closes the file."""
        self._file.close()
