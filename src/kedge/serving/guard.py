"""Around every request: the token, time limits, counts, and no stack trace for the client."""

import asyncio
import contextlib
import hmac
import logging
import time
from collections.abc import Callable

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
LINGER = 2.0  # seconds, and
LINGER_BYTES = 100_000_000  # that the rest of a body is read for
OPEN = ("/", "/healthz", "/readyz", "/openapi.json")  # need no token: the page itself asks for it
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
        started, status, arrived = time.perf_counter(), 0, False
        path = scope["path"].removeprefix(scope.get("root_path", ""))  # if it is mounted in another application
        headers = dict(scope["headers"])

        async def watched() -> Message:
            nonlocal arrived
            message = await receive()
            arrived = not message.get("more_body", False)
            return message

        async def counted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-content-type-options", b"nosniff")]
                if b"expect" not in headers:  # such a client sends its body only if it is told to
                    await self._discard(lambda: arrived, watched)
            await send(message)

        problem = None
        try:
            async with asyncio.timeout(self.settings.timeout):
                if path in OPEN or self._authorized(headers.get(b"authorization", b"")):
                    await self.app(scope, watched, counted)
                else:
                    detail = "send the token as Authorization: Bearer TOKEN"
                    problem = _problem(401, detail, {"WWW-Authenticate": "Bearer"})
        except TimeoutError:
            problem = _problem(504, f"no answer within {self.settings.timeout:g} seconds")
        except Exception:  # for the log, not for the client
            log.exception("no answer to %a %.200a", scope["method"], scope["path"])
            problem = _problem(500, "the service failed to answer; see its log")
        if problem is not None and status == 0:
            await problem(scope, watched, counted)
        if path.startswith("/v1/"):
            self.service.metrics.requests.labels(str(status)).inc()
            self.service.metrics.latency.observe(time.perf_counter() - started)

    def _authorized(self, given: bytes) -> bool:
        if self.settings.token is None:
            return True
        scheme, _, token = given.partition(b" ")
        return scheme.lower() == b"bearer" and hmac.compare_digest(token.strip(b" "), self.settings.token.encode())

    async def _discard(self, arrived: Callable[[], bool], receive: Receive) -> None:
        """Read the rest of a body before it is answered.

        Many clients read nothing before they have sent all, and closing a connection with unread bytes resets it, so
        that the answer is lost.
        """
        left = LINGER_BYTES
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LINGER):
                while left > 0 and not arrived():
                    left -= len((await receive()).get("body", b""))


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
