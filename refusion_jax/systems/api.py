"""`decode(model, prompts, settings)`: every decoder behind one call."""

import dataclasses
from collections.abc import Sequence

from refusion_jax.decoding.queue import Answer, stream
from refusion_jax.decoding.requests import Request, prepare
from refusion_jax.decoding.settings import DecodeSettings
from refusion_jax.model.transformer import Transformer


@dataclasses.dataclass(frozen=True)
class Decoded:
    """The fields of `Answer`, each as a list with one entry a prompt."""

    tokens: list[list[int]]
    commit_order: list[list[int]]
    commit_tokens: list[list[int]]
    forwards: list[int]
    rounds: list[int]
    finish_reason: list[str]


def decode(model: Transformer, prompts: Sequence[Sequence[int] | Request], settings: DecodeSettings) -> Decoded:
    """Decodes prompts in batches, on the device from first token to last.

    A prompt's answer does not depend on the prompts around it. One compilation serves all calls with the same sizes,
    whatever the thresholds, temperature, seed and prompts.

    Args:
      model: from `load_model`.
      prompts: token ids, at least one each; or requests, for templates with gaps.
      settings: how to decode.

    Raises:
      UserError: where a prompt is empty, holds an id the model does not have, or does not fit in the cache.
    """
    requests = prepare(prompts, settings, model.config)
    answers = dict(stream(model, requests, settings.batch_size)) if requests else {}
    in_order = [answers[i] for i in range(len(requests))]
    return Decoded(**{f.name: [getattr(a, f.name) for a in in_order] for f in dataclasses.fields(Answer)})
