"""Access control and request logging of the server: API keys, Host headers, origins, request ids and a log."""

import dataclasses
import ipaddress
import json
import re
import secrets
import time
import uuid
from collections.abc import Sequence

from fastapi import FastAPI, Request
from fastapi.security import HTTPBearer
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from refusion_jax.cli.command import say

_OPEN = ("/health", "/ready")  # without a key, for supervisors
_ID = re.compile(r"[!-~]{1,128}")  # valid request ids of clients
_HEADER = "x-request-id"


@dataclasses.dataclass(frozen=True)
class Access:
    """The access settings from the server's flags."""

    keys: Sequence[str] = ()  # each request needs one of them; empty: no key is needed
    origins: Sequence[str] = ()  # origins of web pages that may send requests from a browser
    hosts: Sequence[str] = ()  # allowed names in Host headers; empty: any
    is_logged: bool = False  # whether to print a line per request


def allowed_hosts(address: str, given: Sequence[str]) -> list[str]:
    """The allowed Host names of a server that listens on an address, including `given` ones.

    On the loopback these are only its own names, so that a foreign page whose name resolves to 127.0.0.1 (DNS
    rebinding) is refused. Elsewhere any name is allowed.
    """
    is_local = ipaddress.ip_address(address).is_loopback
    return [*given, "localhost", "127.0.0.1", "[::1]", address] if is_local or given else []


def guard_access(app: FastAPI, access: Access) -> None:
    """Adds the middleware that checks and names each request, the outermost last."""
    if access.hosts:
        app.add_middleware(TrustedHostMiddleware, allowed_hosts=access.hosts, www_redirect=False)
    if access.origins:
        how = {"allow_methods": ["GET", "POST"], "allow_headers": ["*"], "expose_headers": [_HEADER]}
        app.add_middleware(CORSMiddleware, allow_origins=access.origins, **how)
    app.add_middleware(_Named, is_logged=access.is_logged)


class KeyCheck:
    """Refuses requests without one of the keys; takes the same time for every key."""

    def __init__(self, keys: Sequence[str]):
        self._keys, self._bearer = [key.encode() for key in keys], HTTPBearer(auto_error=False)

    async def __call__(self, request: Request) -> None:
        if request.url.path in _OPEN:
            return
        found = await self._bearer(request)
        given = found.credentials.encode() if found else b""
        if not sum(secrets.compare_digest(given, key) for key in self._keys):
            raise HTTPException(401, "give a valid API key: Authorization: Bearer KEY", {"WWW-Authenticate": "Bearer"})


class _Named:
    """Gives each request an id, the client's X-Request-Id or a new one, returns it with the answer, and logs it."""

    def __init__(self, app: ASGIApp, is_logged: bool):
        self._app, self._is_logged = app, is_logged

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        given = dict(scope["headers"]).get(_HEADER.encode(), b"").decode("latin-1")
        name = given if _ID.fullmatch(given) else uuid.uuid4().hex
        began, status = time.monotonic(), 499  # if the client leaves before an answer

        async def named(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message = {**message, "headers": [*message["headers"], (_HEADER.encode(), name.encode())]}
            await send(message)

        try:
            await self._app(scope, receive, named)
        finally:
            if self._is_logged and scope["path"] not in _OPEN:
                line = {"time": round(time.time(), 3), "request_id": name, "method": scope["method"]}
                line |= {"path": scope["path"], "status": status, "seconds": round(time.monotonic() - began, 4)}
                say(json.dumps(line))
