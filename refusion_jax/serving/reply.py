"""The answer to one request: jobs of the engine, and what they report as a response or as a stream of events.

`whole` or `stream` submits a job for each choice. The engine's thread turns what a job reports into a delta and puts it
into a queue, from which the event loop takes it in `_arriving`, until each choice is complete. At the end `_forget`
frees the rows of choices that nobody wants any longer, as when the client has left.
"""

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
from starlette.types import Send

from refusion_jax.cli.errors import UserError
from refusion_jax.decoding.requests import Answer
from refusion_jax.serving.engine import Choice, Job
from refusion_jax.serving.errors import error_body
from refusion_jax.serving.protocol import Chat, Completion, StreamOptions
from refusion_jax.serving.scores import ScoredStream
from refusion_jax.serving.service import Service
from refusion_jax.serving.writer import Delta

SILENCE = 15  # seconds; proxies end connections on which nothing is sent, most of them after a minute
# Takes a hundredth of the time of FastAPI's encoder, during which no other client is answered.
to_json: Callable[[Any], bytes] = TypeAdapter(Any).dump_json


class EventStream(StreamingResponse):
    """Server-sent events, with a comment every few seconds: while an answer waits or a call is written, no event is."""

    async def stream_response(self, send: Send) -> None:
        async def comment() -> None:
            while True:
                await asyncio.sleep(SILENCE)
                await send({"type": "http.response.body", "body": b":\n\n", "more_body": True})

        commenting = asyncio.ensure_future(comment())
        try:
            await super().stream_response(send)
        finally:
            commenting.cancel()


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
        self._reports: asyncio.Queue[tuple[int, Delta] | Exception] = asyncio.Queue()
        self._jobs: list[Job] = []
        self._tokens = [0] * len(choices)  # of each answer so far
        self._last = [0.0] * len(choices)  # seconds until the last of them
        self._began = time.monotonic()

    def _submit(self, is_watched: bool) -> None:
        """Submits the jobs to the engine; reports then arrive in the queue."""
        for number, one in enumerate(self._choices):
            if one.request is None:
                self._reports.put_nowait((number, Delta(finish_reason="length")))
            else:
                self._jobs.append(self._job(number, one, is_watched))
        self._choices[0].engine.submit(self._jobs)
        self._service.metrics.prompt.inc(self._usage()["prompt_tokens"])

    def _job(self, number: int, one: Choice, is_watched: bool) -> Job:
        read, loop = self._service.reader(one, self._body), asyncio.get_running_loop()

        def put(report: tuple[int, Delta] | Exception) -> None:
            with contextlib.suppress(RuntimeError):  # the server has ended
                loop.call_soon_threadsafe(self._reports.put_nowait, report)

        def report(answer: Answer, is_finished: bool) -> bool:
            delta = read(answer, is_finished)
            put((number, delta))
            return delta.finish_reason is None

        # A decoder writes whole units, and stop strings may come before the end.
        ends_early = one.limit < sum(length for _, length in one.request.gaps) or bool(one.stops.texts)
        return Job(one.request, report, put, is_watched or ends_early, by_forward=self._body.watch)

    async def _arriving(self) -> AsyncIterator[tuple[int, Delta]]:
        """(number of the choice, delta) until all choices are complete."""
        missing = len(self._choices)
        while missing:
            report = await self._reports.get()
            if isinstance(report, Exception):
                raise report
            number, delta = report
            metrics, seconds = self._service.metrics, time.monotonic() - self._began
            new = len(delta.tokens) - self._tokens[number]
            if self._body.stream and new > 0:
                last, self._last[number] = self._last[number], seconds
                metrics.went_on(new, seconds - last) if last else metrics.first.observe(seconds)
            self._tokens[number] = len(delta.tokens)
            if delta.finish_reason:
                missing -= 1
                metrics.finished(delta.finish_reason, len(delta.tokens), delta.forwards or 0, seconds)
                if self._choices[number].request:
                    metrics.given.inc(self._choices[number].given)
                    metrics.cached.inc(self._jobs[number].cached)
            yield number, delta

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
        told: list[list[Delta]] = [[] for _ in self._choices]

        async def collect() -> None:
            async for number, delta in self._arriving():
                told[number].append(delta)

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
        whole = [_joined(own) for own in told]
        scores: list[dict[str, Any] | None] = [None] * len(whole)
        if (scorer := self._service.scorer).is_asked(self._body):
            scores = [*await scorer.score(self._body, self._choices, [delta.tokens for delta in whole])]
        choices = [
            {"index": number, **fields(number, delta, own), **self._end(delta)}
            for number, (delta, own) in enumerate(zip(whole, scores, strict=True))
        ]
        return {**self._head, "choices": choices, "usage": self._usage()}

    async def stream(self, fields: Callable[[Delta, dict[str, Any] | None], dict[str, Any]]) -> EventStream:
        """The choices as server-sent events, each with the text that has become certain.

        `fields` returns the fields of a choice from (a delta, its `logprobs`).
        """
        self._submit(is_watched=True)
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}  # nginx holds events back otherwise
        return EventStream(self._events(fields), headers=headers, media_type="text/event-stream")

    async def _events(self, fields: Callable[[Delta, dict[str, Any] | None], dict[str, Any]]) -> AsyncIterator[bytes]:
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
                if isinstance(self._body, Chat):
                    start = {"delta": {"role": "assistant", "content": ""}}
                elif self._body.echo:
                    start = {"text": service.echoes([one])[0], "logprobs": await scored[number].of(None)}
                else:
                    break
                yield event([{"index": number, **start, "finish_reason": None}])
            async for number, delta in self._arriving():
                said = delta.text or delta.calls or delta.finish_reason
                if said or self._body.watch or (self._body.commits and delta.commits):
                    own = {"index": number, **fields(delta, await scored[number].of(delta))}
                    if delta.calls and delta.finish_reason:  # OpenAI's client overlooks one that ends there
                        yield event([own | {"finish_reason": None}])
                        own |= {"delta": {}, "logprobs": None}
                    yield event([own | self._end(delta)])
            if options.include_usage:
                yield event([])
            yield b"data: [DONE]\n\n"
        except (UserError, RuntimeError) as error:  # the status has been sent already
            yield b"data: " + to_json(error_body(500, str(error))) + b"\n\n"
        finally:
            self._forget()

    def _end(self, delta: Delta) -> dict[str, Any]:
        """Why an answer has ended, if it has, and its statistics."""
        fields: dict[str, Any] = {"finish_reason": delta.finish_reason}
        if self._body.commits:
            fields["commits"] = delta.commits
        if self._body.watch:
            fields["pieces"] = delta.pieces
        if (delta.finish_reason or self._body.watch) and delta.forwards is not None:
            fields |= {"forwards": delta.forwards, "rounds": delta.rounds}
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


def _joined(deltas: list[Delta]) -> Delta:
    """All deltas of an answer as one."""
    commits = [commit for delta in deltas for commit in delta.commits]
    calls = [call for delta in deltas for call in delta.calls]
    text = "".join(delta.text for delta in deltas)
    return dataclasses.replace(deltas[-1], text=text, commits=commits, calls=calls)


async def _leaves(request: Request) -> None:
    """Waits until the client has closed the connection; its request has been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
