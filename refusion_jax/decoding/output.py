"""Where the answers to a list of prompts go: in order to a reader, or into a file that is either complete or absent."""

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from etils import epath

from refusion_jax.cli.paths import is_remote
from refusion_jax.decoding.journal import Journal, read_records
from refusion_jax.distributed.storage import write_file

_Record = dict[str, Any]


class InTurn:
    """Writes answers to a terminal, a pipe or a device: each one as soon as all earlier ones are written."""

    def __init__(self, write: Callable[[_Record], object], count: int):
        self.left = range(count)
        self._write, self._waiting, self._next = write, {}, 0

    def add(self, index: int, record: _Record) -> None:
        self._waiting[index] = record
        while self._next in self._waiting:
            self._write(self._waiting.pop(self._next))
            self._next += 1


class File:
    """Writes answers to a file once all of them exist; on a disk, a journal next to it keeps them until then.

    If several processes answer a part each, each has its own journal, and the last to finish writes the file.
    """

    def __init__(self, path: epath.Path, count: int, call: dict[str, str], part: tuple[int, int] | None = None):
        """`call`: everything that the answers depend on; `part`: (number from 1, count), or None for all prompts."""
        number, parts = part or (1, 1)
        names = [f".partial-{i + 1}-of-{parts}" for i in range(parts)] if part else [".partial"]
        real = os.path.realpath(path)
        self._path, self._count, self._call = path, count, call
        self._journals = [] if is_remote(path) else [Path(real + name) for name in names]
        for journal in self._journals:  # parts of different calls must not end up in one file
            read_records(journal, call)
        self._journal = Journal(self._journals[number - 1] if self._journals else None, call)
        self.add, self.close = self._journal.add, self._journal.close
        self._own = range(count)[number - 1 :: parts]
        self.left = [i for i in self._own if i not in self._journal.records]
        if done := len(self._own) - len(self.left):
            print(f"{self._journal.path}: {done} of {len(self._own)} answers are there, going on", flush=True)

    def finish(self) -> None:
        """Writes the file, unless other processes still have parts to answer, and then removes the journals."""
        records = dict(self._journal.records)
        for path in self._journals:
            records |= read_records(path, self._call)
        if missing := set(range(self._count)) - set(records):
            print(f"{self._journal.path}: {len(self._own)} answers; {len(missing)} are left to other parts")
            return
        write_file(self._path, "".join(to_line(records[i]) for i in range(self._count)))
        for path in self._journals:
            path.unlink(missing_ok=True)
        print(f"{self._path}: {self._count} answer{'s' * (self._count != 1)}, {len(self.left)} of them decoded now")


def is_on_disk(path: epath.PathLike) -> bool:
    """Whether a path is that of a file on a disk, existing or not, and not of a pipe, device or store."""
    return not is_remote(path) and (Path(path).is_file() or not Path(path).exists())


@contextlib.contextmanager
def open_output(
    path: epath.Path | None,
    show: Callable[[_Record], object],
    count: int,
    call: dict[str, str],
    part: tuple[int, int] | None = None,
) -> Iterator[InTurn | File]:
    """Where `count` answers go: to a path, or by `show`. A file is finished when the block ends without an error."""
    if path is None:
        yield InTurn(show, count)
    elif is_remote(path) or is_on_disk(path):
        with contextlib.closing(File(path, count, call, part)) as file:
            yield file
            file.finish()
    else:
        with open(path, "w", buffering=1, encoding="utf-8") as device:
            yield InTurn(lambda record: device.write(to_line(record)), count)


def to_line(record: _Record) -> str:
    """A record as a line of JSON."""
    return json.dumps(record, ensure_ascii=False) + "\n"
