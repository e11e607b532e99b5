"""The metrics of a service, for Prometheus."""

import threading
from collections.abc import Sequence
from functools import partial

import numpy as np
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from torch import Tensor

from kedge.drift import Martingale, WindowTest
from kedge.drift.window import FEWEST

LATENCIES = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
QUANTILES = (0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 0.999)  # of the calibration scores
WINDOW = 500  # newest scores, compared with as many of the calibration


class Metrics:
    """Counters of one service, in a registry of its own.

    Args:
        calibration: The detector's calibration scores; their quantiles are the buckets of the histogram of scores.
    """

    def __init__(self, calibration: Tensor) -> None:
        self.registry = CollectorRegistry()
        self._lock = threading.Lock()  # batches are counted in the threads that score them
        counter, gauge = partial(Counter, registry=self.registry), partial(Gauge, registry=self.registry)
        histogram = partial(Histogram, registry=self.registry)
        edges = sorted({float(edge) for edge in np.quantile(calibration.double().numpy(), QUANTILES)})
        self.requests = counter("kedge_requests", "Requests answered, by status code.", ["code"])
        self.latency = histogram("kedge_request_seconds", "Time to answer.", buckets=LATENCIES)
        self.images = counter("kedge_images", "Images scored.")
        self.unreadable = counter("kedge_images_unreadable", "Images with an error for a result.")
        self.flagged = counter("kedge_images_flagged", "Images flagged as out of distribution.")
        self.scores = histogram("kedge_score", "Scores, in quantiles of the calibration scores.", buckets=edges)
        self.batches = histogram("kedge_batch_images", "Images in a batch.", buckets=SIZES)
        self.queue = gauge("kedge_queue_images", "Images that wait.")
        self.drift, self.window = Martingale(calibration, bounded=True), _window_test(calibration)
        self.wealth = gauge("kedge_drift_log_wealth", "Log wealth; without drift above 4.6 in at most 1 %.")
        self.drifted = gauge("kedge_drift_alarm", "1 once the martingale's wealth has reached 100.")
        self.p_value = gauge("kedge_drift_window_p_value", f"Test of the newest {WINDOW} scores against calibration.")
        self.p_value.set(1)
        self.window_drifted = gauge("kedge_drift_window_alarm", "1 while that is below 1 % for a million images.")

    def scored(self, scores: Sequence[float], flagged: int) -> None:
        """Count a batch that was scored."""
        self.batches.observe(len(scores))
        self.images.inc(len(scores))
        self.flagged.inc(flagged)
        for score in scores:
            self.scores.observe(score)
        with self._lock:
            self.drift.update(scores)
            self.wealth.set(self.drift.log_wealth)
            self.drifted.set(self.drift.alarm)
            if self.window is not None and (compared := self.window.update(scores)):
                self.p_value.set(compared[-1].p)
                self.window_drifted.set(compared[-1].p <= self.window.threshold)

    def text(self) -> bytes:
        """The metrics in Prometheus' format."""
        return generate_latest(self.registry)


def _window_test(calibration: Tensor) -> WindowTest | None:
    """The test of the newest scores; None if there are too few calibration scores."""
    if len(calibration) < FEWEST:
        return None
    some = np.random.default_rng(0).permutation(calibration.double().numpy())[:WINDOW]
    return WindowTest(some, window=WINDOW, every=WINDOW, horizon=1_000_000, draws=9_999)
