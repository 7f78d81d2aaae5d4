"""The wheel: it has all that the package has, and is enough to use it."""

import os
import re
import subprocess
import sys
import zipfile

import pytest
from conftest import ROOT, TINY_RUN

import refusion_jax
from refusion_jax.cli.command import find_config

LEFT_OUT = re.compile(r"README\.md|.*\.(svg|png)|benchmarks/results/.*")  # documents, which are read in a checkout


def done(line: list[object], **how) -> str:
    found = subprocess.run([*map(str, line)], capture_output=True, text=True, **how)
    assert found.returncode == 0, f"{line}\n{found.stdout}\n{found.stderr}"
    return found.stdout


def test_the_newest_change_is_of_this_version():
    changes = (ROOT / "refusion_jax" / "CHANGELOG.md").read_text()
    assert re.search(r"^## (\S+)", changes, re.MULTILINE)[1] == refusion_jax.__version__


def test_a_config_that_is_not_here_is_the_one_of_the_package(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert (
        find_config("--config=configs/quickstart.py:llada")
        == f"--config={ROOT / 'refusion_jax' / 'configs' / 'quickstart.py'}:llada"
    )
    for other in ("--config=configs/none.py", "--output=configs/quickstart.py", "--config=mine.py", "-h"):
        assert find_config(other) == other
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "quickstart.py").touch()
    assert find_config("--config=configs/quickstart.py:llada") == "--config=configs/quickstart.py:llada"


@pytest.mark.slow  # downloads what the package needs
def test_a_wheel_in_an_empty_environment_trains_and_decodes_from_another_directory(tmp_path):
    done([sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", tmp_path, ROOT])
    (wheel,) = tmp_path.glob("refusion_jax-*.whl")
    assert wheel.name.split("-")[1] == refusion_jax.__version__
    held = {name.removeprefix("refusion_jax/") for name in zipfile.ZipFile(wheel).namelist()}
    tracked = done(["git", "ls-files", "refusion_jax", "configs"], cwd=ROOT).split()
    wanted = {name.removeprefix("refusion_jax/") for name in tracked} - {"configs"}
    assert {name for name in wanted if not LEFT_OUT.search(name)} <= held

    done([sys.executable, "-m", "venv", tmp_path / "empty"])
    binaries = tmp_path / "empty" / "bin"
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "XLA_FLAGS")}
    how = {"cwd": tmp_path, "env": env | {"JAX_PLATFORMS": "cpu"}}
    done([binaries / "pip", "install", "--quiet", wheel], **how)
    place = done([binaries / "python", "-c", "import refusion_jax; print(refusion_jax.__file__)"], **how)
    assert place.startswith(str(tmp_path / "empty"))
    done([binaries / "refusion", "train", *TINY_RUN, "--workdir=run"], **how)
    out = done([binaries / "refusion", "quickstart", "--workdir=run", "--problems=3", "--decode.slot_size=4"], **how)
    assert "3 held-out problems" in out
    assert (tmp_path / "run" / "decodings.html").exists()
