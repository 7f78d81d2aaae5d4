"""Faults that `drill` injects into a training run, on real processes and real files.

Each fault waits for its moment, strikes, and returns a line that describes it; it raises UnexpectedError if the run
misbehaves. Whether the outcome is right is judged at the end, by comparison with the fault-free run.
"""

import contextlib
import functools
import os
import random
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from refusion_jax.checkpoints import checksums
from refusion_jax.checkpoints.run_directory import TEMPORARY, saved_steps
from refusion_jax.distributed.append_log import parse_log
from refusion_jax.distributed.preemption import EXIT_CODE
from refusion_jax.training.metrics import FILE as METRICS

_POLL_SECONDS = 0.005
_TAIL_BYTES = 4096  # read from the end of a log: enough for some records
_PATIENCE_SECONDS = 600.0


class UnexpectedError(Exception):
    """The run did not do what it promises."""


class RunUnderTest:
    """A run under test: its directory, the flags of its command, and its processes while it runs."""

    def __init__(self, flags: list[str], workdir: Path, hosts: int):
        self.flags, self.workdir, self.hosts = flags, workdir, hosts
        self.checkpoints = workdir / "checkpoints"
        self.processes: list[subprocess.Popen] = []
        self._log = workdir.with_name(f"{workdir.name}.log")
        self._heard_from = 0

    def start(self) -> None:
        self._heard_from = self._log.stat().st_size if self._log.exists() else 0
        environments = [dict(os.environ)]
        if self.hosts > 1:
            with socket.create_server(("", 0)) as server:
                address = f"localhost:{server.getsockname()[1]}"
            run = {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": str(self.hosts)}
            environments = [os.environ | run | {"JAX_PROCESS_ID": str(index)} for index in range(self.hosts)]
        self.processes = [self._launch(env) for env in environments]

    def _launch(self, env: dict[str, str]) -> subprocess.Popen:
        line = [sys.executable, "-m", "refusion_jax.train", *self.flags, f"--workdir={self.workdir}"]
        process = subprocess.Popen(
            line, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        threading.Thread(target=self._listen, args=(process,), daemon=True).start()
        return process

    def _listen(self, process: subprocess.Popen) -> None:
        with self._log.open("ab", buffering=0) as log, process.stdout:
            while said := process.stdout.read1():
                log.write(said)

    def heard(self) -> str:
        """The output of its processes since the last start."""
        return self._log.read_bytes()[self._heard_from :].decode(errors="replace")

    def check(self, is_right: bool, what: str) -> None:
        """Raises UnexpectedError, with the end of what its processes have printed, unless `is_right`."""
        if not is_right:
            raise UnexpectedError(f"{what}:\n{self.heard()[-4000:]}")

    def step(self) -> int:
        """The step it has reached, from the end of its metrics; polled hundreds of times per second."""
        with contextlib.suppress(FileNotFoundError), (self.workdir / METRICS).open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            return max((record["step"] for record in parse_log(file.read())), default=0)
        return 0

    def is_running(self) -> bool:
        return bool(self.processes) and all(process.poll() is None for process in self.processes)

    def pids(self) -> list[int]:
        """Its processes and their children: with several hosts each trains in a child, see `distributed.processes`."""
        own = [process.pid for process in self.processes]
        children = (Path(f"/proc/{pid}/task/{pid}/children").read_text() for pid in own)
        return own + [int(pid) for pid in " ".join(children).split()]

    def until(self, happened: Callable[[], Any]) -> bool:
        """Waits until `happened()`; False if the run ends first."""
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while not happened():
            if not self.is_running():
                return bool(happened())
            self.check(time.monotonic() < deadline, "nothing happens any more")
            time.sleep(_POLL_SECONDS)
        return True

    def wait(self) -> set[int]:
        codes = {process.wait(_PATIENCE_SECONDS) for process in self.processes}
        self.processes = []
        return codes

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
        self.wait()

    def whole(self) -> list[int]:
        """Steps of its checkpoints whose checksums match."""
        return [step for step in saved_steps(self.workdir) if not checksums.find_damage(self.checkpoints / str(step))]


def kill(run: RunUnderTest, chance: random.Random) -> str:
    """SIGKILL at a random moment."""
    time.sleep(chance.random() * 0.05)
    run.kill()
    return "killed"


def term(run: RunUnderTest, chance: random.Random) -> str:
    """A signal that asks to save and go: TERM, INT, HUP or QUIT."""
    number = chance.choice([signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT])
    run.processes[chance.randrange(run.hosts)].send_signal(number)
    codes = run.wait()
    run.check(codes <= {EXIT_CODE, 0}, f"{number.name}: exit codes {codes}")
    return number.name


def kill_in_save(run: RunUnderTest, chance: random.Random) -> str:
    """SIGKILL while a checkpoint is being written; a run that had a whole checkpoint must still have one."""
    whole = run.whole()
    damaged = set(saved_steps(run.workdir)) - set(whole)  # by earlier faults; not replaced yet
    if run.until(lambda: list(run.checkpoints.glob(f"*{TEMPORARY}*"))):
        time.sleep(chance.random() * 0.03)
    run.kill()
    torn = set(saved_steps(run.workdir)) - set(run.whole()) - damaged
    run.check(not torn, f"torn checkpoints have the names of their steps: {sorted(torn)}")
    run.check(not whole or bool(run.whole()), "no whole checkpoint is left")
    return f"newest whole checkpoint: {max(run.whole(), default='none yet')}"


def kill_host(run: RunUnderTest, chance: random.Random) -> str:
    """SIGKILL of one process of several; the others must say so and leave."""
    victim = chance.randrange(run.hosts)
    run.processes[victim].kill()
    codes = run.wait()
    run.check("process of this run was lost" in run.heard(), f"process {victim} was killed, nobody says so: {codes}")
    return f"process {victim}"


def full_disk(run: RunUnderTest, chance: random.Random) -> str:
    """Files cannot grow for a while (by a limit on the process); the run continues, or stops with one line."""
    pids, said = run.pids(), "could not be written"
    before = run.heard().count(said)  # from earlier faults of this kind
    for pid in pids:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (1, resource.RLIM_INFINITY))
    run.until(lambda: run.heard().count(said) > before)
    time.sleep(chance.random() * 0.2)
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    run.check("Traceback" not in run.heard(), "a traceback")
    if run.heard().count(said) == before:
        return "the run ended before a save"
    return "the run went on" if run.is_running() else "the run stopped"


def _damage(strike: Callable[[Path, random.Random], str], run: RunUnderTest, chance: random.Random) -> str:
    """Stops the run, damages a file of its newest checkpoint, and checks that the next start notices."""
    run.until(lambda: len(saved_steps(run.workdir)) > 1)
    run.kill()
    if not (steps := saved_steps(run.workdir)):
        return "nothing was saved yet"
    newest = run.checkpoints / str(steps[-1])
    files = [newest / name for name in checksums.listed(newest)] + list(newest.glob(f"{checksums.PREFIX}*"))
    there = (path for path in files if path.is_file() and path.stat().st_size)  # an earlier fault may have deleted one
    path = chance.choice(sorted(there))
    content = path.read_bytes()
    what = f"{strike(path, chance)} {path.relative_to(run.checkpoints)}"
    run.start()
    run.until(lambda: f"checkpoint {newest.name} cannot be read" in run.heard())
    said = next((line for line in run.heard().splitlines() if f"checkpoint {newest.name} cannot be read" in line), "")
    run.check("checksum" in said, f"{what}: not noticed")
    run.until(lambda: "; step " in run.heard())
    if not run.is_running() and "none of the checkpoints" in run.heard():  # it was the only one: bring it back
        run.wait()
        path.write_bytes(content)
        return f"{what}: noticed; no other was there"
    return f"{what}: noticed"


def _flip(path: Path, chance: random.Random) -> str:
    content = bytearray(path.read_bytes())
    bit = chance.randrange(8 * len(content))
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)
    return f"bit {bit} of"


def _truncate(path: Path, chance: random.Random) -> str:
    length = chance.randrange(path.stat().st_size)
    os.truncate(path, length)
    return f"all but {length} bytes of"


def _delete(path: Path, chance: random.Random) -> str:
    if path.name.startswith(checksums.PREFIX):  # without them it would count as one of an older version
        os.truncate(path, 0)
        return "all of"
    path.unlink()
    return "deleted"


FAULTS = {
    "kill": kill,
    "term": term,
    "kill_in_save": kill_in_save,
    "kill_host": kill_host,
    "full_disk": full_disk,
    "bit_flip": functools.partial(_damage, _flip),
    "truncation": functools.partial(_damage, _truncate),
    "deletion": functools.partial(_damage, _delete),
}
