"""Processes that run together: how they find each other, and what the others do when one fails or is lost."""

import os
import signal
import socket
import subprocess

import pytest
from conftest import FORKS
from helpers import free_port

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
