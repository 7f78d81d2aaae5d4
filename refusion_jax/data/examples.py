"""Examples of text, from records of JSON or tables; records that cannot be used carry a reason.

A record is the first of these whose fields it has: a prompt and its answer; Alpaca's instruction, input and output; a
conversation; a text.
"""

import codecs
import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal

import pydantic
from etils import epath

from refusion_jax.cli.errors import UserError
from refusion_jax.distributed.json_files import parse_json, validation_fault

QUERY_FIELDS = ("query", "question", "prompt")
RESPONSE_FIELDS = ("response", "answer", "completion")
TEXT_FIELDS = ("text",)
CONVERSATION_FIELDS = ("messages", "conversations")
SYSTEM_FIELD = "system"  # the beginning of a prompt or conversation
ALPACA_FIELDS = ("instruction", "input", "output")
# Answers are based on these, which the model would not see: OpenOrca has the third, Dolly and SQuAD the last.
LOST_FIELDS = ("tools", "history", "system_prompt", "context")
KNOWN_FIELDS = {*QUERY_FIELDS, *RESPONSE_FIELDS, *TEXT_FIELDS, *CONVERSATION_FIELDS, SYSTEM_FIELD}
KNOWN_FIELDS |= {*ALPACA_FIELDS, *LOST_FIELDS}
OPENING = 1 << 12  # bytes of a text that decide whether it is held out, however it is cut

Messages = tuple[tuple[str, str], ...]  # (role, content) of each turn


@dataclasses.dataclass(frozen=True)
class Line:
    """A line of a file read from `start` on; its line number in the file is counted only on demand."""

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
    where: str | Line  # file:line, for messages
    starts: bool = True  # False in the later parts of a text that is read in several
    ends: bool = True  # False in all parts but the last
    opening: bytes = b""  # for later parts: the first OPENING bytes of the text; for all answers: their conversation
    url: str = ""  # its source, if the record has one
    language: str = ""  # its code, if detected

    @property
    def texts(self) -> list[str]:
        prompt = self.prompt or ()
        return [*([prompt] if isinstance(prompt, str) else (text for _, text in prompt)), self.response]

    @property
    def characters(self) -> int:
        return sum(map(len, self.texts))

    def map(self, change: Callable[[str], str]) -> "Example":
        prompt = self.prompt
        if prompt is not None:
            is_text = isinstance(prompt, str)
            prompt = change(prompt) if is_text else tuple((role, change(text)) for role, text in prompt)
        return dataclasses.replace(self, prompt=prompt, response=change(self.response))


@dataclasses.dataclass(frozen=True)
class Bad:
    """An example that cannot be used, and why."""

    where: str | Line
    reason: str
    kind: str = "malformed"  # reasons are counted by it
    by_filter: bool = False  # left out on purpose; the reason is then its beginning


@dataclasses.dataclass(frozen=True)
class Fields:
    """Which parts of a record to read; an empty field name stands for the known names."""

    query: str = ""
    response: str = ""
    text: str = ""
    flag: str = "--config.data."  # prefix of the flags that set them, for messages
    turns: str = "last"  # which turns of a conversation are answers: last | all


class _Part(pydantic.BaseModel):
    type: Literal["text"]
    text: str


_UNREAD = ("tool_calls", "function_call", "reasoning_content", "thinking")  # of a turn


class _Turn(pydantic.BaseModel):
    """A turn of a conversation, in OpenAI's format or in ShareGPT's."""

    @pydantic.model_validator(mode="before")
    @classmethod
    def _nothing_is_lost(cls, turn: Any) -> Any:
        """Refuses fields without which a model would learn a different text; null fields are left out."""
        if not isinstance(turn, dict):
            raise ValueError("must be an object")
        if lost := next((name for name in _UNREAD if turn.get(name)), None):
            raise ValueError(f"{lost} would be left out; write it into the content")
        if turn.get("weight") not in (None, 1):
            raise ValueError(f"weight={turn['weight']!r:.60} would be left out; of turns that are trained it is 1")
        return {name: value for name, value in turn.items() if value is not None}

    role: str = pydantic.Field(validation_alias=pydantic.AliasChoices("role", "from"))
    content: str | list[_Part] = pydantic.Field(validation_alias=pydantic.AliasChoices("content", "value"))

    @property
    def pair(self) -> tuple[str, str]:
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return _ROLES.get(self.role, self.role), text


_TALK = "not a conversation"  # a kind of Bad
_MOST_TURNS = 1000  # if all answers are trained: each one holds all turns before it
_ROLES = {"human": "user", "gpt": "assistant"}  # ShareGPT's
_TURNS = pydantic.TypeAdapter(list[_Turn])


def load_json(raw: bytes, where: str | Line) -> Any:
    """The value, or Bad."""
    try:
        return parse_json(raw, Any, "not JSON")
    except UserError as error:
        return Bad(where, str(error), "not JSON")


def decode(raw: bytes, where: str | Line) -> str | Bad:
    """The text, without a byte order mark, or Bad."""
    try:
        return raw.removeprefix(codecs.BOM_UTF8).decode()  # five times as fast as "utf-8-sig"
    except UnicodeDecodeError as error:
        return Bad(where, f"not UTF-8: byte {error.start}: {error.reason}", "not UTF-8")


def to_examples(item: Any, where: str | Line, fields: Fields) -> list[Example | Bad]:
    """The examples in a record: one, or one for each answer of a conversation.

    If the user has named fields, only the kinds with these fields are read. A null field counts as missing.
    """
    if not isinstance(item, dict):
        return [Bad(where, "must be an object with text fields", "not an object")]
    item, given = {name: value for name, value in item.items() if value is not None}, item
    any_kind = not (fields.query or fields.response or fields.text)
    if any_kind or fields.query or fields.response:
        query = _field(item, fields.query, QUERY_FIELDS)
        response = _field(item, fields.response, RESPONSE_FIELDS)
        if query is not None and response is not None:
            return _from_pair(item, item[query], item[response], where, fields)
    if any_kind and {"instruction", "output"} <= item.keys():
        parts = item["instruction"], item.get("input", "")
        query = "\n\n".join(filter(None, parts)) if all(isinstance(part, str) for part in parts) else None
        return _from_pair(item, query, item["output"], where, fields)
    if any_kind and (name := _field(item, "", CONVERSATION_FIELDS)) is not None:
        return _from_turns(item, item[name], where, fields)
    if (fields.text or any_kind) and (name := _field(item, fields.text, TEXT_FIELDS)) is not None:
        url = item.get("url")
        return [checked(None, item[name], where, url=url if isinstance(url, str) else "")]
    named = {"query": fields.query, "response": fields.response, "text": fields.text}
    absent = [f"{fields.flag}{kind}_field={name}" for kind, name in named.items() if name and name not in item]
    missing = f"no {', no '.join(absent)}" if absent else "no field we know"
    hint = f"name them with {fields.flag}query_field and {fields.flag}response_field, or {fields.flag}text_field"
    return [Bad(where, f"{missing}; found: {_names(given)}; {hint}", "no known field")]


def checked(prompt: str | Messages | None, response: Any, where: str | Line, **parts: Any) -> Example | Bad:
    """An example, or Bad if its answer is empty or not text; `parts` are its further fields."""
    if not isinstance(response, str):
        return Bad(where, "prompt and answer must be text", "not text")
    if not response:
        return Bad(where, "the answer is empty", "empty answer")
    return Example(prompt, response, where, **parts)


def _from_pair(item: dict, query: Any, response: Any, where: str | Line, fields: Fields) -> list[Example | Bad]:
    """A prompt and its answer, either of which may be given as turns."""
    system = item.get(SYSTEM_FIELD)
    if response == []:
        return [checked(None, "", where)]
    if isinstance(query, list) or isinstance(response, list):
        before = query if isinstance(query, list) else [{"role": "user", "content": query}]
        after = response if isinstance(response, list) else [{"role": "assistant", "content": response}]
        return _from_turns(item, before + after, where, fields)
    if not isinstance(query, str) or not isinstance(system, str | None):
        return [Bad(where, "prompt and answer must be text", "not text")]
    if why := _loss(item):
        return [Bad(where, why, _TALK)]
    return [checked((("system", system), ("user", query)) if system else query, response, where)]


def _from_turns(item: dict, turns: Any, where: str | Line, fields: Fields) -> list[Example | Bad]:
    """The last turn, which must be the assistant's, or all of the assistant's turns, each with all turns before it."""
    if why := _loss(item):
        return [Bad(where, why, _TALK)]
    system = item.get(SYSTEM_FIELD)
    if system and isinstance(turns, list):
        turns = [{"role": "system", "content": system}, *turns]
    try:
        turns = tuple(turn.pair for turn in _TURNS.validate_python(turns))
    except pydantic.ValidationError as error:
        return [Bad(where, f"not a conversation: turn {validation_fault(error)}", _TALK)]
    answers = [at for at, (role, _) in enumerate(turns) if at and role == "assistant"]
    if not answers or answers[-1] != len(turns) - 1:
        found = f", not {turns[-1][0]!r:.60}" if turns else ""
        return [Bad(where, f"the last of several turns must be the assistant's{found}", _TALK)]
    if fields.turns == "all" and len(turns) > _MOST_TURNS:
        return [Bad(where, f"has {len(turns):,} turns; of at most {_MOST_TURNS:,} all answers are trained", _TALK)]
    chosen = answers if fields.turns == "all" else answers[-1:]
    together = "\n".join(text for _, text in turns).encode() if len(chosen) > 1 else b""
    return [checked(turns[:at], turns[at][1], where, opening=together) for at in chosen]


def _loss(item: dict) -> str:
    """Why a record cannot be used: its answers depend on a field that the model would not see; empty if it can."""
    lost = next((name for name in LOST_FIELDS if item.get(name) not in (None, [], "", "[]")), None)
    return f"{lost} would be left out; write what it says into messages" if lost else ""


def _names(item: dict) -> str:
    """The names of the fields found, shortened."""
    found = (name if value is not None else f"{name} of null" for name, value in list(item.items())[:20])
    return ", ".join(found)[:200] or "none"


def _field(item: dict, named: str, known: tuple[str, ...]) -> str | None:
    """The field to read: the one that the user named, or the first known one that exists."""
    return next((name for name in ((named,) if named else known) if name in item), None)
