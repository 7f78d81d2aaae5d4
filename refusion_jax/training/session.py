"""One session of a run: from a start, or a roll-back, to the next.

It begins with the state of the newest whole checkpoint, opens the logs, and has the step compiled.
"""

import contextlib
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import jax

from refusion_jax.batch.rows import Rows
from refusion_jax.checkpoints.manager import Checkpoints
from refusion_jax.cli.errors import UserError
from refusion_jax.config.run_config import claim
from refusion_jax.data.loader import epochs, global_batches
from refusion_jax.distributed import compiled_code, processes, sharding, storage, watchdog, xla_options
from refusion_jax.distributed.preemption import PreemptionRequested
from refusion_jax.training import events, recovery
from refusion_jax.training.loop import Now, Run
from refusion_jax.training.metrics import MetricsWriter
from refusion_jax.training.program import split
from refusion_jax.training.train_step import wide_to_int


class Session(contextlib.ExitStack):
    """The state, the checkpoints and the logs of a session; a `with` block closes what `open` has opened."""

    def __init__(self, run: Run):
        """Reads the newest whole checkpoint, and writes to the directory from here on; UserError if it cannot go on."""
        super().__init__()
        self._run, config = run, run.config
        self._began = time.monotonic()
        self._health = recovery.Health(config.steps)
        self.checkpoints = Checkpoints(run.workdir, config.checkpoint.keep)
        self.skipped = recovery.SkippedBatches(run.workdir)
        processes.check_same(f"{recovery.FILE} in --workdir", str(self.skipped.windows))
        self._data = {"rows": len(run.rows), "fingerprint": run.rows.fingerprint()}
        restored = self.checkpoints.restore(run.program.state)
        self._restore_seconds = time.monotonic() - self._began
        if restored and not run.may_change_data and not self._data.items() <= restored[1].items():
            raise UserError(
                f"--config.data.path={config.data.path} no longer holds the rows this run was trained on; "
                f"bring the data back, or start a new --workdir, or go on with these by --allow_change=data"
            )
        self.state = restored[0] if restored else run.program.initial_state(_initial_weights(run))
        if restored and self.state.frozen:
            frozen = split(_initial_weights(run), run.program.lora)[1]
            self.state = self.state.replace(frozen=frozen)
        self.first_step = int(self.state.step)
        if run.failure:
            self.skipped.add(self.first_step, run.failure)

    def open(self) -> None:
        """Opens the logs, and compiles the step (or takes it from the cache, if an earlier session has compiled it)."""
        run, config, workdir = self._run, self._run.config, self._run.workdir
        self.enter_context(self.checkpoints)
        if run.tasks:
            run.tasks.check(self.state.weights)  # now that the state has taken its share of the memory
        compiled_code.keep_compiled(workdir / "compilation_cache", config.compilation_cache)
        claim(workdir, config, run.shape, run.tokenizer)
        self.directory = self.enter_context(closing(storage.LogDirectory(workdir)))
        self.events = self.enter_context(closing(events.EventLog(self.directory.fetch(events.FILE))))
        age = time.monotonic() - self._began if run.failure else events.process_age()
        self.events.write("start", ago=age, step=self.first_step, versions=xla_options.versions())
        if failure := run.failure:
            self.events.write("rolled_back", from_step=failure.step, to_step=self.first_step, why=str(failure))
        for change in run.changed:
            self.events.write("changed", what=change)
        for step, why in self.checkpoints.passed_over.items():
            self.events.write("passed_over", step=step, why=why)
        self.events.write("restore", seconds=self._restore_seconds)
        self.events.write("init", seconds=max(0.0, age - self._restore_seconds))
        tokens = wide_to_int(self.state.tokens)
        self.metrics = self.enter_context(closing(MetricsWriter(run, self.directory, self.first_step, tokens)))
        self.clock = events.StepClock(self.events, self.first_step)
        if run.compiled_step is None:
            with self.pause("compile"):
                run.compiled_step = run.program.compiled_step(self.state)
        self.profile = self.enter_context(_Profile(config.profile_steps, self.directory.path / "tensorboard"))
        self.watchdog = self.enter_context(closing(watchdog.Watchdog(config.guard.hang_minutes)))
        run.preemption.training, run.failure = True, None

    def next_row(self, step: int) -> int:
        """The number of rows used by all steps up to this one, including skipped rows."""
        return self.skipped.batch_of(step) * self._run.config.batch_size

    def batches(self) -> Iterator[Rows]:
        config = self._run.config
        return global_batches(
            self._run.rows,
            sharding.sharding(self._run.mesh, "batch", "length"),
            batch_size=config.batch_size,
            seed=config.seed,
            first_step=self.first_step,
            last_step=config.steps,
            batch_of=self.skipped.batch_of,
        )

    def after(self, now: Now) -> None:
        """Evaluates, logs, checks and saves what is due after a step; RollBack if training has failed."""
        config = self._run.config

        def is_due(every: int) -> bool:
            return now.step % every == 0 or now.is_end

        if self._run.held_out and is_due(config.eval.every):
            with self.pause("evaluate", step=now.step), self.watchdog.paused():
                now.evaluated |= jax.block_until_ready(self._run.held_out(now.state.weights))
        if self._run.tasks and is_due(config.eval.tasks_every):
            self._score_tasks(now)
        self._log(now)
        self._health.after_step(now)
        if is_due(config.checkpoint.every) or now.is_preempted:
            self._save(now)

    def _score_tasks(self, now: Now) -> None:
        def alive() -> None:
            self.watchdog.alive(now.step, is_slow=True)
            self._run.preemption.check()

        self.watchdog.alive(now.step, is_slow=True)
        with self.pause("evaluate", step=now.step):
            try:
                scores, samples = self._run.tasks(now.state.weights, alive)
            except PreemptionRequested:
                now.is_preempted = True  # another step would cut into the time left for saving
                return
            now.evaluated |= scores
            self.metrics.show(now.step, samples)

    def _log(self, now: Now) -> None:
        """Keeps the metrics, which are fetched once the next step is dispatched, so that devices never wait."""
        if now.step % self._run.config.log_every == 0 or now.is_end or now.evaluated:
            position = epochs(self._run.rows, self.next_row(now.step))
            self.metrics.later(now.step, now.metrics | position | now.evaluated)

    def _save(self, now: Now) -> None:
        self.metrics.flush()  # otherwise a kill would lose this step's record, and its rates would include the save
        if self._health.is_in_doubt() and not now.is_last:
            return
        self._run.check_lock()
        with self.pause("save", step=now.step):
            self._health.before_save(now)
            data = self._data | {"next_row": self.next_row(now.step)}
            with self.watchdog.paused():
                self.checkpoints.save(now.step, now.state, data, now.is_last)
        self.directory.sync()

    @contextlib.contextmanager
    def pause(self, event: str, **values: Any) -> Iterator[None]:
        """Logs a block that is not training as an event with its duration, and leaves it out of the rates."""
        self.clock.flush()
        began = time.monotonic()
        yield
        seconds = time.monotonic() - began
        self.events.write(event, seconds=round(seconds, 4), **values)
        self.metrics.paused(seconds)


class _Profile(contextlib.ExitStack):
    """Traces the steps from the first to the last in `steps` on process 0; none if it is empty."""

    def __init__(self, steps: Sequence[int], directory: Path):
        super().__init__()
        first, last = steps or (0, -1)
        self._steps = range(first, last + 1) if jax.process_index() == 0 else range(0)
        self._directory, self._is_tracing = directory, False

    def before(self, step: int) -> None:
        if step in self._steps and not self._is_tracing:
            self.enter_context(jax.profiler.trace(self._directory))
            self._is_tracing = True

    def after(self, step: int, outputs: Any) -> None:
        """Writes the trace after the last step, once its outputs are ready."""
        if self._is_tracing and step == self._steps[-1]:
            jax.block_until_ready(outputs)
            self.close()


def _initial_weights(run: Run) -> dict | None:
    """The weights to start from, see `Program.given_weights`; None: random ones. The run no longer holds them."""
    weights, run.initial_weights = run.initial_weights, None
    return weights or run.program.given_weights(run.config.init_from)
