"""The application: its routes, and the schema of requests and responses."""

import contextlib
from collections.abc import AsyncIterator
from importlib.metadata import version
from importlib.resources import files
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response
from pydantic import BaseModel, Field

from kedge.detectors import Detector
from kedge.serving.explain import Gallery, finite_or_none
from kedge.serving.guard import Guard
from kedge.serving.service import Service
from kedge.serving.settings import Settings

INLINE = "style-src 'unsafe-inline'; script-src 'unsafe-inline'"
ELSEWHERE = "frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
POLICY = f"default-src 'none'; {INLINE}; img-src data: blob:; connect-src 'self' data:; {ELSEWHERE}"


class ResultRow(BaseModel):
    """The result for one image, with the keys of `Detection.to_rows`; all are null but name and error if it has one."""

    name: str = Field(description="Its place in the request, as images[0]; errors use the same name.")
    error: str | None = Field(description="Why this image has no result; null if it has one.")
    label: int | None = Field(description="Number of the predicted class.")
    class_: str | None = Field(alias="class", description="Name of the predicted class, if classes have names.")
    probability: float | None = Field(description="Calibrated probability of the predicted class.")
    tau: float | None = Field(description="Disagreement between the anchors, for methods that have anchors.")
    score: float | None = Field(description="Larger means further out of distribution.")
    p_value: float | None = Field(description="Share of in-distribution images that would score at least this high.")
    is_ood: bool | None = Field(description="Whether the image is flagged as out of distribution.")
    reason: str | None = Field(description="Why it is flagged, in a few words; null if it is not.")


class ScoreResponse(BaseModel):
    """One result per image, in order."""

    results: list[ResultRow]


class Info(BaseModel):
    """The detector."""

    method: str
    classes: list[str]
    input: list[int]
    alpha: float = Field(description="The largest share of in-distribution images that is flagged.")
    threshold: float | None = Field(description="Scores above it are flagged; null if none ever is.")
    calibration_images: int
    passes_per_image: int
    version: str


class Problem(BaseModel):
    """Why there is no result."""

    detail: str


_BINARY, _TEXT = {"type": "string", "format": "binary"}, {"type": "string"}
BODY: dict[str, Any] = {
    "required": True,
    "content": {
        "image/*": {"schema": _BINARY},
        "multipart/form-data": {
            "schema": {"type": "object", "properties": {"images": {"type": "array", "items": _BINARY}}}
        },
        "application/json": {
            "schema": {
                "oneOf": [
                    {"type": "object", "required": [key], "properties": {key: schema}}
                    for key, schema in (("image", _TEXT), ("images", {"type": "array", "items": _TEXT}))
                ]
            },
            "example": {"images": ["iVBORw0KGgo..."]},
        },
    },
}


def create_app(detector: Detector, settings: Settings | None = None, *, gallery: Gallery | None = None) -> FastAPI:
    """The service of a calibrated detector as an ASGI application, by itself or mounted in another.

    A server ends it through ASGI's lifespan, once all accepted requests are answered; if it is mounted, it ends with
    the process.

    Args:
        detector: Fitted and calibrated.
        settings: The limits of the service.
        gallery: Images that the page may show: the nearest training images, and images to try.
    """
    service = Service(detector, settings or Settings(), gallery)
    background = service.explainer.background()

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await service.stop()

    app = FastAPI(
        title="kedge",
        version=version("kedge"),
        description="Classifies images and flags those that are out of distribution.",
        lifespan=lifespan,
        docs_url=None,  # its page would load scripts from elsewhere
        redoc_url=None,
        redirect_slashes=False,  # an unknown address is 404; a redirection would go where the client chooses
    )
    app.state.service = service
    _add_routes(app, service, background)
    app.add_middleware(Guard, service=service)
    return app


def _add_routes(app: FastAPI, service: Service, background: dict[str, Any]) -> None:
    problems: dict[int | str, dict[str, Any]] = {
        code: {"model": Problem} for code in (400, 401, 408, 413, 415, 422, 503, 504)
    }

    @app.post("/v1/score", response_model=ScoreResponse, responses=problems, openapi_extra={"requestBody": BODY})
    async def score(request: Request) -> Response:
        """Classify one or several images and flag those that are out of distribution.

        Each image of a form or of JSON is answered by itself: one that cannot be read has an `error` in its result, and
        the status is 200. If the body itself is the image and cannot be read, the status is 400.
        """
        return JSONResponse({"results": await service.score(request)})

    @app.post("/v1/explain", include_in_schema=False)
    async def explain(request: Request) -> Response:
        return JSONResponse(await service.explain(request))

    @app.get("/v1/background", include_in_schema=False)
    async def page_background() -> dict[str, Any]:
        return background

    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        text = files("kedge.serving").joinpath("page.html").read_text(encoding="utf-8")
        return HTMLResponse(text, headers={"Content-Security-Policy": POLICY})

    @app.get("/v1/info", response_model=Info)
    async def info() -> dict[str, Any]:
        """Describe the detector."""
        calibration = service.detector.calibration
        assert calibration is not None
        return {
            "method": service.detector.name,
            "classes": list(service.detector.classes),
            "input": list(service.preprocess.shape),
            "alpha": calibration.alpha,
            "threshold": finite_or_none(calibration.threshold),
            "calibration_images": len(calibration.scores),
            "passes_per_image": service.detector.cost.forward,
            "version": version("kedge"),
        }

    @app.get("/healthz")
    async def healthz() -> dict[str, str]:
        """Whether the process is alive."""
        return {"status": "alive"}

    @app.get("/readyz", responses={503: {"model": Problem}})
    async def readyz() -> Response:
        """Whether the service accepts requests."""
        ready = service.ready
        return JSONResponse({"status": "ready" if ready else "full"}, 200 if ready else 503)

    @app.get("/metrics", include_in_schema=False)
    async def metrics() -> Response:
        service.metrics.queue.set(service.batcher.queued)
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4")
