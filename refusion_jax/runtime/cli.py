"""What all commands share: flags in, help that explains, and errors of one clear line."""

import contextlib
import difflib
import os
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from absl import app, flags, logging
from etils import epath

from refusion_jax.runtime.errors import SettingError, UserError
from refusion_jax.runtime.settings import Setting
from refusion_jax.runtime.storage import is_remote

_HELP_FLAGS = {"--help", "-h"}
flags.disclaim_key_flags()  # those defined here are the calling command's, and stand in its --help


def run(
    main: Callable[[], None],
    settings: Callable[[], dict[str, str]] | None = None,
    names: Callable[[], Iterable[str]] | None = None,
    hidden: Callable[[], Collection[str]] = tuple,
) -> None:
    """Parses the flags and runs a command; bad flags and UserError end in one line on stderr and exit code 2.

    Args:
      main: the command; reads its flags from absl.flags.
      settings: what --help says of the keys of `--config` that matter, "config.a.b" -> text; none without a --config.
      names: of all keys of `--config`.
      hidden: flags that --help leaves out, because what else is asked for has no use for them.
    """

    def parse(argv: Sequence[str]) -> list[str]:
        if _HELP_FLAGS & set(argv):
            print(_help(argv, settings, hidden))
            sys.exit(0)
        try:
            rest = flags.FLAGS(argv)[1:]
        except Exception as error:  # noqa: BLE001  a config file is the user's own program, and may raise anything
            fault = config_fault(argv[1:], names() if names else ())
            is_ours = isinstance(error, flags.Error | UserError)
            _fail(fault or (error if is_ours else UserError(f"{config_flag(argv)}: {type(error).__name__}: {error}")))
        if rest:
            _fail(UserError(f"unexpected argument {rest[0]!r}: every setting is a --flag"))
        return argv[:1]

    logging.set_verbosity(logging.WARNING)
    app.run(lambda _: guard(main), flags_parser=parse)


def say(line: str) -> None:
    """Prints a line; a log that cannot be written (a full disk) is no reason to end."""
    with contextlib.suppress(OSError):
        print(line, flush=True)


def guard(main: Callable[[], None]) -> None:
    """Runs a command; UserError and bad flags end in one line on stderr and exit code 2."""
    try:
        main()
    except (UserError, flags.Error) as error:
        _fail(error)


def config_fault(argv: Sequence[str], names: Iterable[str]) -> UserError | None:
    """What ml_collections does not say: that a --config file is not there, or which key does not exist."""
    for argument in argv:
        name, _, value = argument.lstrip("-").partition("=")
        if name == "config" and value and not Path(value.split(":")[0]).is_file():
            near = sorted(str(path) for path in Path("configs").glob("*.py"))
            return UserError(f"--config={value}: no such file; here are {', '.join(near) or 'no configs/*.py'}")
        if name.startswith("config.") and names and name.removeprefix("config.") not in names:
            close = difflib.get_close_matches(name, [f"config.{known}" for known in names], n=1)
            hint = f"did you mean --{close[0]}?" if close else "--help lists them all"
            return UserError(f"--{name} is no config key; {hint}")
    return None


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


def define_settings(
    settings: Mapping[str, Setting], group: str, flag_values: flags.FlagValues = flags.FLAGS
) -> dict[str, flags.FlagHolder]:
    """One flag --GROUP.NAME for every setting; None unless it is given."""
    define = {
        int: flags.DEFINE_integer,
        float: flags.DEFINE_float,
        str: flags.DEFINE_string,
        bool: flags.DEFINE_bool,
    }
    return {
        name: define[type(own.default)](f"{group}.{name}", None, explained(own), flag_values=flag_values)
        for name, own in settings.items()
    }


def given(holders: Mapping[str, flags.FlagHolder]) -> dict[str, Any]:
    """The settings that were given on the command line."""
    return {name: flag.value for name, flag in holders.items() if flag.value is not None}


def explained(own: Setting) -> str:
    """What --help says of a setting."""
    return own.help if own.default == "" else f"{own.help} (default: {own.default})"


def _help(
    argv: Sequence[str], settings: Callable[[], dict[str, str]] | None, hidden: Callable[[], Collection[str]]
) -> str:
    """The command's own story, its flags, and its config keys."""
    with contextlib.suppress(Exception):  # what is asked for with the help decides which settings it shows
        flags.FLAGS([argument for argument in argv if argument not in _HELP_FLAGS], known_only=True)
    story = sys.modules["__main__"].__doc__
    left_out = hidden()
    own = [flag for flag in flags.FLAGS.get_key_flags_for_module(sys.argv[0]) if flag.name not in left_out]
    sections = [help_page(story, own)]
    if settings:
        sections.append(_listing("Config keys, and their values unless the config file sets others:", settings()))
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
    message = error.as_flag if isinstance(error, SettingError) else str(error)
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    if any(line.startswith("Traceback") for line in lines):
        lines = [lines[0], lines[-1]]
    print("error:", " ".join(lines), file=sys.stderr, flush=True)
    return 2


def _fail(error: Exception) -> None:
    sys.exit(explain(error))
