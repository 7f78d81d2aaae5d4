"""Continuous batching: finished rows give out their answers and take the next requests from the queue.

The device runs forwards in a loop until enough rows have finished, and only then synchronizes with the host; where the
caller may stop answers early, also every few forwards. Three programs are compiled for a whole queue: `_admit` prefills
a few rows and puts them into the batch, `_run` decodes, and `_release` frees the rows that the caller has stopped.

Axes: B rows of the batch, R rows admitted at once, C cache entries.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jaxtyping import ArrayLike, Int32, UInt32

from refusion_jax.decoding import cache as kv
from refusion_jax.decoding import feeds
from refusion_jax.decoding.decoder import Decoder, State
from refusion_jax.decoding.memory import REFILL, check_memory
from refusion_jax.decoding.recording import Recorder
from refusion_jax.decoding.requests import Given, Known, Request, shared_prefix
from refusion_jax.decoding.sampling import Record
from refusion_jax.model.transformer import KeyValues, Transformer
from refusion_jax.runtime.sharding import constrain, make_mesh, shard_count

LOOK = 16  # forwards between two checks of whether the caller stops answers
_NEVER = np.iinfo(np.int32).max


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Newcomers:
    """Requests to be admitted, padded with copies whose row is B, outside the batch, so that they are dropped."""

    rows: Int32[ArrayLike, "R"]
    layout: Any  # from `Decoder.lay_out`: arrays with leading axis R
    seeds: UInt32[ArrayLike, "R"]
    noise: UInt32[ArrayLike, "R"]  # see `Request.noise`
    shared: Int32[ArrayLike, ""]  # leading given tokens that all requests share, and whose keys and values are in ..
    source: Int32[ArrayLike, ""]  # .. this row of the batch


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """What is compiled in, compared by identity: hashing the structure of a model takes longer than a small forward."""

    graphdef: nnx.GraphDef
    decoder: Decoder


@functools.cache
def program(graphdef: nnx.GraphDef, decoder: Decoder) -> Program:
    """The only `Program` of equal arguments, so that equal ones share their compiled code."""
    return Program(graphdef, decoder)


@dataclasses.dataclass(frozen=True)
class Answer:
    """One answer. Positions count from the start of the prompt."""

    tokens: list[int]  # in reading order, through the first EOS; with the given tokens of a template behind the prompt
    commit_order: list[int]  # positions of all decoded tokens, in the order of commitment
    commit_tokens: list[int]  # the tokens at these positions, including any behind the first EOS
    forwards: int  # of the decoding loop; the prefill is not counted
    rounds: int  # plans that were followed; for decoders that do not plan, forwards
    finish_reason: str  # "eos", "length", or "stop" where the caller has stopped it


def stream(
    model: Transformer,
    decoder: Decoder,
    requests: Sequence[Request],
    batch_size: int,
    is_over: Callable[[int, list[int]], bool] | None = None,
    recorder: Recorder | None = None,
) -> Iterator[tuple[int, Answer]]:
    """Decodes a queue of requests and yields (index of the request, its answer) as answers finish.

    The longest texts are decoded first, since a long one at the end would run while the other rows are idle. An answer
    does not depend on the other requests, except that one stopped by `is_over` may be a few forwards longer.

    Args:
      model: from `load_model`. The batch is split over the mesh of its weights; all hosts of that mesh must call this
        with the same arguments.
      decoder: with sizes that serve all of the requests.
      requests: from `prepare`, at least one.
      batch_size: the largest B.
      is_over: (index, tokens so far in reading order, up to the first gap) -> whether to stop this answer. Called every
        few forwards.
      recorder: collects what the forwards feed; the counts are fetched together with the answers.
    """
    graphdef, params = nnx.split(model)
    params = nnx.to_pure_dict(params)  # flattened in C++, where a State takes as long as a small forward
    compiled, mesh = program(graphdef, decoder), mesh_of(model)
    B = batch_rows(len(requests), batch_size, mesh)
    R, refill = admitted(B, mesh), -(-B // REFILL)
    in_common = shared_prefix(requests) // decoder.chunk * decoder.chunk if hasattr(decoder, "chunk") else 0
    check_memory(model, mesh, B, R, decoder)
    on_mesh = functools.partial(jax.set_mesh, mesh)
    with on_mesh():
        state = _empty(compiled, params, decoder.lay_out(requests[:1]), B)
        shapes = feeds.shapes(decoder, model, B) if recorder else ()
    if recorder:
        recorder.begin(decoder, shapes, B, shard_count(mesh, "batch"))
    answers_of = functools.partial(_answers, requests, decoder.ids.eos_id, recorder)
    row_of, free, finished = {}, list(range(B)), []
    known = {}  # the shared prefix, once the first admitted rows have its keys and values
    waiting = sorted(range(len(requests)), key=lambda index: (requests[index].length, -index))  # popped from its end
    while waiting or row_of:
        with on_mesh():
            is_worth_it = len(free) >= min(refill, len(waiting))
            while is_worth_it and free and waiting:
                rows = {free.pop(): waiting.pop() for _ in range(min(R, len(free), len(waiting)))}
                row_of |= rows
                state = _admit(compiled, params, state, newcomers(rows, requests, R, B, decoder, **known))
                if recorder:
                    recorder.add_prefill(
                        [requests[index] for index in rows.values()], R, decoder, known.get("shared", 0)
                    )
                known = known or {"shared": in_common, "source": next(iter(rows))}
            # Where fewer requests wait than a refill takes, so many free rows are enough.
            wanted = min(refill, len(waiting)) if waiting else B
            counts = feeds.Counts.none(decoder, shapes, B) if recorder else None
            state, counts = _run(compiled, params, state, counts, wanted, LOOK if is_over else _NEVER)
        yield from answers_of(finished)  # the caller's work, too, takes place while the device decodes
        with on_mesh():
            active, counts, *outcomes = _fetch((state.active, counts, state.record, state.forwards, state.rounds), mesh)
        if recorder:
            recorder.add_forwards(counts)
        done, ended = [row for row in row_of if not active[row]], np.zeros(B, bool)
        for row in [row for row in row_of if active[row] and is_over]:
            tokens = _reading_order(requests[row_of[row]], _row(outcomes[0], row), decoder.ids.eos_id, to_gap=True)
            ended[row] = is_over(row_of[row], tokens)
        if ended.any():
            with on_mesh():
                state = _release(state, ended)
        over = [*done, *np.flatnonzero(ended).tolist()]
        finished = [(row_of.pop(row), bool(ended[row]), _row(outcomes, row)) for row in over]
        free += over
    yield from answers_of(finished)


def _answers(
    requests: Sequence[Request],
    eos_id: int,
    recorder: Recorder | None,
    finished: list[tuple[int, bool, list[Any]]],
) -> Iterator[tuple[int, Answer]]:
    """Reads (index, whether the caller has stopped it, [record, forwards, rounds]) of some requests."""
    for index, is_ended, outcome in finished:
        answer = read_answer(requests[index], *outcome, eos_id, is_ended)
        if recorder:
            recorder.add_answer(requests[index], answer)
        yield index, answer


def _fetch(arrays: Any, mesh: Mesh) -> Any:
    """Fetches whole arrays to this host."""
    return multihost_utils.process_allgather(arrays, tiled=True) if mesh.is_multi_process else jax.device_get(arrays)


def _row(arrays: Any, row: int) -> Any:
    return jax.tree.map(lambda x: x[row], arrays)


def mesh_of(model: Transformer) -> Mesh:
    """The mesh of the weights, which may be abstract; for weights on one device, a mesh of that device."""
    place = jax.tree.leaves(nnx.state(model))[0].sharding
    if isinstance(place, NamedSharding):
        return place.mesh
    return make_mesh({}, list(place.device_set))


def batch_rows(requests: int, batch_size: int, mesh: Mesh) -> int:
    """Rows of the batch: the least power of two for so many requests, at most batch_size, in whole shards."""
    rows, shards = min(batch_size, 1 << max(requests - 1, 0).bit_length()), shard_count(mesh, "batch")
    return -(-rows // shards) * shards


def admitted(rows: int, mesh: Mesh) -> int:
    """Rows that are prefilled at once, in whole shards."""
    shards = shard_count(mesh, "batch")
    return -(-rows // (REFILL * shards)) * shards


def newcomers(
    rows: dict[int, int],
    requests: Sequence[Request],
    R: int,
    B: int,
    decoder: Decoder,
    shared: int = 0,
    source: int = 0,
) -> Newcomers:
    """The requests to admit, given by {row of the batch: index of the request}, padded to R; see `Newcomers`."""
    some = [requests[index] for index in rows.values()]
    some += some[:1] * (R - len(some))
    return Newcomers(
        rows=np.array([*rows, *[B] * (R - len(rows))], np.int32),
        layout=decoder.lay_out(some),
        seeds=np.array([request.settings.seed for request in some], np.uint32),
        noise=np.array([request.noise for request in some], np.uint32),
        shared=np.int32(shared),
        source=np.int32(source),
    )


def read_answer(
    request: Request, record: Record, forwards: np.ndarray, rounds: np.ndarray, eos_id: int, is_ended: bool = False
) -> Answer:
    """The answer in the record of one row; one that the caller has stopped ends at its first gap."""
    positions, tokens = record.positions[: record.count].tolist(), record.tokens[: record.count].tolist()
    return Answer(
        tokens=_reading_order(request, record, eos_id, is_ended),
        commit_order=positions,
        commit_tokens=tokens,
        forwards=int(forwards),
        rounds=int(rounds),
        finish_reason="stop" if is_ended else "eos" if eos_id in tokens else "length",
    )


def _reading_order(request: Request, record: Record, eos_id: int, to_gap: bool) -> list[int]:
    """The tokens behind the prompt, through the first EOS; with `to_gap` only those before the first gap."""
    text = dict(zip(record.positions[: record.count].tolist(), record.tokens[: record.count].tolist(), strict=True))
    end = min((at for at, token in text.items() if token == eos_id), default=None)
    text |= {at: token for token, at in zip(*request.given, strict=True) if at >= len(request.prompt)}
    places = [at for at in sorted(text) if end is None or at <= end]
    if to_gap:
        places = [at for number, at in enumerate(places, len(request.prompt)) if number == at]
    return [text[at] for at in places]


def decode_once(graphdef, params, newcomers: Newcomers, rows: int, decoder: Decoder) -> Record:
    """Fills a batch and decodes it to the end, as one function that `plan` can lower and compile."""
    compiled = program(graphdef, decoder)
    state = _admit(compiled, params, _empty(compiled, params, newcomers.layout, rows), newcomers)
    return _run(compiled, params, state, None, rows, _NEVER)[0].record


@functools.partial(jax.jit, static_argnames=("compiled", "rows"))
def _empty(compiled: Program, params, layout, rows: int) -> State:
    """A batch of finished rows; only the shapes of the layout matter."""
    layout = jax.tree.map(lambda x: jnp.zeros((rows, *x.shape[1:]), x.dtype), layout)
    keys = jax.random.split(jax.random.key(0), rows)
    model = nnx.merge(compiled.graphdef, params)
    return _placed(jax.tree.map(_zeros, jax.eval_shape(lambda: compiled.decoder.init(model, layout, keys))))


@functools.partial(jax.jit, static_argnames="compiled", donate_argnames="state")
def _admit(compiled: Program, params, state: State, new: Newcomers) -> State:
    """Prefills requests and puts them into their rows of the batch; rows outside the batch are dropped."""
    keys = jax.vmap(lambda seed, noise: jax.random.fold_in(jax.random.key(seed), noise))(new.seeds, new.noise)
    layout = new.layout
    if hasattr(state, "cache") and hasattr(layout, "given"):
        row = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, new.source, 1, 1), state.cache.entries)
        layout = dataclasses.replace(layout, given=dataclasses.replace(layout.given, known=Known(row, new.shared)))
    started = compiled.decoder.init(nnx.merge(compiled.graphdef, params), layout, keys)
    started = jax.tree.map(  # for states that keep their layout
        lambda x: dataclasses.replace(x, known=None) if isinstance(x, Given) else x,
        started,
        is_leaf=lambda x: isinstance(x, Given),
    )

    def put(axis, old, new_rows):
        return old.at[(slice(None),) * axis + (new.rows,)].set(new_rows, mode="drop")

    return _placed(_by_batch_axis(put, state, started))


@functools.partial(jax.jit, static_argnames="compiled", donate_argnames=("state", "counts"))
def _run(
    compiled: Program, params, state: State, counts: feeds.Counts | None, wanted, most
) -> tuple[State, feeds.Counts | None]:
    """Decodes until `wanted` rows are finished, for at most `most` forwards, and adds what these feed to `counts`."""
    model, decoder = nnx.merge(compiled.graphdef, params).ready(), compiled.decoder

    def forward(carry):
        state, counts, done = carry
        if counts is not None:
            counts = counts.plus(feeds.fed(decoder, model, state), decoder.cache_length)
        return decoder.step(model, state), counts, done + 1

    end, counts, _ = jax.lax.while_loop(
        lambda carry: (jnp.sum(~carry[0].active) < wanted) & (carry[2] < most), forward, (state, counts, 0)
    )
    return _placed(end), counts


@functools.partial(jax.jit, donate_argnames="state")
def _release(state: State, ended: jax.Array) -> State:
    """Clears the rows where `ended` [B] is true, but for their keys and values.

    These keep their length: the forwards that follow write behind it, and the prefix that newcomers copy stays whole.
    """

    def clear(axis, x):
        if axis or jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
            return x
        return jnp.where(ended.reshape(-1, *(1,) * (x.ndim - 1)), jnp.zeros_like(x), x)

    cleared = _by_batch_axis(clear, state)
    if hasattr(state, "cache"):
        length = state.cache.length
        cleared = dataclasses.replace(cleared, cache=dataclasses.replace(cleared.cache, length=length))
    return _placed(cleared)


def _zeros(x: jax.ShapeDtypeStruct) -> jax.Array:
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jax.random.split(jax.random.key(0), x.shape)
    return jnp.zeros(x.shape, x.dtype)


def _by_batch_axis(function, state: State, *others: State) -> State:
    """Maps function(batch axis, array, ...) over a state; the batch axis is 1 in `KeyValues` and 0 elsewhere."""

    def of(x, *rest):
        axis = 1 if isinstance(x, KeyValues) else 0
        return jax.tree.map(functools.partial(function, axis), x, *rest)

    return jax.tree.map(of, state, *others, is_leaf=lambda x: isinstance(x, KeyValues))


def _placed(state: State) -> State:
    """Constrains a state to be split by rows, and the cache by heads too.

    Every program ends with this: with output shardings left to the partitioner, the next program would recompile.
    """

    def of(x):
        if isinstance(x, KeyValues):
            return kv.split(x)
        return constrain(x, "batch", *(None,) * (x.ndim - 1))

    return jax.tree.map(of, state, is_leaf=lambda x: isinstance(x, KeyValues))
