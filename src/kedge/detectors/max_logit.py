"""MaxLogit."""

from kedge.detectors.logits import LogitDetector


class MaxLogit(LogitDetector):
    """Maximum logit (Hendrycks et al., ICML 2022): the largest logit, before the softmax hides its size.

    Better than MSP with many classes. One forward pass, nothing to fit.

    Example:
        >>> import torch
        >>> net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 2))
        >>> MaxLogit(net).fit(torch.rand(8, 3, 2, 2)).score(torch.rand(4, 3, 2, 2)).shape
        torch.Size([4])
    """

    name = "max_logit"
    score_function = "max_logit"
