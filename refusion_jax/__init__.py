"""refusion_jax: pretrain, adapt, evaluate and decode slot-diffusion language models (ReFusion) in JAX."""

import gc
import os
import signal
import sys
from types import TracebackType

from etils import epy

__version__ = "0.1.0"

_is_module = sys.argv[:1] == ["-m"] and any("refusion_jax." in word for word in sys.orig_argv)
_console_script = os.path.dirname(sys.executable or "") + "/refusion"
if _is_module or os.path.abspath("".join(sys.argv[:1])) == _console_script:  # a command begins
    # Objects created by imports stay: collecting garbage among them took a third of the processor time until a command
    # began (2.8 s of `train --help`, and 1.8 without). cli/command.py turns the collector on again.
    gc.disable()

    def _tell(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Ends a command that fails during its imports like one that fails later."""
        from refusion_jax.cli import command

        def fail() -> None:
            raise error

        command.guard(fail)

    def leave(*_: object) -> None:
        """Ends an interrupted command during its imports: in native code an exception is dropped, or crashes."""
        os.write(2, b"error: interrupted\n")
        os._exit(130)

    sys.excepthook = _tell
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, leave)  # until cli/command.py runs the command

# Imported when first used: a process that only prepares data needs neither JAX nor its 200 MB.
with epy.lazy_api_imports(globals()):
    from refusion_jax.checkpoints.contents import load_tokenizer
    from refusion_jax.checkpoints.load import load_model
    from refusion_jax.cli.errors import UserError
    from refusion_jax.decoding.requests import Request
    from refusion_jax.evaluation.likelihood import log_likelihood
    from refusion_jax.systems.api import Decoded, DecodeSettings, decode

__all__ = [
    "DecodeSettings",
    "Decoded",
    "Request",
    "UserError",
    "decode",
    "load_model",
    "load_tokenizer",
    "log_likelihood",
]
