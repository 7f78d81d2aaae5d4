"""Trains a model; run the same command again, and it resumes.

  python -m refusion_jax.train --config=configs/quickstart.py --workdir=runs/first
  python -m refusion_jax.train --config=configs/small.py --workdir=runs/mine --config.data.path='my/*.jsonl'

DIR (the --workdir) will hold checkpoints/STEP/ (Orbax), metrics.jsonl, tensorboard/, events.jsonl, config.json and
tokenizer.model. Any config key can be set by a flag; listed below are the shared ones and those of the system that
--config names.

On every host of a TPU pod, or under any other launcher (launch/local_hosts.sh), the same command trains on all of them
together; DIR must be one that they share. On a signal or a maintenance notice the run is saved and left with exit code
75: start it again. Exit code 2 means that the input is at fault: it would fail again.

One command at a time trains in DIR. It resumes from the newest checkpoint that is whole, passing over damaged ones.
The update of a step with a non-finite loss or gradient, or a loss spike (--config.guard.spike), is skipped; several in
a row (--config.guard.skips) take the run back to its last checkpoint, and past their rows.
"""

import contextlib
import dataclasses
import functools
import sys
import time
from collections.abc import Callable, Iterator

import jax
import ml_collections
from absl import flags
from etils import epath

from refusion_jax.checkpoints.directory import is_complete, saved_steps
from refusion_jax.checkpoints.load import check_fits, find_own_tokenizer, load_params, read_model_config
from refusion_jax.checkpoints.lock import check_free, locked
from refusion_jax.checkpoints.manager import Checkpoints
from refusion_jax.cli import command
from refusion_jax.cli.errors import UserError
from refusion_jax.cli.extras import needs
from refusion_jax.config import check, check_mesh, explained, make_objective, names
from refusion_jax.config.model import adopt_shape, adopt_steps, model_config
from refusion_jax.config.run_config import check_same_run, claim
from refusion_jax.data.dataset import load_dataset
from refusion_jax.data.interface import RowSource, Tokenizer
from refusion_jax.data.loader import epochs, global_batches
from refusion_jax.distributed import sharding
from refusion_jax.distributed.compiled_code import keep_compiled
from refusion_jax.distributed.preemption import EXIT_CODE, Preemption, ToldToGo
from refusion_jax.distributed.processes import all_agree, check_same, check_shared, together
from refusion_jax.distributed.profiling import Profile
from refusion_jax.distributed.storage import LogDirectory
from refusion_jax.distributed.watchdog import Watchdog
from refusion_jax.distributed.xla_options import libtpu_mismatch
from refusion_jax.evaluation.heldout import HeldOut, find_held_out, make_held_out
from refusion_jax.model.transformer import ModelConfig
from refusion_jax.systems.interface import train_flops_per_row
from refusion_jax.training import events, recovery
from refusion_jax.training.metrics import MetricsWriter
from refusion_jax.training.program import Program, abstract_rows, train_program
from refusion_jax.training.recovery import Health, LeftOut, leave_out
from refusion_jax.training.train_step import TrainState, init_state, wide_to_int

_CONFIG = command.define_config("Config file, such as configs/quickstart.py")
_WORKDIR = flags.DEFINE_string("workdir", None, "Directory of the run: made, or resumed if it holds this very run")
_START_OVER = flags.DEFINE_bool("start_over", False, "Begin at step 0 where none of the checkpoints can be read")
_PEERS = flags.DEFINE_float("peer_seconds", 300.0, "How long to wait for the other processes of a run", 1.0)
_LOST = flags.DEFINE_integer("lost_seconds", 60, "After how long a silence another process counts as lost", 5, 3600)


@dataclasses.dataclass
class Run:
    """All that is made once, however often the run is rolled back."""

    config: ml_collections.ConfigDict
    workdir: epath.Path
    mesh: jax.sharding.Mesh
    tokenizer: Tokenizer
    rows: RowSource
    shape: ModelConfig
    program: Program
    held_out: HeldOut | None
    tasks: Callable | None  # a TaskScores
    preemption: Preemption
    initial_params: list  # the weights to start from, if not random ones: none or one, taken when they are used
    still_ours: Callable[[], None] = lambda: None  # UserError where somebody else has taken the directory over
    compiled_step: Callable | None = None
    failed: tuple[int, str] | None = None  # at which step the session before failed, and why


def train(config: ml_collections.ConfigDict, workdir: epath.Path, start_over: bool = False) -> bool:
    """Trains from where the run's directory stands to the last step, together with the other processes.

    Returns:
      Whether the run is complete; else it was interrupted, and is saved.

    Raises:
      UserError: where config, data or directory cannot be used; nothing has been written then.
    """
    # 1. What is asked for, and is any of it left to do?
    preemption = Preemption()
    check(config)
    adopt_shape(config, workdir)
    check_same_run(workdir, config)
    check_free(workdir)
    steps = saved_steps(workdir)
    check_same("the config, or the checkpoints in --workdir,", config.to_json(), str(steps))
    if all_agree(is_complete(workdir, config.steps, config.checkpoint.verify)):
        say(f"training is complete: {workdir} holds step {steps[-1]} of {config.steps}")
        return True
    mesh = sharding.make_mesh(config.mesh)
    check_mesh(config, mesh)
    if mesh.devices.flat[0].platform == "tpu" and (mismatch := libtpu_mismatch()):
        say(mismatch)

    # 2. The data.
    starts_from = epath.Path(config.init_from) if config.init_from and not steps else None
    tokenizer, rows = load_dataset(config, workdir, starts_from and find_own_tokenizer(starts_from))
    say(
        f"{rows.documents:,} documents in {len(rows):,} rows of {config.row_length} tokens, {rows.fill:.1%} full; "
        f"vocabulary of {tokenizer.size}"
    )
    adopt_steps(config, len(rows))
    check_same("what --config.data.path holds", rows.fingerprint(), *tokenizer.files.values())

    # 3. The program: the jitted step, and where every array of the state lives.
    source = starts_from or (workdir if config.init_from else None)
    shape = model_config(config, tokenizer, read_model_config(source).max_position_embeddings if source else 0)
    program = train_program(config, shape, mesh)
    held_out = None
    if held_out_sets := find_held_out(config, tokenizer):
        held_out = make_held_out(config, held_out_sets, tokenizer, program.graphdef, program.objective, mesh)
    tasks = None
    if config.eval.tasks:
        with needs("evaluate"):
            from refusion_jax.training.task_scores import TaskScores
        tasks = TaskScores(config, tokenizer, program)
    run = Run(config, workdir, mesh, tokenizer, rows, shape, program, held_out, tasks, preemption, [])

    # 4. The weights to start from, if not random ones.
    if starts_from:
        check_fits(starts_from, shape, tokenizer)
        run.initial_params.append(load_params(starts_from, run.program.target.params))

    # 5. Train: one session, and one more for every time that bad numbers roll the run back.
    check_shared(workdir)
    with locked(workdir) as run.still_ours, jax.set_mesh(mesh):
        while (outcome := session(run, start_over)) == "rolled back":
            start_over = False
    return outcome == "complete"


def session(run: Run, start_over: bool) -> str:
    """Trains from the newest whole checkpoint until the run is complete, preempted, or rolled back: says which.

    Raises:
      UserError: where the run cannot go on.
    """
    config, workdir, rows, program = run.config, run.workdir, run.rows, run.program
    with contextlib.ExitStack() as stack:
        # 1. The state: the newest checkpoint's, or a fresh one. From here on the directory is written to.
        began = time.monotonic()
        checkpoints = stack.enter_context(
            Checkpoints(workdir, config.checkpoint.keep, config.checkpoint.verify, config.checkpoint.failures)
        )
        left_out = LeftOut(workdir)
        check_same(f"{recovery.FILE} in --workdir", str(left_out.windows))
        restored = checkpoints.restore(program.target, start_over)
        restore_seconds = time.monotonic() - began
        data_position = {"rows": len(rows), "fingerprint": rows.fingerprint()}
        if restored and any(restored[1].get(key) != value for key, value in data_position.items()):
            raise UserError(
                f"--config.data.path={config.data.path} no longer holds the rows this run was trained on; "
                f"bring the data back, or start a new --workdir"
            )
        state = restored[0] if restored else fresh_state(run)
        first_step = int(state.step)
        if run.failed:
            leave_out(left_out, first_step, *run.failed, config.guard.rollbacks)
        if first_step >= config.steps:
            say(f"training is complete: {workdir} holds step {first_step} of {config.steps}")
            return "complete"
        if run.tasks:
            run.tasks.check(state.params)  # now that the state has taken its share of the memory
        keep_compiled(workdir / "compilation_cache", config.compilation_cache)
        claim(workdir, config, run.shape, run.tokenizer)
        parameters = sum(x.size for x in jax.tree.leaves(state.params))
        say(f"{parameters:,} parameters on {sharding.describe(run.mesh)}; step {first_step} of {config.steps}")

        # 2. The logs, and the compiled step (from the cache, where a session before has compiled it).
        logs = LogDirectory(workdir)
        stack.callback(logs.close)
        log = events.EventLog(logs.fetch(events.FILE))
        stack.callback(log.close)
        age = time.monotonic() - began if run.failed else events.process_age()
        log.start(first_step, age)
        if run.failed:
            log.write("rolled_back", from_step=run.failed[0], to_step=first_step, why=run.failed[1])
        for step, why in checkpoints.skipped.items():
            log.write("passed_over", step=step, why=why)
        log.write("restore", seconds=restore_seconds)
        log.write("init", seconds=max(0.0, age - restore_seconds))
        objective = make_objective(config, run.shape.mask_token_id)
        flops = config.batch_size * train_flops_per_row(objective, run.shape, config.row_length)
        tokens = wide_to_int(state.tokens)
        metrics = MetricsWriter(workdir, logs, config.steps, first_step, tokens, flops, run.mesh.devices)
        stack.callback(metrics.close)
        if run.compiled_step is None:
            compile_began = time.monotonic()
            with log.timed("compile"):
                run.compiled_step = program.step.lower(state, abstract_rows(config, run.mesh)).compile()
            metrics.paused(time.monotonic() - compile_began)

        # 3. Train. Metrics of a step are fetched after the next one is dispatched, so the device never waits.
        batches = global_batches(
            rows,
            sharding.sharding(run.mesh, "batch", "length"),
            batch_size=config.batch_size,
            seed=config.seed,
            first_step=first_step,
            last_step=config.steps,
            batch_of=left_out.batch_of,
        )
        profile = Profile(config.profile_steps, logs.path / "tensorboard")
        stack.callback(profile.stop)
        clock = events.StepClock(log, first_step)
        health = Health(config.guard.skips)
        watchdog = Watchdog(config.guard.hang_minutes)
        stack.callback(watchdog.close)
        run.preemption.training = True

        def alive(step: int) -> None:
            watchdog.alive(step)
            run.preemption.check()

        @contextlib.contextmanager
        def aside(step: int) -> Iterator[None]:
            """For what is done behind a step that is not training."""
            clock.flush()
            began = time.monotonic()
            with log.timed("evaluate", step=step):
                yield
            metrics.paused(time.monotonic() - began)
            watchdog.alive(step)

        for step in range(first_step + 1, config.steps + 1):
            profile.before(step)
            fetch_began = time.monotonic()
            batch = next(batches)
            fetch_ended = time.monotonic()
            state, step_metrics = run.compiled_step(state, batch)
            clock.dispatched(fetch_began, fetch_ended, step_metrics)
            watchdog.alive(step)
            profile.after(step, step_metrics)
            metrics.flush()
            rows_used = left_out.batch_of(step) * config.batch_size
            evaluated = {}
            if run.held_out and (run.held_out.is_due(step) or step == config.steps):
                with aside(step), watchdog.paused():
                    evaluated |= jax.block_until_ready(run.held_out(state.params))
            if run.tasks and (run.tasks.is_due(step) or step == config.steps):
                with aside(step), contextlib.suppress(ToldToGo):
                    scores, texts = run.tasks(state.params, functools.partial(alive, step))
                    evaluated |= scores
                    metrics.show(step, texts)
            if step % config.log_every == 0 or step == config.steps or evaluated:
                metrics.later(step, step_metrics | epochs(rows, rows_used) | evaluated)
            is_last = run.preemption.reached(step) or step == config.steps
            trouble = health.saw(step, step_metrics)
            if step % config.checkpoint.every == 0 or is_last:
                clock.flush()
                trouble = trouble or health.settle(step, state)
                if not trouble and (is_last or not health.is_in_doubt):
                    run.still_ours()
                    if is_last:  # or its record would be lost with the process, and contain the save
                        metrics.flush()
                    with log.timed("save", step=step), watchdog.paused():
                        checkpoints.save(step, state, data_position | {"next_row": rows_used}, is_last)
                    logs.sync()
            if is_last or trouble:
                break
        if not trouble:
            metrics.flush()
        outcome = "rolled back" if trouble else "complete" if step == config.steps else "preempted"
        with log.timed("end", step=step, reason=outcome):
            clock.flush()
            checkpoints.wait()
    if trouble:
        run.failed = health.step, trouble
        say(f"{trouble}: rolling back to the newest checkpoint, and past the rows behind it")
        return "preempted" if is_last and step < config.steps else outcome
    if outcome == "complete":
        say(f"trained to step {config.steps}; the run is in {workdir}")
    else:
        say(f"interrupted: saved step {step} of {config.steps}; start it again to resume")
    say(events.summary(workdir))
    return outcome


def fresh_state(run: Run) -> TrainState:
    """The state where a run begins: random weights, or those it was given to start from."""
    program = run.program
    if not run.config.init_from:
        return jax.jit(program.fresh_state, out_shardings=program.shardings)()
    params = run.initial_params or [load_params(epath.Path(run.config.init_from), program.target.params)]
    start = jax.jit(
        lambda params: init_state(params, program.optimizer), donate_argnums=0, out_shardings=program.shardings
    )
    return start(params.pop())


def say(line: str) -> None:
    """Prints on one host only."""
    if jax.process_index() == 0:
        command.say(line)


def main() -> None:
    if _CONFIG.value is None or _WORKDIR.value is None:
        raise UserError("--config=configs/NAME.py and --workdir=DIR are needed; --help explains")
    with together(_PEERS.value, _LOST.value):
        is_done = train(_CONFIG.value, epath.Path(_WORKDIR.value), _START_OVER.value)
    if not is_done:
        sys.exit(EXIT_CODE)


if __name__ == "__main__":
    command.run(main, lambda: explained(_CONFIG.value), names)
