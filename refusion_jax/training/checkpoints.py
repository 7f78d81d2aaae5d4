"""Orbax checkpoints of a run: weights, optimizer, and the position in the data.

`DIR/checkpoints/STEP/` holds three items: `params`, `optimizer` (the rest of the train state) and `data` (JSON), and
the checksums of all their files, written before the directory gets its name. Saving is asynchronous. A save that fails
is said, and made up for by the next one.

Whoever reads takes the newest step that is whole. What is damaged, torn or foreign is passed over, and said.
"""

import contextlib
import dataclasses
import time
from collections.abc import Iterator
from typing import Any

import jax
import orbax.checkpoint as ocp
from absl import logging
from etils import epath

from refusion_jax.runtime import checksums
from refusion_jax.runtime.distributed import all_agree
from refusion_jax.runtime.errors import UserError, first_line
from refusion_jax.runtime.storage import absolute, is_remote
from refusion_jax.training import failed_saves
from refusion_jax.training.train_step import Guard, TrainState

ITEMS = ("params", "optimizer", "data")
_TEMPORARY = ".orbax-checkpoint-tmp"  # in the names of what is being written
_LATE = "_CHECKPOINT_METADATA"  # Orbax adds the time of the commit: it is listed when the checkpoint has its name
_REMOVED = ".removed-"  # a checkpoint on its way out begins with it
_COMMITTED = "commit_success.txt"  # in an object store, the last file of a checkpoint
_LAST_ATTEMPTS = 4
_PAUSE_SECONDS = 1.0  # before the last save of a run is tried again; twice that the next time


class Checkpoints:
    """The checkpoints of one run, which the caller owns. Close it (or leave its `with` block) to wait for a save."""

    def __init__(self, workdir: epath.Path, keep: int, verify: bool = True, failures: int = 3):
        """Clears away what a killed save has left.

        Args:
          workdir: the run's directory.
          keep: how many to keep.
          verify: whether to write checksums and compare them.
          failures: saves in a row that may fail; at the last of them the run stops.
        """
        self._directory = epath.Path(absolute(workdir)) / "checkpoints"
        self._keep, self._verify, self._failures = keep, verify, failures
        self._failed = 0
        self._under_way: int | None = None  # the step that is being saved
        self.skipped: dict[int, str] = {}  # newer steps that could not be read, and why
        if jax.process_index() == 0:
            self._directory.mkdir(parents=True, exist_ok=True)
            self._clean()
        failed_saves.say_once()
        self._checkpointer = _make_checkpointer(verify)

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, failure: type[BaseException] | None, *_) -> None:
        if failure is None:
            self._settle()
        elif jax.process_count() == 1:  # closing waits for peers, who may not know of a failure
            with contextlib.suppress(Exception):
                self._checkpointer.wait_until_finished()

    def save(self, step: int, state: TrainState, data: dict[str, Any], last: bool = False) -> None:
        """Begins to save; returns as soon as the arrays are copied off the devices.

        Args:
          step: its name.
          state: what to save.
          data: the position in the data, as JSON.
          last: wait for it, and try again where it fails.

        Raises:
          UserError: where too many saves in a row have failed.
        """
        self._settle()
        self._begin(step, state, data)
        for attempt in range(1, _LAST_ATTEMPTS + 1 if last else 1):
            if self._settle():
                return
            if attempt == _LAST_ATTEMPTS:  # nobody waits for ever for a process that was interrupted
                raise UserError(
                    f"the last checkpoint, {step}, could not be written in {attempt} attempts: make room or mend "
                    f"{self._directory}, and start it again (from step {max(saved_steps(self._workdir), default=0)})"
                )
            time.sleep(_PAUSE_SECONDS * 2 ** (attempt - 1))
            self._begin(step, state, data)

    def _begin(self, step: int, state: TrainState, data: dict[str, Any]) -> None:
        rest = {"step": state.step, "tokens": state.tokens, "opt_state": state.opt_state}
        guard = {name: value.item() for name, value in jax.device_get(dataclasses.asdict(state.guard)).items()}
        self._under_way = step
        with self._failing(step):
            if not is_remote(self._directory) and not self._directory.is_dir():
                raise OSError(f"{self._directory} has vanished")
            self._checkpointer.save(
                self._directory / str(step),
                args=_Items(
                    params=ocp.args.StandardSave(state.params),
                    optimizer=ocp.args.StandardSave(rest),
                    data=ocp.args.JsonSave(data | {"guard": guard}),
                ),
                force=True,  # one of that name is damaged, or the run would not be here again
            )

    def _settle(self) -> bool:
        """Waits for the save under way; whether there is none, or it is whole now."""
        if (step := self._under_way) is None:
            return self._failed == 0
        with self._failing(step):
            self._checkpointer.wait_until_finished()
        if self._under_way is None:
            return False
        self._under_way, self._failed = None, 0
        self.skipped.pop(step, None)
        if jax.process_index() == 0:
            if self._verify:
                with contextlib.suppress(OSError):  # all that the run needs is listed
                    checksums.write_unlisted(self._directory / str(step), "late.")
            self._retain(step)
        return True

    @contextlib.contextmanager
    def _failing(self, step: int) -> Iterator[None]:
        """Says that a save has failed, in one line, and makes ready for the next."""
        try:
            yield
        except Exception as error:  # noqa: BLE001  each store has errors of its own
            if jax.process_count() > 1:
                raise  # the peers wait for this process: they end together, and resume
            self._failed += 1
            self._under_way = None
            why = f"checkpoint {step} could not be written: {first_line(error)}"
            if self._failed >= self._failures:
                raise UserError(
                    f"{why}; {self._failed} saves in a row have failed, and the run stops: make room or mend "
                    f"{self._directory}, and start it again (from step {max(saved_steps(self._workdir), default=0)})"
                ) from error
            logging.warning("%s; the run goes on to the next save (%d of %d)", why, self._failed, self._failures)
            with contextlib.suppress(OSError):
                self._clean()
            self._checkpointer = _make_checkpointer(self._verify)

    @property
    def _workdir(self) -> epath.Path:
        return self._directory.parent

    def _clean(self) -> None:
        """Removes what a save that did not end has left."""
        for path in self._directory.iterdir() if self._directory.is_dir() else ():
            is_named = path.name.isdecimal() and is_remote(
                path
            )  # in an object store it has its name from the beginning
            is_left = _TEMPORARY in path.name or path.name.startswith(_REMOVED)
            if path.is_dir() and (is_left or (is_named and not ocp.utils.is_checkpoint_finalized(path))):
                path.rmtree()

    def _retain(self, newest: int) -> None:
        """Removes all but the newest that are whole, and the damaged ones that the run has passed."""
        whole = [step for step in saved_steps(self._workdir) if step <= newest and step not in self.skipped]
        passed = [step for step in self.skipped if step < newest]
        for step in [*whole[: -self._keep], *passed]:
            try:
                _remove(self._directory / str(step))
                self.skipped.pop(step, None)
            except OSError as error:
                logging.warning("checkpoint %d cannot be removed: %s", step, first_line(error))

    def wait(self) -> None:
        """Waits until the last save is whole on disk."""
        self._settle()

    def restore(
        self, target: TrainState, start_over: bool = False, up_to: int | None = None
    ) -> tuple[TrainState, dict[str, Any]] | None:
        """The newest whole checkpoint, or None where there is none at all. `skipped` names the newer ones, and why.

        Args:
          target: shapes, dtypes and shardings to restore into; any number of devices will do.
          start_over: None also where there are some that cannot be read.
          up_to: no step behind this one.

        Raises:
          UserError: where there are checkpoints, but none can be read: starting over in silence would lose the run.
        """
        steps = [step for step in _numbered(self._directory) if up_to is None or step <= up_to]
        for step in reversed(steps):
            restored, why, directory = None, None, self._directory / str(step)
            try:
                _check_whole(directory, ITEMS, self._verify)
            except Exception as error:  # noqa: BLE001  a torn checkpoint can fail in any way; an older one may be whole
                why = first_line(error)
            if all_agree(why is None):  # restoring meets the other hosts
                try:
                    restored = self._read(directory, step, target)
                except Exception as error:  # noqa: BLE001  the same
                    why = first_line(error)
                if all_agree(restored is not None):
                    return restored
            self.skipped[step] = why or "another host cannot"
            if jax.process_index() == 0:
                logging.warning("checkpoint %d cannot be read (%s); trying the one before", step, self.skipped[step])
        if steps and not start_over:
            raise UserError(
                f"none of the checkpoints in {self._directory} can be read (the last one: {self.skipped[steps[0]]}); "
                f"bring them back, or begin again at step 0 with --start_over"
            )
        return None

    def _read(self, directory: epath.Path, step: int, target: TrainState) -> tuple[TrainState, dict[str, Any]]:
        """One checkpoint's state and data; any exception where it is none of this run's."""
        rest = {"step": target.step, "tokens": target.tokens, "opt_state": target.opt_state}
        found = self._checkpointer.restore(
            directory,
            args=_Items(
                params=ocp.args.StandardRestore(target.params),
                optimizer=ocp.args.StandardRestore(rest),
                data=ocp.args.JsonRestore(),
            ),
        )
        if int(found.optimizer["step"]) != step:
            raise ValueError(f"it is a checkpoint of step {int(found.optimizer['step'])}")
        if not isinstance(found.data, dict) or "next_row" not in found.data:
            raise ValueError(f"{directory}/data does not hold the position in the data")
        guard = found.data.pop("guard", {})  # older runs have none
        wanted = vars(target.guard)
        guard = Guard(**{name: _replicate(guard.get(name, 0), like) for name, like in wanted.items()})
        return TrainState(params=found.params, guard=guard, **found.optimizer), found.data


def _remove(directory: epath.Path) -> None:
    """Removes a checkpoint; one that is killed meanwhile leaves nothing under the checkpoint's name but the whole."""
    if not directory.exists():
        return
    if is_remote(directory):
        (directory / _COMMITTED).unlink(missing_ok=True)
    else:
        directory = directory.rename(directory.with_name(f"{_REMOVED}{directory.name}"))
    directory.rmtree()


def _replicate(value: float, target: jax.ShapeDtypeStruct) -> jax.Array:
    return jax.jit(lambda: jax.numpy.asarray(value, target.dtype), out_shardings=target.sharding)()


def is_complete(workdir: epath.Path, steps: int, verify: bool = True) -> bool:
    """Whether the last step of a run is there, whole and with checksums that match."""
    there = saved_steps(workdir)
    if not there or there[-1] < steps:
        return False
    directory = workdir / "checkpoints" / str(there[-1])
    try:
        _check_whole(directory, ITEMS, verify)
    except Exception:  # noqa: BLE001  restoring it will say why
        return False
    return checksums.exist(directory) or not verify


def restore_params(path: epath.Path, target: Any, verify: bool = True) -> Any:
    """Weights alone, of the newest whole step or the one that is named, into arrays like the target's.

    Args:
      path: as for `find_step`.
      target: shapes, dtypes and shardings.
      verify: compare checksums.

    Raises:
      UserError: where there are none, or none can be read.
    """
    workdir, newest = find_step(path)
    is_named = _is_step(absolute(path))
    steps = (
        [newest] if is_named else [newest.parent / str(step) for step in reversed(saved_steps(workdir, ("params",)))]
    )
    failed_saves.say_once()
    for directory in steps:
        try:
            _check_whole(directory, ("params",), verify)
            if misfit := _find_misfit(ocp.StandardCheckpointHandler().metadata(directory / "params"), target):
                break
            with ocp.StandardCheckpointer() as checkpointer:
                return checkpointer.restore(directory / "params", target)
        except Exception as error:  # noqa: BLE001  a torn checkpoint can fail in any way
            why = f"checkpoint {directory.name} cannot be read ({first_line(error)})"
            if directory == steps[-1]:
                raise UserError(f"{path}: {why}; no older one is left to try") from error
            logging.warning("%s; trying the one before", why)
    raise UserError(f"{directory}: {misfit}: this is not the model that {workdir / 'model.json'} describes")


def _find_misfit(there: Any, target: Any) -> str | None:
    """In what the arrays of a checkpoint are other ones than those asked for, or None."""
    found, wanted = (
        {jax.tree_util.keystr(path): tuple(x.shape) for path, x in jax.tree.leaves_with_path(tree)}
        for tree in (there, target)
    )
    for name in sorted(found.keys() | wanted.keys()):
        if found.get(name) != wanted.get(name):
            return f"{name} has shape {found.get(name, 'none')} instead of {wanted.get(name, 'none')}"
    return None


def save_params(workdir: epath.Path, params: Any) -> None:
    """Writes weights alone, as step 0 of a directory from which models are loaded, not runs resumed."""
    checkpointer = _make_checkpointer(True)
    target = absolute(workdir) / "checkpoints" / "0"
    checkpointer.save(target, args=_Items(params=ocp.args.StandardSave(params)))
    checkpointer.close()


def saved_steps(workdir: epath.Path, items: tuple[str, ...] = ITEMS) -> list[int]:
    """Steps of the finished checkpoints of a run that have these items, ascending; their content is not read."""
    directory = workdir / "checkpoints"
    return [step for step in _numbered(directory) if not _missing(directory / str(step), items)]


def find_step(path: epath.Path) -> tuple[epath.Path, epath.Path]:
    """(run directory, one step's directory): of a run directory or its checkpoints/ the newest, or the step given.

    Raises:
      UserError: where no checkpoint is there.
    """
    path = absolute(path)
    if _is_step(path):
        workdir, steps = path.parent.parent, [int(path.name)]
    else:
        workdir = path.parent if path.name == "checkpoints" else path
        steps = saved_steps(workdir, ("params",))
    if not steps or not (step := workdir / "checkpoints" / str(steps[-1])).is_dir():
        raise UserError(f"{path} holds no checkpoint; give the --workdir of a training run, or one of its steps")
    return workdir, step


def _is_step(path: epath.Path) -> bool:
    """Whether a path names one step of a run."""
    return path.name.isascii() and path.name.isdecimal() and path.parent.name == "checkpoints"


def _numbered(directory: epath.Path) -> list[int]:
    """Finished directories that are named as steps and hold anything, ascending."""
    try:
        names = [path.name for path in directory.iterdir()] if directory.is_dir() else []
    except OSError as error:
        raise UserError(f"{directory} cannot be read: {error.strerror}") from error
    steps = sorted(int(name) for name in names if name.isdecimal() and str(int(name)) == name)
    return [step for step in steps if _is_finished(directory / str(step))]


def _is_finished(directory: epath.Path) -> bool:
    """Whether it got its name when it was whole; in an object store a mark says so. Empty ones are nothing."""
    try:
        return directory.is_dir() and ocp.utils.is_checkpoint_finalized(directory) and any(directory.iterdir())
    except (OSError, ValueError):
        return True  # it cannot be looked into: it will fail when it is read, and be passed over


def _missing(directory: epath.Path, items: tuple[str, ...]) -> list[str]:
    """Items that are not there."""
    try:
        return [item for item in items if not any((directory / item).iterdir())]
    except OSError:
        return list(items)


def _check_whole(directory: epath.Path, items: tuple[str, ...], verify: bool) -> None:
    """Refuses a checkpoint of which something is missing or changed; several hosts share the reading.

    Raises:
      ValueError: naming the file.
    """
    parts = [""] if items == ITEMS else [f"{item}/" for item in items]
    for damage in (checksums.find_damage(directory, part) for part in parts if verify):
        if damage:
            raise ValueError(damage)
    if missing := _missing(directory, items):
        raise ValueError(f"{directory} has no {' and no '.join(missing)}")


class _WithChecksums(ocp.CompositeCheckpointHandler):
    """Writes the checksums of what each host has written, before the checkpoint gets its name."""

    def __init__(self, verify: bool):
        super().__init__()
        self._verify = verify

    async def async_save(self, directory: epath.Path, args: ocp.args.Composite) -> list:
        """Begins to save; hosts other than the first list the arrays that they have written when they are done."""
        futures = await super().async_save(directory, args)
        return [*futures, _OwnChecksums(directory)] if self._verify and jax.process_index() else futures

    def finalize(self, directory: epath.Path) -> None:
        """Called on the first host when all have written: lists what nobody else has."""
        super().finalize(directory)
        if self._verify:
            checksums.write_unlisted(directory, but=_LATE)


@ocp.args.register_with_handler(_WithChecksums, for_save=True, for_restore=True)
class _Items(ocp.args.Composite):
    """What Orbax asks to be told of a handler: which arguments it takes."""


class _OwnChecksums:
    """Orbax waits for it behind the host's own writes, in the background."""

    def __init__(self, directory: epath.Path):
        self._directory = directory

    def result(self, timeout: float | None = None) -> None:
        """Lists this host's files under the names that they will have."""
        files = {}
        for item in self._directory.iterdir():
            own = item / f"ocdbt.process_{jax.process_index()}"
            for path in checksums.files_below(own) if own.is_dir() else ():
                files[f"{item.name.partition(_TEMPORARY)[0]}/{path.relative_to(item)}"] = path
        checksums.write(self._directory, files)

    def cancel(self) -> None:
        """Nothing is under way."""


def _make_checkpointer(verify: bool) -> ocp.AsyncCheckpointer:
    return ocp.AsyncCheckpointer(_WithChecksums(verify))
