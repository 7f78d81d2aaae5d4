"""The device's end of the link: what a split model and its batches send to the server, and what comes back.

The device does not wait after messages that need no answer. All are numbered: when the connection breaks, it is
restored, the server says which message it processed last, and those after it are sent again. So none is lost or
processed twice, and answers continue where they were.

Axes: B rows, T tokens, D hidden size, n tokens on the link.
"""

import contextlib
import dataclasses
import secrets
import socket
import ssl
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from refusion_jax.cli.errors import Failure, UserError, first_line
from refusion_jax.split import frames
from refusion_jax.split.codec import CODECS
from refusion_jax.split.model import Packing

_RETRY = 0.2  # seconds between two attempts to connect


class SessionLost(Failure):
    """The server no longer has this session."""


class Link:
    """Sends a device's hidden states, and receives results. Nothing is raised inside a forward pass: see `check`."""

    def __init__(self, address: tuple[str, int], key: Path, stamp: bytes, layers: int, codec: str, patience: float):
        """Connects a device that has `layers` layers of the model with this stamp, see `parts.fingerprint`.

        The key is held by both sides; the codec, one of CODECS, is for both directions. A lost server must be back, and
        must answer, within `patience` seconds. UserError if it refuses this device, Failure if it cannot be reached.
        """
        self._address, self._tls, self._patience = address, frames.secured(key, is_server=False), patience
        self._hello = frames.Hello(frames.VERSION, stamp, layers, codec, session=b"", last=0)
        self._codec = CODECS[codec]
        self._connection: ssl.SSLSocket | None = None
        self.sent = self.received = 0  # bytes of frames
        self.round_trips = 0  # number of results that were waited for
        self.crossed = self.crossed_exactly = 0  # bytes of hidden states, as sent and in their own dtype
        self.begin()

    def begin(self) -> None:
        """Begins a new session; counts continue. Raises as the constructor."""
        self._hello = dataclasses.replace(self._hello, session=secrets.token_bytes(16))
        self._number = self._last = 0  # of the last message, and of the last result
        self._dealt = -1  # of the last message that the server is known to have processed; 0: it knows the session
        self._lost_at: float | None = None  # when the connection first broke since then
        self._unconfirmed: list[frames.Message] = []
        self._waiting: tuple | None = None  # a forward pass whose result may or may not be wanted
        self._given: np.ndarray | None = None  # numbers of given tokens of the rows that are being filled
        self.failure: Exception | None = None
        self.server: frames.Welcome = self._reach()

    def close(self) -> None:
        """Tells the server to forget this session, and closes the connection."""
        with contextlib.suppress(OSError):
            frames.send(self._connection, frames.Bye(self._number))
        self._connection.close()

    def check(self) -> None:
        """Raises what went wrong since the last call: forward passes since then are invalid."""
        if self.failure:
            raise self.failure

    def start(self, rows: int, capacity: int) -> None:
        self._attempt(self._tell, frames.Start(0, rows, capacity))

    def admit(self, given: np.ndarray) -> None:
        """The following forward passes fill new rows with `given` [R] tokens; 0: a row that will be dropped."""
        self._given = given
        self._attempt(self._tell, frames.Admit(0, len(given)))

    def place(self, rows: np.ndarray) -> None:
        self._attempt(self._tell, frames.Place(0, _int32(rows)))
        self._given = None

    def send(self, packing: Packing, *arrays: np.ndarray) -> np.ndarray:
        """Takes x, positions, length, visible, index and fed of a forward pass; `receive` needs the returned int32."""
        self._attempt(self._keep, packing, *map(np.asarray, arrays))
        return np.int32(0)

    def receive(self, shape: jax.ShapeDtypeStruct, packing: Packing, sent: np.ndarray) -> np.ndarray:
        """The inputs of the output head for the last forward pass, packed as x was; zeros once something went wrong."""
        out = self._attempt(self._fetch, shape, packing)
        return np.zeros(shape.shape, shape.dtype) if out is None else out

    def measure(self) -> tuple[float, float]:
        """(seconds of the round trip of a few bytes, bytes per second of many)."""

        def probe(size: int) -> float:
            """Seconds until the server has received so many bytes, and an answer of as many has arrived."""
            began = time.perf_counter()
            frames.send(self._connection, frames.Probe(size, bytes(size)))
            frames.receive(self._connection)
            return time.perf_counter() - began

        rtt, size = min(probe(1) for _ in range(5)), 1 << 12
        while (took := probe(size)) < max(4 * rtt, 0.2) and size < 1 << 24:
            size *= 2
        return rtt, float(np.clip(2 * size / max(took - rtt, 1e-6), 1.0, 1e12))

    def _attempt(self, function: Callable, *arguments: Any) -> Any:
        """Calls a function, unless something went wrong before: an exception is kept for `check`."""
        if not self.failure:
            try:
                return function(*arguments)
            except Exception as error:  # noqa: BLE001  raising inside a program would leave JAX in an unknown state
                self.failure = error
        return None

    def _keep(self, *forward: Any) -> None:
        """Keeps a forward pass until it is known whether its result is wanted."""
        self._flush()
        self._waiting = forward

    def _tell(self, message: frames.Message) -> None:
        self._flush()
        self._post(message)

    def _fetch(self, shape: jax.ShapeDtypeStruct, packing: Packing) -> np.ndarray:
        *_, index, fed = self._waiting
        result = self._result(self._flush(is_wanted=True))
        self.round_trips += 1
        is_fed = np.arange(packing.width)[None] < fed[:, None]
        out = np.zeros(shape.shape, shape.dtype)
        x = self._codec.decode(result.tokens, is_fed.sum(), shape.shape[-1], shape.dtype)
        out[_packed(packing, index, is_fed)] = x
        self._count(result.tokens, x)
        return out

    def _flush(self, is_wanted: bool = False) -> int | None:
        """Sends the waiting forward pass, if there is one; returns its number."""
        if self._waiting is None:
            return None
        (packing, x, positions, length, visible, index, fed), self._waiting = self._waiting, None
        if not is_wanted and self._given is not None:
            fed = np.clip(self._given - length, 0, fed)  # the rest of a prompt's last chunk is padding
        is_fed = np.arange(packing.width)[None] < fed[:, None]
        x = x[_packed(packing, index, is_fed)]
        is_causal = np.array_equal(visible, np.broadcast_to(np.tri(packing.width, dtype=bool), visible.shape))
        content = self._codec.encode(x)
        self._count(content, x)
        forward = frames.Forward(
            number=0,
            wanted=is_wanted,
            **{name: getattr(packing, name) for name in ("width", "shards", "tile", "tiles")},
            fed=_int32(fed),
            length=_int32(length),
            positions=_int32(positions[is_fed]),
            visible=b"" if is_causal else np.packbits(visible).tobytes(),
            tokens=content,
        )
        return self._post(forward)

    def _count(self, content: bytes, x: np.ndarray) -> None:
        self.crossed += len(content)
        self.crossed_exactly += x.nbytes

    def _post(self, message: frames.Message) -> int:
        """Sends a message, and returns its number without waiting for an answer."""
        self._number += 1
        message = dataclasses.replace(message, number=self._number)
        self._unconfirmed.append(message)
        try:
            self.sent += frames.send(self._connection, message)
        except OSError:
            self._reach()
        return self._number

    def _result(self, number: int) -> frames.Result:
        """The result of a message; UserError if the server refuses to continue."""
        while True:
            try:
                message, size = frames.receive(self._connection)
            except OSError:
                self._reach()
                continue
            self.received += size
            if isinstance(message, frames.Refused):
                raise UserError(f"the server refuses to go on: {message.why}")
            if message.number == number:
                self._last = number
                self._goes_on(number)
                self._unconfirmed = [each for each in self._unconfirmed if each.number > number]
                return message

    def _reach(self) -> frames.Welcome:
        """Connects, again if necessary, and sends what the server has not processed.

        The patience counts from the first break since the server last made progress: a server that can be reached, but
        never answers, is lost, too.
        """
        self._lost_at = self._lost_at or time.monotonic()
        until, why = self._lost_at + (self._patience if self._connection else 0), None
        while True:
            if self._connection:
                self._connection.close()
            try:
                welcome = self._connect()
                if self._lost_at and time.monotonic() > until:
                    raise TimeoutError("no answer comes")
                return welcome
            except ssl.SSLCertVerificationError as error:
                raise UserError(f"the server has another --key, or a clock is wrong: {error.verify_message}") from error
            except (UserError, Failure):
                self._connection.close()
                raise
            except OSError as error:
                why = why or error
                if time.monotonic() > until:
                    where = "{}:{}".format(*self._address)
                    told = why.strerror or first_line(why)
                    raise Failure(f"the server at {where} cannot be reached: {told}") from error
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
        if message.last < self._number - len(self._unconfirmed):
            raise SessionLost("the server has forgotten what it was sent")
        self._goes_on(message.last)
        for each in self._unconfirmed:
            if each.number > message.last:
                self.sent += frames.send(self._connection, each)
        return message

    def _goes_on(self, dealt: int) -> None:
        """The server has processed the messages up to this one."""
        if dealt > self._dealt:
            self._dealt, self._lost_at = dealt, None


def _packed(packing: Packing, index: np.ndarray, is_fed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The indices of the fed tokens of each row in the packed array [shards, places, D]."""
    shard = np.arange(packing.rows) // (packing.rows // packing.shards)
    return np.broadcast_to(shard[:, None], is_fed.shape)[is_fed], index[is_fed]


def _int32(x: np.ndarray) -> bytes:
    return x.astype("<i4").tobytes()
