"""Logistic regression on a few numbers per image.

Own code instead of scikit-learn's: Mahalanobis is a core method without extras, and this is exact in float64.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

PENALTY = 1.0  # on half the squared weights of standardised inputs; scikit-learn's C = 1


def logistic_regression(x: Tensor, y: Tensor, penalty: float = PENALTY) -> tuple[Tensor, Tensor]:
    """Weights (L,) and bias () of the penalised logistic regression of labels y in {0, 1}, by Newton's method.

    Minimises the sum of the log losses plus ``penalty / 2`` times the squared weights of the standardised columns; the
    weights returned are those of the columns as given.
    """
    x, y = x.double(), y.double()
    mean, std = x.mean(dim=0), x.std(dim=0, correction=0)
    std = torch.where(std > 0, std, 1.0)  # a column that never changes gets no weight
    rows = torch.cat([(x - mean) / std, torch.ones_like(x[:, :1])], dim=1)  # (N, L + 1)
    ridge = torch.full((rows.shape[1],), penalty).to(rows)
    ridge[-1] = 0.0  # the bias is free

    def loss(beta: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(rows @ beta, y, reduction="sum") + (ridge * beta**2).sum() / 2

    beta, step = torch.zeros_like(ridge), torch.ones_like(ridge)
    for _ in range(100):
        if float(step.abs().max()) < 1e-10:
            break
        p = (rows @ beta).sigmoid()
        gradient = rows.T @ (p - y) + ridge * beta
        hessian = (rows * (p * (1 - p))[:, None]).T @ rows + ridge.diag()
        step = -torch.linalg.solve(hessian, gradient)
        # The loss is convex: halving the step until it is no worse makes Newton's method converge from anywhere.
        while float(loss(beta + step)) > float(loss(beta)) + 1e-12 and float(step.abs().max()) >= 1e-10:
            step = step / 2
        beta = beta + step
    weights = beta[:-1] / std
    return weights, beta[-1] - weights @ mean
