"""Rules that make one score of several: how each is standardised on held-out images, and how they are combined.

Everything here is a pure function of scores (B, d), one column for each detector, larger for further out of
distribution. The columns are first made comparable: z-scores, or p-values as their logarithms.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import combinations

import torch
from torch import Tensor

from kedge.detectors.gaussians import oas
from kedge.detectors.logistic import logistic_regression
from kedge.errors import FileFormatError

TAIL, LEAST_TAIL = 0.1, 5  # share and least number of held-out scores that make a tail
FLOOR = -2.0  # of the z-scores that are summed
NORMAL_QUARTILES = 1.3489795  # the distance between the quartiles of a standard normal
State = Mapping[str, Tensor]


@dataclass(frozen=True)
class Rule:
    """How standardised scores become one.

    Attributes:
        combine: The score (B,) of standardised scores (B, d), with what was learned.
        p_values: Whether it takes logarithms of p-values instead of z-scores.
        correlated: Whether it learns the correlation of the standardised scores.
        normal: Whether it takes the p-values as normal scores.
        weighed: Whether it learns weights from synthetic outliers.
    """

    combine: Callable[[Tensor, State], Tensor]
    p_values: bool = False
    correlated: bool = False
    normal: bool = False
    weighed: bool = False

    def evidence(self, scores: Tensor, learned: State) -> Tensor:
        """The standardised scores (B, d), in float64: what each detector adds to the combined score."""
        scores = scores.double()
        if not self.p_values:
            return (scores - learned["centre"]) / learned["scale"]
        log_p = log_p_values(scores, learned["knots"])
        return normal_scores(log_p) if self.normal else -log_p

    def learn(self, scores: Tensor, outside: Tensor | None, standardise: str) -> dict[str, Tensor]:
        """What the rule learns from scores (N, d) of held-out images, and from those of outliers if it is weighed."""
        learned: dict[str, Tensor] = {}
        if self.p_values:
            learned["knots"] = scores.sort(dim=0).values
        else:
            learned["centre"], learned["scale"] = STANDARDS[standardise](scores)
        inside = self.evidence(scores, learned)
        if self.correlated:
            learned["correlation"] = correlation(inside)
        if outside is not None:
            learned["weights"] = raising_weights(inside, self.evidence(outside, learned))
        return learned

    def check(self, learned: State, d: int) -> None:
        """Raise if a file does not hold what the rule learns from d detectors."""
        shapes: dict[str, tuple[int, ...]] = {} if self.p_values else {"centre": (d,), "scale": (d,)}
        shapes |= ({"correlation": (d, d)} if self.correlated else {}) | ({"weights": (d,)} if self.weighed else {})
        if self.p_values:
            shapes["knots"] = (max(2, len(learned.get("knots", ()))), d)
        for name, shape in shapes.items():
            value = learned.get(name, torch.empty(0))
            whole = value.shape == shape and value.dtype == torch.float64 and bool(value.isfinite().all())
            if not whole or (name == "scale" and not bool((value > 0).all())):
                raise FileFormatError(
                    f"rule.{name} must be finite numbers {shape} in double precision, scales positive"
                )
        if set(learned) != set(shapes):
            raise FileFormatError(f"rule must hold {', '.join(shapes)}; got {', '.join(learned)}")


def by_moments(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Centre and scale (d,) of scores (N, d): the mean and the deviation."""
    return scores.mean(dim=0), _positive(scores.std(dim=0))


def by_quantiles(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Centre and scale (d,) of scores (N, d): the median, and the distance of the quartiles in normal deviations."""
    low, centre, high = scores.quantile(scores.new_tensor([0.25, 0.5, 0.75]), dim=0)
    return centre, _positive((high - low) / NORMAL_QUARTILES)


STANDARDS = {"moments": by_moments, "quantiles": by_quantiles}


def log_p_values(scores: Tensor, knots: Tensor) -> Tensor:
    """Logarithms of the shares of in-distribution images that score at least as high, (B, d).

    ``knots`` (N, d) are held-out scores in ascending order. The i-th of them has the p-value ``(N + 1 - i) / (N + 1)``,
    between two the logarithm is interpolated. An empirical p-value is the same for all scores beyond the largest knot.
    Here the tail is exponential: ``p = p(u) exp(-(s - u) / m)`` for scores s above u, where m is the mean excess over u
    of the knots above it, a tenth of all and at least 5. Below the smallest knot 1 - p has such a tail. So a larger
    score always has a smaller p-value.
    """
    n = len(knots)
    tail = min(max(LEAST_TAIL, math.ceil(TAIL * n)), n - 1)
    ranks = torch.arange(n, 0, -1, dtype=knots.dtype, device=knots.device) / (n + 1)
    columns = []
    for s, x in zip(scores.unbind(1), knots.to(scores).unbind(1), strict=True):
        place = (s[:, None] > x).sum(dim=1).clamp(1, n - 1)  # the knots below, (B,)
        left, right = x[place - 1], x[place]
        share = ((s - left) / _positive(right - left)).clamp(0, 1)
        log_rank = ranks.log()
        inside = log_rank[place - 1] + share * (log_rank[place] - log_rank[place - 1])
        u, lowest = x[n - 1 - tail], x[0]
        above = log_rank[n - 1 - tail] - (s - u) / _positive((x[n - tail :] - u).mean())
        below = (lowest - s).clamp(min=0) / _positive((x[1 : tail + 1] - lowest).mean())
        under = torch.log1p(-torch.exp(-below) / (n + 1))
        columns.append(torch.where(s > u, above, torch.where(s < lowest, under, inside)))
    return torch.stack(columns, dim=1)


def normal_scores(log_p: Tensor) -> Tensor:
    """The z at which a standard normal exceeds z with probability p, for logarithms of p, in float64.

    Newton's method on the logarithm of the tail, which is concave, so that it converges from either side.
    """
    log_p = log_p.double()
    upper = log_p < math.log(0.5)
    tail = torch.where(upper, log_p, torch.log(-torch.expm1(log_p)))  # of the smaller side
    z = (-2 * tail).sqrt()
    for _ in range(8):
        value = torch.special.log_ndtr(-z)
        slope = -(-z.square() / 2 - math.log(2 * math.pi) / 2 - value).exp()
        z = z - (value - tail) / slope
    return torch.where(upper, z, -z)


def total(z: Tensor, learned: State) -> Tensor:
    """The sum of z-scores, ``sum_j max(z_j, -2)``.

    Without the floor, a part could outweigh another's alarm: logits of an image that the network has never seen can be
    surer than those of any known one.
    """
    return z.clamp(min=FLOOR).sum(dim=1)


def stouffer(z: Tensor, learned: State) -> Tensor:
    """Stouffer's rule: ``sum_j z_j / sqrt(d)``, with the normal scores of the p-values (Stouffer et al., 1949)."""
    return z.sum(dim=1) / math.sqrt(z.shape[1])


def fisher(minus_log_p: Tensor, learned: State) -> Tensor:
    """Fisher's rule: ``-2 sum_j log p_j`` (Fisher, 1932)."""
    return 2 * minus_log_p.sum(dim=1)


def sidak(minus_log_p: Tensor, learned: State) -> Tensor:
    """The smallest of d p-values with Sidak's correction: ``-log(1 - (1 - min_j p_j)^d)`` (Tippett, 1931)."""
    largest, d = minus_log_p.amax(dim=1), minus_log_p.shape[1]
    corrected = torch.log(-torch.expm1(d * torch.log1p(-torch.exp(-largest.clamp(max=30)))))
    return torch.where(largest > 30, largest - math.log(d), -corrected)  # to first order in p where p is tiny


def raised_distance(z: Tensor, learned: State) -> Tensor:
    """The Mahalanobis distance from z to the nearest point none of whose scores is raised, one-sided as alarms are.

    ``min_{a <= 0} sqrt((z - a)^T R^-1 (z - a))`` with the correlation R. The nearest point leaves some subset A of the
    scores raised, and the squared distance is the largest ``z_A^T R_AA^-1 z_A`` over the subsets with
    ``R_AA^-1 z_A >= 0``. Where no score is raised the distance is 0, and ``max_j z_j`` orders the images instead.
    """
    squares = [z.new_zeros(z.shape[0])]  # not len(z), which an exported graph would keep
    for size in range(1, z.shape[1] + 1):
        for chosen in combinations(range(z.shape[1]), size):
            inverse = torch.linalg.inv(learned["correlation"][list(chosen)][:, list(chosen)]).to(z)
            raised = z[:, list(chosen)]  # (B, A)
            weights = raised @ inverse
            squares.append(torch.where((weights >= 0).all(dim=1), (weights * raised).sum(dim=1), 0.0))
    largest = torch.stack(squares).amax(dim=0)
    return torch.where(largest > 0, largest.clamp(min=1e-300).sqrt(), z.amax(dim=1))


def weighed(z: Tensor, learned: State) -> Tensor:
    """``sum_j w_j z_j``, with weights that separate held-out images from synthetic outliers."""
    return z @ learned["weights"].to(z)


def correlation(z: Tensor) -> Tensor:
    """The correlation (d, d) of standardised scores (N, d), shrunk towards none as `oas` has it."""
    centred = z - z.mean(dim=0)
    centred = centred / _positive(centred.square().mean(dim=0).sqrt())
    r = centred.T @ centred / len(z)
    share = oas(r, len(z))
    return (1 - share) * r + share * torch.eye(len(r), dtype=r.dtype, device=r.device)


def raising_weights(inside: Tensor, outside: Tensor) -> Tensor:
    """Weights (d,), none negative, of a logistic regression that separates ``outside`` (M, d) from ``inside`` (N, d).

    A part that would get a negative weight is left out, since it would speak for images the more it alarms.
    """
    x, y = torch.cat([inside, outside]), torch.arange(len(inside) + len(outside)) >= len(inside)
    weights, kept = torch.zeros(x.shape[1], dtype=torch.float64), list(range(x.shape[1]))
    while kept:
        found, _ = logistic_regression(x[:, kept], y)
        if bool((found >= 0).all()):
            weights[kept] = found
            break
        kept = [number for number, weight in zip(kept, found.tolist(), strict=True) if weight > 0]
    return weights if bool(weights.any()) else torch.ones_like(weights)


RULES = {
    "sum": Rule(total),
    "mahalanobis": Rule(raised_distance, correlated=True),
    "learned": Rule(weighed, weighed=True),
    "fisher": Rule(fisher, p_values=True),
    "max": Rule(sidak, p_values=True),
    "stouffer": Rule(stouffer, p_values=True, normal=True),
    "copula": Rule(raised_distance, p_values=True, normal=True, correlated=True),
}


def _positive(scale: Tensor) -> Tensor:
    """The scale, or 1 where a score never varies."""
    return torch.where(scale > 0, scale, 1.0)
