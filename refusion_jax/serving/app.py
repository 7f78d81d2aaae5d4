"""The routes of the server: OpenAI's completions and chats, and what clients ask beside them."""

import asyncio
import contextlib
import functools
import json
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import anyio
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from refusion_jax.decoding.queue import Answer
from refusion_jax.runtime.errors import UserError
from refusion_jax.serving.engine import BusyError, Job
from refusion_jax.serving.protocol import Chat, Completion, Detokenize, Tokenize
from refusion_jax.serving.service import Service, Wanted
from refusion_jax.serving.writer import Piece

LARGEST_BODY = 16 << 20  # bytes of a request
_BETWEEN_LOOKS = 0.2  # seconds between two checks of whether a client is still there


def make_app(service: Service) -> FastAPI:
    """The server as an ASGI application; the engine is started and ended by the caller."""
    app = FastAPI(title="refusion_jax", docs_url="/docs", redoc_url=None)
    app.add_middleware(LimitBody)
    began = int(time.time())
    one_at_a_time = anyio.CapacityLimiter(1)  # scoring has the device's memory to itself

    @app.get("/health")
    async def health() -> JSONResponse:
        return JSONResponse(service.engine.load, 503 if service.engine.failure else 200)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        own = {"id": service.name, "object": "model", "created": began, "owned_by": "refusion_jax"}
        own["max_model_len"] = service.engine.settings.cache_length
        return {"object": "list", "data": [own]}

    @app.post("/v1/completions")
    async def completions(body: Completion, request: Request):
        _check_model(body.model, service)
        wanted = await anyio.to_thread.run_sync(service.completion, body)
        reply = Reply(service, body, "cmpl", "text_completion", wanted)
        if body.stream:
            return await reply.stream(lambda text: {"text": text, "logprobs": None})

        def choice(one: Wanted, said: list[Piece]) -> dict[str, Any]:
            echo = one.text if one.text is not None else service.tokenizer.decode(one.prompt)
            answer, logprobs = "".join(piece.text for piece in said), None
            if body.logprobs is not None:
                logprobs = service.scores(one, said[-1].tokens, body.echo, bool(body.logprobs))
            return {"text": echo * body.echo + answer, "logprobs": logprobs}

        return await reply.whole(request, functools.partial(anyio.to_thread.run_sync, choice, limiter=one_at_a_time))

    @app.post("/v1/chat/completions")
    async def chats(body: Chat, request: Request):
        _check_model(body.model, service)
        wanted = await anyio.to_thread.run_sync(service.chat, body)
        if body.stream:
            reply = Reply(service, body, "chatcmpl", "chat.completion.chunk", wanted)
            return await reply.stream(lambda text: {"delta": {"content": text} if text else {}}, begins_with_role=True)

        async def choice(one: Wanted, said: list[Piece]) -> dict[str, Any]:
            content = "".join(piece.text for piece in said)
            return {"message": {"role": "assistant", "content": content}, "logprobs": None}

        return await Reply(service, body, "chatcmpl", "chat.completion", wanted).whole(request, choice)

    # What lm-eval's local-completions asks to tokenize as the model does.

    @app.get("/tokenizer_info")
    async def tokenizer_info() -> dict[str, Any]:
        return service.special_tokens

    @app.post("/tokenize")
    async def tokenize(body: Tokenize) -> dict[str, Any]:
        _check_model(body.model, service)
        tokens = await anyio.to_thread.run_sync(service.tokenize, body.prompt, body.add_special_tokens)
        return {"tokens": tokens, "count": len(tokens), "max_model_len": service.engine.settings.cache_length}

    @app.post("/detokenize")
    async def detokenize(body: Detokenize) -> dict[str, Any]:
        _check_model(body.model, service)
        return {"prompt": await anyio.to_thread.run_sync(service.detokenize, body.tokens)}

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

    return app


class Reply:
    """The answer to one HTTP request: some choices, decoded side by side."""

    def __init__(self, service: Service, body: Completion | Chat, prefix: str, kind: str, wanted: list[Wanted]):
        self._service, self._body, self._wanted = service, body, wanted
        self._head = {
            "id": f"{prefix}-{uuid.uuid4().hex}",
            "object": kind,
            "created": int(time.time()),
            "model": service.name,
        }
        self._pieces: asyncio.Queue[tuple[int, Piece | Exception, Answer | None]] = asyncio.Queue()
        self._jobs: list[Job] = []
        self._tokens = [0] * len(wanted)  # of each answer so far

    def _submit(self, is_watched: bool) -> None:
        """Has the engine decode; pieces then arrive in the queue."""
        loop = asyncio.get_running_loop()

        def put(item: tuple[int, Piece | Exception, Answer | None]) -> None:
            with contextlib.suppress(RuntimeError):  # the server has ended
                loop.call_soon_threadsafe(self._pieces.put_nowait, item)

        for number, one in enumerate(self._wanted):
            if one.request is None:
                self._pieces.put_nowait((number, Piece("", [], "length", []), None))
            else:
                self._jobs.append(_job(number, one, self._service, put, is_watched or bool(one.stops.texts)))
        self._service.engine.submit(self._jobs)

    async def _arriving(self) -> AsyncIterator[tuple[int, Piece, Answer | None]]:
        """(number of the choice, piece, answer so far) until all choices are complete."""
        missing = len(self._wanted)
        while missing:
            number, piece, answer = await self._pieces.get()
            if isinstance(piece, Exception):
                raise piece
            self._tokens[number] = len(piece.tokens)
            missing -= piece.finish_reason is not None
            yield number, piece, answer

    def _forget(self) -> None:
        """Frees the rows of what is not finished."""
        for job in self._jobs:
            job.is_over = True

    async def whole(self, request: Request, choice: Callable) -> dict[str, Any]:
        """All choices in one response; a client that goes away frees its rows.

        Args:
          request: whose client is waiting.
          choice: (what was wanted, its pieces) -> the choice's own fields.
        """
        said: list[list[Piece]] = [[] for _ in self._wanted]
        ends: list[dict[str, Any]] = [{} for _ in self._wanted]

        async def collect() -> None:
            async for number, piece, answer in self._arriving():
                said[number].append(piece)
                ends[number] = self._end(piece, answer, [c for p in said[number] for c in p.commits])

        self._submit(is_watched=False)
        collecting = asyncio.ensure_future(collect())
        try:
            while not (await asyncio.wait({collecting}, timeout=_BETWEEN_LOOKS))[0]:
                if await request.is_disconnected():
                    raise HTTPException(499, "the client is gone")
            await collecting
        finally:
            collecting.cancel()
            self._forget()
        choices = [
            {"index": number, **await choice(one, said[number]), **ends[number]}
            for number, one in enumerate(self._wanted)
        ]
        return {**self._head, "choices": choices, "usage": self._usage()}

    async def stream(
        self, fields: Callable[[str], dict[str, Any]], begins_with_role: bool = False
    ) -> StreamingResponse:
        """The choices as server-sent events, each with the text that has become certain.

        Args:
          fields: text -> the fields of a choice that hold it.
          begins_with_role: whether each choice begins with an event that says who speaks, as chats do.
        """
        self._submit(is_watched=True)
        return StreamingResponse(self._events(fields, begins_with_role), media_type="text/event-stream")

    async def _events(self, fields: Callable[[str], dict[str, Any]], begins_with_role: bool) -> AsyncIterator[str]:
        usage = self._body.stream_options and self._body.stream_options.include_usage
        none = {"usage": None} if usage else {}

        def event(choices: Sequence[dict[str, Any]], more: dict[str, Any] = none) -> str:
            return f"data: {json.dumps({**self._head, 'choices': choices, **more}, ensure_ascii=False)}\n\n"

        try:
            for number, one in enumerate(self._wanted):
                start = {"delta": {"role": "assistant", "content": ""}} if begins_with_role else None
                if getattr(self._body, "echo", False):
                    start = fields(one.text if one.text is not None else self._service.tokenizer.decode(one.prompt))
                if start:
                    yield event([{"index": number, **start, "finish_reason": None}])
            async for number, piece, answer in self._arriving():
                if piece.text or piece.finish_reason or (self._body.commits and piece.commits):
                    yield event([{"index": number, **fields(piece.text), **self._end(piece, answer, piece.commits)}])
            if usage:
                yield event([], {"usage": self._usage()})
            yield "data: [DONE]\n\n"
        except (UserError, BusyError, RuntimeError) as error:  # the status has been sent already
            yield f"data: {json.dumps(_error(500, str(error)))}\n\n"
        finally:
            self._forget()

    def _end(self, piece: Piece, answer: Answer | None, commits: list[tuple[int, int]]) -> dict[str, Any]:
        """Why an answer has ended, if it has, and what it took."""
        fields: dict[str, Any] = {"finish_reason": piece.finish_reason}
        if self._body.commits:
            fields["commits"] = commits
        if piece.finish_reason and answer:
            fields |= {"forwards": answer.forwards, "rounds": answer.rounds}
        return fields

    def _usage(self) -> dict[str, int]:
        given = sum(len(one.prompt) for one in self._wanted[:: self._body.n])
        return {
            "prompt_tokens": given,
            "completion_tokens": sum(self._tokens),
            "total_tokens": given + sum(self._tokens),
        }


def _job(number: int, one: Wanted, service: Service, put: Callable, is_watched: bool) -> Job:
    """The job of one answer, whose pieces are put into a queue."""
    writer = service.writer(one)

    def report(answer: Answer, is_finished: bool) -> bool:
        piece = writer.read(answer, is_finished)
        put((number, piece, answer))
        return piece.finish_reason is None

    return Job(one.request, report, lambda error: put((number, error, None)), is_watched or _ends_early(one))


def _ends_early(one: Wanted) -> bool:
    """Whether fewer tokens are wanted than the decoder writes, which writes whole units."""
    return one.limit < sum(length for _, length, _ in one.request.gaps)


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


def _check_model(name: str | None, service: Service) -> None:
    if name is not None and name != service.name:
        raise HTTPException(404, f"model {name[:200]!r} is not served here; {service.name!r} is")


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


def _error(status: int, message: str, field: str | None = None) -> dict[str, Any]:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": field, "code": status}}


def _refusal(
    status: int, message: str, field: str | None = None, headers: dict[str, str] | None = None
) -> JSONResponse:
    return JSONResponse(_error(status, message, field), status, headers)
