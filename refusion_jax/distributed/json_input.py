"""The one reader of JSON that strangers have written: prompts, examples, manifests, configs, logs.

Beyond what `json` refuses: other text than UTF-8, a key that stands twice in an object, deep nesting, numbers of
thousands of digits, halves of surrogate pairs, and values of another type than declared. Lines end at a newline only:
U+2028, U+2029 and U+0085 may stand inside a string.
"""

import codecs
import contextlib
import dataclasses
import json
import math
import re
import types
import typing
from collections.abc import Iterator
from typing import Any, TypeVar

from etils import epath

from refusion_jax.cli.errors import UserError
from refusion_jax.cli.paths import is_remote
from refusion_jax.distributed.storage import open_patiently, read_file

DEEPEST = 64  # objects and lists inside each other
LONGEST_LINE = 16 << 20  # bytes; a line is read whole

_MAY_BE_HALF_A_PAIR = re.compile(r"\\u[dD][89a-fA-F]")
_T = TypeVar("_T")


class JsonError(ValueError):
    """Why something is not JSON as we take it, in a few words; reasons are counted by `kind`."""

    def __init__(self, reason: str, kind: str = "not JSON"):
        super().__init__(reason)
        self.kind = kind


def parse_json(raw: bytes) -> Any:
    """The value that some bytes hold.

    Raises:
      JsonError: where it is not JSON, not UTF-8, repeats a key or is nested too deeply.
    """
    text = decode(raw)
    try:
        value = json.loads(text, object_pairs_hook=_unique)
    except JsonError:
        raise
    except RecursionError as error:
        raise JsonError(f"not JSON: more than {DEEPEST} levels deep") from error
    except ValueError as error:
        is_number = "digits" in str(error)
        raise JsonError("not JSON: a number of thousands of digits" if is_number else f"not JSON: {error}") from error
    if text.count("[") + text.count("{") > DEEPEST and is_deep(value):
        raise JsonError(f"not JSON: more than {DEEPEST} levels deep")
    return value


def decode(raw: bytes) -> str:
    """The text, without a byte order mark.

    Raises:
      JsonError: where it is not UTF-8.
    """
    try:
        return raw.removeprefix(codecs.BOM_UTF8).decode()  # five times as fast as "utf-8-sig"
    except UnicodeDecodeError as error:
        raise JsonError(f"not UTF-8: byte {error.start}: {error.reason}", "not UTF-8") from error


def parse_text(raw: bytes) -> Any:
    """As `parse_json`, of which every string can be written again.

    Raises:
      JsonError: also where a string holds half of a surrogate pair.
    """
    value = parse_json(raw)
    if _MAY_BE_HALF_A_PAIR.search(raw.decode("latin-1")):
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise JsonError("holds half of a surrogate pair, which is no character", "not UTF-8") from error
    return value


def parse_log(content: bytes | str) -> Iterator[Any]:
    """The values in a log of ours, one a line; what a kill or a lost disk has cut off, or is no JSON, is left out."""
    for line in (content.encode() if isinstance(content, str) else content).split(b"\n"):
        with contextlib.suppress(JsonError):
            yield parse_json(line)


def read_lines(path: epath.PathLike) -> Iterator[tuple[int, bytes]]:
    """(number from 1, bytes) of each line that is not blank.

    Raises:
      UserError: where the file cannot be read, or a line is too long.
    """
    try:
        if epath.Path(path).is_dir():  # else a pipe will do: lines end
            raise UserError(f"{path} cannot be read: it is a directory")
        with epath.Path(path).open("rb") if is_remote(path) else open(path, "rb", opener=open_patiently) as file:
            number = 0
            while line := file.readline(LONGEST_LINE):
                number += 1
                if len(line) == LONGEST_LINE and not line.endswith(b"\n"):
                    raise UserError(f"{path}:{number}: longer than {LONGEST_LINE >> 20} MiB")
                if line.removeprefix(codecs.BOM_UTF8).strip():
                    yield number, line
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from error


def read_object(path: epath.PathLike) -> dict[str, Any]:
    """The object that a file holds.

    Raises:
      UserError: naming the file and what is wrong with it.
    """
    try:
        value = parse_text(read_file(path))
    except JsonError as error:
        raise UserError(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise UserError(f"{path} cannot be read: it must hold an object, not {kind_of(value)}")
    return value


def build(owner: type[_T], content: Any) -> _T:
    """A dataclass from an object with its fields.

    Numbers must be finite, integers fit in 64 bits, and names without a NUL.

    Raises:
      JsonError: naming the field that is missing, unknown, or of another type than declared.
    """
    return _typed(owner, content, "it")


def build_list(kind: Any, content: Any) -> list:
    """A list of values of one type, from a list.

    Raises:
      JsonError: naming the place that holds another type.
    """
    return _typed(list[kind], content, "it")


def _typed(wanted: Any, value: Any, name: str) -> Any:
    """The value as the type of an annotation."""
    origin, of = typing.get_origin(wanted), typing.get_args(wanted)
    if dataclasses.is_dataclass(wanted):
        if not isinstance(value, dict):
            raise JsonError(f"{name} must be an object, not {kind_of(value)}")
        own = {f.name: f for f in dataclasses.fields(wanted)}
        needed = {key for key, f in own.items() if f.default is f.default_factory is dataclasses.MISSING}
        for keys, what in (
            (value.keys() - own.keys(), "is no key that we know"),
            (needed - value.keys(), "is missing"),
        ):
            if keys:
                raise JsonError(f"{min(keys)!r} {what}")
        kinds = typing.get_type_hints(wanted)
        return wanted(**{key: _typed(kinds[key], own_value, key) for key, own_value in value.items()})
    if origin is dict and isinstance(value, dict):
        return {key: _typed(of[1], x, f"{name}.{key}") for key, x in value.items()}
    if origin in (tuple, list) and isinstance(value, list):
        return origin(_typed(of[0], x, f"{name}[{i}]") for i, x in enumerate(value))
    if origin is types.UnionType and value is None and type(None) in of:
        return None
    if wanted is float and type(value) in (int, float) and _is_finite(value):
        return float(value)
    if wanted is int and type(value) is int and -(2**63) <= value < 2**63:
        return value
    if wanted is str and type(value) is str and "\0" not in value:
        return value
    if wanted is bool and type(value) is bool:
        return value
    words = {int: "an integer of at most 64 bits", float: "a finite number", str: "a string", bool: "true or false"}
    raise JsonError(f"{name} must be {words.get(wanted, 'an object' if origin is dict else 'a list')}")


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond the range of a float
        return False


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise JsonError(f"not JSON: the key {twice[:60]!r} stands there twice")
    return made


def is_deep(value: Any) -> bool:
    """Whether objects and lists are nested more than DEEPEST deep."""
    level = [value]
    for _ in range(DEEPEST + 1):
        inner = [x for x in level if isinstance(x, dict | list)]
        level = [child for x in inner for child in (x.values() if isinstance(x, dict) else x)]
        if not inner:
            return False
    return True


def kind_of(value: object) -> str:
    """What JSON calls it."""
    return {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}.get(
        type(value), "a number"
    )
