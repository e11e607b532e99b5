"""Baselines of the timings: the network without anchoring, and AMP as the paper's pseudo-code computes it."""

import copy
from typing import Any, cast

import torch
from torch import Tensor, nn

from kedge.anchoring import Anchored
from kedge.anchoring.layer import TORCH_LAYERS
from kedge.anchoring.mean_anchor import with_first_layer
from kedge.anchoring.tta import view
from kedge.detectors import AMP
from kedge.models.classifier import Classifier, logits_of


def without_anchors(net: Anchored) -> Classifier:
    """The network that anchoring started from: one pass over the images alone.

    Its first layer has the image's half of the anchored one's weights.
    """
    return with_first_layer(net, copy.deepcopy(net.anchored_layer.layer_x)).eval()


def on_pairs(net: Anchored) -> Classifier:
    """The same network with a first layer of twice the inputs, which takes the pair [c, x - c] as it stands."""
    layer, of_anchor = copy.deepcopy(net.anchored_layer.layer_x), net.anchored_layer.layer_c
    assert isinstance(layer, TORCH_LAYERS)
    layer.weight = nn.Parameter(torch.cat([cast(Tensor, of_anchor.weight), layer.weight], dim=1).detach())
    setattr(layer, "in_features" if isinstance(layer, nn.Linear) else "in_channels", layer.weight.shape[1])
    return with_first_layer(net, layer).eval()


class Naive:
    """The scores of AMP with shared anchors by K passes of pairs through the whole network, one after the other."""

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
