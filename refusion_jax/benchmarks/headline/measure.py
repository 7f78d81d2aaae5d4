"""Measures accuracy and speed of a trained model at one operating point of a decoder."""

import collections
import os
import statistics
import time
from collections.abc import Sequence
from typing import Any

from refusion_jax.benchmarks.headline.plan import BATCH_SIZES, Budget, Point
from refusion_jax.cli.errors import UserError
from refusion_jax.data.interface import Tokenizer
from refusion_jax.data.problems import Mixture, Problem
from refusion_jax.decoding.queue import Answer
from refusion_jax.decoding.requests import Request, prepare
from refusion_jax.model.transformer import Transformer
from refusion_jax.systems.api import decoder_for, stream

TURNS = 9  # a small model decodes the timed problems in 0.2 s, and single turns differ by a fifth
REPLAY_TURNS, REPLAYED = 5, 24  # turns, and problems in each, at the price of weights for which a forward takes longer


def check_fit(problems: list[Problem], tokenizer: Tokenizer, budget: Budget) -> None:
    """Refuses problems whose answers are longer than the budget decodes.

    Raises:
      UserError: with the length of the longest answer.
    """
    longest = 1 + max(map(len, tokenizer.encode([problem.response for problem in problems])))
    if longest > budget.new_tokens:
        raise UserError(
            f"--config: answers have up to {longest} tokens, and this budget decodes {budget.new_tokens}: "
            f"lower data.difficulty"
        )


def score(
    mixture: Mixture, problems: list[Problem], point: Point, budget: Budget, model: Transformer, tokenizer: Tokenizer
) -> tuple[dict[str, Any], list[str], float]:
    """Accuracy of the answers, decoding many prompts at a time.

    Tokens are counted through the EOS.

    Returns:
      ({"accuracy", "families": {name: accuracy}, "tokens", "forwards", "tokens_per_forward", and what an estimate for
      other chips needs, "prompt_tokens" (mean), "width" of a forward and "has_cache"}, texts, seconds).
    """
    decoding = _Decoding(problems, point, budget, model, tokenizer, BATCH_SIZES[-1])
    answers, seconds = decoding.often(budget.repeats)
    texts, right = [tokenizer.decode(answer.tokens) for answer in answers], collections.defaultdict(list)
    for problem, text in zip(problems, texts, strict=True):
        right[problem.family].append(mixture.is_correct(problem, text))
    tokens, forwards = sum(len(a.tokens) for a in answers), sum(a.forwards for a in answers)
    record = {
        "accuracy": sum(map(sum, right.values())) / len(problems),
        "families": {name: sum(right[name]) / len(right[name]) for name in sorted(right)},
        "tokens": tokens,
        "forwards": forwards,
        "tokens_per_forward": tokens / forwards,
        **decoding.sizes,
    }
    return record, texts, seconds


def measure(
    mixture: Mixture, problems: list[Problem], point: Point, budget: Budget, model: Transformer, tokenizer: Tokenizer
) -> dict[str, Any]:
    """The score, and tokens a second with one and with many prompts at a time, without compilation.

    Returns:
      The record of `score`, and {"tokens_per_second": {batch size: ...}, "same_text": the share of answers that are the
      same at both batch sizes, "load": the load average, which shows whether other work ran on the machine}.
    """
    record, texts, seconds = score(mixture, problems, point, budget, model, tokenizer)
    one, many = map(str, BATCH_SIZES)
    few = problems[: budget.timed]
    alone, seconds_alone = _Decoding(few, point, budget, model, tokenizer, BATCH_SIZES[0]).often(budget.repeats)
    same = [tokenizer.decode(answer.tokens) == text for answer, text in zip(alone, texts, strict=False)]
    speed = {one: sum(len(answer.tokens) for answer in alone) / seconds_alone, many: record["tokens"] / seconds}
    same_text = sum(same) / len(same)
    return record | {"tokens_per_second": speed, "same_text": same_text, "load": os.getloadavg()[0]}


def in_turns(
    entries: Sequence[tuple[Point, Transformer, Tokenizer]],
    problems: list[Problem],
    budget: Budget,
    sizes: Sequence[int] = BATCH_SIZES,
    turns: int = TURNS,
) -> list[dict[str, Any]]:
    """Tokens a second of decoders that are timed in turns, so that a machine's drift is the same for all of them.

    Args:
      entries: the decoders and their models.
      problems: decoded in every turn.
      budget: of the comparison.
      sizes: of batches, each timed.
      turns: how many.

    Returns:
      For each entry, {"tokens_per_second": {batch size: [one for each turn]}, "load": the load average at the end}.
    """
    found = [{str(size): [] for size in sizes} for _ in entries]
    for size in sizes:
        decodings = [_Decoding(problems, point, budget, model, tokenizer, size) for point, model, tokenizer in entries]
        for decoding in decodings:
            decoding.once()  # caches are cold for the first one
        for _ in range(turns):
            for decoding, speeds in zip(decodings, found, strict=True):
                answers, seconds = decoding.once()
                speeds[str(size)].append(sum(len(answer.tokens) for answer in answers) / seconds)
    load = os.getloadavg()[0]
    return [{"tokens_per_second": speeds, "load": load} for speeds in found]


class _Decoding:
    """Problems that a model decodes, some at a time, again and again."""

    def __init__(
        self,
        problems: list[Problem],
        point: Point,
        budget: Budget,
        model: Transformer,
        tokenizer: Tokenizer,
        batch_size: int,
    ):
        """Makes the requests, and compiles."""
        prompts = tokenizer.encode_prompts([problem.query for problem in problems])
        self._requests = prepare(prompts, point.settings(budget.new_tokens, batch_size), model.config)
        self._model, self._decoder = model, decoder_for(self._requests, model.config)
        self._decode(self._requests[:batch_size])

    @property
    def sizes(self) -> dict[str, Any]:
        """Mean length of the prompts, the compiled width of a forward, and whether there is a cache."""
        prompt_tokens = statistics.mean(len(request.prompt) for request in self._requests)
        decoder = self._decoder
        return {"prompt_tokens": prompt_tokens, "width": decoder.width, "has_cache": decoder.cache_length > 0}

    def once(self) -> tuple[list[Answer], float]:
        """The answers in order, and the time in seconds."""
        return self._decode(self._requests)

    def often(self, repeats: int) -> tuple[list[Answer], float]:
        """The answers in order, and the median time in seconds."""
        turns = [self.once() for _ in range(repeats)]
        return turns[-1][0], statistics.median(seconds for _, seconds in turns)

    def _decode(self, requests: Sequence[Request]) -> tuple[list[Answer], float]:
        began = time.perf_counter()
        answers = dict(stream(self._model, requests, self._decoder))
        return [answers[i] for i in range(len(requests))], time.perf_counter() - began
