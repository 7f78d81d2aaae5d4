"""Generated programs are shut in: each way out is tried, none leads out, and the evaluation goes on."""

import contextlib
import ctypes
import errno
import functools
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from helpers import wait_until

from refusion_jax import UserError
from refusion_jax.evaluation import jail, sandbox
from refusion_jax.evaluation.sandbox import Limits, Outcome

AMPLE = Limits(seconds=60.0)  # for what ends by itself, on however busy a machine
QUICK = Limits(seconds=2.0)


@pytest.fixture(scope="module", autouse=True)
def _allowed():
    try:
        sandbox.run("pass")
    except UserError as error:
        pytest.skip(f"this kernel shuts nothing in: {error}")
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER: orphans become children of this process
    yield
    ctypes.CDLL(None).prctl(36, 0, 0, 0, 0)


def failed(program: str, limits: Limits = AMPLE) -> str:
    """Why a program that must fail did."""
    outcome = sandbox.run(program, limits)
    assert not outcome.passed, program
    return outcome.reason


def test_a_program_passes_if_it_runs_to_its_end():
    program = (
        "import collections, heapq, math, re, threading\nprint(input if 0 else 'x' * 100)\nassert math.sqrt(4) == 2"
    )
    assert sandbox.run(program) == Outcome(True, "passed")
    assert "no such luck" in failed("assert 1 == 2, 'no such luck'")
    assert "SyntaxError" in failed("def f(:")
    for early in ("import sys; sys.exit(0)", "import os; os._exit(0)", "quit = None; raise SystemExit"):
        assert "exit code 0" in failed(early)


def test_a_program_is_no_main_program():
    """As HumanEval executes it: an answer may end with tests of its own, which would end the process."""
    assert sandbox.run("x = 1\nif __name__ == '__main__':\n  import unittest; unittest.main()\nassert x == 1").passed
    assert sandbox.run("import dataclasses\n@dataclasses.dataclass\nclass A:\n  x: 'int'\nassert A(1).x == 1").passed


def test_an_endless_loop_is_ended():
    assert failed("while True: pass", Limits(seconds=0.5)) == "took longer than 0.5 s"


def test_a_fork_bomb_stops_at_the_limit_and_leaves_nothing():
    bomb = "import os\ntry:\n  while True: os.fork()\nexcept OSError as error: raise SystemExit(str(error))"
    assert "temporarily unavailable" in failed(bomb)  # each process says so in one line, as their lines mix
    stubborn = "import os, signal\nos.setsid()\nwhile True:\n  try: os.fork()\n  except OSError: pass"
    assert "took longer" in failed(stubborn, QUICK)
    wait_until(lambda: not _running_programs())
    sandbox.run("import os, time\nif os.fork() == 0:\n  os.setsid()\n  time.sleep(1000)")  # an orphan
    wait_until(lambda: not _running_programs())


def _running_programs() -> list[str]:
    """Those that this process has started, by however many others; other tests of this machine have theirs."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            found += [line for line in [process.cmdline()] if "program.py" in line]
    return found


def test_threads_of_one_program_are_not_counted_against_another():
    """Four at a time, each with as many threads as it may have."""
    ready = "import threading, time\nfor _ in range(5): threading.Thread(target=time.sleep, args=(1,)).start()"
    with ThreadPoolExecutor(4) as pool:
        assert all(outcome.passed for outcome in pool.map(sandbox.run, [ready] * 8))


def test_ten_gigabytes_are_refused():
    assert "MemoryError" in failed("x = bytearray(10 << 30)")


def test_nothing_outside_its_directory_is_written_or_read(tmp_path):
    (tmp_path / "secret").write_text("42")
    for path in (tmp_path / "new", "/usr/new", "/etc/new", "/new"):
        assert "Error" in failed(f"open({str(path)!r}, 'w').write('x')")
        assert not Path(path).exists()
    assert "FileNotFoundError" in failed(f"open({str(tmp_path / 'secret')!r}).read()")
    assert "OSError" in failed("open('big', 'wb').write(b'0' * (200 << 20))")
    assert sandbox.run("open('own', 'w').write('x'); assert open('own').read() == 'x'").passed


def test_there_is_no_network():
    for target in (("1.1.1.1", 53), ("127.0.0.1", 22)):
        assert "unreachable" in failed(f"import socket; socket.create_connection({target!r}, timeout=1)")


def test_the_environment_of_the_parent_stays_hidden(monkeypatch):
    monkeypatch.setenv("A_SECRET", "42")
    assert sandbox.run("import os; assert 'A_SECRET' not in os.environ").passed
    program = "import os\nfor i in range(1, 100): open(f'/proc/{i}/environ').read()"
    assert "FileNotFoundError" in failed(program)
    assert sandbox.run("import os; assert os.getpid() < 10").passed  # no process of ours can be named


@pytest.mark.parametrize(
    "call",
    [
        "import os; os.memfd_create('more')",
        "import socket; socket.socket(40, socket.SOCK_STREAM)",  # AF_VSOCK, to the host of a virtual machine
        "import socket; socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)",
        "import os; os.pidfd_open(os.getpid())",
        *(
            f"import ctypes, os; c = ctypes.CDLL(None, use_errno=True); c.syscall({call}, 4096, 0o1600, 0) == -1 and "
            f"ctypes.get_errno() == 1 and os.abort()"
            # shmget, semget, msgget, mq_open, io_uring_setup, keyctl, bpf, memfd_create of x32
            for call in ("29, 0", "64, 0", "68, 0", "240, 0", "425, 0", "250, 0", "321, 0", "319 | 1 << 30, 0")
            # unshare, and clone with a user namespace, in which it would be root
            + ("272, 0", "56, 1 << 28 | 17")
            if platform.machine() == "x86_64"
        ),
    ],
)
def test_system_calls_that_no_limit_covers_are_refused(call):
    assert re.search("Operation not permitted|exit code 134", failed(call))
    assert sandbox.run("import asyncio, socket; asyncio.run(asyncio.sleep(0)); socket.socketpair()").passed


@pytest.mark.skipif(platform.machine() != "x86_64", reason="numbers of system calls")
def test_keys_of_the_parent_stay_hidden():
    """Those of its session keyring, such as credentials of network file systems."""
    libc = ctypes.CDLL(None)
    add, find, session = 248, 249, -3
    if libc.syscall(add, b"user", b"refusion-test", b"42", 2, session) == -1:
        pytest.skip("no keys on this machine")
    assert libc.syscall(find, b"user", b"refusion-test", None, 0) != -1
    program = f"import ctypes\nassert ctypes.CDLL(None).syscall({find}, b'user', b'refusion-test', None, 0) == -1"
    assert sandbox.run(program).passed


STEAL = """
import ctypes, os
libc = ctypes.CDLL(None)
for process in {processes}:
    for descriptor in range(520):
        taken = libc.syscall(438, libc.syscall(434, process, 0), descriptor, 0)
        try: os.write(taken, b"junk")
        except OSError: pass
"""


# What asks for a pass and has not come to its checks. `mark` is how the end is marked, found in `__main__`.
FORGERIES = {
    "exit": "import os; os._exit(0)",
    "exit as one that is stopped": "import os; os._exit(128 + 19)",
    "junk to all descriptors": 'for i in range(3, 600):\n  try: os.write(i, b\'{"code": 0, "passed": true}\\n\')\n'
    "  except OSError: pass\nos._exit(0)",
    "junk as errors": "os.write(2, b'{\"passed\": true}\\n'); os._exit(0)",
    "stop": "signal.raise_signal(19)",
    "stop by its number": "os.kill(os.getpid(), 19)",
    "stop in native code": "ctypes.CDLL(None)['raise'](19)",
    "the mark itself": "mark()",
    "the mark, called as it is": "list(map(operator.call, (mark,)))",
    "the loop that marks, found by gc": "[next(x) for x in gc.get_objects() if type(x) is map]",
    "the loop is left without an error": "raise StopIteration",
    "stop on the way out": "import atexit; atexit.register(mark); sys.exit(0)",
    "stop on the way out, by an error": "sys.excepthook = lambda *_: mark(); raise ValueError",
    "stop in a handler": "signal.signal(14, lambda *_: mark()); signal.alarm(1); time.sleep(9)",
    "stop from a thread": "threading.Thread(target=mark).start(); time.sleep(9)",
    "stop by a child": "os.fork() or os.kill(os.getppid(), 19); time.sleep(9)",
    "a child that comes to the end": "if os.fork(): os._exit(0)\nos.setsid(); mark()",
    "another program in its place": "open('program.py', 'w').write('x = 1')\nos.execv(sys.executable, sys.orig_argv)",
    "the judge is killed": "os.kill(os.getppid(), 9); os.kill(-1, 9)",
    "the judge gets new limits": "resource.prlimit(1, resource.RLIMIT_NOFILE, (0, 0))\n"
    "resource.prlimit(1, resource.RLIMIT_CPU, (0, 0)); os._exit(0)",
    "what the judge holds is taken": STEAL.format(processes="(1, os.getppid())") + "os._exit(0)",
}


@pytest.mark.parametrize("forgery", FORGERIES, ids=str)
def test_no_program_says_itself_that_it_passed(forgery):
    """Neither by an exit, nor by what it writes, nor by a stop like that at the end."""
    names = "import ctypes, gc, operator, os, resource, signal, sys, threading, time\n"
    hook = "mark = sys.modules['__main__'].stop\n"
    failed(f"{names}{hook}{FORGERIES[forgery]}\nassert False", QUICK)


def test_no_privilege_is_left_or_gained():
    program = (
        "import ctypes, os\nlibc = ctypes.CDLL(None)\nlibc.unshare(0x10020000)\n"
        "assert os.getuid() != 0 and libc.mount(None, b'/usr', None, 4096 | 32, None) == -1\n"
        "assert libc.sethostname(b'x', 1) == -1"
    )
    assert sandbox.run(program).passed


def test_one_that_misbehaves_spoils_nothing_for_the_others(monkeypatch):
    monkeypatch.setattr(sandbox, "run", functools.partial(sandbox.run, limits=Limits(seconds=5.0)))
    sleeps, kills, closes = "import time; time.sleep(100)", "import os\nos.kill(-1, 9)", "import os; os.close(3)"
    programs = ["assert True", sleeps, kills, closes, "x = 1"]
    with sandbox.allow():
        assert [outcome.passed for outcome in sandbox.run_allowed(programs)] == [True, False, False, False, True]


def test_a_machine_that_cannot_shut_in_is_named(monkeypatch, tmp_path):
    (tmp_path / "jail.py").write_text("""print('{"refused": "Operation not permitted"}')""")
    monkeypatch.setattr(jail, "__file__", f"{tmp_path}/jail.py")
    with pytest.raises(UserError, match="--allow_code_execution: .*Operation not permitted.*--unsafe"):
        sandbox.run("pass")
    with pytest.raises(UserError, match="--unsafe: generated code cannot be run here: Operation not permitted"):
        sandbox.run("pass", unsafe=True)


@pytest.mark.skipif(os.getuid() != 0 or not Path("/usr/bin/python3").exists(), reason="needs root and a system Python")
def test_an_ordinary_user_is_shut_in_as_well():
    """Not root: by a user namespace. With `unsafe` the limits hold all the same, and nobody else writes the verdict."""
    bomb = "import os\ntry:\n  while True: os.fork()\nexcept OSError as error: os._exit(error.errno)"
    inside = STEAL.format(processes="(1,)") + f"assert not os.path.exists('/proc')\n{bomb}"
    outside = STEAL.format(processes="(os.getppid(),)") + bomb
    stopped, passed = {"code": errno.EAGAIN, "passed": False}, {"code": 128 + signal.SIGSTOP, "passed": True}
    cases = ((True, inside, stopped), (False, outside, stopped), (True, "x = 1", passed), (False, "x = 1", passed))
    for isolated, program, verdict in cases:
        with tempfile.TemporaryDirectory() as directory:
            script = shutil.copy(jail.__file__, directory)
            os.chown(directory, 65534, 65534)
            os.chmod(script, 0o644)
            job = {
                "program": program,
                "python": os.path.realpath("/usr/bin/python3"),
                "read_only": ["/usr", "/dev/null"],
                "isolated": isolated,
                **vars(Limits(seconds=5)),
            }
            out = subprocess.run(
                ["/usr/bin/python3", "-I", script],
                input=json.dumps(job).encode(),
                capture_output=True,
                cwd=directory,
                user=65534,
                group=65534,
                extra_groups=[],
                check=True,
            )
        assert json.loads(out.stdout) == verdict, (out, sys.version)
        wait_until(lambda: not _running_programs())
