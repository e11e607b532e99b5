"""The server: uvicorn, with limits on its connections, its patience and its log."""

import asyncio
import contextlib
import ctypes
import logging
import re
import socket
import time
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from kedge.serving.settings import Settings

QUEUE = 1024  # connections that the system holds until they are accepted
FILES = 64  # descriptors for everything but connections
LINES = 10  # that one statement may log in a minute
LOGGERS = ("asyncio", "uvicorn.error", "kedge.serving.guard")


class Connections(ServerState):
    """The open connections of a server.

    Args:
        limit: Connections that may be open. For a further one, the one that waits for its client longest is cut.
        patience: Seconds that a connection may wait for its client: for a request, for the rest of one, or for its
            answer to be read.
    """

    def __init__(self, limit: int, patience: float) -> None:
        super().__init__()
        self.limit, self.patience = limit, patience
        self.connections: set[Connection] = set()  # type: ignore[assignment]

    def make_room(self) -> None:
        """Cut a connection if there are too many."""
        if len(self.connections) > self.limit:
            waiting = (each for each in self.connections if not each.at_work())
            min(waiting, key=lambda each: each.since).cut()  # the newest at least has no request yet

    async def watch(self) -> None:
        """Cut the connections that wait too long, for ever."""
        while True:
            await asyncio.sleep(min(1.0, self.patience / 4))
            now = time.monotonic()
            for each in [each for each in self.connections if each.waited(now) > self.patience]:
                each.cut()


class Connection(H11Protocol):
    """uvicorn's protocol, which by itself waits for ever for a request and for its answer to be read."""

    server_state: Connections
    _stage: Any = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Accept a connection."""
        super().connection_made(transport)
        self.since = time.monotonic()  # when it began to wait for its client
        self.server_state.make_room()

    def at_work(self) -> bool:
        """Whether the service computes an answer, for a client that has sent nothing more and reads what it is sent."""
        cycle, more = self.cycle, self.conn.trailing_data[0]
        return cycle is not None and not (cycle.more_body or cycle.response_complete or self.flow.write_paused or more)

    def waited(self, now: float) -> float:
        """For how long it has waited for its client without an event: a request, the end of one, or of an answer."""
        stage = self.cycle and (self.cycle, self.cycle.more_body, self.cycle.response_complete)
        if self.at_work() or stage != self._stage:
            self._stage, self.since = stage, now
        return now - self.since

    def cut(self) -> None:
        """Close the connection, also if data is left to be sent."""
        self.connections.discard(self)
        self.transport.abort()


class Server(uvicorn.Server):
    """The server of an application that `kedge.serving.create_app` returned."""

    server_state: Connections

    def __init__(self, app: FastAPI, settings: Settings) -> None:
        files = _max_files()
        at_once = max(1, min(128, files // 16))  # connections that asyncio accepts at a time
        # Up to four times as many are accepted before the first of them counts as open.
        limit = max(1, min(settings.max_connections, files - FILES - 4 * at_once))
        end = int(settings.timeout) + 1
        super().__init__(
            uvicorn.Config(
                app, http=Connection, ws="none", log_level="warning", backlog=at_once, timeout_graceful_shutdown=end
            )
        )
        self.server_state = Connections(limit, settings.timeout)

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve until a signal comes."""
        _quiet_libtiff()
        sparing = Sparing()
        for name in LOGGERS:
            logging.getLogger(name).addFilter(sparing)
        try:
            super().run(sockets)
        finally:
            for name in LOGGERS:
                logging.getLogger(name).removeFilter(sparing)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to serve."""
        await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(QUEUE)
        self._watching = asyncio.create_task(self.server_state.watch())


def _max_files() -> int:
    """The number of files that this process may open."""
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return 1 << 16
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return 1 << 16 if files == resource.RLIM_INFINITY else files


def _quiet_libtiff() -> None:
    """Keep Pillow's libtiff from writing lines to stderr for everything that is wrong with a file."""
    with contextlib.suppress(OSError, AttributeError):
        for path in set(re.findall(r"/\S*libtiff\S*", Path("/proc/self/maps").read_text())):
            library = ctypes.CDLL(path)
            library.TIFFSetErrorHandler(None)
            library.TIFFSetWarningHandler(None)


class Sparing(logging.Filter):
    """Passes a few lines a minute from each statement that logs; the next one says how many were left out."""

    def __init__(self) -> None:
        super().__init__()
        self._lines: dict[tuple[str, int], tuple[float, int]] = {}  # by statement: begin of its minute, and count

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether a line is logged."""
        statement, now = (record.name, record.lineno), time.monotonic()
        begin, count = self._lines.get(statement, (now, 0))
        if now - begin > 60:
            if count > LINES:
                record.msg = f"{record.msg} ({count - LINES} more like it before)"
            begin, count = now, 0
        self._lines[statement] = begin, count + 1
        return count < LINES
