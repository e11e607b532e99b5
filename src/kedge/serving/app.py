"""The application: what each address answers."""

import contextlib
from collections.abc import AsyncIterator
from importlib.metadata import version
from importlib.resources import files
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response

from kedge.detectors import Detector
from kedge.serving.bodies import Refused, images_of
from kedge.serving.explain import background, finite_or_none
from kedge.serving.guard import add_guards
from kedge.serving.schema import BODY, Answer, Info, Problem
from kedge.serving.service import Service
from kedge.serving.settings import Settings


def create_app(detector: Detector, settings: Settings | None = None) -> FastAPI:
    """The service of a calibrated detector as an ASGI application, by itself or mounted in another.

    It begins to work with the first image. Servers tell it by ASGI's lifespan when to finish what it took and end;
    another application does not pass that on, so that a mounted one ends with its process.

    Args:
        detector: Fitted and calibrated.
        settings: Its limits.
    """
    service = Service(detector, settings or Settings())

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await service.stop()

    app = FastAPI(
        title="kedge",
        version=version("kedge"),
        description="What is this image, and is it anything like what the network has learned?",
        lifespan=lifespan,
        redirect_slashes=False,  # an address that is not there is 404; a redirection would go where the client says
    )
    app.state.service = service
    _add_routes(app, service)
    add_guards(app, service)
    return app


def _add_routes(app: FastAPI, service: Service) -> None:
    problems: dict[int | str, dict[str, Any]] = {
        code: {"model": Problem} for code in (400, 401, 408, 413, 415, 422, 503, 504)
    }

    @app.post("/v1/score", response_model=Answer, responses=problems, openapi_extra={"requestBody": BODY})
    async def score(request: Request) -> Response:
        """Classify one image or several, and say which of them are out of distribution."""
        with service.room() as take:
            images = await images_of(request, service.settings, service.readers, take)
            return JSONResponse({"results": await service.score(images)})

    @app.post("/v1/explain", include_in_schema=False)
    async def explain(request: Request) -> Response:
        with service.room() as take:
            images = await images_of(request, service.settings, service.readers, take)
            if len(images) != 1:
                raise Refused(422, f"one image at a time is explained; got {len(images)}")
            return JSONResponse(await service.explain(images[0]))

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
            "accepts": known.alpha,
            "threshold": finite_or_none(known.threshold),
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
        service.metrics.queue.set(service.batcher.queued)
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4")
