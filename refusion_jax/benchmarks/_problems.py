"""The built-in problems that runs of configs/quickstart.py are measured on: none of them is among those of training."""

from collections.abc import Sequence

from absl import flags

from refusion_jax.cli.errors import UserError
from refusion_jax.data import tasks
from refusion_jax.data.interface import Tokenizer
from refusion_jax.data.problems import Problem

MAX_NEW_TOKENS = 32  # the longest worked answer takes 25


def checkpoints_of(own: flags.FlagValues) -> list[str]:
    """What --checkpoint names: one run, or several.

    Raises:
      UserError: where it names none.
    """
    if not own.checkpoint:
        raise UserError("--checkpoint=: name a training run's directory, or one step in its checkpoints/")
    return [own.checkpoint] if isinstance(own.checkpoint, str) else own.checkpoint


def held_out(count: int) -> list[Problem]:
    """The first of them."""
    return list(tasks.problems("test", count, seed=0))


def share_right(problems: Sequence[Problem], answers: Sequence[Sequence[int]], tokenizer: Tokenizer) -> float:
    """The share of answers, given as tokens, that are right."""
    pairs = zip(problems, answers, strict=True)
    return sum(tasks.is_correct(problem, tokenizer.decode(answer)) for problem, answer in pairs) / len(problems)
