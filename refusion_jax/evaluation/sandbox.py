"""Runs generated programs in a sandbox.

A program runs in a separate process that can reach neither the network nor other processes nor files (`jail.py`). CPU
time, memory, processes and files are limited, the environment is empty, and the working directory is deleted when it
ends. If the kernel does not support this, programs are not run, unless the caller accepts the risk (`unsafe`): then
only the limits apply.
"""

import contextlib
import contextvars
import dataclasses
import functools
import itertools
import json
import os
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from refusion_jax.cli.errors import UserError
from refusion_jax.distributed.host import available_cores
from refusion_jax.evaluation import jail

_GRACE = 30  # seconds to set up the sandbox on a busy machine
_LOG = 2000  # characters of stderr that are kept
_USERS = range(20_000, 60_000)  # root runs programs as these users in turn: the kernel counts processes per user
_number = itertools.count(secrets.randbelow(len(_USERS)))
_ALLOWED = contextvars.ContextVar("allowed", default="")  # "sandboxed", "unsafe" or "rehearsal" within `allow`


@dataclasses.dataclass(frozen=True)
class Limits:
    """The resources that a program may use."""

    seconds: float = 10.0  # wall time of the program, and CPU time of each process
    memory: int = 1 << 30  # bytes of address space of each process
    processes: int = 8  # processes and threads at a time
    disk: int = 64 << 20  # bytes that it may write


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a program ended."""

    passed: bool  # it ran to its end
    reason: str  # "passed", or why it failed


def run(program: str, limits: Limits = Limits(), unsafe: bool = False) -> Outcome:
    """Runs a Python program with its checks in the sandbox or, if `unsafe`, without namespaces.

    Only the standard library is available. The program passes if it runs to its end; `jail.py` says how that is
    detected, and how it can still cheat checks in its own interpreter. UserError: the kernel does not support this.
    """
    python = Path(sys.executable).resolve()
    job = {
        "program": program,
        "python": str(python),
        "read_only": _read_only(python),
        "isolated": not unsafe,
        "user": _USERS[next(_number) % len(_USERS)],
        **dataclasses.asdict(limits),
    }
    with tempfile.TemporaryDirectory(prefix="sandbox-", ignore_cleanup_errors=True) as directory:
        try:
            process = subprocess.run(
                [str(python), "-I", "-S", "-B", jail.__file__],
                input=json.dumps(job),
                capture_output=True,
                text=True,
                env={},
                cwd=directory,
                timeout=limits.seconds + _GRACE,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return Outcome(False, f"its sandbox took longer than {limits.seconds + _GRACE:g} s")
        if process.returncode < 0:  # perhaps out of memory
            return Outcome(False, f"its sandbox was ended by signal {-process.returncode}")
        log = Path(directory, "stderr")
        tail = log.read_bytes()[-_LOG:].decode("utf-8", "replace").strip() if log.exists() else ""
    ended = json.loads(process.stdout) if process.returncode == 0 else {"refused": process.stderr[-_LOG:]}
    if ended.get("refused"):
        reason = " ".join(ended["refused"].split())
        if unsafe:
            raise UserError(
                f"--unsafe: generated code cannot be run here: {reason}; as root it is run by the user nobody"
            )
        raise UserError(
            f"--allow_code_execution: generated code cannot be shut in on this machine: {reason}; evaluate where the "
            f"kernel allows user namespaces, or give --unsafe to run it with limits only"
        )
    if ended["passed"]:
        return Outcome(True, "passed")
    if ended["code"] is None:
        return Outcome(False, f"took longer than {limits.seconds:g} s")
    last = tail.splitlines()[-1][-200:] if tail else "it ended before its last line"
    return Outcome(False, f"exit code {ended['code']}: {last}")


@contextlib.contextmanager
def allow(unsafe: bool = False, rehearsal: bool = False) -> Iterator[None]:
    """A context in which tasks may run generated code; in a rehearsal programs are not run, and fail.

    Raises UserError on entry if the kernel does not support the sandbox.
    """
    run("pass", unsafe=unsafe)
    token = _ALLOWED.set("rehearsal" if rehearsal else "unsafe" if unsafe else "sandboxed")
    try:
        yield
    finally:
        _ALLOWED.reset(token)


def run_allowed(programs: Sequence[str]) -> list[Outcome]:
    """`run` for each program, as many at a time as there are CPUs, within `allow`; UserError outside of it."""
    if not (how := _ALLOWED.get()):
        raise UserError("generated code is run only with --allow_code_execution")
    if how == "rehearsal":
        return [Outcome(False, "not run")] * len(programs)
    with ThreadPoolExecutor(available_cores()) as pool:
        return list(pool.map(functools.partial(run, unsafe=how == "unsafe"), programs))


def _read_only(python: Path) -> list[str]:
    """Directories and files that a bare Python needs. Links such as /lib are recreated by `jail.build_root`."""
    wanted = ["/usr", "/bin", "/lib", "/lib64", "/etc/ld.so.cache", "/dev/null", "/dev/urandom"]
    there = [path for path in wanted if os.path.exists(path) and not os.path.islink(path)]
    own = sorted({str(Path(prefix).resolve()) for prefix in (sys.base_prefix, sys.base_exec_prefix, python.parent)})
    return there + [path for path in own if not any(Path(path).is_relative_to(other) for other in there)]
