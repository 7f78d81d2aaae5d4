"""HTTP connections that close unless a request arrives in time: idle ones could lock everybody else out."""

import asyncio

from uvicorn.protocols.http.h11_impl import H11Protocol


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
