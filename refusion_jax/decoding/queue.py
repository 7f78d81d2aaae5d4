"""Continuous batching: rows that finish are handed out, and filled again from the queue.

The device runs a loop of forwards until enough rows are done; only then does the host look. Two programs serve a whole
queue: `_admit` prefills a few rows and puts them into the batch, `_run` decodes.

Axes: B rows of the batch, R rows admitted at once, C cache entries.
"""

import dataclasses
import functools
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from refusion_jax.decoding import cache as kv
from refusion_jax.decoding.memory import check_memory
from refusion_jax.decoding.requests import Canvas, Given, Request, lay_out, sizes_for
from refusion_jax.decoding.sampling import Record
from refusion_jax.decoding.settings import DecodeSettings, Dials, Static
from refusion_jax.model.transformer import KeyValues, Transformer
from refusion_jax.runtime.sharding import MESH_AXES, constrain, make_mesh, ways
from refusion_jax.systems import ar as left_to_right
from refusion_jax.systems.refusion import decoder as refusion

State = refusion.State | left_to_right.State

_REFILL = 8  # a batch is refilled by an eighth: each time costs a prefill and a word with the host


@dataclasses.dataclass(frozen=True)
class Answer:
    """One answer. Positions are in the text: the first token behind a prompt is at the prompt's length."""

    tokens: list[int]  # in reading order, through the first EOS; of a template the given ones behind the prompt too
    commit_order: list[int]  # positions of all decoded tokens, in the order of commitment
    commit_tokens: list[int]  # those tokens; after an EOS they may hold some that the answer does not
    forwards: int  # of the decoding loop; the prefill is not counted
    rounds: int  # plans followed (refusion), or forwards
    finish_reason: str  # "eos" or "length"


def stream(
    model: Transformer, requests: Sequence[Request], batch_size: int, static: Static | None = None
) -> Iterator[tuple[int, Answer]]:
    """Decodes requests as a queue, and yields (index of the request, its answer) as they finish.

    An answer does not depend on the requests around it.

    Args:
      model: from `load_model`; where its weights lie on a mesh, the batch is split over it as well.
      requests: from `prepare`, one at least.
      batch_size: B at most.
      static: sizes to compile for, where several calls are to share them; by default what these requests need.
    """
    static = static or sizes_for(requests, model.config)
    graphdef, params = nnx.split(model)
    mesh = mesh_of(model)
    B = batch_rows(len(requests), batch_size, mesh)
    R = admitted(B)
    check_memory(model, mesh, B, R, static)
    on_mesh = functools.partial(jax.set_mesh, mesh)
    with on_mesh():
        state = _empty(graphdef, params, B, static)
    row_of, free, waiting = {}, list(range(B)), list(range(len(requests)))[::-1]
    while waiting or row_of:
        with on_mesh():
            while free and waiting:
                rows = {free.pop(): waiting.pop() for _ in range(min(R, len(free), len(waiting)))}
                row_of |= rows
                state = _admit(graphdef, params, state, *newcomers(rows, requests, R, B, static), static)
            state = _run(graphdef, params, state, R if waiting else B, static)
        done, *answers = jax.device_get((state.done, state.record, state.forwards, state.rounds))
        for row in [row for row in row_of if done[row]]:
            index = row_of.pop(row)
            free.append(row)
            yield index, read_answer(requests[index], *jax.tree.map(lambda x: x[row], answers), static)  # noqa: B023


def mesh_of(model: Transformer) -> Mesh:
    """The mesh that the weights lie on; of weights on one device, that device alone."""
    place = model.final_norm[...].sharding
    if isinstance(place, NamedSharding):
        return place.mesh
    return make_mesh(dict.fromkeys(MESH_AXES, 1), list(place.device_set))


def batch_rows(requests: int, batch_size: int, mesh: Mesh) -> int:
    """Rows of the batch: the power of two that serves so many requests, or else all of them; in whole shards."""
    rows, shards = min(batch_size, 1 << max(requests - 1, 0).bit_length()), ways(mesh, "batch")
    return -(-rows // shards) * shards


def admitted(rows: int) -> int:
    """Rows that are prefilled at once."""
    return -(-rows // _REFILL)


def newcomers(rows: dict[int, int], requests: Sequence[Request], R: int, B: int, static: Static) -> tuple:
    """(rows [R], canvas, given, keys [R], dials) of requests for rows; filler behind them, outside the batch."""
    some = [requests[index] for index in rows.values()]
    some += some[:1] * (R - len(some))
    canvas, given = lay_out(some, static)
    seeds, places = zip(*((request.settings.seed, request.noise) for request in some), strict=True)
    return (
        np.array([*rows, *[B] * (R - len(rows))], np.int32),
        canvas,
        given,
        (np.array(seeds, np.uint32), np.array(places, np.uint32)),
        Dials.of([request.settings for request in some]),
    )


def read_answer(request: Request, record: Record, forwards: np.ndarray, rounds: np.ndarray, static: Static) -> Answer:
    """From the record of one row."""
    tokens, positions = record.tokens[: record.count].tolist(), record.positions[: record.count].tolist()
    text = dict(zip(positions, tokens, strict=True))
    end = min((at for at, token in text.items() if token == static.eos_id), default=None)
    at = len(request.prompt)
    for piece in request.template:
        if isinstance(piece, int):
            at += piece
        else:
            text |= {at + i: token for i, token in enumerate(piece)}
            at += len(piece)
    return Answer(
        tokens=[text[at] for at in sorted(text) if end is None or at <= end],
        commit_order=positions,
        commit_tokens=tokens,
        forwards=int(forwards),
        rounds=int(rounds),
        finish_reason="length" if end is None else "eos",
    )


def decode_once(graphdef, params, newcomers: tuple, rows: int, static: Static) -> Record:
    """Fills a batch and decodes it to the end: all that the device does, as one function to be lowered and planned."""
    state = _admit(graphdef, params, _empty(graphdef, params, rows, static), *newcomers, static)
    return _run(graphdef, params, state, rows, static).record


def _decoder(static: Static):
    return refusion if static.method == "refusion" else left_to_right


@functools.partial(jax.jit, static_argnames=("graphdef", "rows", "static"))
def _empty(graphdef, params, rows: int, static: Static) -> State:
    """A batch of rows that are all done."""
    model = nnx.merge(graphdef, params)
    zeros = jnp.zeros((rows, static.slots), jnp.int32)
    ones = jnp.ones((rows,), jnp.int32)
    canvas = Canvas(zeros, zeros, zeros > 0, ones, ones)
    given = jnp.zeros((rows, static.cache_length), jnp.int32)
    keys, dials = jax.random.split(jax.random.key(0), rows), Dials.of([DecodeSettings()] * rows)
    cache = kv.Cache.empty(model, rows, static.cache_length)
    return _placed(_decoder(static).stop(_decoder(static).begin(cache, canvas, given, keys, dials, static)))


@functools.partial(jax.jit, static_argnames=("graphdef", "static"), donate_argnames="state")
def _admit(
    graphdef, params, state: State, rows, canvas: Canvas, given: Given, seeds, dials: Dials, static: Static
) -> State:
    """Puts requests into rows [R] of the batch, prefilled; rows outside the batch are dropped."""
    model = nnx.merge(graphdef, params)
    cache = kv.prefill(model, given, static.chunk)
    keys = jax.vmap(lambda seed, place: jax.random.fold_in(jax.random.key(seed), place))(*seeds)
    new = _decoder(static).begin(cache, canvas, given.tokens, keys, dials, static)

    def put(old, new, axis=0):
        return old.at[(slice(None),) * axis + (rows,)].set(new, mode="drop")

    entries = jax.tree.map(lambda old, new: put(old, new, axis=1), state.cache.entries, new.cache.entries)
    rest = jax.tree.map(put, _with_entries(state, None), _with_entries(new, None))
    return _placed(_with_entries(rest, entries))


@functools.partial(jax.jit, static_argnames=("graphdef", "static"), donate_argnames="state")
def _run(graphdef, params, state: State, wanted, static: Static) -> State:
    """Decodes until `wanted` rows are done."""
    model = nnx.merge(graphdef, params)
    end = jax.lax.while_loop(
        lambda s: jnp.sum(s.done) < wanted, lambda s: _decoder(static).step(model, s, static), state
    )
    return _placed(end)


def _with_entries(state: State, entries: KeyValues | None) -> State:
    return dataclasses.replace(state, cache=kv.Cache(entries, state.cache.length))


def _placed(state: State) -> State:
    """Splits everything by rows, and the cache by heads too.

    Said at the end of every program, or each would compile again for what the partitioner made of the one before it.
    """
    rows = jax.tree.map(lambda x: constrain(x, "batch", *(None,) * (x.ndim - 1)), _with_entries(state, None))
    return _with_entries(rows, kv.split(state.cache.entries))
