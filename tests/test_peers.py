"""The roll call, among threads of this process; and a watchdog."""

import concurrent.futures
import socket
import subprocess
import sys
import time

import pytest

from refusion_jax import UserError
from refusion_jax.distributed.peers import roll_call


def free_port() -> int:
    with socket.create_server(("", 0)) as server:
        return server.getsockname()[1]


def call(count, there, seconds):
    address = f"localhost:{free_port()}"
    with concurrent.futures.ThreadPoolExecutor(count) as pool:
        futures = [pool.submit(roll_call, address, count, index, seconds) for index in there]
        return [future.exception() or future.result() for future in futures], address


def test_all_that_come_go_on_and_leave_the_port_to_jax():
    found, address = call(3, (0, 1, 2), 20)
    assert [type(peers).__name__ for peers in found] == ["Peers"] * 3
    with socket.create_server(("", int(address.rpartition(":")[2]))):
        pass
    for peers in found:
        peers.leave()


def test_the_first_that_has_left_calls_nobody_lost_who_leaves_behind_it():
    port = free_port()
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        first = pool.submit(roll_call, f"localhost:{port}", 3, 0, 20)
        others = [connect(port) for _ in range(2)]
        for index, other in enumerate(others, 1):
            other.sendall(f"here {index}\n".encode())
        first.result().leave()
    leaver, stayer = others
    leaver.close()
    stayer.shutdown(socket.SHUT_WR)
    with stayer, stayer.makefile() as said:
        assert said.read() == "go\nbye\n"


def connect(port):
    """A connection, as soon as somebody listens."""
    for _ in range(200):
        try:
            return socket.create_connection(("localhost", port), timeout=20)
        except ConnectionRefusedError:
            time.sleep(0.05)
    raise AssertionError(f"nobody listens on {port}")


LEAVER = """
import sys, threading
from refusion_jax.distributed.peers import roll_call
peers = roll_call(sys.argv[1], 3, 2, 60)
for thread in threading.enumerate():
    if thread.name == "peers":
        thread.join()  # until all is heard
peers.leave()
"""


def test_nothing_is_believed_of_a_first_that_has_said_good_bye():
    with socket.create_server(("localhost", 0)) as server:
        address = f"localhost:{server.getsockname()[1]}"
        process = subprocess.Popen([sys.executable, "-c", LEAVER, address], stderr=subprocess.PIPE, text=True)
        connection, _ = server.accept()
    with connection:
        connection.sendall(b"go\n")
        connection.sendall(b"bye\nlost 1\n")
        _, err = process.communicate(timeout=300)
    assert process.returncode == 0, err


def test_who_does_not_come_is_named_by_everybody():
    found, _ = call(4, (0, 2), 2)
    assert [str(error) for error in found] == [
        "process 1, 3 of this run did not come within 2 s (--peer_seconds waits longer)"
    ] * 2


def test_a_first_process_that_does_not_come_is_named():
    (error,), address = call(2, (1,), 0.5)
    assert str(error).startswith(f"JAX_COORDINATOR_ADDRESS={address}: process 0 ")
    assert "0.5 s" in str(error)


def test_a_port_in_use_is_refused_at_once():
    with socket.create_server(("", 0)) as server:
        address = f"localhost:{server.getsockname()[1]}"
        with pytest.raises(UserError, match=f"{address}: port .* cannot be used: Address already in use"):
            roll_call(address, 2, 0, 20)


SURVIVOR = """
import os, sys, time
from refusion_jax.distributed.peers import roll_call
peers = roll_call(sys.argv[1], 3, int(sys.argv[2]), 60)
print("there", flush=True)
if sys.argv[2] == sys.argv[4]:
    sys.stdin.readline()
    if sys.argv[3] == "end":
        peers.leave(int(sys.argv[5]))
    os._exit(9)
time.sleep(60)
"""


@pytest.mark.parametrize(
    ("victim", "how", "code", "said"),
    [
        (1, "die", 75, "process 1 was lost; start the same command again"),
        (1, "end", 2, "process 1 ended with an error"),
        (0, "end", 75, "process 0 ended with an error"),
    ],
)
def test_one_that_dies_or_fails_is_named_by_all_others_which_leave(victim, how, code, said):
    address = f"localhost:{free_port()}"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    line = [sys.executable, "-c", SURVIVOR, address]
    three = [subprocess.Popen([*line, str(index), how, str(victim), str(code)], **pipes) for index in range(3)]
    for process in three:
        assert process.stdout.readline() == "there\n"
    three[victim].communicate("go\n")
    others = [process for index, process in enumerate(three) if index != victim]
    if victim == 0:  # JAX's service is the first's: without it JAX ends the others by abort
        assert [process.poll() for process in others] == [code, code]
    for process in others:
        _, err = process.communicate(timeout=300)
        assert process.returncode == code, err
        assert said in err


def test_a_process_that_hangs_shows_its_stacks_and_leaves_to_be_started_again():
    program = (
        "import time\nfrom refusion_jax.distributed.watchdog import Watchdog\ndog = Watchdog(0.005); dog.alive(7)\n"
    )
    program += "def stuck():\n    time.sleep(60)\nstuck()"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert done.returncode == 75
    assert "in stuck" in done.stderr
    assert "nothing has happened for 0.005 minutes behind step 7" in done.stderr


def test_what_gives_no_sign_of_life_may_take_longer():
    program = "import time; from refusion_jax.distributed.watchdog import Watchdog; dog = Watchdog(0.005)\n"
    program += "with dog.paused():\n    time.sleep(2)\nprint('done')"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (0, "done\n")
