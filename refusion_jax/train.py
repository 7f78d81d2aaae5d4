"""Trains a model; run the same command again, and it resumes.

  python -m refusion_jax.train --config=configs/quickstart.py --workdir=runs/first
  python -m refusion_jax.train --config=configs/small.py --workdir=runs/mine --config.data.path='my/*.jsonl'

DIR (the --workdir) will hold checkpoints/STEP/ (Orbax), metrics.jsonl, tensorboard/, events.jsonl, config.json and
tokenizer.model. Any config key can be set by a flag; all of them are listed below.

On every host of a TPU pod, or under any other launcher (launch/local_hosts.sh), the same command trains on all of them
together; DIR must be one that they share. On SIGTERM or a maintenance notice the run is saved and left with exit code
75: start it again. Exit code 2 means that the input is at fault: it would fail again.
"""

import contextlib
import sys
import time

import jax
import ml_collections
from absl import flags
from etils import epath
from jax.experimental.compilation_cache import compilation_cache
from ml_collections import config_flags

from refusion_jax.config import check, check_mesh, explained, make_objective, names
from refusion_jax.data.dataset import load_dataset
from refusion_jax.data.loader import epochs, global_batches
from refusion_jax.runtime import cli, sharding
from refusion_jax.runtime.distributed import check_same, check_shared, together
from refusion_jax.runtime.errors import UserError
from refusion_jax.runtime.preemption import EXIT_CODE, Preemption
from refusion_jax.runtime.profiling import Profile
from refusion_jax.runtime.storage import LogDirectory
from refusion_jax.systems.interface import train_flops_per_row
from refusion_jax.training import events
from refusion_jax.training.checkpoints import Checkpoints, saved_steps
from refusion_jax.training.heldout import HeldOut, find_held_out, place
from refusion_jax.training.metrics import MetricsWriter, check_finite
from refusion_jax.training.pretrained import check_fits, load_params
from refusion_jax.training.program import abstract_rows, train_program
from refusion_jax.training.train_step import init_state, wide_to_int
from refusion_jax.training.workdir import check_same_run, claim, model_config

_CONFIG = config_flags.DEFINE_config_file(
    "config", None, "Config file, such as configs/quickstart.py", lock_config=True
)
_WORKDIR = flags.DEFINE_string("workdir", None, "Directory of the run: made, or resumed if it holds this very run")


def train(config: ml_collections.ConfigDict, workdir: epath.Path) -> bool:
    """Trains from where the run's directory stands to the last step, together with the other processes.

    Returns:
      Whether the run is complete; else it was told to go, and is saved.

    Raises:
      UserError: where config, data or directory cannot be used; nothing has been written then.
    """
    # 1. What is asked for, and is any of it left to do?
    preemption = Preemption()
    check(config)
    check_same_run(workdir, config)
    if (steps := saved_steps(workdir)) and steps[-1] >= config.steps:
        say(f"training is complete: {workdir} holds step {steps[-1]} of {config.steps}")
        return True
    mesh = sharding.make_mesh(config.mesh)
    check_mesh(config, mesh)
    check_same("the config, or the checkpoints in --workdir,", config.to_json(), str(steps))

    # 2. The data.
    tokenizer, rows = load_dataset(config, workdir)
    say(
        f"{rows.documents:,} documents in {len(rows):,} rows of {config.row_length} tokens, {rows.fill:.1%} full; "
        f"vocabulary of {tokenizer.size}"
    )
    check_same("what --config.data.path holds", rows.fingerprint(), *tokenizer.files.values())
    data_position = {"rows": len(rows), "fingerprint": rows.fingerprint()}

    # 3. The program: the jitted step, and where every array of the state lives.
    shape = model_config(config, tokenizer)
    program = train_program(config, shape, mesh)
    held_out = None
    if held_out_sets := find_held_out(config, tokenizer):
        held_out = HeldOut(config, place(config, held_out_sets, mesh), program.graphdef, program.objective)
    target, shardings = program.target, program.shardings

    # 4. The weights to start from, if not random ones.
    initial_params = None
    if config.init_from and not steps:
        check_fits(epath.Path(config.init_from), shape)
        initial_params = load_params(epath.Path(config.init_from), target.params)

    # 5. The state: the newest checkpoint's, or a fresh one. From here on the directory is written to.
    check_shared(workdir)
    with contextlib.ExitStack() as stack:
        stack.enter_context(jax.set_mesh(mesh))
        checkpoints = stack.enter_context(Checkpoints(workdir, config.checkpoint.keep))
        restore_began = time.time()
        restored = checkpoints.restore(target)
        restore_seconds = time.time() - restore_began
        if restored and {key: restored[1][key] for key in data_position} != data_position:
            raise UserError(
                f"--config.data.path={config.data.path} no longer holds the rows this run was trained on; "
                f"bring the data back, or start a new --workdir"
            )
        keep_compiled(workdir / "compilation_cache")
        if restored:
            state = restored[0]
        elif initial_params is None:
            state = jax.jit(program.fresh_state, out_shardings=shardings)()
        else:
            start = jax.jit(
                lambda params: init_state(params, program.optimizer), donate_argnums=0, out_shardings=shardings
            )
            state = start(initial_params)
        claim(workdir, config, shape, tokenizer)
        first_step = int(state.step)
        parameters = sum(x.size for x in jax.tree.leaves(state.params))
        say(f"{parameters:,} parameters on {sharding.describe(mesh)}; step {first_step} of {config.steps}")

        # 6. The logs, and the compiled step (from the cache, where a session before has compiled it).
        logs = LogDirectory(workdir)
        stack.callback(logs.close)
        log = events.EventLog(logs.fetch(events.FILE))
        stack.callback(log.close)
        began = events.process_began()
        log.write("start", at=began, step=first_step)
        log.write("restore", seconds=restore_seconds)
        log.write("init", seconds=time.time() - began - restore_seconds)
        objective = make_objective(config, shape.mask_token_id)
        flops = config.batch_size * train_flops_per_row(objective, shape, config.row_length)
        tokens = wide_to_int(state.tokens)
        metrics = MetricsWriter(workdir, logs, config.steps, first_step, tokens, flops, mesh.devices)
        stack.callback(metrics.close)
        with log.timed("compile"):
            train_step = program.step.lower(state, abstract_rows(config, mesh)).compile()

        # 7. Train. Metrics of a step are fetched after the next one is dispatched, so the device never waits.
        batches = global_batches(
            rows,
            sharding.sharding(mesh, "batch", "length"),
            batch_size=config.batch_size,
            seed=config.seed,
            first_step=first_step,
            last_step=config.steps,
        )
        profile = Profile(config.profile_steps, logs.path / "tensorboard")
        stack.callback(profile.stop)
        clock = events.StepClock(log, first_step)
        preemption.training = True
        pending = None
        for step in range(first_step + 1, config.steps + 1):
            profile.before(step)
            fetch_began = time.monotonic()
            batch = next(batches)
            fetch_ended = time.monotonic()
            state, step_metrics = train_step(state, batch)
            clock.dispatched(fetch_began, fetch_ended, step_metrics)
            profile.after(step, step_metrics)
            if pending:
                metrics.write(*pending)
                pending = None
            evaluated = {}
            if held_out and (held_out.is_due(step) or step == config.steps):
                clock.flush()
                with log.timed("evaluate", step=step):
                    evaluated = jax.block_until_ready(held_out(state.params))
            if step % config.log_every == 0 or step == config.steps or evaluated:
                pending = step, step_metrics | epochs(rows, step * config.batch_size) | evaluated
            is_last = preemption.reached(step) or step == config.steps
            if step % config.checkpoint.every == 0 or is_last:
                clock.flush()
                check_finite(step, step_metrics)
                with log.timed("save", step=step):
                    checkpoints.save(step, state, data_position | {"next_row": step * config.batch_size})
                logs.sync()
            if is_last:
                break
        if pending:
            metrics.write(*pending)
        is_complete = step == config.steps
        with log.timed("end", step=step, reason="complete" if is_complete else "preempted"):
            checkpoints.wait()
    if is_complete:
        say(f"trained to step {config.steps}; the run is in {workdir}")
    else:
        say(f"told to go: saved step {step} of {config.steps}; start it again to resume")
    say(events.summary(workdir))
    return is_complete


def keep_compiled(directory: epath.Path) -> None:
    """Has programs read from a cache that outlives this machine, or written to it; the user's own cache goes first.

    JAX's key covers the program, the compiler, its flags and the kind of machine (on a CPU its instruction set).
    """
    if not jax.config.jax_compilation_cache_dir:
        jax.config.update("jax_compilation_cache_dir", str(directory))
        compilation_cache.reset_cache()  # it may have been found missing before


def say(line: str) -> None:
    """Prints on one host only."""
    if jax.process_index() == 0:
        print(line, flush=True)


def main() -> None:
    if _CONFIG.value is None or _WORKDIR.value is None:
        raise UserError("--config=configs/NAME.py and --workdir=DIR are needed; --help explains")
    with together():
        is_complete = train(_CONFIG.value, epath.Path(_WORKDIR.value))
    if not is_complete:
        sys.exit(EXIT_CODE)


if __name__ == "__main__":
    cli.run(main, lambda: explained(_CONFIG.value), names)
