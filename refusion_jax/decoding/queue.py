"""Continuous batching of a queue: finished rows give out their answers and take the next requests.

The device runs forwards in a loop until enough rows have finished, and only then synchronizes with the host; where the
caller may stop answers early, also every few forwards.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from refusion_jax.decoding.decoder import Decoder
from refusion_jax.decoding.memory import REFILL
from refusion_jax.decoding.requests import Request
from refusion_jax.decoding.running_batch import UNTIL_DONE, RunningBatch, batch_rows, mesh_of
from refusion_jax.decoding.sampling import Record
from refusion_jax.model.transformer import Transformer

LOOK = 16  # forwards between two checks of whether the caller stops answers


@dataclasses.dataclass(frozen=True)
class Answer:
    """One answer. Positions count from the start of the prompt."""

    tokens: list[int]  # in reading order, through the first EOS; with the given tokens of a template after the prompt
    commit_order: list[int]  # positions of all decoded tokens, in the order of commitment
    commit_tokens: list[int]  # the tokens at these positions, including any after the first EOS
    forwards: int  # of the decoding loop; the prefill is not counted
    rounds: int  # plans that were followed; for decoders that do not plan, forwards
    finish_reason: str  # "eos", "length", or "stop" where the caller has stopped it


def stream(
    model: Transformer,
    decoder: Decoder,
    requests: Sequence[Request],
    batch_size: int,
    is_over: Callable[[int, list[int]], bool] | None = None,
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
    """
    batch = RunningBatch(model, decoder, requests[0], batch_rows(len(requests), batch_size, mesh_of(model)))
    refill = -(-batch.rows // REFILL)
    answers_of = functools.partial(_answers, requests, decoder.ids.eos_id)
    row_of, finished = {}, []
    waiting = sorted(range(len(requests)), key=lambda index: (requests[index].length, -index))  # popped from its end
    while waiting or row_of:
        is_worth_it = len(batch.free) >= min(refill, len(waiting))
        if is_worth_it:
            some = [waiting.pop() for _ in range(min(len(batch.free), len(waiting)))]
            row_of |= zip(batch.admit([requests[index] for index in some]), some, strict=True)
        # Where fewer requests wait than a refill takes, so many free rows are enough.
        wanted = min(refill, len(waiting)) if waiting else batch.rows
        batch.run(wanted, LOOK if is_over else UNTIL_DONE)
        yield from answers_of(finished)  # the caller's work, too, takes place while the device decodes
        progress = batch.look()
        done, ended = [row for row in row_of if not progress.active[row]], []
        for row in [row for row in row_of if progress.active[row] and is_over]:
            record, *_ = progress.of(row)
            tokens = reading_order(requests[row_of[row]], record, decoder.ids.eos_id, to_gap=True)
            if is_over(row_of[row], tokens):
                ended.append(row)
        batch.stop(ended)
        finished = [(row_of.pop(row), row in ended, progress.of(row)) for row in [*done, *ended]]
        batch.free += [*done, *ended]
    yield from answers_of(finished)


def _answers(
    requests: Sequence[Request],
    eos_id: int,
    finished: list[tuple[int, bool, tuple[Any, ...]]],
) -> Iterator[tuple[int, Answer]]:
    """Reads (index, whether the caller has stopped it, (record, forwards, rounds)) of some requests."""
    for index, is_ended, outcome in finished:
        yield index, read_answer(requests[index], *outcome, eos_id, is_ended)


def read_answer(
    request: Request, record: Record, forwards: np.ndarray, rounds: np.ndarray, eos_id: int, is_ended: bool = False
) -> Answer:
    """The answer in the record of one row; one that the caller has stopped ends at its first gap."""
    positions, tokens = record.positions[: record.count].tolist(), record.tokens[: record.count].tolist()
    return Answer(
        tokens=reading_order(request, record, eos_id, is_ended),
        commit_order=positions,
        commit_tokens=tokens,
        forwards=int(forwards),
        rounds=int(rounds),
        finish_reason="stop" if is_ended else "eos" if eos_id in tokens else "length",
    )


def reading_order(request: Request, record: Record, eos_id: int, to_gap: bool) -> list[int]:
    """The tokens after the prompt, through the first EOS; with `to_gap` only those before the first gap."""
    text = dict(zip(record.positions[: record.count].tolist(), record.tokens[: record.count].tolist(), strict=True))
    end = min((at for at, token in text.items() if token == eos_id), default=None)
    text |= {at: token for token, at in zip(*request.given, strict=True) if at >= len(request.prompt)}
    places = [at for at in sorted(text) if end is None or at <= end]
    if to_gap:
        places = [at for number, at in enumerate(places, len(request.prompt)) if number == at]
    return [text[at] for at in places]
