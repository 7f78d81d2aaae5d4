"""Trains a model; run the same command again, and it resumes.

  python -m refusion_jax.train --config=configs/quickstart.py --workdir=runs/first
  python -m refusion_jax.train --config=configs/small.py --workdir=runs/mine --config.data.path='my/*.jsonl'

DIR (the --workdir) will hold checkpoints/STEP/ (Orbax), metrics.jsonl, tensorboard/, config.json and
tokenizer.model. Any config key can be set by a flag; all of them are listed below.
"""

import contextlib
from pathlib import Path

import jax
import ml_collections
from absl import flags
from ml_collections import config_flags

from refusion_jax import cli, sharding
from refusion_jax.checkpoints import Checkpoints, saved_steps
from refusion_jax.config import check, check_mesh, default_config
from refusion_jax.data.dataset import load_dataset
from refusion_jax.data.loader import global_batches
from refusion_jax.errors import UserError
from refusion_jax.flops import train_flops_per_token
from refusion_jax.metrics import MetricsWriter, check_finite
from refusion_jax.pretrained import check_fits, load_params
from refusion_jax.program import train_program
from refusion_jax.train_step import init_state, wide_to_int
from refusion_jax.workdir import check_same_run, claim, model_config

_CONFIG = config_flags.DEFINE_config_file(
    "config", None, "Config file, such as configs/quickstart.py", lock_config=True
)
_WORKDIR = flags.DEFINE_string("workdir", None, "Directory of the run: made, or resumed if it holds this very run")


def train(config: ml_collections.ConfigDict, workdir: Path) -> None:
    """Trains from where the run's directory stands to the last step.

    Raises:
      UserError: where config, data or directory cannot be used; nothing has been written then.
    """
    # 1. What is asked for, and is any of it left to do?
    check(config)
    check_same_run(workdir, config)
    if (steps := saved_steps(workdir)) and steps[-1] >= config.steps:
        say(f"training is complete: {workdir} holds step {steps[-1]} of {config.steps}")
        return
    mesh = sharding.make_mesh(config.mesh)
    check_mesh(config, mesh)

    # 2. The data.
    tokenizer, rows = load_dataset(config, workdir)
    say(
        f"{rows.documents:,} documents in {len(rows):,} rows of {config.row_length} tokens, {rows.fill:.1%} full; "
        f"vocabulary of {tokenizer.size}"
    )
    data_position = {"rows": len(rows), "fingerprint": rows.fingerprint()}

    # 3. The program: the jitted step, and where every array of the state lives.
    shape = model_config(config, tokenizer)
    program = train_program(config, shape, mesh)
    target, shardings = program.target, program.shardings

    # 4. The weights to start from, if not random ones.
    initial_params = None
    if config.init_from and not steps:
        check_fits(Path(config.init_from), shape)
        initial_params = load_params(Path(config.init_from), target.params)

    # 5. The state: the newest checkpoint's, or a fresh one. From here on the directory is written to.
    with contextlib.ExitStack() as stack:
        stack.enter_context(jax.set_mesh(mesh))
        checkpoints = stack.enter_context(Checkpoints(workdir, config.checkpoint.keep))
        restored = checkpoints.restore(target)
        if restored is None and initial_params is None:
            state = jax.jit(program.fresh_state, out_shardings=shardings)()
        elif restored is None:
            start = jax.jit(
                lambda params: init_state(params, program.optimizer), donate_argnums=0, out_shardings=shardings
            )
            state = start(initial_params)
        else:
            state, position = restored
            if {key: position[key] for key in data_position} != data_position:
                raise UserError(
                    f"--config.data.path={config.data.path} no longer holds the rows this run was trained on; "
                    f"bring the data back, or start a new --workdir"
                )
        claim(workdir, config, shape, tokenizer)
        first_step = int(state.step)
        parameters = sum(x.size for x in jax.tree.leaves(state.params))
        say(f"{parameters:,} parameters on {sharding.describe(mesh)}; step {first_step} of {config.steps}")

        # 6. Train. Metrics of a step are fetched after the next one is dispatched, so the device never waits.
        flops = config.batch_size * config.row_length * train_flops_per_token(shape, config.row_length)
        metrics = MetricsWriter(workdir, config.steps, first_step, wide_to_int(state.tokens), flops, mesh.devices)
        stack.callback(metrics.close)
        batches = global_batches(
            rows,
            sharding.sharding(mesh, "batch", "length"),
            batch_size=config.batch_size,
            seed=config.seed,
            first_step=first_step,
            last_step=config.steps,
        )
        pending = None
        for step, batch in enumerate(batches, first_step + 1):
            state, step_metrics = program.step(state, batch)
            if pending:
                metrics.write(*pending)
                pending = None
            if step % config.log_every == 0 or step == config.steps:
                pending = step, step_metrics
            if step % config.checkpoint.every == 0 or step == config.steps:
                check_finite(step, step_metrics)  # saving waits for the step anyway
                checkpoints.save(step, state, data_position | {"next_row": step * config.batch_size})
        metrics.write(*pending)
    say(f"trained to step {config.steps}; the run is in {workdir}")


def say(line: str) -> None:
    """Prints on one host only."""
    if jax.process_index() == 0:
        print(line, flush=True)


def main() -> None:
    if _CONFIG.value is None or _WORKDIR.value is None:
        raise UserError("--config=configs/NAME.py and --workdir=DIR are needed; --help explains")
    train(_CONFIG.value, Path(_WORKDIR.value))


if __name__ == "__main__":
    keys = cli.declared_settings(default_config)
    cli.run(main, {f"config.{name}": f"{meaning} ({default})" for name, (default, meaning) in keys.items()})
