"""`distil`: a calibrated student out of an AMP detector."""

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from kedge.data import batches, choose
from kedge.detectors import AMP, Detector, Student
from kedge.detectors.student import HIDDEN, temperature_head
from kedge.distillation.apart import set_apart
from kedge.distillation.objective import MIX, Distillation, check_teacher
from kedge.errors import InputError
from kedge.models import build
from kedge.models.classifier import evaluating
from kedge.training import RECIPES, Recipe, train
from kedge.training import recipe as named_recipe
from kedge.transforms import seeded

AUGMENTATION = ("crop", "pad", "flip", "alternate", "resized_crop")
COMPARED = 1000  # calibration images on which student and teacher are compared
LOOK = 128  # training images that the temperature to begin with is taken of
TPR = 0.95  # where the teacher has no threshold to take the share of


def distil(
    detector: Detector,
    train_set: Any,
    *,
    held_out: Any = None,
    network: str | nn.Module | None = None,
    recipe: str | Recipe | None = None,
    mix: float = MIX,
    weight_temperature: float = 1.0,
    hidden: int = HIDDEN,
    half: bool = False,
    seed: int = 0,
    **options: Any,
) -> Student:
    """Teach a plain network to give in one forward pass what an AMP detector gives in K, and calibrate it.

    Images of ``train_set`` that the detector was calibrated on, or that are in ``held_out``, are not trained on.

    Args:
        detector: The teacher: AMP, fitted.
        train_set: Labelled training images, best those that the teacher was trained on; see `kedge.train`.
        held_out: In-distribution images that neither was trained on, to calibrate the student on. By default those of
            the teacher's calibration images that are in ``train_set``.
        network: None: the teacher's own, with the mean of its anchors in the first layer, which needs little training.
            Otherwise a name that `kedge.models.build` knows, or a network of your own.
        recipe: A name or a `Recipe`; by default ``"distil"`` for the teacher's own network and ``"fast"`` for another,
            with the crops and flips of the teacher's training.
        mix: See `Distillation`.
        weight_temperature: See there.
        hidden: See `Student.prepare`.
        half: Whether to round the student's weights to half precision; see `Classifier.round_weights`.
        seed: Of everything that is random.
        **options: Of `kedge.train`: ``directory``, with which a run can be stopped and goes on, ``progress``,
            ``validation``, ``workers``, ``devices`` and more.

    Example:
        >>> import kedge
        >>> images = kedge.ImageSet(torch.randint(0, 256, (64, 1, 8, 8), dtype=torch.uint8), torch.arange(64) % 2)
        >>> net = kedge.anchor(build("compact", width=4, classes=2, channels=1))
        >>> teacher = AMP(net.eval()).fit(images).calibrate(images.subset(range(40)))
        >>> student = distil(teacher, images, recipe=Recipe(epochs=1, batch=8, lr=0.01))
        >>> student.cost.forward, len(student.calibration.scores)
        (1, 40)
    """
    teacher = check_teacher(detector)
    assert teacher.preprocess is not None
    objective = Distillation(teacher, mix=mix, weight_temperature=weight_temperature, keep_statistics=network is None)
    chosen = chosen_recipe(teacher, recipe, fresh=network is not None)
    part, held_out = set_apart(teacher, train_set, held_out)
    student = untrained(objective, part, network=network, hidden=hidden, seed=seed)
    options = {"preprocess": teacher.preprocess} | options
    net = train(student.net, part, chosen, seed=seed, objective=objective, **options)
    if half:
        net.round_weights()
    known = teacher.calibration
    student.calibrate(held_out, tpr=known.tpr if known else TPR, confidence=known.confidence if known else None)
    net.record["teacher"] = {
        "method": teacher.name,
        "options": teacher.config(),
        "anchors": teacher.net.k,
        "data": teacher.net.record.get("data", {}),
        **_compared(objective, student, held_out),
    }
    return student


def untrained(
    objective: Distillation,
    images: Any,
    *,
    network: str | nn.Module | None = None,
    hidden: int = HIDDEN,
    seed: int = 0,
) -> Student:
    """The student before it is trained, and without a threshold: with the mean temperature of its teacher.

    Args:
        objective: Holds the teacher.
        images: Training images.
        network: See `distil`, as for the rest.
        hidden: See there.
        seed: See there.
    """
    teacher = objective.teacher
    assert teacher.preprocess is not None
    look = teacher.as_input(choose(images, teacher.preprocess, LOOK, "random", seed, at_least=1))
    logits, log_tau = objective.targets(look)
    net = Student.prepare(_network(teacher, network, logits.shape[1], seed), hidden=hidden, seed=seed)
    student = Student(net, score=teacher.score_by, rescale=teacher.rescale)
    with evaluating(student.net), torch.no_grad():
        begun = student.net(look, raw=True).extra[0]
    temperature_head(student.net).start_at(float((log_tau - begun).mean()))
    student.classes = teacher.classes
    return student.fit(images, preprocess=teacher.preprocess)


def chosen_recipe(detector: Detector, recipe: str | Recipe | None, *, fresh: bool) -> Recipe:
    """The recipe that was asked for, or the default one, with the crops and flips that the teacher was trained with."""
    if recipe is not None:
        return named_recipe(recipe)
    trained = detector.net.record.get("recipe", {})
    return replace(RECIPES["fast" if fresh else "distil"], **{k: trained[k] for k in AUGMENTATION if k in trained})


def _network(teacher: AMP, network: str | nn.Module | None, classes: int, seed: int) -> nn.Module:
    """What the student begins as, before it has a temperature."""
    if network is None:
        return teacher.net
    if isinstance(network, str):
        assert teacher.preprocess is not None
        with seeded(seed):
            return build(network, classes=classes, channels=teacher.preprocess.shape[0])
    if not isinstance(network, nn.Module):
        raise InputError(f"network must be None, a name or a torch.nn.Module; got {type(network).__name__}")
    return network


def _compared(objective: Distillation, student: Student, held_out: Any) -> dict[str, Any]:
    """The share of the first calibration images to which student and teacher give the same label."""
    assert student.preprocess is not None
    same = seen = 0
    with torch.no_grad():
        for x, _ in batches(held_out, student.preprocess):
            x = student.as_input(x[: COMPARED - seen])
            same += int((objective.targets(x)[0].argmax(dim=1) == student.net(x).argmax(dim=1)).sum())
            seen += len(x)
            if seen == COMPARED:
                break
    return {"agreement": same / seen, "compared": seen}
