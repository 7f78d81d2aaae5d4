"""Hooks of the training loop: what is done after steps, such as logging, evaluating and saving."""

import dataclasses
from collections.abc import Callable
from typing import Any

from refusion_jax.training.train_step import TrainState


@dataclasses.dataclass
class Now:
    """Where training stands after a step."""

    step: int
    state: TrainState
    metrics: dict[str, Any]  # of the step, arrays that may still be computed
    is_end: bool  # whether this is the last step of the run
    is_preempted: bool  # whether the process has to leave after this step
    evaluated: dict[str, Any] = dataclasses.field(default_factory=dict)  # what hooks have measured

    @property
    def is_last(self) -> bool:
        """Whether this is the last step of the session."""
        return self.is_end or self.is_preempted


class RollBack(Exception):  # noqa: N818  a decision, not a fault
    """Raised by a hook: training has failed at a step, and goes on from the newest checkpoint."""

    def __init__(self, step: int, why: str):
        super().__init__(why)
        self.step = step


class Hooks:
    """Functions of `Now`, called in the order in which they were added."""

    def __init__(self):
        self._hooks: list[tuple[int, Callable[[Now], None], bool]] = []

    def every(self, steps: int, hook: Callable[[Now], None], when_preempted: bool = False) -> None:
        """Calls a hook every so many steps, after the run's last and, if asked, before a preempted process leaves."""
        self._hooks.append((steps, hook, when_preempted))

    def __call__(self, now: Now) -> None:
        """Calls the hooks that are due."""
        for steps, hook, when_preempted in self._hooks:
            if now.step % steps == 0 or now.is_end or (now.is_preempted and when_preempted):
                hook(now)
