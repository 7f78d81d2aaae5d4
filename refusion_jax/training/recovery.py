"""What a run does about steps that do not count: when it rolls back, and which rows it leaves out from then on.

DIR/left_out.json lists windows [first, last) of steps: behind a checkpoint of step `first` training failed at step
`last`. Each moves all rows behind it up, so the rows of a step are a function of the step and of this list: a run that
is killed resumes with the same rows, and from an older checkpoint, too. No row is trained on twice.
"""

import collections
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath

from refusion_jax.runtime import cli
from refusion_jax.runtime.errors import UserError
from refusion_jax.runtime.json_input import JsonError, build_list, parse_json
from refusion_jax.runtime.storage import read_file, write_file
from refusion_jax.training.train_step import TrainState

FILE = "left_out.json"
_BEHIND = 2  # steps: what the loop does not wait for anyway


class LeftOut:
    """The windows of a run."""

    def __init__(self, workdir: epath.Path):
        """Reads them; UserError where the file cannot be read: the rows of the run would be others."""
        self._path = workdir / FILE
        self.windows: list[tuple[int, int]] = []
        if self._path.exists():
            try:
                windows = build_list(tuple[int, ...], parse_json(read_file(self._path)))
                if any(len(window) != 2 or not 0 <= window[0] < window[1] for window in windows):
                    raise JsonError("it must be a list of windows, each [first, last]")
            except JsonError as error:
                raise UserError(f"{self._path} cannot be read: {error}; it says which rows are left out") from error
            self.windows = [(first, last) for first, last in windows]

    def batch_of(self, step: int) -> int:
        """Which batch of the data follows a number of steps."""
        return step + sum(last - first for first, last in self.windows if first <= step)

    def add(self, first: int, last: int) -> None:
        """Leaves out the rows that led from one step to another."""
        self.windows.append((first, last))
        if jax.process_index() == 0:
            write_file(self._path, json.dumps(self.windows) + "\n")

    def rollbacks_to(self, step: int) -> int:
        """How often a checkpoint has been rolled back to."""
        return sum(first == step for first, _ in self.windows)


def leave_out(left_out: LeftOut, first: int, last: int, why: str, most: int) -> None:
    """Leaves out the rows behind a checkpoint that led to trouble.

    Args:
      left_out: the windows of the run.
      first: step of the checkpoint.
      last: step of the trouble.
      why: what it was.
      most: how often this may help at the same checkpoint.

    Raises:
      UserError: where it has not helped as often as that: the diagnosis.
    """
    if left_out.rollbacks_to(first) >= most:
        raise UserError(
            f"training diverged: {why}; {most} roll-backs to step {first}, each past other rows, did not help, "
            f"so it is not the data: start a new --workdir with a lower --config.learning_rate or more "
            f"--config.warmup_steps (--config.init_from can take the weights of this one)"
        )
    left_out.add(first, last)


class Health:
    """Looks at every step, two behind the newest, so that devices never wait for it."""

    def __init__(self, skips: int):
        self._skips = skips
        self._pending: collections.deque[tuple[int, dict[str, jax.Array]]] = collections.deque()
        self.step = 0  # the newest that was looked at
        self.is_in_doubt = False  # the newest step that was looked at does not count

    def saw(self, step: int, metrics: dict[str, Any]) -> str | None:
        """Why to roll back, if the newest step that is done was one too many."""
        self._pending.append((step, metrics))
        return self._look() if len(self._pending) > _BEHIND else None

    def settle(self, step: int, state: TrainState) -> str | None:
        """The same for all steps so far, and for what would be saved: a norm that is not finite is no weight."""
        while self._pending:
            if why := self._look():
                return why
        sizes = jax.device_get(_sizes(state.params, state.opt_state))
        bad = [jax.tree_util.keystr(path) for path, size in jax.tree.leaves_with_path(sizes) if not np.isfinite(size)]
        return f"step {step} left {_name(bad)} not finite" if bad else None

    def _look(self) -> str | None:
        step, metrics = self._pending.popleft()
        self.step = step
        in_a_row = int(metrics["in_a_row"])
        self.is_in_doubt = in_a_row > 0
        if not self.is_in_doubt:
            return None
        loss, norm = (float(metrics[name]) for name in ("loss", "grad_norm"))
        why = f"step {step} does not count (loss {loss:.6g}, gradient norm {norm:.6g}{first_bad(metrics)})"
        if jax.process_index() == 0 and in_a_row == 1:
            cli.say(f"{why}: its update is left out")
        return f"{why}, the last of {in_a_row} in a row" if in_a_row >= self._skips else None


def first_bad(metrics: dict[str, Any]) -> str:
    """With --config.debug_nans: which weight, gradient or update is the first that is not finite."""
    for kind, tree in metrics.get("finite", {}).items():
        if bad := [path for path, is_finite in jax.tree.leaves_with_path(tree) if not is_finite]:
            return f"; first not finite: {kind} {jax.tree_util.keystr(bad[0])}, of {len(bad)} such"
    return "; name the tensor with --config.debug_nans" if "finite" not in metrics else ""


def _name(bad: list[str]) -> str:
    return bad[0] + (f" and {len(bad) - 1} more" if len(bad) > 1 else "")


@jax.jit
def _sizes(params: Any, opt_state: Any) -> Any:
    """Squares of weights are summed in float32: beyond it (weights of 1e19) training is lost, too."""
    squares = jax.tree.map(lambda x: jnp.sum(jnp.square(x)), params)
    return {"weight": squares, "optimizer": jax.tree.map(lambda x: jnp.max(jnp.abs(x)), opt_state)}
