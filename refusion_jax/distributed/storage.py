"""Whole files, on a disk or in an object store (gs://...), and the growing logs of a run.

Object stores have only whole objects: nothing can be appended, and every write is atomic.
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

from refusion_jax.cli.errors import Failure, UserError, first_line
from refusion_jax.cli.paths import is_remote

ABSENT = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
SYNC_SECONDS = 60.0  # at most this much of a log is lost if the machine vanishes

for _client in ("gcsfs", "s3fs", "adlfs", "fsspec"):  # they log whole traces of what they then raise
    loggers.getLogger(_client).setLevel(loggers.CRITICAL)


def absolute(path: epath.PathLike) -> epath.Path:
    """The path from the root, without ".."; one in an object store is already absolute, and stays as it is."""
    return epath.Path(path if is_remote(path) else os.path.abspath(path))


@contextlib.contextmanager
def opened(path: epath.PathLike) -> Iterator[Any]:
    """A file to read, in a `with` block; UserError names it if it cannot be read."""
    try:
        with epath.Path(path).open("rb") as file:
            yield file
    except OSError as error:
        why = os.strerror(errno.ENOENT) if isinstance(error, FileNotFoundError) else error.strerror or error
        raise UserError(f"{path} cannot be read: {why}") from error


@contextlib.contextmanager
def reading(path: epath.PathLike) -> Iterator[None]:
    """A context in which a file or directory is read; Failure names it if that is not possible now.

    Other errors than these: that it is absent, or that its content is at fault.
    """
    try:
        yield
    except (*ABSENT, UserError):
        raise
    except Exception as error:  # stores raise errors of many kinds
        raise Failure(f"{path} cannot be read: {getattr(error, 'strerror', '') or first_line(error)}") from error


def read_file(path: epath.PathLike) -> bytes:
    """A whole file, as `opened`."""
    with opened(path) as file:
        return file.read()


def kept_checksum(path: epath.Path) -> tuple[int, str] | None:
    """(bytes, CRC-32C in base64) of an object, as recorded by its store; None if it has none. Nothing is read."""
    if not is_remote(path):
        return None
    import fsspec  # 0.1 s, which most commands do not need

    store, name = fsspec.url_to_fs(str(path), use_listings_cache=False)  # others write to it, too
    about = store.info(name)
    return (about["size"], about["crc32c"]) if "crc32c" in about else None


def write_file(path: epath.PathLike, content: bytes | str) -> None:
    """Writes a whole file or nothing, even if the machine dies meanwhile, and creates the directories above it.

    An existing file keeps its mode; through a link, its target is written; a device or pipe is written to. After an
    OSError everything is as before.
    """
    content = content.encode() if isinstance(content, str) else content
    path = epath.Path(path)
    if is_remote(path):  # every write is atomic
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        return
    path = Path(path)
    mode = path.stat().st_mode if path.exists() else None
    if mode is not None and not stat.S_ISREG(mode):
        with open(path, "wb") as file:
            file.write(content)
        return
    try:
        with replacing(path) as temporary, open(temporary, "xb") as file:
            if mode is not None:
                os.fchmod(file.fileno(), stat.S_IMODE(mode))
            file.write(content)
    except OSError as error:
        error.filename = error.filename or str(path)  # a full disk names none
        raise


@contextlib.contextmanager
def replacing(path: epath.PathLike) -> Iterator[Path]:
    """A new local file to write, which replaces `path` once it is whole and on the disk; after an error it is deleted.

    It is in the directory of `path`, and its name begins with ".tmp-"; for an object store, the whole file is copied.
    """
    if is_remote(path):
        with tempfile.TemporaryDirectory() as directory:
            yield (temporary := Path(directory) / epath.Path(path).name)
            epath.Path(temporary).copy(path)
        return
    target = Path(os.path.realpath(path))
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".tmp-{target.name}.{secrets.token_hex(4)}")
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
    """Takes the operating system's lock on an open file, which ends with the process; False if another one holds it."""
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:  # some network file systems have no locks
        logging.warning("%s cannot be locked (%s): see to it that only one process uses it", path, error.strerror)
    return True


def remove(directory: epath.Path) -> None:
    """Removes a directory until it stays away for a second: pending writes of a failed save may create it again."""
    gone = 0
    for _ in range(100):
        gone = 0 if directory.exists() else gone + 1
        if gone == 10:
            return
        with contextlib.suppress(OSError):
            directory.rmtree()
        time.sleep(0.1)


class LogDirectory:
    """The directory in which logs of a run grow: the run's own, or a local one that is regularly copied there.

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
        """A file to append to, with its content so far."""
        local, there = self.path / name, self._workdir / name
        if is_remote(self._workdir) and not local.exists() and there.exists():
            local.write_bytes(there.read_bytes())
        return local

    def sync(self) -> None:
        """Requests a copy of new content, without waiting for it."""
        self._wake.set()

    def close(self) -> None:
        """Copies new content, and waits for it."""
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
            is_last = self._closing  # before the copies: an earlier pass lacks what was written last
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
        except Exception as error:  # noqa: BLE001  stores raise errors of many kinds; the next round tries again
            logging.warning("%s cannot be written now: %s", target, first_line(error))
