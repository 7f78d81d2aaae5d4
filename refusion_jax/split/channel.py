"""A connection to the server that is made again where it breaks: no message is lost, and none is dealt with twice.

Messages are numbered. When the connection breaks, it is made again, the server says which message it dealt with last,
and those after it are sent again: an answer goes on where it was.
"""

import contextlib
import dataclasses
import os
import secrets
import socket
import ssl
import time
from pathlib import Path

from refusion_jax.cli.errors import Failure, UserError, first_line
from refusion_jax.split import frames

_RETRY = 0.2  # seconds between two attempts to connect


class SessionLost(Failure):
    """The server has forgotten what it was sent."""


class Channel:
    """The messages of one session after the other."""

    def __init__(self, address: tuple[str, int], key: Path, hello: frames.Hello, patience: float):
        """Makes the first connection at `begin`, with a key that both sides hold.

        `hello` says what this device is; its session is not read. A lost server must be back, and must answer, within
        the patience, in seconds.
        """
        self._address, self._tls, self._patience = address, frames.secured(key, is_server=False), patience
        self._hello = hello
        self._connection: ssl.SSLSocket | None = None
        self.sent = self.received = 0  # bytes of frames

    def begin(self) -> None:
        """A new session; the counts go on.

        Raises:
          UserError: where the server refuses this device.
          Failure: where it is not to be reached.
        """
        self._hello = dataclasses.replace(self._hello, session=secrets.token_bytes(16))
        self._number = self._last = 0  # of the last message, and of the last result
        self._unconfirmed: list[frames.Message] = []
        self.server: frames.Welcome = self._reach()

    def close(self) -> None:
        """Tells the server to forget this session, and closes the connection."""
        with contextlib.suppress(OSError):
            frames.send(self._connection, frames.Bye(self._number))
        self._connection.close()

    def post(self, message: frames.Message) -> int:
        """Sends a message, and returns its number; an answer is not waited for. Raises as `begin`."""
        self._number += 1
        message = dataclasses.replace(message, number=self._number)
        self._unconfirmed.append(message)
        try:
            self.sent += frames.send(self._connection, message)
        except OSError:
            self._reach()
        return self._number

    def result(self, number: int) -> frames.Result:
        """The result of a message. Raises as `begin`, and UserError where the server refuses to go on."""
        while True:
            try:
                message, size = frames.receive(self._connection)
            except OSError:
                self._reach()
                continue
            self.received += size
            if isinstance(message, frames.Refused):
                raise UserError(f"the server refuses to go on: {message.why}")
            if not isinstance(message, frames.Result) or message.number > number:
                raise frames.FrameError("the server sent what it was not asked for")
            if message.number == number:
                self._last = number
                self._unconfirmed = [each for each in self._unconfirmed if each.number > number]
                return message

    def probe(self, up: int, down: int) -> float:
        """Seconds until the server has received so many bytes, and its answer of so many has come."""
        began = time.perf_counter()
        frames.send(self._connection, frames.Probe(down, bytes(up)))
        frames.receive(self._connection)
        return time.perf_counter() - began

    def _reach(self) -> frames.Welcome:
        """Connects, again if need be, and sends what the server has not dealt with."""
        is_first = self._connection is None
        until, why = time.monotonic() + (0 if is_first else self._patience), None
        while True:
            if self._connection:
                self._connection.close()
            try:
                return self._connect()
            except ssl.SSLCertVerificationError as error:
                raise UserError("the server has another --key") from error
            except (UserError, Failure):
                self._connection.close()
                raise
            except OSError as error:
                why = why or error
                if time.monotonic() > until:
                    where = "{}:{}".format(*self._address)
                    told = os.strerror(why.errno) if why.errno and why.errno > 0 else first_line(why)
                    raise Failure(f"the server at {where} is not to be reached: {told}") from error
                time.sleep(_RETRY)

    def _connect(self) -> frames.Welcome:
        plain = socket.create_connection(self._address, timeout=min(10, self._patience))
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection = self._tls.wrap_socket(plain)
        frames.send(self._connection, dataclasses.replace(self._hello, last=self._last))
        self._connection.settimeout(self._patience)
        message, _ = frames.receive(self._connection)
        if isinstance(message, frames.Refused):
            raise UserError(f"the server refuses this device: {message.why}")
        if not isinstance(message, frames.Welcome):
            raise frames.FrameError("the server did not introduce itself")
        if message.last < self._number - len(self._unconfirmed):
            raise SessionLost("the server has forgotten what it was sent")
        for each in self._unconfirmed:
            if each.number > message.last:
                self.sent += frames.send(self._connection, each)
        return message
