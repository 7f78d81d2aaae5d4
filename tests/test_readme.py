"""Commands of README.md and of the folders' READMEs, and notebooks, are run as they are written, but made small."""

import dataclasses
import importlib.util
import inspect
import json
import os
import pkgutil
import pydoc
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import FORKS, QUICK_COMPILE, ROOT, TINY_RUN, all_but, serving
from helpers import tiny_qwen3

from refusion_jax.benchmarks import __path__ as benchmarks
from refusion_jax.systems.registry import find_decoder

README = ROOT / "README.md"
READMES = sorted(path for top in ("launch", "refusion_jax") for path in (ROOT / top).rglob("README.md"))


RESULTS = sorted((ROOT / "refusion_jax" / "benchmarks" / "results").glob("*.md"))


def blocks(document: Path, language: str) -> list[str]:
    """The code of a document in one language."""
    return re.findall(rf"```{language}\n(.*?)```", document.read_text(), re.DOTALL)


def commands(*documents: Path) -> list[str]:
    """In the order of the documents, each once, however many documents show it."""
    lines = [line for document in documents for block in blocks(document, "bash") for line in block.splitlines()]
    return list(dict.fromkeys(line.split(" #")[0].strip() for line in lines))


COMMANDS = commands(README, *READMES)
CLIENTS = [c for c in COMMANDS if c.startswith("curl ")]  # of a server
OURS = [
    c
    for c in COMMANDS
    if ".serve " not in c and re.search(r"python -m (refusion_jax\.|pytest )|launch/(local_hosts|tpu_vm)", c)
]
WRITES = [command for command in COMMANDS if command.startswith("echo ")]  # input for the others
FILES = [  # (path in the checkout, code) of the files that a document has its reader write
    found
    for readme in READMES
    for found in re.findall(r"Put this into\s`(\S+)`.*?```python\n(.*?)```", readme.read_text(), re.S)
]
SCRIPTS = [
    pytest.param(code, id=str(document.relative_to(ROOT)), marks=() if document == README else pytest.mark.thorough)
    for document in (README, *READMES)
    for code in blocks(document, "python")
    if code not in dict(FILES).values()
]

SMALLER = [flag for flag in TINY_RUN if not flag.startswith("--config=")]
SMALLER += ["--config.steps=6", "--config.checkpoint.every=3", "--config.row_length=128"]
SMALLER_BENCH = ["max_new_tokens=16", "serial_blocks=2", "slot_size=4"]
SHARED_PROGRAMS = ("JAX_COMPILATION_CACHE_DIR", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS")  # most compile the same
CHEAP_TESTS = "'one_shot and (never_seen or own_key or plain_reference)'"  # the others compile more


@pytest.fixture(scope="module")
def user(tmp_path_factory, trained_run):
    """A checkout as a user's who has run the quickstart, has text of their own, and follows every document."""
    home = tmp_path_factory.mktemp("user")
    for name in ("configs", "launch", "tests", "pyproject.toml"):
        (home / name).symlink_to(ROOT / name)
    link_all(ROOT / "refusion_jax", home / "refusion_jax", real={"systems"})
    for path, code in FILES:
        (home / path).write_text(code)
    (home / "runs").mkdir()
    shutil.copytree(trained_run, home / "runs" / "quickstart")
    (home / "prompts.jsonl").write_text('{"prompt": "Sort 3 1."}\n{"prompt_ids": [1, 7, 9]}\n')
    for command in WRITES:
        shell(command, home)
    (home / "my").mkdir()
    tiny_qwen3(home / "Qwen3-0.6B")
    lines = "".join(f'{{"query": "What is {i}?", "response": "It is the number {i}."}}\n' for i in range(300))
    (home / "my" / "a.jsonl").write_text(lines)
    return home


def link_all(source: Path, target: Path, real: set[str] = frozenset()) -> None:
    """A folder of links to what is in another one; those named in `real` are folders of links themselves."""
    target.mkdir()
    for path in source.iterdir():
        if path.name in real:
            link_all(path, target / path.name)
        elif path.name != "__pycache__":
            (target / path.name).symlink_to(path)


def shell(command: str, home) -> str:
    env = user_environment(home)
    done = subprocess.run(["bash", "-c", command], cwd=home, env=env, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def user_environment(home) -> dict[str, str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "JAX_"))}
    env |= {name: os.environ[name] for name in SHARED_PROGRAMS}
    return env | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": QUICK_COMPILE, "PYTHONPATH": str(home), "PYTHON": sys.executable}


def run_quickly(command: str, home) -> str:
    """As the shell does, but where it is one of our commands and needs nothing of the reader's own code, in a fork.

    What `plan` compiles is compiled in a process that imports the reader's.
    """
    ours = re.fullmatch(rf"(?:XLA_FLAGS=(\S+) )?{sys.executable} -m refusion_jax\.((?!plan ).*)", command)
    needs_a_shell = set("|&;<>$`") & set(re.sub("'[^']*'", "", command))
    if not ours or needs_a_shell or any(Path(path).stem in command for path, _ in FILES):
        return shell(command, home)
    name, *flags = shlex.split(ours[2])
    env = user_environment(home)
    env["XLA_FLAGS"] += f" {ours[1] or ''}"
    ended = FORKS.ask(name, flags, env, directory=home)
    assert ended["code"] == 0, f"{command}\n{ended['out']}\n{ended['err']}"
    return ended["out"]


def test_the_two_commands_are_the_ones_that_ci_and_the_quickstart_test_run():
    others = [c for c in COMMANDS if c not in (*OURS, *WRITES, *CLIENTS)]
    elsewhere = ["bash launch/quickstart.sh", "bash launch/test.sh"]
    assert [c for c in others if not re.match("lm_eval |python -m refusion_jax.serve ", c)] == elsewhere
    assert "bash launch/test.sh" in (ROOT / ".ci" / "run").read_text()


def short(command: str) -> str:
    """What a test of a command is called; pytest numbers those that share a name."""
    return re.search(r"refusion_jax\.(\w+)|pytest|local_hosts|tpu_vm", command)[0]


@pytest.mark.parametrize("command", all_but(commands(README), OURS), ids=short)
def test_a_command_works_as_written(command, user):
    if ".plan " in command and importlib.util.find_spec("libtpu") is None:
        pytest.skip("needs the TPU compiler: pip install libtpu (Linux)")
    small = command.replace("python -m", f"{sys.executable} -m")
    if ".train " in command or "local_hosts" in command:
        own = {flag.split("=")[0] for flag in command.split()}
        small += " " + " ".join(flag for flag in SMALLER if flag.split("=")[0] not in own)
        small += " --config.model.num_attention_heads=4" if "tensor=2" in command else ""
        small += " --config.decay_steps=1" if "configs/small.py" in command else ""
        small += " --config.model.vocab_size=512 --config.data.on_error=skip"
    if ".plan " in command:
        small += " --config.model.num_hidden_layers=1 --config.model.hidden_size=1024 --config.row_length=512"
        small += " --config.model.intermediate_size=1024 --config.model.vocab_size=8192 --topology=v5e:2x2"
    if ".bench decode" in command:
        small += "".join(f" --decode.{setting}" for setting in SMALLER_BENCH)
        small += " --prompts_per_row=1 --repeats=1 --batch_sizes=2"
    if ".inspect_data --config" in command:
        small += " --config.data.examples=500 --config.batch_size=8"  # as the run was trained
    if ".quickstart " in command:
        small += " --problems=3"
    if "pytest" in command:
        small += f" -q -k {CHEAP_TESTS}"
    small = small.replace("--vocab_size=8192", "--vocab_size=400").replace("row_length=1024", "row_length=128")
    assert run_quickly(small, user).strip()


@pytest.fixture(scope="module")
def server(user):
    """The address of the server that the README starts."""
    (command,) = (c for c in COMMANDS if ".serve " in c)
    with serving(*command.split()[3:], "--decode.batch_size=8", directory=user) as address:
        yield address


def skip_without_grammars(code):
    if re.search("structured_outputs|response_format", code):
        pytest.importorskip("llguidance", reason="pip install llguidance for answers under a grammar")


@pytest.mark.parametrize("command", CLIENTS)
@pytest.mark.thorough
def test_a_client_is_answered(command, server, user):
    skip_without_grammars(command)
    answer = shell(command.replace("http://127.0.0.1:8000", server), user)
    assert json.loads(answer.removeprefix("data: ").splitlines()[0])["choices"]


@pytest.mark.parametrize("code", SCRIPTS)
def test_a_python_example_works(code, user, request):
    skip_without_grammars(code)
    if "127.0.0.1:8000" in code:
        code = code.replace("http://127.0.0.1:8000", request.getfixturevalue("server"))
    ended = FORKS.ask("-c", [code], user_environment(user), directory=user)
    assert ended["code"] == 0, ended["err"]
    assert ended["out"].strip()


def test_the_first_readme_is_short_and_links_to_every_other():
    text = README.read_text()
    assert len(text.splitlines()) <= 150
    for readme in READMES:
        assert f"]({readme.relative_to(ROOT)})" in text, f"README.md does not lead to {readme}"


def test_the_page_of_benchmarks_is_one_screen_and_leads_to_every_result():
    text = (ROOT / "BENCHMARKS.md").read_text()
    assert len(text.splitlines()) <= 40
    for page in RESULTS:
        assert f"]({page.relative_to(ROOT)})" in text, f"BENCHMARKS.md does not lead to {page}"
        said = page.read_text()
        for needed in ("Measured: ", "ommit", "achine", "```bash"):
            assert needed in said, f"{page} does not tell when, at which commit, where and how it was measured"


@pytest.mark.parametrize("page", RESULTS, ids=lambda page: page.stem)
def test_a_page_names_the_commit_of_a_benchmark_that_is_gone(page):
    text = " ".join(page.read_text().split())
    today = {module.name for module in pkgutil.iter_modules(benchmarks)}
    for name in set(re.findall(r"refusion_jax\.bench (\w+)", text)) - today:
        commit, said = r"\b[0-9a-f]{7,8}\b", f"`bench {name}`"
        assert re.search(rf"{commit}[^.]*{said}|{said}[^.]*{commit}", text), f"{page} names no commit for {said}"


@pytest.mark.parametrize(
    "flags", sorted({f for page in RESULTS for f in re.findall(r"pytest\s+([^`#\n;]+)", page.read_text())})
)
@pytest.mark.thorough
def test_what_a_page_has_pytest_run_is_there(flags):
    if "beam" in flags:
        pytest.importorskip("apache_beam", reason="pip install -e '.[beam]'")
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    command = [sys.executable, "-m", "pytest", "--collect-only", "-p", "no:cacheprovider", *shlex.split(flags)]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-300:]


def anchors(document: Path) -> set[str]:
    """What links into a document may name: its headings, as GitHub spells them."""
    headings = re.findall(r"^#+ (.*)$", document.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize(
    "document", [README, ROOT / "BENCHMARKS.md", *READMES, *RESULTS], ids=lambda path: str(path.relative_to(ROOT))
)
def test_every_link_leads_to_what_is_there(document):
    prose = re.sub(r"```.*?```", "", document.read_text(), flags=re.DOTALL)
    for link in re.findall(r"\]\((?!https?:)([^)]+)\)", prose):
        name, _, anchor = link.partition("#")
        target = document.parent / name if name else document
        assert target.exists(), f"{document} links to {link}"
        assert not anchor or anchor in anchors(target), f"{document} links to {link}"


def words(text: str) -> set[str]:
    return set(re.findall(r"\w+", text))


SOURCES = [path for top in ("refusion_jax", "launch", "tests") for path in (ROOT / top).rglob("*.*")]
NAMED = words(" ".join(path.read_text() for path in SOURCES if path.suffix in (".py", ".sh", ".html", ".json")))


@pytest.mark.parametrize("document", [README, *READMES], ids=lambda path: str(path.relative_to(ROOT)))
def test_flags_keys_and_settings_that_prose_names_are_in_the_code(document):
    """One that was renamed is found: its name, or a part of it, is in no source any more."""
    prose, known = re.sub(r"```.*?```", "", document.read_text(), flags=re.DOTALL), NAMED.copy()
    known.update(*map(words, blocks(document, "python")))
    for name in re.findall(r"`(?:--(?:no)?)?([a-z][a-z0-9_.]*)(?:=[^`]*)?`", prose):
        assert words(name) <= known, f"{document} names {name}"


def test_the_table_of_decode_settings_is_that_of_the_decoders():
    """Each decoder that a row lists has the row's setting, with the default that it states."""
    page, listed = (ROOT / "refusion_jax/decoding/README.md").read_text(), []
    for name, what, decoders in re.findall(r"^\| `(\w+)` \| ([^|]+) \| (the same|`[^|]+`) \|$", page, re.MULTILINE):
        listed = listed if decoders == "the same" else re.findall(r"`(\w+)`", decoders)
        for decoder in listed:
            own = {field.name: field.default for field in dataclasses.fields(find_decoder(decoder).settings)}
            assert name in own, f"{decoder} has no {name}"
            for default in re.findall(r"default (\d\.\d|\d)", what):
                assert str(own[name]) == default, f"{decoder} has {name}={own[name]}"
    assert listed


NOTEBOOKS = sorted((ROOT / "launch" / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_what_a_notebook_takes_from_the_package_is_there(path):
    """Also in the text that it has other processes run."""
    code = "\n".join("".join(cell["source"]) for cell in json.loads(path.read_text())["cells"])
    for module, names in re.findall(r"^from (refusion_jax\S*) import (.+)$", code, re.MULTILINE):
        for name in names.split(", "):
            found = pydoc.locate(f"{module}.{name}")
            assert found, f"{module} has no {name}"
            for attribute in re.findall(rf"\b{name}\.(\w+)", code) if inspect.ismodule(found) else ():
                assert hasattr(found, attribute), f"{module}.{name} has no {attribute}"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of Jupyter's libraries
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_from_top_to_bottom(path, tmp_path):
    """In a kernel of its own, made small by its parameters."""
    reason = "pip install -e '.[notebooks]'"
    nbformat, nbclient = (pytest.importorskip(name, reason=reason) for name in ("nbformat", "nbclient"))
    pytest.importorskip("ipykernel", reason=reason)
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    (place,) = [i for i, cell in enumerate(notebook.cells) if "parameters" in cell.metadata.get("tags", [])]
    small = f"RUNS = {str(tmp_path)!r}\nSTEPS = 200\nPROBLEMS = 8"
    notebook.cells.insert(place + 1, nbformat.v4.new_code_cell(small))
    client = nbclient.NotebookClient(notebook, timeout=900, resources={"metadata": {"path": str(ROOT)}})
    client.execute()  # raises what a cell raises
    assert all(cell.outputs for cell in notebook.cells if re.search(r"^ *run\(", cell.source, re.MULTILINE))
    written = {path.name for path in tmp_path.iterdir()}
    assert written >= {"first_hour": {"answer.html", "exported"}, "your_own_objective": {"holes", "ar"}}[path.stem]
