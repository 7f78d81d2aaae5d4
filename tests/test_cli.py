"""How a command ends: one line for whatever went wrong, and the exit code that says whose fault it was."""

import errno
import os
import re
from pathlib import Path

import pytest
from conftest import run, start

from refusion_jax import UserError
from refusion_jax.cli import command, flag_values
from refusion_jax.cli.errors import Failure, SettingError


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
        (UserError("x" * 9999), 2, f"error: {'x' * 2000}...\n"),
        (Failure("the disk is full"), 1, "error: the disk is full\n"),
        (OSError(errno.ENAMETOOLONG, "File name too long", "x"), 2, "error: x: File name too long\n"),
        (OSError(errno.ENOSPC, "No space left on device"), 1, "error: the output: No space left on device\n"),
        (KeyboardInterrupt(), 130, "error: interrupted\n"),
    ],
)
def test_whatever_goes_wrong_is_one_line_and_the_code_of_whose_fault_it_is(error, code, said, capsys):
    assert ended(error, capsys) == (code, said)


def test_what_nobody_has_thought_of_is_one_line_and_a_file_with_the_trace(capsys):
    code, err = ended(KeyError("where"), capsys)
    assert code == 1
    found = re.fullmatch(
        r"error: \S+ failed: KeyError: 'where' \(the full trace is in (\S+), and --traceback prints it\)\n", err
    )
    file = Path(found[1])
    assert file.stat().st_mode & 0o777 == 0o600
    assert "Traceback (most recent call last)" in file.read_text()
    assert "raise error" in file.read_text()
    file.unlink()


@pytest.mark.parametrize("path", ["", "x" * 256, "a/" * 2048, "\udcff" * 300])
def test_what_can_be_no_path_is_refused_by_its_flag(path):
    values = command.flags.FlagValues()
    command.flags.DEFINE_string("workdir", None, "", flag_values=values)
    values(["program", f"--workdir={path}"])
    with pytest.raises(UserError, match="--workdir=.*: is (empty|too long for a path)"):
        flag_values.check_values(values)


def test_a_directory_that_cannot_be_made_is_refused_before_any_work(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="--output=.*/file is a file"):
        flag_values.check_output("output", tmp_path / "file" / "below")
    flag_values.check_output("output", Path(os.devnull))
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for path, said in (
        (tmp_path / "none" / "..", "is a directory"),
        (tmp_path / "loop" / "below", "is a link that leads in a circle, or lies below one"),
        (Path("gs://bucket/file"), "must be a local path"),
    ):
        with pytest.raises(UserError, match=said):
            flag_values.check_output("output", path)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("JAX_ENABLE_X64", "maybe", "a variable of the environment: invalid truth value 'maybe' for .*JAX_ENABLE_X64"),
        ("JAX_ENABLE_X64", "1", "JAX_ENABLE_X64 is set, but everything here is computed in 32 bits: unset it"),
    ],
)
def test_an_environment_that_jax_refuses_is_one_line(name, value, said, monkeypatch):
    """JAX reads it while a command is imported, before anything of ours runs."""
    monkeypatch.setenv(name, value)
    process = start("convert")
    _, err = process.communicate()
    assert process.returncode == 2
    assert re.fullmatch(f"error: {said}.*\n", err)


def test_a_directory_that_is_gone_is_said_to_be(tmp_path, monkeypatch, capsys):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(SystemExit) as end:
        command.guard(lambda: flag_values.check_output("output", Path("x")))
    assert end.value.code == 2
    assert capsys.readouterr().err == "error: the directory that this was started in is not there any more\n"


def test_a_flagfile_that_cannot_be_read_is_one_line_that_names_it(tmp_path):
    (tmp_path / "bad").write_bytes(b"--x\n\xff\xfe\n")
    (tmp_path / "good").write_text("# a comment\n--output=\n")
    for file, said in (("none", f"{tmp_path}/none"), ("bad", "--flagfile: .*utf-8"), ("good", "--output=: is empty")):
        for name in ("generate", "inspect_data"):  # the latter has a --config, which looks at flags of its own
            if (file, name) != ("good", "inspect_data"):
                out, err = run(name, f"--flagfile={tmp_path}/{file}", code=2)
                assert out == ""
                assert re.fullmatch(f"error: .*{said}.*\n", err), err
