"""One thread computes the forward passes of all devices.

Forward passes that are waiting at the same time, with the same packing and caches of the same size, run as one batch,
so that the weights are read once. No forward pass waits for others to arrive.
"""

import contextlib
import dataclasses
import queue
import threading
from concurrent.futures import Future

import jax
import numpy as np

from refusion_jax.model.key_values import KeyValues
from refusion_jax.split.model import Packing, Upper

_MOST_TOGETHER = 8  # a power of two


@dataclasses.dataclass(frozen=True, eq=False)  # compared by identity, as its fields are arrays
class ForwardJob:
    """A forward pass of one device."""

    upper: Upper
    packing: Packing
    cache: KeyValues  # donated
    arrays: tuple[np.ndarray, ...]  # see `Upper`
    result: Future = dataclasses.field(default_factory=Future)  # (inputs of the output head, the new cache)

    @property
    def kind(self) -> tuple:
        """Jobs of the same kind are computed together."""
        return self.upper, self.packing, jax.tree.leaves(self.cache)[0].shape


class Batches:
    """Computes jobs in a separate thread until the process ends."""

    def __init__(self):
        self._jobs: queue.Queue[ForwardJob] = queue.Queue()
        threading.Thread(target=self._compute, daemon=True).start()

    def run(self, job: ForwardJob) -> tuple[np.ndarray, KeyValues]:
        """(inputs of the output head, [B, T, D]; the new cache); raises whatever went wrong in the batch."""
        self._jobs.put(job)
        return job.result.result()

    def _compute(self) -> None:
        waiting: list[ForwardJob] = []
        while True:
            if not waiting:
                waiting.append(self._jobs.get())
            with contextlib.suppress(queue.Empty):
                while True:
                    waiting.append(self._jobs.get_nowait())
            some = [job for job in waiting if job.kind == waiting[0].kind][:_MOST_TOGETHER]
            some = some[: 1 << (len(some).bit_length() - 1)]  # compiled batch sizes: 1, 2, 4, 8
            waiting = [job for job in waiting if job not in some]
            try:
                found = some[0].upper(some[0].packing, [job.cache for job in some], [job.arrays for job in some])
                for job, *result in zip(some, *found, strict=True):
                    job.result.set_result(result)
            except Exception as error:  # noqa: BLE001  reported to the devices
                for job in some:
                    job.result.set_exception(error)
