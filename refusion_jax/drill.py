"""Trains under faults and proves that nothing is lost: final weights, optimizer and metrics equal the fault-free run's.

  python -m refusion_jax.drill --config=configs/quickstart.py --workdir=runs/drill --faults=12 --seed=0
  python -m refusion_jax.drill --config=configs/quickstart.py --workdir=runs/drill --faults=50 --kinds=kill_in_save

DIR/straight is the fault-free run, which later drills in DIR also compare with; DIR/faulty is the run under faults,
which begins again if it is complete before all faults have struck. Prints one JSON line per fault: its kind and step,
the step from which the run resumed, and the seconds until it had caught up. Exit code 0 only if every outcome is equal
to the bit, otherwise 1.

Choose a small model and a --config.checkpoint.every of a few steps: the times of faults are drawn by step. Every step
is logged, whatever the config says.
"""

import json
import random
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from absl import flags

from refusion_jax.checkpoints import lock
from refusion_jax.checkpoints.run_directory import saved_steps
from refusion_jax.cli import command, flag_values
from refusion_jax.cli.errors import UserError
from refusion_jax.config import check, help_texts
from refusion_jax.config.keys import keys
from refusion_jax.config.model import adopt_shape
from refusion_jax.config.run_config import check_same_run
from refusion_jax.distributed.json_files import read_json
from refusion_jax.training.events import read_events
from refusion_jax.training.faults import FAULTS, RunUnderTest, UnexpectedError
from refusion_jax.training.metrics import read_metrics

_CONFIG = command.define_config("Config file; flags of config keys are passed to `train`")
_WORKDIR = flags.DEFINE_string("workdir", None, "Directory for both runs; new, or that of an earlier drill")
_COUNT = flags.DEFINE_integer("faults", 12, "How many faults to inject", 1, 100_000)
_SEED = flags.DEFINE_integer("seed", 0, "Seed for the kinds and times of the faults")
_HOSTS = flags.DEFINE_integer("hosts", 1, "Processes of the run, on this machine", 1, 64)
_KINDS = flags.DEFINE_list("kinds", [], f"Only faults of these kinds: {', '.join(FAULTS)}")

_HOSTS_FILE = "hosts"  # number of hosts of the fault-free run: with another number sums are rounded differently
_OWN = {lock.FILE, _HOSTS_FILE, "straight", "straight.log", "faulty", "faulty.log"}  # files of a drill
# Config keys that do not affect what is compared.
_HARMLESS = ("checkpoint", "log_every", "tracker", "profile_steps", "compilation_cache")
_CLOCKS = {"seconds", "tokens_per_second", "mfu"}  # metrics that differ between any two runs


def final_state(workdir: Path, step: int) -> dict[str, Any]:
    """All arrays of a checkpoint, and its position in the data."""
    directory = workdir / "checkpoints" / str(step)
    found = {"data": read_json(directory / "data" / "metadata")}
    for item in ("params", "optimizer"):
        with ocp.PyTreeCheckpointer() as checkpointer:
            metadata = ocp.StandardCheckpointHandler().metadata(directory / item)
            as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), metadata)
            found[item] = checkpointer.restore(directory / item, restore_args=as_numpy)
    return found


def differences(straight: Path, faulty: Path, steps: int) -> list[str]:
    """The differences between two finished runs; empty if they are equal to the bit."""
    found = []
    a, b = (final_state(workdir, steps) for workdir in (straight, faulty))
    for (path, x), (_, y) in zip(jax.tree.leaves_with_path(a), jax.tree.leaves_with_path(b), strict=True):
        if np.asarray(x).tobytes() != np.asarray(y).tobytes():
            found.append(f"final {jax.tree_util.keystr(path)}")
    a, b = ([{k: v for k, v in r.items() if k not in _CLOCKS} for r in read_metrics(w)] for w in (straight, faulty))
    if len(a) != len(b):
        found.append(f"{len(b)} records of metrics instead of {len(a)}")
    for x, y in zip(a, b, strict=False):
        found += [f"{k} of step {x.get('step')}: {x.get(k)} is {y.get(k)}" for k in x | y if x.get(k) != y.get(k)]
    return found


def finish(run: RunUnderTest) -> None:
    """Starts a run until it is complete; UserError, with `train`'s message, if its flags are at fault."""
    for _ in range(20):
        if not run.is_running():
            run.start()
        codes = run.wait()
        if codes == {0}:
            return
        if 2 in codes:  # it would end like this again
            said = [line for line in run.heard().splitlines() if line.startswith("error: ")]
            raise UserError(said[-1].removeprefix("error: ") if said else "train ended with exit code 2")
    run.check(False, "the run is never complete")


def strike(run: RunUnderTest, kind: str, chance: random.Random, steps: int, every: int) -> dict[str, Any]:
    """Applies one fault, waits until the run has caught up, and returns a record about it."""
    if not run.is_running():
        run.start()
    moment = run.step() + chance.randint(1, max(2, 2 * every))
    run.until(lambda: run.step() >= min(moment, steps - 1))
    record = {"kind": kind, "step": run.step()}
    began, before, sessions_before = time.monotonic(), run.processes, len(sessions(run))
    try:
        record["what"] = FAULTS[kind](run, chance) if run.is_running() else "the run was complete before"
        record["ok"] = True
        if not run.is_running():
            run.wait()
            run.start()
        if run.processes is not before:
            run.until(lambda: len(sessions(run)) > sessions_before and run.step() >= record["step"])
            run.check(run.is_running() or run.wait() == {0}, "it does not go on")
    except UnexpectedError as error:
        record |= {"what": str(error), "ok": False}
        run.kill()
    return {**record, "resumed_from": (sessions(run) or [0])[-1], "seconds": round(time.monotonic() - began, 2)}


def sessions(run: RunUnderTest) -> list[int]:
    """The steps from which its sessions resumed, of those sessions that have compiled the step."""
    found, begun = [], 0
    for event in read_events(run.workdir):
        if event["event"] == "start":
            begun = event["step"]
        elif event["event"] == "compile":
            found.append(int(begun))
    return found


def main() -> None:
    if _CONFIG.value is None or _WORKDIR.value is None:
        raise UserError("--config=configs/NAME.py and --workdir=DIR are needed; --help explains")
    check(_CONFIG.value)
    if unknown := set(_KINDS.value) - FAULTS.keys():
        raise UserError(f"--kinds={min(unknown)}: unknown; known: {', '.join(FAULTS)}")
    if "kill_host" in _KINDS.value and _HOSTS.value == 1:
        raise UserError("--kinds=kill_host: needs --hosts of 2 or more, or no process is left to notice the loss")
    kinds = _KINDS.value or [kind for kind in FAULTS if kind != "kill_host" or _HOSTS.value > 1]
    flag_values.check_output("workdir", Path(_WORKDIR.value), directory=True)
    workdir = Path(_WORKDIR.value).absolute()  # Orbax needs absolute paths
    is_new = not workdir.exists()
    if not is_new and (other := {path.name for path in workdir.iterdir()} - _OWN):
        raise UserError(f"--workdir={workdir} holds {min(other)}, which no drill wrote; name another directory")
    with lock.file_lock(workdir):
        drill_in(workdir, kinds, is_new)


def drill_in(workdir: Path, kinds: list[str], is_new: bool) -> None:
    """Trains without faults if that is not done yet, then drills; a new directory is removed if flags are at fault.

    A fault-free run with other flags is refused: for example, adding steps to it does not give a longer run's steps.
    """
    told = [flags.FLAGS[name] for name in flags.FLAGS if name.startswith("config")]
    # absl writes a line for each element of a tuple, and none for an empty tuple.
    given = [part for flag in told if flag.present for part in (flag.serialize() or f"--{flag.name}=()").splitlines()]
    given.append("--config.log_every=1")
    straight = RunUnderTest(given, workdir / "straight", _HOSTS.value)
    faulty = RunUnderTest(given, workdir / "faulty", _HOSTS.value)
    hosts = workdir / _HOSTS_FILE
    if hosts.exists() and hosts.read_text() != str(_HOSTS.value):
        raise UserError(
            f"--hosts={_HOSTS.value}: {workdir} holds a drill with --hosts={hosts.read_text()}; name another directory"
        )
    if (straight.workdir / "config.json").exists():
        adopt_shape(_CONFIG.value, straight.workdir)
        check_same_run(straight.workdir, _CONFIG.value, resumable=_HARMLESS)
    lock.check_free(faulty.workdir)  # its run outlives a drill that is killed
    hosts.write_text(str(_HOSTS.value))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that its runs end with it
    try:
        try:
            finish(straight)
        except UserError:
            if is_new:
                shutil.rmtree(workdir)
            raise
        adopt_shape(_CONFIG.value, straight.workdir)  # also sets the steps computed from epochs
        drill(straight, faulty, kinds)
    finally:
        straight.kill()
        faulty.kill()


def drill(straight: RunUnderTest, faulty: RunUnderTest, kinds: list[str]) -> None:
    """Trains the faulty run, prints each fault and its outcome, and exits with 1 if anything was lost."""
    config = _CONFIG.value
    chance = random.Random(_SEED.value)
    order = [kind for _ in range(-(-_COUNT.value // len(kinds))) for kind in chance.sample(kinds, len(kinds))]
    shutil.rmtree(faulty.workdir, ignore_errors=True)
    all_ok, rounds = True, 0
    for number, kind in enumerate(order[: _COUNT.value], start=1):
        record = strike(faulty, kind, chance, config.steps, config.checkpoint.every)
        all_ok &= record["ok"]
        print(json.dumps({"fault": number, **record}), flush=True)
        is_last = number == _COUNT.value
        if is_last or config.steps in saved_steps(faulty.workdir):
            finish(faulty)
            found = differences(straight.workdir, faulty.workdir, config.steps)
            rounds += 1
            all_ok &= not found
            print(json.dumps({"run": rounds, "equal": not found, "differences": found[:5]}), flush=True)
            if not is_last:
                shutil.rmtree(faulty.workdir)
    if not all_ok:
        sys.exit(1)


if __name__ == "__main__":
    command.run(main, help_texts, keys)
