"""The rules of the house, held by reading the source."""

import ast
import functools
import graphlib
import re
import subprocess
from pathlib import Path

import pytest
from conftest import ROOT

from refusion_jax.systems import registry

PACKAGE = ROOT / "refusion_jax"
MODULES = sorted(PACKAGE.rglob("*.py"))

# Imports run one way: a room imports itself and the rooms before it. Commands, alone at the top, import everything.
ROOMS = [
    *("cli", "distributed", "batch", "data", "model", "decoding", "systems", "checkpoints"),
    *("config", "evaluation", "serving", "training", "planning", "split", "benchmarks"),
]


TOP = {
    *("refusion_jax", "configs", "launch", "tests", "requirements.txt", "README.md", "BENCHMARKS.md", "LICENSE"),
    *("pyproject.toml", ".ci", ".github", ".gitignore", ".pre-commit-config.yaml"),
}


def test_the_top_level_holds_what_it_is_agreed_to_hold():
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("no checkout by git")
    assert {line.split("/")[0] for line in listed.stdout.splitlines()} <= TOP


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def name(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")


def imports(path: Path) -> set[str]:
    """Modules of ours that a file imports."""
    found = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "refusion_jax":
            for alias in node.names:
                full = f"{node.module}.{alias.name}".removeprefix("refusion_jax.")
                file = PACKAGE / full.replace(".", "/")
                is_module = file.with_suffix(".py").exists() or (file / "__init__.py").exists()
                found.add(full if is_module else node.module.removeprefix("refusion_jax."))
    return found


def is_command(module: str) -> bool:
    return "." not in module and module not in ROOMS


def test_imports_run_one_way():
    graph = {name(path): imports(path) for path in MODULES if path != PACKAGE / "__init__.py"}
    for module, imported in graph.items():
        for other in imported:
            assert not is_command(other), f"{module} imports the command {other}"
            if not is_command(module):
                here, there = (ROOMS.index(m.split(".")[0]) for m in (module, other))
                assert there <= here, f"{module} imports {other}"
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError


def test_tests_import_one_command_at_most():
    """Commands have flags of the same names, which a process can define once; a worker imports every test."""
    imported = {other for path in (ROOT / "tests").glob("*.py") for other in imports(path) if is_command(other)}
    assert len(imported - {PACKAGE.name}) <= 1, imported


def test_the_top_level_holds_commands_alone():
    for path in PACKAGE.glob("*.py"):
        assert path.name == "__init__.py" or 'if __name__ == "__main__":' in path.read_text(), f"{path} is no command"


def test_files_say_what_they_are_for():
    for path in MODULES:
        assert not path.read_text() or ast.get_docstring(tree_of(path)), f"{name(path)} has no docstring"


# Generated code is run, when the user says so, in a process that is shut in; drills and comparisons start runs.
STARTS_PROCESSES = ("evaluation.sandbox", "training.faults", "benchmarks.headline.runs", "benchmarks.serve")


def test_data_is_never_run_as_code():
    """No pickle, no eval, no shell."""
    for path, node in ((module, node) for module in MODULES for node in ast.walk(tree_of(module))):
        if isinstance(node, ast.Import):
            imported = {alias.name.split(".")[0] for alias in node.names}
            assert not imported & {"pickle", "shelve", "marshal"}, name(path)
            assert "subprocess" not in imported or name(path) in STARTS_PROCESSES, name(path)
        if isinstance(node, ast.keyword):
            assert node.arg != "shell", name(path)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id not in ("eval", "exec", "compile", "__import__"), name(path)


def test_public_functions_and_classes_are_explained():
    for path in MODULES:
        for node in tree_of(path).body:
            public = isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_")
            if public and node.name not in ("main", "decode"):
                assert ast.get_docstring(node), f"{name(path)}.{node.name}"


def test_every_requirement_has_a_range_and_is_used():
    wanted = {
        re.split(r"[><=]", line)[0]: line
        for line in (ROOT / "requirements.txt").read_text().splitlines()
        if line and not line.startswith("#")
    }
    source = "".join(path.read_text() for path in MODULES)
    modules = {
        "absl-py": "absl",
        "etils[epath]": "etils",
        "google-crc32c": "google_crc32c",
        "orbax-checkpoint": "orbax",
        "ml-collections": "ml_collections",
    }
    for package, line in wanted.items():
        assert ">=" in line, line
        assert "<" in line, line
        assert re.search(rf"^(import|from) {modules.get(package, package)}\b", source, re.MULTILINE), (
            f"{package} is unused"
        )


def test_a_system_is_named_in_its_own_room_alone():
    """No shared room has the name of a system, a decoder or a section as a value: it asks the system."""
    systems = registry.systems().values()
    named = {word for s in systems for word in (s.name, s.section, *s.decoders)} - {""}
    rooms = {f"systems.{system.name}" for system in systems}
    for path in MODULES:
        if any(name(path) == room or name(path).startswith(f"{room}.") for room in rooms):
            continue
        tree = tree_of(path)
        docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            is_text = isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings
            assert not (is_text and node.value in named), f"{name(path)}:{node.lineno} names {node.value}"
