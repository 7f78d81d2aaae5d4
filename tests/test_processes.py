"""Processes that run together, lose one another or hang, the memory that one frees, and the programs it trusts."""

import glob
import os
import signal
import socket
import subprocess
import sys

import jax
import pytest
from conftest import FORKS
from etils import epath
from helpers import free_port, python
from jax.experimental.compilation_cache import compilation_cache

from refusion_jax.distributed.compiled_code import keep_compiled, keep_for_user
from refusion_jax.distributed.host import ACCELERATORS
from refusion_jax.distributed.watchdog import Watchdog

PROGRAM = """
import select, sys, time
from refusion_jax.cli import command
from refusion_jax.cli.errors import UserError
from refusion_jax.distributed.processes import together
def main():
    with together(float(sys.argv[1]), 5):
        import jax
        jax.devices()
        print("there", flush=True)
        while not select.select([sys.stdin], [], [], 0.1)[0]:
            pass  # Python handles a signal that comes right before a read only after it
        if sys.stdin.readline() == "fail\\n":
            raise UserError("--data=x: is not here")
        time.sleep(60)
command.guard(main)
"""


def start(port: int, index: int, count: int = 3, seconds: float = 300) -> subprocess.Popen:
    env = os.environ | {"JAX_COORDINATOR_ADDRESS": f"localhost:{port}", "JAX_NUM_PROCESSES": str(count)}
    env |= {"JAX_PROCESS_ID": str(index), "XLA_FLAGS": ""}
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    return FORKS.start("-c", [PROGRAM, str(seconds)], env, text=True, **pipes)


@pytest.fixture
def three():
    """Three processes that have found each other."""
    port = free_port()
    found = [start(port, index) for index in range(3)]
    for process in found:
        assert process.stdout.readline() == "there\n"
    yield found
    for process in found:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("victim", [0, 1])
def test_when_one_is_lost_the_others_end_in_one_line_to_be_started_again(three, victim):
    three[victim].kill()
    for process in three[:victim] + three[victim + 1 :]:
        _, err = process.communicate(timeout=300)
        assert process.returncode == 75
        assert err == "error: another process of this run was lost; start the same command again\n"


def test_one_that_fails_alone_ends_with_its_own_code(three):
    for process in three[1:]:
        process.send_signal(signal.SIGSTOP)  # it waits for nobody
    _, err = three[0].communicate("fail\n", timeout=300)
    assert (three[0].returncode, err) == (2, "error: --data=x: is not here\n")
    for process in three[1:]:
        process.send_signal(signal.SIGCONT)
    assert [process.wait(timeout=300) for process in three[1:]] == [75, 75]


def test_a_signal_reaches_the_process_that_works(three):
    three[1].send_signal(signal.SIGINT)
    _, err = three[1].communicate(timeout=300)
    assert (three[1].returncode, err) == (130, "error: interrupted\n")


def test_who_waits_in_vain_ends_in_one_line_to_be_started_again():
    port = free_port()
    two = [start(port, index, seconds=5) for index in (0, 2)]
    for process in two:
        _, err = process.communicate(timeout=300)
        assert process.returncode == 75
        assert err == "error: not all processes of this run came within 5 s; --peer_seconds waits longer\n"


def test_a_port_in_use_is_bad_input():
    with socket.create_server(("", 0)) as server:
        process = start(server.getsockname()[1], 0, count=2)
        _, err = process.communicate(timeout=300)
    assert process.returncode == 2, err
    (line,) = [line for line in err.splitlines() if line.startswith("error: ")]
    assert "JAX_COORDINATOR_ADDRESS=localhost:" in line


def test_a_process_that_hangs_shows_its_stacks_and_leaves_to_be_started_again():
    program = (
        "import time\nfrom refusion_jax.distributed.watchdog import Watchdog\ndog = Watchdog(0.003); dog.alive(7)\n"
    )
    program += "def stuck():\n    time.sleep(60)\nstuck()"
    done = python("-c", program)
    assert done.returncode == 75
    assert "in stuck" in done.stderr
    assert "nothing has happened for 0.018 minutes after step 7" in done.stderr


class Clock:
    """A clock that the test moves on, and a watchdog with no thread of its own that goes by it."""

    def __init__(self, monkeypatch, minutes: float):
        self.now = 0.0
        monkeypatch.setattr("time.monotonic", lambda: self.now)
        monkeypatch.setattr("threading.Thread.start", lambda self: None)
        self.dog, self._patch = Watchdog(minutes), monkeypatch.setattr

    def ends(self) -> bool:
        """Whether the watchdog ends the process when it looks now."""
        looks, ended = iter([False, True]), []
        self._patch(self.dog._closed, "wait", lambda seconds: next(looks))
        self._patch("os._exit", ended.append)
        self.dog._watch()
        return ended == [75]


def test_what_counts_as_a_hang_is_measured(monkeypatch):
    clock, limits = Clock(monkeypatch, 1.0), []
    for step, (seconds, is_slow) in enumerate([(1, False), *[(2, False)] * 32, (300, True), (30, False), (2, False)]):
        clock.now += seconds
        clock.dog.alive(step, is_slow)
        limits.append(clock.dog._seconds)
    assert limits == [360] * 31 + [60, 60] + [360, 300, 300]


def test_what_gives_no_sign_of_life_may_take_longer(monkeypatch):
    clock = Clock(monkeypatch, 1.0)
    with clock.dog.paused():
        clock.now += 1e6
        assert not clock.ends()
    clock.now += 360
    assert not clock.ends()
    clock.now += 1
    assert clock.ends()


def said_by(program: str) -> int:
    """The number that a program prints, which has allocated nothing before."""
    return int(python("-c", program).stdout)


@pytest.mark.skipif(any(map(glob.glob, ACCELERATORS)), reason="with an accelerator memory is returned")
def test_large_arrays_of_threads_take_the_same_pages_each_time():
    """The kernel would clear 3 x 16,384 pages."""
    faults = """if True:
        import resource, threading
        from refusion_jax.distributed.host import keep_freed_memory

        keep_freed_memory()
        for step in range(4):
            if step == 1:
                before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            thread = threading.Thread(target=lambda: b"x" * (1 << 26))
            thread.start()
            thread.join()
        print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    """
    assert said_by(faults) < 1_000


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_what_is_free_is_returned_also_between_what_is_in_use():
    """Of 8,192 pieces of 16 KiB every second one is freed, of each of which three pages or four."""
    returned = """if True:
        import mmap
        from refusion_jax.distributed.host import return_freed_memory

        def resident():
            return int(open("/proc/self/statm").read().split()[1]) * mmap.PAGESIZE >> 20

        kept = [b"x" * (1 << 14) for _ in range(8192)]
        del kept[::2]
        before = resident()
        return_freed_memory()
        print(before - resident())
    """
    assert said_by(returned) > 40


@pytest.fixture
def no_cache_yet(monkeypatch, tmp_path):
    """As users have it; the tests' own cache is back after the test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    names = ("enable_compilation_cache", "compilation_cache_dir", "persistent_cache_min_compile_time_secs")
    names = [f"jax_{name}" for name in names]
    before = [getattr(jax.config, name) for name in names]
    jax.config.update("jax_enable_compilation_cache", True)
    yield
    for name, value in zip(names, before, strict=True):
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def test_programs_are_not_kept_where_somebody_else_can_put_any(no_cache_yet, tmp_path):
    (cache := tmp_path / "home" / "refusion_jax" / "compiled").mkdir(parents=True)
    me, other = os.geteuid(), 12345
    for owner, mode, used in ((me, 0o777, None), (me, 0o770, None), (other, 0o700, None), (me, 0o700, str(cache))):
        if me == 0:  # only root can give files away
            os.chown(cache, owner, -1)
        if me in (0, owner):
            cache.chmod(mode)
            jax.config.update("jax_compilation_cache_dir", None)
            keep_for_user()
            assert jax.config.jax_compilation_cache_dir == used


def test_a_doctored_program_in_a_downloaded_run_is_not_run(no_cache_yet, tmp_path):
    """Not even where all of its files are this user's, as those of a download are, unless the user shares them."""

    def compute(directory, whose, factor):
        jax.config.update("jax_compilation_cache_dir", None)
        compilation_cache.reset_cache()  # each call stands for a process
        keep_compiled(epath.Path(directory), whose)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)

        def program(x):
            return factor * x

        return float(jax.jit(program)(1.0))

    run, other = tmp_path / "run", tmp_path / "other"
    assert [compute(run, "shared", 2.0), compute(other, "shared", 3.0)] == [2.0, 3.0]
    (kept,), (doctored,) = (list(directory.glob("jit_program-*-cache")) for directory in (run, other))
    kept.write_bytes(doctored.read_bytes())
    assert compute(run, "shared", 2.0) == 3.0
    assert compute(run, "off", 2.0) == compute(run, "own", 2.0) == 2.0
    assert [path.name.split("-")[0] for path in (tmp_path / "home" / "refusion_jax" / "compiled").glob("*-cache")] == [
        "jit_program"
    ]
