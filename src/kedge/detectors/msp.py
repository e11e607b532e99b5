"""MSP."""

from kedge.detectors.logits import LogitDetector


class MSP(LogitDetector):
    """Maximum softmax probability (Hendrycks and Gimpel, ICLR 2017): how sure the network is of its label.

    The baseline of the field. One forward pass, nothing to fit.

    Example:
        >>> import torch
        >>> net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 2))
        >>> MSP(net).fit(torch.rand(8, 3, 2, 2)).score(torch.rand(4, 3, 2, 2)).shape
        torch.Size([4])
    """

    name = "msp"
    score_function = "msp"
