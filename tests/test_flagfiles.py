"""Flags in files: each stands where its file is named, and what can be no file of flags is refused by its name."""

import os

import pytest
from conftest import run

from refusion_jax import UserError
from refusion_jax.cli.flagfiles import with_flagfiles


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_lines_stand_where_their_file_is_named(here):
    (here / "a").write_text("# a comment\n\n--x=1\n  --flagfile=b \n// another\n--y=a = b\n")
    (here / "b").write_text("--z\r\n-w=ü\u2028\n")
    inner = ["--z", "-w=ü"]
    assert with_flagfiles(["--q", "--flagfile=a", "--q=2"]) == ["--q", "--x=1", *inner, "--y=a = b", "--q=2"]
    assert with_flagfiles(["-flagfile", "b", "--flagfile=b"]) == inner * 2  # twice is no circle
    untouched = ["--x=--flagfile=a", "--", "--flagfile=none"]
    assert with_flagfiles(untouched) == untouched


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"--flagfile=f\n", "f: leads back to itself"),
        (b"--x\n--flagfile=./g\n", "f: leads back to itself"),
        (b"--flagfile=h0\n", "f: leads to more than 100 files"),
        (b"--flagfile=none\n", "none cannot be read: No such file or directory"),
        (b"--flagfile\n", "is empty"),
        (b"--flagfile=/dev/zero\n", "/dev/zero cannot be read: it is no file"),
        (b"--flagfile=.\n", "cannot be read: it is a directory"),
        (b"--flagfile=pipe\n", "pipe cannot be read: it is no file"),
        (b"--flagfile=gs://x/y\n", "gs://x/y: must be a local file"),
        (b"--x\nsteps 3\n", "f: line 2: 'steps 3' is no flag"),
        (b"\x7fELF\0", "f: line 1: '\\\\x7fELF\\\\x00' is no flag"),
        (b"--x=\0\n", "f: line 1: .* is no flag"),
        (b"--x\n\xff\xfe\n", "f: line 2 is not UTF-8"),
        (b"--flagfile=--flagfile\n", "--flagfile cannot be read"),
        (b"#" * (1 << 20) + b"\n", "f cannot be read: it is larger than 1 MiB"),
    ],
)
def test_a_flagfile_that_cannot_be_used_is_refused_by_its_name(content, said, here):
    (here / "f").write_bytes(content)
    (here / "g").write_bytes(b"--flagfile=f\n")
    for n in range(7):  # each leads to the next twice
        (here / f"h{n}").write_text(f"--flagfile=h{n + 1}\n" * 2)
    (here / "h7").write_text("--y\n")
    os.mkfifo(here / "pipe")
    with pytest.raises(UserError, match=f"^--flagfile=.*{said}"):
        with_flagfiles(["--flagfile=f"])


def test_a_circle_is_one_line(here):
    (here / "f").write_text(f"--flagfile={here}/f\n")
    for command in ("generate", "bench", "inspect_data"):  # the last has a --config, which looks at flags of its own
        assert run(command, *["decode"] * (command == "bench"), f"--flagfile={here}/f", code=2) == (
            "",
            f"error: --flagfile={here}/f: leads back to itself\n",
        )


def test_a_name_that_is_too_long_is_no_flag():
    """absl looks for similar ones letter by letter, each a call inside the other."""
    with pytest.raises(UserError, match=r"^--x{58}\.\.\.: no flag has so long a name$"):
        with_flagfiles(["--" + "x" * 60_000 + "=1"])
    assert with_flagfiles(["--x=" + "y" * 60_000, "y" * 60_000]) == ["--x=" + "y" * 60_000, "y" * 60_000]
