"""What the server says to requests that it cannot serve, in OpenAI's form."""

from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from refusion_jax.cli.errors import UserError
from refusion_jax.serving.engine import BusyError

LARGEST_BODY = 16 << 20  # bytes of a request


def handle_errors(app: FastAPI) -> None:
    """Has the application answer every error with its status and the field at fault."""
    app.add_middleware(LimitBody)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        return _refusal(400, *_explained(error))

    @app.exception_handler(UserError)
    async def refused(request: Request, error: UserError) -> JSONResponse:
        return _refusal(400, str(error))

    @app.exception_handler(BusyError)
    async def busy(request: Request, error: BusyError) -> JSONResponse:
        return _refusal(503, str(error), headers={"Retry-After": "1"})

    @app.exception_handler(HTTPException)
    async def other(request: Request, error: HTTPException) -> JSONResponse:
        return _refusal(error.status_code, str(error.detail))

    @app.exception_handler(Exception)
    async def failed(request: Request, error: Exception) -> JSONResponse:
        return _refusal(500, f"{type(error).__name__}: {error}")


class LimitBody:
    """Refuses requests with a body larger than `LARGEST_BODY`, before it is read as a whole."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One connection."""
        seen = 0

        async def limited() -> Message:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > LARGEST_BODY:
                raise HTTPException(413, f"a request has at most {LARGEST_BODY} bytes")
            return message

        await self._app(scope, limited if scope["type"] == "http" else receive, send)


def _explained(error: RequestValidationError) -> tuple[str, str | None]:
    """(what is wrong with the first field at fault, its name)."""
    first = error.errors()[0]
    path = [str(part) for part in first["loc"] if part != "body"]
    name = ".".join(path)
    if first["type"] == "extra_forbidden":
        return f"{name}: is not supported here", name
    if first["type"] == "json_invalid":
        return f"the body is not JSON: {first.get('ctx', {}).get('error', first['msg'])}", None
    why = first["msg"].removeprefix("Value error, ")
    return f"{name}: {why}" if name else why, name or None


def error_body(status: int, message: str, field: str | None = None) -> dict[str, Any]:
    """An error as clients read it."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": field, "code": status}}


def _refusal(
    status: int, message: str, field: str | None = None, headers: dict[str, str] | None = None
) -> JSONResponse:
    return JSONResponse(error_body(status, message, field), status, headers)
