"""`distill`: train and calibrate a `Student` of an AMP detector."""

import copy
import hashlib
from dataclasses import replace
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kedge import scores
from kedge.anchoring.folding import NORMS
from kedge.anchoring.sampling import choose
from kedge.checks import between, shape_of
from kedge.data import ImageSet, StreamedSet, batches
from kedge.data.leakage import fingerprints, shared
from kedge.detectors import AMP, Detector, for_inference
from kedge.errors import InputError, NotReadyError
from kedge.experimental.student import Student, temperature_head
from kedge.models import build
from kedge.models.classifier import Classifier, evaluating
from kedge.seeds import seeded
from kedge.training import RECIPES, Loss, Recipe, Step, StepLoss, train
from kedge.training import recipe as named_recipe

MIX = 0.5
AUGMENTATION = ("crop", "pad", "flip", "alternate", "resized_crop", "smallest_crop")  # as in the teacher's recipe
INITIAL_IMAGES = 128  # training images that the initial tau is estimated on
VALIDATION_FIFTH = 5  # one in five of the teacher's calibration images is used for validation


def distill(
    detector: Detector,
    train_set: Any,
    *,
    held_out: Any = None,
    validation: Any = None,
    network: str | nn.Module | None = None,
    recipe: str | Recipe | None = None,
    mix: float = MIX,
    half: bool = False,
    seed: int = 0,
    **options: Any,
) -> Student:
    """Train an unanchored network to give in one forward pass what an AMP detector gives in K, and calibrate it.

    Images for validation and for calibration are neither trained on nor the same, so that settings can be chosen by
    validation without affecting the threshold.

    Args:
        detector: The teacher: a fitted AMP.
        train_set: Labelled training images, preferably those of the teacher; see `kedge.train`.
        held_out: In-distribution images that neither network was trained on, to calibrate the student on. By default
            four fifths of the teacher's calibration images that are in ``train_set``.
        validation: Labelled images for the accuracy after every epoch and, at the end, the share of labels that agree
            with the teacher's, ``student.net.record["teacher"]["agreement"]``. By default the other fifth; all of them
            if ``held_out`` is given.
        network: A name for `kedge.models.build`, or a network. By default the teacher's own, with the mean of its
            anchors in the first layer, which needs little training.
        recipe: A name or a `Recipe`; by default ``"distill"`` for the teacher's network and ``"fast"`` for another,
            with the crops and flips of the teacher's training.
        mix: See `Distillation`.
        half: Whether to round the student's weights to half precision; see `Classifier.round_weights`.
        seed: Random seed.
        **options: Options of `kedge.train`, such as ``directory``, ``progress``, ``workers`` and ``devices``.

    Example:
        >>> import kedge
        >>> images = kedge.ImageSet(torch.randint(0, 256, (64, 1, 8, 8), dtype=torch.uint8), torch.arange(64) % 2)
        >>> net = kedge.anchor(build("compact", width=4, classes=2, channels=1))
        >>> teacher = kedge.AMP(net.eval()).fit(images).calibrate(images.subset(range(40)))
        >>> student = distill(teacher, images, recipe=Recipe(epochs=1, batch=8, lr=0.01))
        >>> student.cost.forward, student.net.record["data"]["images"]
        (1, 24)
    """
    loss = Distillation(detector, mix=mix, keep_statistics=network is None)
    teacher, chosen = loss.teacher, distillation_recipe(detector, recipe, fresh=network is not None)
    split = split_for(teacher, train_set, held_out=held_out, validation=validation)
    student = untrained_student(loss, split.train, network=network, seed=seed)
    options = {"preprocess": teacher.preprocess, "validation": split.validation} | options
    net = train(student.net, split.train, chosen, seed=seed, loss=loss, **options)
    if half:
        net.round_weights()
    calibration = teacher.calibration
    guarantee: dict[str, Any] = {} if calibration is None else {"alpha": calibration.alpha, "delta": calibration.delta}
    student.calibrate(split.held_out, **guarantee)
    net.record["teacher"] = {
        "method": teacher.name,
        "options": teacher.config(),
        "anchors": teacher.net.k,
        "data": teacher.net.record.get("data", {}),
        "agreement": None if split.validation is None else _agreement(loss, student, split.validation),
    }
    return student


def distillation_recipe(detector: Detector, recipe: str | Recipe | None, *, fresh: bool) -> Recipe:
    """The given recipe, or the default one, with the crops and flips of the teacher's training."""
    if recipe is not None:
        return named_recipe(recipe)
    trained = detector.net.record.get("recipe", {})
    return replace(RECIPES["fast" if fresh else "distill"], **{k: trained[k] for k in AUGMENTATION if k in trained})


def untrained_student(
    loss: "Distillation", images: Any, *, network: str | nn.Module | None = None, seed: int = 0
) -> Student:
    """The student before training, uncalibrated, with the mean tau of its teacher; see `distill`."""
    teacher = loss.teacher
    assert teacher.preprocess is not None
    x = teacher.as_input(choose(images, teacher.preprocess, INITIAL_IMAGES, "random", seed, at_least=1))
    logits, log_tau = loss.targets(x)
    if isinstance(network, str):
        with seeded(seed):
            network = build(network, classes=logits.shape[1], channels=teacher.preprocess.shape[0])
    elif not isinstance(network, nn.Module | None):
        raise InputError(f"network must be None, a name or a torch.nn.Module; got {type(network).__name__}")
    net = Student.prepare(teacher.net if network is None else network, seed=seed)
    student = Student(net, score=teacher.score_by, rescale=teacher.rescale)
    with evaluating(student.net), torch.no_grad():
        initial = student.net(x, raw=True).extra[0]
    temperature_head(student.net).start_at(float((log_tau - initial).mean()))
    student.classes = teacher.classes
    return student.fit(images, preprocess=teacher.preprocess)


class Distillation(Loss):
    """Distance of the student's logits and log tau from the teacher's, on training images and on mixes of them.

    The squared error of the logits relative to the squared norm of the teacher's, plus the mean squared error of log
    tau. Labels are not used.

    Args:
        teacher: A fitted AMP detector; it is copied.
        mix: Mixes per training image, in [0, 1]: weighted means of two images of the batch, so that the student learns
            from the teacher away from the training images too.
        keep_statistics: Whether batch norms keep their statistics, for a student that starts as its teacher's network.
    """

    name = "distillation"
    unanchored_only = True

    def __init__(self, teacher: Detector, *, mix: float = MIX, keep_statistics: bool = False) -> None:
        self.teacher = copy.deepcopy(_checked_teacher(teacher))
        self.teacher.net.eval()
        self._fast = cast(AMP, for_inference(self.teacher))
        self.mix = between("mix", mix, 0, 1)
        self.keep_statistics = keep_statistics

    def check(self, net: Classifier) -> None:
        """Raise an error if the network has no temperature head."""
        temperature_head(net)

    def targets(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The teacher's logits (B, C) and log tau (B,) of images in [0, 1], with all its anchors."""
        teacher = self._fast
        teacher.net.to(x.device)
        with torch.no_grad():
            outputs = teacher.outputs(x.to(teacher.net.mean))
        assert outputs.tau is not None
        return outputs.logits.to(x), outputs.tau.clamp_min(scores.TAU_FLOOR).log().to(x)

    def distance(self, logits: Tensor, log_tau: Tensor, targets: tuple[Tensor, Tensor]) -> Tensor:
        """Loss of a student's logits (B, C) and log tau (B,)."""
        logits_t, log_tau_t = targets
        classes = logits_t.shape[1]
        if logits.shape != logits_t.shape:
            raise InputError(f"network must have as many classes as its teacher, {classes}; got {logits.shape[1]}")
        error = (logits - logits_t).square().sum() / logits_t.square().sum().clamp_min(scores.TAU_FLOOR)
        return error + F.mse_loss(log_tau, log_tau_t)

    def loss(self, step: Step) -> StepLoss:
        """Distance on the batch and on mixes of its images."""
        if self.keep_statistics:
            for module in step.net.modules():
                if isinstance(module, NORMS):
                    module.eval()
        x = torch.cat([step.x, mixed(step.x, round(self.mix * len(step.x)), step.generator)])
        output = step.forward(x, raw=True)
        value = self.distance(output.logits, output.extra[0], self.targets(x))
        return StepLoss(value, step.fitting(output.logits[: len(step.x)]))

    def config(self) -> dict[str, Any]:
        """The arguments, with the sha256 of the teacher's weights, anchors and options."""
        digest = hashlib.sha256(repr(sorted(self.teacher.config().items())).encode())
        for name, value in sorted(self.teacher.net.state_dict().items()):
            content = value.detach().cpu().contiguous().flatten().view(torch.uint8)
            digest.update(name.encode() + content.numpy().tobytes())
        return {"mix": self.mix, "keep_statistics": self.keep_statistics, "teacher": digest.hexdigest()}


def mixed(x: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Weighted means of ``count`` random images of a batch (B, D, ...) with others of it."""
    first, second = (torch.randperm(len(x), generator=generator)[:count].to(x.device) for _ in range(2))
    weight = torch.rand(count, generator=generator).view(-1, *(1,) * (x.ndim - 1)).to(x)
    return x[first].lerp(x[second], weight)


class DistillationSplit(NamedTuple):
    """Disjoint images to train on, to validate on (or None) and to calibrate on."""

    train: Any
    validation: Any
    held_out: Any


def split_for(detector: Detector, train_set: Any, *, held_out: Any = None, validation: Any = None) -> DistillationSplit:
    """Split a set such that no image is used for two of training, validation and calibration.

    Calibration images of the detector are not trained on, nor are ``held_out`` and ``validation``. A fifth of the
    former, chosen by their pixels and so always the same, are for validation and the others for calibration; if
    ``held_out`` is given, all are for validation. Only kedge's own sets are searched; other data sets and loaders are
    used as they are, and need ``held_out``.
    """
    preprocess = detector.preprocess
    assert preprocess is not None
    if isinstance(train_set, ImageSet) and tuple(train_set.images.shape[1:]) != preprocess.shape:
        shape = shape_of(train_set.images[0])
        raise InputError(f"train_set must have images {preprocess.shape}, as the detector takes; got {shape}")

    def prints_of(images: Any) -> Tensor:
        return torch.cat([fingerprints(x) for x, _ in batches(images, preprocess)])

    given = [prints_of(images) for images in (held_out, validation) if images is not None]
    if len(given) == 2 and (both := len(shared(*given))):
        raise InputError(f"validation must have no image of held_out; {both} are in both: remove them from one")
    if isinstance(train_set, ImageSet | StreamedSet):
        prints = prints_of(train_set)
        own, named = torch.zeros(2, len(prints), dtype=torch.bool)
        if detector.calibration is not None:
            own[shared(detector.calibration.fingerprints, prints)] = True
        for group in given:
            named[shared(group, prints)] = True
        free = own & ~named
        if validation is None:
            fifth = free if held_out is not None else free & (prints[:, 0] % VALIDATION_FIFTH == 0)
            validation = _subset(train_set, fifth)
            free = free & ~fifth
        if held_out is None:
            held_out = _subset(train_set, free)
        train_set = _subset(train_set, ~(own | named))
        if train_set is None:
            raise InputError("train_set must have images besides those for validation and calibration; it has none")
    if held_out is None:
        raise InputError(
            "held_out must be in-distribution images that neither network was trained on, to calibrate the student; by "
            "default they are the detector's calibration images in train_set, which contains none of them"
        )
    return DistillationSplit(train_set, validation, held_out)


def _checked_teacher(detector: Any) -> AMP:
    if not isinstance(detector, AMP):
        raise InputError(f"detector must be an AMP detector; got {type(detector).__name__}")
    per_anchor = isinstance(detector.score_by, str) and detector.score_by not in scores.SCORES
    if per_anchor or detector.shared_tau:
        raise InputError(
            "detector must score mean logits divided by each image's own tau, which a student learns; got "
            f"score={detector.score_by!r}, shared_tau={detector.shared_tau}"
        )
    if detector.preprocess is None:
        raise NotReadyError("the detector is not fitted: call AMP(net).fit(train_set) first")
    return detector


@torch.no_grad()
def _agreement(loss: Distillation, student: Student, images: Any) -> dict[str, float]:
    """Share of images with the same label from student and teacher, and the number of images.

    Their fingerprints are added to the calibration: a test set must not contain what settings are chosen by.
    """
    assert student.preprocess is not None
    assert student.calibration is not None
    same, prints = [], [student.calibration.fingerprints]
    for raw, _ in batches(images, student.preprocess):
        x = student.as_input(raw)
        same.append(loss.targets(x)[0].argmax(dim=1) == student.net(x).argmax(dim=1))
        prints.append(fingerprints(raw))
    student.calibration = replace(student.calibration, fingerprints=torch.cat(prints))
    return {"share": float(torch.cat(same).double().mean()), "images": sum(map(len, same))}


def _subset(images: ImageSet | StreamedSet, mask: Tensor) -> ImageSet | StreamedSet | None:
    if bool(mask.all()):
        return images
    return images.subset(mask) if bool(mask.any()) else None
