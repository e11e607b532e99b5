"""Running a suite: train what is needed, score every cell once, and assemble the tables."""

import copy
import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from kedge.anchoring import anchor
from kedge.data import Features, ImageSet, Preprocess, StreamedSet
from kedge.detectors import Cost, Detection, Detector, extract
from kedge.errors import FileFormatError, InputError, NotReadyError
from kedge.evaluation import Evaluation, EvaluationResult, ShiftedResult, evaluate
from kedge.evaluation.comparison import pass_seconds
from kedge.evaluation.core import PERMUTED
from kedge.files import file_name, write_json
from kedge.io import artifact
from kedge.metrics import Estimate
from kedge.models.classifier import Classifier, checksum
from kedge.provenance import provenance
from kedge.studies.plan import Suite, SuiteData
from kedge.training import Progress, train

TrainingProgress = Callable[[str, Progress], None]
ScoringProgress = Callable[[str, int, int], None]


class SuiteRun:
    """Runs a suite in a folder. Finished cells are read, not run again; a stopped training is resumed.

    Args:
        suite: What to run.
        directory: Folder for the cells; one suite each.
        networks: Folder for the networks, which suites can share: a network with the same plan, seed and sets is not
            trained again. By default a folder in ``directory``.
        training: More arguments of `kedge.train`: ``accelerator``, ``precision``, ``workers``.
        on_training: Called with a network's name after every training step.
        on_scoring: Called with a method's label, the number of images scored and the number in all.
    """

    def __init__(
        self,
        suite: Suite,
        directory: str | Path,
        *,
        networks: str | Path | None = None,
        training: Mapping[str, Any] | None = None,
        on_training: TrainingProgress | None = None,
        on_scoring: ScoringProgress | None = None,
    ) -> None:
        self.suite, self.directory = suite, Path(directory)
        self.networks = self.directory / "networks" if networks is None else Path(networks)
        self.on_training, self.on_scoring = on_training, on_scoring
        self.training = dict(training or {})
        self._trained: dict[tuple[str, int], Classifier] = {}
        self._extracted: dict[tuple[str, str, str], Features] = {}
        self._data: tuple[int, SuiteData] | None = None  # of the last seed: reading it can take minutes

    def run(self) -> dict[int, Evaluation]:
        """Run what is missing, and return the table of each seed."""
        return {seed: self.evaluation(seed) for seed in self.suite.seeds}

    def evaluation(self, seed: int) -> Evaluation:
        """The table of one seed: every method on the same sets."""
        data = self.data(seed)
        if not data.ood:
            hints = "; ".join(data.missing.values()) or "the suite names none"
            raise NotReadyError(f"the suite {self.suite.name!r} needs at least one OOD set: {hints}")
        labels = [label for label in self.suite.methods if data.outliers is not None or not self._needs_outliers(label)]
        results = {label: self._cell(label, data, seed) for label in labels}
        self._trained.clear()
        self._extracted.clear()
        shifted, known = tuple(s.name for s in data.shifted), {ood: s.name for ood, s in data.known_in.items()}
        apart = tuple(s.name for s in data.ood if s.name in self.suite.apart)
        results = {label: replace(result, apart=apart) for label, result in results.items()}
        return Evaluation(results, data.tested, data.test.name, self.suite.resamples, shifted, known, apart)

    def trainings(self) -> dict[str, dict[str, Any]]:
        """The trainings behind the cells in the folder: by the network's folder, its seconds and versions."""
        trainings: dict[str, dict[str, Any]] = {}
        for path in sorted(self.directory.glob("seed-*/cells/*.json")):
            trainings |= json.loads(path.read_text())["trainings"]
        return trainings

    def detector(self, label: str, seed: int) -> Detector:
        """The detector of a row, fitted and calibrated."""
        data, detector = self.data(seed), self.unfitted(label, seed)
        train = self.read(label, detector, seed, data.train) if detector.reads_train else data.train
        detector.fit(train, preprocess=_preprocess(data))
        return detector.calibrate(self.read(label, detector, seed, data.held_out))

    def unfitted(self, label: str, seed: int) -> Detector:
        """The detector of a row on its networks."""
        method = self.suite.methods[label]
        # A copy, since a detector may give a network other anchors.
        networks = [copy.deepcopy(self.network(name, seed)) for name in method.networks]
        return method.build(networks, self.data(seed).outliers)

    def data(self, seed: int) -> SuiteData:
        """The sets of a seed, read once."""
        if self._data is None or self._data[0] != seed:
            self._data = (seed, self.suite.data(seed))
        return self._data[1]

    def network(self, name: str, seed: int) -> Classifier:
        """A network of the suite, trained, or read where it has been trained already."""
        if (name, seed) not in self._trained:
            plan, data = self.suite.networks[name], self.data(seed)
            if plan.weights is not None:
                accelerator = self.training.get("accelerator", "auto")
                device = {"auto": "cpu", "gpu": "cuda"}.get(accelerator, accelerator)  # Fabric's names, and torch's
                self._trained[name, seed] = plan.loaded(seed).to(device)
                return self._trained[name, seed]
            number, loss = plan.training_seed(seed), plan.training_loss()
            net: Any = plan.build(number) if plan.start is None else copy.deepcopy(self.network(plan.start, seed))
            if plan.anchored:
                net = anchor(net, seed=number, **plan.anchoring)
            if plan.method is not None:
                net = plan.method.prepare(net, **plan.prepare)
            images = data.train if plan.share == 1 else data.train.split(plan.share, seed=number)[0]
            outliers = data.outliers if loss is not None and loss.outliers_per_image else None
            report = self.on_training
            self._trained[name, seed] = train(
                net,
                images,
                plan.recipe,
                seed=number,
                directory=self.networks / self._folder(name, number, data.train, outliers),
                loss=loss,
                outliers=outliers,
                preprocess=None if isinstance(images, ImageSet) else _preprocess(data),
                progress=None if report is None else (lambda progress: report(name, progress)),
                **self.training,
            )
        return self._trained[name, seed]

    def _cell(self, label: str, data: SuiteData, seed: int) -> EvaluationResult:
        path = self.directory / f"seed-{seed}" / "cells" / f"{file_name(label)}.cell"
        identity = self._identity(label, data, seed)
        if path.exists():
            return read_cell(path, identity)  # memory-mapped
        detector, permuted, report = self.detector(label, seed), self.suite.methods[label].permuted, self.on_scoring
        if permuted and not getattr(detector, "rescores", False):
            raise InputError(f"permuted must be False for {label!r}: its score does not depend on the image's tau")

        def read(images: Any) -> Any:
            return self.read(label, detector, seed, images)

        evaluation = evaluate(
            {label: detector},
            read(data.test),
            tuple(map(read, data.ood)),
            shifted=tuple(map(read, data.shifted)),
            known_in={ood: read(images) for ood, images in data.known_in.items()},
            controls=permuted,
            resamples=self.suite.resamples,
            progress=None if report is None else (lambda done, total: report(label, done, total)),
        )
        result = evaluation.results[label + PERMUTED if permuted else label]
        if isinstance(read(data.test), Features):  # the pass through the network is part of each row's cost
            alone = pass_seconds(detector.net, data.test, _preprocess(data))
            result = replace(result, milliseconds=result.milliseconds + 1000 * alone)
        write_cell(path, result, identity, self._trainings(label, data, seed))
        return read_cell(path, identity)  # without what is in memory: logits of many images by many rows

    def read(self, label: str, detector: Detector, seed: int, images: Any) -> Any:
        """A set as a row takes it: its features, where several rows can share them, or the images."""
        names = self.suite.methods[label].networks
        if images is self.data(seed).train and detector.anchored:
            return images  # features are of a network with anchors, which `fit` draws
        shared = self.suite.extract or detector.anchored
        if not shared or not detector.takes_features or len(names) > 1:
            return images
        key = checksum(detector.net), images.name, images.checksum
        if key not in self._extracted:
            home = self.directory / f"seed-{seed}" / "features" / file_name(names[0])
            home = home / key[0][:12] if detector.anchored else home  # a network for each draw of anchors
            folder = home / file_name(images.name) if self.suite.extract else None
            preprocess = _preprocess(self.data(seed))
            self._extracted[key] = extract(detector.net, images, folder, preprocess=preprocess, batch_size=256)
        return self._extracted[key]

    def _needs_outliers(self, label: str) -> bool:
        """Whether a method, or the training of one of its networks, takes the suite's outliers."""
        method = self.suite.methods[label]
        kinds = [self.suite.networks[name].method for name in method.networks]
        return method.outliers or any(kind is not None and kind.needs_outliers for kind in kinds)

    def _trainings(self, label: str, data: SuiteData, seed: int) -> dict[str, dict[str, Any]]:
        """How long the networks of a row trained, with those that they start from."""
        names = list(self.suite.methods[label].networks)
        names += [start for name in names if (start := self.suite.networks[name].start)]
        trainings = {}
        for name in names:
            net, number = self.network(name, seed), self.suite.networks[name].training_seed(seed)
            folder = self._folder(name, number, data.train, data.outliers if net.outliers is not None else None)
            trainings[folder] = {key: net.record.get(key) for key in ("seconds", "made with")}
        return trainings

    def _described(self, name: str) -> dict[str, Any]:
        """A network's plan as plain data, with the plan that it starts from."""
        plan = self.suite.networks[name]
        return plan.described() | ({} if plan.start is None else {"start": self._described(plan.start)})

    def _folder(self, name: str, seed: int, train: ImageSet | StreamedSet, outliers: ImageSet | None) -> str:
        """A folder's name that only the very same training has."""
        sets = [(s.name, s.checksum) for s in (train, outliers) if s is not None]
        identity = {**self._described(name), "member": seed, "sets": sets, "precision": self.training.get("precision")}
        digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
        kind = "anchored" if self.suite.networks[name].anchored else "unanchored"
        return f"{file_name(str(identity['network']))}-{kind}-seed-{seed}-{digest[:12]}"

    def _identity(self, label: str, data: SuiteData, seed: int) -> dict[str, Any]:
        """What a finished cell must have been made of to count for this suite."""
        method = self.suite.methods[label]
        plain = {
            "label": label,
            "seed": seed,
            "method": method.described(),
            "networks": {
                name: self._described(name) | {"seed": self.suite.networks[name].training_seed(seed)}
                for name in method.networks
            },
            "training images": data.train.checksum,
            "held-out images": data.held_out.checksum,
            "outliers": None if data.outliers is None else data.outliers.checksum,
            "test sets": {name: s.checksum for name, s in data.tested.items()},
            "known in": {ood: s.name for ood, s in data.known_in.items()},
            "shifted": [s.name for s in data.shifted],
            "resamples": self.suite.resamples,
        }
        same: dict[str, Any] = json.loads(json.dumps(plain))  # as a file gives it back
        return same


def write_cell(
    path: Path, result: EvaluationResult, identity: Mapping[str, Any], trainings: Mapping[str, Mapping[str, Any]]
) -> None:
    """Write a result with its single scores to one file, whole or not at all, and without them to a small JSON file."""
    tensors = {
        f"{number}.{f.name}": value
        for number, detection in enumerate(result.detections.values())
        for f in fields(detection)
        if isinstance(value := getattr(detection, f.name), Tensor)
    }
    kept = {f.name: getattr(result, f.name) for f in fields(result) if f.name not in ("detections", "apart")}
    kept["metrics"] = {ood: {m: vars(e) for m, e in by.items()} for ood, by in result.metrics.items()}
    kept["shifted"] = {name: vars(shifted) for name, shifted in result.shifted.items()}
    kept["cost"] = vars(result.cost)
    header = {
        "cell": dict(identity),
        "trainings": dict(trainings),
        "sets": list(result.detections),
        "result": kept,
        "made with": provenance(),
    }
    artifact.write(path, header, tensors)
    write_json(path.with_suffix(".json"), header)


def read_cell(path: Path, identity: Mapping[str, Any]) -> EvaluationResult:
    """Read a finished cell; one that was made of other networks or images is an error."""
    header, tensors = artifact.read(path)
    if "cell" not in header:
        raise FileFormatError(f"{path} must be a cell of a suite; it is another kedge file: delete it")
    changed = [key for key, value in identity.items() if header["cell"].get(key) != value]
    if changed:
        raise InputError(
            f"{path} was made with other {', '.join(changed)} than the suite has now; choose another folder, or delete "
            "the file to run it again"
        )
    kept = header["result"]
    kept["metrics"] = {ood: {m: Estimate(**e) for m, e in by.items()} for ood, by in kept["metrics"].items()}
    kept["cost"] = Cost(**kept["cost"])
    kept["shifted"] = {name: ShiftedResult(**values) for name, values in kept["shifted"].items()}
    detections = {name: _detection(artifact.part(tensors, f"{n}.")) for n, name in enumerate(header["sets"])}
    return EvaluationResult(**kept, detections=detections)


def _detection(tensors: Mapping[str, Tensor]) -> Detection:
    values: dict[str, Any] = {"tau": None, **tensors}
    return Detection(**values)


def _preprocess(data: SuiteData) -> Preprocess:
    return data.preprocess or Preprocess(tuple(data.test.images.shape[1:]))
