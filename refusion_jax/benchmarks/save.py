"""Measures the time and memory of saving a checkpoint, and whether flipped bits are noticed.

  python -m refusion_jax.bench save
  python -m refusion_jax.bench save --steps=50 --windows=80 --flips=100 --hidden_size=128

Time: windows of 10 training steps take turns without a save, with an asynchronous save after the first step, and with a
save that has checksums; a window ends when its save is on disk. The cost is what a save adds to a window, relative to
the time of --steps steps, as the median over pairs of neighbouring windows, with its standard error; by the clock, and
in CPU time of all threads. Windows are short because the speed of a machine drifts by more than a save costs. The CPU
time of saves is also measured while nothing is trained.
Memory: the most that a save holds on the host, relative to the size of the state, for a model of --memory_hidden_size.
Flipped bits: after each of --flips random bit flips, in any file of the newest of two checkpoints, that checkpoint must
be skipped because of a checksum.
"""

import ctypes
import json
import pathlib
import random
import tempfile
import time

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
from absl import flags, logging
from etils import epath
from rich.console import Console
from rich.table import Table

from refusion_jax.batch.rows import Rows
from refusion_jax.checkpoints.manager import Checkpoints
from refusion_jax.cli.errors import Failure
from refusion_jax.config import default_config
from refusion_jax.config.model import model_config
from refusion_jax.distributed import sharding
from refusion_jax.training.program import Program, train_program
from refusion_jax.training.train_step import TrainState

_WINDOW = 10  # steps
_SAVES_ALONE = 15
_DATA = {"next_row": 0, "rows": 1, "fingerprint": ""}


def define_flags(own: flags.FlagValues) -> None:
    """The flags of this benchmark."""
    flags.DEFINE_integer(
        "steps", 50, "Steps between two saves; the cost is a share of theirs", 1, 10_000, flag_values=own
    )
    flags.DEFINE_integer("windows", 40, "Windows of 10 steps of each kind, in turns", 2, 1000, flag_values=own)
    flags.DEFINE_integer("flips", 100, "Bits that flip, one at a time", 0, 100_000, flag_values=own)
    for name, width, what in (("hidden_size", 128, "timed"), ("memory_hidden_size", 1024, "saved to measure memory")):
        help = f"Width of the model that is {what}; 4 layers of heads of 32, a vocabulary of 512"
        flags.DEFINE_integer(name, width, help, 32, 2**14, flag_values=own)


def main(own: flags.FlagValues) -> None:
    """Prints one JSON object a measurement, then a table.

    Raises:
      Failure: where a flipped bit goes unnoticed.
    """
    table = Table("what", "figures")
    for measured in (
        cost(own.hidden_size, own.steps, own.windows),
        memory(own.memory_hidden_size),
        flipped(own.hidden_size, own.flips),
    ):
        print(json.dumps({"benchmark": "save"} | measured), flush=True)
        shown = (f"{name} {value:,.4g}" for name, value in measured.items() if name != "what")
        table.add_row(measured["what"], "\n".join(shown))
    Console().print(table)
    if measured["noticed"] < own.flips:
        raise Failure(f"{own.flips - measured['noticed']} of {own.flips} flipped bits were not noticed")


def _config(width: int) -> ml_collections.ConfigDict:
    config = default_config()
    config.batch_size, config.row_length = 32, 64
    config.mesh.data, config.mesh.fsdp = -1, 1
    model = {"hidden_size": width, "intermediate_size": 3 * width, "head_dim": 32, "vocab_size": 512}
    config.model.update(model | {"num_attention_heads": width // 32, "num_key_value_heads": width // 32})
    return config


def _fresh(width: int, devices: int | None = None) -> tuple[Program, jax.sharding.Mesh, TrainState]:
    config = _config(width)
    mesh = sharding.make_mesh(config.mesh, jax.devices()[:devices])
    program = train_program(config, model_config(config), mesh)
    with jax.set_mesh(mesh):
        state = jax.jit(program.fresh_state, out_shardings=program.shardings)()
    return program, mesh, jax.block_until_ready(state)


def _bytes(state: TrainState) -> int:
    return sum(x.nbytes for x in jax.tree.leaves(state))


def cost(width: int, steps: int, windows: int) -> dict[str, float | str]:
    """Time that a save adds, relative to that of `steps` steps."""
    program, mesh, state = _fresh(width)
    ones = jnp.ones((32, 64), jnp.int32)
    rows = jax.device_put(Rows(ones, ones, ones.astype(bool)), sharding.sharding(mesh, "batch", "length"))
    done = 0

    def window(checkpoints: Checkpoints | None) -> list[float]:
        """Seconds by the clock, and of all threads on the CPU."""
        nonlocal state, done
        clock, cpu = time.monotonic(), time.process_time()
        with jax.set_mesh(mesh):
            for index in range(_WINDOW):
                state, metrics = program.step(state, rows)
                if checkpoints is not None and index == 0:
                    checkpoints.save(done, state, _DATA)
                metrics["loss"].block_until_ready()
        if checkpoints is not None:
            checkpoints.wait()
        done += _WINDOW
        return [time.monotonic() - clock, time.process_time() - cpu]

    with tempfile.TemporaryDirectory() as directory:
        kinds: dict[str, Checkpoints | None] = {"none": None} | {
            name: Checkpoints(epath.Path(directory) / name, keep=2, verify=name == "with_checksums")
            for name in ("without_checksums", "with_checksums")
        }
        for checkpoints in kinds.values():  # compiles
            window(checkpoints)
        turns = [{name: window(checkpoints) for name, checkpoints in kinds.items()} for _ in range(windows)]
        seconds = {name: np.array([turn[name] for turn in turns]) for name in kinds}  # of [windows, 2]
        alone = {name: _alone(own, done, state) for name, own in kinds.items() if own is not None}
    step, _ = np.median(seconds["none"], axis=0) / _WINDOW
    found: dict[str, float | str] = {
        "what": "time",
        "state_mib": _bytes(state) / 2**20,
        "steps": steps,
        "windows": windows,
        "step_ms": 1e3 * step,
    }
    for name, own in alone.items():
        more = (seconds[name] - seconds["none"]) / (steps * step)
        low, middle, high = np.percentile(more, [25, 50, 75], axis=0)
        error = 0.93 * (high - low) / np.sqrt(windows)  # of a median, where errors are normal
        found |= {f"cost_{name}": middle[0], f"cost_{name}_error": error[0]}
        found |= {f"cost_{name}_cpu": middle[1], f"cost_{name}_cpu_error": error[1]}
        found[f"alone_{name}_cpu_ms"] = 1e3 * own
    return {name: value if isinstance(value, str) else float(value) for name, value in found.items()}


def _alone(checkpoints: Checkpoints, done: int, state: TrainState) -> float:
    """CPU seconds of a save while nothing is trained: the median of some."""
    taken = []
    for number in range(_SAVES_ALONE):
        began = time.process_time()
        checkpoints.save(done + number, state, _DATA)
        checkpoints.wait()
        taken.append(time.process_time() - began)
    return float(np.median(taken))


def memory(width: int) -> dict[str, float | str]:
    """What a save holds at most of the host's memory: the copy off a device, and what is written from it.

    On a CPU the copy is the state itself, and is counted all the same.
    """
    _, _, state = _fresh(width, devices=1)
    noise = np.random.default_rng(0)  # or the moments of a fresh state would be pages of zeros
    state = jax.tree.map(
        lambda x: jax.device_put(noise.standard_normal(x.shape, np.float32), x.sharding) if x.ndim > 1 else x, state
    )
    with tempfile.TemporaryDirectory() as directory, Checkpoints(epath.Path(directory), keep=1) as checkpoints:
        ctypes.CDLL(None).malloc_trim(0)  # or the save would take what compiling has left
        before = _held("VmRSS")
        pathlib.Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        checkpoints.save(1, state, _DATA, last=True)
        written = _held("VmHWM") - before
    copied = 0 if jax.default_backend() != "cpu" else _bytes(state)
    return {"what": "memory", "state_mib": _bytes(state) / 2**20, "over_state": (written + copied) / _bytes(state)}


def _held(name: str) -> int:
    """A memory figure of this process in bytes, from /proc."""
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def flipped(width: int, flips: int) -> dict[str, float | str]:
    """How many of the flipped bits are noticed, so that the older checkpoint is restored."""
    program, mesh, state = _fresh(width)
    chance, noticed = random.Random(0), 0
    before = logging.get_verbosity()
    with tempfile.TemporaryDirectory() as directory, Checkpoints(epath.Path(directory), keep=2) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, _at_step(state, step), _DATA, last=True)
        newest = pathlib.Path(directory) / "checkpoints" / "2"
        files = [p for p in sorted(newest.rglob("*")) if p.is_file() and p.stat().st_size]
        logging.set_verbosity(logging.ERROR)  # each skipped checkpoint is logged as a warning
        try:
            for _ in range(flips):
                path = chance.choice(files)
                whole = path.read_bytes()
                bit, content = chance.randrange(8 * len(whole)), bytearray(whole)
                content[bit // 8] ^= 1 << bit % 8
                path.write_bytes(content)
                with jax.set_mesh(mesh):
                    found, _ = checkpoints.restore(program.target)
                noticed += int(found.step) == 1 and "checksum" in checkpoints.skipped.pop(2, "")
                path.write_bytes(whole)
        finally:
            logging.set_verbosity(before)
    return {"what": "flipped bits", "state_mib": _bytes(state) / 2**20, "flips": flips, "noticed": noticed}


def _at_step(state: TrainState, step: int) -> TrainState:
    """The state with its step number changed."""
    return TrainState(**vars(state) | {"step": jnp.full_like(state.step, step)})
