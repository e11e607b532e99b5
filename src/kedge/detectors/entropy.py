"""Entropy."""

from kedge.detectors.logits import LogitDetector


class Entropy(LogitDetector):
    """Entropy of the softmax: how far the prediction spreads over the classes.

    Like MSP, but it reads all classes. One forward pass, nothing to fit.

    Example:
        >>> import torch
        >>> net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 2))
        >>> Entropy(net).fit(torch.rand(8, 3, 2, 2)).score(torch.rand(4, 3, 2, 2)).shape
        torch.Size([4])
    """

    name = "entropy"
    score_function = "entropy"
