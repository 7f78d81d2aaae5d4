"""A profile of some steps, for TensorBoard's profile plugin."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax


class Profile:
    """Traces the steps from the first to the last in `steps` on process 0; none if it is empty."""

    def __init__(self, steps: Sequence[int], directory: Path):
        self._first, self._last = steps or (0, 0)
        self._directory = directory
        self._is_tracing = False

    def before(self, step: int) -> None:
        if self._first <= step <= self._last and not self._is_tracing and jax.process_index() == 0:
            jax.profiler.start_trace(str(self._directory))
            self._is_tracing = True

    def after(self, step: int, outputs: Any) -> None:
        """Writes the trace after the last step, once its outputs are ready."""
        if self._is_tracing and step == self._last:
            jax.block_until_ready(outputs)
            self.stop()

    def stop(self) -> None:
        if self._is_tracing:
            jax.profiler.stop_trace()
            self._is_tracing = False
