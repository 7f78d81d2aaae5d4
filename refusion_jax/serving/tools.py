"""Tool calls: how a model calls functions, how its calls are read, and whether its chat template knows them.

The format is that of Qwen and Hermes: a call is `<tool_call>`, a JSON object of `name` and `arguments`, `</tool_call>`.
"""

import dataclasses
import json
import uuid
from collections.abc import Sequence
from typing import Any

import pydantic

from refusion_jax.cli.errors import UserError
from refusion_jax.data.interface import Tokenizer
from refusion_jax.decoding.stops import Stops
from refusion_jax.serving.writer import Delta

BEGIN, END = "<tool_call>", "</tool_call>"
_BEGINNING = Stops((BEGIN,))


class _Call(pydantic.BaseModel):
    """The object between the two tags."""

    model_config = pydantic.ConfigDict(strict=True)

    name: str
    arguments: dict[str, Any]


class CallReader:
    """Extracts the calls from an answer while it is written; text that is not a valid call stays text."""

    def __init__(self, names: Sequence[str], are_several: bool):
        """Begins an answer that may call these functions, only once unless `are_several`."""
        self._names, self._are_several = names, are_several
        self._held, self._count = "", 0  # text that may belong to a call; number of calls so far

    def read(self, delta: Delta) -> Delta:
        """The next delta, with its calls separated, and without text that may be the beginning of a call."""
        self._held += delta.text
        text, calls, is_last = "", [], delta.finish_reason is not None
        while True:
            before, begin, after = self._held.partition(BEGIN)
            body, end, rest = after.partition(END)
            if not begin or not (end or is_last):
                break
            self._held, function = rest, self._read(body)
            text += before + begin + body + end if function is None else before.rstrip()
            if function and (self._are_several or not self._count):
                call = {"index": self._count, "id": f"call_{uuid.uuid4().hex}", "type": "function"}
                calls.append(call | {"function": function})
                self._count += 1
        certain = self._held if is_last else _BEGINNING.without_beginning(self._held.partition(BEGIN)[0])
        if not is_last or (self._count and not certain.strip()):
            certain = certain.rstrip()  # the line's end before a call
        text, self._held = text + certain, self._held[len(certain) :]
        reason = "tool_calls" if self._count and delta.finish_reason == "stop" else delta.finish_reason
        return dataclasses.replace(delta, text=text, calls=calls, finish_reason=reason)

    def _read(self, body: str) -> dict[str, str] | None:
        """The function's name and its arguments as text; None if the text does not call a known function."""
        try:
            call = _Call.model_validate_json(body)
            arguments = json.dumps(call.arguments, ensure_ascii=False, allow_nan=False)
        except ValueError:
            return None
        return {"name": call.name, "arguments": arguments} if call.name in self._names else None


def check_template(tokenizer: Tokenizer) -> None:
    """Raises UserError if the tokenizer's chat template has no functions, or calls in another format."""
    tools = [{"type": "function", "function": {"name": name, "description": "", "parameters": {}}} for name in "fg"]
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    text, calls = "", []
    if tokenizer.has_chat_template:
        text = tokenizer.render_chat(turns, tools=tools)
        (ids,) = tokenizer.encode_chat([text])
        calls = CallReader("f", are_several=True).read(Delta(tokenizer.decode(ids), "stop")).calls
    if [one["function"] for one in calls] != [{"name": "f", "arguments": '{"a": 1}'}] or '"g"' not in text:
        raise UserError(f"tools: this model has no chat template that describes them with calls in {BEGIN}{END}")
