"""ImageNet's classes, with EfficientNet-Lite0 as it is: photographs of other things, and blur of growing strength.

The known images are validation images of ImageNet with their labels. They are few, so intervals are from the bootstrap
over images, and methods that learn from labels are left out but for the default detector.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kedge.data import Features, ImageSet, Preprocess, StreamedSet, gather, sources
from kedge.detectors.extraction import extract
from kedge.detectors.registry import method_of
from kedge.errors import NotReadyError
from kedge.evaluation.summary import SeedValues, TextTable
from kedge.metrics import METRICS, accuracy
from kedge.metrics.counts import Repeated
from kedge.models import build
from kedge.models.classifier import Classifier
from kedge.seeds import seeded
from kedge.studies.comparison import Fitted, MethodTable, Row, cell, interval, matching, run_rows, single_methods
from kedge.studies.corruptions import SEVERITIES, corrupt
from kedge.studies.imagenet_c import BLUR
from kedge.studies.paper import reported
from kedge.studies.photo_tasks import lite0
from kedge.studies.photographs import photos
from kedge.studies.sets import toy_images, toy_ood
from kedge.studies.study import SMOKE_CLASSES, SMOKE_IMAGES, SMOKE_SIDE, Setting, some
from kedge.studies.task import Task
from kedge.studies.written import Written, write_results

NAME, KNOWN, LABELS = "imagenet", "imagenet-others", "imagenet_validation_labels.txt"
# Flowers-102's artichoke, and its flowers that are, or closely resemble, ImageNet's daisy and cardoon.
IN_IMAGENET = {
    "10": "globe thistle",
    "14": "spear thistle",
    "29": "artichoke",
    "41": "barbeton daisy",
    "49": "oxeye daisy",
}
SIDE = 224  # for which the strengths of the blur are; smaller photographs are enlarged
PREPROCESS = Preprocess((3, SIDE, SIDE), crop=0.875)
FITTED, HELD_OUT = 0.25, 0.25  # of the known images; the others are tested
MOST_OTHERS = 500
RESAMPLES, SMOKE_RESAMPLES = 500, 10
LARGE = ("vim", "residual")  # methods that need more training images than features
COMBINED = {name: Row("combined", parts=tuple(name.split(" + "))) for name in ("mds++ + gen", "knn + gen", "cop + gen")}
STRONGEST = f"blur {SEVERITIES[-1]}"
TABLE_5 = ("auroc", "dtacc", "aupr_in", "aupr_out")
IN_PAPER = {"msp": "unanchored", "temperature_scaling": "TemperatureScaling"}  # rows that its Table 5 has too


@dataclass(frozen=True)
class Images:
    """The features of all images.

    Args:
        net: The classifier.
        known: Labelled images of its classes.
        others: Images of other things, without labels.
        blurred: The known images at each level of blur.
    """

    net: Classifier
    known: Features
    others: tuple[Features, ...]
    blurred: Mapping[int, Features]

    def parts(self, seed: int) -> list[Tensor]:
        """Numbers of the known images to fit on, to calibrate on and to test."""
        order = torch.randperm(len(self.known), generator=torch.Generator().manual_seed(seed))
        return list(order.tensor_split([int(FITTED * len(order)), int((FITTED + HELD_OUT) * len(order))]))

    def task(self, seed: int) -> Task:
        """The task of a seed; each level of blur of the test images is an OOD set in it."""
        fitted, held_out, tested = self.parts(seed)
        fit, held, test = (self.known.subset(part) for part in (fitted, held_out, tested))
        blurred = (
            replace(each.subset(tested), name=level_name(level), labels=None, classes=())
            for level, each in self.blurred.items()
        )
        return Task(NAME, seed, self.net, fit, held, test, self.others[:1], self.others[1:], tuple(blurred))


def run_imagenet(
    setting: Setting,
    out: Path,
    features: Path,
    *,
    patterns: tuple[str, ...] = (),
    command: str = "",
    progress: Callable[[str, int, int], None] | None = None,
) -> Written:
    """Run what is missing, and write metrics.json and tables.md; arguments as of `run_cifar10_trained`."""
    rows = matching(label_free() | COMBINED, patterns)
    try:
        images = toy_features(features) if setting.scale == "smoke" else read_images(setting.data_dir, features)
    except NotReadyError as error:
        return write_results(out, {}, (), setting, command, {NAME: str(error)})
    table = run_rows(rows, {NAME: images.task}, setting.seeds, out / "cells", progress)
    resamples = SMOKE_RESAMPLES if setting.scale == "smoke" else RESAMPLES
    found = bootstrap(images, rows, setting.seeds, out / "cells", resamples)
    right = {
        str(level): [accuracy(each.logits[part], _labels(images.known)[part]) for part in _tested(images, setting)]
        for level, each in {0: images.known, **images.blurred}.items()
    }
    results = {**table.as_dict(), "bootstrap": found, "accuracy by level of blur": right}
    return write_results(out, results, interval_tables(results), setting, command, {})


def label_free() -> dict[str, Row]:
    """A row for each single method that needs no labels of training images, and does with a hundred of them."""
    return {
        label: row
        for label, row in single_methods().items()
        if label not in LARGE and not getattr(method_of(row.method)[0], "needs_labels", False)
    }


def read_images(data_dir: Path | None, folder: Path) -> Images:
    """Features by EfficientNet-Lite0 of the photographs, and of the known ones blurred as in ImageNet-C."""
    net, home = lite0(), folder / "lite0-224"
    known = labelled(photos(KNOWN, data_dir), sources.data_folder(data_dir) / LABELS)
    flowers = photos("flowers", data_dir)
    assert flowers.labels is not None
    unknown = [number for number, name in enumerate(flowers.classes) if name not in IN_IMAGENET]
    flowers = some(flowers.subset(torch.isin(flowers.labels, torch.tensor(unknown))), MOST_OTHERS)
    others = []
    for each in (flowers, some(photos("textures", data_dir), MOST_OTHERS)):
        others.append(replace(extract(net, each, home / each.name, preprocess=PREPROCESS), labels=None, classes=()))
    clean = gather(known, PREPROCESS, name=KNOWN)
    read = extract(net, known, home / KNOWN, preprocess=PREPROCESS)
    return Images(net, read, tuple(others), blurred(net, clean, home, PREPROCESS))


def blurred(net: Classifier, clean: ImageSet, home: Path, preprocess: Preprocess | None = None) -> dict[int, Features]:
    """Features of known images at each level of blur."""
    return {
        level: extract(net, corrupt(clean, BLUR, level), home / f"blur-{level}", preprocess=preprocess)
        for level in SEVERITIES
    }


def labelled(images: StreamedSet, path: Path) -> StreamedSet:
    """Validation images of ImageNet with the labels of a file: a WordNet id for each number in their names."""
    if not path.is_file():
        raise NotReadyError(
            f"{images.name} needs labels in {path}: a WordNet id a line, as the file validation_labels.txt in the "
            "folder datasets/imagenet2012 of the package tensorflow-datasets has them"
        )
    ids = path.read_text(encoding="utf-8").split()
    classes = tuple(sorted(set(ids)))
    numbers = [int(re.findall(r"(\d{8})\.", name)[0]) for name in images.store.names]
    return replace(images, labels=torch.tensor([classes.index(ids[n - 1]) for n in numbers]), classes=classes)


def toy_features(folder: Path) -> Images:
    """Toy images and a tiny network that is not trained, for the smoke scale."""
    with seeded(0):
        net = Classifier(build("compact", width=4, classes=SMOKE_CLASSES), mean=0.5, std=0.25).eval()
    home = folder / "toy-imagenet"
    known = toy_images(SMOKE_IMAGES, "toy", classes=SMOKE_CLASSES, side=SMOKE_SIDE)
    others = (toy_ood(SMOKE_IMAGES, name, side=SMOKE_SIDE) for name in ("toy noise", "toy clouds"))
    read = tuple(extract(net, each, home / each.name) for each in others)
    return Images(net, extract(net, known, home / "toy"), read, blurred(net, known, home))


def level_name(level: int) -> str:
    """The name of the test images at a level of blur."""
    return f"blur {level}"


def bootstrap(
    images: Images, rows: Mapping[str, Row], seeds: Sequence[int], folder: Path, resamples: int
) -> dict[str, dict[str, dict[str, list[float]]]]:
    """By row and OOD set, AUROC as the mean over seeds with the ends of the 95 % interval over redrawn images.

    Of the strongest blur it has all metrics of the paper's Table 5. A redraw takes each image equally often for all
    seeds, rows and sets, and a blurred image as often as the clean one.
    """
    rng, n = np.random.default_rng(0), len(images.known)
    sizes = {each.name: len(each) for each in images.others}
    times = [np.ones(n, np.int64), *(rng.multinomial(n, np.full(n, 1 / n)) for _ in range(resamples))]
    outside = {
        name: [np.ones(m, np.int64), *(rng.multinomial(m, np.full(m, 1 / m)) for _ in range(resamples))]
        for name, m in sizes.items()
    }
    found: dict[str, dict[str, dict[str, list[float]]]] = {label: {} for label in rows}
    tasks = [Fitted(images.task(seed)) for seed in seeds]
    for label, row in rows.items():
        scores = [dict(cell(label, row, fitted, folder).scores) for fitted in tasks]
        for name in (*sizes, *map(level_name, images.blurred)):
            metrics = TABLE_5 if name == STRONGEST else TABLE_5[:1]
            values = np.zeros((len(metrics), resamples + 1))
            for seed, by_set in zip(seeds, scores, strict=True):
                tested = images.parts(seed)[2].numpy()
                repeated = Repeated(by_set[images.known.name], by_set[name])
                for draw, drawn in enumerate(times):
                    counts = repeated(drawn[tested], outside[name][draw] if name in outside else drawn[tested])
                    values[:, draw] += [_of_counts(metric)(counts) / len(seeds) for metric in metrics]
            ends = np.quantile(values[:, 1:], (0.025, 0.975), axis=1)
            found[label][name] = {
                metric: [float(values[k, 0]), *map(float, ends[:, k])] for k, metric in enumerate(metrics)
            }
    return found


def _of_counts(metric: str) -> Callable[..., float]:
    of = METRICS[metric].of_counts
    assert of is not None
    return of


def _labels(known: Features) -> Tensor:
    assert known.labels is not None
    return known.labels


def _tested(images: Images, setting: Setting) -> list[Tensor]:
    return [images.parts(seed)[2] for seed in setting.seeds]


def interval_tables(results: Mapping[str, Any]) -> tuple[TextTable, ...]:
    """AUROC by OOD set, what is flagged, and Table 5 beside the paper's numbers; the largest mean AUROC first."""
    found, table = results["bootstrap"], MethodTable.from_record(results)
    sets = list(next(iter(found.values())))
    ordered = sorted(found, key=lambda label: -sum(found[label][name]["auroc"][0] for name in sets))
    by_set = [(label, *(_ranged(found[label][name]["auroc"]) for name in sets)) for label in ordered]

    def shares(label: str, name: str) -> SeedValues:
        (by_seed,) = table.results[label].values()
        return SeedValues(
            tuple(
                each["id"]["flagged"] if name == KNOWN else each["sets"][name]["flagged"] for each in by_seed.values()
            )
        )

    flagged = [(label, *(interval(shares(label, name), 0) for name in (KNOWN, *sets))) for label in ordered]
    right = results["accuracy by level of blur"]
    accuracies = [f"{interval(SeedValues(tuple(right[level])))}" for level in right]
    table_5 = [(label, *(_ranged(found[label][STRONGEST][metric]) for metric in TABLE_5)) for label in ordered]
    paper = {
        method: [
            f"{number.value:.1f}" for metric in TABLE_5 for number in reported(table="5", method=method, metric=metric)
        ]
        for method in (*IN_PAPER.values(), "AMP")
    }
    table_5 += [(f"paper, ResNet-50: {method}", *values) for method, values in paper.items()]
    within = "means over seeds and 95 % intervals of the bootstrap over images."
    return (
        TextTable(f"AUROC in %, {within}", ("method", *sets), tuple(by_set)),
        TextTable(
            "Share of images that are flagged at alpha 0.05, in %, with half the width of 95 % intervals over seeds.",
            ("method", KNOWN, *sets),
            tuple(flagged),
        ),
        TextTable(
            "Accuracy in % on the test images, as they are (0) and by level of blur.",
            ("level", *right),
            (("", *accuracies),),
        ),
        TextTable(
            f"{STRONGEST}, in %, {within}", ("method", *(METRICS[metric].head for metric in TABLE_5)), tuple(table_5)
        ),
    )


def _ranged(values: Sequence[float]) -> str:
    middle, low, high = (100 * value for value in values)
    return f"{middle:.1f} [{low:.1f}, {high:.1f}]"
