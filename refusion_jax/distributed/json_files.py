"""Reads JSON, a file or a file with one value per line, as the type that the caller declares.

The type can be any that pydantic supports: a dataclass, a model, dict[str, Any]. Types are strict ("3" is not a
number), and fields that a type does not declare are refused.
"""

import codecs
import functools
import json
from collections.abc import Iterator
from typing import Any, Literal, TypeVar

import pydantic
from etils import epath

from refusion_jax.cli.errors import UserError
from refusion_jax.distributed.storage import opened, read_file

_T = TypeVar("_T")
_adapter = functools.cache(pydantic.TypeAdapter)


def read_json(
    path: epath.PathLike, kind: type[_T] = dict[str, Any], extra: Literal["forbid", "ignore"] = "forbid"
) -> _T:
    """The value in a file, which may have undeclared fields with extra="ignore"; UserError names file and field."""
    return parse_json(read_file(path), kind, f"{path} cannot be read", extra)


def read_json_lines(path: epath.PathLike) -> Iterator[tuple[int, dict[str, Any]]]:
    """(number from 1, object) of each non-blank line of a file.

    Only newlines end lines: U+2028, U+2029 and U+0085 may occur inside a string.
    """
    with opened(path) as file:
        for number, line in enumerate(file, 1):
            if line.removeprefix(codecs.BOM_UTF8).strip():
                yield number, parse_json(line, dict[str, Any], f"{path}:{number}")


def parse_json(content: bytes, kind: type[_T], where: str, extra: Literal["forbid", "ignore"] = "forbid") -> _T:
    """The value in UTF-8 bytes, with or without a byte order mark.

    UserError if it is not JSON, or not of this kind; it names `where`, the field, and what it must be.
    """
    try:
        return _adapter(kind).validate_json(content.removeprefix(codecs.BOM_UTF8), strict=True, extra=extra)
    except pydantic.ValidationError as error:
        raise UserError(f"{where}: {validation_fault(error)}") from error


def validation_fault(error: pydantic.ValidationError) -> str:
    """The first field at fault, if it is one, and what it must be."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    newer = "is unknown to this version; a newer one may have written it"
    said = newer if first["type"] == "unexpected_keyword_argument" else first["msg"].removeprefix("Value error, ")
    return ": ".join(filter(None, (".".join(map(str, first["loc"])), said)))


def to_type(value: Any, kind: type[_T], where: str, extra: Literal["forbid", "ignore"] = "forbid") -> _T:
    """As `parse_json`, for a value that is already parsed."""
    return parse_json(json.dumps(value).encode(), kind, where, extra)
