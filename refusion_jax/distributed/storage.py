"""Whole files, on a disk or in an object store (gs://...), and logs of a run that grow.

Object stores know whole objects only: nothing can be appended to, and a write is atomic by itself.
"""

import contextlib
import errno
import fcntl
import logging as loggers
import os
import secrets
import stat
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from absl import logging
from etils import epath

from refusion_jax.cli.errors import UserError, first_line
from refusion_jax.cli.paths import is_remote

SYNC_SECONDS = 60.0  # at most this much of a log is lost with a machine that vanishes

for _client in ("gcsfs", "s3fs", "adlfs", "fsspec"):  # log whole traces of what they then raise
    loggers.getLogger(_client).setLevel(loggers.CRITICAL)


def absolute(path: epath.Path) -> epath.Path:
    """The path from the root; one in an object store is that already, and pathlib would spoil it."""
    return path if is_remote(path) else path.absolute()


@contextlib.contextmanager
def opened(path: epath.PathLike) -> Iterator[Any]:
    """A file to read, in a `with` block; UserError names it where it cannot be read."""
    try:
        with epath.Path(path).open("rb") as file:
            yield file
    except OSError as error:
        why = os.strerror(errno.ENOENT) if isinstance(error, FileNotFoundError) else error.strerror or error
        raise UserError(f"{path} cannot be read: {why}") from error


def read_file(path: epath.PathLike) -> bytes:
    """A whole file, as `opened`."""
    with opened(path) as file:
        return file.read()


def kept_checksum(path: epath.Path) -> tuple[int, str] | None:
    """(bytes, CRC-32C in base64) of an object as its store keeps them; nothing is read. None where it keeps none."""
    if not is_remote(path):
        return None
    import fsspec  # 0.1 s, which most have no use for

    store, name = fsspec.url_to_fs(str(path), use_listings_cache=False)  # others write there, too
    about = store.info(name)
    return (about["size"], about["crc32c"]) if "crc32c" in about else None


def write_file(path: epath.PathLike, content: bytes | str) -> None:
    """Writes a whole file or nothing, even if the machine dies in between, and makes the directories above it.

    A file that is there keeps its mode, a link its target is written, a device or pipe is written through. After an
    OSError what was there is there still, and nothing else.
    """
    content = content.encode() if isinstance(content, str) else content
    path = epath.Path(path)
    if is_remote(path):  # a write is atomic by itself
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        return
    path = Path(path)
    mode = path.stat().st_mode if path.exists() else None
    if mode is not None and not stat.S_ISREG(mode):
        with open(path, "wb") as file:
            file.write(content)
        return
    with replacing(path) as temporary, open(temporary, "xb") as file:
        if mode is not None:
            os.fchmod(file.fileno(), stat.S_IMODE(mode))
        file.write(content)


@contextlib.contextmanager
def replacing(path: epath.PathLike) -> Iterator[Path]:
    """A new local file to write, which takes the place of `path` when it is whole and on the disk, or is deleted.

    It is in the directory of `path`, and its name begins with ".tmp-"; what is for an object store is copied there.
    """
    if is_remote(path):
        with tempfile.TemporaryDirectory() as directory:
            yield (temporary := Path(directory) / epath.Path(path).name)
            epath.Path(temporary).copy(path)
        return
    target = Path(os.path.realpath(path))
    target.parent.mkdir(parents=True, exist_ok=True)
    name = target.name[:50]  # a name has 255 bytes at most, and a character up to 4
    temporary = target.with_name(f".tmp-{name}.{secrets.token_hex(4)}")
    try:
        yield temporary
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    directory = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(directory)  # the new name, too
    finally:
        os.close(directory)


def try_lock(file: int | IO, path: epath.PathLike, shared: bool = False) -> bool:
    """Takes the operating system's lock on an open file, which ends with the process: whether no other holds it."""
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:  # some network file systems know no locks
        logging.warning("%s cannot be locked (%s): see to it that only one process uses it", path, error.strerror)
    return True


def remove(directory: epath.Path) -> None:
    """Removes it until it stays away for a second: writes that a failed save has not waited for may make it anew."""
    gone = 0
    for _ in range(100):
        gone = 0 if directory.exists() else gone + 1
        if gone == 10:
            return
        with contextlib.suppress(OSError):
            directory.rmtree()
        time.sleep(0.1)


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
        """Asks for a copy of what is new, and does not wait for it."""
        self._wake.set()

    def close(self) -> None:
        """Copies what is new and waits for it."""
        if is_remote(self._workdir):
            self._closing = True
            self._wake.set()
            self._thread.join()
            self._temporary.cleanup()

    def _keep_copying(self) -> None:
        is_last = False
        while not is_last:
            self._wake.wait(SYNC_SECONDS)
            self._wake.clear()
            is_last = self._closing  # before the copies: a pass that began earlier lacks what was written last
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
            logging.warning("%s cannot be written now: %s", target, first_line(error))
