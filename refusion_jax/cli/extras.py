"""Packages that only some commands need: extras of the installation."""

import contextlib
from collections.abc import Iterator

from refusion_jax.cli.errors import UserError


@contextlib.contextmanager
def needs(extra: str) -> Iterator[None]:
    """A context for imports of modules that need an optional extra.

    Raises:
      UserError: where a package of it is not installed, with the command that installs it.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        raise UserError(f"{error.name} is not installed: pip install -e '.[{extra}]' in the project's root") from error
