"""A detector as one torch module, from uint8 images to the verdict: what is exported."""

import copy
from typing import cast

import torch
from torch import Tensor, nn

from kedge.anchoring import Anchored
from kedge.anchoring.stem import Stem
from kedge.anchoring.views import view
from kedge.detectors import AMP, Detector, Outputs, RescoringDetector, Student, TemperatureScaling
from kedge.detectors.inference import reads_logits_alone
from kedge.detectors.logits import LogitDetector
from kedge.errors import InputError
from kedge.models.classifier import Classifier, logits_of

OUTPUTS = ("label", "probability", "score", "temperature", "p_value", "is_ood")


class FoldedStem(nn.Module):
    """The first layer for frozen anchors, whose part is a constant: the weights of the anchor's half are gone.

    Args:
        stem: The widened layer.
        maps: The anchors' part, (K, 1, ...).
        views: Of the image, which the anchors are held against in turn.
    """

    weight: Tensor
    bias: Tensor | None
    anchor_maps: Tensor

    def __init__(self, stem: Stem, maps: Tensor, views: int) -> None:
        super().__init__()
        self.views = views
        self._stem = (stem,)  # in a tuple, so that it is no submodule and its weights stay out of the file
        self.register_buffer("weight", stem.weight.detach()[:, stem.split :].contiguous())
        self.register_buffer("bias", None if stem.bias is None else stem.bias.detach())
        self.register_buffer("anchor_maps", maps.detach().contiguous())

    def forward(self, x: Tensor) -> Tensor:
        """Images, once per anchor, (K * B, ...) -> (K * B, ...); the part of each view is computed once."""
        anchors, by_anchor = len(self.anchor_maps), x.view(len(self.anchor_maps), -1, *x.shape[1:])  # (K, B, ...)
        parts = [self._stem[0].affine(image, self.weight, self.bias) for image in by_anchor[: self.views]]
        both = torch.stack([parts[k % self.views] for k in range(anchors)]) if self.views > 1 else parts[0]
        both = both + self.anchor_maps  # (K, B, ...)
        return both.reshape(-1, *both.shape[2:])


class Graph(nn.Module):
    """Images (B, D, H, W) in uint8 -> the tensors that `names` lists.

    What calibration learned stands in buffers of its own, with stand-ins for values: distinct ones, so that no
    optimiser merges two of them. `kedge.export.file.write_calibration` puts the values in, by name.

    Args:
        detector: One that `check_exportable` let pass.

    Example:
        >>> from kedge.detectors import MSP
        >>> graph = Graph(MSP(nn.Sequential(nn.Flatten(), nn.Linear(12, 2))))
        >>> dict(zip(graph.names, graph(torch.zeros(4, 3, 2, 2, dtype=torch.uint8))))["label"].shape
        torch.Size([4])
    """

    threshold: Tensor

    def __init__(self, detector: Detector) -> None:
        super().__init__()
        check_exportable(detector)
        self._detector = (detector,)
        self.views = detector.views if isinstance(detector, AMP) else 1
        self.net = _bare(detector.net, self.views)
        frozen = detector.net.anchors if isinstance(detector.net, Anchored) else None
        self.anchors = None if frozen is None else len(frozen)
        self.calibration, self.probability = nn.Module(), nn.Module()
        self.calibration.register_buffer("scores", torch.tensor([0.1251, 0.2502, 0.3753]))
        self.calibration.register_buffer("ranks", torch.tensor(4.1254))  # n + 1, what ranks are divided by
        self.probability.register_buffer("temperature", torch.tensor(1.1255))
        self.register_buffer("threshold", torch.tensor(0.6256))
        self.eval()

    @property
    def names(self) -> tuple[str, ...]:
        """Of the outputs; the last is no output of the file, but has its name there."""
        has_temperature = isinstance(self._detector[0], RescoringDetector)
        return (*(name for name in OUTPUTS if has_temperature or name != "temperature"), "logits")

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        """The verdict on a batch."""
        out = self._outputs(self.net.normalise(images))
        scaled = out.logits / cast(Tensor, self.probability.temperature)
        at_least = out.score[:, None] <= cast(Tensor, self.calibration.scores)  # (B, n)
        # Counts are whole numbers, which float32 holds exactly up to 2^24.
        p_value = (1 + at_least.to(torch.float32).sum(dim=1)) / cast(Tensor, self.calibration.ranks)
        found = {
            "label": out.logits.argmax(dim=1),
            "probability": scaled.softmax(dim=1).amax(dim=1),
            "score": out.score,
            "temperature": out.temperature,
            "p_value": p_value,
            "is_ood": ~(out.score <= self.threshold),  # not ">", so that a score that is no number is flagged
            "logits": out.logits,
        }
        return tuple(cast(Tensor, found[name]) for name in self.names)

    def _outputs(self, x: Tensor) -> Outputs:
        detector = self._detector[0]
        if isinstance(detector, Student):
            return detector.of_output(self.net.network(x))
        if self.anchors is None:
            hypotheses = logits_of(self.net.network(x))[None]  # (1, B, C)
        else:
            seen = [view(x, number) for number in range(min(self.views, self.anchors))]
            # All rows, though the stem reads the first of each view: networks may read B off their input.
            folded = torch.cat([seen[k % self.views] for k in range(self.anchors)])
            rows = logits_of(self.net.network(folded))
            hypotheses = rows.view(self.anchors, -1, rows.shape[1])  # (K, B, C)
        if isinstance(detector, AMP):
            return detector.of_hypotheses(hypotheses)
        logits = hypotheses[0] if self.anchors is None else hypotheses.mean(dim=0)
        return cast("LogitDetector | TemperatureScaling", detector).of_logits(logits)


def check_exportable(detector: Detector) -> None:
    """Raise an `InputError` that says why, if a detector is no function that an ONNX file can hold.

    Example:
        >>> from kedge.detectors import ODIN
        >>> check_exportable(ODIN(nn.Sequential(nn.Flatten(), nn.Linear(12, 2))))
        Traceback (most recent call last):
        kedge.errors.InputError: detector must be AMP, Student, MSP, MaxLogit, Entropy, Energy or TemperatureScaling...
    """
    if not reads_logits_alone(detector):
        came = type(detector).__name__
        raise InputError(
            f"detector must be AMP, Student, MSP, MaxLogit, Entropy, Energy or TemperatureScaling; got {came}, which "
            "is more than a function of the logits: run it with kedge"
        )
    if isinstance(detector, AMP) and detector.adaptive:
        raise InputError(
            'detector must ask as many anchors of every image; anchors="auto" asks more of some: fit and calibrate AMP '
            "without it"
        )
    net = detector.net
    if type(net) not in (Classifier, Anchored):
        raise InputError(f"detector must have one network; got {type(net).__name__}: export one of its members")
    if isinstance(net, Anchored) and net.per_image is not None:
        raise InputError(
            "detector must share its anchors between images; this one chooses each image's own by a hash of its "
            'pixels, which is no operation of ONNX: fit one with variant="paper" (and tau="mean", for the other tau)'
        )
    if net.mean.dtype != torch.float32:
        raise InputError(
            f"detector must have a network in float32, got {net.mean.dtype}; convert it by net.float(), then fit and "
            "calibrate again"
        )
    if detector.preprocess is not None and not detector.preprocess.is_image:
        raise InputError(f"detector must take images (D, H, W); this one takes inputs {detector.preprocess.shape}")


def _bare(net: Classifier, views: int) -> Classifier:
    """A copy on the CPU that holds nothing but what evaluation needs."""
    copied = copy.deepcopy(net).cpu()
    copied.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]  # torch's own stubs lack it
    copied.outliers = None
    if isinstance(copied, Anchored):
        with torch.no_grad():
            maps = copied.shared_maps()
        copied.network.set_submodule(copied.layer, FoldedStem(copied.stem, maps, views))
        copied.anchors = None
    return copied.eval()
