"""The exceptions for faulty input, whose messages say what would be right."""

import contextlib
from collections.abc import Iterator
from typing import Any


class UserError(ValueError):
    """Bad input. The message is one line that names the flag, file or line at fault; commands exit with code 2.

    Functions raise it whose docstrings say that they "refuse" something.
    """


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


class Failure(RuntimeError):  # noqa: N818  neither our error nor the user's
    """Something went wrong that is not the input's fault (a full disk). One line; commands exit with code 1."""


def first_line(error: BaseException) -> str:
    """The message of an exception in one line, or its type if the message is empty."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__)[:300]


@contextlib.contextmanager
def naming(where: str) -> Iterator[None]:
    """A context whose UserErrors begin with the flag or place that is at fault."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{where}: {error}") from error


@contextlib.contextmanager
def refusing(what: str, kind: type[Exception] = Exception) -> Iterator[None]:
    """A context in which a library's errors of this kind mean bad input: UserError says what, and their first line."""
    try:
        yield
    except (UserError, Failure):
        raise
    except kind as error:
        raise UserError(f"{what}: {first_line(error)}") from error


@contextlib.contextmanager
def needs(extra: str) -> Iterator[None]:
    """A context for imports of modules that need an optional extra; UserError has the command that installs it."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise UserError(f"{error.name} is not installed: pip install -e '.[{extra}]' in the project's root") from error


def check_characters(text: str, where: str) -> None:
    """Raises UserError, which names `where`, for text from a command line that is not valid Unicode."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{where}: not UTF-8 (character {error.start + 1})") from error
