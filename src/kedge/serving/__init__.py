"""A service: images over HTTP, batched across requests, with limits, metrics and a page."""

from kedge.serving.app import create_app
from kedge.serving.batcher import Batcher, Busy
from kedge.serving.explain import Gallery
from kedge.serving.settings import Settings

__all__ = ["Batcher", "Busy", "Gallery", "Settings", "create_app"]
