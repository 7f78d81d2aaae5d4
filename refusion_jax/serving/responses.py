"""OpenAI's /v1/responses, for text: the request as a chat, and the answer in its own form."""

import itertools
import json
import uuid
from collections.abc import AsyncIterator
from typing import Annotated, Any, Literal, Self

from fastapi import Request
from pydantic import Field, ValidationError, model_validator

from refusion_jax.cli.errors import UserError
from refusion_jax.serving.jobs import BusyError
from refusion_jax.serving.protocol import Chat, JsonSchema
from refusion_jax.serving.reply import Reply
from refusion_jax.serving.service import Service
from refusion_jax.serving.strict import Strict

_MOST_PARTS = 1024
_STATUS = {"stop": "completed", "length": "incomplete", None: "in_progress"}  # by the reason for which an answer ends
_AS_CHAT = {"max_output_tokens": "max_tokens"} | {name: name for name in ("model", "temperature", "top_p", "stream")}


class Part(Strict):
    """A part of a message."""

    type: Literal["input_text", "output_text"]
    text: str
    annotations: list[Any] = Field(default_factory=list, max_length=_MOST_PARTS)


class Item(Strict):
    """A turn of a conversation."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[Part], Field(max_length=_MOST_PARTS)]
    id: str = ""
    status: str = ""


class Format(JsonSchema):
    """What the text has to be; a schema stands here itself."""

    type: Literal["text", "json_object", "json_schema"]


class Text(Strict):
    """How the text is wanted."""

    format: Format = Format(type="text")


class TextRequest(Strict):
    """The body of POST /v1/responses; nothing is stored, so that `input` has all turns."""

    input: str | Annotated[list[Item], Field(min_length=1, max_length=_MOST_PARTS)]
    instructions: str | None = Field(None, description="Of the system, before the input")
    model: str | None = None
    max_output_tokens: int | None = Field(None, ge=1, le=2**24)
    temperature: float | None = Field(None, ge=0, le=1e4)
    top_p: float | None = Field(None, gt=0, le=1)
    stream: bool = False
    text: Text = Text()

    @model_validator(mode="after")
    def _is_a_chat(self) -> Self:
        try:
            _ = self.chat
        except ValidationError as error:  # one sentence of it
            raise ValueError(error.errors(include_url=False)[0]["msg"].removeprefix("Value error, ")) from error
        return self

    @property
    def chat(self) -> Chat:
        """The same as a chat."""
        items = [Item(role="user", content=self.input)] if isinstance(self.input, str) else self.input
        turns = [{"role": "system", "content": self.instructions}] if self.instructions else []
        for item in items:
            parts = [item.content] if isinstance(item.content, str) else [part.text for part in item.content]
            turns.append({"role": item.role, "content": "".join(parts)})
        wanted = {"type": self.text.format.type}
        if self.text.format.schema_ is not None:
            wanted["json_schema"] = {"schema": self.text.format.schema_}
        own = {chat: getattr(self, name) for name, chat in _AS_CHAT.items()}
        return Chat.model_validate({"messages": turns, "response_format": wanted, **own})


class TextReply(Reply):
    """The answer to one request."""

    def __init__(self, service: Service, body: TextRequest, chat: Chat):
        super().__init__(service, chat, "resp", "response", service.chat(chat))
        self._item = {"id": f"msg_{uuid.uuid4().hex}", "type": "message", "role": "assistant"}
        self._head["created_at"] = self._head.pop("created")
        self._head |= {"instructions": body.instructions, "temperature": body.temperature, "top_p": body.top_p}
        self._head |= {"metadata": {}, "error": None, "tools": [], "tool_choice": "none", "parallel_tool_calls": False}

    def _response(self, text: str, reason: str | None) -> dict[str, Any]:
        """The response so far; the reason for which the answer has ended, if it has."""
        usage = self._usage()
        counts = {"input_tokens": usage["prompt_tokens"], "output_tokens": usage["completion_tokens"]}
        counts |= {"input_tokens_details": usage["prompt_tokens_details"], "total_tokens": usage["total_tokens"]}
        counts |= {"output_tokens_details": {"reasoning_tokens": 0}}
        return self._head | {
            "status": _STATUS[reason],
            "incomplete_details": {"reason": "max_output_tokens"} if reason == "length" else None,
            "output": [self._message(text, reason)] if reason else [],
            "usage": counts if reason else None,
        }

    def _message(self, text: str, reason: str | None) -> dict[str, Any]:
        return self._item | {"status": _STATUS[reason], "content": [_part(text)] if reason else []}

    async def respond(self, request: Request) -> dict[str, Any]:
        """The whole response."""
        (choice,) = (await self.whole(request, lambda number, delta, scores: {"text": delta.text}))["choices"]
        return self._response(choice["text"], choice["finish_reason"])

    async def _events(self, *_: Any) -> AsyncIterator[str]:
        """As OpenAI's clients expect them; one event for each piece of text."""
        place = {"item_id": self._item["id"], "output_index": 0, "content_index": 0}
        numbers, text, reason = itertools.count(), "", None

        def event(kind: str, **fields: Any) -> str:
            said = {"type": f"response.{kind}", "sequence_number": next(numbers), **fields}
            return f"event: response.{kind}\ndata: {json.dumps(said, ensure_ascii=False)}\n\n"

        try:
            yield event("created", response=self._response("", None))
            yield event("output_item.added", output_index=0, item=self._message("", None))
            yield event("content_part.added", **place, part=_part(""))
            async for _, delta, _ in self._arriving():
                text, reason = text + delta.text, delta.finish_reason
                if delta.text:
                    yield event("output_text.delta", **place, delta=delta.text, logprobs=[])
            yield event("output_text.done", **place, text=text, logprobs=[])
            yield event("content_part.done", **place, part=_part(text))
            yield event("output_item.done", output_index=0, item=self._message(text, reason))
            kind = "completed" if reason == "stop" else "incomplete"
            yield event(kind, response=self._response(text, reason))
        except (UserError, BusyError, RuntimeError) as error:  # the status has been sent already
            failed = {"status": "failed", "error": {"code": "server_error", "message": str(error)}}
            yield event("failed", response=self._response(text, None) | failed)
        finally:
            self._forget()


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
