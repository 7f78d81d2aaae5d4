"""The records of a comparison: what results.json holds, and what DIR/measurements.jsonl keeps so that it can resume.

Each line of measurements.jsonl holds the key and the record of one training run or measurement. DIR/comparison.json
describes the comparison that they belong to.
"""

import dataclasses
import importlib.metadata
import itertools
import json
import math
import os
import platform
from pathlib import Path
from typing import Any, TypeVar

import jax

from refusion_jax.benchmarks.headline.experiment import Experiment
from refusion_jax.cli.errors import UserError
from refusion_jax.config import flatten
from refusion_jax.decoding.journal import Journal
from refusion_jax.distributed.host import available_cores
from refusion_jax.distributed.json_files import read_json, to_type
from refusion_jax.distributed.storage import write_file

_Record = TypeVar("_Record")
_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")


@dataclasses.dataclass(frozen=True)
class Logged:
    """A logged step of a training run; None is what was not measured, or was not finite."""

    step: int
    tokens: int  # so far
    loss: float | None = None
    eval_loss: float | None = None
    eval_bits_per_byte: float | None = None
    eval_bits_per_byte_is_bound: bool | None = None


@dataclasses.dataclass(frozen=True)
class Trained:
    """A training run."""

    system: str
    start: str  # the system whose weights it starts from; random ones if empty
    seed: int
    name: str
    command: str
    learning_rate: float
    seconds: float
    tokens: int
    losses: list[Logged]
    commit: str

    @property
    def model(self) -> str:
        """The name of its curve by the decoder of the same name."""
        return _name(self.system, self.system, self.start)

    @property
    def final_loss(self) -> float:
        """The held-out loss at the end; infinite if it was not finite."""
        found = self.losses[-1].eval_loss
        return math.inf if found is None else found


@dataclasses.dataclass(frozen=True)
class CurveKey:
    """What identifies a curve: a decoder, and the models of one system; a base class."""

    system: str
    start: str  # the system whose weights the training started from; random ones if empty
    decoder: str

    @property
    def curve(self) -> tuple[str, str, str]:
        return self.system, self.start, self.decoder

    @property
    def name(self) -> str:
        """The system, what it was adapted from, and the decoder if its name differs."""
        return _name(self.system, self.decoder, self.start)


def _name(system: str, decoder: str, start: str) -> str:
    return system + f" from {start}" * bool(start) + f" by {decoder}" * (system != decoder)


@dataclasses.dataclass(frozen=True)
class Scored(CurveKey):
    """A decoder at one operating point, on one model."""

    seed: int
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
    tokens_per_second: dict[str, float] | None = None  # by batch size; only if time was measured, like the following
    same_text: float | None = None  # share of answers that are the same at both batch sizes
    load: float | None = None  # the machine's load average, which shows whether other work ran
    where: str | None = None  # the machine


@dataclasses.dataclass(frozen=True)
class Timed(CurveKey):
    """The speeds of a decoder at one operating point in interleaved repeats, on the model of the first seed."""

    seed: int
    settings: str
    tokens_per_second: dict[str, list[float]]  # by batch size; one per repeat
    load: float
    commit: str
    where: str
    shape: str | None = None  # of the speed proxy, and its number of parameters
    parameters: int | None = None


@dataclasses.dataclass(frozen=True)
class BatchEstimate:
    """The fastest setting of a decoder for one batch size on TPUs, by arithmetic."""

    batch_size: int
    settings: str
    tokens_per_second: float
    one_token_per_forward: float  # tokens per second of writing the same answers one token at a time
    speedup: float  # the first divided by the second
    tokens_per_forward: float


@dataclasses.dataclass(frozen=True)
class TpuEstimate(CurveKey):
    """The estimates for a decoder on one kind and number of chips."""

    model: str  # the size, a name of `bench decode --size`
    topology: str
    batches: list[BatchEstimate]

    @property
    def faster_up_to(self) -> int:
        """The largest batch size up to which it is faster than one token per forward; 0 if none."""
        faster = itertools.takewhile(lambda own: own.speedup > 1, self.batches)
        return max((own.batch_size for own in faster), default=0)


def to_json(record: Any) -> dict[str, Any]:
    """The fields of a record that have a value."""
    return dataclasses.asdict(record, dict_factory=lambda fields: {k: x for k, x in fields if x is not None})


def from_json(stored: dict[str, Any], kind: type[_Record]) -> _Record:
    """The record, without fields that its kind does not declare; UserError if one is missing or of another type."""
    return to_type(stored, kind, "a record of the comparison", "ignore")


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
    tpu_estimates: list[TpuEstimate] = dataclasses.field(default_factory=list)

    @property
    def commits(self) -> list[str]:
        """Commits of the code that produced the figures."""
        kinds = self.sweep, self.runs, self.auxiliaries, self.points, self.tests, self.timings, self.proxy_timings
        return sorted({record.commit for kind in kinds for record in kind})

    @property
    def machines(self) -> list[str]:
        """Machines on which speeds were measured, which are comparable only on a single one."""
        return sorted({r.where for kind in (self.points, self.timings, self.proxy_timings) for r in kind})

    def as_json(self) -> str:
        content = to_json(self)
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
