"""A detector as one torch module, from uint8 images to its results, for export."""

import copy
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from kedge.anchoring import Anchored
from kedge.anchoring.layer import AnchoredLayer
from kedge.anchoring.tta import view
from kedge.detectors import Combined, Detector, Outputs
from kedge.detectors.bank import BankDetector
from kedge.detectors.inference import reads_logits_alone
from kedge.errors import InputError
from kedge.models.classifier import Classifier, logits_of
from kedge.models.features import read_features

OUTPUTS = ("label", "probability", "score", "tau", "p_value", "is_ood")


class FrozenAnchors(nn.Module):
    """The anchored layer with the anchors' part as a constant (K, 1, ...); anchor k has view ``views[k]``.

    Attributes:
        one_by_one: Whether anchors are added one after the other: torch cannot trace, for any number of images, one sum
            over images and anchors that is followed by nothing but reductions over anchors.
        rows: The views that its input holds one after the other: one for each anchor, or each view once.
    """

    anchor_maps: Tensor

    def __init__(self, layer: AnchoredLayer, maps: Tensor, views: Sequence[int], *, one_by_one: bool = False) -> None:
        super().__init__()
        self.views, self.layer_x, self.one_by_one = views, layer.layer_x, one_by_one
        self.rows = list(views)
        self.register_buffer("anchor_maps", maps.detach().contiguous())

    def forward(self, x: Tensor) -> Tensor:
        """Images by ``rows``, (K * B, ...) or fewer -> (K * B, ...); the part of each view is computed once."""
        by_view = x.view(len(self.rows), -1, *x.shape[1:])  # (K, B, ...)
        parts = {number: self.layer_x(by_view[self.rows.index(number)]) for number in dict.fromkeys(self.views)}
        if self.one_by_one:
            return torch.cat([parts[n] + part for n, part in zip(self.views, self.anchor_maps, strict=True)])
        both = parts[self.views[0]] if len(parts) == 1 else torch.stack([parts[number] for number in self.views])
        both = both + self.anchor_maps  # (K, B, ...)
        return both.reshape(-1, *both.shape[2:])


class Graph(nn.Module):
    """Images (B, D, H, W) in uint8 -> the tensors listed in `names`.

    The calibration is in buffers with placeholder values, distinct so that no optimizer merges two of them;
    `kedge.export.file.write_calibration` sets them by name.

    Args:
        detector: An exportable detector; see `check_exportable`.
        which: The anchors to use; by default all. If they are not the first, `forward` also takes the logits of those
            before them.
    """

    threshold: Tensor

    def __init__(self, detector: Detector, which: range | None = None) -> None:
        super().__init__()
        check_exportable(detector)
        self._detector, self.which = (copy.copy(detector),), which
        own = [cast(Any, detector).layer] if detector.reads == "features" and hasattr(detector, "layer") else []
        self.layers: list[str] = detector.layers if isinstance(detector, Combined) else own
        anchors = which or range(detector.net.k if isinstance(detector.net, Anchored) else 0)
        count = getattr(detector, "tta", 1)
        self.views = [number % count for number in anchors]  # of the image, one for each anchor
        self.net = _bare(detector.net, anchors, self.views)
        self.rows = self.views  # views that the network sees, for each anchor or once
        once = isinstance(self.net, Anchored) and self.net.runs_once and not self.layers
        if once and detector.preprocess is not None:
            self._run_once(detector.preprocess.shape)
        self.calibration, self.probability = nn.Module(), nn.Module()
        self.calibration.register_buffer("scores", torch.tensor([0.1251, 0.2502, 0.3753]))
        self.calibration.register_buffer("ranks", torch.tensor(4.1254))  # n + 1, by which ranks are divided
        self.probability.register_buffer("temperature", torch.tensor(1.1255))
        self.register_buffer("threshold", torch.tensor(0.6256))
        self.eval()

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the outputs; those after the last of `OUTPUTS` are tensors inside the file only."""
        inside = ("logits",) if self.which is None else ("logits", "hypotheses")
        return (*(name for name in OUTPUTS if self._detector[0].has_tau or name != "tau"), *inside)

    def forward(self, images: Tensor, known: Tensor | None = None) -> tuple[Tensor, ...]:
        """Results for a batch; ``known`` are the logits under the anchors before these, (B, K', C)."""
        out, logits_k = self._outputs(self.net.normalise(images), known)
        scaled = out.logits / cast(Tensor, self.probability.temperature)
        at_least = out.score[:, None] <= cast(Tensor, self.calibration.scores)  # (B, n)
        # Counts are whole numbers, which float32 holds exactly up to 2^24.
        p_value = (1 + at_least.to(torch.float32).sum(dim=1)) / cast(Tensor, self.calibration.ranks)
        results = {
            "label": out.logits.argmax(dim=1),
            "probability": scaled.softmax(dim=1).amax(dim=1),
            "score": out.score,
            "tau": out.tau,
            "p_value": p_value,
            "is_ood": ~(out.score <= self.threshold),  # not ">", so that NaN is flagged
            "logits": out.logits,
            "hypotheses": logits_k.transpose(0, 1),  # images first, as all outputs
        }
        return tuple(cast(Tensor, results[name]) for name in self.names)

    def _outputs(self, x: Tensor, known: Tensor | None) -> tuple[Outputs, Tensor]:
        """The detector's outputs for normalised images, and the per-anchor logits (K, B, C)."""
        detector: Any = self._detector[0]
        if detector.reads == "output":
            out = detector.of_output(self.net.network(x))
            return out, out.logits[None]
        seen = {number: view(x, number) for number in self.views}
        # All rows, though the layer reads only the first of each view: networks may read B off their input.
        folded = torch.cat([seen[number] for number in self.rows]) if self.rows else x
        output, features = read_features(self.net.network, folded, self.layers)
        rows, k = logits_of(output), len(self.views) or 1
        logits_k = rows.view(k, -1, rows.shape[1])
        if known is not None:
            logits_k = torch.cat([known.transpose(0, 1), logits_k])
        if detector.reads == "per_anchor_logits":
            return detector.of_per_anchor_logits(logits_k), logits_k
        logits = logits_k.mean(dim=0) if self.views else logits_k[0]
        z: Tensor | None = None
        for layer in self.layers:
            z = features[layer].view(k, -1, *features[layer].shape[1:])  # (K, B, ...)
            z = z.mean(dim=0) if self.views else z[0]
        if isinstance(detector, Combined):
            return detector.of_pass(logits, logits_k, z), logits_k
        return detector.of_logits(logits) if z is None else detector.of_features(logits, z), logits_k

    def _run_once(self, shape: Sequence[int]) -> None:
        """Let what lies before an inner anchored layer run once per view, where that gives the same logits.

        The rows then multiply at the layer, which a network cannot take that carries x around it or reads B before it.
        """
        layer = cast(FrozenAnchors, self.net.network.get_submodule(cast(Anchored, self.net).layer))
        images = torch.rand((3, *shape), generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            x = self.net.normalise(images)
            _, expected = self._outputs(x, None)
            self.rows = layer.rows = list(dict.fromkeys(self.views))
            try:
                _, logits = self._outputs(x, None)
                same = logits.shape == expected.shape and torch.allclose(logits, expected, rtol=1e-3, atol=1e-4)
            except Exception:  # of shapes that do not fit
                same = False
        if not same:
            self.rows = layer.rows = self.views


def check_exportable(detector: Detector) -> None:
    """Raise an `InputError` with the reason if an ONNX file cannot hold a detector."""
    net = detector.net
    of_features = detector.reads == "features" and detector.takes_features
    if isinstance(detector, Combined):
        of_features = detector.in_one_pass
    if not (reads_logits_alone(detector) or of_features):
        raise InputError(
            "detector must be a function of the logits, or of them and the input of the last layer, such as AMP, "
            f"MSP or KNN; got {type(detector).__name__}, which reads more of the network: run it with kedge"
        )
    parts = detector.parts if isinstance(detector, Combined) else [detector]
    if any(isinstance(part, BankDetector) and part.inverted_file is not None for part in parts):
        raise InputError(
            "detector must compare with its bank exactly, since an ONNX file cannot search an index; fit it with "
            'index="exact", and with limit= to keep the file small, or run it with kedge'
        )
    if type(net) not in (Classifier, Anchored):
        raise InputError(f"detector must have one network; got {type(net).__name__}: export one of its members")
    if isinstance(net, Anchored) and net.per_image is not None:
        raise InputError(
            "detector must share its anchors between images; this one chooses them by a hash of the pixels, which "
            'ONNX cannot compute: fit one with variant="paper" (and tau="mean", for the other tau)'
        )
    if net.mean.dtype != torch.float32:
        raise InputError(
            f"detector must have a network in float32, got {net.mean.dtype}; call net.float(), fit and calibrate again"
        )
    if detector.preprocess is not None and not detector.preprocess.is_image:
        raise InputError(f"detector must take images (D, H, W); this one takes inputs {detector.preprocess.shape}")


def _bare(net: Classifier, which: range, views: Sequence[int]) -> Classifier:
    """A copy on the CPU with only what evaluation under some of its anchors needs."""
    copied = copy.deepcopy(net).cpu()
    copied.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]  # torch's own stubs lack it
    copied.outliers = None
    if isinstance(copied, Anchored):
        with torch.no_grad():
            maps = copied.shared_maps()[which.start : which.stop]
        last = copied.runs_once and copied.passes == 1  # nothing lies behind the layer that counts
        frozen = FrozenAnchors(copied.anchored_layer, maps, views, one_by_one=last)
        copied.network.set_submodule(copied.layer, frozen)
        copied.anchors = None
    return copied.eval()
