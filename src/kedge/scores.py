"""Scores on logits, and what the per_anchor of K anchors say beyond their mean.

Larger always means further out of distribution. Shapes: K anchors, B images, C classes.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from kedge.checks import one_of
from kedge.errors import InputError

Score = Callable[[Tensor], Tensor]

REDUCTIONS = ("sum", "mean")
RULES = ("exp", "plain")
TAU_FLOOR = 1e-6


def tau(per_anchor: Tensor, reduce: str = "sum") -> Tensor:
    """How far the anchors disagree about each image: the deviation over anchors of each class's sigmoid, over classes.

    Args:
        per_anchor: Logits under each anchor, (K, B, C).
        reduce: ``"sum"`` over classes as in the paper, or ``"mean"`` as in its published code.

    Example:
        >>> two_anchors = torch.tensor([[[0.0, 4.0]], [[0.0, -4.0]]])
        >>> tau(two_anchors)
        tensor([0.6817])
    """
    spread = _several(per_anchor).sigmoid().std(dim=0)  # (B, C)
    return spread.sum(dim=-1) if one_of("reduce", reduce, REDUCTIONS) == "sum" else spread.mean(dim=-1)


def probability_deviation(per_anchor: Tensor) -> Tensor:
    """The deviation over anchors of each class's softmax probability, summed over classes.

    Args:
        per_anchor: Logits under each anchor, (K, B, C).

    Example:
        >>> two_anchors = torch.tensor([[[0.0, 100.0]], [[100.0, 0.0]]])
        >>> probability_deviation(two_anchors)
        tensor([1.4142])
    """
    return _several(per_anchor).softmax(dim=-1).std(dim=0).sum(dim=-1)


def relative_deviation(per_anchor: Tensor) -> Tensor:
    """The deviation of logits over anchors, relative to that of the mean logits over classes.

    Both are root mean squares of logits less their mean over classes, so that neither a common offset nor the scale of
    the logits changes it.

    Args:
        per_anchor: Logits under each anchor, (K, B, C).

    Example:
        >>> relative_deviation(torch.tensor([[[2.0, 0.0]], [[4.0, 0.0]]]))  # 1 and 2 from their mean over classes
        tensor([0.4714])
    """
    centred = _several(per_anchor) - per_anchor.mean(dim=-1, keepdim=True)  # (K, B, C)
    over_anchors = centred.var(dim=0).mean(dim=-1).sqrt()
    over_classes = centred.mean(dim=0).square().mean(dim=-1).sqrt()
    return over_anchors / over_classes.clamp_min(TAU_FLOOR)


def rescale(logits: Tensor, tau: Tensor, rule: str = "exp") -> Tensor:
    """Divide each image's logits by its own temperature.

    Args:
        logits: (B, C).
        tau: (B,).
        rule: ``"exp"`` divides by 1 + exp(tau), ``"plain"`` by tau itself.
    """
    if one_of("rule", rule, RULES) == "exp":
        return logits * torch.sigmoid(-tau)[:, None]  # 1 / (1 + exp(tau)), which cannot overflow
    return logits / tau.clamp_min(TAU_FLOOR)[:, None]


def kl_uniform(logits: Tensor) -> Tensor:
    """KL divergence from uniform to the softmax, negated and less log C: ``mean(z) - logsumexp(z)``.

    Of rescaled logits it is the negative of the paper's AMP score S.

    Example:
        >>> kl_uniform(torch.zeros(1, 2))
        tensor([-0.6931])
    """
    return logits.mean(dim=-1) - logits.logsumexp(dim=-1)


def msp(logits: Tensor) -> Tensor:
    """Negative maximum softmax probability."""
    return -logits.softmax(dim=-1).amax(dim=-1)


def max_logit(logits: Tensor) -> Tensor:
    """Negative maximum logit."""
    return -logits.amax(dim=-1)


def entropy(logits: Tensor) -> Tensor:
    """Entropy of the softmax, in nats."""
    log_p = logits.log_softmax(dim=-1)
    return -(log_p.exp() * log_p).sum(dim=-1)


def energy(logits: Tensor) -> Tensor:
    """Free energy at temperature one: negative logsumexp."""
    return -logits.logsumexp(dim=-1)


def gen(logits: Tensor, gamma: float = 0.1, m: int = 100) -> Tensor:
    """Generalised entropy of the softmax: ``sum p^gamma (1 - p)^gamma`` over the m largest probabilities p.

    Example:
        >>> gen(torch.zeros(1, 2), gamma=0.5)
        tensor([1.])
    """
    log_p = logits.log_softmax(dim=-1).sort(dim=-1, descending=True).values  # (B, C)
    # 1 - p of the largest probability is the sum of the others: as a difference it would be 0 where p rounds to 1.
    first = log_p[..., 1:].logsumexp(dim=-1, keepdim=True)
    log_rest = torch.cat([first, torch.log1p(-log_p[..., 1:m].exp())], dim=-1)  # log(1 - p), (B, m)
    return (gamma * (log_p[..., :m] + log_rest)).exp().sum(dim=-1)


def mutual_information(per_anchor: Tensor) -> Tensor:
    """What the choice of anchor tells about the label: entropy of the mean softmax minus the mean entropy.

    Args:
        per_anchor: Logits under each anchor, (K, B, C).
    """
    log_p = per_anchor.log_softmax(dim=-1)  # (K, B, C)
    log_mean = log_p.logsumexp(dim=0) - math.log(len(per_anchor))  # (B, C)
    # The mean Kullback-Leibler divergence from the mean: equal to the difference of entropies, without cancellation.
    divergence = (log_p.exp() * (log_p - log_mean)).sum(dim=-1).mean(dim=0)
    return divergence.clamp_min(0)


def _several(per_anchor: Tensor) -> Tensor:
    if per_anchor.ndim != 3 or per_anchor.shape[0] < 2:
        raise InputError(
            f"per-anchor logits must be (K, B, C) with at least two anchors; got {tuple(per_anchor.shape)}: "
            "set more anchors with set_anchors, or use a score that needs no temperature"
        )
    return per_anchor


SCORES: dict[str, Score] = {
    "kl_uniform": kl_uniform,
    "msp": msp,
    "max_logit": max_logit,
    "entropy": entropy,
    "energy": energy,
    "gen": gen,
}
