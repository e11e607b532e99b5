"""Whether a row is better than another beyond the differences between seeds: paired t-tests, corrected by Holm."""

import math
import statistics
from collections.abc import Mapping, Sequence

from kedge.errors import InputError
from kedge.evaluation.summary import SeedValues, TextTable

LEVEL = 0.05


def paired_p_value(differences: Sequence[float]) -> float:
    """Two-sided p-value of Student's t-test that paired differences have mean zero.

    Example:
        >>> round(paired_p_value([1.0, 2.0, 3.0]), 4)
        0.0742
    """
    n = len(differences)
    if n < 2:
        raise InputError(f"differences must be at least two, one for each seed; got {n}")
    mean, deviation = statistics.fmean(differences), statistics.stdev(differences)
    if deviation == 0:
        return 1.0 if mean == 0 else 0.0
    return 1 - _within(abs(mean) / deviation * math.sqrt(n), n - 1)


def _within(t: float, freedom: int) -> float:
    """P(-t < T < t) for Student's T with whole degrees of freedom (Abramowitz and Stegun, 26.7.3 and 26.7.4)."""
    angle = math.atan(t / math.sqrt(freedom))
    sine, cosine = math.sin(angle), math.cos(angle)
    if freedom % 2 == 0:
        term = total = 1.0
        for k in range(2, freedom, 2):
            term *= (k - 1) / k * cosine**2
            total += term
        return sine * total
    term = total = cosine if freedom > 1 else 0.0
    for k in range(3, freedom, 2):
        term *= (k - 1) / k * cosine**2
        total += term
    return 2 / math.pi * (angle + sine * total)


def holm(p_values: Sequence[float]) -> list[float]:
    """P-values adjusted by Holm's step-down method, in the same order: below 0.05, the family-wise error is.

    Example:
        >>> holm([0.04, 0.01, 0.03])
        [0.06, 0.03, 0.06]
    """
    adjusted, largest = [0.0] * len(p_values), 0.0
    for rank, place in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[place]))
        adjusted[place] = largest
    return adjusted


def corrected(pairs: Mapping[tuple[str, str], tuple[SeedValues, SeedValues]], metric: str) -> TextTable:
    """Differences of a metric in points, with p-values over seeds that are corrected over all pairs of the table."""
    differences = [(ours - theirs).values for ours, theirs in pairs.values()]
    adjusted = holm([paired_p_value(each) for each in differences])
    rows = tuple(
        (one, two, f"{100 * statistics.fmean(each):+.1f}", f"{p:.3f}", "yes" if p < LEVEL else "no")
        for (one, two), each, p in zip(pairs, differences, adjusted, strict=True)
    )
    caption = (
        f"{metric}, mean difference in points; p-values of paired t-tests over {len(differences[0])} seeds, corrected "
        f"by Holm over the {len(rows)} comparisons."
    )
    return TextTable(caption, ("", "against", "difference", "p", f"p below {LEVEL}"), rows)
