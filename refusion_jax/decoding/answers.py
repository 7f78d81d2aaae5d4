"""Answers, as the record of a row tells them."""

import dataclasses

import numpy as np

from refusion_jax.decoding.requests import Request
from refusion_jax.decoding.sampling import Record


@dataclasses.dataclass(frozen=True)
class Answer:
    """One answer. Positions count from the start of the prompt."""

    tokens: list[int]  # in reading order, through the first EOS; with the given tokens of a template after the prompt
    commit_order: list[int]  # positions of all decoded tokens, in the order of commitment
    commit_tokens: list[int]  # the tokens at these positions, including any after the first EOS
    forwards: int  # of the decoding loop; the prefill is not counted
    rounds: int  # plans that were followed; for decoders that do not plan, forwards
    finish_reason: str  # "eos", "length", or "stop" where the caller has stopped it


def read_answer(
    request: Request, record: Record, forwards: np.ndarray, rounds: np.ndarray, eos_id: int, is_ended: bool = False
) -> Answer:
    """The answer in the record of one row; one that the caller has stopped ends at its first gap."""
    positions, tokens = record.positions[: record.count].tolist(), record.tokens[: record.count].tolist()
    text = dict(zip(positions, tokens, strict=True))
    end = min((at for at, token in text.items() if token == eos_id), default=None)
    for given, own in request.parts[1:]:  # without the prompt, which may be long
        text |= {} if own is None else dict(zip(given, map(int, own), strict=True))
    places = [at for at in sorted(text) if end is None or at <= end]
    if is_ended:
        places = [at for number, at in enumerate(places, len(request.prompt)) if number == at]
    return Answer(
        tokens=[text[at] for at in places],
        commit_order=positions,
        commit_tokens=tokens,
        forwards=int(forwards),
        rounds=int(rounds),
        finish_reason="stop" if is_ended else "eos" if eos_id in tokens else "length",
    )
