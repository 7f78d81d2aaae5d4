"""A file of lines that one process at a time appends to, and that a kill at any byte leaves usable."""

import fcntl
import os
import stat
from pathlib import Path

from refusion_jax.cli.errors import UserError
from refusion_jax.distributed.storage import write_all


class LineLog:
    """A locked file; lines are added as a whole, and one that was cut off is dropped with the next."""

    def __init__(self, path: Path, create: bool):
        """Opens and locks it.

        Raises:
          UserError: where another process has it open, or it cannot be written or is no file of this user.
        """
        self._end: int | None = None  # of the whole lines, where more stands behind them
        flags = os.O_RDWR | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | (os.O_CREAT if create else 0)
        try:
            self._file = os.open(path, flags, 0o666)
        except OSError as error:
            raise UserError(f"{path} cannot be written: {error.strerror}") from error
        try:
            about = os.fstat(self._file)
            if not stat.S_ISREG(about.st_mode) or about.st_uid != os.geteuid():
                raise UserError(f"{path} is no file of this user: move it away")
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self.close()
            raise UserError(f"{path} is being written by another process; name another output") from error
        except (OSError, UserError):
            self.close()
            raise

    def read(self) -> tuple[bytes, bytes]:
        """(all whole lines, what there is of one that was cut off)."""
        with open(self._file, "rb", closefd=False) as file:
            content = file.read()
        self._end = content.rfind(b"\n") + 1
        return content[: self._end], content[self._end :]

    @property
    def size(self) -> int:
        """Bytes of all whole lines."""
        return os.fstat(self._file).st_size if self._end is None else self._end

    def append(self, line: bytes) -> None:
        """Adds a line, which a kill of this process does not take away.

        Raises:
          OSError: where it cannot be written as a whole.
        """
        if self._end is not None:
            os.ftruncate(self._file, self._end)
        self._end = self.size
        write_all(self._file, line + b"\n")
        self._end = None

    def sync(self) -> None:
        """Waits until the disk has all lines."""
        os.fsync(self._file)

    def close(self) -> None:
        """Releases the lock."""
        os.close(self._file)
