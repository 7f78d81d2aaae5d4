"""OpenAI's /v1/responses, for text and calls: converts the request to a chat, and the answer to its own form."""

import functools
import itertools
import json
import uuid
from collections.abc import AsyncIterator
from typing import Annotated, Any, Literal, Self

from fastapi import Request
from pydantic import Discriminator, Field, Tag, ValidationError, field_validator, model_validator

from refusion_jax.cli.errors import UserError
from refusion_jax.serving.conversation import MOST_PARTS, CalledFunction, Function, Named, text_of
from refusion_jax.serving.protocol import MOST_TOOLS, Chat, JsonSchema
from refusion_jax.serving.reply import Reply, to_json
from refusion_jax.serving.service import Service
from refusion_jax.serving.strict import Strict

# By the reason for which an answer ends.
_STATUS = {"stop": "completed", "tool_calls": "completed", "length": "incomplete", None: "in_progress"}
_AS_CHAT = {"max_output_tokens": "max_tokens"}
_AS_CHAT |= {name: name for name in ("model", "temperature", "top_p", "stream", "parallel_tool_calls")}


class Part(Strict):
    """A part of a message."""

    type: Literal["input_text", "output_text"]
    text: str
    annotations: list[Any] = Field(default_factory=list, max_length=MOST_PARTS)
    logprobs: list[Any] = Field(default_factory=list, description="As in an answer of ours; of no effect")


Content = str | Annotated[list[Part], Field(max_length=MOST_PARTS)]


class Item(Strict):
    """A turn of a conversation."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Content


class Call(CalledFunction):
    """An earlier call by the model."""

    type: Literal["function_call"]
    call_id: str


class Result(Strict):
    """The result of a call."""

    type: Literal["function_call_output"]
    call_id: str
    output: Content


def _type(item: Any) -> Any:
    return (item.get("type") if isinstance(item, dict) else None) or "message"


AnyItem = Annotated[
    Annotated[Item, Tag("message")]
    | Annotated[Call, Tag("function_call")]
    | Annotated[Result, Tag("function_call_output")],
    Discriminator(_type, "no_item", "must be a message, a function_call or a function_call_output"),
]


class OfFunction(Strict):
    """The only kind of tool. As the last base it is checked first, so that another kind is told as such."""

    type: Literal["function"]


class FlatTool(Function, OfFunction):
    """A function that the model may call."""


class FlatNamedTool(Named, OfFunction):
    """The function that must be called."""


class Format(JsonSchema):
    """The required form of the text; a schema is here without a wrapper."""

    type: Literal["text", "json_object", "json_schema"]


class Text(Strict):
    """The form of the text."""

    format: Format = Format(type="text")


class AsChat(Chat):
    """A request in the form of a chat, whose errors name the fields that the client has sent."""

    form, turns = "text.format", "input"


class TextRequest(Strict):
    """The body of POST /v1/responses; nothing is stored, so `input` must have all turns."""

    input: list[AnyItem] = Field(min_length=1, max_length=MOST_PARTS, description="Turns, or the text of a user's turn")
    instructions: str | None = Field(None, description="System message before the input")
    model: str | None = None
    max_output_tokens: int | None = Field(None, ge=1, le=2**24)
    temperature: float | None = Field(None, ge=0, le=1e4)
    top_p: float | None = Field(None, gt=0, le=1)
    stream: bool = False
    text: Text = Text()
    tools: list[FlatTool] = Field(default_factory=list, max_length=MOST_TOOLS, description="What the model may call")
    tool_choice: Literal["none", "auto", "required"] | FlatNamedTool = "auto"
    parallel_tool_calls: bool = True

    @field_validator("input", mode="before")
    @classmethod
    def _a_text_is_a_turn(cls, given: Any) -> Any:
        return [{"role": "user", "content": given}] if isinstance(given, str) else given

    @model_validator(mode="after")
    def _is_a_chat(self) -> Self:
        try:
            _ = self.chat
        except ValidationError as error:  # one sentence of it
            raise ValueError(error.errors(include_url=False)[0]["msg"].removeprefix("Value error, ")) from error
        return self

    @functools.cached_property
    def chat(self) -> Chat:
        turns = [{"role": "system", "content": self.instructions}] if self.instructions else []
        for item in self.input:
            if isinstance(item, Item):
                turns.append({"role": item.role, "content": text_of(item.content)})
            elif isinstance(item, Result):
                turns.append({"role": "tool", "tool_call_id": item.call_id, "content": text_of(item.output)})
            else:  # part of the assistant's last message
                if not turns or turns[-1]["role"] != "assistant":
                    turns.append({"role": "assistant", "content": ""})
                function = {"name": item.name, "arguments": json.dumps(item.arguments)}
                turns[-1].setdefault("tool_calls", []).append({"id": item.call_id, "function": function})
        wanted = {"type": self.text.format.type}
        if self.text.format.schema_ is not None:
            wanted["json_schema"] = {"schema": self.text.format.schema_}
        tools, choice = [_nested(tool) for tool in self.tools], self.tool_choice
        own = {chat: getattr(self, name) for name, chat in _AS_CHAT.items()}
        own |= {"tools": tools, "tool_choice": choice if isinstance(choice, str) else _nested(choice)}
        return AsChat.model_validate({"messages": turns, "response_format": wanted, **own})


class TextReply(Reply):
    """The answer to one request."""

    def __init__(self, service: Service, body: TextRequest):
        super().__init__(service, body.chat, "resp", "response", service.chat(body.chat))
        self._head["created_at"] = self._head.pop("created")
        self._head |= {"metadata": {}, "error": None}
        given = {"instructions", "temperature", "top_p", "tools", "tool_choice", "parallel_tool_calls"}
        self._head |= body.model_dump(include=given)

    def _response(self, output: list[dict[str, Any]], reason: str | None) -> dict[str, Any]:
        """The response so far; the reason for which the answer has ended, if it has."""
        usage = self._usage()
        counts = {"input_tokens": usage["prompt_tokens"], "output_tokens": usage["completion_tokens"]}
        counts |= {"input_tokens_details": usage["prompt_tokens_details"], "total_tokens": usage["total_tokens"]}
        counts |= {"output_tokens_details": {"reasoning_tokens": 0}}
        return self._head | {
            "status": _STATUS[reason],
            "incomplete_details": {"reason": "max_output_tokens"} if reason == "length" else None,
            "output": output,
            "usage": counts if reason else None,
        }

    async def respond(self, request: Request) -> dict[str, Any]:
        (choice,) = (await self.whole(request, lambda number, delta, scores: {"delta": delta}))["choices"]
        delta, reason = choice["delta"], choice["finish_reason"]
        output = [_message(delta.text, reason)] if delta.text or not delta.calls else []
        return self._response([*output, *map(_call, delta.calls)], reason)

    async def _events(self, *_: Any) -> AsyncIterator[bytes]:
        """The events that OpenAI's clients expect: one per piece of text, and one for the arguments of each call."""
        numbers, output, text, reason = itertools.count(), [], "", None

        def event(kind: str, **fields: Any) -> bytes:
            said = {"type": f"response.{kind}", "sequence_number": next(numbers), **fields}
            return f"event: response.{kind}\ndata: ".encode() + to_json(said) + b"\n\n"

        def added(item: dict[str, Any]) -> bytes:
            output.append(item)
            return event("output_item.added", output_index=len(output) - 1, item=item)

        def last() -> dict[str, Any]:
            return {"item_id": output[-1]["id"], "output_index": len(output) - 1}

        try:
            yield event("created", response=self._response([], None))
            spoken = None  # fields that name the message, once there is one
            async for _, delta in self._arriving():
                text, reason = text + delta.text, delta.finish_reason
                if spoken is None and (delta.text or (reason and not (output or delta.calls))):
                    yield added(_message("", None))
                    spoken = last() | {"content_index": 0}
                    yield event("content_part.added", **spoken, part=_part(""))
                if delta.text:
                    yield event("output_text.delta", **spoken, delta=delta.text, logprobs=[])
                for call in map(_call, delta.calls):
                    told = {name: call[name] for name in ("name", "arguments")}
                    yield added(call | {"arguments": "", "status": "in_progress"})
                    yield event("function_call_arguments.delta", **last(), delta=call["arguments"])
                    yield event("function_call_arguments.done", **last(), **told)
                    output[-1] = call
                    yield event("output_item.done", output_index=len(output) - 1, item=call)
            if spoken:
                yield event("output_text.done", **spoken, text=text, logprobs=[])
                yield event("content_part.done", **spoken, part=_part(text))
                at = spoken["output_index"]
                output[at] = _message(text, reason) | {"id": spoken["item_id"]}
                yield event("output_item.done", output_index=at, item=output[at])
            yield event(_STATUS[reason], response=self._response(output, reason))
        except (UserError, RuntimeError) as error:  # the status has been sent already
            failed = {"status": "failed", "error": {"code": "server_error", "message": str(error)}}
            yield event("failed", response=self._response(output, None) | failed)
        finally:
            self._forget()


def _nested(flat: FlatTool | FlatNamedTool) -> dict[str, Any]:
    """The form that it has in chats."""
    return {"type": "function", "function": flat.model_dump(exclude={"type"}, exclude_unset=True)}


def _message(text: str, reason: str | None) -> dict[str, Any]:
    """An item of the output; the reason for which the answer has ended, if it has."""
    item = {"id": f"msg_{uuid.uuid4().hex}", "type": "message", "role": "assistant", "status": _STATUS[reason]}
    return item | {"content": [_part(text)] if reason else []}


def _call(call: dict[str, Any]) -> dict[str, Any]:
    """An item of the output, from a call in the form that it has in chats."""
    item = {"id": f"fc_{uuid.uuid4().hex}", "type": "function_call", "status": "completed", "call_id": call["id"]}
    return item | call["function"]


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
