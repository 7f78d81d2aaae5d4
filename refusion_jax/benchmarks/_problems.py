"""The built-in problems that runs of configs/quickstart.py are measured on: none of them is among those of training."""

from absl import flags

from refusion_jax.cli.errors import UserError
from refusion_jax.data import tasks
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
