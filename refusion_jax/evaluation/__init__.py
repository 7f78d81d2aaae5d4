"""Evaluation: tasks of lm-evaluation-harness, likelihood, and a sandbox for generated code."""

import contextlib
from collections.abc import Iterator

from refusion_jax.runtime.errors import UserError


@contextlib.contextmanager
def needs_harness() -> Iterator[None]:
    """A context for imports of modules that need lm_eval, which is an optional extra.

    Raises:
      UserError: where it is not installed, with the command that installs it.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        raise UserError(f"{error.name} is not installed: pip install 'refusion-jax[evaluate]'") from error
