"""The exceptions that mean: the user's input is at fault, and here is what would be right."""

import contextlib
import os
from collections.abc import Iterator
from typing import Any


class UserError(ValueError):
    """Bad input. The message is one line that names the flag, file or line at fault; commands exit with code 2."""


class SettingError(UserError):
    """A setting with an impossible value. Its message names the setting; a command puts the flag's prefix before it."""

    def __init__(self, group: str, name: str, value: Any, why: str):
        shown = str(value)
        super().__init__(f"{name}={shown if len(shown) <= 80 else shown[:80] + '...'}: {why}")
        self.group = group

    @property
    def as_flag(self) -> str:
        """The message with the setting spelled as a flag."""
        return f"--{self.group}.{self}"


class Failure(RuntimeError):  # noqa: N818  it is no error of ours or the user's
    """What went wrong through nobody's input (a full disk). The message is one line; commands exit with code 1."""


def first_line(error: BaseException, most: int = 300) -> str:
    """What an exception says, in one line; its kind where it says nothing."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__)[:most]


@contextlib.contextmanager
def without_stderr() -> Iterator[None]:
    """Drops what libraries of other languages print on the process's stderr; what they raise says enough.

    For the whole process: not for what several threads do at once.
    """
    try:
        kept = os.dup(2)
    except OSError:  # it is closed
        yield
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def is_unicode(text: str) -> bool:
    """Whether a text can be written: it holds no half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
