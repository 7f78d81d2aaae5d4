"""Suppresses what Orbax and asyncio print about failed saves, which we report in one line."""

import functools
import logging
import sys
import traceback
import warnings
from typing import Any

from absl import logging as absl_logging

_OF_ORBAX = (
    "(.*serialize.*|.*CheckpointHandler.*|_create_paths|cancellable)"  # coroutines, by what a save on a full disk left
)


@functools.cache
def silence_orbax_tracebacks() -> None:
    """Suppresses the tracebacks of failed saves.

    Orbax logs one itself. Every other write that was under way prints one more: for tasks or coroutines that were never
    awaited, when they are garbage-collected, or after their event loop has ended.
    """
    absl_logging.get_absl_logger().addFilter(lambda record: "orbax" not in record.pathname or not record.exc_info)
    logging.getLogger("asyncio").addFilter(lambda record: not _is_of_orbax(record.exc_info))
    warnings.filterwarnings("ignore", f"coroutine '{_OF_ORBAX}' was never awaited", RuntimeWarning)
    before = sys.unraisablehook

    def hook(unraisable: Any) -> None:
        if str(unraisable.exc_value) != "Event loop is closed":
            before(unraisable)

    sys.unraisablehook = hook


def _is_of_orbax(exc_info: Any) -> bool:
    if not exc_info:
        return False
    if "tensorstore" in str(exc_info[1]):  # its futures have no frames
        return True
    names = (frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(exc_info[2]))
    return any(name.partition(".")[0] == "orbax" for name in names)
