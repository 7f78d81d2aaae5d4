"""The turns of a conversation and the functions that a model may call, as in OpenAI's API."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, Json, model_validator

from refusion_jax.serving.strict import Strict

MOST_PARTS = 1024  # limit for parts of a message, messages of a conversation, and texts to choose from
_NAME = r"^[a-zA-Z0-9_.-]{1,128}$"  # of a function


class TextPart(Strict):
    """A part of a message."""

    type: Literal["text"]
    text: str


class Function(Strict):
    """A function that the model may call."""

    name: str = Field(pattern=_NAME)
    description: str = ""
    parameters: dict[str, Any] = Field(default_factory=dict, description="A JSON Schema of an object")
    strict: bool = True


class Tool(Strict):
    """A function, wrapped as by OpenAI."""

    type: Literal["function"]
    function: Function


class Named(Strict):
    """The name of a function."""

    name: str


class NamedTool(Strict):
    """The function that must be called."""

    type: Literal["function"]
    function: Named


class CalledFunction(Strict):
    """A function that was called before."""

    name: str
    arguments: Json[dict[str, Any]] = Field(description="A JSON object, as text")


class ToolCall(Strict):
    """An earlier call by the model; templates take its arguments as an object."""

    id: str = ""
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(Strict):
    """A turn of a conversation; `developer` is the new name of `system`."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], Field(max_length=MOST_PARTS)] = ""
    tool_calls: list[ToolCall] = Field(default_factory=list, max_length=MOST_PARTS)
    tool_call_id: str | None = Field(None, description="Id of the call whose result this is")

    @model_validator(mode="after")
    def _something_is_said(self) -> Self:
        if "content" not in self.model_fields_set and not self.tool_calls:
            raise ValueError("content: is missing")
        return self

    @property
    def turn(self) -> dict[str, Any]:
        """The turn in the form of chat templates, with the content as one text."""
        turn = {"role": "system" if self.role == "developer" else self.role, "content": text_of(self.content)}
        if self.tool_calls:
            turn["tool_calls"] = [call.model_dump() for call in self.tool_calls]
        return turn | ({"tool_call_id": self.tool_call_id} if self.tool_call_id else {})


def text_of(content: str | list[Any]) -> str:
    """The text of a content, which may consist of parts."""
    return content if isinstance(content, str) else "".join(part.text for part in content)
