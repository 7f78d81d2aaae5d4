"""Where text comes from: built-in problems, the standard library's source code, or the user's files.

Whatever the source, it becomes a stream of `Example`s. A bad one (malformed line, missing field, empty answer) is an
error that names file and line, or with on_error="skip" it is counted and left out.
"""

import dataclasses
import glob
import json
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import ml_collections

from refusion_jax.data import tasks
from refusion_jax.errors import UserError

QUERY_FIELDS = ("query", "question", "prompt")
RESPONSE_FIELDS = ("response", "answer", "completion")
TEXT_FIELDS = ("text",)


@dataclasses.dataclass(frozen=True)
class Example:
    """A prompt and its answer, or (prompt None) a text for pure pretraining."""

    prompt: str | None
    response: str
    where: str  # file:line, for messages


@dataclasses.dataclass(frozen=True)
class Bad:
    """An example that cannot be used, and why."""

    where: str
    reason: str


def read_examples(data: ml_collections.ConfigDict, seed: int) -> Iterator[Example | Bad]:
    """All examples of `config.data`, in a fixed order.

    Args:
      data: the run's `config.data`.
      seed: of generated problems.

    Raises:
      UserError: where there is no such file, or nothing in it.
    """
    if data.path == "tasks":
        for index, problem in enumerate(tasks.problems("train", data.examples, seed)):
            yield Example(problem.query, problem.response, f"tasks:{index}")
        return
    for path in _files(data.path):
        yield from _read_file(path, data)


def _files(pattern: str) -> list[Path]:
    if pattern == "stdlib":
        root = Path(sysconfig.get_path("stdlib"))
        skipped = {"site-packages", "test", "tests", "idle_test", "lib2to3", "__pycache__"}
        return [p for p in sorted(root.rglob("*.py")) if not skipped & set(p.relative_to(root).parts)]
    paths = [Path(p) for p in sorted(glob.glob(pattern, recursive=True))]
    files = [p for p in paths if p.is_file()]
    if not files:
        kind = "is a directory; give a glob such as DIR/*.jsonl" if paths else "does not exist"
        raise UserError(f"--config.data.path: {pattern} {kind} (built in: tasks, stdlib)")
    return files


def _read_file(path: Path, data: ml_collections.ConfigDict) -> Iterator[Example | Bad]:
    if path.stat().st_size == 0:
        if data.path != "stdlib":  # which has empty __init__.py files
            yield Bad(str(path), "the file is empty")
    elif path.suffix == ".jsonl":
        with path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield _parse(line, f"{path}:{number}", data)
    elif path.suffix == ".json":
        yield from _read_list(path, data)
    else:
        text = _decode(path.read_bytes(), str(path))
        yield text if isinstance(text, Bad) else Example(None, text, str(path))


def _read_list(path: Path, data: ml_collections.ConfigDict) -> Iterator[Example | Bad]:
    items = _load_json(path.read_bytes(), str(path))
    if isinstance(items, Bad):
        yield items
    elif not isinstance(items, list):
        yield Bad(str(path), f"a .json file must hold a list of objects, not {_kind(items)}; one a line is .jsonl")
    else:
        for number, item in enumerate(items, 1):
            yield _to_example(item, f"{path}: item {number}", data)


def _parse(line: bytes, where: str, data: ml_collections.ConfigDict) -> Example | Bad:
    item = _load_json(line, where)
    return item if isinstance(item, Bad) else _to_example(item, where, data)


def _load_json(raw: bytes, where: str) -> object:
    text = _decode(raw, where)
    if isinstance(text, Bad):
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        return Bad(where, f"not JSON: {error}")


def _decode(raw: bytes, where: str) -> str | Bad:
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        return Bad(where, f"not UTF-8: byte {error.start}: {error.reason}")


def _to_example(item: object, where: str, data: ml_collections.ConfigDict) -> Example | Bad:
    if not isinstance(item, dict):
        return Bad(where, f"must be an object with text fields, not {_kind(item)}")
    query = _field(item, data.query_field, QUERY_FIELDS)
    response = _field(item, data.response_field, RESPONSE_FIELDS)
    text = _field(item, data.text_field, TEXT_FIELDS)
    if query and response:
        prompt, response = item[query], item[response]
    elif text:
        prompt, response = None, item[text]
    else:
        return Bad(
            where,
            f"no field we know; found: {', '.join(item) or 'none'}; name them with --config.data.query_field and "
            f"--config.data.response_field, or --config.data.text_field",
        )
    if not isinstance(response, str) or not isinstance(prompt, str | None):
        return Bad(where, "prompt and answer must be text")
    if not response:
        return Bad(where, "the answer is empty")
    return Example(prompt, response, where)


def _field(item: dict, named: str, known: tuple[str, ...]) -> str | None:
    """The field to read: the one the user named, else the first known one that is there."""
    candidates = (named,) if named else known
    return next((name for name in candidates if name in item), None)


def _kind(value: object) -> str:
    return {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}.get(
        type(value), "a number"
    )
