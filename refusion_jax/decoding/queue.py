"""Continuous batching: requests of a queue in the rows of a batch, which are decoded together and read by the host.

The device runs forward passes in a loop until enough rows have finished, at most 64, and only then synchronizes with
the host; if the caller may stop answers early, every few forward passes. Three compiled programs do the work: `_admit`
prefills a few requests and puts them into free rows, `_run` decodes until enough rows are finished or enough forward
passes are done, and `_release` frees rows whose answers the caller has stopped.

Axes: B rows of the batch, R requests admitted at once, C cache entries, M blocks of a text.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx, struct
from jax.sharding import Mesh
from jaxtyping import ArrayLike, Bool, Int32, UInt32

from refusion_jax.cli.errors import UserError
from refusion_jax.decoding import cache as kv
from refusion_jax.decoding import prefixes
from refusion_jax.decoding.decoder import Decoder, RowState, map_state
from refusion_jax.decoding.memory import REFILL, admissions, check_memory, room_besides
from refusion_jax.decoding.requests import PREFILL_CHUNK, Answer, Request, read_answer
from refusion_jax.decoding.sampling import Record, count_drafts, select
from refusion_jax.decoding.trajectory import Trajectory, collect
from refusion_jax.distributed.processes import fetch
from refusion_jax.distributed.sharding import constrain, shard_count
from refusion_jax.model.interface import LanguageModel
from refusion_jax.model.key_values import KeyValues

UNTIL_DONE = np.iinfo(np.int32).max  # forward passes of a run that ends only when its rows have
LOOK = 16  # forward passes between two checks of whether the caller stops answers
MOST_PARTS = 8  # of a prompt that is prefilled in parts: each copies the cache of a row
_MOST = 64  # most forward passes of a run: then the host can be interrupted, and notices a decoder that does not end
_FORWARDS = 256  # per place of an answer, more than any decoder needs
_KEPT = 4  # the prefix cache takes as much memory as a quarter of the rows
_NONE = prefixes.Prefixes(0, 1)


def stream(
    model: LanguageModel,
    decoder: Decoder,
    requests: Sequence[Request],
    batch_size: int,
    watch: Callable[[int, Answer], object] | None = None,
    every: int = LOOK,
    record: Callable[[int, Trajectory], object] | None = None,
    batch_type: type["RunningBatch"] | None = None,
) -> Iterator[tuple[int, Answer]]:
    """Decodes a queue of requests and yields (index of the request, its answer) as answers finish.

    The longest texts are decoded first, since a long one at the end would run while the other rows are idle. An answer
    does not depend on the other requests, except that one stopped by `watch` may be a few forward passes longer.
    UserError if one cannot be continued.

    Args:
      model: from `load_model`. The batch is split over the mesh of its weights; all hosts of that mesh must call this
        with the same arguments.
      decoder: one whose sizes serve all of the requests.
      requests: from `prepare`, at least one.
      batch_size: the largest B.
      watch: (index, answer so far, with the tokens before its first gap) -> whether to stop this answer. Called every
        few forward passes; the device then waits for the host.
      every: forward passes between calls of `watch`; with 1 it is also called after an admission.
      record: called with (index, what the last forward passes did), every few forward passes; costs nothing if None.
      batch_type: a subclass of RunningBatch, if the decoder needs one.
    """
    rows = batch_rows(len(requests), batch_size, model.mesh)
    kept = -(-rows // _KEPT) * decoder.cache_length if len(requests) > 1 else 0
    blocks = kept // decoder.prefix_block if kept and kept <= room_besides(model, model.mesh, rows, decoder) else 0
    batch = (batch_type or RunningBatch)(model, decoder, requests[0], rows, blocks)
    batch.recorded = LOOK if record else 0
    refill, ids = -(-batch.rows // REFILL), decoder.ids
    index_of, finished = {}, []
    waiting = sorted(range(len(requests)), key=lambda index: (requests[index].length, -index))  # popped from its end

    def answers() -> Iterator[tuple[int, Answer]]:
        for index, is_ended, outcome in finished:
            yield index, read_answer(requests[index], *outcome, ids, is_ended)

    while waiting or index_of:
        fitting = min(len(batch.free), len(waiting))
        some = [waiting.pop() for _ in range(fitting)] if fitting >= min(refill, len(waiting)) else []
        index_of |= zip(batch.admit([requests[index] for index in some]), some, strict=True)
        # If fewer requests wait than a refill takes, as many free rows are enough.
        wanted = min(refill, len(waiting)) if waiting else batch.rows
        most = every if watch else _MOST
        most = 0 if most == 1 and some else most  # to show what an admission commits
        batch.run(wanted, most)
        yield from answers()  # so that the caller works while the device decodes
        progress = batch.look()
        if batch.failed:
            raise next(iter(batch.failed.values()))
        for row, index in index_of.items() if record else ():
            record(index, jax.tree.map(lambda x, row=row: x[:, row], progress.trajectory))
        done, ended = [row for row in index_of if not progress.active[row]], []
        for row, index in index_of.items() if watch else ():
            so_far = read_answer(requests[index], *progress.of(row), ids, is_ended=row not in done)
            if watch(index, so_far) and row not in done:
                ended.append(row)
        batch.stop(ended)
        finished = [(index_of.pop(row), row in ended, progress.of(row)) for row in [*done, *ended]]
        batch.free += [*done, *ended]
    yield from answers()


@dataclasses.dataclass(frozen=True, eq=False)
class StaticArguments:
    """Static arguments of jitted functions, compared by identity: hashing a model takes longer than a small pass."""

    graphdef: nnx.GraphDef
    decoder: Decoder


@functools.cache
def static_arguments(graphdef: nnx.GraphDef, decoder: Decoder) -> StaticArguments:
    """The same `StaticArguments` for equal arguments, so that they share compiled code."""
    return StaticArguments(graphdef, decoder)


@dataclasses.dataclass(frozen=True)
class Progress:
    """What the rows of a batch have decoded so far, on the host."""

    active: Bool[np.ndarray, "B"]  # rows that are not finished
    record: Record
    forwards: Int32[np.ndarray, "B"]
    rounds: Int32[np.ndarray, "B"]
    trajectory: Trajectory | None = None  # of the last run, if recorded
    drafts: Int32[np.ndarray, "B 2"] | None = None  # of the last run, if counted: see `count_drafts`

    def of(self, row: int) -> tuple[Record, np.ndarray, np.ndarray]:
        """(record, forwards, rounds) of one row."""
        return jax.tree.map(lambda x: x[row], (self.record, self.forwards, self.rounds))


@struct.dataclass
class Newcomers:
    """Requests to be admitted, padded with copies whose row is B, outside the batch, so that they are dropped."""

    rows: Int32[ArrayLike, "R"]
    layout: Any  # from `Decoder.lay_out`: arrays with leading axis R
    seeds: UInt32[ArrayLike, "R"]
    noise: UInt32[ArrayLike, "R"]  # see `Request.noise`
    known: Int32[ArrayLike, ""]  # leading given tokens of each request whose keys and values are in the store ..
    copied: Int32[ArrayLike, "R M"]  # .. at these places
    written: Int32[ArrayLike, "R M"]  # where its new blocks are to be stored


def newcomers(
    requests: dict[int, Request],
    R: int,
    B: int,
    decoder: Decoder,
    store: prefixes.Prefixes = _NONE,
    blocks: Sequence[list[bytes]] = (),
) -> Newcomers:
    """The requests to admit, by row of the batch, padded to R; all begin with equally many blocks of the store."""
    some = list(requests.values())
    some += some[:1] * (R - len(some))
    blocks = [*blocks, *[[]] * (R - len(blocks))]
    known = store.known(blocks[0])
    copied, written = store.use(blocks, known, decoder.cache_length // store.size if store.count else 0)
    return Newcomers(
        rows=np.array([*requests, *[B] * (R - len(requests))], np.int32),
        layout=decoder.lay_out(some),
        seeds=np.array([request.settings.seed for request in some], np.uint32),
        noise=np.array([request.noise for request in some], np.uint32),
        known=np.int32(known * store.size),
        copied=copied,
        written=written,
    )


class RunningBatch:
    """Requests in the rows of a batch, which are decoded together.

    All hosts of the weights' mesh must make the same calls.
    """

    def __init__(
        self,
        model: LanguageModel,
        decoder: Decoder,
        like: Request,
        rows: int,
        blocks: int = 0,
        counts_drafts: bool = False,
    ):
        """An empty batch; SettingError if it does not fit into memory.

        `like` is any request; only its structure as arrays matters. `rows` is B, a multiple of the shards of the
        weights' mesh, `blocks` the size of the prefix cache, if the decoder can copy prefixes; with `counts_drafts`,
        `Progress` has drafts.
        """
        graphdef, params = nnx.split(model)
        self._params = nnx.to_pure_dict(params)  # flattened in C++; a State would take as long as a small forward pass
        self._static, self._mesh, self._decoder = static_arguments(graphdef, decoder), model.mesh, decoder
        self.rows, self._sizes = rows, admissions(rows, self._mesh)
        self.free = list(range(rows))
        self._trajectory: Trajectory | None = None
        self._counts_drafts, self._drafts = counts_drafts, None
        self.recorded = 0  # most forward passes of a run whose trajectory is recorded; 0: none
        self.failed: dict[int, UserError] = {}  # by row: why its answer cannot be continued
        self._prefixes = prefixes.Prefixes(blocks if decoder.copies_prefix else 0, decoder.prefix_block)
        self.known = np.zeros(rows, np.int32)  # given tokens of each row that came from the prefix cache
        check_memory(model, self._mesh, rows, decoder, self._prefixes.count * self._prefixes.size)
        with jax.set_mesh(self._mesh):
            self._state = _empty(self._static, self._params, decoder.lay_out([like]), rows)
            self._store = None
            if self._prefixes.count:
                self._store = prefixes.empty_store(self._state.cache.entries, blocks, decoder.prefix_block)

    def admit(self, requests: Sequence[Request]) -> list[int]:
        """Prefills requests in free rows, of which there must be enough, and returns their rows.

        Blocks of given tokens that are in the prefix cache are copied.
        """
        rows, waiting = {}, {number: self._prefixes.blocks_of(request) for number, request in enumerate(requests)}
        while waiting:
            numbers = [*waiting]
            group = [numbers[at] for at in self._prefixes.group([*waiting.values()], self._sizes[-1])]
            some, blocks = [requests[n] for n in group], [waiting.pop(n) for n in group]
            rows |= zip(group, self._admit_group(some, blocks), strict=True)
        return [rows[number] for number in range(len(requests))]

    def next_part(self, request: Request) -> Request | None:
        """A request for the next part of a prompt that is not in the prefix cache, for `prefill`.

        None if no more than one part is missing, or the prefix cache has no room for the whole prompt.
        """
        store, blocks = self._prefixes, self._prefixes.blocks_of(request)
        part = max(self._decoder.cache_length // MOST_PARTS, PREFILL_CHUNK)
        end = store.known(blocks) + max(part // store.size, 1)
        tokens = end * store.size + 1  # the last given token is in no block
        fits = end < len(blocks) <= store.count and tokens <= len(request.prompt)
        return dataclasses.replace(request, prompt=request.prompt[:tokens], template=(1,)) if fits else None

    def prefill(self, part: Request) -> int:
        """Prefills a part into the prefix cache alone; returns how many of its tokens were known before."""
        blocks = [self._prefixes.blocks_of(part)]
        part = dataclasses.replace(part, prompt=part.prompt[:-1])  # all of these are in blocks
        new = newcomers({self.rows: part}, self._sizes[0], self.rows, self._decoder, self._prefixes, blocks)
        self._prefill(new)
        return int(new.known)

    def compile_admissions(self, like: Request) -> None:
        """Compiles admission for every number of rows, by prefilling a request into rows outside the batch."""
        for size in self._sizes:
            self._prefill(newcomers({self.rows: like}, size, self.rows, self._decoder, self._prefixes))

    def _admit_group(self, requests: Sequence[Request], blocks: Sequence[list[bytes]]) -> list[int]:
        """Prefills requests together; all begin with equally many blocks of the prefix cache."""
        rows = [self.free.pop() for _ in requests]
        size = next(size for size in self._sizes if size >= len(requests))
        some = dict(zip(rows, requests, strict=True))
        new = newcomers(some, size, self.rows, self._decoder, self._prefixes, blocks)
        self.known[rows] = new.known
        self._prefill(new)
        return rows

    def _prefill(self, new: Newcomers) -> None:
        with jax.set_mesh(self._mesh):
            self._state, self._store = _admit(self._static, self._params, self._state, self._store, new)

    def run(self, finished: int, most: int = UNTIL_DONE) -> None:
        """Starts decoding until `finished` rows, including free ones, are done, or for `most` forward passes."""
        with jax.set_mesh(self._mesh):
            most = min(most, self.recorded or most)
            how = finished, most, self.recorded, self._counts_drafts
            self._state, self._trajectory, self._drafts = _run(self._static, self._params, self._state, *how)

    def look(self) -> Progress:
        """Waits for the device and fetches what the rows have decoded; UserError where the decoder does not end."""
        s = self._state
        with jax.set_mesh(self._mesh):
            progress = Progress(*fetch((s.active, s.record, s.forwards, s.rounds, self._trajectory, self._drafts)))
        longest, name = np.max(progress.forwards[progress.active], initial=0), type(self._decoder).__name__
        if longest > _FORWARDS * progress.record.tokens.shape[1]:
            raise UserError(f"{name}.step: does not end: an answer has taken {longest} forwards")
        return progress

    def stop(self, rows: Sequence[int]) -> None:
        """Frees rows before they are finished."""
        if rows:
            ended = np.zeros(self.rows, bool)
            ended[list(rows)] = True
            with jax.set_mesh(self._mesh):
                self._state = _release(self._state, ended)


def batch_rows(requests: int, batch_size: int, mesh: Mesh) -> int:
    """Rows of the batch: the smallest power of two for these requests, at most batch_size, rounded up to shards."""
    rows, shards = min(batch_size, 1 << max(requests - 1, 0).bit_length()), shard_count(mesh, "batch")
    return -(-rows // shards) * shards


def decode_once(graphdef, params, newcomers: Newcomers, rows: int, decoder: Decoder) -> Record:
    """Fills a batch and decodes it to the end, as one function that `plan` can lower and compile."""
    static = static_arguments(graphdef, decoder)
    state, _ = _admit(static, params, _empty(static, params, newcomers.layout, rows), None, newcomers)
    return _run(static, params, state, rows, UNTIL_DONE)[0].record


@functools.partial(jax.jit, static_argnames=("static", "rows"))
def _empty(static: StaticArguments, params, layout, rows: int) -> RowState:
    """A batch of finished rows; only the shapes of the layout matter."""
    layout = jax.tree.map(lambda x: jnp.zeros((rows, *x.shape[1:]), x.dtype), layout)
    keys = jax.random.split(jax.random.key(0), rows)
    model = nnx.merge(static.graphdef, params)
    like = jax.eval_shape(lambda: static.decoder.init(model, layout, keys))
    if not isinstance(like, RowState):
        raise UserError(f"{type(static.decoder).__name__}.init: returns {type(like).__name__}, not a RowState")
    return _placed(jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like))


@functools.partial(jax.jit, static_argnames="static", donate_argnames=("state", "store"))
def _admit(
    static: StaticArguments, params, state: RowState, store: KeyValues | None, new: Newcomers
) -> tuple[RowState, KeyValues | None]:
    """Prefills requests and puts them into their rows of the batch; rows outside the batch are dropped."""
    keys = jax.vmap(lambda seed, noise: jax.random.fold_in(jax.random.key(seed), noise))(new.seeds, new.noise)
    layout = new.layout
    if store:
        capacity = state.cache.entries.keys.shape[3]
        given = layout.given.replace(entries=prefixes.copy(store, new.copied, capacity), known=new.known)
        layout = layout.replace(given=given)
    started = static.decoder.init(nnx.merge(static.graphdef, params), layout, keys)

    def put(*at):
        return lambda old, some: jax.tree.map(lambda old, some: old.at[at].set(some, mode="drop"), old, some)

    store = prefixes.write(store, started.cache.entries, new.written) if store else None
    return _placed(map_state(put(new.rows), put(slice(None), new.rows), state, started)), store


@functools.partial(jax.jit, static_argnames=("static", "recorded", "counts_drafts"), donate_argnames="state")
def _run(
    static: StaticArguments, params, state: RowState, wanted, most, recorded: int = 0, counts_drafts: bool = False
) -> tuple[RowState, Trajectory | None, jax.Array | None]:
    """Decodes until `wanted` rows are finished, for at most `most` passes: (next state, trajectory, draft counts).

    `recorded` is the most passes that are recorded; the counts are `count_drafts` summed over all passes, [B, 2].
    """
    model, decoder = nnx.merge(static.graphdef, params), static.decoder

    def step(state):
        with collect() as told:
            after = decoder.next_state(model, state)
        number = jnp.where(state.active, state.forwards + 1, 0)
        trajectory = Trajectory.of(number, state.record.count, told) if recorded else None
        if not counts_drafts:
            return after, trajectory, None
        capacity = decoder.cache_length or decoder.width
        return after, trajectory, count_drafts(told, state.active, state.record, after.record, capacity)

    def is_running(carry):
        state, *_, done = carry
        return (jnp.sum(~state.active) < wanted) & (done < most)

    def forward(carry):
        state, trajectory, drafts, done = carry
        after, now, new = step(state)
        trajectory = jax.tree.map(lambda x, new: x.at[done].set(new), trajectory, now)
        return after, trajectory, jax.tree.map(jnp.add, drafts, new), done + 1

    _, like, _ = jax.eval_shape(step, state) if recorded else (state, None, None)
    nothing = jax.tree.map(lambda x: jnp.zeros((recorded, *x.shape), x.dtype), like)
    none = jnp.zeros((len(state.forwards), 2), jnp.int32) if counts_drafts else None
    end, trajectory, drafts, _ = jax.lax.while_loop(is_running, forward, (state, nothing, none, 0))
    return _placed(end), trajectory, drafts


@functools.partial(jax.jit, donate_argnames="state")
def _release(state: RowState, ended: jax.Array) -> RowState:
    """Clears the rows where `ended` [B] is true, except for their keys and values."""
    return _placed(map_state(lambda x: select(ended, jnp.zeros_like(x), x), lambda entries: entries, state))


def _placed(state: RowState) -> RowState:
    """Constrains a state to be split by rows, and the cache by heads too.

    Every program ends with this: if the partitioner chose output shardings, the next program would be recompiled.
    """
    return map_state(lambda x: constrain(x, "batch", *(None,) * (x.ndim - 1)), kv.split, state)
