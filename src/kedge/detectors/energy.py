"""Energy."""

from kedge.detectors.logits import LogitDetector


class Energy(LogitDetector):
    """Free energy of the logits (Liu et al., NeurIPS 2020): minus their logsumexp.

    Keeps the size of the logits, which the softmax discards. One forward pass, nothing to fit.

    Example:
        >>> import torch
        >>> net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 2))
        >>> Energy(net).fit(torch.rand(8, 3, 2, 2)).score(torch.rand(4, 3, 2, 2)).shape
        torch.Size([4])
    """

    name = "energy"
    score_function = "energy"
