"""The routes of the server: OpenAI's completions and chats, and what clients that evaluate ask."""

import time
from typing import Annotated, Any

import anyio
from fastapi import Depends, FastAPI, Request, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException

from refusion_jax.serving.access import Access, KeyCheck, guard_access
from refusion_jax.serving.errors import handle_errors
from refusion_jax.serving.page import page
from refusion_jax.serving.protocol import Chat, Completion, Detokenize, Tokenize
from refusion_jax.serving.reply import Reply
from refusion_jax.serving.responses import TextReply, TextRequest
from refusion_jax.serving.service import Service
from refusion_jax.serving.writer import Delta


def make_app(service: Service, access: Access, version: str) -> FastAPI:
    """The server as an ASGI application; the engine is started and ended by the caller."""
    checks = [Depends(KeyCheck(access.keys))]
    # FastAPI's /docs loads its scripts from elsewhere.
    app = FastAPI(title="refusion_jax", version=version, docs_url=None, redoc_url=None, dependencies=checks)
    app.add_route("/", page)
    handle_errors(app, service.engine.settings.cache_length)
    guard_access(app, access)
    described = {"id": service.name, "object": "model", "created": int(time.time()), "owned_by": "refusion_jax"}
    described["max_model_len"] = service.engine.settings.cache_length
    described |= {"slot_size": service.engine.settings.slot_size, "fills_gaps": service.engine.fills_gaps}
    one_at_a_time = anyio.CapacityLimiter(1)  # scoring needs memory besides the batch, for one response

    @app.get("/health")
    async def health() -> JSONResponse:
        return JSONResponse(service.engine.load, 503 if service.engine.failure else 200)

    @app.get("/ready")
    async def ready() -> JSONResponse:
        return JSONResponse({"ready": service.engine.is_ready}, 200 if service.engine.is_ready else 503)

    @app.get("/version")
    async def of_the_server() -> dict[str, str]:
        return {"version": version}

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(generate_latest(service.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [described]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        _check_model(name, service)
        return described

    @app.post("/v1/completions", **_documented(Completion))
    async def completions(body: Annotated[Completion, _parsed(Completion)], request: Request):
        _check_model(body.model, service)
        body.seed = service.seed_of(body)
        choices = await anyio.to_thread.run_sync(service.completion, body)
        reply = Reply(service, body, "cmpl", "text_completion", choices)
        if body.stream:
            return await reply.stream(lambda delta: {"text": delta.text, "logprobs": None})

        async def fields(answers: list[Delta]) -> list[dict[str, Any]]:
            echoed = await anyio.to_thread.run_sync(service.echoes, choices) if body.echo else [""] * len(choices)
            scores: list[dict[str, Any] | None] = [None] * len(choices)
            if body.logprobs is not None:
                how = [delta.tokens for delta in answers], body.echo, bool(body.logprobs)
                scores = await anyio.to_thread.run_sync(service.scores, choices, *how, limiter=one_at_a_time)
            texts = [echo + delta.text for echo, delta in zip(echoed, answers, strict=True)]
            return [{"text": text, "logprobs": own} for text, own in zip(texts, scores, strict=True)]

        return await reply.whole(request, fields)

    @app.post("/v1/chat/completions", **_documented(Chat))
    async def chats(body: Annotated[Chat, _parsed(Chat)], request: Request):
        _check_model(body.model, service)
        body.seed = service.seed_of(body)
        choices = await anyio.to_thread.run_sync(service.chat, body)
        if body.stream:
            reply = Reply(service, body, "chatcmpl", "chat.completion.chunk", choices)
            return await reply.stream(lambda delta: {"delta": _said(delta)}, begins_with_role=True)

        async def fields(answers: list[Delta]) -> list[dict[str, Any]]:
            scores: list[dict[str, Any] | None] = [None] * len(choices)
            if body.logprobs:
                tokens, how = [delta.tokens for delta in answers], {"limiter": one_at_a_time}
                found = await anyio.to_thread.run_sync(service.scores, choices, tokens, False, True, **how)
                scores = [_of_chat(own, body.top_logprobs) for own in found]
            empty = [{"role": "assistant", "content": None if delta.calls else ""} for delta in answers]
            said = zip(empty, answers, scores, strict=True)
            return [{"message": message | _said(delta), "logprobs": own} for message, delta, own in said]

        return await Reply(service, body, "chatcmpl", "chat.completion", choices).whole(request, fields)

    @app.post("/v1/responses", **_documented(TextRequest))
    async def responses(body: Annotated[TextRequest, _parsed(TextRequest)], request: Request):
        _check_model(body.model, service)
        chat = body.chat
        chat.seed = service.seed_of(chat)
        reply = await anyio.to_thread.run_sync(TextReply, service, body, chat)
        return await reply.stream(_said) if body.stream else await reply.respond(request)

    # What lm-eval's local-completions asks to tokenize as the model does.

    @app.get("/tokenizer_info")
    async def tokenizer_info() -> dict[str, Any]:
        return service.special_tokens

    @app.post("/tokenize", **_documented(Tokenize))
    async def tokenize(body: Annotated[Tokenize, _parsed(Tokenize)]) -> dict[str, Any]:
        _check_model(body.model, service)
        tokens = await anyio.to_thread.run_sync(service.tokenize, body.prompt, body.add_special_tokens)
        return {"tokens": tokens, "count": len(tokens), "max_model_len": service.engine.settings.cache_length}

    @app.post("/detokenize", **_documented(Detokenize))
    async def detokenize(body: Annotated[Detokenize, _parsed(Detokenize)]) -> dict[str, Any]:
        _check_model(body.model, service)
        return {"prompt": await anyio.to_thread.run_sync(service.detokenize, body.tokens)}

    app.openapi().setdefault("components", {})["schemas"] = _schemas(service)
    return app


def _said(delta: Delta) -> dict[str, Any]:
    """What has been added to a message, text and calls."""
    return ({"content": delta.text} if delta.text else {}) | ({"tool_calls": delta.calls} if delta.calls else {})


def _of_chat(scores: dict[str, Any], best: int) -> dict[str, Any]:
    """The `logprobs` of a completion as those of a chat, with so many of the most probable tokens of each place."""

    def one(token: str, log_p: float) -> dict[str, Any]:
        return {"token": token, "logprob": log_p, "bytes": [*token.encode()]}

    places = zip(scores["tokens"], scores["token_logprobs"], scores["top_logprobs"], strict=True)
    content = [
        one(token, log_p) | {"top_logprobs": [one(*pair) for pair in [*top.items()][:best]]}
        for token, log_p, top in places
    ]
    return {"content": content, "refusal": None}


_SMALL = 1 << 13  # bytes, of which any take a millisecond at most
_REFERENCE = "#/components/schemas/{model}"


def _schemas(service: Service) -> dict[str, Any]:
    """What /openapi.json tells of the bodies, with this server's defaults and the settings of its decoder."""
    bodies = [(kind, "validation") for kind in (Completion, Chat, TextRequest, Tokenize, Detokenize)]
    schemas = models_json_schema(bodies, ref_template=_REFERENCE)[1]["$defs"]
    for kind in (Completion, Chat):
        fields = schemas[kind.__name__]["properties"]
        fields["decode"] |= {"properties": service.changeable, "additionalProperties": False}
        for name, value in service.defaults.items():
            fields[name]["default"] = value
    return schemas


def _documented(kind: type[BaseModel]) -> dict[str, Any]:
    """What /openapi.json tells of a body that the route parses by itself."""
    schema = {"schema": {"$ref": _REFERENCE.format(model=kind.__name__)}}
    return {"openapi_extra": {"requestBody": {"content": {"application/json": schema}, "required": True}}}


def _parsed(kind: type[BaseModel]) -> Any:
    """The body of a request. A large one is parsed and validated in another thread, where it holds nobody up."""

    async def parse(request: Request) -> BaseModel:
        raw = await request.body()
        if len(raw) <= _SMALL:
            return kind.model_validate_json(raw)
        return await anyio.to_thread.run_sync(kind.model_validate_json, raw)

    return Depends(parse)


def _check_model(name: str | None, service: Service) -> None:
    if name is not None and name != service.name:
        raise HTTPException(404, f"model {name[:200]!r} is not served here; {service.name!r} is")
