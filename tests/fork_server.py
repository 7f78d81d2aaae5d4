"""Runs commands of ours quickly: a process that has imported everything once forks for each of them.

To import JAX and ourselves takes 2 s of processor time, longer than most commands that a test starts.
The process reads one JSON object a line, {"command", "flags", "environment", "directory", "seconds"}, and answers
{"code", "out", "err", "cpu"}. A code below 0 is the signal that ended the command, -9 also where it took longer than it
may.
"""

import atexit
import gc
import importlib
import json
import os
import pkgutil
import resource
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path
from typing import NoReturn

import jax

import refusion_jax

ROOT = Path(__file__).parent.parent
COMMANDS = {module.name for module in pkgutil.iter_modules(refusion_jax.__path__) if not module.ispkg}


class ForkServer:
    """The process, started when it is first asked."""

    def __init__(self):
        self._process = None

    def ask(
        self,
        command: str,
        flags: list[str],
        environment: dict[str, str],
        seconds: float = 600,
        directory: Path = ROOT,
    ) -> dict:
        """Runs `python -m refusion_jax.COMMAND` to its end: {"code", "out", "err", "cpu" (seconds)}."""
        if self._process is None:
            line = [sys.executable, "-W", "ignore", __file__]
            # Whatever the first who asks has set for one command alone:
            env = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "JAX_ENABLE_X64": "0"}
            pipe = subprocess.PIPE
            self._process = subprocess.Popen(line, cwd=ROOT, env=env, stdin=pipe, stdout=pipe, text=True)
        asked = {"command": command, "flags": flags, "environment": environment, "seconds": seconds}
        asked["directory"] = str(directory)
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        """Ends the process."""
        if self._process:
            self._process.communicate()
            self._process = None


def main() -> None:
    """Serves until nobody asks any more."""
    gc.disable()  # what is imported stays
    for module in pkgutil.walk_packages(refusion_jax.__path__, "refusion_jax."):
        name = module.name.removeprefix("refusion_jax.")
        if name not in (*COMMANDS, "data.beam") and not name.startswith("benchmarks."):
            importlib.import_module(module.name)
    gc.freeze()  # or a collection in a fork would copy all that it shares with this process
    gc.enable()
    answers = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        asked = json.loads(line)
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            if not (pid := os.fork()):
                os.setsid()
                for source, target in ((os.open(os.devnull, os.O_RDONLY), 0), (out.fileno(), 1), (err.fileno(), 2)):
                    os.dup2(source, target)
                answers.close()
                os.environ.clear()
                os.environ.update(asked["environment"])
                os.chdir(asked["directory"])
                # Which JAX reads from the environment as it is imported.
                jax.config.update("jax_compilation_cache_dir", os.environ.get("JAX_COMPILATION_CACHE_DIR"))
                run(asked["command"], asked["flags"])
            code = wait(pid, asked["seconds"])
            spent = resource.getrusage(resource.RUSAGE_CHILDREN)
            cpu = spent.ru_utime + spent.ru_stime - before.ru_utime - before.ru_stime
            said = {}
            for name, file in (("out", out), ("err", err)):
                file.seek(0)
                said[name] = file.read().decode(errors="replace")
        print(json.dumps({"code": code, "cpu": cpu, **said}), file=answers, flush=True)


def run(command: str, flags: list[str]) -> NoReturn:
    """As `python -m refusion_jax.COMMAND` does, and ends the process.

    At the end threads are waited for and what is registered for it is done, but no module is taken apart: that would
    copy all memory that the fork shares with the server, four fifths of the time of a call that is refused.
    """
    sys.argv = [f"{refusion_jax.__path__[0]}/{command}.py", *flags]
    if command in ("plan", "bench"):
        os.environ["TPU_SKIP_MDS_QUERY"] = "1"
    sys.dont_write_bytecode = False  # as it is unless a user says otherwise
    code = 0
    try:
        runpy.run_module(f"refusion_jax.{command}", run_name="__main__", alter_sys=True)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001  which the interpreter would print
        traceback.print_exc()
        code = 1
    try:
        threading._shutdown()
        atexit._run_exitfuncs()
        for stream in filter(None, (sys.stdout, sys.stderr)):
            stream.flush()
    except BaseException:  # noqa: BLE001  as the interpreter has it
        code = 120
    finally:
        os._exit(code)


def wait(pid: int, seconds: float) -> int:
    """The exit code of a process, which is ended with all that it has started where it takes too long."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    os.killpg(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


if __name__ == "__main__":
    main()
