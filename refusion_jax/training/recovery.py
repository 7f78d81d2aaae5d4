"""Recovery from loss spikes and non-finite steps: when a run rolls back, and which rows it leaves out afterwards.

DIR/left_out.json lists windows [first, last) of steps: after the checkpoint of step `first` training failed at step
`last`. All later rows move up by the length of each window, so the rows of a step are a function of the step and of
this list. A killed run therefore resumes with the same rows, even from an older checkpoint, and no row is trained on
twice.
"""

import collections
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath

from refusion_jax.cli import command
from refusion_jax.cli.errors import UserError
from refusion_jax.distributed.json_files import read_json
from refusion_jax.distributed.storage import write_file
from refusion_jax.training.loop import Now, RollBack

FILE = "left_out.json"
_MOST_SKIPS = 10  # in a row; then the run rolls back
_MOST_ROLLBACKS = 3  # to the same checkpoint; then the run stops
_LATE = 2  # steps by which checks lag: the loop does not wait for the newest two anyway


class SkippedBatches:
    """The windows of steps whose rows a run leaves out."""

    def __init__(self, workdir: epath.Path):
        """Reads the file; UserError if it cannot be read, since the run would then train on other rows."""
        self._path = workdir / FILE
        self.windows: list[tuple[int, int]] = []
        if self._path.exists():
            self.windows = read_json(self._path, list[tuple[int, int]])

    def batch_of(self, step: int) -> int:
        """The index of the batch that comes after so many steps."""
        return step + sum(last - first for first, last in self.windows if first <= step)

    def add(self, first: int, failure: RollBack) -> None:
        """Leaves out the rows between the checkpoint of step `first` and the step at which training failed.

        UserError, with the diagnosis, if roll-backs to this checkpoint did not help.
        """
        if sum(start == first for start, _ in self.windows) >= _MOST_ROLLBACKS:
            raise UserError(
                f"training diverged: {failure}; {_MOST_ROLLBACKS} roll-backs to step {first}, each past other rows, "
                f"did not help, so it is not the data: start a new --workdir with a lower --config.learning_rate or "
                f"more --config.warmup_steps (--config.init_from can take the weights of this one)"
            )
        self.windows.append((first, failure.step))
        if jax.process_index() == 0:
            write_file(self._path, json.dumps(self.windows) + "\n")


class Health:
    """Checks every step, two steps late, so that devices never wait for the check."""

    def __init__(self, steps: int = _MOST_SKIPS) -> None:
        self._most = min(_MOST_SKIPS, steps)  # a run of fewer steps, none of which counts, must not end well
        self._pending: collections.deque[tuple[int, dict[str, jax.Array]]] = collections.deque()
        self._in_a_row = 0  # how many steps up to the newest checked one were skipped

    def after_step(self, now: Now) -> None:
        """RollBack if too many steps in a row were skipped up to this one, UserError for invalid token ids."""
        self._pending.append((now.step, now.metrics))
        if len(self._pending) > _LATE:
            self._check()

    def is_in_doubt(self) -> bool:
        """Whether the newest step was skipped; checks all steps so far, as `after_step`."""
        while self._pending:
            self._check()
        return self._in_a_row > 0

    def before_save(self, now: Now) -> None:
        """Checks all steps so far, and that all weights and optimizer state are finite; RollBack if they are not."""
        self.is_in_doubt()
        sizes = jax.device_get(_sizes(now.state.params, now.state.opt_state))
        bad = [jax.tree_util.keystr(path) for path, size in jax.tree.leaves_with_path(sizes) if not np.isfinite(size)]
        if bad:
            more = f" and {len(bad) - 1} more" if len(bad) > 1 else ""
            raise RollBack(now.step, f"step {now.step} left {bad[0]}{more} not finite")

    def _check(self) -> None:
        step, metrics = self._pending.popleft()
        self._in_a_row = in_a_row = int(metrics["in_a_row"])
        if not in_a_row:
            return
        if count := int(metrics["invalid_ids"]):
            raise UserError(f"--config.objective: {count} inputs or labels with a weight of step {step} are not tokens")
        loss, norm = (float(metrics[name]) for name in ("loss", "grad_norm"))
        which = "" if np.isfinite([loss, norm]).all() else first_bad(metrics)
        why = f"step {step} does not count (loss {loss:.6g}, gradient norm {norm:.6g}{which})"
        if jax.process_index() == 0 and in_a_row == 1:
            command.say(f"{why}: its update is left out")
        if in_a_row >= self._most:
            raise RollBack(step, f"{why}, the last of {in_a_row} in a row")


def first_bad(metrics: dict[str, Any]) -> str:
    """The first weight, gradient or update that is not finite, if --config.debug_nans records it."""
    for kind in ("weight", "gradient", "update"):  # a step returns them in another order
        tree = metrics.get("finite", {}).get(kind)
        if bad := [path for path, is_finite in jax.tree.leaves_with_path(tree) if not is_finite]:
            return f"; first not finite: {kind} {jax.tree_util.keystr(bad[0])}, of {len(bad)} such"
    return "; name the tensor with --config.debug_nans" if "finite" not in metrics else ""


@jax.jit
def _sizes(params: Any, opt_state: Any) -> Any:
    """Sums of squares in float32; weights so large that these overflow (1e19) count as not finite."""
    squares = jax.tree.map(lambda x: jnp.sum(jnp.square(x)), params)
    return {"weight": squares, "optimizer": jax.tree.map(lambda x: jnp.max(jnp.abs(x)), opt_state)}
