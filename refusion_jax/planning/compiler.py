"""Compiles programs for TPUs without having one, by the compiler in libtpu, in a child process.

A compilation has two phases. The first takes a few seconds and ends with the buffer assignment, from which the memory
of the program is known to the byte. The second generates machine code and takes most of the time. If only the memory is
wanted, the child is killed between the two, as soon as the files appear that the compiler dumps (`xla_dump_to`).
"""

import dataclasses
import functools
import importlib.metadata
import json
import math
import multiprocessing
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import jax
from jax.experimental import topologies

from refusion_jax.cli.errors import SettingError, UserError, needs
from refusion_jax.distributed.chips import find_chip
from refusion_jax.distributed.host import end_with_parent
from refusion_jax.distributed.storage import write_file
from refusion_jax.planning import hlo

_MOST_CHIPS, _MOST_FLAT = 1 << 14, 256  # per slice: more than any slice has; of v5e and v6e, the largest
_ASSIGNED = "after_optimizations-buffer-assignment.txt"
_OPTIMIZED = "after_optimizations.txt"
_LAST = "after_optimizations_after_buffer_assignment.txt"  # written once the other two are complete

_FORKS = multiprocessing.get_context("forkserver")  # imports once, in 2 s of processor time, for all children
_FORKS.set_forkserver_preload(["refusion_jax.planning.programs"])


@dataclasses.dataclass(frozen=True)
class Compiled:
    """What the compiler reports about a program, for one chip."""

    arguments: float  # bytes; donated arguments also hold results
    results: float  # bytes of results that do not reuse arguments
    temporaries: float  # bytes at the peak
    host: float  # bytes of host memory (offloaded activations)
    module: hlo.Module
    seconds: float  # of tracing and compiling
    cpu_seconds: float | None  # None: the child was stopped
    overrun: str  # the compiler's message if the program does not fit, or ""

    @property
    def peak(self) -> float:
        """Bytes of HBM that the program needs."""
        return self.arguments + self.results + self.temporaries


def libtpu_version() -> str:
    """Version of the compiler; UserError if it is not installed."""
    with needs("plan"):
        return importlib.metadata.version("libtpu")


def tpu_devices(topology: str, slices: int) -> list[jax.Device]:
    """The devices of a topology, without the hardware, after `prepare_environment`; UserError if it is unknown."""
    chip, shape = find_chip(topology), topology.split(":")[1]
    is_flat = chip.example.count("x") == 1
    sides, most = ("two", _MOST_FLAT) if is_flat else ("two or three", _MOST_CHIPS)
    # Sides of 0 chips and a billion slices crash libtpu; it compiles also for three sides of v6e, which no slice has.
    is_shape = re.fullmatch(rf"[1-9][0-9]{{0,4}}(x[1-9][0-9]{{0,4}}){{1,{1 if is_flat else 2}}}", shape)
    if not is_shape or math.prod(map(int, shape.split("x"))) > most:
        raise UserError(
            f"--topology={topology[:60]}: the shape must have {sides} sides and at most {most:,} chips; one that works "
            f"is {chip.example}"
        )
    options: dict = {"num_slices": slices} if slices > 1 else {}
    if topology.startswith("v4:"):
        options["chip_config_name"] = "megacore"  # the two cores of a chip as one device, as on a TPU VM
    try:
        return list(topologies.get_topology_desc(topology, "tpu", **options).devices)
    except jax.errors.JaxRuntimeError as error:
        reason = re.sub(r"\s+", " ", str(error).removeprefix("INVALID_ARGUMENT: "))[:200]
        raise UserError(f"--topology={topology}: {reason}; one that works is {chip.example}") from error


def prepare_environment() -> None:
    """Keeps JAX and libtpu from looking for a TPU, and from warning that there is none.

    Flags of the CPU compiler are removed from XLA_FLAGS, since libtpu aborts on flags that it does not know.
    """
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["TPU_SKIP_MDS_QUERY"] = "1"
    os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"
    known = [flag for flag in os.environ.get("XLA_FLAGS", "").split() if not flag.startswith("--xla_cpu_")]
    os.environ["XLA_FLAGS"] = " ".join(known)
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-4")  # any: libtpu only warns where there is none
    for name in ("TPU_STDERR_LOG_LEVEL", "TPU_MIN_LOG_LEVEL", "TF_CPP_MIN_LOG_LEVEL"):
        os.environ.setdefault(name, "3")


def compile_program(lower: Callable[..., jax.stages.Lowered], arguments: tuple, memory_only: bool) -> Compiled:
    """Compiles in a child process, which calls `lower`, a module-level function, with arguments that can be pickled.

    With `memory_only` it is stopped as soon as the memory is known. Raises UserError, with the message of the child, if
    the program cannot be built.
    """
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="plan-") as directory:
        path = Path(directory)
        child = _FORKS.Process(target=_child, args=(lower, arguments, directory), daemon=True)
        child.start()
        while child.is_alive():
            child.join(0.05)
            if memory_only and (name := _module_name(path)) and (path / f"{name}.{_LAST}").exists():
                child.kill()
                child.join()
        report = json.loads(_read(path / "report.json") or "{}")
        if "user_error" in report:
            raise UserError(report["user_error"])
        name = _module_name(path)
        if name is None or not (path / f"{name}.{_OPTIMIZED}").exists():
            log = _read(path / "stderr.txt").strip().splitlines() or ["no message"]
            raise UserError(f"the compiler failed: {report.get('error') or log[-1]}"[:600])
        sizes = assigned_bytes((path / f"{name}.{_ASSIGNED}").read_text())
        return Compiled(
            **sizes,
            module=hlo.parse((path / f"{name}.{_OPTIMIZED}").read_text()),
            seconds=report.get("seconds", time.monotonic() - began),
            cpu_seconds=report.get("cpu_seconds"),
            overrun=report.get("error", ""),
        )


def _read(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def _module_name(directory: Path) -> str | None:
    """The prefix of the names of our program's dumped files, or None before there are any."""
    modules = sorted(path.name for path in directory.glob(f"*.jit_*.{_OPTIMIZED}"))
    return modules[-1].removesuffix(f".{_OPTIMIZED}") if modules else None


def _child(lower: Callable[..., jax.stages.Lowered], arguments: tuple, directory: str) -> None:
    """Compiles, and writes the compiler's dump and report.json to the directory."""
    path = Path(directory)
    end_with_parent(functools.partial(shutil.rmtree, path, ignore_errors=True))  # compiling takes minutes
    stderr = os.open(path / "stderr.txt", os.O_WRONLY | os.O_CREAT)
    os.dup2(stderr, 2)
    prepare_environment()
    began, cpu_began, report = time.monotonic(), time.process_time(), {}
    try:
        lower(*arguments).compile(compiler_options={"xla_dump_to": directory, "xla_dump_hlo_as_text": True})
    except UserError as error:
        report["user_error"] = error.as_flag if isinstance(error, SettingError) else str(error)
    except jax.errors.JaxRuntimeError as error:
        report["error"] = re.sub(r"\s+", " ", str(error))
    report |= {"seconds": time.monotonic() - began, "cpu_seconds": time.process_time() - cpu_began}
    write_file(path / "report.json", json.dumps(report))


def assigned_bytes(text: str) -> dict[str, float]:
    """Sums the buffer assignment: bytes of arguments, results and temporaries in HBM, and of host memory.

    The text numbers memory spaces by colours: HBM is 0, which is not printed, and the host is 5. Raises ValueError if
    it lists no allocation.
    """
    sums = {"arguments": 0.0, "results": 0.0, "temporaries": 0.0, "host": 0.0}
    allocations = re.findall(r"^allocation \d+: size (\d+),(.*)$", text, re.MULTILINE)
    if not allocations:
        raise ValueError("the buffer assignment lists no allocation")
    for size, kind in allocations:
        if "color 5," in kind:
            sums["host"] += float(size)
        if "color" in kind or "thread-local" in kind:
            continue
        where = "arguments" if "parameter" in kind else "results" if "maybe-live-out" in kind else "temporaries"
        sums[where] += float(size)
    return sums
