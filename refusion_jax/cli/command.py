"""What all commands share: parsing flags, help pages, and errors in one clear line."""

import contextlib
import difflib
import errno
import faulthandler
import gc
import importlib
import io
import os
import re
import select
import shlex
import signal
import sys
import sysconfig
import tempfile
import traceback
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_collections
from absl import app, flags, logging
from ml_collections import config_flags

import refusion_jax
from refusion_jax.cli.errors import Failure, SettingError, UserError, first_line
from refusion_jax.cli.flag_values import check_values
from refusion_jax.cli.settings import Setting

_TRACEBACK = flags.DEFINE_bool("traceback", False, "Print the full traceback of an error, not only one line")
HELP_FLAGS = {"--help", "-h"}
flags.disclaim_key_flags()  # flags defined here belong to the calling command, and are in its --help
_NO = ("", "0", "false", "f", "no", "n", "off")  # as read by JAX
_BAD_BACKEND = re.compile("Unable to initialize backend ('cpu'|.* not in the list of known backends)")  # JAX's message
_LONGEST_LINE = 2000  # characters of an error

# What flags are for that several commands have.
CHECKPOINT = "A run's directory, one step in its checkpoints/, or a Hugging Face directory"


def run(
    main: Callable[[], None],
    help_texts: Callable[[ml_collections.ConfigDict | None], dict[str, str]] | None = None,
    names: Callable[[], Iterable[str]] | None = None,
    hidden: Callable[[], Collection[str]] = tuple,
) -> None:
    """Parses the flags and runs a command; whatever goes wrong ends in one line on stderr, see `guard`.

    `help_texts` returns the help of the keys of the config that --config names, if any, by "config.a.b"; `names` are
    all keys of `--config`, `hidden` the flags that --help leaves out, because the other flags make them useless.
    """

    def parse(argv: Sequence[str]) -> list[str]:
        # `drill` passes its flags to `train`.
        argv = sys.argv = [argv[0], *map(find_config, read_arguments(argv[1:]))]
        if HELP_FLAGS & set(argv):
            print(_help(argv, help_texts, hidden))
            sys.exit(0)
        parse_flags(flags.FLAGS, argv, names)
        return argv[:1]

    guard(lambda: app.run(lambda _: guard(main), flags_parser=parse))


def parse_flags(
    values: flags.FlagValues, argv: Sequence[str], names: Callable[[], Iterable[str]] | None = None
) -> None:
    """Parses and checks flags, and runs the file of --config if given; `names` as for `run`, of flags with a config."""
    if names and (missing := config_fault(argv[1:], ())):  # ml_collections reports it only when the config is used
        raise missing
    keeps, sys.dont_write_bytecode = sys.dont_write_bytecode, True  # otherwise a config file would get a __pycache__
    try:
        logging.set_verbosity(logging.ERROR)  # ml_collections warns of what is refused below
        rest = values(argv)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a config file is the user's own program, and may raise anything
        fault = config_fault(argv[1:], names()) if names else None
        if isinstance(error, flags.UnrecognizedFlagError):
            # absl would suggest its own flags, too, and none where the prefix of a name is missing.
            ours = [name for name in values if not values.find_module_defining_flag(name).startswith("absl.")]
            near = difflib.get_close_matches(error.flagname, [*ours, "help", "flagfile"])
            error = flags.UnrecognizedFlagError(error.flagname, suggestions=near)
        is_ours = isinstance(error, flags.Error | UserError)
        raise fault or (
            error if is_ours else UserError(f"{config_flag(argv)}: {type(error).__name__}: {error}")
        ) from error
    finally:
        sys.dont_write_bytecode = keeps
    logging.set_verbosity(logging.WARNING)
    if names and values["config"].present and not isinstance(values["config"].value, ml_collections.ConfigDict):
        raise UserError(f"{config_flag(argv)}: get_config() must return a config made from default_config()")
    if rest[1:]:
        raise UserError(f"unexpected argument {rest[1]!r}: every setting is a --flag")
    check_values(values)


def run_part(command: str, story: str, parts: Mapping[str, str]) -> None:
    """Runs the part of a command that the first argument names; the other arguments are its flags.

    `story` is the text of the command's --help; `parts` maps names of parts to modules with `define_flags` and `main`,
    which take the flags.
    """
    name, *rest = read_arguments(sys.argv[1:]) or [""]
    if name in HELP_FLAGS:
        print(f"{story.strip()}\n\n{command} NAME --help explains the flags of each: {', '.join(parts)}.")
        return
    if name not in parts:
        raise UserError(f"{command} {name!r}: unknown; known: {', '.join(parts)}; --help explains")
    part, own = importlib.import_module(parts[name]), flags.FlagValues()
    part.define_flags(own)
    if HELP_FLAGS & set(rest):
        print(help_page(part.__doc__, [own[flag] for flag in own]))
        return
    parse_flags(own, [f"{command} {name}", *rest])
    part.main(own)


def read_arguments(arguments: Sequence[str]) -> list[str]:
    """The arguments, with each `--flagfile=FILE` replaced by its lines; refuses an environment that enables 64 bits."""
    if os.environ.get("JAX_ENABLE_X64", "0").lower() not in _NO:
        raise UserError("JAX_ENABLE_X64 is set, but everything here is computed in 32 bits: unset it")
    try:
        return flags.FLAGS.read_flags_from_files(arguments)
    except UnicodeDecodeError as error:
        raise UserError(f"--flagfile: {error}") from error


def say(line: str) -> None:
    """Prints a line; if that fails (a full disk), the command continues."""
    with contextlib.suppress(OSError):
        print(line, flush=True)


def guard(main: Callable[[], None]) -> None:
    """Runs a command; whatever ends it is reported in one line on stderr, with an exit code:

    2    the input is at fault, and nothing on disk has changed
    1    something else went wrong (a full disk, a bug): if it is unforeseen, the full trace is written to a file
    130  interrupted from the keyboard
    141  nobody reads the output any more (`... | head -1`), which is no fault: nothing is printed
    """
    gc.freeze()  # everything imported so far
    gc.enable()
    if signal.getsignal(signal.SIGINT) is getattr(refusion_jax, "leave", None):
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed by the caller, as by `>&-`
            setattr(sys, name, open(os.devnull, mode))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # otherwise file names that are not UTF-8 could not be printed
            stream.reconfigure(encoding="utf-8", errors="backslashreplace")
    # A handler that ends the process at once, as the default does: in place of the default libtpu sets one of its own,
    # which prints a stack.
    faulthandler.register(signal.SIGTERM, os.open(os.devnull, os.O_WRONLY), all_threads=False, chain=True)
    try:
        main()
        sys.stdout.flush()
    except SystemExit as error:
        if isinstance(error.__context__, BrokenPipeError) and _is_unread():  # rich ends like this
            _end(None, 141)
        raise
    except BaseException as error:  # noqa: BLE001  anything unforeseen; a panic of Rust is not an Exception
        _end(*verdict(error), error)


def verdict(error: BaseException) -> tuple[Exception | None, int]:
    """(the message about what has ended a command, if it needs one; the exit code), see `guard`."""
    match error:
        case UserError() | flags.Error():
            return error, 2
        case Failure():
            return error, 1
        case KeyboardInterrupt():
            return Failure(str(error) or "interrupted"), 130
        case BrokenPipeError() if _is_unread():
            return None, 141
        case OSError(errno=number, filename=path) if path is not None and number in _OF_A_PATH:
            return UserError(f"{os.fsdecode(path)}: {error.strerror}"), 2
        case OSError(errno=number, filename=path) if number in _OF_A_DISK:
            return Failure(f"{path or 'the output'}: {error.strerror}"), 1
        case RuntimeError() if _BAD_BACKEND.match(str(error)):
            return UserError(f"the environment: {first_line(error)}"), 2
        case AssertionError() if Path(traceback.extract_tb(error.__traceback__)[-1].filename).name == "xla_bridge.py":
            # JAX has given up on all platforms, with an empty message.
            wanted = os.environ.get("JAX_PLATFORMS")
            return UserError(f"the environment: JAX_PLATFORMS={wanted}: JAX finds no such device here"), 2
        case ValueError() if traceback.extract_tb(error.__traceback__)[-1].filename.endswith("jax/_src/config.py"):
            return UserError(f"the environment: {first_line(error)}"), 2
    if full := next((text for text in map(os.strerror, sorted(_OF_A_DISK)) if text in str(error)), None):
        return Failure(f"{full}: {first_line(error)}"), 1  # a library's message
    return Failure(_unforeseen(error)), 1


def _is_unread() -> bool:
    """Whether the reader of stdout or stderr has gone; the broken pipe may also be one to a process of ours."""
    poll = select.poll()
    for descriptor in (1, 2):
        poll.register(descriptor, 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))


# Errors of a path that a user has given, and of the disk below it.
_OF_A_PATH = {errno.ENAMETOOLONG, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EISDIR, errno.EROFS, errno.ELOOP}
_OF_A_PATH |= {errno.ENOENT, errno.EEXIST}  # a dangling link, or a file in place of a directory
_OF_A_PATH |= {errno.ENXIO}  # a socket, or a missing terminal
_OF_A_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def _end(error: Exception | None, code: int, cause: BaseException | None = None) -> None:
    """Ends the process with one line about what is wrong, after the trace if it is asked for."""
    with contextlib.suppress(OSError):  # stderr may be closed, too
        if error and _wants_traceback():
            traceback.print_exception(cause or error)
        if error:
            explain(error)
    try:
        sys.stdout.flush()
    except OSError:  # at exit Python would try again, and complain
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.close(nowhere)
    if code == 130:
        os._exit(code)  # Python would wait for unfinished compilations of XLA, and then crash (jaxlib 0.10.2)
    sys.exit(code)


def _wants_traceback() -> bool:
    return flags.FLAGS.is_parsed() and _TRACEBACK.value


def _unforeseen(error: BaseException) -> str:
    """The message for an unforeseen exception, whose trace is written to a new file."""
    command = Path(sys.argv[0]).stem
    hint = "--traceback prints where"
    if not _wants_traceback():
        with contextlib.suppress(OSError):
            with tempfile.NamedTemporaryFile(
                "w", encoding="utf-8", errors="replace", prefix=f"refusion_jax-{command}-", suffix=".txt", delete=False
            ) as file:
                file.write(f"{shlex.join(sys.argv)}\n\n")
                traceback.print_exception(error, file=file)
            hint = f"the full trace is in {file.name}, and --traceback prints it"
    what, name = first_line(error), type(error).__name__
    return f"{command} failed: {name if what == name else f'{name}: {what}'}{_own_place(error)} ({hint})"


def _own_place(error: BaseException) -> str:
    """Where a user's own file, such as a system's, has raised an error or called what raised it; "" if none did."""
    package, libraries = os.path.dirname(os.path.dirname(__file__)), tuple(sysconfig.get_paths().values())
    for frame, line in reversed([*traceback.walk_tb(error.__traceback__)]):
        file = frame.f_code.co_filename
        is_library = file.startswith(libraries) and "SYSTEM" not in frame.f_globals  # systems may be installed, too
        if os.path.isfile(file) and not is_library and not file.startswith(package):
            return f" at {file}:{line}"
    return ""


def config_fault(argv: Sequence[str], names: Iterable[str]) -> UserError | None:
    """A fault that ml_collections does not report: --config given twice or naming no file, or an unknown key."""
    configs = [argument for argument in argv if argument.lstrip("-").startswith("config=")]
    if len(configs) > 1:
        return UserError(f"{' '.join(configs)}: give one config, and --config.KEY=VALUE for what differs")
    for argument in argv:
        name, _, value = argument.lstrip("-").partition("=")
        if name == "config" and not os.path.isfile(value.split(":")[0]):
            near = sorted(str(path) for path in Path("configs").glob("*.py"))
            return UserError(f"--config={value}: no such file; here are {', '.join(near) or 'no configs/*.py'}")
        if name.startswith("config.") and names and name.removeprefix("config.") not in names:
            close = difflib.get_close_matches(name, [f"config.{known}" for known in names], n=1)
            hint = f"did you mean --{close[0]}?" if close else "--help with this --config lists them"
            return UserError(f"--{name} is not a config key; {hint}")
    return None


def find_config(argument: str) -> str:
    """The argument; if it is --config=configs/NAME.py and that does not exist, with the package's file instead."""
    flag, _, value = argument.partition("=")
    file, package = value.partition(":")[0], Path(__file__).parents[1]
    is_config = flag.lstrip("-") == "config" and file.startswith("configs/")
    if is_config and not os.path.isfile(file) and (package / file).is_file():
        return f"{flag}={package / value}"
    return argument


def config_flag(argv: Sequence[str]) -> str:
    """The --config flag as it was given, for messages."""
    return next((argument for argument in argv if argument.lstrip("-").startswith("config=")), "--config")


def define_config(help: str) -> flags.FlagHolder:
    """Defines the flag --config, and one --config.KEY for every key of the file that it names.

    ml_collections already reads the command line here, and would raise for a --flagfile that cannot be read.
    """
    given, sys.argv = sys.argv, sys.argv[:1]
    try:
        return config_flags.DEFINE_config_file("config", None, help)
    finally:
        sys.argv = given


def define_settings(
    settings: Mapping[str, Setting],
    flag_values: flags.FlagValues = flags.FLAGS,
    defaults: Mapping[str, Any] | None = None,
) -> None:
    """Defines a flag --decode.NAME for every setting; None unless it is given, see `given`.

    For --help, `defaults` are the command's defaults by name, where they differ from the settings' own.
    """
    define = {int: flags.DEFINE_integer, float: flags.DEFINE_float, str: flags.DEFINE_string, bool: flags.DEFINE_bool}
    for name, own in settings.items():
        help = help_text(own, (defaults or {}).get(name))
        define[type(own.default)](f"decode.{name}", None, help, flag_values=flag_values)


def as_written(command: str, own: flags.FlagValues) -> str:
    """The command line `python -m refusion_jax.COMMAND` with the given flags, to be recorded in its output."""
    flags_given = [own[name].serialize() for name in own if own[name].present]
    return shlex.join(["python", "-m", *f"refusion_jax.{command}".split(), *flags_given])


def given(own: flags.FlagValues = flags.FLAGS) -> dict[str, Any]:
    """The settings of `define_settings` that were given on the command line."""
    settings = {name.removeprefix("decode."): own[name].value for name in own if name.startswith("decode.")}
    return {name: value for name, value in settings.items() if value is not None}


def help_text(own: Setting, default: Any = None) -> str:
    """The help text of a setting, with a default: its own, unless one is given."""
    if default is not None:
        return f"{own.help.partition('; 0:')[0]} (default: {default})"  # the command's, whatever a 0 means elsewhere
    return own.help if own.default == "" else f"{own.help} (default: {own.default})"


def _help(argv: Sequence[str], help_texts: Callable | None, hidden: Callable[[], Collection[str]]) -> str:
    with contextlib.suppress(Exception):  # the other flags decide which settings the help shows
        flags.FLAGS([argument for argument in argv if argument not in HELP_FLAGS], known_only=True)
    if not flags.FLAGS.is_parsed():  # they are wrong, which is reported when they are used
        flags.FLAGS.mark_as_parsed()
    left_out = hidden()
    own = [flag for flag in flags.FLAGS.get_key_flags_for_module(sys.argv[0]) if flag.name not in left_out]
    own.append(flags.FLAGS["traceback"])
    sections = [help_page(sys.modules["__main__"].__doc__, own)]
    if help_texts:
        texts = help_texts(flags.FLAGS["config"].value)
        sections.append(_listing("Config keys, and their values unless the config file sets others:", texts))
    return "\n\n".join(sections)


def help_page(story: str | None, own: Iterable[flags.Flag]) -> str:
    """A story, unless python -OO has removed it, and the help of each flag."""
    listed = {}
    for flag in own:
        default = ",".join(map(str, flag.default)) if isinstance(flag.default, list) else flag.default
        text = flag.help.partition(";\n")[0]  # absl adds a line to flags that may be given several times
        listed[flag.name] = text if default in (None, "") else f"{text} (default: {default})"
    return "\n\n".join([(story or "").strip(), _listing("Flags:", listed)])


def _listing(title: str, entries: dict[str, str]) -> str:
    return "\n".join([title, *(f"  --{name}\n      {text}" for name, text in entries.items())])


def explain(error: Exception) -> None:
    """Prints one line on stderr about what is wrong with the input.

    For a config file that raises, it names the flag and the exception, without the traceback in between.
    """
    message = error.as_flag if isinstance(error, SettingError) else str(error)
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    if any(line.startswith("Traceback") for line in lines):
        lines = [lines[0], lines[-1]]
    line = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in " ".join(lines))
    if len(line) > _LONGEST_LINE:  # a too long name comes before what is wrong with it
        line = f"{line[: _LONGEST_LINE // 2]}...{line[-_LONGEST_LINE // 2 :]}"
    print("error:", line, file=sys.stderr, flush=True)
