"""refusion_jax: pretrain, adapt, evaluate and decode slot-diffusion language models (ReFusion) in JAX."""

import gc
import importlib
import sys
from types import TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the types of what `__getattr__` finds
    from refusion_jax.checkpoints.load import load_model as load_model
    from refusion_jax.checkpoints.load import load_tokenizer as load_tokenizer
    from refusion_jax.cli.errors import UserError as UserError
    from refusion_jax.decoding.requests import Request as Request
    from refusion_jax.evaluation.likelihood import log_likelihood as log_likelihood
    from refusion_jax.systems.api import Decoded as Decoded
    from refusion_jax.systems.api import DecodeSettings as DecodeSettings
    from refusion_jax.systems.api import decode as decode

__version__ = "0.1.0"

if sys.argv[:1] == ["-m"] and any("refusion_jax." in word for word in sys.orig_argv):  # a command begins
    # What imports make stays: to look at it for garbage took a third of the processor time until a command began (2.8 s
    # of `train --help`, and 1.8 without). cli/command.py turns the collector on again.
    gc.disable()

    def _tell(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Ends a command that fails, or is interrupted, while it is imported as one that does later."""
        from refusion_jax.cli import command

        def fail() -> None:
            raise error

        command.guard(fail)

    sys.excepthook = _tell

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


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return __all__
