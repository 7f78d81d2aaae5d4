"""The server's end of the link: connections of devices, and the sessions that they belong to."""

import contextlib
import socket
import ssl
import threading
import time

from refusion_jax.checkpoints.weights import Reader
from refusion_jax.cli.errors import UserError, first_line
from refusion_jax.model.shape import ModelConfig
from refusion_jax.split import frames
from refusion_jax.split.batching import Batches
from refusion_jax.split.choice import measure
from refusion_jax.split.codec import CODECS
from refusion_jax.split.model import Upper
from refusion_jax.split.parts import fingerprint, load_part
from refusion_jax.split.session import DeviceSession

_HANDSHAKE = 20  # seconds
_KEEP = 600  # seconds that a connection may be silent, and that a session without one is kept


class LayerService:
    """Serves all devices."""

    def __init__(self, read: Reader, config: ModelConfig, memory: int, *precision: str):
        """Loads nothing of the model before a device connects.

        The caches of all sessions may take `memory` bytes; the other arguments, of which `precision` is dtype, weights
        and cache, are as for `load_part`.
        """
        self._read, self._config, self._memory, self._precision = read, config, memory, precision
        self._layers, self._stamp = config.num_hidden_layers, fingerprint(read, config, precision[0])
        self._uppers: dict[int, Upper] = {}
        self._sessions: dict[bytes, DeviceSession] = {}
        self._lock, self._loading = threading.Lock(), threading.Lock()
        self._batches = Batches()

    def listen(self, listening: socket.socket, tls: ssl.SSLContext) -> None:
        while listening.fileno() >= 0:
            try:
                plain, _ = listening.accept()
            except OSError:  # no descriptor is left: silent connections are closed after _HANDSHAKE
                time.sleep(0.1)
                continue
            threading.Thread(target=self._serve, args=(plain, tls), daemon=True).start()

    def _serve(self, plain: socket.socket, tls: ssl.SSLContext) -> None:
        with contextlib.suppress(OSError), plain:
            plain.settimeout(_HANDSHAKE)
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with tls.wrap_socket(plain, server_side=True) as connection:
                self.talk(connection)

    def talk(self, connection: socket.socket) -> None:
        """Serves one connection to its end; any error ends only this one."""
        with contextlib.suppress(OSError):
            try:
                self._converse(connection)
            except OSError:
                raise
            except Exception as error:  # noqa: BLE001  affects only this device
                kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
                frames.send(connection, frames.Refused(kind + first_line(error)))

    def _converse(self, connection: socket.socket) -> None:
        hello, _ = frames.receive(connection)
        if hello.version != frames.VERSION:
            raise UserError(f"it speaks version {hello.version}, the server {frames.VERSION}")
        if hello.stamp != self._stamp:
            raise UserError("it has another model, or another --dtype")
        connection.settimeout(_KEEP)  # a device that lost power would otherwise keep its memory forever
        if not hello.layers:
            return self._be_measured(connection)
        session = self._find(hello, connection)
        try:
            self._serve_session(session, hello, connection)
        finally:
            with self._lock:
                if session.connection is connection:
                    session.connection, session.left_at = None, time.monotonic()

    def _serve_session(self, session: DeviceSession, hello: frames.Hello, connection: socket.socket) -> None:
        with session.lock:  # the last connection's work is finished
            frames.send(connection, frames.Welcome(session.last))
            if session.result and session.result.number > hello.last:
                frames.send(connection, session.result)
        while True:
            message, _ = frames.receive(connection)
            if isinstance(message, frames.Bye):
                with self._lock:
                    self._sessions.pop(hello.session, None)
                return
            with session.lock:
                if result := session.deal(message):
                    frames.send(connection, result)

    def _be_measured(self, connection: socket.socket) -> None:
        """Answers probes until the device takes its leave."""
        machine = measure(self._config, *self._precision)
        frames.send(connection, frames.Welcome(0, machine.fixed, machine.each))
        while isinstance(probe := frames.receive(connection)[0], frames.Probe):
            frames.send(connection, frames.Probe(0, bytes(probe.answer)))

    def _find(self, hello: frames.Hello, connection: socket.socket) -> DeviceSession:
        """The session of a device, which has one connection at a time."""
        with self._loading:
            upper = self._uppers.get(hello.layers)
            if upper is None:
                with self._lock:
                    used = [each.upper for each in self._sessions.values()]
                self._uppers = {at: each for at, each in self._uppers.items() if each in used}
                part = load_part(self._read, self._config, hello.layers, self._layers, *self._precision)
                upper = self._uppers[hello.layers] = Upper(part)
        with self._lock:
            for name in self._left():
                if time.monotonic() - self._sessions[name].left_at > _KEEP:
                    del self._sessions[name]
            new = DeviceSession(upper, CODECS[hello.codec], self._batches, self._reserve)
            session = self._sessions.setdefault(hello.session, new)
            if session.connection:  # its thread reads it, and closes it: a closed descriptor's number could be reused
                with contextlib.suppress(OSError):
                    socket.socket.shutdown(session.connection, socket.SHUT_RDWR)
            session.connection = connection
            return session

    def _left(self) -> list[bytes]:
        """The sessions without a connection, the oldest first; called under the lock."""
        return [name for name, each in self._sessions.items() if each.connection is None]

    def _reserve(self, session: DeviceSession, size: int) -> None:
        """Reserves `size` bytes for the caches of a session, in place of those that it has.

        Sessions without a connection make room: usually their devices were killed, and return with a new session.
        """
        with self._lock:
            others = (each for each in self._sessions.values() if each is not session)
            room = self._memory - size - sum(each.cache_bytes for each in others)
            left = self._left()
            while room < 0 and left:
                room += self._sessions.pop(left.pop(0)).cache_bytes
            if room < 0:
                wanted = f"{(self._memory - room) / 2**30:.3g} GiB of its --memory={self._memory / 2**30:.3g}"
                raise UserError(f"the caches of all devices would take {wanted}")
            session.cache_bytes = size
