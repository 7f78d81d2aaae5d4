"""`decode(model, prompts, settings)`: every decoder behind one call.

Axes: B rows, P prompt length (padded).
"""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import numpy as np
from flax import nnx

from refusion_jax.decoding import left_to_right, refusion
from refusion_jax.decoding.settings import DecodeSettings, split_settings
from refusion_jax.errors import UserError
from refusion_jax.model.transformer import Transformer

_PROMPT_BUCKET = 32  # prompts are padded to a multiple of this, so that few lengths are compiled


@dataclasses.dataclass(frozen=True)
class Decoded:
    """The answers, one entry a prompt. Positions are in the text: the first new token's is the prompt's length."""

    tokens: list[list[int]]  # the answer in reading order, through its first EOS
    commit_order: list[list[int]]  # positions of all committed tokens, in the order of commitment
    commit_tokens: list[list[int]]  # those tokens; after an EOS they may hold some that the answer does not
    forwards: list[int]  # of the decoding loop; the prefill is not counted
    rounds: list[int]  # plans made (refusion), or forwards
    finish_reason: list[str]  # "eos" or "length"


def decode(
    model: Transformer,
    prompts: Sequence[Sequence[int]],
    settings: DecodeSettings,
    names: Sequence[str] | None = None,
) -> Decoded:
    """Decodes prompts in batches, each one jitted loop on the device.

    A prompt's answer does not depend on the prompts around it. One compilation serves all calls with the same sizes,
    whatever the thresholds, temperature, seed and prompts.

    Args:
      model: from `load_model`.
      prompts: token ids, at least one each.
      settings: how to decode.
      names: of the prompts, for messages; "prompt 0" and so on by default.

    Raises:
      UserError: where a prompt is empty, holds an id the model does not have, or does not fit in the cache.
    """
    room = settings.cache_length or model.config.max_position_embeddings
    longest = max(map(len, prompts), default=1)
    settings = settings.fill_in(room - longest)
    static, dials = split_settings(settings, model.config)
    _check_prompts(prompts, names, model.config.vocab_size, room, settings.new_tokens)
    graphdef, params = nnx.split(model)
    P = -(-longest // _PROMPT_BUCKET) * _PROMPT_BUCKET
    B = min(settings.batch_size, 1 << max(len(prompts) - 1, 0).bit_length())

    answers = []
    for start in range(0, len(prompts), B):
        batch = prompts[start : start + B]
        tokens, lengths = np.zeros((B, P), np.int32), np.ones(B, np.int32)
        for row, prompt in enumerate(batch):
            tokens[row, : len(prompt)], lengths[row] = prompt, len(prompt)
        keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(settings.seed), start + np.arange(B))
        record, forwards, rounds = jax.device_get(
            _run(graphdef, params, tokens, lengths, np.arange(B) < len(batch), keys, dials, static)
        )
        for row, prompt in enumerate(batch):
            count = record.count[row]
            committed, offsets = record.tokens[row, :count], record.offsets[row, :count]
            answer = committed[np.argsort(offsets, kind="stable")].tolist()
            ended = static.eos_id in answer
            answers.append(
                (
                    answer[: answer.index(static.eos_id) + 1] if ended else answer,
                    (offsets + len(prompt)).tolist(),
                    committed.tolist(),
                    int(forwards[row]),
                    int(rounds[row]),
                    "eos" if ended else "length",
                )
            )
    return Decoded(*(list(column) for column in zip(*answers, strict=True))) if answers else Decoded(*[[]] * 6)


@functools.partial(jax.jit, static_argnames=("graphdef", "static"))
def _run(graphdef, params, tokens, lengths, active, keys, dials, static):
    model = nnx.merge(graphdef, params)
    if static.method == "refusion":
        end = refusion.decode(model, tokens, lengths, active, keys, dials, static)
        return end.record, end.forwards, end.rounds
    end = left_to_right.decode(model, tokens, lengths, active, keys, dials, static)
    return end.record, end.forwards, end.forwards


def _check_prompts(
    prompts: Sequence[Sequence[int]], names: Sequence[str] | None, vocab_size: int, room: int, new_tokens: int
) -> None:
    """Refuses prompts that cannot be decoded, by name, with the reason and what would help."""
    for index, prompt in enumerate(prompts):
        name = names[index] if names else f"prompt {index}"
        if not len(prompt):
            raise UserError(f"{name}: is empty; it needs at least one token")
        if not 0 <= min(prompt) <= max(prompt) < vocab_size:
            raise UserError(f"{name}: holds an id outside 0 to {vocab_size - 1}")
        if len(prompt) + new_tokens > room:
            raise UserError(
                f"{name}: has {len(prompt)} tokens, and {new_tokens} new ones do not fit behind them in a "
                f"cache of {room}: shorten it, lower --decode.max_new_tokens, or raise --decode.cache_length"
            )
