"""Around every request: the token, time limits, counts, and no stack trace for the client."""

import asyncio
import hmac
import logging
import time
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kedge.errors import KedgeError
from kedge.serving.batcher import Busy
from kedge.serving.bodies import Refused
from kedge.serving.service import Service

RETRY_AFTER = 1  # seconds
GONE = 499  # for the counts, as in nginx: the client disconnected, and nobody reads the answer
OPEN = ("/", "/healthz", "/readyz", "/docs", "/openapi.json")  # need no token: the page itself asks for it
log = logging.getLogger(__name__)


class Guard:
    """ASGI middleware; Starlette's own for functions would cost each request a task and two queues."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self.app, self.service, self.settings = app, service, service.settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started, status = time.perf_counter(), 0
        path = scope["path"].removeprefix(scope.get("root_path", ""))  # if it is mounted in another application

        async def counted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        problem = None
        try:
            async with asyncio.timeout(self.settings.timeout):
                if path in OPEN or self._authorized(scope):
                    await self.app(scope, receive, counted)
                else:
                    detail = "send the token as Authorization: Bearer TOKEN"
                    problem = _problem(401, detail, {"WWW-Authenticate": "Bearer"})
        except TimeoutError:
            problem = _problem(504, f"no answer within {self.settings.timeout:g} seconds")
        except Exception:  # for the log, not for the client
            log.exception("no answer to %s %s", scope["method"], scope["path"])
            problem = _problem(500, "the service failed to answer; see its log")
        if problem is not None and status == 0:
            await problem(scope, receive, counted)
        if path.startswith("/v1/"):
            self.service.metrics.requests.labels(str(status)).inc()
            self.service.metrics.latency.observe(time.perf_counter() - started)

    def _authorized(self, scope: Scope) -> bool:
        if self.settings.token is None:
            return True
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        return hmac.compare_digest(given, f"Bearer {self.settings.token}".encode())


def add_guards(app: FastAPI, service: Service) -> None:
    """Put the middleware before an application, and map its deliberate errors to status codes."""
    app.add_middleware(Guard, service=service)

    @app.exception_handler(Refused)
    async def refused(_: Request, error: Refused) -> Response:
        late = {"Connection": "close"} if error.code == 408 else None  # the rest of it may never arrive
        return _problem(error.code, error.detail, late)

    @app.exception_handler(ClientDisconnect)
    async def gone(_: Request, error: ClientDisconnect) -> Response:
        return Response(status_code=GONE)

    @app.exception_handler(Busy)
    async def busy(_: Request, error: Busy) -> Response:
        return _problem(503, f"{error}; try again", {"Retry-After": str(RETRY_AFTER)})

    @app.exception_handler(KedgeError)
    async def wrong(_: Request, error: KedgeError) -> Response:
        return _problem(400, str(error))


def _problem(code: int, detail: str, headers: dict[str, str] | None = None) -> Response:
    return JSONResponse({"detail": detail}, code, headers=headers)


def impatient(seconds: float) -> type[asyncio.Protocol]:
    """The protocol of uvicorn, for its option ``http``, with a time limit on everything between two requests.

    uvicorn itself waits for ever for the head of a request. A connection is closed after this many seconds without a
    request in progress: none came, its head arrives in drops, or bytes arrive that belong to no request, such as the
    rest of a refused one. uvicorn closes idle connections that had a request.
    """
    from uvicorn.protocols.http.auto import AutoHTTPProtocol

    class Impatient(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
        _timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._start()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self._in_progress():
                self._stop()
            elif self._timer is None:
                self._start()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop()
            super().connection_lost(exc)

        def _in_progress(self) -> bool:
            return self.cycle is not None and not self.cycle.response_complete

        def _start(self) -> None:
            self._timer = self.loop.call_later(seconds, self._give_up)

        def _stop(self) -> None:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

        def _give_up(self) -> None:
            self._timer = None
            if not self._in_progress():
                self.transport.close()

    return Impatient
