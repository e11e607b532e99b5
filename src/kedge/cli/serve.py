"""``kedge serve``: a detector over HTTP."""

import contextlib
import signal
import socket
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from kedge.cli.options import DataDir, DetectorFile, Model, Threads
from kedge.cli.terminal import Console
from kedge.errors import InputError, NotReadyError
from kedge.threads import use_threads

if TYPE_CHECKING:
    from fastapi import FastAPI

    from kedge.serving import Settings


def serve(
    file: DetectorFile,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 admits other machines.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 for any free one.")] = 8000,
    token: Annotated[
        str | None, typer.Option(envvar="KEDGE_TOKEN", help="Bearer token that clients must send.")
    ] = None,
    max_batch: Annotated[int, typer.Option(min=1, help="Images in a batch of the network.")] = 64,
    max_delay: Annotated[
        float, typer.Option(min=0, max=10, help="Longest wait of an idle network for a fuller batch, in seconds.")
    ] = 0.005,
    max_queue: Annotated[int, typer.Option(min=1, help="Images that may wait; above it, 503.")] = 512,
    max_images: Annotated[int, typer.Option(min=1, help="Images in one request.")] = 64,
    max_bytes: Annotated[int, typer.Option(min=1, help="Bytes of one request.")] = 20_000_000,
    max_held: Annotated[int, typer.Option(min=1, help="Bytes of all requests; above it, 503.")] = 256_000_000,
    max_pixels: Annotated[int, typer.Option(min=1, help="Pixels of one image.")] = 50_000_000,
    max_request_pixels: Annotated[int, typer.Option(min=1, help="Pixels decoded for a request.")] = 100_000_000,
    max_connections: Annotated[int, typer.Option(min=1, help="Open connections; above it, idle ones close.")] = 1000,
    timeout: Annotated[float, typer.Option(help="Seconds until a request is given up.")] = 30.0,
    readers: Annotated[int, typer.Option(min=1, help="Threads that decode images.")] = 2,
    train: Annotated[
        str | None,
        typer.Option(
            help="Training images; the page shows the nearest ones to each image, to everyone who can open it."
        ),
    ] = None,
    samples: Annotated[
        list[str] | None, typer.Option(help="Images to try on the page, given like --train; may be repeated.")
    ] = None,
    model: Model = None,
    threads: Threads = None,
    data_dir: DataDir = None,
) -> None:
    """Serve a detector over HTTP, with a page to try images on; /openapi.json describes the API.

    On SIGTERM it answers the requests that it has accepted, and stops.

    For example:

        kedge serve detector.kedge

        kedge serve detector.kedge --train folder:photos/train --samples folder:photos/test --samples folder:other

        curl --data-binary @photo.jpg -H 'Content-Type: image/jpeg' localhost:8000/v1/score

        curl -F images=@a.png -F images=@b.png localhost:8000/v1/score

        KEDGE_TOKEN=secret kedge serve detector.kedge --host 0.0.0.0 --port 80
    """
    settings = require_service().Settings(
        max_batch=max_batch, max_delay=max_delay, max_queue=max_queue, max_images=max_images, max_bytes=max_bytes,
        max_held=max_held, max_pixels=max_pixels, max_request_pixels=max_request_pixels,
        max_connections=max_connections, timeout=timeout, readers=readers, token=token or None,
    )  # fmt: skip
    use_threads(threads)

    def make() -> "FastAPI":
        from kedge.cli.inputs import open_images
        from kedge.detectors import load
        from kedge.serving import Gallery, create_app

        images = None if train is None else open_images("--train", train, "train", data_dir=data_dir, on_error="skip")
        sets = [open_images("--samples", name, data_dir=data_dir) for name in samples or ()]
        return create_app(load(file, model=model), settings, gallery=Gallery(images, sets))

    run_service(make, settings, host=host, port=port)


def require_service() -> Any:
    """The module `kedge.serving`, or an error that says how to install what it needs."""
    try:
        import kedge.serving.server
    except ImportError as error:
        raise NotReadyError(f"serving needs {error.name}, which is missing: pip install 'kedge[serve]'") from error
    return kedge.serving


def run_service(make: Callable[[], "FastAPI"], settings: "Settings", *, host: str, port: int) -> None:
    """Serve an application until SIGTERM or Ctrl-C; it is made once the port is known to be free."""
    from kedge.serving.server import Server

    with _listening(host, port) as listener:  # before the detector is loaded, which may take long
        server = Server(make(), settings)
        shown = f"[{host}]" if ":" in host else host
        console, address = Console(stderr=True), f"http://{shown}:{listener.getsockname()[1]}"
        console.print(f"serving   [bold]{escape(address)}[/]")
        console.next(f"curl -F images=@photo.jpg {address}/v1/score")
        # uvicorn answers what it accepted on SIGTERM and then raises the signal again; stopping this way is a success.
        signal.signal(signal.SIGTERM, lambda *_: None)
        # Python keeps every warning that it has shown, and hostile files make endlessly different ones in Pillow.
        warnings.filterwarnings("ignore", module=r"PIL\.")
        with contextlib.suppress(KeyboardInterrupt):
            server.run([listener])


def _listening(host: str, port: int) -> socket.socket:
    """A socket that listens at this address; of two processes, only one can. Clients wait until it is served."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # or the end of an answer waits for the client's ACK
    try:
        listener.bind((host, port))
        listener.listen()
    except (OSError, UnicodeError) as error:  # the second for a host that cannot be a name
        listener.close()
        raise InputError(
            f"--host and --port must be a free address of this machine; {host}, port {port} cannot be used: "
            f"{getattr(error, 'strerror', None) or error}; port 0 takes any free port"
        ) from error
    return listener
