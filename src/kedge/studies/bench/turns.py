"""Timing in turns, so that other load on the machine affects all alike."""

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kedge.checks import at_least

LEAST = 0.05  # seconds of a turn: what is faster is called several times
PAUSE = 0.01  # seconds before each turn: threads of the one before spin for a moment after their last work


def in_turns(
    calls: Mapping[str, Callable[[], Any]],
    *,
    repeats: int,
    least: float = LEAST,
    report: Callable[[str], None] | None = None,
    clock: Callable[[], float] | None = None,
) -> dict[str, list[float]]:
    """Time functions one after the other, again and again; every round begins with another of them.

    Args:
        calls: The functions, by name.
        repeats: Turns of each.
        least: The least seconds of a turn.
        report: Called with a function's name after each of its turns.
        clock: By default that of the wall; `time.process_time` leaves out what other processes take, and counts all
            threads.

    Returns:
        For each the seconds of a call, by turn.
    """
    at_least("repeats", repeats, 1)
    clock = clock or time.perf_counter
    number = {name: _calls_of(call, least) for name, call in calls.items()}
    names = list(calls)
    times: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(repeats):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            time.sleep(PAUSE)
            began = clock()
            for _ in range(number[name]):
                calls[name]()
            times[name].append((clock() - began) / number[name])
            if report is not None:
                report(name)
    return times


@dataclass(frozen=True)
class Quartiles:
    """A median, and the quartiles on either side of it."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Quartiles":
        """The quartiles of at least one value."""
        if len(values) == 1:
            return cls(values[0], values[0], values[0])
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, low, high)


def ratios(times: Sequence[float], base: Sequence[float]) -> Quartiles:
    """Times over those of a base, turn by turn."""
    return Quartiles.of([time / other for time, other in zip(times, base, strict=True)])


def _calls_of(call: Callable[[], Any], least: float) -> int:
    """The number of calls in a turn; the first call, which is slow, does not count."""
    call()
    began = time.perf_counter()
    call()
    return max(1, math.ceil(least / max(time.perf_counter() - began, 1e-9)))
