"""Paths that may lie in an object store (gs://...), and logs that grow in one.

Object stores know whole objects only: nothing can be appended to, and a write is atomic by itself.
"""

import os
import tempfile
import threading
from pathlib import Path

from absl import logging
from etils import epath

SYNC_SECONDS = 60.0  # at most this much of a log is lost with a machine that vanishes


def is_remote(path: epath.PathLike) -> bool:
    """Whether a path lies in an object store."""
    return "://" in os.fspath(path)


def absolute(path: epath.Path) -> epath.Path:
    """The path from the root; one in an object store is that already, and pathlib would spoil it."""
    return path if is_remote(path) else path.absolute()


class LogDirectory:
    """Where logs of a run are appended to: its directory, or a local one that is copied there again and again.

    `path` is the local directory. Close it to copy what is left.
    """

    def __init__(self, workdir: epath.Path):
        self._workdir = workdir
        self._copied: dict[Path, tuple[int, int]] = {}
        self._wake, self._closing = threading.Event(), False
        if not is_remote(workdir):
            self.path = Path(workdir)
            return
        self._temporary = tempfile.TemporaryDirectory(prefix="refusion-logs-")
        self.path = Path(self._temporary.name)
        self._thread = threading.Thread(target=self._keep_copying, name="logs", daemon=True)
        self._thread.start()

    def fetch(self, name: str) -> Path:
        """A file to append to, with what it holds so far."""
        local, there = self.path / name, self._workdir / name
        if is_remote(self._workdir) and not local.exists() and there.exists():
            local.write_bytes(there.read_bytes())
        return local

    def sync(self) -> None:
        """Has what is new copied soon; does not wait for it."""
        self._wake.set()

    def close(self) -> None:
        """Copies what is new and waits for it."""
        if is_remote(self._workdir):
            self._closing = True
            self._wake.set()
            self._thread.join()
            self._temporary.cleanup()

    def _keep_copying(self) -> None:
        while not self._closing:
            self._wake.wait(SYNC_SECONDS)
            self._wake.clear()
            for file in [path for path in self.path.rglob("*") if path.is_file()]:
                stamp = file.stat().st_size, file.stat().st_mtime_ns
                if self._copied.get(file) != stamp:
                    self._copy(file, stamp)

    def _copy(self, file: Path, stamp: tuple[int, int]) -> None:
        target = self._workdir / str(file.relative_to(self.path))
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(file.read_bytes())
            self._copied[file] = stamp
        except Exception as error:  # noqa: BLE001  each store has errors of its own; the next round tries again
            logging.warning("%s cannot be written now: %s", target, error)
