"""What an engine is given to do."""

import dataclasses
import math
from collections.abc import Callable

from refusion_jax.decoding.requests import Answer, Request


class BusyError(RuntimeError):
    """No more can be decoded now."""


@dataclasses.dataclass(eq=False)
class Job:
    """A request, and who is told of its answer; called from the engine's thread."""

    request: Request  # from `Engine.check`
    report: Callable[[Answer, bool], bool]  # (answer so far, whether it is finished) -> whether to go on
    fail: Callable[[Exception], None]
    is_watched: bool  # whether to report also while the answer is written
    by_forward: bool = False  # whether to report after each forward pass; the device waits for the host then
    is_over: bool = False  # answered, or not wanted any more
    cached: int = 0  # leading tokens of the prompt whose keys and values were there already
    caller: object = None  # the same for all jobs that were submitted together
    told: float = -math.inf  # when it was reported last, by `time.monotonic`
