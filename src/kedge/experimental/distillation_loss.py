"""What a student minimises: its distance from its teacher, on training images and on mixes of them."""

import copy
import hashlib
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from kedge.anchoring.folding import NORMS
from kedge.checks import between
from kedge.detectors import AMP, Detector, for_inference
from kedge.detectors.amp import HYPOTHESIS_SCORES
from kedge.errors import InputError, NotReadyError
from kedge.experimental.student import temperature_head
from kedge.models.classifier import Classifier
from kedge.scores import TAU_FLOOR
from kedge.training.losses import Loss, Step, StepLoss

MIX = 0.5


class Distillation(Loss):
    """How far the student's logits and temperature are from the teacher's, on training images and on mixes of them.

    The squared distance of the logits, as a share of the squared length of the teacher's, plus the squared distance of
    the logarithms of the temperatures. Labels are not used.

    Args:
        teacher: Fitted; it stays as it is.
        mix: Mixes for each training image, a share: weighted means of two images of the batch, so that the student
            learns what its teacher says away from the training images too.
        keep_statistics: Whether batch norms keep the statistics that they have, so that a student which begins as its
            teacher's network does not move away from it by the noise of its batches.
    """

    name = "distillation"
    unanchored_only = True

    def __init__(self, teacher: Detector, *, mix: float = MIX, keep_statistics: bool = False) -> None:
        self.teacher = copy.deepcopy(check_teacher(teacher))
        self.teacher.net.eval()
        self._fast = cast(AMP, for_inference(self.teacher))
        self.mix = between("mix", mix, 0, 1)
        self.keep_statistics = keep_statistics

    def check(self, net: Classifier) -> None:
        """Raise if the network has no temperature."""
        temperature_head(net)

    def targets(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The teacher's logits (B, C) and the logarithm of its temperature (B,), of images in [0, 1]."""
        teacher = self._fast
        if teacher.net.mean.device != x.device:
            teacher.net.to(x.device)
        with torch.no_grad():
            # All anchors, also of a teacher that would ask fewer.
            said = teacher.of_per_anchor_logits(teacher.net.per_anchor_logits(x.to(teacher.net.mean), tta=teacher.tta))
        assert said.tau is not None
        return said.logits.to(x), said.tau.clamp_min(TAU_FLOOR).log().to(x)

    def distance(self, logits: Tensor, log_tau: Tensor, targets: tuple[Tensor, Tensor]) -> Tensor:
        """The loss of a student's logits (B, C) and logarithms of temperatures (B,)."""
        aims, log_aims = targets
        if logits.shape != aims.shape:
            raise InputError(
                f"network must have as many classes as its teacher, {aims.shape[1]}; got {logits.shape[1]}"
            )
        share = (logits - aims).square().sum() / aims.square().sum().clamp_min(TAU_FLOOR)
        return share + F.mse_loss(log_tau, log_aims)

    def loss(self, step: Step) -> StepLoss:
        """The distance on the batch and on mixes of its images."""
        if self.keep_statistics:
            for module in step.net.modules():
                if isinstance(module, NORMS):
                    module.eval()
        x = torch.cat([step.x, mixed(step.x, round(self.mix * len(step.x)))])
        output = step.forward(x, raw=True)
        value = self.distance(output.logits, output.extra[0], self.targets(x))
        return StepLoss(value, step.fitting(output.logits[: len(step.x)]))

    def config(self) -> dict[str, Any]:
        """The arguments, and the sha256 of the teacher's weights, anchors and options."""
        digest = hashlib.sha256(repr(sorted(self.teacher.config().items())).encode())
        for name, value in sorted(self.teacher.net.state_dict().items()):
            plain = value.detach().cpu().contiguous().flatten().view(torch.uint8)
            digest.update(name.encode() + plain.numpy().tobytes())
        return {"mix": self.mix, "keep_statistics": self.keep_statistics, "teacher": digest.hexdigest()}


def mixed(x: Tensor, count: int) -> Tensor:
    """Weighted means of ``count`` of the images (B, D, ...) with others of them, by torch's own generator.

    Example:
        >>> mixes = mixed(torch.eye(4), 3)
        >>> mixes.shape, bool(torch.allclose(mixes.sum(dim=1), torch.ones(3)))
        (torch.Size([3, 4]), True)
    """
    first, second = torch.randperm(len(x))[:count], torch.randperm(len(x))[:count]
    weight = torch.rand(count).view(-1, *(1,) * (x.ndim - 1)).to(x)
    return x[first.to(x.device)].lerp(x[second.to(x.device)], weight)


def check_teacher(detector: Any) -> AMP:
    """Return a detector whose score a student can learn; an error says why another's cannot be."""
    if not isinstance(detector, AMP):
        raise InputError(
            f"detector must be an AMP detector, whose K passes a student can save; got {type(detector).__name__}"
        )
    if detector.score_by in HYPOTHESIS_SCORES or detector.shared_tau:
        raise InputError(
            "detector must score the mean logits, divided by each image's own temperature, which a student learns; got "
            f"score={detector.score_by!r}, shared_tau={detector.shared_tau}"
        )
    if detector.preprocess is None:
        raise NotReadyError("the detector is not fitted: call AMP(net).fit(train_set) first")
    return detector
