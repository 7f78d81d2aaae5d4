"""What all commands share: flags in, help that explains, and errors of one clear line."""

import dataclasses
import difflib
import inspect
import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from absl import app, flags, logging
from etils import epath

from refusion_jax.runtime.errors import UserError
from refusion_jax.runtime.storage import is_remote


def run(main: Callable[[], None], settings: dict[str, str] | None = None) -> None:
    """Parses the flags and runs a command; bad flags and UserError end in one line on stderr and exit code 2.

    Args:
      main: the command; reads its flags from absl.flags.
      settings: the keys of `--config`, "config.a.b" -> what --help says of it; empty where a command has no --config.
    """

    def parse(argv: Sequence[str]) -> list[str]:
        if {"--help", "-h"} & set(argv):
            print(_help(settings or {}))
            sys.exit(0)
        try:
            check_config_flags(argv[1:], settings or {})
            rest = flags.FLAGS(argv)[1:]
        except (flags.Error, UserError) as error:
            _fail(error)
        except Exception as error:  # noqa: BLE001  a config file is the user's own program, and may raise anything
            _fail(UserError(f"{config_flag(argv)}: {type(error).__name__}: {error}"))
        if rest:
            _fail(UserError(f"unexpected argument {rest[0]!r}: every setting is a --flag"))
        return argv[:1]

    logging.set_verbosity(logging.WARNING)
    app.run(lambda _: guard(main), flags_parser=parse)


def guard(main: Callable[[], None]) -> None:
    """Runs a command; UserError and bad flags end in one line on stderr and exit code 2."""
    try:
        main()
    except (UserError, flags.Error) as error:
        _fail(error)


def check_config_flags(argv: Sequence[str], settings: dict[str, str]) -> None:
    """Refuses a --config file that is not there and keys that do not exist, which ml_collections does not name.

    Raises:
      UserError: with what is there instead.
    """
    for argument in argv:
        name, _, value = argument.lstrip("-").partition("=")
        if name == "config" and value and not Path(value.split(":")[0]).is_file():
            near = sorted(str(path) for path in Path("configs").glob("*.py"))
            raise UserError(f"--config={value}: no such file; here are {', '.join(near) or 'no configs/*.py'}")
        if name.startswith("config.") and settings and name not in settings:
            close = difflib.get_close_matches(name, settings, n=1)
            hint = f"did you mean --{close[0]}?" if close else "--help lists them all"
            raise UserError(f"--{name} is no config key; {hint}")


def config_flag(argv: Sequence[str]) -> str:
    """The --config flag as it was given, for messages."""
    return next((argument for argument in argv if argument.lstrip("-").startswith("config=")), "--config")


def check_output(flag: str, path: epath.Path, directory: bool = False) -> None:
    """Refuses a path that cannot be written, before any work is done for it.

    Raises:
      UserError: naming the flag.
    """
    if is_remote(path):
        try:
            epath.Path(path).exists()
        except Exception as error:  # noqa: BLE001  each store has errors of its own
            raise UserError(f"--{flag}={path} cannot be reached: {type(error).__name__}: {error}") from error
        return
    nearest = next(p for p in (path.absolute(), *path.absolute().parents) if p.exists())
    reason = None
    if nearest == path.absolute() and path.is_dir() != directory:
        reason = f"is a {'file' if directory else 'directory'}"
    elif nearest != path.absolute() and not nearest.is_dir():
        reason = f"{nearest} is a file"
    elif not os.access(nearest, os.W_OK):
        reason = f"no permission to write to {nearest}"
    if reason:
        raise UserError(f"--{flag}={path}: {reason}")


def declared_settings(owner: Callable) -> dict[str, tuple[str, str]]:
    """Settings that a function or class declares one a line, `name = default  # meaning`: name -> (default, meaning).

    The declaration is the one place where a setting's default and its meaning are written down.
    """
    declaration = r"^    (?:c\.)?([a-z_0-9.]+)(?:: \w+)? = (.+?)  # (.+)$"
    found = re.findall(declaration, inspect.getsource(owner), re.MULTILINE)
    return {name: (default, meaning) for name, default, meaning in found}


def define_settings(owner: type, prefix: str, but: str = "") -> dict[str, flags.FlagHolder]:
    """One flag --PREFIX.NAME for every setting of a dataclass but one, with its default and meaning."""
    define = {
        int: flags.DEFINE_integer,
        float: flags.DEFINE_float,
        str: flags.DEFINE_string,
        bool: flags.DEFINE_bool,
    }
    meanings = declared_settings(owner)
    return {
        field.name: define[field.type](f"{prefix}.{field.name}", field.default, meanings[field.name][1])
        for field in dataclasses.fields(owner)
        if field.name != but
    }


def _help(settings: dict[str, str]) -> str:
    """The command's own story, its flags, and its config keys."""
    story = sys.modules["__main__"].__doc__
    own = flags.FLAGS.get_key_flags_for_module(sys.argv[0])
    sections = [help_page(story, own)]
    if settings:
        sections.append(_listing("Config keys, and their values unless the config file sets others:", settings))
    return "\n\n".join(sections)


def help_page(story: str, own: Iterable[flags.Flag]) -> str:
    """A story, and what each flag is for."""
    listed = {f.name: f"{f.help}{'' if f.default in (None, '') else f' (default: {f.default})'}" for f in own}
    return "\n\n".join([story.strip(), _listing("Flags:", listed)])


def _listing(title: str, entries: dict[str, str]) -> str:
    return "\n".join([title, *(f"  --{name}\n      {text}" for name, text in entries.items())])


def explain(error: Exception) -> int:
    """Says in one line on stderr what is wrong with the input, and returns the exit code that means so.

    Of a config file that raises, the flag and the exception are named, not the traceback between.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if any(line.startswith("Traceback") for line in lines):
        lines = [lines[0], lines[-1]]
    print("error:", " ".join(lines), file=sys.stderr, flush=True)
    return 2


def _fail(error: Exception) -> None:
    sys.exit(explain(error))
