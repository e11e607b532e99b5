"""``kedge serve``: a detector over HTTP."""

import contextlib
import signal
import socket
import warnings
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from kedge.detectors import load
from kedge.errors import InputError, NotReadyError
from kedge.threads import use_threads


def serve(
    file: Annotated[Path, typer.Argument(help="A calibrated detector, or the name of one that kedge ships: cifar10.")],
    host: Annotated[str, typer.Option(help="0.0.0.0 lets other machines in.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes one that is free.")] = 8000,
    token: Annotated[str | None, typer.Option(envvar="KEDGE_TOKEN", help="What clients must send as a bearer.")] = None,
    max_batch: Annotated[int, typer.Option(min=1, help="Images that the network sees at a time.")] = 64,
    max_delay: Annotated[
        float, typer.Option(min=0, max=10, help="Seconds an idle network waits for as many images as it had last.")
    ] = 0.005,
    max_queue: Annotated[int, typer.Option(min=1, help="Images that may wait; beyond it the answer is 503.")] = 512,
    max_images: Annotated[int, typer.Option(min=1, help="In one request.")] = 64,
    max_bytes: Annotated[int, typer.Option(min=1, help="Of one request.")] = 20_000_000,
    max_held: Annotated[int, typer.Option(min=1, help="Bytes of all requests at a time; beyond it 503.")] = 256_000_000,
    max_pixels: Annotated[int, typer.Option(min=1, help="Of one image.")] = 50_000_000,
    timeout: Annotated[float, typer.Option(help="Seconds until a request is given up.")] = 30.0,
    readers: Annotated[int, typer.Option(min=1, help="Threads that decode images.")] = 2,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Threads of the network; without it, as many as there are cores for it.")
    ] = None,
) -> None:
    """Serve a detector over HTTP; /docs describes it, and SIGTERM ends it once all that was taken is answered.

    For example:

        kedge serve detector.kedge

        curl --data-binary @photo.jpg -H 'Content-Type: image/jpeg' localhost:8000/v1/score

        curl -F images=@a.png -F images=@b.png localhost:8000/v1/score

        KEDGE_TOKEN=secret kedge serve detector.kedge --host 0.0.0.0 --port 80
    """
    try:
        import uvicorn

        from kedge.serving import Settings, create_app
        from kedge.serving.protocol import impatient
    except ImportError as error:
        raise NotReadyError(f"serving needs {error.name}, which is missing: pip install 'kedge[serve]'") from error
    settings = Settings(
        max_batch=max_batch,
        max_delay=max_delay,
        max_queue=max_queue,
        max_images=max_images,
        max_bytes=max_bytes,
        max_held=max_held,
        max_pixels=max_pixels,
        timeout=timeout,
        readers=readers,
        token=token or None,
    )
    use_threads(threads)
    with _bound(host, port) as taken:  # before the detector is loaded, which may take long
        config = uvicorn.Config(
            create_app(load(file), settings),
            host=host,
            port=port,
            log_level="warning",
            http=impatient(settings.timeout / 2),
            timeout_graceful_shutdown=int(timeout) + 1,
        )
        place = f"[{host}]" if ":" in host else host
        words = f"serving   [bold]{escape(f'http://{place}:{taken.getsockname()[1]}')}[/]  docs at /docs"
        Console(stderr=True).print(words, highlight=False)
        # uvicorn finishes what it took on SIGTERM and then raises the signal again; to stop so is a success.
        signal.signal(signal.SIGTERM, lambda *_: None)
        # Python keeps every warning that it has shown, and hostile files make Pillow's differ without end.
        warnings.filterwarnings("ignore", module=r"PIL\.")
        with contextlib.suppress(KeyboardInterrupt):
            uvicorn.Server(config).run([taken])


def _bound(host: str, port: int) -> socket.socket:
    """A socket at this place; it takes connections once the service listens."""
    taken = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    taken.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # or the end of an answer waits for the client's word
    try:
        taken.bind((host, port))
    except (OSError, UnicodeError) as error:  # a name that cannot be one is the second
        taken.close()
        raise InputError(
            f"host and port must be free and this machine's own; {host}, port {port} cannot be taken: "
            f"{getattr(error, 'strerror', None) or error}; choose others by --host and --port, 0 for any free port"
        ) from error
    return taken
