"""How good a model is: tasks of lm-evaluation-harness, likelihood, and a sandbox for what a model has programmed."""

import contextlib
from collections.abc import Iterator

from refusion_jax.runtime.errors import UserError


@contextlib.contextmanager
def needs_harness() -> Iterator[None]:
    """In which modules that need lm_eval may be imported; it is an extra.

    Raises:
      UserError: where it is not installed, saying how to.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        raise UserError(f"{error.name} is not installed: pip install 'refusion-jax[evaluate]'") from error
