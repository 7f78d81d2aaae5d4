"""Decodes the prompts of an evaluation on the continuous-batching queue and measures the time."""

import collections
import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from flax import nnx

from refusion_jax.cli.errors import UserError
from refusion_jax.cli.settings import scope
from refusion_jax.decoding.memory import check_memory
from refusion_jax.decoding.queue import batch_rows
from refusion_jax.decoding.requests import Answer, Request, prepare
from refusion_jax.decoding.settings import Settings
from refusion_jax.decoding.trajectory import Trajectory
from refusion_jax.model.interface import LanguageModel
from refusion_jax.model.shape import ModelConfig
from refusion_jax.systems.api import DecodeSettings, decoder_for, stream

_SHORTEST_PROMPT = 16  # least tokens of a truncated prompt


def settings_for(values: dict[str, Any], method: str, room: int, model: ModelConfig) -> Settings:
    """Decode settings for a model, with max_new_tokens rounded up to what the decoder supports.

    Raises UserError if a setting is unknown or impossible, or answers do not fit into `room` tokens.
    """
    plain = DecodeSettings(method, **values | {"max_new_tokens": 0}).for_model(model)
    new_tokens = -(-values["max_new_tokens"] // plain.multiple) * plain.multiple
    most = (room - _SHORTEST_PROMPT) // plain.multiple * plain.multiple
    if new_tokens > most:
        fix = f"give at most {most}" if most > 0 else f"give smaller slots or blocks than {plain.multiple} tokens"
        why = f"the model reads {room} tokens, and a prompt must fit before the answer; {fix}"
        raise UserError(f"--decode.max_new_tokens={new_tokens}: {why}")
    return dataclasses.replace(plain, max_new_tokens=new_tokens)


def by_program(requests: Sequence[Request], model: ModelConfig) -> Iterator[tuple[list[int], list[Request]]]:
    """Groups requests by compiled program: (their indices, the requests from `prepare`) for each."""
    of_sizes = collections.defaultdict(list)
    for number, request in enumerate(requests):
        settings = request.settings.for_model(model)
        compiled_in = sorted((name, getattr(settings, name)) for name in scope(type(settings), "compiled"))
        of_sizes[tuple(compiled_in)].append(number)
    for numbers in of_sizes.values():
        yield numbers, prepare([requests[number] for number in numbers], requests[numbers[0]].settings, model)


def check_fits(model: LanguageModel, requests: Sequence[Request]) -> None:
    """Raises UserError, naming a size that fits, if a batch does not; the weights of the model may be abstract."""
    for _, some in by_program(requests, model.config):
        mesh, decoder, own = model.mesh, decoder_for(some, model.config), some[0].settings
        rows = batch_rows(len(some), own.batch_size, mesh)
        served = nnx.eval_shape(lambda m, own=own: m.rounded(cache=own.cache).with_head_rows(own.head_rows), model)
        check_memory(served, mesh, rows, decoder)


def generate(
    model: LanguageModel,
    requests: Sequence[Request],
    watch: Callable[[int, Answer], bool] | None,
    record: Callable[[int, Trajectory], object] | None = None,
) -> Iterator[tuple[int, Answer, float]]:
    """Decodes requests, each with its own settings; an answer depends only on its own request.

    Yields (index of the request, its answer, seconds since the last answer without compilation), as answers finish.
    `watch` and `record` are those of `queue.stream`, with the index of the request.
    """
    for numbers, some in by_program(requests, model.config):
        began, compiled = time.monotonic(), _compiling.total()
        looks = watch and (lambda at, answer, numbers=numbers: watch(numbers[at], answer))
        tells = record and (lambda at, part, numbers=numbers: record(numbers[at], part))
        for at, answer in stream(model, some, watch=looks, record=tells):
            now, compiled_now = time.monotonic(), _compiling.total()
            seconds = max(now - began - (compiled_now - compiled), 0.0)
            began, compiled = now, compiled_now  # the device decodes while the caller works
            yield numbers[at], answer, seconds


# Seconds that this process has spent on tracing and compiling.
_compiling: collections.Counter[str] = collections.Counter()


def _count(event: str, seconds: float, **_: object) -> None:
    if event.endswith(("jaxpr_trace_duration", "jaxpr_to_mlir_module_duration", "backend_compile_duration")):
        _compiling[event] += seconds


jax.monitoring.register_event_duration_secs_listener(_count)
