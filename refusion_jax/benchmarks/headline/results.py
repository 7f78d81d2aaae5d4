"""The records of a comparison: what results.json holds, and what DIR/measurements.jsonl keeps so that it can resume.

Each line of measurements.jsonl holds the key and the record of one training run or measurement. DIR/comparison.json
describes the comparison that they belong to.
"""

import dataclasses
import importlib.metadata
import json
import os
import platform
from pathlib import Path
from typing import Any, NotRequired, TypedDict

import jax

from refusion_jax.benchmarks.headline.experiment import Experiment
from refusion_jax.cli.errors import UserError
from refusion_jax.config import flatten
from refusion_jax.decoding.journal import Journal
from refusion_jax.distributed.host import available_cores
from refusion_jax.distributed.json_files import read_json
from refusion_jax.distributed.storage import write_file

_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")


class Trained(TypedDict):
    """A training run."""

    system: str
    start: str  # the system whose weights it starts from; random ones if empty
    seed: int
    name: str
    command: str
    learning_rate: float
    seconds: float
    tokens: int
    losses: list[dict[str, Any]]  # step, tokens, loss and, if measured, eval_loss, eval_bits_per_byte, ...
    commit: str


class Scored(TypedDict):
    """A decoder at one operating point, on one model."""

    system: str
    start: str
    seed: int
    decoder: str
    settings: str
    accuracy: float  # share of answers that match exactly
    families: dict[str, float]  # accuracy of each family of problems
    tokens: int  # of all answers, through the EOS
    forwards: int  # of all answers
    tokens_per_forward: float
    tokens_per_forward_without_eos: float
    tokens_per_forward_with_prefill: float  # the prefill counts as one more forward pass of each answer
    prompt_tokens: float  # mean
    width: int  # number of places of a row that a forward pass computes
    has_cache: bool
    commit: str
    tokens_per_second: NotRequired[dict[str, float]]  # by batch size; only if time was measured, like the following
    same_text: NotRequired[float]  # share of answers that are the same at both batch sizes
    load: NotRequired[float]  # the machine's load average, which shows whether other work ran
    where: NotRequired[str]  # the machine


class Timed(TypedDict):
    """The speeds of a decoder at one operating point in interleaved repeats, on the model of the first seed."""

    system: str
    start: str
    decoder: str
    settings: str
    tokens_per_second: dict[str, list[float]]  # by batch size; one per repeat
    load: float
    commit: str
    where: str
    shape: NotRequired[str]  # of the speed proxy, and its number of parameters
    parameters: NotRequired[int]


def curve_of(record: Scored | Timed) -> tuple[str, str, str]:
    """(system, decoder, start) of a record."""
    return record["system"], record["decoder"], record["start"]


def name_of(system: str, decoder: str, start: str) -> str:
    """The name of a curve: the system, what it was adapted from, and the decoder if its name differs."""
    return system + f" from {start}" * bool(start) + f" by {decoder}" * (system != decoder)


@dataclasses.dataclass
class Results:
    """Everything that a comparison measures."""

    about: dict[str, Any]  # the machine, versions, command and config, from `about`
    sweep: list[Trained] = dataclasses.field(default_factory=list)  # short runs that try learning rates
    runs: list[Trained] = dataclasses.field(default_factory=list)
    auxiliaries: list[Trained] = dataclasses.field(default_factory=list)  # runs of further models that decoders need
    points: list[Scored] = dataclasses.field(default_factory=list)  # on validation problems, which choose the settings
    tests: list[Scored] = dataclasses.field(default_factory=list)  # the chosen settings on test problems
    timings: list[Timed] = dataclasses.field(default_factory=list)
    proxy_timings: list[Timed] = dataclasses.field(default_factory=list)
    tpu_estimates: list[dict[str, Any]] = dataclasses.field(default_factory=list)

    @property
    def commits(self) -> list[str]:
        """Commits of the code that produced the figures."""
        kinds = self.sweep, self.runs, self.auxiliaries, self.points, self.tests, self.timings, self.proxy_timings
        return sorted({record["commit"] for kind in kinds for record in kind})

    @property
    def machines(self) -> list[str]:
        """Machines on which speeds were measured, which are comparable only on a single one."""
        return sorted({r["where"] for kind in (self.points, self.timings, self.proxy_timings) for r in kind})

    def as_json(self) -> str:
        content = dataclasses.asdict(self)
        found = content.pop("about") | {"commits": self.commits, "where": self.machines} | content
        return json.dumps(found, indent=1) + "\n"


def about(experiment: Experiment) -> dict[str, Any]:
    """The machine, versions, command and config of a comparison."""
    budget = experiment.budget
    return {
        "budget": experiment.name,
        "command": experiment.command,
        "machine": machine(),
        "versions": {"python": platform.python_version()}
        | {name: importlib.metadata.version(name) for name in _PACKAGES},
        "config": json.loads(experiment.config.to_json()),
        "seeds": dict(experiment.systems),
        **{name: getattr(budget, name) for name in ("problems", "timed", "new_tokens", "repeats")},
    }


def machine() -> dict[str, Any]:
    """The processor, its cores, the memory and the device that JAX computes on."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "processor": names[0] if names else platform.processor(),
        "cores": available_cores(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "device": jax.devices()[0].device_kind,
        "devices": jax.device_count(),
    }


def where() -> str:
    """The machine and the version of JAX in a few words: speeds are comparable only if these are the same."""
    m = machine()
    return f"{m['cores']} cores of {m['processor']}, {m['devices']} x {m['device']}, jax {jax.__version__}"


def open_store(directory: Path, call: dict[str, Any]) -> Journal:
    """The finished records by key, in a new directory or one with records of the same call; else UserError."""
    about = directory / "comparison.json"
    if about.exists():
        there, here = flatten(read_json(about)), flatten(call)  # keys added or removed since have no effect
        other = sorted({key.split(".")[0] for key in there.keys() & here.keys() if there[key] != here[key]})
        if other:
            raise UserError(
                f"--output={directory} holds another comparison (differs in {', '.join(other)}): name another directory"
            )
    else:
        if directory.exists() and any(directory.iterdir()):
            raise UserError(f"--output={directory} is not empty, and holds no comparison; name another directory")
        write_file(about, json.dumps(call, indent=2) + "\n")
    return Journal(directory / "measurements.jsonl")
