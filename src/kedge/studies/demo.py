"""The demo: an anchored network and its unanchored baseline on digits 0 to 7, against other images."""

from collections.abc import Callable
from dataclasses import dataclass

from kedge.anchoring import anchor
from kedge.data import ImageSet
from kedge.data.classes import of_classes
from kedge.data.digits import digits
from kedge.detectors import AMP, MSP, Detector, Energy, Entropy, MaxLogit
from kedge.evaluation import Evaluation, evaluate
from kedge.models import build
from kedge.seeds import seeded
from kedge.studies.outlier_images import inverted, letters, noised, textures
from kedge.training import Progress, Recipe, recipe, train

KNOWN, HELD_OUT = (0, 1, 2, 3, 4, 5, 6, 7), (8, 9)


@dataclass(frozen=True)
class DemoData:
    """The digits to train, to calibrate and to test on, and the out-of-distribution sets."""

    train: ImageSet
    calibration: ImageSet
    test: ImageSet
    ood: tuple[ImageSet, ...]


def demo_data(*, seed: int = 0) -> DemoData:
    """Split the digits; no image of an OOD set was trained on."""
    every = digits()
    known = of_classes(every, KNOWN, name="digits 0 to 7")
    rest, test = known.split(0.8, seed=seed)
    training, calibration = rest.split(0.875, seed=seed)
    near = of_classes(every, HELD_OUT, name="digits 8 and 9")
    unlabelled = ImageSet(near.images, name=near.name)
    ood = (unlabelled, letters(800, seed=seed), inverted(test), noised(test, seed=seed), textures(800, seed=seed))
    return DemoData(training, calibration, test, ood)


def run_demo(
    *,
    seed: int = 0,
    epochs: int | None = None,
    training_progress: Callable[[str, Progress], None] | None = None,
    scoring_progress: Callable[[int, int], None] | None = None,
) -> tuple[AMP, Evaluation]:
    """Train both networks, calibrate their detectors and evaluate them; the anchored one's AMP comes first."""
    data = demo_data(seed=seed)
    how: Recipe = recipe("demo") if epochs is None else recipe("demo", epochs=epochs)
    with seeded(seed):
        network = build("compact", width=16, classes=len(KNOWN), channels=1)
    trained = {}
    for name, net in (("anchored", anchor(network, seed=seed)), ("unanchored", network)):
        report = None if training_progress is None else (lambda p, name=name: training_progress(name, p))
        trained[name] = train(net, data.train, how, seed=seed, progress=report)
    amp = AMP(trained["anchored"])
    detectors: dict[str, Detector] = {"AMP (anchored)": amp, "Energy (anchored)": Energy(trained["anchored"])}
    for kind in (MSP, MaxLogit, Entropy, Energy):
        detectors[f"{kind.__name__} (unanchored)"] = kind(trained["unanchored"])
    for detector in detectors.values():
        detector.fit(data.train).calibrate(data.calibration)
    return amp, evaluate(detectors, data.test, data.ood, resamples=1000, seed=seed, progress=scoring_progress)
