"""Faster copies of a detector with the same verdicts, up to rounding."""

import copy

import torch
from torch import Tensor

from kedge.anchoring import Anchored
from kedge.anchoring.folding import folded
from kedge.detectors.base import OUTPUT_KINDS, Detector
from kedge.models.classifier import Classifier, evaluating

CLOSE = 1e-4  # of the largest logit: the precision of float32 through a network


def reads_logits_alone(detector: Detector) -> bool:
    """Whether a detector is a function of its network's output, and needs nothing inside the network."""
    return detector.reads in OUTPUT_KINDS


def reads_the_end_alone(detector: Detector) -> bool:
    """Whether a detector is a function of its network's output and of the input of its last linear layer."""
    return reads_logits_alone(detector) or detector.takes_features


def for_inference(detector: Detector) -> Detector:
    """A faster copy with the same verdicts, up to rounding, for scoring; save the original.

    Batch norms are folded into the layers before them and, on a CPU, weights are stored with channels last. A detector
    that is not fitted, that reads more than logits and last features, or whose folded network has other logits is
    returned unchanged.
    """
    foldable = reads_the_end_alone(detector) and type(detector.net) in (Classifier, Anchored)
    if not foldable or detector.preprocess is None:
        return detector
    net = folded(detector.net)
    if net.mean.device.type == "cpu":  # elsewhere the fastest layout depends on the device
        net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch's own stubs lack it
    if isinstance(net, Anchored):
        net.fix_weights()
    if not _same_logits(net, detector.net, detector.preprocess.shape):
        return detector
    return detector.on(net)


def thread_copies(detector: Detector, count: int) -> list[Detector]:
    """The detector and ``count - 1`` copies with the same weights, for threads that call one each.

    The modules are copied, since they may hold values during a pass; the weights are shared. A method that reads more
    than logits and last features may refer to its modules, so the list is then the detector alone.
    """
    if not reads_the_end_alone(detector):
        return [detector]
    weights = {id(tensor): tensor for tensor in (*detector.net.parameters(), *detector.net.buffers())}
    return [detector, *(detector.on(copy.deepcopy(detector.net, dict(weights))) for _ in range(count - 1))]


@torch.no_grad()
def _same_logits(one: Classifier, other: Classifier, shape: tuple[int, ...]) -> bool:
    """Whether two networks agree on noise; a user's network may use its weights in ways that folding breaks."""
    noise = torch.rand((2, *shape), generator=torch.Generator().manual_seed(0)).to(other.mean)
    try:
        with evaluating(other):
            expected: Tensor = other(noise)
        logits: Tensor = one(noise)
    except Exception:  # what fails here fails again, and is reported, when images are scored
        return False
    return bool((logits - expected).abs().max() <= CLOSE * expected.abs().max())
