"""Bodies of requests, which refuse unknown fields.

A field that would change the answer on other servers is refused, so that nobody relies on a setting without effect;
values without effect (`"presence_penalty": 0`) are accepted. Fields that never change an answer are ignored.
"""

from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator

# Fields that clients send routinely, with the values that have no effect.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "frequency_penalty": (0,),
    "include": ([], ["reasoning.encrypted_content"]),  # by OpenAI's Agents SDK, Codex and LiteLLM
    "include_obfuscation": (False,),
    "logit_bias": ({},),
    "min_p": (0,),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),  # for completions, like the two below
    "presence_penalty": (0,),
    "reasoning": ({"summary": "auto"},),  # by Codex and Inspect; no answer has it
    "repetition_penalty": (1, 1.0),  # the latter by vLLM's load generator
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "truncation": ("disabled",),
}
# What tools send along: labels, bookkeeping of other servers, and what answers have in addition to their text.
_IGNORED = frozenset(
    "cache_salt client_metadata disable_any_whitespace disable_fallback id index metadata name parsed "
    "parsed_arguments priority prompt_cache_key request_id safety_identifier service_tier skip_special_tokens "
    "spaces_between_special_tokens status store user".split()
)


class Strict(BaseModel):
    """Null fields are left out; only the first unknown field is reported, as a hostile body may have a million."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _only_known_fields(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            raise ValueError("must be an object")
        known = {own.alias or name for name, own in cls.model_fields.items()}
        accepted = known | _IGNORED
        for name, value in body.items():
            if name not in accepted and value is not None and not _asks_for_nothing(name, value):
                raise ValueError(f"{name[:200]}: is not supported here")
        return {name: value for name, value in body.items() if value is not None and name in known}


def _asks_for_nothing(name: str, value: Any) -> bool:
    return any(type(value) is type(one) and value == one or value == one == 0 for one in _NEUTRAL.get(name, ()))
