"""`distill`: a calibrated student out of an AMP detector."""

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from kedge.anchoring.sampling import choose
from kedge.data import batches
from kedge.data.leakage import fingerprints
from kedge.detectors import Detector
from kedge.errors import InputError
from kedge.experimental.distillation_loss import MIX, Distillation
from kedge.experimental.distillation_split import set_apart
from kedge.experimental.student import Student, temperature_head
from kedge.models import build
from kedge.models.classifier import evaluating
from kedge.seeds import seeded
from kedge.training import RECIPES, Recipe, train
from kedge.training import recipe as named_recipe

AUGMENTATION = ("crop", "pad", "flip", "alternate", "resized_crop")
LOOK = 128  # training images that the temperature to begin with is taken of


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
    """Teach a plain network to give in one forward pass what an AMP detector gives in K, and calibrate it.

    No image serves twice: those that the student is judged on, and those that it is calibrated on, are neither trained
    on nor the same, so that settings can be chosen by the former without a threshold that rests on the choice.

    Args:
        detector: The teacher: AMP, fitted.
        train_set: Labelled training images, best those that the teacher was trained on; see `kedge.train`.
        held_out: In-distribution images that neither was trained on, to calibrate the student on. By default four
            fifths of the teacher's calibration images that are in ``train_set``.
        validation: Labelled images like those, to judge the student on: accuracy after every epoch, and in the end the
            share that gets the teacher's label, ``student.net.record["teacher"]["agreement"]``. By default the other
            fifth; all of them where ``held_out`` is given.
        network: None: the teacher's own, with the mean of its anchors in the first layer, which needs little training.
            Otherwise a name that `kedge.models.build` knows, or a network of your own.
        recipe: A name or a `Recipe`; by default ``"distill"`` for the teacher's own network and ``"fast"`` for another,
            with the crops and flips of the teacher's training.
        mix: See `Distillation`.
        half: Whether to round the student's weights to half precision; see `Classifier.round_weights`.
        seed: Of everything that is random.
        **options: Of `kedge.train`: ``directory``, with which a run can be stopped and goes on, ``progress``,
            ``workers``, ``devices`` and more.

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
    teacher, chosen = loss.teacher, chosen_recipe(detector, recipe, fresh=network is not None)
    parts = set_apart(teacher, train_set, held_out=held_out, validation=validation)
    student = untrained(loss, parts.train, network=network, seed=seed)
    options = {"preprocess": teacher.preprocess, "validation": parts.validation} | options
    net = train(student.net, parts.train, chosen, seed=seed, loss=loss, **options)
    if half:
        net.round_weights()
    known = teacher.calibration
    promise: dict[str, Any] = {} if known is None else {"alpha": known.alpha, "delta": known.delta}
    student.calibrate(parts.held_out, **promise)
    net.record["teacher"] = {
        "method": teacher.name,
        "options": teacher.config(),
        "anchors": teacher.net.k,
        "data": teacher.net.record.get("data", {}),
        "agreement": None if parts.validation is None else _judge(loss, student, parts.validation),
    }
    return student


def untrained(loss: Distillation, images: Any, *, network: str | nn.Module | None = None, seed: int = 0) -> Student:
    """The student before it is trained, and without a threshold: with the mean temperature of its teacher.

    Args:
        loss: Holds the teacher.
        images: Training images.
        network: See `distill`.
        seed: See there.
    """
    teacher = loss.teacher
    assert teacher.preprocess is not None
    look = teacher.as_input(choose(images, teacher.preprocess, LOOK, "random", seed, at_least=1))
    logits, log_tau = loss.targets(look)
    if isinstance(network, str):
        with seeded(seed):
            network = build(network, classes=logits.shape[1], channels=teacher.preprocess.shape[0])
    elif not isinstance(network, nn.Module | None):
        raise InputError(f"network must be None, a name or a torch.nn.Module; got {type(network).__name__}")
    net = Student.prepare(teacher.net if network is None else network, seed=seed)
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
    return replace(RECIPES["fast" if fresh else "distill"], **{k: trained[k] for k in AUGMENTATION if k in trained})


@torch.no_grad()
def _judge(loss: Distillation, student: Student, images: Any) -> dict[str, float]:
    """The share of images to which student and teacher give the same label, and how many there are.

    They are noted down beside the calibration images: a set to test on must not hold what settings are chosen by.
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
