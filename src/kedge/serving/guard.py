"""Around every answer: the token, the time limit, the counts, and no stack trace for whatever goes wrong."""

import asyncio
import hmac
import logging
import time

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kedge.errors import KedgeError
from kedge.serving.batcher import Busy
from kedge.serving.bodies import Refused
from kedge.serving.service import Service

RETRY_AFTER = 1  # seconds
GONE = 499  # for the counts, as nginx has it: the client went away, and nobody reads the answer
OPEN = ("/", "/healthz", "/readyz", "/docs", "/openapi.json")  # without a token: the page asks for it
log = logging.getLogger(__name__)


class Guard:
    """ASGI middleware; Starlette's own for functions would cost each request a task and two queues.

    Args:
        app: What it stands before.
        service: Whose limits hold.
    """

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self.app, self.service, self.settings = app, service, service.settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started, status = time.perf_counter(), 0
        path = scope["path"].removeprefix(scope.get("root_path", ""))  # where it is mounted in another application

        async def counted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        problem = None
        try:
            async with asyncio.timeout(self.settings.timeout):
                if path in OPEN or self._known(scope):
                    await self.app(scope, receive, counted)
                else:
                    detail = "send the token as Authorization: Bearer TOKEN"
                    problem = _problem(401, detail, {"WWW-Authenticate": "Bearer"})
        except TimeoutError:
            problem = _problem(504, f"no answer within {self.settings.timeout:g} seconds")
        except Exception:  # for the log, not for the client
            log.exception("no answer to %s %s", scope["method"], scope["path"])
            problem = _problem(500, "the service failed to answer; its log says why")
        if problem is not None and status == 0:
            await problem(scope, receive, counted)
        if path.startswith("/v1/"):
            self.service.metrics.requests.labels(str(status)).inc()
            self.service.metrics.latency.observe(time.perf_counter() - started)

    def _known(self, scope: Scope) -> bool:
        """Whether the client may ask."""
        if self.settings.token is None:
            return True
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        return hmac.compare_digest(given, f"Bearer {self.settings.token}".encode())


def add_guards(app: FastAPI, service: Service) -> None:
    """Stand before an application, and say what becomes of the errors that it raises on purpose."""
    app.add_middleware(Guard, service=service)

    @app.exception_handler(Refused)
    async def refused(_: Request, error: Refused) -> Response:
        late = {"Connection": "close"} if error.code == 408 else None  # the rest of it may never come
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
