"""The rules of the house, held by reading the source."""

import ast
import graphlib
import re
from pathlib import Path

import pytest
from conftest import ROOT

PACKAGE = ROOT / "refusion_jax"
MODULES = sorted(PACKAGE.rglob("*.py"))

# Imports run one way: never to the left, and never in a circle. A name stands for a module or for its whole folder.
GROUPS = [
    {"errors", "cli", "storage", "distributed", "preemption", "events", "profiling"},
    {"chips", "sharding", "xla_options", "config"},
    {"slots", "objectives", "model", "data", "flops", "optimizer"},
    {"train_step", "checkpoints", "workdir", "metrics", "decoding", "huggingface", "pretrained", "prompts"},
    {"program", "planning", "benchmarks"},
    {
        *("train", "generate", "train_tokenizer", "quickstart", "convert", "prepare", "inspect_data", "bench"),
        *("goodput", "plan"),
    },  # the commands, which nothing imports
]


def name(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts)


def imports(path: Path) -> set[str]:
    """Modules of ours that a file imports."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "refusion_jax":
            for alias in node.names:
                full = f"{node.module}.{alias.name}".removeprefix("refusion_jax.")
                is_module = (PACKAGE / (full.replace(".", "/") + ".py")).exists()
                found.add(full if is_module else node.module.removeprefix("refusion_jax."))
    return found


def group(module: str) -> int:
    return next(i for i, names in enumerate(GROUPS) if module in names or module.split(".")[0] in names)


def test_imports_run_one_way():
    graph = {name(path): imports(path) for path in MODULES if path.name != "__init__.py"}
    for module, imported in graph.items():
        for other in imported:
            assert group(other) <= group(module), f"{module} imports {other}"
            assert other not in GROUPS[-1], f"{module} imports the command {other}"
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError


@pytest.mark.parametrize("path", MODULES, ids=name)
def test_files_are_small_and_say_what_they_are_for(path):
    text = path.read_text()
    assert len(text.splitlines()) < 300
    if text:
        assert ast.get_docstring(ast.parse(text)), "no docstring"


def test_training_can_be_read_in_an_evening_and_decoding_in_another():
    training = [PACKAGE / "slots.py", PACKAGE / "objectives.py", PACKAGE / "train_step.py", PACKAGE / "train.py"]
    for core in ([*training, *(PACKAGE / "model").glob("*.py")], (PACKAGE / "decoding").glob("*.py")):
        assert sum(len(path.read_text().splitlines()) for path in core) < 1500


@pytest.mark.parametrize("path", MODULES, ids=name)
def test_data_is_never_run_as_code(path):
    """No pickle, no eval, no shell."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            assert not {alias.name.split(".")[0] for alias in node.names} & {
                "pickle",
                "subprocess",
                "shelve",
                "marshal",
            }
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id not in ("eval", "exec", "compile", "__import__")


def test_public_functions_and_classes_are_explained():
    for path in MODULES:
        for node in ast.parse(path.read_text()).body:
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
        "orbax-checkpoint": "orbax",
        "ml-collections": "ml_collections",
    }
    for package, line in wanted.items():
        assert ">=" in line, line
        assert "<" in line, line
        assert re.search(rf"^(import|from) {modules.get(package, package)}\b", source, re.MULTILINE), (
            f"{package} is unused"
        )
