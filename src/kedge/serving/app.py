"""The application: what each address answers."""

import asyncio
import contextlib
import hmac
import json
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from importlib.resources import files
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response
from starlette.datastructures import Headers, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from torch import Tensor

from kedge.detectors import Detector
from kedge.errors import InputError, KedgeError, NotReadyError
from kedge.serving.batcher import Batcher, Busy
from kedge.serving.decode import decode, from_base64
from kedge.serving.explain import address, background, by_anchor
from kedge.serving.metrics import Metrics
from kedge.serving.schema import BODY, Answer, Info, Problem
from kedge.serving.settings import Settings

RETRY_AFTER = 1  # seconds
log = logging.getLogger(__name__)
OPEN = ("/", "/healthz", "/readyz")  # without a token: the page asks for it


class Refused(Exception):  # noqa: N818 -- an answer, not a fault
    """A request that gets an answer of its own."""

    def __init__(self, code: int, detail: str, headers: dict[str, str] | None = None) -> None:
        self.code, self.detail, self.headers = code, detail, headers or {}


class Service:
    """A detector at work: decodes, batches, scores and counts."""

    def __init__(self, detector: Detector, settings: Settings) -> None:
        if detector.preprocess is None or detector.calibration is None:
            raise NotReadyError("the detector has no threshold yet: call calibrate(held_out) before it is served")
        self.detector, self.settings = detector, settings
        self.preprocess = detector.preprocess
        self.metrics = Metrics(detector.calibration.scores)
        self.readers = ThreadPoolExecutor(settings.readers, thread_name_prefix="kedge-reader")
        self.batcher: Batcher | None = None

    async def start(self) -> None:
        """Begin to take requests."""
        limits = self.settings
        self.batcher = Batcher(
            self._run, max_batch=limits.max_batch, max_delay=limits.max_delay, max_queue=limits.max_queue
        )
        await self.batcher.start()

    async def stop(self) -> None:
        """Finish what was taken, and end."""
        if self.batcher is not None:
            await self.batcher.stop()
        self.readers.shutdown()

    @property
    def ready(self) -> bool:
        """Whether there is room for a request."""
        return self.batcher is not None and self.batcher.queued < self.settings.max_queue

    async def score(self, given: Sequence[bytes]) -> list[dict[str, Any]]:
        """An answer for each image."""
        return await self._submit(await self._decode(given))

    async def explain(self, file: bytes) -> dict[str, Any]:
        """An answer for one image, and what each anchor makes of it."""
        (image,) = await self._decode([file])
        (result,) = await self._submit([image])
        by = await asyncio.get_running_loop().run_in_executor(self.readers, by_anchor, self.detector, image)
        return {"result": result, "hypotheses": by, "image": address(image)}

    async def _decode(self, given: Sequence[bytes]) -> list[Tensor]:
        if not given:
            raise InputError("images must hold at least one image; got none")
        if len(given) > self.settings.max_images:
            raise Refused(413, f"images must be at most {self.settings.max_images}; got {len(given)}")
        assert self.batcher is not None
        if self.batcher.queued + len(given) > self.settings.max_queue:  # before the work of decoding them
            raise Busy("the queue is full")
        loop = asyncio.get_running_loop()
        reads = [
            loop.run_in_executor(self.readers, decode, data, place, self.preprocess, self.settings.max_pixels)
            for place, data in enumerate(given)
        ]
        return list(await asyncio.gather(*reads))

    async def _submit(self, images: Sequence[Tensor]) -> list[dict[str, Any]]:
        assert self.batcher is not None
        return await self.batcher.submit(images)

    def _run(self, images: Tensor) -> list[dict[str, Any]]:
        said = self.detector(images, batch_size=len(images))
        self.metrics.scored(said.score.tolist(), int(said.is_ood.sum()))
        classes, answers = self.detector.classes, []
        for place in range(len(said)):
            label = int(said.label[place])
            answers.append(
                {
                    "label": label,
                    "name": classes[label] if label < len(classes) else None,
                    "probability": float(said.probability[place, label]),
                    "score": float(said.score[place]),
                    "temperature": None if said.temperature is None else float(said.temperature[place]),
                    "p_value": float(said.p_value[place]),
                    "is_ood": bool(said.is_ood[place]),
                }
            )
        return answers


def create_app(detector: Detector, settings: Settings | None = None) -> FastAPI:
    """The service of a calibrated detector as an ASGI application.

    Args:
        detector: Fitted and calibrated.
        settings: Its limits.
    """
    service = Service(detector, settings or Settings())

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await service.start()
        yield
        await service.stop()

    app = FastAPI(
        title="kedge",
        version=version("kedge"),
        description="What is this image, and is it anything like what the network has learned?",
        lifespan=lifespan,
    )
    app.state.service = service
    _add_routes(app, service)
    _add_guards(app, service)
    return app


def _add_routes(app: FastAPI, service: Service) -> None:
    problems: dict[int | str, dict[str, Any]] = {
        code: {"model": Problem} for code in (400, 401, 408, 413, 415, 422, 503, 504)
    }

    @app.post("/v1/score", response_model=Answer, responses=problems, openapi_extra={"requestBody": BODY})
    async def score(request: Request) -> dict[str, Any]:
        """Classify one image or several, and say which of them are out of distribution."""
        images = await _images(request, service.settings)
        return {"results": await service.score(images)}

    @app.post("/v1/explain", include_in_schema=False)
    async def explain(request: Request) -> dict[str, Any]:
        images = await _images(request, service.settings)
        if len(images) != 1:
            raise Refused(422, f"one image at a time is explained; got {len(images)}")
        return await service.explain(images[0])

    @app.get("/v1/background", include_in_schema=False)
    async def behind() -> dict[str, Any]:
        return background(service.detector)

    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        text = files("kedge.serving").joinpath("page.html").read_text(encoding="utf-8")
        policy = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data: blob:; "
        return HTMLResponse(text, headers={"Content-Security-Policy": policy + "connect-src 'self' data:"})

    @app.get("/v1/info", response_model=Info)
    async def info() -> dict[str, Any]:
        """What the detector is."""
        known = service.detector.calibration
        assert known is not None
        return {
            "method": service.detector.name,
            "classes": list(service.detector.classes),
            "input": list(service.preprocess.shape),
            "accepts": known.tpr,
            "threshold": known.threshold,
            "calibration_images": len(known.scores),
            "passes_per_image": service.detector.cost.forward,
            "version": version("kedge"),
        }

    @app.get("/healthz")
    async def healthz() -> dict[str, str]:
        """Whether the process is alive."""
        return {"status": "alive"}

    @app.get("/readyz", responses={503: {"model": Problem}})
    async def readyz() -> Response:
        """Whether it takes requests."""
        ready = service.ready
        return JSONResponse({"status": "ready" if ready else "full"}, 200 if ready else 503)

    @app.get("/metrics", include_in_schema=False)
    async def metrics() -> Response:
        service.metrics.queue.set(0 if service.batcher is None else service.batcher.queued)
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4")


def _add_guards(app: FastAPI, service: Service) -> None:
    """Tokens, time limits, counts, and an answer without a stack trace to whatever goes wrong."""
    settings = service.settings

    @app.middleware("http")
    async def guard(request: Request, call_next: Any) -> Response:
        started = time.perf_counter()
        response = await answer(request, call_next)
        if request.url.path.startswith("/v1/"):
            service.metrics.requests.labels(str(response.status_code)).inc()
            service.metrics.latency.observe(time.perf_counter() - started)
        return response

    async def answer(request: Request, call_next: Any) -> Response:
        if settings.token is not None and request.url.path not in OPEN:
            given = request.headers.get("authorization", "")
            if not hmac.compare_digest(given.encode(), f"Bearer {settings.token}".encode()):
                return _problem(401, "send the token as Authorization: Bearer TOKEN", {"WWW-Authenticate": "Bearer"})
        try:
            return await asyncio.wait_for(call_next(request), settings.timeout)
        except TimeoutError:
            return _problem(504, f"no answer within {settings.timeout:g} seconds")
        except Exception:  # for the log, not for the client
            log.exception("no answer to %s %s", request.method, request.url.path)
            return _problem(500, "the service failed to answer; its log says why")

    @app.exception_handler(Refused)
    async def refused(_: Request, error: Refused) -> Response:
        return _problem(error.code, error.detail, error.headers)

    @app.exception_handler(Busy)
    async def busy(_: Request, error: Busy) -> Response:
        return _problem(503, "the queue is full; try again", {"Retry-After": str(RETRY_AFTER)})

    @app.exception_handler(KedgeError)
    async def wrong(_: Request, error: KedgeError) -> Response:
        return _problem(400, str(error))


def _problem(code: int, detail: str, headers: dict[str, str] | None = None) -> Response:
    return JSONResponse({"detail": detail}, code, headers=headers)


async def _images(request: Request, settings: Settings) -> list[bytes]:
    """The image files in a request: its body itself, the parts of a form, or base64 in JSON."""
    body = await _body(request, settings)
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind == "application/json":
        return _from_json(body)
    if kind == "multipart/form-data":
        return await _from_form(request.headers, body, settings)
    if kind.startswith("image/") or kind == "application/octet-stream":
        return [body]
    raise Refused(415, f"content-type must be image/*, multipart/form-data or application/json; got {kind or 'none'}")


async def _body(request: Request, settings: Settings) -> bytes:
    """The whole body, if it is not too long and comes in time."""
    too_long = Refused(413, f"a request must have at most {settings.max_bytes:,} bytes")
    length = request.headers.get("content-length", "")
    if length.isdigit() and int(length) > settings.max_bytes:
        raise too_long

    async def read() -> bytes:
        held = bytearray()
        async for chunk in request.stream():
            held += chunk
            if len(held) > settings.max_bytes:
                raise too_long
        return bytes(held)

    try:
        return await asyncio.wait_for(read(), settings.timeout / 2)
    except TimeoutError as error:
        raise Refused(408, f"the request did not arrive within {settings.timeout / 2:g} seconds") from error


def _from_json(body: bytes) -> list[bytes]:
    try:
        given = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise Refused(422, "the body must be JSON") from error
    if not isinstance(given, dict) or len(given.keys() & {"image", "images"}) != 1:
        raise Refused(422, 'the body must be {"image": base64} or {"images": [base64, ...]}')
    images = [given["image"]] if "image" in given else given["images"]
    if not isinstance(images, list):
        raise Refused(422, f"images must be a list of base64 texts; got {type(images).__name__}")
    return [from_base64(text, place) for place, text in enumerate(images)]


async def _from_form(headers: Headers, body: bytes, settings: Settings) -> list[bytes]:
    async def stream() -> AsyncGenerator[bytes, None]:
        yield body

    parser = MultiPartParser(headers, stream(), max_files=settings.max_images, max_fields=settings.max_images)
    try:
        form = await parser.parse()
    except (MultiPartException, KeyError, ValueError, AssertionError) as error:
        detail = getattr(error, "message", "")
        code = 413 if "Too many" in detail else 422
        raise Refused(code, f"the form cannot be read: {detail or 'no boundary'}") from error
    try:
        uploads = [part for _, part in form.multi_items() if isinstance(part, UploadFile)]
        return [await upload.read() for upload in uploads]
    finally:
        await form.close()
