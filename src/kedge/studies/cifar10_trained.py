"""CIFAR-10 with networks that are trained to the end: public ones as they are and tuned, and the paper's recipe."""

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from torch import nn

from kedge.anchoring import anchor
from kedge.checks import one_of
from kedge.data import Features, ImageSet
from kedge.detectors.extraction import extract
from kedge.errors import NotReadyError
from kedge.evaluation.summary import SeedValues, TextTable
from kedge.models import build
from kedge.models.classifier import Classifier
from kedge.models.named import load_weights
from kedge.seeds import seeded
from kedge.studies import sets
from kedge.studies.comparison import MethodTable, interval, matching, run_rows, single_methods
from kedge.studies.openood import IMAGENET_STATISTICS
from kedge.studies.photos import ANCHORED
from kedge.studies.study import SMOKE_CLASSES, Setting, smoke_data, some
from kedge.studies.task import GROUPS, Task
from kedge.studies.tasks import NEAR_CIFAR10
from kedge.studies.written import Written, write_results
from kedge.training import Recipe, recipe, train

SCRATCH = recipe("cifar")  # the paper's, 200 epochs
TUNING = Recipe(epochs=10, lr=0.01, weight_decay=1e-4, schedule="cosine")  # with the weight decay of He et al. (2015)
WIDTH = 8  # of `compact`, a network small enough for the paper's recipe
MOST_FITTED, MOST_OTHERS = 10_000, 2_000  # training images to fit on, and images of an OOD set
DEFAULT = "mds++ + gen"
CLASSIFIER = {"accuracy": 1, "ece": 2, "aurc": 3}  # metrics of the classifier on ID images, and their decimals


@dataclass(frozen=True)
class Trained:
    """A network of the study: a public one as it is or tuned, or `compact` trained from scratch.

    Args:
        network: A name of `kedge.models.build`; a public network needs a file of its weights.
        epochs: Of the training; 0 for a public network as it is.
        anchored: Whether it is anchored before it is trained.
    """

    network: str
    epochs: int = 0
    anchored: bool = False

    @property
    def name(self) -> str:
        """Its name in tables."""
        words = [self.network, *(["anchored"] if self.anchored else [])]
        return ", ".join([*words, *([f"{self.epochs} epochs"] if self.epochs else [])])

    @property
    def public(self) -> bool:
        """Whether it starts from public weights."""
        return self.network.startswith("resnet")

    def folder(self, seed: int) -> str:
        """The name of its folders."""
        return f"{self.name}, seed {seed}".replace(", ", "-").replace(" ", "-")

    def recipe(self, setting: Setting) -> Recipe:
        """The paper's recipe from scratch, and a lower learning rate that falls to zero for a public network."""
        if setting.scale == "smoke":
            return setting.recipe()
        return recipe(TUNING if self.public else SCRATCH, epochs=self.epochs)

    def load(self, setting: Setting, folder: Path, seed: int, precision: str | None = None) -> Classifier:
        """The network of a seed, trained in a precision by Fabric's name, or resumed in ``folder``.

        Anchored or not, networks of a seed have the same recipe and see the same images in the same order.
        """
        smoke = setting.scale == "smoke"
        size = {"classes": SMOKE_CLASSES if smoke else 10} | ({} if self.public else {"width": 4 if smoke else WIDTH})
        with seeded(seed):
            net: nn.Module = build(self.network, **size)
        if self.public:
            mean, std = IMAGENET_STATISTICS
            net = Classifier(net, mean=mean, std=std)
            if not smoke:
                load_weights(net.network, self.weights(setting))
            if not self.epochs:
                return net.eval()
        if self.anchored:
            net = anchor(net, init="preserve" if self.public else "fresh", seed=seed)
        directory = folder / "cifar10-trained" / self.folder(seed)
        images, how = training_images(setting, seed), self.recipe(setting)
        return train(net, images, how, seed=seed, directory=directory, precision=precision)

    def weights(self, setting: Setting) -> Path:
        """The file of its public weights."""
        file = next((each for each in setting.weights if f"{self.network}." in each.name), None)
        if file is None:
            raise NotReadyError(f"{self.name} needs weights: pass --weights FILE with {self.network} at its name's end")
        return file


NETWORKS = {
    each.name: each
    for each in (
        *(Trained(f"resnet{depth}") for depth in (20, 56)),
        *(Trained(f"resnet{depth}", epochs, on) for depth in (20, 56) for epochs in (10, 30) for on in (False, True)),
        *(Trained("compact", SCRATCH.epochs, on) for on in (False, True)),
    )
}


def run_cifar10_trained(
    setting: Setting,
    out: Path,
    features: Path,
    *,
    patterns: tuple[str, ...] = (),
    only: tuple[str, ...] = (),
    precision: str | None = None,
    command: str = "",
    progress: Callable[[str, int, int], None] | None = None,
) -> Written:
    """Train what is not trained, run every row on every network, and write metrics.json and tables.md.

    Args:
        setting: Scale, seeds, data, and the files of the public weights.
        out: Folder for the cells and the tables.
        features: Folder of networks and extracted features.
        patterns: Only rows whose label matches one of these, in which ``*`` is any text.
        only: Names in `NETWORKS`; by default all.
        precision: Of all trainings, by Fabric's name; by default single.
        command: The command to run it again, for the record.
        progress: Called with what is running, the number of cells done and the number in all.
    """
    rows = matching(single_methods() | {DEFAULT: ANCHORED[DEFAULT]}, patterns)
    of_amp = {label: row for label, row in ANCHORED.items() if "amp" in (row.method, *row.parts)}
    results: dict[str, MethodTable] = {}
    missing: dict[str, str] = {}
    for name in only or NETWORKS:
        trained = NETWORKS[one_of("--tasks", name, tuple(NETWORKS))]
        loader = {name: partial(task, trained, setting, features, precision=precision)}
        table = run_rows(rows | of_amp if trained.anchored else rows, loader, setting.seeds, out / "cells", progress)
        missing |= table.missing
        if table.columns:
            results[name] = table
    records = {name: table.as_dict() for name, table in results.items()}
    return write_results(out, records, by_network_tables(results) if results else (), setting, command, missing)


def task(trained: Trained, setting: Setting, folder: Path, seed: int, *, precision: str | None = None) -> Task:
    """Fitted on training images, calibrated on half of the test images, and tested on the other half."""
    net = trained.load(setting, folder, seed, precision)
    if setting.scale == "smoke":
        data = smoke_data(seed)
        known, near, far = data.test, data.ood[:1], data.ood[1:]
    else:
        load = partial(sets.load_set, side=32, data_dir=setting.data_dir)
        far = tuple(load(each) for each in sets.FILES if each != NEAR_CIFAR10)
        known, near = load("cifar10"), (load(NEAR_CIFAR10),)

    def read(images: ImageSet, place: str) -> Features:
        home = folder / "cifar10-trained-features" / trained.folder(seed)
        return extract(net, images, home / place, batch_size=256)

    fit = read(some(training_images(setting, seed), MOST_FITTED), "fit")
    held_out, test = read(known, "known").split(0.5, seed=seed)
    near_set, far_sets = (tuple(read(some(each, MOST_OTHERS), each.name) for each in group) for group in (near, far))
    return Task(trained.name, seed, net, fit, held_out, test, near_set, far_sets)


def training_images(setting: Setting, seed: int) -> ImageSet:
    """All training images of CIFAR-10; toy images at the smoke scale."""
    if setting.scale == "smoke":
        images = smoke_data(seed).train
        assert isinstance(images, ImageSet)
        return images
    return sets.load_set("cifar10", side=32, data_dir=setting.data_dir, split="train")


def by_network_tables(results: Mapping[str, MethodTable]) -> tuple[TextTable, ...]:
    """The classifiers, and near and far OOD by method and network; the largest mean AUROC over networks first."""
    labels = dict.fromkeys(label for table in results.values() for label in table.results)
    first = "msp" if "msp" in labels else next(iter(labels))
    classifiers = []
    for name, table in results.items():
        (by_seed,) = table.results[first].values()
        metrics = {each: SeedValues(tuple(result["id"][each] for result in by_seed.values())) for each in CLASSIFIER}
        classifiers.append((name, *(interval(values, CLASSIFIER[each]) for each, values in metrics.items())))
    shown = [TextTable(f"On ID test images, in %; AURC by {first}.", ("network", *CLASSIFIER), tuple(classifiers))]
    for group in GROUPS:
        rows: list[tuple[float, tuple[str, ...]]] = []
        for label in labels:
            cells = dict.fromkeys(results, "")
            aurocs = []
            for name, table in results.items():
                if label in table.results:
                    columns = [column for column in table.columns if column[1] == group]
                    auroc, fpr95 = (table.mean(label, metric, columns) for metric in ("auroc", "fpr95"))
                    cells[name] = f"{interval(auroc)} / {interval(fpr95, 0)}"
                    aurocs.append(auroc.mean)
            rows.append((statistics.fmean(aurocs), (label, *cells.values())))
        rows.sort(key=lambda row: -row[0])
        caption = f"AUROC / FPR95 in %, {group} OOD; means over its sets."
        shown.append(TextTable(caption, ("method", *results), tuple(cells for _, cells in rows)))
    return tuple(shown)
