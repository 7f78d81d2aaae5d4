"""Flags in files: `--flagfile=FILE` stands for the flags in FILE, one a line; # and // begin a comment.

absl reads such files, too, but waits for pipes, reads devices for ever, and prints a line of its own where a file leads
back to itself.
"""

import os
from collections.abc import Sequence

from refusion_jax.cli.errors import UserError
from refusion_jax.distributed.storage import is_remote, read_file

_LARGEST = 1 << 20  # bytes
_LONGEST_NAME = 200  # characters
_MOST = 100  # files: each may name others, and those again


def with_flagfiles(arguments: Sequence[str]) -> list[str]:
    """The arguments of a command line with the lines of each flagfile in its place.

    Raises:
      UserError: naming the file that cannot be read, leads back to itself, or holds what is no flag.
    """
    return _expanded(arguments, (), [])


def _expanded(arguments: Sequence[str], inside: tuple[str, ...], read: list[str]) -> list[str]:
    """As `with_flagfiles`, in the innermost of some files; the names of those that it reads are added to `read`."""
    made, left = [], list(reversed(arguments))
    while left:
        argument = left.pop()
        name, equals, path = argument.partition("=")
        if argument == "--":
            return [*made, argument, *reversed(left)]
        if argument.startswith("-") and len(name) > _LONGEST_NAME:  # absl would look for like ones till its stack ends
            raise UserError(f"{name[:60]}...: no flag has so long a name")
        if name not in ("--flagfile", "-flagfile"):
            made.append(argument)
            continue
        if not equals and left:
            path = left.pop()
        file = os.path.expanduser(path.strip())
        read.append(file)
        if not file:
            raise UserError("--flagfile=: is empty")
        if os.path.realpath(file) in inside:
            raise UserError(f"--flagfile={file}: leads back to itself")
        if len(read) > _MOST:
            raise UserError(f"--flagfile={read[0]}: leads to more than {_MOST} files")
        made += _expanded(_lines(file), (*inside, os.path.realpath(file)), read)
    return made


def _lines(file: str) -> list[str]:
    """The flags in a file."""
    if is_remote(file):
        raise UserError(f"--flagfile={file}: must be a local file")
    found = []
    try:
        content = read_file(file, _LARGEST)
    except UserError as error:
        raise UserError(f"--flagfile={error}") from error
    for number, raw in enumerate(content.split(b"\n"), 1):
        where = f"--flagfile={file}: line {number}"
        try:
            line = raw.decode().strip()
        except UnicodeDecodeError as error:
            raise UserError(f"{where} is not UTF-8") from error
        if not line or line.startswith(("#", "//")):
            continue
        if not line.startswith("-") or "\0" in line:
            raise UserError(f"{where}: {line[:60]!r} is no flag; each line holds one, --name=value")
        found.append(line)
    return found
