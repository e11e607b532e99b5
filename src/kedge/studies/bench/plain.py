"""Baselines of the timings: the network without anchoring, and AMP as the paper's pseudo-code computes it."""

from typing import Any

import torch
from torch import Tensor

from kedge.anchoring import Anchored
from kedge.anchoring.mean_anchor import with_first_layer
from kedge.anchoring.tta import view
from kedge.detectors import AMP
from kedge.models.classifier import Classifier, logits_of


def without_anchors(net: Anchored) -> Classifier:
    """The network that anchoring started from: its first layer has the image's half of the anchored one's weights."""
    return with_first_layer(net, net.stem.layer(net.stem.weight[:, net.stem.split :])).eval()


def on_pairs(net: Anchored) -> Classifier:
    """The same network with a first layer of twice the inputs, which takes the concatenated pair [c, x - c]."""
    return with_first_layer(net, net.stem.layer(net.stem.weight)).eval()


class Naive:
    """The scores of AMP with shared anchors by K passes of pairs through the whole network, one after the other.

    Example:
        >>> from torch import nn
        >>> from kedge import anchor
        >>> images = torch.rand(20, 3, 2, 2)
        >>> detector = AMP(anchor(nn.Sequential(nn.Flatten(), nn.Linear(12, 2)), init="fresh")).fit(images)
        >>> bool(torch.allclose(Naive(detector)(images), detector.score(images), atol=1e-5))
        True
    """

    def __init__(self, detector: AMP) -> None:
        assert detector.net.anchors is not None
        self.detector, self.net = detector, channels_last(on_pairs(detector.net)).eval()
        self.anchors = self.net.normalise(detector.net.anchors)  # (K, D, ...)

    @torch.inference_mode()
    def __call__(self, images: Tensor) -> Tensor:
        """The scores (B,) of images (B, D, ...)."""
        x = self.net.normalise(images)
        logits = []
        for k, anchor in enumerate(self.anchors):
            seen = view(x, k % self.detector.tta)
            pair = torch.cat([anchor.expand_as(seen), seen - anchor], dim=1)  # [c, x - c]
            logits.append(logits_of(self.net.network(pair)))
        return self.detector.of_per_anchor_logits(torch.stack(logits)).score


def channels_last(net: Any) -> Any:
    """A network in the memory format that is fast on a CPU, in place."""
    return net.to(memory_format=torch.channels_last)
