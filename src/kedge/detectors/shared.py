"""One pass for several detectors: what each takes of it, and how those that learn from the last features share it."""

import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch

from kedge.data import Preprocess
from kedge.data.features import FeatureBatch, Features
from kedge.detectors.base import Detector
from kedge.detectors.features import FeatureDetector, FeatureStream
from kedge.errors import InputError
from kedge.models.features import INPUT
from kedge.models.head import find_head

T = TypeVar("T")
_END: Any = object()


def fit_together(owner: Detector, parts: Sequence[Detector], train_set: Any, preprocess: Preprocess) -> None:
    """Let detectors on the network of ``owner`` learn from the training images, in as few passes as they can.

    Those that learn from the input of the last linear layer share one pass. The fingerprints of the images that are
    read come to ``owner``.
    """
    sharing = [part for part in parts if isinstance(part, FeatureDetector) and part.takes_features]
    sharing = [part for part in sharing if part.reads_features or part.learns_logits]
    given = {str(part.head) for part in sharing if part.reads_features and part._head_given}
    if len(given) > 1:
        raise InputError(f"detectors must read the same last layer; their head is {' and '.join(sorted(given))}")
    if isinstance(train_set, Features) or len(sharing) < 2:
        sharing = []
    for part in parts:
        part._prints = []
        if part not in sharing:
            part.fit_method(train_set, preprocess)
            owner._prints = max(owner._prints, part._prints, key=len)
    if sharing:
        owner._prints = []
        consumers = [_fitting(part, train_set, preprocess) for part in sharing]
        head = next(iter(given), None) if any(part.reads_features for part in sharing) else ""
        in_step(_last_features(owner, train_set, preprocess, head), consumers)


def in_step(source: Iterable[T], consumers: Sequence[Callable[[Iterator[T]], None]]) -> None:
    """Give each item of ``source`` to all consumers before the next but one is made; each has a thread of its own.

    The error of a consumer is raised here, and ends the reading.
    """
    queues: list[queue.Queue[T]] = [queue.Queue(maxsize=1) for _ in consumers]

    failed = threading.Event()

    def run(consumer: Callable[[Iterator[T]], None], items: Iterator[T]) -> None:
        try:
            with torch.no_grad():
                consumer(items)
        except BaseException:
            failed.set()
            raise
        finally:
            for _ in items:  # whatever it has not read, so that the others are not kept waiting
                pass

    with ThreadPoolExecutor(len(consumers), "kedge-fit") as pool:
        running = [
            pool.submit(run, consumer, iter(waiting.get, _END))
            for consumer, waiting in zip(consumers, queues, strict=True)
        ]
        try:
            for item in source:
                if failed.is_set():
                    break
                for waiting in queues:
                    waiting.put(item)
        finally:
            for waiting in queues:
                waiting.put(_END)
    for each in running:
        each.result()


def shared_reading(part: Detector) -> str | None:
    """What a part takes of a pass for several: ``"features"``, ``"logits"``, ``"anchors"``, or None."""
    if part.reads == "logits" and hasattr(part, "of_logits"):
        return "logits"
    if part.takes_features and part.reads != "per_anchor_logits":
        return "features"
    as_they_are = getattr(part, "tta", 1) == 1 and not hasattr(part, "exit_threshold")
    return "anchors" if part.reads == "per_anchor_logits" and as_they_are else None


def _last_features(
    owner: Detector, train_set: Any, preprocess: Preprocess, head: str | None
) -> Iterator[tuple[str, FeatureBatch]]:
    """The name of the last linear layer, with the logits and its input for a batch of training images.

    The layer is found if ``head`` is None, and not read if it is empty.
    """
    for x, y in owner.inputs(train_set, preprocess):
        head = find_head(owner.net, x[:2]) if head is None else head
        layers = [head + INPUT] if head else []
        logits, features = owner.net.features(x, layers)
        yield head, FeatureBatch(logits, features[layers[0]] if layers else logits[:, :0], y)


def _fitting(part: Detector, train_set: Any, preprocess: Preprocess) -> Callable[[Iterator[Any]], None]:
    return lambda items: part.fit_method(FeatureStream(items, train_set), preprocess)
