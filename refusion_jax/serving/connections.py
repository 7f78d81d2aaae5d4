"""The HTTP server. Its connections close unless a request arrives in time: idle ones could lock everybody else out."""

import asyncio
import functools

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from refusion_jax.distributed.host import allow_open_files, return_freed_memory

_FILES = 1 << 16  # at most; three quarters of them for clients: others get status 503, which takes one, too
_GRACE = 60  # seconds to finish current answers when the server is asked to end
_IDLE = 75  # seconds that an idle connection is kept: longer than clients and proxies keep it, so that they close it


def make_server(app: ASGIApp) -> uvicorn.Server:
    """The server of an application, to be run on a listening socket."""
    config = uvicorn.Config(
        app,
        http=TimedConnection,
        ws="none",
        log_level="warning",
        access_log=False,
        server_header=False,
        limit_concurrency=allow_open_files(_FILES) * 3 // 4,
        timeout_keep_alive=_IDLE,
        timeout_graceful_shutdown=_GRACE,
        # Every 30 s. One heap for all threads would grow as little, but decodes at two thirds of the rate.
        callback_notify=functools.partial(asyncio.to_thread, return_freed_memory),
    )
    return uvicorn.Server(config)


class TimedConnection(H11Protocol):
    """uvicorn's connection, closed if a request is not complete in time; uvicorn itself waits forever.

    It uses h11 even if httptools is installed, with which uvicorn does not limit the size of a request's head.
    """

    seconds = 60.0  # from the connection, or from the first byte of a later request, to the last byte of its body

    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop()

    def _watch(self) -> None:
        cycle = self.cycle  # of the last request whose head has arrived
        if cycle and not cycle.more_body and not cycle.response_complete:  # the request is complete
            self._stop()
        elif self._timer is None:
            self._timer = self.loop.call_later(self.seconds, self.transport.close)

    def _stop(self) -> None:
        if self._timer:
            self._timer.cancel()
            self._timer = None
