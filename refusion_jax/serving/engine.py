"""Decodes requests as they arrive: one thread owns the batch on the device and reports to the callers.

The life of a request: `check` completes its settings, and `submit` queues its `Job`. The engine's thread repeats:

1. It takes waiting jobs for the free rows, and the device prefills their prompts. A long prompt waits while others
   decode: in each round a part of it is prefilled into the prefix cache, until a single one is left.
2. The device begins to run some forward passes for all rows.
3. Meanwhile the thread reports what it has read before.
4. It waits for the device, and reads the answers that are finished, or watched by their callers. The rows of finished
   answers, and of jobs that are over, are free again.

A job is over once its finished answer is reported, its caller wants no more, or decoding fails. No answer waits for
another one in the batch. Free rows go to the callers in turn, and the last one is kept for callers without a row, so
that a caller with many long requests does not block the others. An answer depends only on its own request.
"""

import dataclasses
import functools
import math
import threading
import time
import traceback
from collections.abc import Callable, Sequence

import numpy as np

from refusion_jax.cli.command import say
from refusion_jax.cli.errors import Failure, UserError, first_line
from refusion_jax.decoding.constrained import Matcher, batch_type
from refusion_jax.decoding.decoder import Decoder
from refusion_jax.decoding.memory import room_besides, token_bytes
from refusion_jax.decoding.queue import MOST_PARTS, batch_rows
from refusion_jax.decoding.requests import Answer, Request, check_tokens, prepare, read_answer
from refusion_jax.decoding.settings import Settings
from refusion_jax.decoding.stops import Stops
from refusion_jax.distributed.sharding import shard_count
from refusion_jax.model.interface import LanguageModel
from refusion_jax.model.shape import ModelConfig
from refusion_jax.systems.api import as_decoded, decoder_for

_RUN = 8  # forwards between two readings of what the rows have decoded
_SHORT_RUN = 2  # the same while a row is free, to admit new requests sooner
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
    parts: int = 0  # of its prompt that were prefilled while others decoded
    caller: object = None  # the same for all jobs that were submitted together
    turn: int = 0  # jobs wait in the order of their turns: each of a caller has the next one
    told: float = -math.inf  # time of the last report, by `time.monotonic`

    def give_up(self, error: Exception) -> None:
        """Tells the caller that there will be no answer, or no more of it."""
        self.is_over = True
        self.fail(error)


def sized(settings: Settings, model: ModelConfig, most: int = 2**31) -> Settings:
    """The settings with `cache_length` and `max_new_tokens`, which an engine needs, filled in.

    By default the cache has room for the context, at most for `most` tokens; SettingError if it exceeds the context, or
    an answer leaves no room for a prompt.
    """
    reads = model.max_position_embeddings
    if settings.cache_length > reads:
        settings.refuse("cache_length", f"the model reads {reads} tokens")
    room = settings.cache_length or min(reads, most)
    fitting = settings.for_model(model).fill_in(room // 2, _NEW_TOKENS).max_new_tokens
    own = dataclasses.replace(settings, cache_length=room, max_new_tokens=fitting)
    if (new := own.for_model(model).new_tokens) >= room:
        own.refuse("max_new_tokens", f"leaves no room for a prompt: {new} tokens in a cache of {room}")
    return own


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
            `cache_length` the most tokens of prompt and answer; both must be set, see `sized`.
          rows: decoded at once.
          grammar: any grammar, for an engine that serves requests with grammars.
          prefix_cache: bytes on each device for the prefix cache; None: see `_kept_blocks`.

        Raises:
          UserError: if these do not fit together or into memory.
        """
        self.settings, self._config = settings.for_model(model.config), model.config
        whole = self.settings.multiple  # tokens that a decoder writes at once, even if a single one is asked for
        self._compiled = dataclasses.replace(self.settings, cache_length=settings.cache_length - 1 + whole)
        shortest = dataclasses.replace(self.settings, max_new_tokens=whole)
        # The largest texts that are served, without a common prefix: they determine the compiled sizes.
        longest_prompt = Request([0] * (settings.cache_length - 1), settings=shortest, grammar=grammar)
        longest_answer = Request([1], settings=self.settings, grammar=grammar)
        largest = prepare([longest_prompt, longest_answer], self._compiled, model.config)
        self._longest_prompt, self._longest_answer = largest
        self._decoder = decoder = decoder_for(largest, model.config)
        self.fills_gaps = decoder.fills_gaps  # whether text after an answer may be given
        self._model, self._second, self._making, self._prefix_cache = model, None, threading.Lock(), prefix_cache
        model = as_decoded(model, settings)
        self.rows = batch_rows(rows, rows, model.mesh)
        kind, blocks = batch_type(decoder), _kept_blocks(model, decoder, self.rows, prefix_cache)
        self._empty = functools.partial(kind, model, decoder, self._longest_answer, self.rows, blocks, True)
        self._batch = self._empty()
        self._drafts = np.zeros(2, np.int64)  # numbers of verified and of committed drafts
        self._waiting: list[Job] = []  # by turn
        self._turn = 0  # the latest that a job in the batch has had
        self._rows: dict[int, Job] = {}
        self._taken: list[Job] = []  # being admitted or prefilled, until the device has confirmed it
        self._unreported: list[tuple[Job, tuple, bool]] = []  # (job, its `Progress.of`, whether it is finished)
        self._changed = threading.Condition()
        self._started, self._is_closed = threading.Event(), False
        self.failure: Exception | None = None
        self._thread = threading.Thread(target=self._guard, name="engine", daemon=True)

    @property
    def load(self) -> dict[str, int]:
        """The numbers of rows, of rows that are decoding, and of waiting jobs."""
        with self._changed:
            own = {"rows": self.rows, "decoding": len(self._rows), "waiting": len(self._wanted())}
        return {name: count + self._second.load[name] for name, count in own.items()} if self._second else own

    @property
    def verified(self) -> list[int]:
        """[number of drafts that forward passes have verified since the start, number of those that were committed]."""
        return (self._drafts + (self._second.verified if self._second else 0)).tolist()

    @property
    def is_ready(self) -> bool:
        """Whether a request would be accepted now: the engine runs, and the queue has room."""
        return not (self._is_closed or self.failure) and self.load["waiting"] < MOST_WAITING

    def check(self, request: Request) -> Request:
        """The request with its settings completed; UserError if it is invalid, or needs more than was compiled."""
        most, asked = self.settings.new_tokens, sum(length for _, length in request.gaps)
        if asked > most:
            raise UserError(f"{request.name}: asks for {asked} tokens; an answer has at most {most} here")
        (request,) = prepare([request], self._compiled, self._config)
        if decoder_for([self._longest_prompt, self._longest_answer, request], self._config) != self._decoder:
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
            waiting = self._wanted()
            if jobs and len(waiting) + len(jobs) > MOST_WAITING:
                raise BusyError(f"{len(waiting)} answers are waiting for a row, of at most {MOST_WAITING}")
            caller = object()
            for number, job in enumerate(jobs):
                job.caller, job.turn = caller, self._turn + number
            self._waiting = sorted([*waiting, *jobs], key=lambda job: job.turn)
            self._changed.notify()

    def _wanted(self) -> list[Job]:
        """The waiting jobs, without those that are over: their clients are gone."""
        self._waiting = [job for job in self._waiting if not job.is_over]
        return self._waiting

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
        batch, request = self._batch, self._longest_answer
        batch.compile_admissions(request)
        (row,) = batch.admit([request])
        batch.run(batch.rows, 1)
        batch.look()
        batch.stop([row])
        batch.free.append(row)

    def _decode(self) -> None:
        """The loop of steps 1 to 4 in the life of a request, until the engine is closed."""
        batch, rows = self._batch, self._rows
        while (jobs := self._take()) is not None:
            self._taken = jobs
            jobs = self._without_long(jobs)
            for row, job in zip(batch.admit([job.request for job in jobs]), jobs, strict=True):
                rows[row], job.cached = job, job.cached if job.parts else int(batch.known[row])
            if rows:
                most = _SHORT_RUN if batch.free else _RUN
                if any(job.by_forward for job in rows.values()):
                    most = 0 if jobs else 1  # 0 forwards show what an admission commits
                batch.run(len(batch.free) + 1, most)
            self._report_all()
            if rows:
                self._look()

    def _take(self) -> list[Job] | None:
        """Waiting jobs for the free rows; waits for one if there is nothing else to do. None: the engine is closed."""
        with self._changed:
            while not (self._wanted() or self._rows or self._unreported or self._is_closed):
                self._changed.wait()
            if self._is_closed:
                return None
            if not (free := len(self._batch.free)):
                return []
            jobs = self._waiting[: free - 1]
            served = {job.caller for job in (*self._rows.values(), *jobs)} if self.rows > 1 else ()
            # The last free row is for callers that have none.
            jobs += [job for job in self._waiting[free - 1 :] if job.caller not in served][:1]
            self._waiting = [job for job in self._waiting if job not in jobs]
            self._turn = max([self._turn, *(job.turn for job in jobs)])
            return jobs

    def _without_long(self, jobs: list[Job]) -> list[Job]:
        """The jobs to admit now. While rows decode, long prompts wait, and the first has its next part prefilled."""
        # Other admissions may evict its parts: it waits for no more of them than it has.
        waits = [job for job in jobs if self._rows and job.parts < MOST_PARTS]
        parts = {job: part for job in waits if (part := self._batch.next_part(job.request))}
        with self._changed:
            self._waiting = sorted([*parts, *self._waiting], key=lambda job: job.turn)
        self._taken = [job for job in jobs if job not in [*parts][1:]]
        for job, part in [*parts.items()][:1]:
            known = self._batch.prefill(part)
            job.cached, job.parts = job.cached if job.parts else known, job.parts + 1
        return [job for job in jobs if job not in parts]

    def _look(self) -> None:
        """Waits for the device; keeps what is to be reported, and frees the rows that have ended."""
        progress, self._taken, now = self._batch.look(), [], time.monotonic()
        self._drafts += progress.drafts.sum(axis=0)
        ended = []
        for row, job in [*self._rows.items()]:
            if row in self._batch.failed and not job.is_over:
                job.give_up(self._batch.failed[row])
            is_finished, is_over = not progress.active[row], job.is_over  # which other threads may set meanwhile
            is_due = job.by_forward or (job.is_watched and now - job.told >= OFTEN)
            if not is_over and (is_finished or is_due):
                self._unreported.append((job, progress.of(row), is_finished))
            if is_finished or is_over:
                del self._rows[row]
                ended.append(row)
        self._batch.stop([row for row in ended if progress.active[row]])
        self._batch.free += ended

    def _report_all(self) -> None:
        """Reports what was read; a fault of one answer must not affect others."""
        for job, decoded, is_finished in self._unreported:
            if job.is_over:
                continue
            job.told = time.monotonic()
            try:
                answer = read_answer(job.request, *decoded, self._decoder.ids, not is_finished)
                wants_more = job.report(answer, is_finished)
                if is_finished or not wants_more:  # else it stays: the client may have left meanwhile
                    job.is_over = True
            except Exception as error:  # noqa: BLE001  of any kind
                job.give_up(error)
        self._unreported = []

    def _begin_anew(self, error: Exception) -> None:
        """Replaces the batch by an empty one, as donated arrays are lost; raises if that fails, too.

        The requests that were being admitted or prefilled fail or, if there were none, all in the batch; the others are
        decoded again, to the same answers. So each failure fails at least one request, and none is repeated forever.
        """
        self._report_all()
        lost = [job for job in self._taken or self._in_batch if not job.is_over]
        why = f"decoding has failed: {type(error).__name__}: {first_line(error)}"
        say(f"{why}; answers that are lost: {len(lost)}")
        for job in lost:
            job.give_up(Failure(why))
        with self._changed:
            self._waiting = [job for job in self._in_batch if not job.is_over] + self._waiting
        self._rows, self._taken = {}, []
        traceback.clear_frames(error.__traceback__)  # it holds the old batch, whose memory the new one needs
        del self._batch
        self._batch = self._empty()
        self._compile()

    def _fail_all(self, error: Exception) -> None:
        with self._changed:
            jobs = [*self._in_batch, *self._waiting]
            self._rows.clear()
            self._waiting.clear()
        for job in jobs:
            job.give_up(error)

    @property
    def _in_batch(self) -> list[Job]:
        return [*dict.fromkeys((*self._rows.values(), *self._taken))]


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
