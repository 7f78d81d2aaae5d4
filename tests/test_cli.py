"""How a command ends: one line for whatever went wrong, with the exit code of whose fault it was; files of JSON."""

import dataclasses
import errno
import importlib
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, refused, run
from helpers import python

import refusion_jax
from refusion_jax import UserError
from refusion_jax.cli import command, flag_values
from refusion_jax.cli.errors import Failure, SettingError
from refusion_jax.cli.progress import progress
from refusion_jax.distributed.json_files import read_json, read_json_lines


def ended(error, capsys) -> tuple[int, str]:
    def main():
        raise error

    with pytest.raises(SystemExit) as end:
        command.guard(main)
    return end.value.code, capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (UserError("in.jsonl:3:\n  not JSON"), 2, "error: in.jsonl:3: not JSON\n"),
        (UserError("--stop=\x1b[2J\ud800\0"), 2, "error: --stop=\\x1b[2J\\ud800\\x00\n"),
        (
            SettingError("decode", "seed", 10**400, "must be less"),
            2,
            f"error: --decode.seed=1{'0' * 79}...: must be less\n",
        ),
        (UserError("x" * 9999 + ": long"), 2, f"error: {'x' * 1000}...{'x' * 994}: long\n"),
        (Failure("the disk is full"), 1, "error: the disk is full\n"),
        (OSError(errno.ENOENT, "No such file or directory", "x"), 2, "error: x: No such file or directory\n"),
        (OSError(errno.ENOSPC, "No space left on device"), 1, "error: the output: No space left on device\n"),
        (RuntimeError("x: File too large (27)"), 1, "error: File too large: x: File too large (27)\n"),
    ],
)
def test_whatever_goes_wrong_is_one_line_and_the_code_of_whose_fault_it_is(error, code, said, capsys):
    assert ended(error, capsys) == (code, said)


COMPILING = """
import signal, time
import jax
from refusion_jax.cli import command

def many(x):
    for _ in range(60):
        x = jax.numpy.sort(jax.numpy.sin(x))
    return x

def main():
    lowered = jax.jit(many).lower(jax.numpy.ones(1000))
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    lowered.compile()
    time.sleep(600)

command.guard(main)
"""


def test_an_interrupt_ends_a_command_in_one_line_while_it_compiles():
    """Python's own end would wait for the compiler, and then crash."""
    ended = python("-c", COMPILING)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "error: interrupted\n")


SCRIPT = os.path.join(os.path.dirname(sys.executable), "refusion")
CONSOLE = f"import sys; sys.argv[0] = {SCRIPT!r}; from refusion_jax.cli.main import main; main()"


@pytest.mark.parametrize("call", [("-m", "refusion_jax.train"), ("-c", CONSOLE, "train")])
def test_an_interrupt_ends_a_command_in_one_line_while_it_is_imported(tmp_path, call):
    """Native code crashed in its initialization, or dropped the exception."""
    drops = "import contextlib, os, signal\nwith contextlib.suppress(KeyboardInterrupt):\n"
    (tmp_path / "jax.py").write_text(f"{drops}    os.kill(os.getpid(), signal.SIGINT)")
    ended = python(*call, "--help", PYTHONPATH=f"{tmp_path}:{ROOT}")
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "error: interrupted\n")


def test_a_script_of_the_same_name_imports_only_a_library(tmp_path):
    """A command collects no garbage, and handles interrupts itself, until its imports have ended."""
    script = tmp_path / "refusion"
    script.write_text("import gc, signal as s, refusion_jax\nprint(gc.isenabled(), s.getsignal(s.SIGINT).__name__)")
    assert python(str(script)).stdout == "True default_int_handler\n"


@pytest.mark.parametrize(
    ("closes", "code"), [("{ sleep 1; %s; } | true; exit ${PIPESTATUS[0]}", 141), ("%s >&- <&-", 0)]
)
def test_an_output_that_nobody_reads_is_no_fault(closes, code):
    program = "import sys; from refusion_jax.cli import command; command.guard(lambda: print(sys.stdout.isatty()))"
    ours = f"{shlex.quote(sys.executable)} -c {shlex.quote(program)}"
    ended = subprocess.run(["bash", "-c", closes % ours], cwd=ROOT, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (code, "", "")


class Panic(BaseException):
    """As Rust's reach Python."""


@pytest.mark.parametrize("error", [KeyError("where"), Panic("'where'"), BrokenPipeError("'where'")])
def test_what_nobody_has_thought_of_is_one_line_and_a_file_with_the_trace(error, capsys):
    code, err = ended(error, capsys)
    assert code == 1
    found = re.fullmatch(
        rf"error: \S+ failed: {type(error).__name__}: 'where' at {re.escape(__file__)}:[0-9]+ "
        r"\(the full trace is in (\S+), and --traceback prints it\)\n",
        err,
    )
    file = Path(found[1])
    assert file.stat().st_mode & 0o777 == 0o600
    assert "Traceback (most recent call last)" in file.read_text()
    assert "raise error" in file.read_text()
    file.unlink()


def test_an_error_of_a_system_that_is_installed_is_told_with_its_place(tmp_path, monkeypatch, capsys):
    file = tmp_path / "installed.py"
    file.write_text("SYSTEM = 'as of an entry point'\ndef fail(_):\n    raise KeyError('where')\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"purelib": str(ROOT), "platlib": str(tmp_path)})
    installed = importlib.import_module("installed")
    with pytest.raises(SystemExit):
        command.guard(lambda: installed.fail(0))
    assert f"failed: KeyError: 'where' at {file}:3 (the full trace is in " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flag", "path", "said"),
    [
        ("workdir", "", "is empty"),
        ("workdir", "x://y", "names no store"),
        ("workdir", "gs:/x", "a store begins with gs://"),
        ("workdir", "az://y", "cannot be reached"),
        ("blocked_urls", "x,az://y", "cannot be reached"),
        ("workdir", "a\udcff", "not UTF-8"),
    ],
)
def test_what_can_be_no_path_or_text_is_refused_by_its_flag(flag, path, said):
    values = command.flags.FlagValues()
    command.flags.DEFINE_string("workdir", None, "", flag_values=values)
    command.flags.DEFINE_list("blocked_urls", [], "", flag_values=values)
    values(["program", f"--{flag}={path}"])
    with pytest.raises(UserError, match=f"--{flag}[=:].*{said}"):
        flag_values.check_values(values)


def test_a_directory_that_cannot_be_made_is_refused_before_any_work(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="--output=.*/file is a file"):
        flag_values.check_output("output", tmp_path / "file" / "below")
    flag_values.check_output("output", Path(os.devnull))
    for path, said in (
        (tmp_path / "none" / "..", "is a directory"),
        (Path("gs://bucket/file"), "must be a local path"),
    ):
        with pytest.raises(UserError, match=said):
            flag_values.check_output("output", path)


@pytest.mark.parametrize("seen", ["err", "out err", ""])
def test_a_bar_is_for_terminals_and_what_is_printed_goes_where_it_is_sent(seen):
    code = "from refusion_jax.cli.progress import track\nfor i in track('ab', 'reading'): print(i * 100)"
    terminal, end = os.openpty()
    streams = {f"std{name}": end if name in seen else subprocess.PIPE for name in ("out", "err")}
    ended = subprocess.run([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": str(ROOT)}, **streams)
    os.set_blocking(terminal, False)
    shown = os.read(terminal, 1 << 16).decode() if seen else ""
    os.close(end)
    os.close(terminal)
    assert ("reading" in shown, "2/2" in shown) == (bool(seen), bool(seen))
    assert not ended.stderr
    if "out" not in seen:
        assert ended.stdout.decode() == f"{'a' * 100}\n{'b' * 100}\n"


def test_the_remaining_time_is_known_however_seldom_a_bar_advances():
    bar, seconds = progress(), [0]
    bar.get_time = lambda: seconds[-1]
    task = bar.add_task("training", total=10)
    for now in (0, 100, 200):
        seconds.append(now)
        bar.advance(task)
    assert bar.tasks[0].time_remaining == 700


@pytest.mark.parametrize("command", [["convert"], ["bench", "calibration"]])
def test_an_environment_for_64_bits_is_refused(command, monkeypatch):
    monkeypatch.setenv("JAX_ENABLE_X64", "1")
    assert refused(*command) == "error: JAX_ENABLE_X64 is set, but everything here is computed in 32 bits: unset it\n"


def test_a_platform_that_is_not_here_and_a_variable_that_jax_refuses_are_told_in_one_line():
    program = "import jax; from refusion_jax.cli import command; command.guard(jax.devices)"
    told = python("-c", program, JAX_PLATFORMS="cuda"), python("-m", "refusion_jax.goodput", JAX_DEBUG_NANS="x")
    for ended, said in zip(told, ("cuda", "'JAX_DEBUG_NANS'"), strict=True):
        assert ended.returncode == 2
        assert re.fullmatch(f"error: the environment: .*{said}.*\n", ended.stderr)


def test_sigterm_ends_any_command_at_once_also_in_native_code_and_where_libtpu_would_print_a_stack():
    program = """
import hashlib, os, threading, jax
from refusion_jax.cli import command
def main():
    jax.devices()
    threading.Timer(0.5, os.kill, (os.getpid(), 15)).start()
    hashlib.pbkdf2_hmac("sha256", b"x", b"x", 10**9)  # many minutes
command.guard(main)
"""
    ended = python("-c", program, JAX_PLATFORMS="", ALLOW_MULTIPLE_LIBTPU_LOAD="1")  # all platforms that are installed
    assert ended.returncode == -signal.SIGTERM
    assert "SIGTERM" not in ended.stderr


def test_a_flagfile_that_cannot_be_read_is_one_line_that_names_it(tmp_path):
    (tmp_path / "bad").write_bytes(b"--x\n\xff\xfe\n")
    (tmp_path / "good").write_text("# a comment\n--output=\n")
    for file, said in (("none", f"{tmp_path}/none"), ("bad", "--flagfile: .*utf-8"), ("good", "--output=: is empty")):
        for name in ("generate", "inspect_data"):  # the latter has a --config, which looks at flags of its own
            if (file, name) != ("good", "inspect_data"):
                assert re.search(said, refused(name, f"--flagfile={tmp_path}/{file}"))


def test_the_console_command_runs_commands_by_their_names():
    def refusion(*arguments: str, code: int = 2) -> tuple[str, str]:
        return run("-c", "from refusion_jax.cli.main import main; main()", *arguments, code=code)

    assert refusion("--version", code=0) == (f"{refusion_jax.__version__}\n", "")
    out, err = refusion("none")
    assert out == ""
    assert err.startswith("error: refusion 'none': unknown; known: bench, chat, convert, ")
    assert refusion("goodput") == ("", "error: --workdir=DIR is needed; --help explains\n")
    assert "error: --checkpoint and --key " in refusion("split", "device")[1]


@dataclasses.dataclass(frozen=True)
class Inner:
    name: str
    size: int = 1


@dataclasses.dataclass(frozen=True)
class Outer:
    share: float
    flag: bool
    counts: dict[str, int]
    parts: tuple[Inner, ...]


GOOD = b'{"share": 1, "flag": true, "counts": {"a": 2}, "parts": [{"name": "x"}]}'


def test_a_file_is_read_as_the_declared_type(tmp_path):
    (tmp_path / "x.json").write_bytes(b"\xef\xbb\xbf" + GOOD)
    assert read_json(tmp_path / "x.json", Outer) == Outer(1.0, True, {"a": 2}, (Inner("x"),))
    assert read_json(tmp_path / "x.json")["counts"] == {"a": 2}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (GOOD.replace(b"1,", b'"1",'), "share: Input should be a valid number"),
        (GOOD.replace(b'"name": "x"', b""), "parts.0.name: Field required"),
        (GOOD.replace(b'"name": "x"', b'"name": "x", "more": 1'), "parts.0.more: is unknown to this version; a newer"),
        (b'{\n"share": 1\n"flag"', "Invalid JSON: expected `,` or `}` at line 3 column 1"),
        (b'{"share": "\xff"}', "Invalid JSON: .*unicode"),
        (b"[" * 100_000, "Invalid JSON: recursion limit"),
    ],
)
def test_what_is_not_of_the_type_is_one_line_that_names_file_and_field(tmp_path, content, said):
    path = tmp_path / "x.json"
    path.write_bytes(content)
    with pytest.raises(UserError, match=f"^{path} cannot be read: {said}") as refused:
        read_json(path, Outer)
    assert "\n" not in str(refused.value)


def test_lines_end_at_a_newline_only_and_the_bad_one_is_named(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_bytes('\ufeff\n{"a": "\u2028b\u2029c\x85d"}\n \n{"x": 1}\r\n{}'.encode())
    assert list(read_json_lines(path)) == [(2, {"a": "\u2028b\u2029c\x85d"}), (4, {"x": 1}), (5, {})]
    path.write_bytes(b'{"a": 1}\n\n{"a": 1')
    with pytest.raises(UserError, match=f"^{path}:3: Invalid JSON: EOF"):
        list(read_json_lines(path))


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    for path, said in (
        (tmp_path, "Is a directory"),
        (tmp_path / "none", "No such file"),
        (tmp_path / ("x" * 300), "too long"),
    ):
        with pytest.raises(UserError, match=f"^{path} cannot be read: .*{said}"):
            read_json(path)
    with pytest.raises(UserError, match=f"^{tmp_path} cannot be read: Is a directory"):
        list(read_json_lines(tmp_path))
