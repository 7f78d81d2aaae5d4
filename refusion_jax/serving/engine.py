"""Decodes requests as they arrive: one thread owns the batch on the device and reports to the callers.

A row is free again as soon as its answer is complete: no answer waits for another one in the batch. Free rows go to the
callers in turn, and the last one is kept for callers without a row, so that a caller with many long requests does not
block the others. An answer depends only on its own request.
"""

import collections
import dataclasses
import functools
import math
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from refusion_jax.cli.command import say
from refusion_jax.cli.errors import Failure, UserError, first_line
from refusion_jax.decoding.constrained import Matcher, batch_type
from refusion_jax.decoding.decoder import Decoder
from refusion_jax.decoding.memory import room_besides, token_bytes
from refusion_jax.decoding.queue import batch_rows
from refusion_jax.decoding.requests import Answer, Request, check_tokens, prepare, read_answer
from refusion_jax.decoding.settings import Settings
from refusion_jax.decoding.stops import Stops
from refusion_jax.distributed.sharding import shard_count
from refusion_jax.model.interface import LanguageModel
from refusion_jax.model.shape import ModelConfig
from refusion_jax.systems.api import as_decoded, decoder_for

LOOK = 8  # forwards between two readings of what the rows have decoded
SOON = 2  # the same while a row is free, to admit new requests sooner
OFTEN = 0.03  # seconds between two updates of a streamed answer: faster than anyone reads
MOST_WAITING = 4096  # jobs, not counting those in the batch
_NEW_TOKENS = 256  # of an answer, unless the settings say otherwise


class BusyError(RuntimeError):
    """The queue is full."""


class TooLongError(UserError):
    """A prompt and its answer do not fit into the context."""


@dataclasses.dataclass(eq=False)
class Job:
    """A request, and the callbacks for its answer, which the engine's thread calls."""

    request: Request  # from `Engine.check`
    report: Callable[[Answer, bool], bool]  # (answer so far, whether it is finished) -> whether to continue
    fail: Callable[[Exception], None]
    is_watched: bool  # whether to report also while the answer is written
    by_forward: bool = False  # whether to report after each forward pass; the device waits for the host then
    is_over: bool = False  # answered, or no longer wanted
    cached: int = 0  # leading tokens of the prompt whose keys and values were cached
    caller: object = None  # the same for all jobs that were submitted together
    told: float = -math.inf  # time of the last report, by `time.monotonic`


def sized(settings: Settings, model: ModelConfig, most: int = 2**31) -> Settings:
    """The settings with `cache_length` and `max_new_tokens`, which an engine needs, filled in.

    By default the cache has room for the context, at most for `most` tokens; SettingError if it exceeds the context.
    """
    reads = model.max_position_embeddings
    if settings.cache_length > reads:
        settings.refuse("cache_length", f"the model reads {reads} tokens")
    room = settings.cache_length or min(reads, most)
    fitting = settings.for_model(model).fill_in(room // 2, _NEW_TOKENS).max_new_tokens
    return dataclasses.replace(settings, cache_length=room, max_new_tokens=fitting)


class Engine:
    """A model with its batch of rows, decoded by a separate thread."""

    def __init__(
        self,
        model: LanguageModel,
        settings: Settings,
        rows: int,
        grammar: Matcher | None = None,
        prefix_cache: int | None = None,
    ):
        """Allocates the cache of all rows; the forward passes are compiled by `start`.

        Args:
          model: from `load_model`, only on devices of this process.
          settings: defaults for all requests. `max_new_tokens` is the most that a request may ask for, and
            `cache_length` the most tokens of prompt and answer; both must be set.
          rows: decoded at once.
          grammar: any grammar, for an engine that serves requests with grammars.
          prefix_cache: bytes on each device for the prefix cache; None: see `_kept_blocks`.

        Raises:
          UserError: if these do not fit together or into memory.
        """
        self.settings, self._config = settings.for_model(model.config), model.config
        if self.settings.new_tokens >= settings.cache_length:
            new = self.settings.new_tokens
            why = f"leaves no room for a prompt: {new} tokens in a cache of {settings.cache_length}"
            settings.refuse("max_new_tokens", why)
        whole = self.settings.multiple  # tokens that a decoder writes at once, even if a single one is asked for
        self._compiled = dataclasses.replace(self.settings, cache_length=settings.cache_length - 1 + whole)
        shortest = dataclasses.replace(self.settings, max_new_tokens=whole)
        prompt = [0] * (settings.cache_length - 1)
        # The largest texts that are served, without a common prefix: they determine the compiled sizes.
        self._largest = prepare(
            [
                Request(prompt, settings=shortest, grammar=grammar),
                Request([1], settings=self.settings, grammar=grammar),
            ],
            self._compiled,
            model.config,
        )
        self._decoder = decoder = decoder_for(self._largest, model.config)
        self.fills_gaps = decoder.fills_gaps  # whether text after an answer may be given
        self._model, self._second, self._making, self._prefix_cache = model, None, threading.Lock(), prefix_cache
        model = as_decoded(model, settings)
        self.rows = batch_rows(rows, rows, model.mesh)
        blocks = _kept_blocks(model, decoder, self.rows, prefix_cache)
        self._empty = functools.partial(batch_type(decoder), model, decoder, self._largest[0], self.rows, blocks, True)
        self._batch = self._empty()
        self._drafts = np.zeros(2, np.int64)  # numbers of verified and of committed drafts
        self._waiting: collections.deque[collections.deque[Job]] = collections.deque()  # those of each caller
        self._rows: dict[int, Job] = {}
        self._taken: list[Job] = []  # being admitted, until the device has confirmed it
        self._read: list[tuple[Job, Any, bool]] = []  # arguments of pending calls of `_report`
        self._changed = threading.Condition()
        self._started, self._is_closed = threading.Event(), False
        self.failure: Exception | None = None
        self._thread = threading.Thread(target=self._guard, name="engine", daemon=True)

    @property
    def load(self) -> dict[str, int]:
        """The numbers of rows, of rows that are decoding, and of waiting jobs."""
        with self._changed:
            waiting = sum(not job.is_over for jobs in self._waiting for job in jobs)
        own = {"rows": self.rows, "decoding": len(self._rows), "waiting": waiting}
        return {name: count + self._second.load[name] for name, count in own.items()} if self._second else own

    @property
    def verified(self) -> tuple[int, int]:
        """(number of drafts that forward passes have verified since the start, number of those that were committed)."""
        drafts = self._drafts + (self._second.verified if self._second else 0)
        return int(drafts[0]), int(drafts[1])

    @property
    def is_ready(self) -> bool:
        """Whether a request would be accepted now: the engine runs, and the queue has room."""
        return not (self._is_closed or self.failure) and self.load["waiting"] < MOST_WAITING

    def check(self, request: Request) -> Request:
        """The request with its settings completed; UserError if it is invalid, or needs more than was compiled."""
        most = self._largest[1].settings.new_tokens
        asked = sum(length for _, length in request.gaps)
        if asked > most:
            raise UserError(f"{request.name}: asks for {asked} tokens; an answer has at most {most} here")
        (request,) = prepare([request], self._compiled, self._config)
        if decoder_for([*self._largest, request], self._config) != self._decoder:
            raise UserError(
                f"{request.name}: its settings need larger forward passes than were compiled: give them at the start, "
                "as --decode flags"
            )
        return request

    def check_prompt(self, tokens: Sequence[int], name: str, more: int) -> None:
        """Refuses a prompt that the model cannot read, or not before `more` tokens; `name` is for the message."""
        if len(tokens) + more > (most := self.settings.cache_length):
            raise TooLongError(f"{name}: has {len(tokens)} tokens; at most {most - more} fit before {more} more")
        check_tokens(name, tokens, self._config.num_tokens)

    def constrained(self, grammar: Matcher) -> "Engine":
        """The engine for requests with grammars, created and compiled for the first of them.

        It has a quarter of the rows, and its own caches, so that other answers neither change nor wait for grammars.
        Raises UserError if the decoder cannot follow grammars or this engine does not fit into memory, Failure if the
        device fails while it is compiled.
        """
        with self._making:
            if self._second is None or self._second.failure:
                rows = batch_rows(-(-self.rows // 4), self.rows, self._model.mesh)
                kept = self._prefix_cache and self._prefix_cache // 4
                second = Engine(self._model, self.settings, rows, grammar, kept)
                second.start()
                if second.failure:
                    raise Failure(f"structured answers cannot be decoded: {first_line(second.failure)}")
                self._second = second
        return self._second

    def submit(self, jobs: Sequence[Job]) -> None:
        """Queues the jobs of one caller, all or none: BusyError if too many are waiting."""
        with self._changed:
            if self._is_closed or self.failure:
                raise BusyError("the server is about to end")
            alive = [[job for job in own if not job.is_over] for own in self._waiting]  # the others' clients are gone
            self._waiting = collections.deque(collections.deque(own) for own in alive if own)
            waiting = sum(map(len, alive))
            if jobs and waiting + len(jobs) > MOST_WAITING:
                raise BusyError(f"{waiting} answers are waiting for a row, of at most {MOST_WAITING}")
            if jobs:
                own = collections.deque(jobs)
                for job in jobs:
                    job.caller = own
                self._waiting.append(own)
            self._changed.notify()

    def start(self, failed: Callable[[], None] = lambda: None) -> None:
        """Starts the thread, and waits until all is compiled; calls `failed` once if the engine fails for good."""
        self._failed = failed
        self._thread.start()
        self._started.wait()

    def close(self) -> None:
        """Ends the thread; unanswered jobs fail."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._thread.join()
        if self._second:
            self._second.close()
        self._fail_all(RuntimeError("the server has ended"))

    def _guard(self) -> None:
        try:
            self._compile()
            self._started.set()
            while not self._is_closed:
                try:
                    self._decode()
                except Exception as error:  # noqa: BLE001  the device may raise anything
                    self._begin_anew(error)
        except Exception as error:  # noqa: BLE001  nothing can be decoded any more
            self.failure, self._batch = error.with_traceback(None), None  # so that nothing holds the cache
            self._fail_all(error)
            self._failed()
            self._started.set()

    def _compile(self) -> None:
        """Compiles all programs, by decoding a request that is neither reported nor counted."""
        batch, request = self._batch, self._largest[1]
        batch.compile_admissions(request)
        (row,) = batch.admit([request])
        batch.run(batch.rows, 1)
        batch.look()
        batch.stop([row])
        batch.free.append(row)

    def _begin_anew(self, error: Exception) -> None:
        """Replaces the batch by an empty one, as donated arrays are lost; raises if that fails, too.

        The requests that were being admitted fail or, if there were none, all in the batch; the others are decoded
        again, to the same answers. So each failure fails at least one request, and none is repeated forever.
        """
        for job, outcome, is_finished in self._read:
            self._report(job, outcome, is_finished)
        alive = [job for job in self._in_batch if not job.is_over]
        lost = [job for job in alive if job in self._taken or not self._taken]
        why = f"decoding has failed: {type(error).__name__}: {first_line(error)}"
        say(f"{why}; answers that are lost: {len(lost)}")
        for job in lost:
            job.is_over = True
            job.fail(Failure(why))
        with self._changed:
            self._waiting.extendleft(collections.deque([job]) for job in alive if job not in lost)
        self._rows, self._taken, self._read = {}, [], []
        traceback.clear_frames(error.__traceback__)  # it holds the old batch, whose memory the new one needs
        del self._batch
        self._batch = self._empty()
        self._compile()

    def _fail_all(self, error: Exception) -> None:
        with self._changed:
            jobs = [*self._in_batch, *(job for some in self._waiting for job in some)]
            self._rows.clear()
            self._waiting.clear()
        for job in jobs:
            job.fail(error)

    @property
    def _in_batch(self) -> list[Job]:
        return [*dict.fromkeys((*self._rows.values(), *self._taken))]

    def _decode(self) -> None:
        """The loop: while the device decodes, the host reports what was read before."""
        batch, rows = self._batch, self._rows
        while (some := self._take(len(batch.free), is_idle=not rows and not self._read)) is not None:
            self._taken = some
            for row, job in zip(batch.admit([job.request for job in some]), some, strict=True):
                rows[row], job.cached = job, int(batch.known[row])
            if rows:
                by_forward = any(job.by_forward for job in rows.values())
                # 0 forwards show what an admission commits.
                most = int(not some) if by_forward else SOON if batch.free else LOOK
                batch.run(len(batch.free) + 1, most)
            for job, outcome, is_finished in self._read:
                self._report(job, outcome, is_finished)
            self._read = []
            if rows:
                progress, self._taken = batch.look(), []
                self._drafts += progress.drafts.sum(axis=0)
                for row, error in batch.failed.items():
                    if row in rows and not rows[row].is_over:
                        rows[row].fail(error)
                        rows[row].is_over = True
                done = [row for row in rows if not progress.active[row]]
                dropped = [row for row, job in rows.items() if progress.active[row] and job.is_over]
                batch.stop(dropped)
                now = time.monotonic()
                shown = {row for row, job in rows.items() if job.is_watched and now - job.told >= OFTEN}
                self._read = [
                    (job, progress.of(row), not progress.active[row])
                    for row, job in rows.items()
                    if not job.is_over and (row in shown or job.by_forward or not progress.active[row])
                ]
                for row in (*done, *dropped):
                    del rows[row]
                    batch.free.append(row)

    def _take(self, free: int, is_idle: bool) -> list[Job] | None:
        """Waiting jobs for the free rows; if idle, waits for a job. None: the engine is closed."""
        with self._changed:
            while is_idle and not self._waiting and not self._is_closed:
                self._changed.wait()
            if self._is_closed:
                return None
            some = []
            while len(some) < free and (job := self._next(is_last=len(some) == free - 1, chosen=some)):
                some.append(job)
            return some

    def _next(self, is_last: bool, chosen: list[Job]) -> Job | None:
        """The next job in turn, if there is one; the last free row is for callers that have none."""
        having = [*self._rows.values(), *chosen] if is_last and self.rows > 1 else []
        served = {id(job.caller) for job in having}
        for _ in range(len(self._waiting)):
            jobs = self._waiting[0]
            self._waiting.rotate(-1)
            while jobs and jobs[0].is_over:
                jobs.popleft()
            job = jobs.popleft() if jobs and id(jobs[0].caller) not in served else None
            if not jobs:
                self._waiting.pop()  # it is at the end now
            if job:
                return job
        return None

    def _report(self, job: Job, outcome: Any, is_finished: bool) -> None:
        if job.is_over:
            return
        job.told = time.monotonic()
        try:
            answer = read_answer(job.request, *outcome, self._decoder.ids, is_ended=not is_finished)
            goes_on = job.report(answer, is_finished)
        except Exception as error:  # noqa: BLE001  a fault of one answer must not affect others
            job.fail(error)
            goes_on = False
        if is_finished or not goes_on:  # else it stays: the client may have left in the meantime
            job.is_over = True


@dataclasses.dataclass(frozen=True)
class Choice:
    """One answer that a client wants, in the form that the modules of the server share."""

    prompt: list[int]  # in the form that the model reads
    added: int  # number of its leading tokens that the client did not send: 1 for a BOS, or 0
    text: str | None  # the prompt, if it was given as text
    request: Request | None  # checked; None if no token is to be decoded
    limit: int  # tokens of the answer, at most
    stops: Stops
    engine: Engine  # that decodes it

    @property
    def given(self) -> int:
        """Number of tokens that the model is given: the prompt, and the text after the answer."""
        return len(self.request.given[0] if self.request else self.prompt)


def _kept_blocks(model: LanguageModel, decoder: Decoder, rows: int, most: int | None) -> int:
    """The number of blocks of the prefix cache; see `decoding.prefixes`.

    They take at most `most` bytes on each device; None: as many as the batch, but at most a quarter of what it leaves.
    """
    tokens = min(rows * decoder.cache_length, room_besides(model, model.mesh, rows, decoder) // 4)
    if most is not None:
        tokens = most * shard_count(model.mesh, "heads") // token_bytes(model)
    return tokens // decoder.prefix_block
