"""The answer to one request: jobs of the engine, and what they report as a response or as a stream of events."""

import asyncio
import contextlib
import dataclasses
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from fastapi import Request
from fastapi.responses import StreamingResponse
from pydantic import TypeAdapter
from starlette.exceptions import HTTPException

from refusion_jax.cli.errors import UserError
from refusion_jax.decoding.requests import Answer
from refusion_jax.serving.engine import Choice, Job
from refusion_jax.serving.errors import error_body
from refusion_jax.serving.protocol import Chat, Completion, StreamOptions
from refusion_jax.serving.scores import ScoredStream
from refusion_jax.serving.service import Service
from refusion_jax.serving.writer import Delta

# Takes a hundredth of the time of FastAPI's encoder, during which no other client is answered.
to_json: Callable[[Any], bytes] = TypeAdapter(Any).dump_json


class Reply:
    """The answer to one HTTP request: some choices, decoded side by side."""

    def __init__(self, service: Service, body: Completion | Chat, prefix: str, kind: str, choices: list[Choice]):
        self._service, self._body, self._choices = service, body, choices
        self._head = {
            "id": f"{prefix}-{uuid.uuid4().hex}",
            "object": kind,
            "created": int(time.time()),
            "model": service.name,
            "seed": body.seed,
        }
        self._deltas: asyncio.Queue[tuple[int, Delta | Exception, Answer | None]] = asyncio.Queue()
        self._jobs: list[Job] = []
        self._tokens = [0] * len(choices)  # of each answer so far
        self._last = [0.0] * len(choices)  # seconds until the last of them
        self._began = time.monotonic()

    def _submit(self, is_watched: bool) -> None:
        """Submits the jobs to the engine; deltas then arrive in the queue."""
        loop = asyncio.get_running_loop()

        def put(item: tuple[int, Delta | Exception, Answer | None]) -> None:
            with contextlib.suppress(RuntimeError):  # the server has ended
                loop.call_soon_threadsafe(self._deltas.put_nowait, item)

        for number, one in enumerate(self._choices):
            if one.request is None:
                self._deltas.put_nowait((number, Delta("", [], "length", [], []), None))
            else:
                self._jobs.append(self._job(number, one, put, is_watched or bool(one.stops.texts)))
        self._choices[0].engine.submit(self._jobs)
        self._service.metrics.prompt.inc(self._usage()["prompt_tokens"])

    async def _arriving(self) -> AsyncIterator[tuple[int, Delta, Answer | None]]:
        """(number of the choice, delta, answer so far) until all choices are complete."""
        missing = len(self._choices)
        while missing:
            number, delta, answer = await self._deltas.get()
            if isinstance(delta, Exception):
                raise delta
            metrics, seconds = self._service.metrics, time.monotonic() - self._began
            new = len(delta.tokens) - self._tokens[number]
            if self._body.stream and new > 0:
                last, self._last[number] = self._last[number], seconds
                metrics.went_on(new, seconds - last) if last else metrics.first.observe(seconds)
            self._tokens[number] = len(delta.tokens)
            if delta.finish_reason:
                missing -= 1
                metrics.finished(delta.finish_reason, len(delta.tokens), answer.forwards if answer else 0, seconds)
                if answer:
                    metrics.given.inc(self._choices[number].given)
                    metrics.cached.inc(self._jobs[number].cached)
            yield number, delta, answer

    def _forget(self) -> None:
        """Frees the rows of unfinished choices."""
        for job in self._jobs:
            job.is_over = True

    async def whole(
        self, request: Request, fields: Callable[[int, Delta, dict[str, Any] | None], dict[str, Any]]
    ) -> dict[str, Any]:
        """All choices in one response; the rows of a client that disconnects are freed.

        `fields` returns the fields of a choice from (its number, the whole answer, its `logprobs`).
        """
        said: list[list[Delta]] = [[] for _ in self._choices]
        ends: list[dict[str, Any]] = [{} for _ in self._choices]

        async def collect() -> None:
            async for number, delta, answer in self._arriving():
                said[number].append(delta)
                ends[number] = self._end(delta, answer, [c for p in said[number] for c in p.commits])

        self._submit(is_watched=False)
        collecting, leaving = asyncio.ensure_future(collect()), asyncio.ensure_future(_leaves(request))
        try:
            await asyncio.wait({collecting, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if not collecting.done():
                raise HTTPException(499, "the client is gone")
            await collecting
        finally:
            collecting.cancel()
            leaving.cancel()
            self._forget()
        answers = [
            dataclasses.replace(own[-1], text="".join(d.text for d in own), calls=[c for d in own for c in d.calls])
            for own in said
        ]
        scores: list[dict[str, Any] | None] = [None] * len(answers)
        scorer, tokens = self._service.scorer, [delta.tokens for delta in answers]
        if scorer.is_asked(self._body):
            scores = [*await scorer.score(self._body, self._choices, tokens)]
        whole = zip(answers, scores, ends, strict=True)
        choices = [{"index": i, **fields(i, delta, own), **end} for i, (delta, own, end) in enumerate(whole)]
        return {**self._head, "choices": choices, "usage": self._usage()}

    async def stream(
        self, fields: Callable[[Delta, dict[str, Any] | None], dict[str, Any]], begins_with_role: bool = False
    ) -> StreamingResponse:
        """The choices as server-sent events, each with the text that has become certain.

        `fields` returns the fields of a choice from (a delta, its `logprobs`). In a chat the first event has the role.
        """
        self._submit(is_watched=True)
        return StreamingResponse(self._events(fields, begins_with_role), media_type="text/event-stream")

    async def _events(
        self, fields: Callable[[Delta, dict[str, Any] | None], dict[str, Any]], begins_with_role: bool
    ) -> AsyncIterator[bytes]:
        options, service = self._body.stream_options or StreamOptions(), self._service
        decode = service.decoding(self._body)
        scored = [ScoredStream(service.scorer, decode, self._body, one) for one in self._choices]

        def event(choices: Sequence[dict[str, Any]]) -> bytes:
            said = {**self._head, "choices": choices}
            if options.include_usage or options.continuous_usage_stats:
                said["usage"] = self._usage() if options.continuous_usage_stats or not choices else None
            return b"data: " + to_json(said) + b"\n\n"

        try:
            for number, one in enumerate(self._choices):
                start = {"delta": {"role": "assistant", "content": ""}} if begins_with_role else None
                if isinstance(self._body, Completion) and self._body.echo:
                    start = {"text": service.echoes([one])[0], "logprobs": await scored[number].of(None)}
                if start:
                    yield event([{"index": number, **start, "finish_reason": None}])
            async for number, delta, answer in self._arriving():
                said = delta.text or delta.calls or delta.finish_reason
                if said or self._body.watch or (self._body.commits and delta.commits):
                    own = {"index": number, **fields(delta, await scored[number].of(delta))}
                    if delta.calls and delta.finish_reason:  # OpenAI's client overlooks one that ends there
                        yield event([own | {"finish_reason": None}])
                        own |= {"delta": {}, "logprobs": None}
                    yield event([own | self._end(delta, answer, delta.commits)])
            if options.include_usage:
                yield event([])
            yield b"data: [DONE]\n\n"
        except (UserError, RuntimeError) as error:  # the status has been sent already
            yield b"data: " + to_json(error_body(500, str(error))) + b"\n\n"
        finally:
            self._forget()

    def _end(self, delta: Delta, answer: Answer | None, commits: list[tuple[int, int]]) -> dict[str, Any]:
        """Why an answer has ended, if it has, and its statistics."""
        fields: dict[str, Any] = {"finish_reason": delta.finish_reason}
        if self._body.commits:
            fields["commits"] = commits
        if self._body.watch:
            fields["pieces"] = delta.pieces
        if (delta.finish_reason or self._body.watch) and answer:
            fields |= {"forwards": answer.forwards, "rounds": answer.rounds}
        return fields

    def _usage(self) -> dict[str, Any]:
        given = sum(one.given for one in self._choices[:: self._body.n])
        cached = sum(job.cached for job in self._jobs[:: self._body.n])
        return {
            "prompt_tokens": given,
            "completion_tokens": sum(self._tokens),
            "total_tokens": given + sum(self._tokens),
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    def _job(self, number: int, one: Choice, put: Callable, is_watched: bool) -> Job:
        read, by_forward = self._service.reader(one, self._body), self._body.watch

        def report(answer: Answer, is_finished: bool) -> bool:
            delta = read(answer, is_finished)
            put((number, delta, answer))
            return delta.finish_reason is None

        def fail(error: Exception) -> None:
            put((number, error, None))

        ends_early = one.limit < sum(length for _, length in one.request.gaps)  # a decoder writes whole units
        return Job(one.request, report, fail, is_watched or ends_early, by_forward)


async def _leaves(request: Request) -> None:
    """Waits until the client has closed the connection; its request has been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
