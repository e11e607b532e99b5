"""Around every request: the token, time limits, status codes of errors, counts, and no stack trace for the client."""

import asyncio
import contextlib
import hmac
import logging
import time

from fastapi.responses import JSONResponse
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kedge.errors import KedgeError
from kedge.serving.batcher import Busy
from kedge.serving.bodies import Refused
from kedge.serving.service import Service

LINGER = 2.0  # seconds, and
LINGER_BYTES = 100_000_000  # that the rest of a body is read for
OPEN = ("/", "/healthz", "/readyz", "/openapi.json")  # need no token; the page takes it from its address
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

        async def discard() -> None:
            """Read the rest of the body, for a while, before it is answered.

            Many clients read nothing before they have sent all, and closing a connection with unread bytes resets it,
            so that the answer is lost. A client that expects to be told to continue has sent none.
            """
            left = 0 if b"expect" in headers else LINGER_BYTES
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LINGER):
                    while left > 0 and not arrived:
                        left -= len((await watched()).get("body", b""))

        async def counted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-content-type-options", b"nosniff")]
                await discard()
            await send(message)

        try:
            async with asyncio.timeout(self.settings.timeout):
                if path not in OPEN and not self._authorized(headers.get(b"authorization", b"")):
                    raise Refused(401, "send the token as Authorization: Bearer TOKEN")
                await self.app(scope, watched, counted)
        except Exception as error:
            answer = self._answer_to(error, scope)
            if status == 0:
                await answer(scope, watched, counted)
        if path.startswith("/v1/"):
            self.service.metrics.requests.labels(str(status)).inc()
            self.service.metrics.latency.observe(time.perf_counter() - started)

    def _authorized(self, given: bytes) -> bool:
        if self.settings.token is None:
            return True
        scheme, _, token = given.partition(b" ")
        return scheme.lower() == b"bearer" and hmac.compare_digest(token.strip(b" "), self.settings.token.encode())

    def _answer_to(self, error: Exception, scope: Scope) -> JSONResponse:
        """The answer to a request that raised an error."""
        headers = {}
        if isinstance(error, Refused):
            code, detail = error.code, error.detail
            if code == 408:
                headers["Connection"] = "close"  # the rest of it may never arrive
            if code == 401:
                headers["WWW-Authenticate"] = "Bearer"
        elif isinstance(error, Busy):
            code, detail, headers["Retry-After"] = 503, f"{error}; try again", "1"
        elif isinstance(error, KedgeError):
            code, detail = 400, str(error)
        elif isinstance(error, TimeoutError):
            code, detail = 504, f"no answer within {self.settings.timeout:g} seconds"
        elif isinstance(error, ClientDisconnect):  # nobody reads the answer; the code is for the counts, as in nginx
            code, detail = 499, "the client disconnected"
        else:
            log.error("no answer to %a %.200a", scope["method"], scope["path"], exc_info=error)
            code, detail = 500, "the service failed to answer; see its log"
        return JSONResponse({"detail": detail}, code, headers=headers)
