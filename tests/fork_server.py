"""Runs commands of ours quickly: a process that has imported everything once forks for each of them.

To import JAX and ourselves takes 2 s of processor time, longer than most commands that a test starts.
What the process is asked comes with the files that are to be the fork's stdin, stdout and stderr, and one to which it
writes {"pid"} first and, once the fork has ended, {"status", "cpu" (seconds)}.
"""

import atexit
import contextlib
import gc
import importlib
import json
import os
import pkgutil
import resource
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import traceback
import warnings
from pathlib import Path
from typing import NoReturn

import jax
from quick_compile import compile_few_shapes

import refusion_jax

ROOT = Path(__file__).parent.parent
COMMANDS = {module.name for module in pkgutil.iter_modules(refusion_jax.__path__) if not module.ispkg}


class ForkServer:
    """The process, started when it is first asked."""

    def __init__(self):
        self._process = None

    def start(
        self, command: str, flags: list[str], environment: dict[str, str], directory: Path = ROOT, **how
    ) -> subprocess.Popen:
        """`python -m refusion_jax.COMMAND`, under the limits of this process, in a session of its own.

        The command -c is `python -c`: its first flag is a program.
        """
        if self._process is None:
            self._socket, theirs = socket.socketpair()
            line = [sys.executable, __file__, str(theirs.fileno())]
            # Whatever the first who asks has set for one command alone:
            env = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "JAX_ENABLE_X64": "0"}
            pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)  # as most forks have them
            self._process = subprocess.Popen(line, cwd=ROOT, env=env, pass_fds=[theirs.fileno()], **pipes)
            theirs.close()
        asked = {"command": command, "flags": flags, "environment": environment, "directory": str(directory)}
        asked["file_size"] = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
        return Forked(self._socket, asked, **how)

    def ask(
        self, command: str, flags: list[str], environment: dict[str, str], seconds: float = 3600, directory: Path = ROOT
    ) -> dict:
        """Runs a command to its end: {"code", "out", "err", "cpu" (seconds)}.

        A code below 0 is the signal that ended it, -9 also where it took longer than it may.
        """
        pipes = dict.fromkeys(("stdout", "stderr"), subprocess.PIPE)
        with self.start(command, flags, environment, directory, **pipes) as process:
            try:
                said = process.communicate(timeout=seconds)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                said = process.communicate()
        out, err = (text.decode(errors="replace") for text in said)
        return {"code": process.returncode, "cpu": process.cpu, "out": out, "err": err}

    def close(self) -> None:
        """Ends the process, and what it has started."""
        if self._process:
            self._socket.close()
            self._process.communicate()
            self._process = None


class Forked(subprocess.Popen):
    """A process of which the server is the parent, and tells when it has ended."""

    def __init__(self, server: socket.socket, asked: dict, **how):
        self._server, self._asked = server, asked
        super().__init__([asked["command"], *asked["flags"]], **{"stdin": subprocess.DEVNULL} | how)

    def _execute_child(self, *how):
        ends = how[10:16]  # for us and for the process, of stdin, stdout and stderr
        told, tells = os.pipe()
        asked = json.dumps(self._asked).encode()
        socket.send_fds(self._server, [len(asked).to_bytes(4)], [ends[0], ends[3], ends[5], tells])
        self._server.sendall(asked)
        os.close(tells)
        self._told = os.fdopen(told)
        self.pid = json.loads(self._told.readline())["pid"]
        self._child_created = True
        self._close_pipe_fds(*ends)

    def _try_wait(self, flags: int) -> tuple[int, int]:
        if flags and not select.select([self._told], [], [], 0)[0]:
            return 0, 0
        with self._told:
            said = json.loads(self._told.readline())
        self.cpu = said["cpu"]
        return self.pid, said["status"]

    def _internal_poll(self, *_, **__) -> int | None:
        if self.returncode is None and (ended := self._try_wait(os.WNOHANG))[0]:
            self._handle_exitstatus(ended[1])
        return self.returncode


def main() -> None:
    """Serves until nobody asks any more."""
    gc.disable()  # what is imported stays
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))  # the first who asks may have lowered it
    with warnings.catch_warnings(action="ignore"):
        for module in pkgutil.walk_packages(refusion_jax.__path__, "refusion_jax."):
            name = module.name.removeprefix("refusion_jax.")
            if name not in (*COMMANDS, "data.beam") and not name.startswith("benchmarks."):
                importlib.import_module(module.name)
    compile_few_shapes()
    gc.freeze()  # or a collection in a fork would copy all that it shares with this process
    gc.enable()
    server, running = socket.socket(fileno=int(sys.argv[1])), {}
    wakes, wakeup = socket.socketpair()
    for end in (wakes, wakeup):
        end.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wakeup.fileno())
    while True:
        ready, _, _ = select.select([server, wakes], [], [])
        if server in ready:
            size, files, _, _ = socket.recv_fds(server, 4, 4)
            if not size:
                break
            asked = json.loads(server.recv(int.from_bytes(size), socket.MSG_WAITALL))
            if not (pid := os.fork()):
                for end in (server, wakes, wakeup, *running.values()):
                    end.close()
                become(asked, files)
            for file in files[:3]:
                os.close(file)
            running[pid] = os.fdopen(files[3], "w")
            print(json.dumps({"pid": pid}), file=running[pid], flush=True)
        if wakes in ready:
            wakes.recv(1 << 10)
            while running and (ended := os.wait4(-1, os.WNOHANG))[0]:
                pid, status, spent = ended
                with running.pop(pid) as tells, contextlib.suppress(BrokenPipeError):
                    print(json.dumps({"status": status, "cpu": spent.ru_utime + spent.ru_stime}), file=tells)
    for pid in running:
        os.killpg(pid, signal.SIGKILL)


def become(asked: dict, files: list[int]) -> NoReturn:
    """Makes this fork the process that is asked for."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    for source, target in zip(files, range(3), strict=False):
        os.dup2(source, target)
    for file in files:
        os.close(file)
    sys.stdout.reconfigure(line_buffering=os.isatty(1))
    os.environ.clear()
    os.environ.update(asked["environment"])
    sys.path[:0] = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    os.chdir(asked["directory"])
    resource.setrlimit(resource.RLIMIT_FSIZE, (asked["file_size"], resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    # Which JAX reads from the environment as it is imported.
    jax.config.update("jax_compilation_cache_dir", os.environ.get("JAX_COMPILATION_CACHE_DIR"))
    run(asked["command"], asked["flags"])


def run(command: str, flags: list[str]) -> NoReturn:
    """As `python -m refusion_jax.COMMAND` or `python -c` does, and ends the process.

    At the end threads are waited for and what is registered for it is done, but no module is taken apart: that would
    copy all memory that the fork shares with the server, four fifths of the time of a call that is refused.
    """
    sys.argv = [f"{refusion_jax.__path__[0]}/{command}.py", *flags]
    if command in ("plan", "bench"):
        os.environ["TPU_SKIP_MDS_QUERY"] = "1"
    # False unless a user says otherwise; but where files cannot grow, Python 3.11 leaves the beginning of one, which no
    # later import can read.
    sys.dont_write_bytecode = resource.getrlimit(resource.RLIMIT_FSIZE)[0] != resource.RLIM_INFINITY
    if sys.dont_write_bytecode:
        os.environ["PYTHONDONTWRITEBYTECODE"] = "1"  # for processes that it starts
    code = 0
    try:
        if command == "-c":
            sys.argv = [command, *flags[1:]]
            exec(flags[0], {"__name__": "__main__"})
        else:
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


if __name__ == "__main__":
    main()
