"""The limits of a service."""

from dataclasses import dataclass

from kedge.checks import at_least, between


@dataclass(frozen=True)
class Settings:
    """The limits of a service.

    Args:
        max_batch: Images in a batch of the network.
        max_delay: Seconds that an idle network waits for as many images as its last batch had.
        max_queue: Images that may wait; beyond it the answer is 503.
        max_images: Images in one request.
        max_bytes: Bytes of one request.
        max_held: Bytes of all requests in progress; beyond it the answer is 503.
        max_pixels: Pixels of one image.
        max_request_pixels: Pixels that are decoded for one request.
        max_connections: Open connections; fewer if the process may open fewer files. Beyond it, the one that has been
            waiting for its client longest is cut.
        timeout: Seconds until an unanswered request gets 504; one that has not arrived within half of them gets 408.
            A connection is cut after as many without a request, or with an answer that is not read.
        readers: Threads that decode images.
        token: What clients must send as ``Authorization: Bearer TOKEN``; None for no token.

    Example:
        >>> Settings(max_batch=8).max_queue
        512
    """

    max_batch: int = 64
    max_delay: float = 0.005
    max_queue: int = 512
    max_images: int = 64
    max_bytes: int = 20_000_000
    max_held: int = 256_000_000
    max_pixels: int = 50_000_000
    max_request_pixels: int = 100_000_000
    max_connections: int = 1000
    timeout: float = 30.0
    readers: int = 2
    token: str | None = None

    def __post_init__(self) -> None:
        for name in ("max_batch", "max_images", "max_bytes", "max_pixels", "max_connections", "readers"):
            at_least(name, getattr(self, name), 1)
        at_least("max_queue", self.max_queue, self.max_images)
        at_least("max_held", self.max_held, self.max_bytes)
        at_least("max_request_pixels", self.max_request_pixels, self.max_pixels)
        between("max_delay", self.max_delay, 0, 10)
        between("timeout", self.timeout, 0, 3600, open_ends=True)
