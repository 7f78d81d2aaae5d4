"""The server's responses to requests that it cannot serve, in OpenAI's form."""

import functools
import re
from collections.abc import Callable
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from refusion_jax.cli.errors import Failure, UserError
from refusion_jax.serving.engine import BusyError, TooLongError


def handle_errors(app: FastAPI, cache_length: int) -> None:
    """Makes the application answer every error with its status and the field at fault."""
    context = f"this model's maximum context length is {cache_length} tokens"
    answers: dict[type[Exception], Callable[[Any], JSONResponse]] = {
        HTTPException: lambda error: _refusal(error.status_code, str(error.detail), headers=error.headers),
        InvalidError: lambda error: _refusal(400, *error.args),
        UserError: lambda error: _refusal(400, str(error)),
        # Clients, which then shorten the conversation, know it by its code or by these words.
        TooLongError: lambda error: _refusal(400, f"{error}; {context}", code="context_length_exceeded"),
        BusyError: lambda error: _refusal(503, str(error), headers={"Retry-After": "1"}),
        Failure: lambda error: _refusal(500, str(error)),
        ClientDisconnect: lambda error: _refusal(400, "the connection ended before the body did"),  # to nobody
        Exception: lambda error: _refusal(500, f"{type(error).__name__}: {error}"),
    }

    async def respond(kind: type[Exception], request: Request, error: Exception) -> JSONResponse:
        return answers[kind](error)

    for kind in answers:
        app.add_exception_handler(kind, functools.partial(respond, kind))


_OF_A_TYPE = re.compile(r"^(str|int|list|dict)$|[A-Z\[(]")  # added by pydantic if a field may have several types


class InvalidError(Exception):
    """(what is wrong with a body, the name of the field at fault or None)."""


def read_body(kind: type[BaseModel], raw: bytes) -> BaseModel:
    """A body of this kind, or InvalidError. Listing 20,000 errors takes 0.1 s: too long for the event loop."""
    try:
        return kind.model_validate_json(raw)
    except ValidationError as error:
        raise InvalidError(*_explained(error)) from None


def _explained(error: ValidationError) -> tuple[str, str | None]:
    """(what is wrong with the first field at fault, its name); for a field of several types, by the closest one."""
    errors = error.errors(include_url=False, include_input=False)
    names = [".".join(part for part in map(str, one["loc"]) if not _OF_A_TYPE.search(part)) for one in errors]
    name, first = max(
        (one for one in zip(names, errors, strict=True) if one[0].startswith(names[0])),
        key=lambda one: len(one[1]["loc"]),
    )
    why = first["msg"].removeprefix("Value error, ")
    if first["type"] == "json_invalid":
        why = f"{'' if name else 'the body '}is not JSON: {first['ctx']['error']}"
    return f"{name}: {why}" if name else why, name or None


def error_body(status: int, message: str, field: str | None = None, code: str | None = None) -> dict[str, Any]:
    """An error in the form that clients read."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": field, "code": code or status}}


def _refusal(
    status: int, message: str, field: str | None = None, code: str | None = None, headers: dict[str, str] | None = None
) -> JSONResponse:
    return JSONResponse(error_body(status, message, field, code), status, headers)
