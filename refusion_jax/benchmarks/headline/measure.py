"""Measures the accuracy and speed of trained models.

Only tokens of the answers count, through the EOS; compilation is not timed.
"""

import collections
import dataclasses
import os
import statistics
from collections.abc import Sequence
from typing import Any

from refusion_jax.benchmarks.decode import timed
from refusion_jax.benchmarks.headline.experiment import BATCH_SIZES, Budget, Point
from refusion_jax.cli.errors import UserError
from refusion_jax.data.interface import Tokenizer
from refusion_jax.data.problems import Problem
from refusion_jax.decoding.player import Decodings
from refusion_jax.decoding.requests import Answer, prepare
from refusion_jax.model.interface import LanguageModel
from refusion_jax.systems.api import decoder_for

REPEATS = 9  # a small model decodes the timed problems in 0.2 s, and single repeats differ by a fifth
PROXY_REPEATS, PROXY_PROBLEMS = 5, 24  # with the proxy a forward pass takes longer
PLAYED = 6  # problems of the page that plays decodings


@dataclasses.dataclass(frozen=True)
class Subject:
    """A decoder at an operating point, with a model."""

    point: Point
    model: LanguageModel
    tokenizer: Tokenizer
    budget: Budget


def check_fit(problems: list[Problem], tokenizer: Tokenizer, budget: Budget) -> None:
    """Raises UserError if an answer is longer than the budget's new tokens."""
    longest = 1 + max(map(len, tokenizer.encode([problem.response for problem in problems])))
    if longest > budget.new_tokens:
        raise UserError(
            f"--config: answers have up to {longest} tokens, and this budget decodes {budget.new_tokens}: "
            f"lower data.difficulty"
        )


class _Queue:
    """Problems that a subject decodes, `batch_size` at a time."""

    def __init__(self, problems: list[Problem], subject: Subject, batch_size: int, decodings: Decodings | None = None):
        """Makes the requests, and compiles; `decodings` record what each forward pass does."""
        settings = subject.point.settings(subject.budget.new_tokens, batch_size)
        prompts = subject.tokenizer.encode_prompts([problem.query for problem in problems])
        self._model, self._record = subject.model, decodings.record if decodings else None
        self.requests = prepare(prompts, settings, self._model.config)
        self.decoder = decoder_for(self.requests, self._model.config)
        timed(self._model, self.requests[:batch_size], self.decoder, record=self._record)

    def decode(self, repeats: int = 1) -> tuple[list[Answer], list[float]]:
        """(the answers in order, tokens per second of each repeat)."""
        found = [timed(self._model, self.requests, self.decoder, record=self._record) for _ in range(repeats)]
        return found[-1][0], [sum(len(a.tokens) for a in answers) / seconds for answers, seconds in found]


def score(
    problems: list[Problem], subject: Subject, repeats: int = 1, decodings: Decodings | None = None
) -> tuple[dict[str, Any], list[str], float]:
    """(fields of `results.Scored`, texts of answers, median tokens per second); `decodings` get the first answers."""
    queue = _Queue(problems, subject, BATCH_SIZES[-1], decodings)
    answers, speeds = queue.decode(repeats)
    for index in range(min(PLAYED, len(problems))) if decodings else ():
        decodings.add(index, queue.requests[index], answers[index])
    texts, right = [subject.tokenizer.decode(answer.tokens) for answer in answers], collections.defaultdict(list)
    for problem, text in zip(problems, texts, strict=True):
        right[problem.family].append(text == problem.response)
    tokens, forwards = sum(len(a.tokens) for a in answers), sum(a.forwards for a in answers)
    ends = sum(a.finish_reason == "eos" for a in answers)
    record = {
        "accuracy": sum(map(sum, right.values())) / len(problems),
        "families": {name: sum(right[name]) / len(right[name]) for name in sorted(right)},
        "tokens": tokens,
        "forwards": forwards,
        "tokens_per_forward": tokens / forwards,
        "tokens_per_forward_without_eos": (tokens - ends) / forwards,
        "tokens_per_forward_with_prefill": tokens / (forwards + len(problems)),
        "prompt_tokens": statistics.mean(len(request.prompt) for request in queue.requests),
        "width": queue.decoder.width,
        "has_cache": queue.decoder.cache_length > 0,
    }
    return record, texts, statistics.median(speeds)


def measure(problems: list[Problem], subject: Subject) -> dict[str, Any]:
    """The score, and tokens per second with one and with many prompts at a time: the fields of `results.Scored`."""
    budget = subject.budget
    record, texts, speed = score(problems, subject, budget.repeats)
    alone, speeds_alone = _Queue(problems[: budget.timed], subject, BATCH_SIZES[0]).decode(budget.repeats)
    same = [subject.tokenizer.decode(answer.tokens) == text for answer, text in zip(alone, texts, strict=False)]
    speeds = dict(zip(map(str, BATCH_SIZES), (statistics.median(speeds_alone), speed), strict=True))
    return record | {"tokens_per_second": speeds, "same_text": statistics.mean(same), "load": os.getloadavg()[0]}


def interleaved(
    subjects: Sequence[Subject], problems: list[Problem], sizes: Sequence[int], repeats: int
) -> list[dict[str, Any]]:
    """Tokens per second of decoders in interleaved repeats, so that a machine's drift is the same for all of them.

    For each decoder {"tokens_per_second": {batch size: [one per repeat]}, "load": the load average at the end}.
    """
    found = [{str(size): [] for size in sizes} for _ in subjects]
    for size in sizes:
        queues = [_Queue(problems, subject, size) for subject in subjects]
        for queue in queues:
            queue.decode()  # caches are cold for the first one
        for _ in range(repeats):
            for queue, speeds in zip(queues, found, strict=True):
                speeds[str(size)] += queue.decode()[1]
    load = os.getloadavg()[0]
    return [{"tokens_per_second": speeds, "load": load} for speeds in found]
