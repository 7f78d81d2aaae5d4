"""The Orbax checkpoints of a run: weights, optimizer, and the position in the data.

`DIR/checkpoints/STEP/` holds three items: `params`, `optimizer` (the rest of the train state) and `data` (JSON), and
the checksums of all their files, written before the directory gets its name. Saving is asynchronous. A failed save is
reported in one line, and the run goes on to the next one.

Restoring takes the newest whole step. Damaged, torn and foreign checkpoints are passed over with a warning. One that
cannot be read, because of its disk or store, may be whole: it is tried again, and then ends the run.
"""

import contextlib
import functools
import re
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import jax
import orbax.checkpoint as ocp
from absl import logging
from etils import epath

from refusion_jax.checkpoints import checksums, run_directory
from refusion_jax.checkpoints.writer import Items, make_checkpointer, restoring, silence_orbax_tracebacks
from refusion_jax.cli.errors import Failure, UserError, first_line
from refusion_jax.cli.paths import is_remote
from refusion_jax.distributed.processes import first_fault
from refusion_jax.distributed.storage import ABSENT, absolute

_PROBE_BYTES = 4096  # one block of a disk
_MOST_FAILURES = 3  # saves in a row that may fail, such as on a full disk; then the run stops
PAUSE_SECONDS = 1.0  # before the last save of a run, or reading, is retried; doubles with every attempt
# Errors of content that is torn or foreign, but for how tensorstore's begin that are not; stores raise any other.
_OF_CONTENT = (*ABSENT, ValueError, LookupError, TypeError, AttributeError, AssertionError)
_UNREADABLE = re.compile(
    "(ABORTED|DEADLINE_EXCEEDED|PERMISSION_DENIED|RESOURCE_EXHAUSTED|UNAUTHENTICATED|UNAVAILABLE|UNKNOWN): "
)
_T = TypeVar("_T")


TrainState = Any  # of training.train_step, which defines its items


class Checkpoints(contextlib.AbstractContextManager):
    """Saves and restores the checkpoints of one run. Use it in a `with` block, which waits for the last save."""

    def __init__(self, workdir: epath.Path, keep: int):
        """Removes the remains of an interrupted save."""
        self._directory = epath.Path(absolute(workdir)) / "checkpoints"
        self._keep, self._failed = keep, 0
        self._under_way: int | None = None  # the step that is being saved
        self._restored: int | None = None  # the step that was read last, until the next is saved
        self.passed_over: dict[int, str] = {}  # newer steps that could not be read, and why
        if jax.process_index() == 0:
            self._directory.mkdir(parents=True, exist_ok=True)
            run_directory.remove_unfinished(self._directory)
        silence_orbax_tracebacks()
        self._checkpointer: ocp.AsyncCheckpointer | None = None  # created for the first state

    def __exit__(self, failure: type[BaseException] | None, *_) -> None:
        if failure is None:
            self.wait()
        elif jax.process_count() == 1 and self._checkpointer:  # of several, some might not know of the failure
            with contextlib.suppress(Exception):
                self._checkpointer.wait_until_finished()

    def save(self, step: int, state: TrainState, data: dict[str, Any], last: bool = False) -> None:
        """Begins to save; returns as soon as the arrays are copied off the devices.

        The `last` save of a run is waited for, and retried if it fails. `data` is the position in the data, as JSON.
        Failure if too many saves in a row have failed.
        """
        self.wait()
        if self._restored is not None and jax.process_index() == 0:  # a killed process leaves one too many
            with contextlib.suppress(Exception):  # otherwise it is removed after this save
                self._retain(self._restored)
        self._restored = None
        self._begin(step, state, data)
        while last and not self.wait():
            time.sleep(PAUSE_SECONDS * 2 ** (self._failed - 1))
            self._begin(step, state, data)

    def _begin(self, step: int, state: TrainState, data: dict[str, Any]) -> None:
        if obstacle := first_fault(_find_obstacle(self._directory)):  # the others would wait for one that cannot save
            self._has_failed(step, OSError(obstacle))
            return
        self._under_way = step
        self._checkpointer = self._checkpointer or make_checkpointer(state)
        with self._failing(step):
            self._checkpointer.save(
                self._directory / str(step),
                args=Items(
                    params=ocp.args.PyTreeSave(state.params),
                    optimizer=ocp.args.PyTreeSave(state.rest()),
                    data=ocp.args.JsonSave(data | {"guard": state.counters()}),
                ),
                force=True,  # an existing one is damaged; otherwise the run would have resumed from it
            )

    def wait(self) -> bool:
        """Waits until the current save, if any, is whole on disk; returns whether the last save succeeded."""
        if (step := self._under_way) is None:
            return self._failed == 0
        with self._failing(step):
            self._checkpointer.wait_until_finished()
        if self._under_way is None:
            return False
        self._under_way, self._failed = None, 0
        self.passed_over.pop(step, None)
        if jax.process_index() == 0:
            try:  # if this fails, the new one is still whole
                checksums.write_unlisted(self._directory / str(step), "late.")  # metadata that Orbax writes at the end
                self._retain(step)
            except Exception as error:  # noqa: BLE001  each store has errors of its own
                logging.warning("checkpoint %d is saved, but not what follows a save: %s", step, first_line(error))
        return True

    @contextlib.contextmanager
    def _failing(self, step: int) -> Iterator[None]:
        """Reports a failed save in one line, and prepares for the next.

        With several processes, each stops: the others are in the middle of the save, too, and cannot begin another.
        """
        try:
            yield
        except Exception as error:  # noqa: BLE001  file systems raise errors of many kinds
            if jax.process_count() > 1:
                raise Failure(
                    f"checkpoint {step} could not be written: {first_line(error)}; start the same command again"
                ) from error
            self._has_failed(step, error)
            self._checkpointer = None

    def _has_failed(self, step: int, error: Exception) -> None:
        """Reports and counts a failed save; too many in a row stop the run."""
        self._failed += 1
        self._under_way = None
        why = f"checkpoint {step} could not be written: {first_line(error)}"
        if self._failed >= _MOST_FAILURES:
            from_step = max(run_directory.saved_steps(self._directory.parent), default=0)
            raise Failure(
                f"{why}; {self._failed} saves in a row have failed, and the run stops: make room or mend "
                f"{self._directory}, and start it again (from step {from_step})"
            ) from error
        logging.warning("%s; the run goes on to the next save (%d of %d)", why, self._failed, _MOST_FAILURES)
        if jax.process_index() == 0:
            with contextlib.suppress(OSError):
                run_directory.remove_unfinished(self._directory)

    def _retain(self, newest: int) -> None:
        """Keeps the newest whole checkpoints; removes older ones, and damaged ones older than the newest."""
        saved = run_directory.saved_steps(self._directory.parent)
        whole = [step for step in saved if step <= newest and step not in self.passed_over]
        passed = [step for step in self.passed_over if step < newest]
        for step in [*whole[: -self._keep], *passed]:
            run_directory.remove_step(self._directory / str(step))
            self.passed_over.pop(step, None)

    def restore(self, target: TrainState) -> tuple[TrainState, dict[str, Any]] | None:
        """The newest whole checkpoint, or None if there is none; `passed_over` says why newer ones were not read.

        The target has shapes, dtypes and shardings to restore into, for any number of devices. UserError if there are
        checkpoints but none can be read: starting over silently would lose the run.
        Failure if the newest one that may be whole cannot be read now (an older one would lose steps).
        """
        steps = run_directory.finished_steps(self._directory)
        for step in reversed(steps):
            directory = self._directory / str(step)
            # Each host checks its share of the files, and all read together.
            _, why = _attempt(step, functools.partial(run_directory.check_whole, directory))
            if not why:
                restored, why = _attempt(step, functools.partial(self._read, directory, step, target))
            if not why:
                self._restored = step
                return restored
            self.passed_over[step] = why
            if jax.process_index() == 0:
                logging.warning("checkpoint %d cannot be read (%s); trying the one before", step, why)
        if steps:
            raise UserError(
                f"none of the checkpoints in {self._directory} can be read (the last one: {why}); bring them back, or "
                f"begin again in a new --workdir"
            )
        return None

    def _read(self, directory: epath.Path, step: int, target: TrainState) -> tuple[TrainState, dict[str, Any]]:
        """State and data of one checkpoint. Raises any exception if it is damaged or of another run."""
        self._checkpointer = self._checkpointer or make_checkpointer(target)
        found = self._checkpointer.restore(
            directory,
            args=Items(
                params=restoring(target.params), optimizer=restoring(target.rest()), data=ocp.args.JsonRestore()
            ),
        )
        if int(found.optimizer["step"]) != step:
            raise ValueError(f"it is a checkpoint of step {int(found.optimizer['step'])}")
        counters = found.data.pop("guard", {})  # older runs have none
        return target.restored(found.params, found.optimizer, counters), found.data


def _attempt(step: int, read: Callable[[], _T]) -> tuple[_T | None, str | None]:
    """(what is read, why a process finds it damaged or foreign), on all processes together; see `restore`."""
    for attempt in range(_MOST_FAILURES):
        if attempt:
            time.sleep(PAUSE_SECONDS * 2 ** (attempt - 1))
        found = why = unreadable = None
        try:
            found = read()
        except Exception as error:  # noqa: BLE001  torn checkpoints and stores fail in many ways
            why = first_line(error)
            if not isinstance(error, _OF_CONTENT) or _UNREADABLE.match(why):
                unreadable = why
        if not (unreadable := first_fault(unreadable)):
            return found, first_fault(why)
    raise Failure(
        f"checkpoint {step} cannot be read now ({unreadable}), and an older one would lose steps: start the same "
        f"command again, or remove this one if it stays so"
    )


def _find_obstacle(directory: epath.Path) -> str | None:
    """Why this process cannot write there now, or None; a single process learns it from the save itself."""
    if is_remote(directory):
        return None
    if not directory.is_dir():
        return f"{directory} has vanished"
    if jax.process_count() > 1:
        probe = directory / f".probe.{jax.process_index()}"
        try:
            probe.write_bytes(bytes(_PROBE_BYTES))
            probe.unlink()
        except OSError as error:
            return first_line(error)
    return None
