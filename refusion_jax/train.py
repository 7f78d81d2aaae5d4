"""Trains a model; run again, the same command resumes.

  python -m refusion_jax.train --config=configs/quickstart.py --workdir=runs/first
  python -m refusion_jax.train --config=configs/small.py --workdir=runs/mine --config.data.path='my/*.jsonl'

DIR (the --workdir) will hold checkpoints/STEP/ (Orbax), metrics.jsonl, tensorboard/, events.jsonl, config.json and
tokenizer.model. Any config key can be set by a flag; listed below are the shared ones and those of the system that
--config names.

Run on every host of a TPU pod, or by another launcher (launch/local_hosts.sh), the same command trains on all hosts
together, which must share DIR. On a signal or a maintenance notice it saves a checkpoint and exits with code 75: start
it again. Exit code 2 means that the input is at fault: it would fail again.

Only one command at a time trains in DIR. It resumes from the newest intact checkpoint, ignoring damaged ones. The
update of a step with a non-finite loss or gradient, or a loss spike (--config.guard.spike), is skipped; after ten
in a row, or all of a shorter run, it goes back to its last checkpoint and omits their rows.
"""

import sys
import time
from collections.abc import Sequence

import jax
import ml_collections
from absl import flags
from etils import epath
from jax.sharding import Mesh

from refusion_jax.batch.rows import noise_keys
from refusion_jax.checkpoints.contents import copy_stamp, find_own_tokenizer, read_model_config
from refusion_jax.checkpoints.lock import check_free, locked
from refusion_jax.checkpoints.run_directory import is_complete, saved_steps
from refusion_jax.cli import command, flag_values
from refusion_jax.cli.errors import UserError, naming, needs
from refusion_jax.config import check, check_mesh, check_stores, help_texts
from refusion_jax.config.keys import keys
from refusion_jax.config.model import adopt_shape, adopt_steps, check_fits, find_target_model, model_config
from refusion_jax.config.run_config import CHANGEABLE, check_same_run
from refusion_jax.data.dataset import load_dataset
from refusion_jax.distributed import compiled_code, host, processes, sharding, xla_options
from refusion_jax.distributed.preemption import EXIT_CODE, Preemption
from refusion_jax.evaluation.heldout import make_held_out
from refusion_jax.model.shape import READ_ALIKE
from refusion_jax.planning.fastest import faster_settings
from refusion_jax.training import events
from refusion_jax.training.loop import Now, RollBack, Run
from refusion_jax.training.program import Program, train_program
from refusion_jax.training.session import Session
from refusion_jax.training.trackers import check_trackers

_CONFIG = command.define_config("Config file, such as configs/quickstart.py")
_WORKDIR = flags.DEFINE_string("workdir", None, "Directory of the run: created, or resumed if it holds this run")
_COMPILE = flags.DEFINE_bool(
    "compile_only", False, "Compile the step for the next start, into --config.compilation_cache, and exit"
)
_ALLOW = flags.DEFINE_list(
    "allow_change", [], f"Config keys that may differ from what the run was started with: {', '.join(CHANGEABLE)}"
)
_PEERS = flags.DEFINE_float("peer_seconds", 300.0, "Seconds to wait for the other processes of a run", 1.0)
_LOST = flags.DEFINE_integer("lost_seconds", 60, "Seconds of silence after which another process is lost", 5, 3600)
_PROFILE = flags.DEFINE_integer("profiler_port", None, "Port on each host for on-demand profiling", 1, 65535)


def train(
    config: ml_collections.ConfigDict,
    workdir: epath.Path,
    allowed: Sequence[str] = (),
    compile_only: bool = False,
) -> bool:
    """Trains from where the run's directory stands to the last step, together with the other processes.

    Returns whether everything asked for is done; False if it was interrupted, and saved. UserError if the config, data
    or directory cannot be used; nothing has been written then.
    """
    # 1. What is asked for, and is any of it left to do?
    preemption = Preemption()
    check(config)
    check_stores(config)
    check_trackers(config)
    flag_values.check_output("workdir", workdir, directory=True)
    adopt_shape(config, workdir)
    changed = check_same_run(workdir, config, allowed)
    check_free(workdir)
    steps = saved_steps(workdir)
    processes.check_same("the config, or the checkpoints in --workdir,", config.to_json(), str(steps))
    if processes.all_agree(not (config.epochs and changed) and is_complete(workdir, config.steps)):
        say(f"training is complete: {workdir} holds step {steps[-1]} of {config.steps}")
        return True
    mesh = sharding.make_mesh(config.mesh)
    check_mesh(config, mesh)
    if mesh.devices.flat[0].platform == "tpu" and (mismatch := xla_options.version_mismatch()):
        say(mismatch)
    if faster := faster_settings(config, [*mesh.devices.flat]):
        say(f"`plan` estimates steps that take less time with {faster}")

    # 2. The data.
    source = epath.Path(config.init_from) if config.init_from and (config.lora.rank or not steps) else None
    key, target = find_target_model(config)
    with naming(f"--config.{'init_from' if source else key}"):
        own = find_own_tokenizer(source or target) if source or target else None
    tokenizer, rows = load_dataset(config, workdir, own)
    say(
        f"{rows.documents:,} documents, or parts of one, in {len(rows):,} rows of {config.row_length} tokens, "
        f"{rows.fill:.1%} full; vocabulary of {tokenizer.size}"
    )
    adopt_steps(config, len(rows))
    processes.check_same("what --config.data.path holds", rows.fingerprint(), *tokenizer.files.values())

    # 3. The program: the jitted step, and where every array of the state lives.
    place = source or (workdir if config.init_from else None)
    shape = model_config(config, tokenizer, read_model_config(place).max_position_embeddings if place else 0)
    if target:
        check_fits(target, shape, tokenizer, f"config.{key}", READ_ALIKE)
    may_change_data = any(name.split(".")[0] == "data" for name in allowed)
    if steps and may_change_data:
        check_fits(workdir, shape, tokenizer, "workdir")
    program = train_program(config, shape, mesh)
    # A fault in the objective must show before anything is written.
    jax.eval_shape(lambda rows: program.objective.batch(rows, noise_keys(0, 0, config.batch_size)), program.rows)
    if compile_only:
        compile_into_cache(config, workdir, program, mesh)
        return True
    held_out = make_held_out(config, tokenizer, program.graphdef, program.objective, mesh)
    tasks = None
    if config.eval.tasks:
        with needs("evaluate"):
            from refusion_jax.training.task_scores import TaskScores
        tasks = TaskScores(config, tokenizer, program)
    run = Run(config, workdir, mesh, tokenizer, rows, shape, program, held_out, tasks, preemption, changed)
    run.may_change_data = may_change_data

    # 4. The weights to start from, if not random ones, and those of the target model.
    if source:
        check_fits(source, shape, tokenizer)
    for name, model in (("init_from", source), (key, target)):
        if model and jax.process_count() > 1:
            processes.check_same(f"the model in --config.{name}={model}", copy_stamp(model))
    run.initial_weights = program.given_weights(source)

    # 5. Train: one session, and another one after every rollback.
    processes.check_shared(workdir)
    with locked(workdir) as run.check_lock, jax.set_mesh(mesh):
        while (outcome := session(run)) == "rolled back":
            pass
    return outcome == "complete"


def compile_into_cache(config: ml_collections.ConfigDict, workdir: epath.Path, program: Program, mesh: Mesh) -> None:
    """Compiles the step into the cache of compiled programs, for the next start."""
    compiled_code.keep_compiled(workdir / "compilation_cache", config.compilation_cache)
    if not (place := jax.config.jax_compilation_cache_dir):
        raise UserError("--compile_only: nothing compiled is kept here; --config.compilation_cache=shared keeps it")
    began = time.monotonic()
    with jax.set_mesh(mesh):
        memory = program.compiled_step(program.state).memory_analysis()
    needed = (memory.argument_size_in_bytes + memory.temp_size_in_bytes) / 2**30  # results reuse the state's memory
    say(f"compiled in {time.monotonic() - began:.1f} s into {place}: {needed:.2f} GiB per device")


def session(run: Run) -> str:
    """Trains from the newest whole checkpoint until the run is complete, preempted, or rolled back; returns which."""
    config, s = run.config, Session(run)
    if s.first_step >= config.steps:
        say(f"training is complete: {run.workdir} holds step {s.first_step} of {config.steps}")
        return "complete"
    size, trained = (sum(x.size for x in jax.tree.leaves(tree)) for tree in (s.state.weights, s.state.params))
    what = f"{size:,} parameters" + (f", {trained:,} of them trained," if trained < size else "")
    for change in run.changed:
        say(f"changed: {change}")
    say(f"{what} on {sharding.describe(run.mesh)}; step {s.first_step} of {config.steps}")
    with s:
        s.open()
        state, batches = s.state, s.batches()
        for step in range(s.first_step + 1, config.steps + 1):
            s.profile.before(step)
            with s.clock.fetching():
                batch = next(batches)
            state, metrics = run.compiled_step(state, batch)
            s.clock.dispatched(metrics)
            s.watchdog.alive(step)
            s.profile.after(step, metrics)
            s.metrics.flush()
            now = Now(step, state, metrics, step == config.steps, run.preemption.reached())
            try:
                s.after(now)
            except RollBack as failure:
                run.failure = failure
            if now.is_last or run.failure:
                break

        outcome = "rolled back" if run.failure else "complete" if now.is_end else "preempted"
        with s.pause("end", step=step, reason=outcome):
            s.checkpoints.wait()
    if run.failure:
        say(f"{run.failure}: rolling back to the newest checkpoint, and past the rows after it")
        return "preempted" if now.is_preempted else outcome
    if outcome == "complete":
        say(f"trained to step {config.steps}; the run is in {run.workdir}")
        if skipped := int(now.metrics["in_a_row"]):
            say(f"its weights are those of step {step - skipped}: the updates of all later steps were left out")
    else:
        say(f"interrupted: saved step {step} of {config.steps}; start it again to resume")
    say(events.describe(events.account(events.read_events(run.workdir))))
    return outcome


def say(line: str) -> None:
    """Prints on one host only."""
    if jax.process_index() == 0:
        command.say(line)


def main() -> None:
    if _CONFIG.value is None or _WORKDIR.value is None:
        raise UserError("--config=configs/NAME.py and --workdir=DIR are needed; --help explains")
    if other := [key for key in _ALLOW.value if key.split(".")[0] not in CHANGEABLE]:
        raise UserError(f"--allow_change={other[0]}: cannot change in a run; these can: {', '.join(CHANGEABLE)}")
    host.keep_freed_memory()
    with processes.together(_PEERS.value, _LOST.value):
        if _PROFILE.value:
            try:
                processes.check_port(f"--profiler_port={_PROFILE.value}", _PROFILE.value)
                jax.profiler.start_server(_PROFILE.value)
            except UserError as error:  # several processes of a machine may have been given the same
                command.say(f"{error}; this process trains without")
        is_done = train(_CONFIG.value, epath.Path(_WORKDIR.value), _ALLOW.value, _COMPILE.value)
    if not is_done:
        sys.exit(EXIT_CODE)


if __name__ == "__main__":
    command.run(main, help_texts, keys)
