"""A watchdog: ends a process that hangs, with the stacks of all its threads, so that a launcher can start it again."""

import collections
import contextlib
import faulthandler
import math
import os
import sys
import threading
import time
from collections.abc import Iterator

from refusion_jax.distributed.preemption import EXIT_CODE

_SLOWER = 10  # a silence of so many times the longest recent one is a hang
_STEPS = 32  # number of recent silences
_PATIENCE = 6  # times the least limit, as long as nothing is known


class Watchdog:
    """Ends the process if there is no sign of life within `minutes` of the last one; 0: never.

    It waits longer, ten times the longest silence of the last 32 steps, if that is more. It waits for six times the
    minutes until there have been 32, and after a sign with `is_slow`.
    """

    def __init__(self, minutes: float):
        self._least, self._heard, self._step = minutes * 60, time.monotonic(), 0
        self._seconds = self._most = _PATIENCE * self._least
        self._silences = collections.deque([self._most / _SLOWER] * _STEPS, _STEPS)
        self._closed = threading.Event()
        if minutes:
            threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def alive(self, step: int, is_slow: bool = False) -> None:
        """The sign of life: after a step, or in slow work between two."""
        now = time.monotonic()
        if not is_slow:
            self._silences.append(now - self._heard)
        self._seconds = self._most if is_slow else max(self._least, _SLOWER * max(self._silences))
        self._heard, self._step = now, step

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Suspends the watchdog for work that gives no sign of life, such as writing a checkpoint."""
        self._heard = math.inf
        try:
            yield
        finally:
            self._heard = time.monotonic()

    def close(self) -> None:
        self._closed.set()

    def _watch(self) -> None:
        while not self._closed.wait(min(self._seconds / 10, 10.0)):
            if time.monotonic() - self._heard > self._seconds:
                faulthandler.dump_traceback(sys.stderr, all_threads=True)
                print(
                    f"nothing has happened for {self._seconds / 60:g} minutes after step {self._step} (above: what "
                    f"all threads were at): leaving with exit code {EXIT_CODE}; start the same command again",
                    file=sys.stderr,
                    flush=True,
                )
                os._exit(EXIT_CODE)
