"""The server's end of the link: sessions of devices, and one thread that computes for all of them.

A session has the caches of the server's layers, and outlives its connection. Its messages are dealt with in the order
of their numbers; one that comes again is answered from memory.

Forwards of several devices that wait at the same time, in the same packing and with caches of the same size, run as one
batch: the weights are read once. Nothing waits for others to come.
"""

import contextlib
import dataclasses
import functools
import queue
import socket
import ssl
import threading
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from refusion_jax.cli.errors import UserError, first_line
from refusion_jax.model.key_values import KeyValues
from refusion_jax.model.transformer import Transformer
from refusion_jax.split import frames
from refusion_jax.split.codec import CODECS, Codec
from refusion_jax.split.model import Packing, Upper, part_of

_MOST_TOKENS = 1 << 20  # places of a forward
_MOST_ROWS = 1 << 12
_MOST_TOGETHER = 8  # batches that are computed at once
_MOST_CONNECTIONS = 64
_HANDSHAKE = 20  # seconds
_KEEP = 600  # seconds for which a session is kept without a connection


@dataclasses.dataclass
class Session:
    """What the server knows of a device."""

    upper: Upper
    codec: Codec
    layers: int
    last: int = 0  # number of the last message that was dealt with
    result: frames.Result | None = None
    batch: KeyValues | None = None
    new: KeyValues | None = None  # caches of rows that are being filled
    rows: int = 0
    capacity: int = 0
    cache_bytes: int = 0  # of the batch, and as much for rows that are being filled
    seen: float = 0.0  # time of the last message
    connection: socket.socket | None = None
    lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)


@dataclasses.dataclass
class _Job:
    session: Session
    packing: Packing
    arrays: tuple[np.ndarray, ...]
    done: threading.Event = dataclasses.field(default_factory=threading.Event)
    x: np.ndarray | None = None
    error: Exception | None = None

    @property
    def cache(self) -> KeyValues:
        return self.session.batch if self.session.new is None else self.session.new

    @property
    def kind(self) -> tuple:
        """Jobs of the same kind are computed together."""
        return id(self.session.upper), self.packing, jax.tree.leaves(self.cache)[0].shape


class Service:
    """Deals with the messages of all devices."""

    def __init__(self, model: Transformer, loaded: bytes, memory: int, measure: Callable[[Transformer], tuple]):
        """Computes in a thread of its own until the process ends.

        Args:
          model: the whole of it, with the precision of the server.
          loaded: `model.fingerprint` of the model as it was loaded.
          memory: bytes for the caches of all sessions.
          measure: of a part of the model, for devices that ask: see `choice.measure`.
        """
        self._model, self._stamp, self._memory, self._measure = model, loaded, memory, measure
        self._uppers: dict[int, Upper] = {}
        self._sessions: dict[bytes, Session] = {}
        self._lock, self._jobs, self._connections = threading.Lock(), queue.Queue(), 0
        self.together: list[int] = []  # of each computation: how many batches
        threading.Thread(target=self._compute, daemon=True).start()

    def listen(self, listening: socket.socket, tls: ssl.SSLContext) -> None:
        """Accepts devices until the socket is closed."""
        while True:
            try:
                plain, _ = listening.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(plain, tls), daemon=True).start()

    def _serve(self, plain: socket.socket, tls: ssl.SSLContext) -> None:
        with contextlib.suppress(OSError), plain:
            plain.settimeout(_HANDSHAKE)
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with tls.wrap_socket(plain, server_side=True) as connection, self._counted():
                self.talk(connection)

    def talk(self, connection: socket.socket) -> None:
        """One connection, to its end; whatever goes wrong ends this one alone."""
        with contextlib.suppress(OSError):
            try:
                self._converse(connection)
            except OSError:
                raise
            except Exception as error:  # noqa: BLE001  of this device alone
                kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
                frames.send(connection, frames.Refused(kind + first_line(error)))

    @contextlib.contextmanager
    def _counted(self):
        with self._lock:
            self._connections += 1
        try:
            if self._connections > _MOST_CONNECTIONS:
                raise ConnectionRefusedError
            yield
        finally:
            with self._lock:
                self._connections -= 1

    def _converse(self, connection: socket.socket) -> None:
        hello, _ = frames.receive(connection)
        if not isinstance(hello, frames.Hello) or len(hello.session) != 16:
            raise frames.FrameError("a device must introduce itself first")
        self._check(hello)
        connection.settimeout(None)
        if not hello.layers:
            self._be_measured(connection)
            return
        session = self._find(hello, connection)
        with session.lock:  # what the last connection has begun is finished
            frames.send(connection, frames.Welcome(session.last, 0.0, 0.0))
            if session.result and session.result.number > hello.last:
                frames.send(connection, session.result)
        while True:
            message, _ = frames.receive(connection)
            if isinstance(message, frames.Bye):
                with self._lock:
                    self._sessions.pop(hello.session, None)
                return
            with session.lock:
                self._deal(session, message)
                session.seen = time.monotonic()
                if isinstance(message, frames.Forward) and message.wanted and session.result.number == message.number:
                    frames.send(connection, session.result)

    def _check(self, hello: frames.Hello) -> None:
        if hello.version != frames.VERSION:
            raise UserError(f"it speaks version {hello.version}, the server {frames.VERSION}")
        if hello.stamp != self._stamp:
            raise UserError("it has another model")
        if hello.layers >= self._model.config.num_hidden_layers:
            raise UserError(f"--layers={hello.layers}: the model has {self._model.config.num_hidden_layers}")
        if hello.codec not in CODECS:
            raise UserError(f"--codec={hello.codec[:20]}: unknown")

    def _be_measured(self, connection: socket.socket) -> None:
        frames.send(connection, frames.Welcome(0, *self._measure(self._model)))
        while True:
            probe, _ = frames.receive(connection)
            if not isinstance(probe, frames.Probe) or probe.answer > frames.LARGEST // 2:
                raise frames.FrameError("this device only measures")
            frames.send(connection, frames.Probe(0, bytes(probe.answer)))

    def _find(self, hello: frames.Hello, connection: socket.socket) -> Session:
        """The session of a device, which has one connection at a time."""
        with self._lock:
            now = time.monotonic()
            for name in [name for name, each in self._sessions.items() if now - each.seen > _KEEP]:
                if not self._sessions[name].lock.locked():
                    del self._sessions[name]
            if hello.layers not in self._uppers:
                part = part_of(self._model, hello.layers, self._model.config.num_hidden_layers)
                self._uppers[hello.layers] = Upper(part)
            known = self._sessions.get(hello.session)
            if known is None:
                known = Session(self._uppers[hello.layers], CODECS[hello.codec], hello.layers)
                self._sessions[hello.session] = known
            if known.connection:
                known.connection.close()
            known.connection, known.seen = connection, now
            return known

    def _deal(self, session: Session, message: frames.Message) -> None:
        number = getattr(message, "number", None)
        if not isinstance(message, frames.Start | frames.Admit | frames.Place | frames.Forward):
            raise frames.FrameError("no message of a device")
        if number <= session.last:  # again, after the connection broke
            return
        if number != session.last + 1:
            raise frames.FrameError(f"message {number} after {session.last}")
        if isinstance(message, frames.Forward):
            x = self._forward(session, message)
            if message.wanted:
                session.result = frames.Result(number, session.codec.encode(x))
        elif isinstance(message, frames.Start):
            self._start(session, message)
        elif isinstance(message, frames.Admit):
            if not 0 < message.rows <= session.rows or message.source >= session.rows:
                raise frames.FrameError("rows that are not in the batch")
            session.new = session.upper.empty_cache(message.rows, session.capacity)
            if message.shared:
                at = message.source
                session.new = jax.tree.map(
                    lambda own, all: jnp.broadcast_to(all[:, at : at + 1], own.shape) + 0, session.new, session.batch
                )
        else:
            rows = np.frombuffer(message.rows, "<i4") if len(message.rows) % 4 == 0 else np.array([-1])
            if session.new is None or len(rows) != jax.tree.leaves(session.new)[0].shape[1] or np.any(rows < 0):
                raise frames.FrameError("rows that are not those that were filled")
            session.batch, session.new = _put(session.batch, session.new, rows), None
        session.last = number

    def _start(self, session: Session, message: frames.Start) -> None:
        if not (0 < message.rows <= _MOST_ROWS and 0 < message.capacity):
            raise frames.FrameError("a batch of impossible size")
        with self._lock:
            session.cache_bytes = 2 * session.upper.cache_bytes(message.rows, message.capacity)
            needed = sum(each.cache_bytes for each in self._sessions.values())
            if needed > self._memory:
                session.cache_bytes = 0
                raise UserError(f"the caches of all devices would take {needed / 2**30:.1f} GiB of --memory")
        session.rows, session.capacity = message.rows, message.capacity
        session.batch, session.new = session.upper.empty_cache(message.rows, message.capacity), None

    def _forward(self, session: Session, message: frames.Forward) -> np.ndarray:
        """What the output head reads of the fed tokens, [n, D], row by row; their keys and values are written."""
        if not session.rows:
            raise frames.FrameError("a forward without a batch")
        rows = (session.batch if session.new is None else session.new).keys
        B, T, D = jax.tree.leaves(rows)[0].shape[1], message.width, self._model.config.hidden_size
        packing = Packing(B, T, message.shards, message.tile, message.tiles)
        if not (0 < T and 0 < packing.shards and 0 < packing.tile and 0 < packing.tiles) or B % packing.shards:
            raise frames.FrameError("an impossible packing")
        if max(B * T, packing.shards * packing.tile * packing.tiles) > _MOST_TOKENS:
            raise frames.FrameError("a forward of too many tokens")
        fed, length = (_numbers(x, B, most) for x, most in ((message.fed, T), (message.length, session.capacity)))
        tiles = -(-fed // packing.tile)
        if np.any(tiles.reshape(packing.shards, -1).sum(axis=1) > packing.tiles):
            raise frames.FrameError("tokens that the packing has no place for")
        is_fed = np.arange(T)[None] < fed[:, None]
        x, positions = np.zeros((B, T, D), self._model.dtype), np.zeros((B, T), np.int32)
        positions[is_fed] = _numbers(message.positions, is_fed.sum(), 1 << 28)
        x[is_fed] = session.codec.decode(message.tokens, is_fed.sum(), D, self._model.dtype)
        visible = np.broadcast_to(np.tri(T, dtype=bool), (B, T, T))
        if message.visible:
            if len(message.visible) != -(-B * T * T // 8):
                raise frames.FrameError("a mask of another size")
            visible = np.unpackbits(np.frombuffer(message.visible, np.uint8), count=B * T * T) > 0
        job = _Job(session, packing, (x, positions, visible.reshape(B, T, T), length, fed))
        self._jobs.put(job)
        job.done.wait()
        if job.error:
            raise job.error
        return job.x[is_fed]

    def _compute(self) -> None:
        waiting: list[_Job] = []
        while True:
            if not waiting:
                waiting.append(self._jobs.get())
            with contextlib.suppress(queue.Empty):
                while True:
                    waiting.append(self._jobs.get_nowait())
            some = [job for job in waiting if job.kind == waiting[0].kind][:_MOST_TOGETHER]
            some = some[: 1 << (len(some).bit_length() - 1)]  # so many are compiled: 1, 2, 4, 8
            waiting = [job for job in waiting if job not in some]
            self._compute_together(some)

    def _compute_together(self, jobs: list[_Job]) -> None:
        self.together.append(len(jobs))
        try:
            caches, arrays = [job.cache for job in jobs], [job.arrays for job in jobs]
            found, caches = jobs[0].session.upper(jobs[0].packing, caches, arrays)
            for job, x, cache in zip(jobs, found, caches, strict=True):
                job.x = x
                name = "batch" if job.session.new is None else "new"
                setattr(job.session, name, cache)
        except Exception as error:  # noqa: BLE001  is told to the devices
            for job in jobs:
                job.error = error
        for job in jobs:
            job.done.set()


@functools.partial(jax.jit, donate_argnums=0)
def _put(batch: KeyValues, new: KeyValues, rows: jax.Array) -> KeyValues:
    return jax.tree.map(lambda all, own: all.at[:, rows].set(own, mode="drop"), batch, new)


def _numbers(content: bytes, count: int, most: int) -> np.ndarray:
    """So many int32, none below 0 or above `most`."""
    if len(content) != 4 * count:
        raise frames.FrameError("another number of tokens or rows")
    numbers = np.frombuffer(content, "<i4")
    if np.any((numbers < 0) | (numbers > most)):
        raise frames.FrameError("a number outside its limits")
    return numbers.astype(np.int32)
