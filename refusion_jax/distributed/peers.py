"""Failure detection: the processes of a run say to the first that they are there, and are heard leaving or dying.

The connections are made on the coordinator's port, before JAX takes that port, and stay open: an operating system
closes those of a dead process at once, and a machine that vanishes stops beating. So whoever survives can name who is
missing, which JAX cannot.

The protocol is lines of text: "here INDEX" to the first process; from it "go" when all are there, or "missing 2, 3";
then "beat" both ways, "bye" or "end CODE" by one that leaves, and from the first to the others "lost INDEX" or
"failed INDEX CODE".
"""

import contextlib
import os
import socket
import sys
import threading
import time
from multiprocessing.connection import wait

from refusion_jax.cli.errors import UserError
from refusion_jax.distributed.preemption import EXIT_CODE

BEAT_SECONDS = 5.0
LOST_SECONDS = 60.0  # of silence, after which a process counts as lost
_BAD_INPUT = 2  # the exit code
_GRACE_SECONDS = 3.0  # for this process to end by itself, as all do for the same reason
_LEAD_SECONDS = 1.0  # of the others to leave before the first, on whose port JAX's own service listens


class Peers:
    """The other processes, from the roll call on. Made by `roll_call`."""

    def __init__(self, index: int, sockets: dict[int, socket.socket]):
        self._index = index
        self._sockets = sockets  # of the first process: one for each other; of another: the first
        self._heard = dict.fromkeys(sockets, time.monotonic())
        self._unread = dict.fromkeys(sockets, b"")
        self._gone: set[int] = set()
        self._leaving = False
        for connection in sockets.values():
            connection.settimeout(None)
        self._watcher = threading.Thread(target=self._watch, name="peers", daemon=True)
        self._watcher.start()

    def leave(self, code: int | None = None) -> None:
        """Tells the others that this process leaves: by plan, or with the exit code of an error.

        Where it is to be started again, the first waits for the others to leave: JAX ends whoever outlives it with a
        dump of the stack. Bad input all of them find at once, and nobody waits.
        """
        self._leaving = True
        self._tell("bye" if code is None else f"end {code}")
        if code not in (None, _BAD_INPUT) and self._index == 0:
            self._watcher.join(_GRACE_SECONDS + _LEAD_SECONDS)

    def _tell(self, line: str) -> None:
        for connection in self._sockets.values():
            with contextlib.suppress(OSError):
                connection.sendall(f"{line}\n".encode())

    def _watch(self) -> None:
        beat = time.monotonic()
        while len(self._gone) < len(self._sockets):
            there = {peer: connection for peer, connection in self._sockets.items() if peer not in self._gone}
            ready = wait(there.values(), BEAT_SECONDS)
            for peer, connection in there.items():
                if connection in ready:
                    self._listen(peer, connection)
                elif time.monotonic() - self._heard[peer] > LOST_SECONDS:
                    self._lose(peer)
            if time.monotonic() - beat > BEAT_SECONDS:
                beat = time.monotonic()
                self._tell("beat")
        for connection in self._sockets.values():
            connection.close()

    def _listen(self, peer: int, connection: socket.socket) -> None:
        try:
            received = connection.recv(4096)
        except OSError:
            received = b""
        self._heard[peer] = time.monotonic()
        *lines, self._unread[peer] = (self._unread[peer] + received).split(b"\n")
        for line in lines:
            if peer in self._gone:
                return
            word, _, number = line.decode().partition(" ")
            if word == "bye":
                self._gone.add(peer)
            elif word == "end":
                self._gone.add(peer)
                self._fail(peer, int(number))
            elif word == "failed":
                self._fail(*map(int, number.split()))
            elif word == "lost":
                self._lose(int(number))
        if not received and peer not in self._gone:
            self._lose(peer)

    def _fail(self, peer: int, code: int) -> None:
        if self._index == 0:
            self._tell(f"failed {peer} {code}")
        self._end(code, f"process {peer} ended with an error, which it says itself", _GRACE_SECONDS)

    def _lose(self, peer: int) -> None:
        self._gone.add(peer)
        if self._leaving:  # to whom the others close their connections without a word
            return
        if self._index == 0:
            self._tell(f"lost {peer}")
        self._end(EXIT_CODE, f"process {peer} was lost; start the same command again")

    def _end(self, code: int, why: str, grace: float = 0.0) -> None:
        """Leaves, for collectives would wait for the one that is gone; first lets this process say its own error."""
        others = self._index == 0 and len(self._sockets) > 1
        if not self._leaving:
            time.sleep(grace + (_LEAD_SECONDS if others else 0.0))
        if self._leaving:
            return
        print(f"error: {why}", file=sys.stderr, flush=True)
        os._exit(code)


def roll_call(address: str, count: int, index: int, seconds: float) -> Peers:
    """Waits until all processes of a run are there.

    Args:
      address: host:port that the first process listens on; free again when this returns.
      count: of all processes.
      index: of this one.
      seconds: to wait.

    Raises:
      UserError: where the port cannot be used.
      TimeoutError: where somebody does not come, naming who.
    """
    host, _, port = address.rpartition(":")
    deadline = time.monotonic() + seconds
    if index == 0:
        return Peers(0, _call(address, int(port), count, deadline, seconds))
    return Peers(index, {0: _answer(host.strip("[]"), int(port), address, index, deadline, seconds)})


def _call(address: str, port: int, count: int, deadline: float, seconds: float) -> dict[int, socket.socket]:
    """The first process's part: its connections to all others."""
    try:
        dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual else socket.AF_INET
        server = socket.create_server(("", port), family=family, backlog=count, dualstack_ipv6=dual)
    except OSError as error:
        raise UserError(f"JAX_COORDINATOR_ADDRESS={address}: port {port} cannot be used: {error.strerror}") from error
    there: dict[int, socket.socket] = {}
    with server:
        while len(there) < count - 1:
            server.settimeout(max(0.01, deadline - time.monotonic()))
            try:
                connection, _ = server.accept()
                connection.settimeout(5.0)
                word, _, number = _read_line(connection).partition(" ")
            except TimeoutError:
                if time.monotonic() < deadline:
                    continue
                missing = ", ".join(str(i) for i in range(1, count) if i not in there)
                for connection in there.values():
                    with connection:
                        connection.sendall(f"missing {missing}\n".encode())
                raise TimeoutError(_missing(missing, seconds)) from None
            except OSError:
                continue
            if word == "here" and number.isdecimal() and 0 < int(number) < count and int(number) not in there:
                there[int(number)] = connection
            else:
                connection.close()  # a stranger
    for connection in there.values():
        connection.sendall(b"go\n")
    return there


def _answer(host: str, port: int, address: str, index: int, deadline: float, seconds: float) -> socket.socket:
    """Another process's part: its connection to the first."""
    connection = None
    while True:
        try:
            connection = socket.create_connection((host, port), timeout=max(0.1, deadline - time.monotonic()))
            connection.sendall(f"here {index}\n".encode())
            connection.settimeout(max(5.0, deadline - time.monotonic() + 5.0))
            word, _, rest = _read_line(connection).partition(" ")
        except OSError:
            word, rest = "", ""
        if word == "go":
            return connection
        if connection is not None:
            connection.close()
        if word == "missing":
            raise TimeoutError(_missing(rest, seconds))
        if time.monotonic() > deadline:
            raise TimeoutError(f"JAX_COORDINATOR_ADDRESS={address}: process 0 did not come within {seconds:g} s")
        time.sleep(0.1)


def _missing(who: str, seconds: float) -> str:
    return f"process {who} of this run did not come within {seconds:g} s (--peer_seconds waits longer)"


def _read_line(connection: socket.socket) -> str:
    """One short line; no byte behind it is read."""
    line = b""
    while len(line) < 200 and (byte := connection.recv(1)) not in (b"", b"\n"):
        line += byte
    return line.decode(errors="replace")
