"""The same detector with less work: what is exact but for rounding, and therefore done wherever one is put to work."""

import copy

import torch
from torch import Tensor

from kedge.anchoring import Anchored
from kedge.anchoring.folding import folded
from kedge.detectors.base import Detector
from kedge.detectors.logits import LogitDetector
from kedge.detectors.rescoring import RescoringDetector
from kedge.detectors.temperature_scaling import TemperatureScaling
from kedge.models.classifier import Classifier, evaluating

CLOSE = 1e-4  # of the largest logit, as far as float32 carries through a network


def reads_logits_alone(detector: Detector) -> bool:
    """Whether a detector is a function of its network's logits; others read layers inside it, or ask it otherwise.

    Example:
        >>> from torch import nn
        >>> from kedge.detectors import MSP, ODIN
        >>> [reads_logits_alone(kind(nn.Linear(4, 2))) for kind in (MSP, ODIN)]
        [True, False]
    """
    return isinstance(detector, (RescoringDetector, LogitDetector, TemperatureScaling))


def for_inference(detector: Detector) -> Detector:
    """A detector that says the same, to rounding, with less work. The one that is given stays as it is.

    Batch norms are folded into the layers before them and, on a CPU, weights laid out with channels last. That is for
    methods that read the network's logits alone; any other detector, and one whose network would not give the same
    logits, is returned itself. For scoring: save the detector that it was made of.

    Args:
        detector: Fitted.

    Example:
        >>> from kedge.detectors import MSP
        >>> from kedge.models import build
        >>> images = torch.rand(30, 3, 8, 8)
        >>> detector = MSP(build("compact", width=4)).fit(images).calibrate(images)
        >>> bool(torch.allclose(for_inference(detector).score(images), detector.score(images), atol=1e-4))
        True
    """
    if not reads_logits_alone(detector) or type(detector.net) not in (Classifier, Anchored):
        return detector
    if detector.preprocess is None:
        return detector
    net = folded(detector.net)
    if net.mean.device.type == "cpu":  # elsewhere the layout that is fast depends on the device
        net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch's own stubs lack it
    if not _same_logits(net, detector.net, detector.preprocess.shape):
        return detector
    fast = copy.copy(detector)
    fast.net = net
    return fast


def beside(detector: Detector, count: int) -> list[Detector]:
    """A detector and twins of it over the same weights, to be called at the same time, each by a thread of its own.

    The modules are copied, for what they may keep on themselves during a pass, and the weights are not. Methods that do
    more than read the network's logits stay alone: the list is then the detector itself.

    Args:
        detector: Fitted.
        count: How many of them there may be.

    Example:
        >>> from kedge.detectors import KNN, MSP
        >>> from kedge.models import build
        >>> net = build("compact", width=4)
        >>> len(beside(MSP(net), 2)), len(beside(KNN(net), 2))
        (2, 1)
    """
    if not reads_logits_alone(detector):
        return [detector]
    twins = [copy.copy(detector) for _ in range(count - 1)]
    for twin in twins:
        shared = [*detector.net.parameters(), *detector.net.buffers()]
        twin.net = copy.deepcopy(detector.net, {id(tensor): tensor for tensor in shared})
    return [detector, *twins]


@torch.no_grad()
def _same_logits(one: Classifier, other: Classifier, shape: tuple[int, ...]) -> bool:
    """Whether two networks agree on noise; one that is not kedge's own may use its weights in ways of its own."""
    noise = torch.rand((2, *shape), generator=torch.Generator().manual_seed(0)).to(other.mean)
    try:
        with evaluating(other):
            expected: Tensor = other(noise)
        found: Tensor = one(noise)
    except Exception:  # what fails here fails again, and is reported, when images are scored
        return False
    return bool((found - expected).abs().max() <= CLOSE * expected.abs().max())
