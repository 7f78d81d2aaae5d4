"""The routes of the server: OpenAI's completions and chats, and those that evaluation clients need."""

import functools
import time
from importlib import resources
from typing import Annotated, Any

import anyio
from fastapi import APIRouter, Depends, FastAPI, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException

from refusion_jax.serving.access import Access, KeyCheck, guard_access
from refusion_jax.serving.errors import handle_errors, read_body
from refusion_jax.serving.protocol import Chat, Completion, Detokenize, Tokenize
from refusion_jax.serving.reply import Reply, to_json
from refusion_jax.serving.responses import TextReply, TextRequest
from refusion_jax.serving.service import Service
from refusion_jax.serving.writer import Delta

_SMALL = 1 << 13  # bytes; parsing that many takes at most a millisecond
_MOST = 1 << 20  # bytes besides those of a text as long as the context: enough for many short ones
_REFERENCE = "#/components/schemas/{model}"
_POLICY = (  # for pages, which use the routes that every client has, and load nothing else
    "default-src 'none'; connect-src 'self'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
routes = APIRouter()


def make_app(service: Service, access: Access, version: str) -> FastAPI:
    """The server as an ASGI application; the engine is started and ended by the caller."""
    checks = [Depends(KeyCheck(access.keys))] if access.keys else []
    # FastAPI's own /docs loads its scripts from elsewhere.
    app = FastAPI(title="refusion_jax", version=version, docs_url=None, redoc_url=None, dependencies=checks)
    own = service.engine.settings
    described = {"id": service.name, "object": "model", "created": int(time.time()), "owned_by": "refusion_jax"}
    described["max_model_len"] = own.cache_length
    described |= {"slot_size": own.slot_size, "fills_gaps": service.engine.fills_gaps}
    app.state.service, app.state.described = service, described
    app.state.large, app.state.structured = anyio.CapacityLimiter(1), anyio.CapacityLimiter(4)
    app.add_route("/", functools.partial(_page, "page.html"))
    app.add_route("/docs", functools.partial(_page, "docs.html"))
    app.include_router(routes)
    handle_errors(app, own.cache_length)
    guard_access(app, access)
    app.openapi().setdefault("components", {})["schemas"] = _schemas(service)
    return app


async def _service(request: Request) -> Service:
    return request.app.state.service


Served = Annotated[Service, Depends(_service)]


def _parsed(kind: type[BaseModel]) -> Any:
    """Parses the body of a request; a large one in another thread, which may hold Python's lock for up to 50 ms."""

    async def parse(request: Request, service: Served) -> BaseModel:
        raw, most = bytearray(), _MOST + 128 * service.engine.settings.cache_length
        async for part in request.stream():
            raw += part
            if len(raw) > most:
                raise HTTPException(413, f"a request has at most {most} bytes: send fewer prompts at once")
        request.state.is_small = len(raw) <= _SMALL
        if request.state.is_small:
            body = read_body(kind, raw)
        else:
            body = await anyio.to_thread.run_sync(read_body, kind, raw, limiter=request.app.state.large)
        _check_model(body.model, service)
        return body

    return Depends(parse)


def _documented(kind: type[BaseModel]) -> dict[str, Any]:
    """The entry in /openapi.json for a body that the route parses itself."""
    schema = {"schema": {"$ref": _REFERENCE.format(model=kind.__name__)}}
    return {"openapi_extra": {"requestBody": {"content": {"application/json": schema}, "required": True}}}


def _threads(request: Request, body: Completion | Chat) -> anyio.CapacityLimiter | None:
    """Limits the threads for structured answers: compiling a grammar may take seconds."""
    return request.app.state.structured if body.constraints else None


@routes.post("/v1/completions", **_documented(Completion))
async def completions(body: Annotated[Completion, _parsed(Completion)], service: Served, request: Request):
    if request.state.is_small and len(body.prompt) == 1 and not body.constraints:
        choices = service.completion(body)  # takes half a millisecond, and waits for no thread
    else:
        choices = await anyio.to_thread.run_sync(service.completion, body, limiter=_threads(request, body))
    reply = Reply(service, body, "cmpl", "text_completion", choices)
    if body.stream:
        return await reply.stream(lambda delta, scores: {"text": delta.text, "logprobs": scores})
    echoed = await anyio.to_thread.run_sync(service.echoes, choices) if body.echo else [""] * len(choices)
    return _json(
        await reply.whole(request, lambda n, delta, scores: {"text": echoed[n] + delta.text, "logprobs": scores})
    )


@routes.post("/v1/chat/completions", **_documented(Chat))
async def chats(body: Annotated[Chat, _parsed(Chat)], service: Served, request: Request):
    choices = await anyio.to_thread.run_sync(service.chat, body, limiter=_threads(request, body))
    if body.stream:
        reply = Reply(service, body, "chatcmpl", "chat.completion.chunk", choices)
        return await reply.stream(lambda delta, scores: {"delta": _said(delta), "logprobs": scores})
    return _json(await Reply(service, body, "chatcmpl", "chat.completion", choices).whole(request, _message))


@routes.post("/v1/responses", **_documented(TextRequest))
async def responses(body: Annotated[TextRequest, _parsed(TextRequest)], service: Served, request: Request):
    reply = await anyio.to_thread.run_sync(TextReply, service, body, limiter=_threads(request, body.chat))
    if body.stream:
        return await reply.stream(lambda delta, scores: _said(delta))
    return _json(await reply.respond(request))


@routes.head("/health")
@routes.get("/health")
async def health(service: Served) -> JSONResponse:
    return JSONResponse(service.engine.load, 503 if service.engine.failure else 200)


@routes.head("/ready")
@routes.get("/ready")
async def ready(service: Served) -> JSONResponse:
    return JSONResponse({"ready": service.engine.is_ready}, 200 if service.engine.is_ready else 503)


@routes.get("/version")
async def of_the_server(request: Request) -> dict[str, str]:
    return {"version": request.app.version}


@routes.head("/metrics")
@routes.get("/metrics")
async def metrics(service: Served) -> Response:
    return Response(generate_latest(service.metrics.registry), media_type=CONTENT_TYPE_LATEST)


@routes.get("/v1/models")
async def models(request: Request) -> dict[str, Any]:
    return {"object": "list", "data": [request.app.state.described]}


@routes.get("/v1/models/{name:path}")
async def model(name: str, service: Served, request: Request) -> dict[str, Any]:
    _check_model(name, service)
    return request.app.state.described


# lm-eval's local-completions asks these to tokenize like the model.


@routes.get("/tokenizer_info")
async def tokenizer_info(service: Served) -> dict[str, Any]:
    return service.special_tokens


@routes.post("/tokenize", **_documented(Tokenize))
async def tokenize(body: Annotated[Tokenize, _parsed(Tokenize)], service: Served) -> dict[str, Any]:
    tokens = await anyio.to_thread.run_sync(service.tokenize, body.prompt, body.add_special_tokens)
    return {"tokens": tokens, "count": len(tokens), "max_model_len": service.engine.settings.cache_length}


@routes.post("/detokenize", **_documented(Detokenize))
async def detokenize(body: Annotated[Detokenize, _parsed(Detokenize)], service: Served) -> dict[str, Any]:
    return {"prompt": await anyio.to_thread.run_sync(service.detokenize, body.tokens)}


def _said(delta: Delta) -> dict[str, Any]:
    """What a delta adds to a message: text and calls."""
    return ({"content": delta.text} if delta.text else {}) | ({"tool_calls": delta.calls} if delta.calls else {})


def _message(number: int, delta: Delta, scores: dict[str, Any] | None) -> dict[str, Any]:
    """The fields of a choice in a whole chat."""
    message = {"role": "assistant", "content": None if delta.calls else ""} | _said(delta)
    for call in delta.calls:
        del call["index"]  # only in streams: OpenAI's agents in JavaScript send it back as a field of the message
    return {"message": message, "logprobs": scores}


async def _page(file: str, request: Request) -> HTMLResponse:
    """A page for people; needs no key, as it holds no data."""
    html = resources.files("refusion_jax.serving").joinpath(file).read_text("utf-8")
    return HTMLResponse(html, headers={"Content-Security-Policy": _POLICY})


def _schemas(service: Service) -> dict[str, Any]:
    """The schemas of bodies in /openapi.json, with this server's defaults and its decoder's settings."""
    bodies = [(kind, "validation") for kind in (Completion, Chat, TextRequest, Tokenize, Detokenize)]
    schemas = models_json_schema(bodies, ref_template=_REFERENCE)[1]["$defs"]
    for kind in (Completion, Chat):
        fields = schemas[kind.__name__]["properties"]
        fields["decode"] |= {"properties": service.changeable, "additionalProperties": False}
        for name, value in service.defaults.items():
            fields[name]["default"] = value
    return schemas


def _json(content: dict[str, Any]) -> Response:
    return Response(to_json(content), media_type="application/json")


def _check_model(name: str | None, service: Service) -> None:
    if name is not None and name != service.name:
        raise HTTPException(404, f"model {name[:200]!r} is not served here; {service.name!r} is")
