"""Thresholds with a finite-sample guarantee (split-conformal), and one temperature for the logits.

The calibration scores come from held-out in-distribution (ID) images; a larger score means further out of distribution.
Decisions are made on whole counts: an image is flagged iff ``1 + #{calibration >= score}`` is at most `allowed`.
"""

import bisect
import itertools
import math
import warnings
from collections.abc import Iterator
from fractions import Fraction

import torch
from torch import Tensor

from kedge.checks import at_least, between, finite, shape_of
from kedge.errors import InputError, KedgeWarning

WATCHED = 20  # calibration scores that the tests for drift need
ROWS = 4096  # logits that are held in double precision at a time


def p_values(calibration: Tensor, scores: Tensor) -> Tensor:
    """Conformal p-value of each score, ``(1 + #{calibration >= score}) / (n + 1)``, in float64.

    Example:
        >>> p_values(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0.0, 2.0, 9.0]))
        tensor([1.0000, 0.7500, 0.2500], dtype=torch.float64)
    """
    return _ranks(calibration, scores).double() / (len(calibration) + 1)


def is_ood(calibration: Tensor, scores: Tensor, alpha: float, delta: float | None = None) -> Tensor:
    """Flag each score whose p-value is at most ``alpha``: a share of at most ``alpha`` of ID images is flagged.

    The guarantee holds on average over draws of the calibration images; with ``delta`` it holds, with probability
    1 - delta, for the very images that were drawn.
    """
    return _ranks(calibration, scores) <= allowed(len(calibration), alpha, delta)


def threshold(
    calibration: Tensor, alpha: float, delta: float | None = None, *, halved: bool = False, learned: int = 0
) -> float:
    """The calibration score above which `is_ood` flags; infinity, with a warning, if no score could ever be flagged.

    Compare in float64, or in the dtype of the calibration scores, for the very same decisions as `is_ood`.

    Args:
        calibration: Scores (n,) of held-out in-distribution images.
        alpha: See `is_ood`.
        delta: See `is_ood`.
        halved: Whether a method learned from a random half of the held-out images and these scores are of the other
            half: only for the number of images in the warning.
        learned: How many held-out images a method learned from besides these: likewise.
    """
    ordered = _sorted(calibration)
    k = allowed(len(ordered), alpha, delta)
    if k > 0:
        return float(ordered[-k])
    wanted = f"alpha={alpha}" if delta is None else f"alpha={alpha}, delta={delta}"
    fewest = _fewest(alpha, delta)
    needed = f"{_to_split(fewest) if halved else fewest + learned} held-out images"
    warnings.warn(
        f"{len(ordered)} calibration scores are too few to flag any image at {wanted}; calibrate with at least {needed}"
        + (", about half of which the method learns from" if halved else ""),
        KedgeWarning,
        stacklevel=2,
    )
    return math.inf


def allowed(n: int, alpha: float, delta: float | None = None) -> int:
    """The largest k for which flagging iff ``1 + #{calibration >= score} <= k`` keeps the guarantee; 0 flags nothing.

    For continuous scores the share of ID images flagged follows Beta(k, n + 1 - k) over draws of the calibration set.
    Its mean, k / (n + 1), must not exceed alpha; with ``delta``, its quantile at level 1 - delta must not.
    """
    at_least("n", n, 1)
    error = _exact(between("alpha", alpha, 0, 1, open_ends=True))
    if delta is None:
        return math.floor(error * (n + 1))
    between("delta", delta, 0, 1, open_ends=True)
    # P(Beta(k, n + 1 - k) <= error) = P(Binomial(n, error) >= k). Each term follows from the one before, so only
    # differences of logarithms are summed: no factorial, and no loss of digits for large n.
    j = torch.arange(1, n + 1, dtype=torch.float64)
    steps = torch.log((n - j + 1) / j) + math.log(error / (1 - error))
    log_terms = torch.cat([steps.new_zeros(1), steps.cumsum(0)])  # (n + 1,)
    at_most = (log_terms - log_terms.logsumexp(0)).exp().cumsum(0)  # at_most[j] = P(Binomial <= j)
    return int((at_most[:-1] <= delta).sum())  # k keeps the guarantee iff P(Binomial <= k - 1) <= delta


def to_learn_from(n: int, alpha: float, delta: float | None = None, *, share: float, least: int) -> int:
    """How many of n held-out images to learn from, so that the others set the threshold and none is wasted.

    About ``share`` of them, and at least ``least`` or half of them, but fewer where the others could flag nothing. The
    number of images that may be flagged grows in steps with that of calibration scores, and those beyond the last step
    are worth more to learn from: with alpha = 0.05, of 60 images 21 are learned from, since 39 scores flag as many as
    40. Where there are images enough, `WATCHED` remain, which tests for drift compare with.

    Example:
        >>> [to_learn_from(n, 0.05, share=0.2, least=20) for n in (30, 60, 100, 1000)]
        [10, 21, 21, 201]
    """
    rest = n - min(max(least, math.ceil(share * n)), n // 2)
    k = allowed(rest, alpha, delta)
    if k:
        rest = bisect.bisect_left(range(1, rest + 1), k, key=lambda count: allowed(count, alpha, delta)) + 1
    else:
        rest = min(n - 2, _fewest(alpha, delta))
    return n - max(rest, min(WATCHED, n - 2))


def fit_temperature(logits: Tensor, labels: Tensor) -> float:
    """The temperature T in [1e-3, 1e3] that minimises the negative log-likelihood of ``softmax(logits / T)``."""
    _check_logits(logits, labels)
    rows = list(zip(logits.detach().split(ROWS), labels.to(logits.device).long().split(ROWS), strict=True))

    def relative() -> Iterator[Tensor]:  # to the true class's: the softmax does not change, and its mean is the slope
        for part, truth in rows:
            yield part.double() - part.double().gather(1, truth[:, None])

    if not any(bool(z.any()) for z in relative()):
        return 1.0  # equal logits: every temperature is as good, so change nothing

    def slope(log_beta: float) -> float:  # of the likelihood loss, which is convex in beta = 1 / T
        sums = [float((z * (math.exp(log_beta) * z).softmax(-1)).sum()) for z in relative()]
        return math.fsum(sums) / len(logits)

    low, high = math.log(1e-3), math.log(1e3)
    if slope(low) >= 0:
        return 1e3
    if slope(high) <= 0:
        return 1e-3
    for _ in range(50):  # 14 / 2^50: to the last digits of float64
        middle = (low + high) / 2
        low, high = (middle, high) if slope(middle) < 0 else (low, middle)
    return math.exp(-(low + high) / 2)


def temperature_of_known(logits: Tensor, labels: Tensor) -> float:
    """The temperature of the images whose label is known (not -1), or 1.0 if none of these is misclassified.

    Where every label is right there is nothing to fit: the likelihood rises without end as T goes to zero.
    """
    known = labels >= 0
    wrong = known & (logits.argmax(dim=1) != labels)
    return fit_temperature(logits[known], labels[known]) if bool(wrong.any()) else 1.0


def _exact(share: float) -> Fraction:
    """Read 0.05 as 1/20: products of floats fall short of whole numbers, and then one image fewer is flagged."""
    return Fraction(str(share))


def _fewest(alpha: float, delta: float | None) -> int:
    """The smallest calibration set that can flag anything."""
    if delta is None:
        return math.ceil(1 / _exact(alpha)) - 1  # alpha * (n + 1) >= 1
    near = math.log(delta) / math.log1p(-alpha)  # (1 - alpha) ** n <= delta; its rounding must not decide
    return next(n for n in itertools.count(max(1, math.floor(near))) if allowed(n, alpha, delta))


def _to_split(n: int) -> int:
    """How many images to split in two at random so that a half has at least n of them, in 99 of 100 cases."""
    z = 2.33  # the normal quantile at 99 %: N / 2 - z sqrt(N) / 2 >= n
    return math.ceil(((z + math.sqrt(z * z + 8 * n)) / 2) ** 2)


def _sorted(calibration: Tensor) -> Tensor:
    if calibration.ndim != 1 or len(calibration) == 0:
        raise InputError(
            f"calibration must be one score per held-out image, (n,) with n at least 1; got {shape_of(calibration)}"
        )
    values = _no_nan("calibration", calibration).detach().double()
    ascending = bool((values[1:] >= values[:-1]).all())  # as in a saved detector, for every batch
    return values if ascending else values.sort().values


def _ranks(calibration: Tensor, scores: Tensor) -> Tensor:
    """``1 + #{calibration >= score}``, as whole numbers."""
    ordered = _sorted(calibration).to(scores.device)
    below = torch.searchsorted(ordered, _no_nan("scores", scores).detach().double().contiguous())
    return len(ordered) + 1 - below


def _no_nan(name: str, values: Tensor) -> Tensor:
    if bad := int(torch.isnan(values).sum()):
        raise InputError(
            f"{name} must not hold NaN; {bad} of {values.numel()} values are NaN: drop these images, or check the "
            "network's weights"
        )
    return values


def _check_logits(logits: Tensor, labels: Tensor) -> None:
    if logits.ndim != 2 or logits.numel() == 0:
        raise InputError(f"logits must be (B, C), one row per image, and not empty; got {shape_of(logits)}")
    if labels.shape != logits.shape[:1] or labels.is_floating_point():
        raise InputError(
            f"labels must be ({len(logits)},) whole class numbers, one per row of logits; got {shape_of(labels)} of "
            f"{labels.dtype}"
        )
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or high >= logits.shape[1]:
        raise InputError(
            f"labels must lie in 0..{logits.shape[1] - 1}, got {low}..{high}: number them as the network's outputs are"
        )
    finite("logits", logits, "a network that overflows cannot be calibrated; find the layer where they arise")
