"""Connections that nothing comes of are closed: uvicorn itself waits for ever for the head of a request."""

import asyncio
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol


def impatient(seconds: float) -> type[asyncio.Protocol]:
    """Make uvicorn's protocol, for its option ``http``, with a time limit on everything between two requests.

    A connection is closed where it has no request under way for so long: none came, its head comes in drops, or bytes
    keep coming that belong to no request, as the rest of one that was refused. Idle connections that had a request are
    uvicorn's own to close.

    Args:
        seconds: Until a request must have begun.
    """

    class Impatient(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
        _limit: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._wait()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self._under_way():
                self._stop_waiting()
            elif self._limit is None:
                self._wait()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_waiting()
            super().connection_lost(exc)

        def _under_way(self) -> bool:
            return self.cycle is not None and not self.cycle.response_complete

        def _wait(self) -> None:
            self._limit = self.loop.call_later(seconds, self._give_up)

        def _stop_waiting(self) -> None:
            if self._limit is not None:
                self._limit.cancel()
                self._limit = None

        def _give_up(self) -> None:
            self._limit = None
            if not self._under_way():
                self.transport.close()

    return Impatient
