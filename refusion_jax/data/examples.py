"""Examples of text, parsed from records of JSON, bytes or tables; bad records carry a reason."""

import dataclasses
import functools

from etils import epath

from refusion_jax.cli.errors import is_unicode
from refusion_jax.distributed import json_input
from refusion_jax.distributed.json_input import JsonError, kind_of, parse_json

QUERY_FIELDS = ("query", "question", "prompt")
RESPONSE_FIELDS = ("response", "answer", "completion")
TEXT_FIELDS = ("text",)
MESSAGES_FIELD = "messages"
SYSTEM_FIELD = "system"  # beside a query: what a conversation begins with

OPENING = 1 << 12  # bytes of a text by which it is held out or not, however it is cut

Messages = tuple[tuple[str, str], ...]  # (role, content) of each turn


@dataclasses.dataclass(frozen=True)
class Line:
    """A line of a file that is read from `start` on; its line number in the file is counted only on demand."""

    path: str
    start: int  # byte at which reading began, itself the beginning of a line
    number: int  # from 1, counted from there

    def __str__(self) -> str:
        return f"{self.path}:{self.number + _lines_before(self.path, self.start)}"


@functools.lru_cache(maxsize=8)
def _lines_before(path: str, offset: int) -> int:
    found = 0
    with epath.Path(path).open("rb") as file:
        while offset > 0 and (block := file.read(min(offset, 1 << 20))):
            found += block.count(b"\n")
            offset -= len(block)
    return found


@dataclasses.dataclass(frozen=True)
class Example:
    """A prompt and its answer, or, with prompt None, a text for pretraining."""

    prompt: str | Messages | None
    response: str
    where: str | Line  # for messages, file:line
    starts: bool = True  # False in the later parts of a text that is read in several
    ends: bool = True  # False in all parts but the last
    opening: bytes = b""  # of a later part: the first OPENING bytes of the text


@dataclasses.dataclass(frozen=True)
class Bad:
    """An example that cannot be used, and why."""

    where: str | Line
    reason: str
    kind: str = "malformed"  # reasons are counted by it


@dataclasses.dataclass(frozen=True)
class Fields:
    """The JSON fields to read; an empty name stands for the known ones."""

    query: str = ""
    response: str = ""
    text: str = ""
    flag: str = "--config.data."  # how the flags that set them begin, for messages


def parse(raw: bytes, where: str | Line, fields: Fields) -> Example | Bad:
    """The example in a line of JSON."""
    item = load_json(raw, where)
    return item if isinstance(item, Bad) else to_example(item, where, fields)


def load_json(raw: bytes, where: str | Line) -> object:
    """The value, or Bad."""
    try:
        return parse_json(raw)
    except JsonError as error:
        return Bad(where, str(error), error.kind)


def decode(raw: bytes, where: str | Line) -> str | Bad:
    """The text, without a byte order mark, or Bad."""
    try:
        return json_input.decode(raw)
    except JsonError as error:
        return Bad(where, str(error), error.kind)


def to_example(item: object, where: str | Line, fields: Fields) -> Example | Bad:
    """The example in an object with text fields: a prompt and its answer, else messages, else a text.

    Where the user has named fields, only of the kinds that they belong to.
    """
    if not isinstance(item, dict):
        return Bad(where, f"must be an object with text fields, not {kind_of(item)}", "not an object")
    pair, any_kind = fields.query or fields.response, not (fields.query or fields.response or fields.text)
    if pair or any_kind:
        query = _field(item, fields.query, QUERY_FIELDS)
        response = _field(item, fields.response, RESPONSE_FIELDS)
        if query is not None and response is not None:
            system = item.get(SYSTEM_FIELD)
            if not all(isinstance(x, str) for x in (item[query], item[response], "" if system is None else system)):
                return Bad(where, "prompt and answer must be text", "not text")
            prompt = (("system", system), ("user", item[query])) if system else item[query]
            return checked(Example(prompt, item[response], where))
    if any_kind and MESSAGES_FIELD in item:
        return _from_messages(item[MESSAGES_FIELD], where)
    if (fields.text or any_kind) and (text := _field(item, fields.text, TEXT_FIELDS)) is not None:
        if not isinstance(item[text], str):
            return Bad(where, "prompt and answer must be text", "not text")
        return checked(Example(None, item[text], where))
    named = [f"{fields.flag}{kind}_field={name}" for kind, name in _named(fields) if name and name not in item]
    missing = f"no {', no '.join(named)}" if named else "no field we know"
    return Bad(
        where,
        f"{missing}; found: {_names(item)}; name them with {fields.flag}query_field and "
        f"{fields.flag}response_field, or {fields.flag}text_field",
        "no known field",
    )


def _named(fields: Fields) -> tuple[tuple[str, str], ...]:
    return ("query", fields.query), ("response", fields.response), ("text", fields.text)


def checked(example: Example) -> Example | Bad:
    """Refuses empty answers and characters that tokenizers do not accept."""
    if not example.response:
        return Bad(example.where, "the answer is empty", "empty answer")
    turns = [text for turn in example.prompt for text in turn] if isinstance(example.prompt, tuple) else []
    for text in (example.response, *(turns or [example.prompt or ""])):
        if not (text.isascii() or is_unicode(text)):
            return Bad(example.where, "holds half of a surrogate pair, which is no character", "not UTF-8")
    return example


def _from_messages(messages: object, where: str | Line) -> Example | Bad:
    """Takes the last turn, which must be the assistant's, as the answer and all turns before it as the prompt."""
    whole = isinstance(messages, list) and all(
        isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str) for m in messages
    )
    if not whole or len(messages) < 2 or messages[-1]["role"] != "assistant":
        reason = "messages must be a list of role and content, of which the last is the assistant's"
        return Bad(where, reason, "not a conversation")
    turns = tuple((m["role"], m["content"]) for m in messages)
    return checked(Example(turns[:-1], turns[-1][1], where))


def _names(item: dict) -> str:
    """The names of the fields found, shortened to one line and safe to print."""
    names = ", ".join(list(item)[:20]) or "none"
    return names.encode("ascii", "backslashreplace").decode()[:200]


def _field(item: dict, named: str, known: tuple[str, ...]) -> str | None:
    """The field to read: the one that the user named, or the first known one that exists."""
    for name in (named,) if named else known:
        if name in item:
            return name
    return None
