"""refusion_jax: pretrain, adapt, evaluate and decode slot-diffusion language models (ReFusion) in JAX."""

import importlib
import sys

# Imported when first used: a process that only prepares data needs neither JAX nor the 200 MB that it takes.
_HOME = {
    "DecodeSettings": "refusion_jax.systems.api",
    "Decoded": "refusion_jax.systems.api",
    "Request": "refusion_jax.decoding.requests",
    "UserError": "refusion_jax.cli.errors",
    "decode": "refusion_jax.systems.api",
    "load_model": "refusion_jax.checkpoints.load",
    "load_tokenizer": "refusion_jax.checkpoints.load",
    "log_likelihood": "refusion_jax.evaluation.likelihood",
}

__all__ = list(_HOME)


def __getattr__(name: str):
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return __all__


def _explain(_: type, error: BaseException, __: object) -> None:
    """Ends a command that cannot be imported as `command.guard` ends one that runs: JAX reads the environment then."""
    from refusion_jax.cli import command
    from refusion_jax.cli.errors import UserError, first_line

    def main() -> None:
        if isinstance(error, ValueError):  # nothing but the environment has values then
            raise UserError(f"a variable of the environment: {first_line(error)}") from error
        raise error

    command.guard(main)


if sys.argv[:1] == ["-m"]:  # as it is while `python -m refusion_jax.COMMAND` looks for the command
    sys.excepthook = _explain
