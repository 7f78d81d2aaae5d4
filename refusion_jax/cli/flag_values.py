"""Checks of the values of flags before any work is done: paths, numbers, and lists of numbers."""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from absl import flags
from etils import epath

from refusion_jax.cli.errors import UserError, check_characters
from refusion_jax.cli.paths import STORES, is_remote, names_no_store

# Flags that name a file or directory, in any command.
_PATHS = {
    *("workdir", "checkpoint", "input", "output", "data", "from", "to", "tokenizer", "config", "include_path"),
    *("hlo", "watch", "html", "compare", "task_data", "blocked_urls", "decontaminate"),
    "stop",  # a text, which must not be empty either
}


def check_values(values: flags.FlagValues) -> None:
    """Refuses invalid paths, invalid text, and unusable numbers."""
    for name in values:  # settings have their own limits
        value = values[name].value
        for text in value if isinstance(value, list) else [value]:
            if isinstance(text, str) and "." not in name and name != "input":  # file names can be any bytes
                check_characters(text, f"--{name}")
        if "." not in name and isinstance(value, int | float) and not -(2**32) < value < 2**32:
            raise UserError(f"--{name}={str(value)[:60]}: must be a number between -2^32 and 2^32")
    for name in sorted(name for name in _PATHS & set(values) if not values[name].using_default_value):
        given = values[name].value
        for path in given if isinstance(given, list) else [given]:
            if path == "":
                raise UserError(f"--{name}=: is empty")
            if isinstance(path, str) and name != "stop":
                if why := names_no_store(path):
                    raise UserError(f"--{name}={path}: {why}")
                if is_remote(path):
                    check_reachable(name, path)


def check_reachable(flag: str, path: str) -> None:
    """Refuses a path in a store that cannot be reached, or whose client is not installed."""
    import fsspec  # 0.1 s, which most commands do not need

    try:
        store, name = fsspec.url_to_fs(path, skip_instance_cache=True)  # others do not survive the fork of `together`
        store.exists(name)
    except Exception as error:  # noqa: BLE001  stores raise errors of many kinds
        raise UserError(f"--{flag}={path} cannot be reached: {type(error).__name__}: {error}") from error


def read_counts(flag: str, values: Sequence[str]) -> list[int]:
    """The numbers in a flag's list, each at least 1."""
    if not values or not all(x.isascii() and x.isdecimal() and len(x) < 10 and int(x) for x in values):
        raise UserError(f"--{flag}={','.join(values)}: must be numbers from 1 to 999,999,999, comma-separated")
    return [int(x) for x in values]


def check_output(flag: str, path: epath.PathLike, directory: bool = False) -> None:
    """Refuses a path that cannot be written, before any work is done."""
    if is_remote(path):
        return
    if os.fspath(path).startswith(tuple(store[:-1] for store in STORES)):  # pathlib leaves one slash
        raise UserError(f"--{flag}={path}: must be a local path; copy what is there when it is done")
    path = Path(path).absolute()
    if directory and (signs := set("*?[\\") & set(str(path))):
        raise UserError(
            f"--{flag}={path}: contains {min(signs)}; Orbax reads paths as patterns, and would not find its files "
            f"again: name another directory"
        )
    real = Path(os.path.realpath(path))
    nearest = next(p for p in (real, *real.parents) if p.exists())
    reason = None
    if nearest == real and real.is_dir() != directory:
        reason = f"is a {'file' if directory else 'directory'}"
    elif nearest != real and not nearest.is_dir():
        reason = f"{nearest} is a file"
    elif not os.access(nearest, os.W_OK):
        reason = f"no permission to write to {nearest}"
    if reason:
        raise UserError(f"--{flag}={path}: {reason}")


def check_file(flag: str, path: epath.PathLike, beginning: bytes, kind: str = "is not a page of ours") -> None:
    """Refuses a path where no file can be written, and an existing file without `beginning`, as it is not of this kind.

    An empty file passes, as from `mktemp`, and so does anything that is not a file: a pipe, a device.
    """
    check_output(flag, path)
    path = epath.Path(path) if is_remote(path) else Path(path)  # to etils a device is a file, too
    if path.is_file():
        try:
            with path.open("rb") as file:
                found = file.read(len(beginning))
        except OSError as error:
            raise UserError(f"--{flag}={path}: exists already, and cannot be read: {error.strerror}") from error
        if found not in (beginning, b""):
            raise UserError(f"--{flag}={path}: exists already, and {kind}; name another place")


def check_apart(
    output: epath.PathLike, inputs: Iterable[epath.PathLike], flag: str = "output", source: str = "input"
) -> None:
    """Refuses to overwrite an input, or to write into a directory that is read as a whole."""
    real = Path(os.path.realpath(output))
    for path in [] if is_remote(output) else inputs:
        if not is_remote(path) and Path(os.path.realpath(path)) in (real, *real.parents):
            raise UserError(f"--{flag}={output}: lies in --{source}={path}, or is the same; name another place")
