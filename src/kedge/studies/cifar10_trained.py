"""CIFAR-10 with networks that are trained to the end: public ones as they are and tuned, and the paper's recipe."""

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

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
from kedge.studies.comparison import MethodTable, by_set, interval, matching, single_methods
from kedge.studies.feature_run import FeatureRun, Written
from kedge.studies.openood import IMAGENET_STATISTICS
from kedge.studies.photos import ANCHORED
from kedge.studies.study import SMOKE_CLASSES, Setting, smoke_data, some
from kedge.studies.task import GROUPS, Task
from kedge.training import Recipe, recipe, train

SCRATCH = recipe("cifar")  # the paper's, 200 epochs
TUNING = Recipe(epochs=10, lr=0.01, weight_decay=1e-4, schedule="cosine")  # with the weight decay of He et al. (2015)
WIDTH = 8  # of `compact`, a network small enough for the paper's recipe
MOST_FITTED, MOST_OTHERS = 10_000, 2_000  # training images to fit on, and images of an OOD set
DEFAULT = "mds++ + gen"
COMPARED = ("kl_uniform", "gen", "msp", "vra", DEFAULT, "knn", "mds++")  # with anchors and without
BY_SET = (*COMPARED, "energy", "fdbd", "nnguide", "react", "AMP")  # rows shown by set where some sets are private
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


def run_cifar10_trained(run: FeatureRun) -> Written:
    """Train what is not trained, run every row on every network, and write metrics.json and tables.md."""
    rows = matching(single_methods() | {DEFAULT: ANCHORED[DEFAULT]}, run.patterns)
    of_amp = {label: row for label, row in ANCHORED.items() if "amp" in (row.method, *row.parts)}
    results: dict[str, MethodTable] = {}
    missing: dict[str, str] = {}
    for name in run.only or NETWORKS:
        trained = NETWORKS[one_of("--tasks", name, tuple(NETWORKS))]
        loader = {name: partial(task, trained, run.setting, run.features, precision=run.precision)}
        table = run.rows(rows | of_amp if trained.anchored else rows, loader)
        missing |= table.missing
        if table.columns:
            results[name] = table
    records = {name: table.as_dict() for name, table in results.items()}
    return run.write(records, by_network_tables(results) if results else (), missing)


def task(trained: Trained, setting: Setting, folder: Path, seed: int, *, precision: str | None = None) -> Task:
    """Fitted on training images, calibrated on half of the test images, and tested on the other half."""
    net = trained.load(setting, folder, seed, precision)
    if setting.scale == "smoke":
        data = smoke_data(seed)
        known, near, far = data.test, data.ood[:1], data.ood[1:]
    else:
        load = partial(sets.load_set, side=32, data_dir=setting.data_dir)
        known, near, far = load("cifar10"), (load(sets.NEAR_CIFAR10),), sets.far_from_cifar10(setting.data_dir)

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
    """The classifiers, and near and far OOD by method and network; the largest mean AUROC over networks first.

    Sets that only exist as private archives have tables of their own, one for each network, of some methods.
    """
    private = [shown for each in results.values() if (shown := by_set(each, BY_SET)) is not None]
    results = {name: table.public() for name, table in results.items()}
    labels = dict.fromkeys(label for table in results.values() for label in table.results)
    first = "msp" if "msp" in labels else next(iter(labels))
    classifiers = []
    for name, table in results.items():
        (by_seed,) = table.results[first].values()
        metrics = {each: SeedValues(tuple(result["id"][each] for result in by_seed.values())) for each in CLASSIFIER}
        classifiers.append((name, *(interval(values, CLASSIFIER[each]) for each, values in metrics.items())))
    tables = [TextTable(f"On ID test images, in %; AURC by {first}.", ("network", *CLASSIFIER), tuple(classifiers))]
    for group in GROUPS:
        rows: list[tuple[float, tuple[str, ...]]] = []
        for label in labels:
            cells = dict.fromkeys(results, "")
            aurocs = []
            for name, table in results.items():
                if label in table.results:
                    columns = table.by_group[group]
                    cells[name] = table.words(label, columns)
                    aurocs.append(table.mean(label, "auroc", columns).mean)
            rows.append((statistics.fmean(aurocs), (label, *cells.values())))
        rows.sort(key=lambda row: -row[0])
        caption = f"AUROC / FPR95 in %, {group} OOD; means over its sets."
        tables.append(TextTable(caption, ("method", *results), tuple(cells for _, cells in rows)))
    return (*tables, *private)


def gains(results: Mapping[str, MethodTable]) -> TextTable:
    """What anchoring changes: AUROC of each trained network with anchors less that of the one without, in points."""
    results = {name: table.public() for name, table in results.items()}
    pairs = {
        plain: Trained(each.network, each.epochs, anchored=True).name
        for plain, each in NETWORKS.items()
        if each.epochs and not each.anchored
    }
    pairs = {plain: anchored for plain, anchored in pairs.items() if plain in results and anchored in results}
    rows = []
    for ours, theirs in [(label, label) for label in COMPARED] + [("AMP", "kl_uniform")]:
        cells = []
        for plain, anchored in pairs.items():
            changes = []
            for group in GROUPS:
                with_anchors, without = (
                    table.mean(label, "auroc", [column for column in table.columns if column[1] == group])
                    for table, label in ((results[anchored], ours), (results[plain], theirs))
                )
                by_seed = zip(with_anchors.values, without.values, strict=True)
                changes.append(", ".join(f"{100 * (one - other):+.1f}" for one, other in by_seed))
            cells.append(" / ".join(changes))
        rows.append((ours if ours == theirs else f"{ours} less {theirs} without anchors", *cells))
    caption = "AUROC with anchors less AUROC without, near / far, in points for each seed; the trainings are alike."
    return TextTable(caption, ("method", *pairs), tuple(rows))


def tables_of_cifar10_trained(record: Mapping[str, Any]) -> dict[str, TextTable]:
    """The tables of the project's pages, from what metrics.json holds."""
    results = {name: MethodTable.from_record(record[name]) for name in NETWORKS if name in record}
    names = ("classifiers", *GROUPS, *(f"{name}, private sets" for name in results))
    tables = {f"trained, {name}": table for name, table in zip(names, by_network_tables(results), strict=False)}
    return tables | {"trained, gains": gains(results)}
