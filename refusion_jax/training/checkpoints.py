"""Orbax checkpoints of a run: weights, optimizer, and the position in the data.

`DIR/checkpoints/STEP/` holds three items: `params`, `optimizer` (everything else of the train state) and `data`
(JSON). Saving is asynchronous; a save that fails stops the run at the next one.
"""

from typing import Any

import jax
import orbax.checkpoint as ocp
from absl import logging
from etils import epath
from orbax.checkpoint.checkpoint_managers import preservation_policy

from refusion_jax.runtime.distributed import all_agree
from refusion_jax.runtime.errors import UserError
from refusion_jax.runtime.storage import absolute
from refusion_jax.training.train_step import TrainState


class Checkpoints:
    """The checkpoints of one run. Close it (or leave its `with` block) to wait for the last save."""

    def __init__(self, workdir: epath.Path, keep: int):
        self._directory = absolute(workdir) / "checkpoints"
        self._manager = ocp.CheckpointManager(
            self._directory,
            options=ocp.CheckpointManagerOptions(
                preservation_policy=preservation_policy.LatestN(keep),
                cleanup_tmp_directories=True,  # of saves that a kill cut off
            ),
        )

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, failure: type[BaseException] | None, *_) -> None:
        if failure is None or jax.process_count() == 1:  # closing waits for peers, who may not know of a failure
            self._manager.close()

    def save(self, step: int, state: TrainState, data: dict[str, Any]) -> None:
        """Begins to save; returns as soon as the arrays are copied off the devices."""
        rest = {"step": state.step, "tokens": state.tokens, "opt_state": state.opt_state}
        if step in self._manager.all_steps():  # one that could not be read, or the run would not be here
            self._manager.delete(step)
        self._manager.save(
            step,
            args=ocp.args.Composite(
                params=ocp.args.StandardSave(state.params),
                optimizer=ocp.args.StandardSave(rest),
                data=ocp.args.JsonSave(data),
            ),
        )

    def wait(self) -> None:
        """Waits until the last save is whole on disk."""
        self._manager.wait_until_finished()

    def restore(self, target: TrainState) -> tuple[TrainState, dict[str, Any]] | None:
        """The newest readable checkpoint, or None where there is none at all.

        Args:
          target: shapes, dtypes and shardings to restore into; any number of devices will do.

        Raises:
          UserError: where there are checkpoints, but none can be read: starting over in silence would lose the run.
        """
        rest = {"step": target.step, "tokens": target.tokens, "opt_state": target.opt_state}
        steps = sorted(self._manager.all_steps(), reverse=True)
        for step in steps:
            restored, failure = None, "another host cannot"
            try:
                restored = self._manager.restore(
                    step,
                    args=ocp.args.Composite(
                        params=ocp.args.StandardRestore(target.params),
                        optimizer=ocp.args.StandardRestore(rest),
                        data=ocp.args.JsonRestore(),
                    ),
                )
            except Exception as error:  # noqa: BLE001  a torn checkpoint can fail in any way; an older one may be whole
                failure = str(error).partition("\n")[0]
            if all_agree(restored is not None):
                return TrainState(params=restored.params, **restored.optimizer), restored.data
            logging.warning("checkpoint %d cannot be read (%s); trying the one before", step, failure)
        if steps:
            raise UserError(f"none of the checkpoints in {self._directory} can be read; move them away to start over")
        return None


def restore_params(directory: epath.Path, target: Any) -> Any:
    """Weights alone, from one step's directory, into arrays of the target's shapes, dtypes and shardings."""
    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(absolute(directory) / "params", target)


def save_params(workdir: epath.Path, params: Any) -> None:
    """Writes weights alone, as step 0 of a directory from which models are loaded, not runs resumed."""
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(absolute(workdir) / "checkpoints" / "0" / "params", params)


def saved_steps(workdir: epath.Path) -> list[int]:
    """Steps of the finished checkpoints of a run, ascending."""
    directory = workdir / "checkpoints"
    return sorted(ocp.utils.checkpoint_steps(directory)) if directory.is_dir() else []


def find_step(path: epath.Path) -> tuple[epath.Path, epath.Path]:
    """(run directory, one step's directory): of a run directory or its checkpoints/ the newest, or the step given.

    Raises:
      UserError: where no checkpoint is there.
    """
    path = absolute(path)
    if path.name.isdigit() and path.parent.name == "checkpoints":
        workdir, steps = path.parent.parent, [int(path.name)]
    else:
        workdir = path.parent if path.name == "checkpoints" else path
        steps = saved_steps(workdir)
    if not steps or not (step := workdir / "checkpoints" / str(steps[-1])).is_dir():
        raise UserError(f"{path} holds no checkpoint; give the --workdir of a training run, or one of its steps")
    return workdir, step
