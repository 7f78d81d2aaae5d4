"""Request bodies of OpenAI's API, with decode settings as further fields."""

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from refusion_jax.decoding.prompts import is_id_list
from refusion_jax.serving.conversation import MOST_PARTS, Message, NamedTool, Tool
from refusion_jax.serving.strict import Strict

_MOST_CHOICES = 1024  # answers in a response
MOST_TOOLS = 128
MOST_SCORED = 20  # most probable tokens with their log-probabilities, as with OpenAI
_ANY_OBJECT = {"type": "object"}


class StreamOptions(Strict):
    """What a stream has in addition to the answers."""

    include_usage: bool = False
    continuous_usage_stats: bool = Field(False, description="Every event reports the usage so far")


class JsonSchema(Strict):
    """A JSON Schema, wrapped as by OpenAI; answers always follow it, `strict` or not."""

    schema_: dict[str, Any] | None = Field(None, alias="schema")
    name: str = ""
    description: str = ""
    strict: bool = True


class ResponseFormat(Strict):
    """The required form of an answer, by OpenAI's name."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(Strict):
    """The required form of an answer, by vLLM's name."""

    json_: dict[str, Any] | str | None = Field(None, alias="json")
    regex: str | None = None
    choice: list[str] | None = Field(None, min_length=1, max_length=MOST_PARTS)
    json_object: bool = False


class _Body(Strict):
    """The fields that completions and chats share."""

    form: ClassVar = "response_format"  # the client's name for that field

    model: str | None = Field(None, description="The name in /v1/models, or nothing")
    max_tokens: int | None = Field(
        None, ge=0, le=2**24, description="Tokens of the answer, at most; by default the server's decode.max_new_tokens"
    )
    min_tokens: int = Field(0, ge=0, description="The answer does not end before this many tokens")
    ignore_eos: bool = Field(False, description="The answer does not end before max_tokens tokens")
    temperature: float | None = Field(None, ge=0, le=1e4, description="By default the server's: 0, greedy")
    top_p: float | None = Field(None, gt=0, le=1)
    seed: int | None = Field(
        None,
        ge=0,
        lt=2**63,
        description="Seed of sampling: the same request gets the same answer; the reply reports the seed used",
    )
    n: int = Field(1, ge=1, le=_MOST_CHOICES, description="Answers to each prompt, each with its own noise")
    stop: list[Annotated[str, Field(max_length=256)]] | None = Field(  # searched for in every row repeatedly
        None, max_length=16, description="A text, or texts, before which the answer ends"
    )
    stream: bool = Field(False, description="Send the answer in pieces, as server-sent events")
    stream_options: StreamOptions | None = None
    top_k: int | None = Field(None, ge=-1, lt=2**31, description="Sample from this many tokens; 0 or -1: from all")
    decode: dict[str, Any] = Field(
        default_factory=dict, description="Settings of the decoder for this request, such as slot_threshold"
    )
    commits: bool = Field(
        False, description="Report every committed token as [position, token], in the order of commitment"
    )
    watch: bool = Field(
        False, description="Send an event after each forward, with `forwards` and what it committed as [place, text]"
    )

    @field_validator("seed")
    @classmethod
    def _seeds_have_32_bits(cls, seed: int | None) -> int | None:
        return seed and seed % 2**32

    @field_validator("stop", mode="before")
    @classmethod
    def _one_stop_is_a_list(cls, stop: Any) -> Any:
        return [stop] if isinstance(stop, str) else stop

    response_format: ResponseFormat | None = Field(None, description="text, JSON, or JSON of a schema")
    structured_outputs: StructuredOutputs | None = Field(None, description="json, regex, choice or json_object")

    @property
    def constraints(self) -> list[tuple[str, str, Any]]:
        """(field, kind, value) of all fields that constrain an answer, in the form of `Grammars.compile`."""
        given = []
        if own := self.structured_outputs:
            of_kind = {"json": own.json_, "regex": own.regex, "choice": own.choice}
            given = [(f"structured_outputs.{kind}", kind, value) for kind, value in of_kind.items()]
            given.append(("structured_outputs.json_object", "json", _ANY_OBJECT if own.json_object else None))
        if (own := self.response_format) and own.type != "text":
            schema = own.json_schema and own.json_schema.schema_
            given.append((self.form, "json", _ANY_OBJECT if own.type == "json_object" else schema))
        return [one for one in given if one[2] is not None]

    @model_validator(mode="after")
    def _answers_can_be_so(self) -> Self:
        fields = [field for field, *_ in self.constraints]
        if len(fields) > 1:
            raise ValueError(f"{fields[1]}: {fields[0]} says already what the answer has to be; give one of them")
        if self.response_format and self.response_format.type == "json_schema" and not fields:
            raise ValueError(f"{self.form}: json_schema without a schema")
        if self.watch and not self.stream:
            raise ValueError("watch: is for a stream")
        return self


class Completion(_Body):
    """The body of POST /v1/completions."""

    prompt: Any = Field(description="A text, token ids, or a list of either")
    suffix: str | None = Field(
        None, description="Text after the answer, which then has exactly max_tokens tokens; not with every decoder"
    )
    add_special_tokens: bool = Field(
        True, description="Begin each prompt with the token that began every text in training, unless it does already"
    )
    echo: bool = Field(False, description="Begin the answer with the prompt")
    logprobs: int | None = Field(
        None,
        ge=0,
        le=MOST_SCORED,
        description="With so many of the most probable tokens at each place. Slots are scored in text order",
    )

    @field_validator("prompt")
    @classmethod
    def _prompts_are_texts_or_ids(cls, prompt: Any) -> list[str | list[int]]:
        prompts = [prompt] if isinstance(prompt, str) or (prompt and is_id_list(prompt)) else prompt
        are_valid = isinstance(prompts, list) and all(isinstance(x, str) or (x and is_id_list(x)) for x in prompts)
        if not prompts or not are_valid:
            raise ValueError("must be a text, a list of token ids, or a list of either")
        return prompts

    @model_validator(mode="after")
    def _fields_fit_together(self) -> Self:
        if self.suffix and self.constraints:
            raise ValueError("suffix: an answer that has to follow a grammar has no text after it")
        if self.suffix and not self.max_tokens:
            raise ValueError("suffix: needs max_tokens, the length of the gap before it")
        if self.suffix and self.logprobs is not None:
            raise ValueError("suffix: logprobs of an answer with text after it are not known")
        if len(self.prompt) * self.n > _MOST_CHOICES:
            raise ValueError(f"prompt: with n={self.n} for each of them, at most {_MOST_CHOICES // self.n} are served")
        return self


class TemplateArguments(Strict):
    """What chat templates take."""

    enable_thinking: bool | None = None


class Chat(_Body):
    """The body of POST /v1/chat/completions."""

    turns: ClassVar = "messages"  # the client's name for that field

    messages: list[Message] = Field(min_length=1, max_length=MOST_PARTS)
    max_completion_tokens: int | None = Field(None, ge=0, le=2**24, description="Another name for max_tokens")
    logprobs: bool = Field(False, description="Slots are scored in text order")
    top_logprobs: int = Field(
        0, ge=0, le=MOST_SCORED, description="Also so many of the most probable tokens at each place"
    )
    chat_template_kwargs: TemplateArguments = Field(default_factory=TemplateArguments)
    tools: list[Tool] = Field(default_factory=list, max_length=MOST_TOOLS, description="What the model may call")
    tool_choice: Literal["none", "auto", "required"] | NamedTool = Field(
        "auto", description="none: hide the tools from the model; required, or a tool's name: the answer is calls"
    )
    parallel_tool_calls: bool = Field(True, description="Whether there may be several calls")

    @property
    def offered(self) -> list[Tool]:
        """The functions that may be called in this answer."""
        return [] if self.tool_choice == "none" else self.tools

    @property
    def constraints(self) -> list[tuple[str, str, Any]]:
        """Those of `_Body`, or a call, which can take the place of JSON and, where it is required, does."""
        given, choice = super().constraints, self.tool_choice
        tools, are_several = [tool.function for tool in self.offered], self.parallel_tool_calls
        if isinstance(choice, NamedTool):
            tools, are_several = [one for one in tools if one.name == choice.function.name], False
        callable_ = [(one.name, one.parameters) for one in tools]
        if choice == "required" or isinstance(choice, NamedTool):
            given = [one for one in given if one[0] != self.form]
            given.append(("tools", "calls", (callable_, are_several, None)))
        elif callable_ and given and given[0][1] == "json":
            given[0] = (given[0][0], "calls", (callable_, are_several, given[0][2]))
        return given

    @model_validator(mode="after")
    def _fields_fit_together(self) -> Self:
        names = [tool.function.name for tool in self.tools]
        if self.tool_choice == "required" and not names:
            raise ValueError("tool_choice: required needs tools")
        if isinstance(self.tool_choice, NamedTool) and self.tool_choice.function.name not in names:
            raise ValueError("tool_choice: names none of the tools")
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs: needs logprobs")
        if self.max_completion_tokens is not None:
            if self.max_tokens is not None:
                raise ValueError("max_tokens: is max_completion_tokens by its old name; give one of them")
            self.max_tokens = self.max_completion_tokens
        return self


class Tokenize(Strict):
    """The body of POST /tokenize."""

    prompt: str
    add_special_tokens: bool = Field(True, description="Begin with the token that begins every text, if there is one")
    model: str | None = None


class Detokenize(Strict):
    """The body of POST /detokenize."""

    tokens: list[int] = Field(fail_fast=True)
    model: str | None = None
