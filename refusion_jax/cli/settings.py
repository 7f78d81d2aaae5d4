"""Declarations of settings: each once, with its default, its meaning and the values it may have.

Config keys and decode settings are both declared this way; `--help`, checks and errors follow from the declaration.
"""

import dataclasses
import functools
import operator
import sys
from typing import Any

from refusion_jax.cli.errors import SettingError
from refusion_jax.cli.paths import names_no_store


@dataclasses.dataclass(frozen=True)
class Setting:
    """One setting. Its type is that of its default; a float may be given as an int, and must be finite.

    Limits of a tuple are those of its elements, whole numbers of which there is at least one.
    With `or_number` it is one of the choices or a whole number from 0 to 2^31 - 1, as an int or in digits.
    """

    default: Any
    help: str
    choices: tuple = ()
    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None
    or_number: bool = False

    def check(self, group: str, name: str, value: Any) -> None:
        """Refuses a value that is not of the type, finite, within the limits, and one of the choices."""
        why = self._fault(value)
        if why:
            raise SettingError(group, name, value, why)

    def schema(self, value: Any) -> dict[str, Any]:
        """The JSON Schema of a number, text or bool, with this value as its default."""
        kinds = {bool: "boolean", int: "integer", float: "number", str: "string"}
        found = {"type": kinds[type(self.default)], "default": value, "description": self.help}
        limits = {"minimum": self.at_least, "maximum": self.at_most}
        limits |= {"exclusiveMinimum": self.above, "exclusiveMaximum": self.below}
        if self.choices and not self.or_number:
            limits["enum"] = self.choices
        return found | {name: limit for name, limit in limits.items() if limit is not None}

    def _fault(self, value: Any) -> str | None:
        if self.or_number and len(str(value)) <= 10 and str(value).isdecimal() and int(value) < 2**31:
            return None
        kind = type(self.default)
        wanted = (int, float) if kind is float else (list, tuple) if kind is tuple else kind
        if not isinstance(value, wanted) or (isinstance(value, bool) and kind is not bool):
            return f"must be of type {kind.__name__}"
        if kind is float and not -sys.float_info.max <= value <= sys.float_info.max:
            return "must be finite"
        if kind is str and value != value.encode(errors="replace").decode():
            return "must be text in UTF-8"
        if kind is str and (why := names_no_store(value)):
            return why
        if self.choices and value not in self.choices:
            return (
                f"unknown; known: {', '.join(map(str, self.choices))}{', or a whole number' if self.or_number else ''}"
            )
        if kind is tuple and self.at_most is not None:
            if value and all(type(x) is int and self.at_least <= x <= self.at_most for x in value):
                return None
            example = ",".join(map(str, self.default))
            return f"must be one or more whole sizes of {self.at_least} to {self.at_most}, such as ({example})"
        for limit, holds, words in (
            (self.at_least, operator.ge, "at least"),
            (self.above, operator.gt, "above"),
            (self.at_most, operator.le, "at most"),
            (self.below, operator.lt, "below"),
        ):
            if limit is not None and not holds(value, limit):
                return f"must be {words} {limit:g}" if isinstance(limit, float) else f"must be {words} {limit}"
        return None


def setting(default: Any, help: str, *, scope: str = "row", **limits: Any) -> Any:
    """A field of a dataclass of settings.

    Its `scope` is "row" if each request of a batch may have its own value, "compiled" if all requests that share a
    compiled program must agree, "batch" if it applies to the whole call. The other arguments are those of `Setting`.
    """
    declared = Setting(default, help, **limits)
    return dataclasses.field(default=default, metadata={"setting": declared, "scope": scope})


@functools.cache
def declared(owner: type) -> dict[str, Setting]:
    """The settings that a dataclass declares by `setting`, by name."""
    return {f.name: f.metadata["setting"] for f in dataclasses.fields(owner) if "setting" in f.metadata}


def scope(owner: type, name: str) -> set[str]:
    """Names of a dataclass's settings with this scope."""
    return {f.name for f in dataclasses.fields(owner) if f.metadata.get("scope") == name}
