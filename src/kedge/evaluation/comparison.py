"""Comparison: every method that applies to a network, on features that are extracted once."""

import copy
import inspect
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from kedge.anchoring import DEFAULT_K, Anchored
from kedge.anchoring.sampling import choose
from kedge.calibration import temperature_of_known
from kedge.checks import at_least, one_of
from kedge.data import Features, ImageSet, Preprocess, StreamedSet, batches, gather
from kedge.data.batches import preprocess_for
from kedge.data.imageset import Splittable
from kedge.data.labels import renumbered
from kedge.detectors import Detection, Detector, Tuner, extract
from kedge.detectors.reading import outputs_of
from kedge.detectors.registry import make, named_methods, post_hoc
from kedge.errors import InputError, KedgeError
from kedge.evaluation.core import result_of
from kedge.evaluation.leaks import refuse_leaks
from kedge.evaluation.paired import RESAMPLES, with_intervals
from kedge.evaluation.result import HEADLINE, Evaluation, EvaluationResult
from kedge.files import file_name
from kedge.metrics import COUNTED, METRICS
from kedge.models.classifier import Classifier, as_classifier, evaluating, unchanged
from kedge.models.named import network
from kedge.progress import progress_bar

ROWS = 4096  # images whose probabilities are computed at a time
KEPT = 50_000  # training images whose features a method keeps at most, so that memory does not grow with their number
TIMED = 64  # images on which the network's pass is timed
OWN_PASSES = "it reads more than logits and last features, at passes of its own: ask for it by name, or for all methods"


def compare(
    net: nn.Module | str,
    train_set: Any,
    held_out: Any,
    ood_sets: Sequence[Any] = (),
    *,
    near: Sequence[Any] = (),
    far: Sequence[Any] = (),
    test: Any = None,
    methods: Sequence[str] = (),
    every: bool = False,
    tune: Any = None,
    directory: str | Path | None = None,
    preprocess: Preprocess | None = None,
    half: bool = False,
    metrics: Sequence[str] = HEADLINE,
    resamples: int = RESAMPLES,
    seed: int = 0,
    batch_size: int | None = None,
) -> Evaluation:
    """Fit, calibrate and judge all methods that apply to a network as it is; the images pass through it once.

    The result has a row for each method, the highest mean AUROC first. Methods that cannot be had on this network or
    these images are in ``left_out`` with the reason. Methods that keep the features of training images keep a random
    sample of at most 50,000. All sets may be `Features` of the network, see `kedge.extract`.

    Args:
        net: A classifier, unanchored or anchored; or a name that `kedge.network` takes, with its published weights.
        train_set: The images that it was trained on, or others of the same kind; with labels for methods that learn
            from each class.
        held_out: In-distribution images that it was not trained on. Half of them set the thresholds, and the other
            half are the test images, unless ``test`` is given.
        ood_sets: Sets of out-of-distribution images, besides those that are near or far.
        near: OOD sets of images of the same kind, as other classes of the same data set; with a mean of their own.
        far: OOD sets of other kinds of images; with a mean of their own.
        test: In-distribution test images, labelled or not.
        methods: Names of methods, as in docs/methods.md; by default all that take features.
        every: Whether to add all methods with passes of their own, such as those of gradients or feature maps.
        tune: How to choose the options of methods that take features, see `kedge.tune`: ``"classes"``, ``"synthetic"``,
            or OOD images. It takes half of the held-out images that set the thresholds; other methods keep their
            defaults.
        directory: A folder for the features, in which a comparison that was stopped goes on; by default they are kept
            in memory.
        preprocess: How images become inputs; by default what the network's record says, or the images' size.
        half: Whether to store features in half precision.
        metrics: Names of metrics to give intervals.
        resamples: Number of bootstrap resamples for intervals; 0 for no intervals.
        seed: Random seed of the split of ``held_out`` and of the bootstrap.
        batch_size: Images that pass through the network at a time, by default `kedge.Preprocess.batch_size`.

    Example:
        >>> noise = lambda n, name: ImageSet(torch.randint(0, 256, (n, 3, 2, 2), dtype=torch.uint8), name=name)
        >>> net = nn.Sequential(nn.Flatten(), nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> sets = [noise(60, name) for name in ("train", "held out", "other")]
        >>> table = compare(net, *sets[:2], far=sets[2:], methods=["msp", "knn"], resamples=0)
        >>> sorted(table.results), table.groups
        (['knn', 'msp'], {'far': ('other',)})
    """
    at_least("resamples", resamples, 0)
    for name in methods:
        one_of("methods", name, tuple(named_methods()))
    columns = [name for name in metrics if one_of("metrics", name, tuple(METRICS)) in COUNTED]
    oods = (*near, *far, *ood_sets)
    if not oods:
        raise InputError("near, far or ood_sets must hold at least one set; give compare something to detect")
    classifier = as_classifier(network(net, pretrained=True) if isinstance(net, str) else net)
    comparison = _Comparison(classifier, train_set, preprocess, directory, half, batch_size)
    held_out = comparison.splittable(held_out)
    held_out, test = held_out.split(0.5, seed=seed) if test is None else (held_out, comparison.splittable(test))
    judged = None
    if tune is not None:
        judged, held_out = held_out.split(0.5, seed=seed)
    oods = tuple(map(comparison.splittable, oods))
    with unchanged(comparison.net):
        comparison.read(held_out, test, oods)
        if judged is not None:
            comparison.prepare_tuning(tune, judged, seed)
        groups = {"near": oods[: len(near)], "far": oods[len(near) : len(near) + len(far)]}
        named = {group: tuple(s.name for s in sets) for group, sets in groups.items() if sets}
        named = named or {"mean": tuple(s.name for s in oods)}
        table = Evaluation({}, comparison.images, comparison.test, 0, groups=named)
        chosen = tuple(dict.fromkeys([*(post_hoc() if every or not methods else ()), *methods]))
        with progress_bar("comparing", len(chosen)) as update:
            for number, name in enumerate(chosen):
                update(number, label=f"comparing: {name}", total=len(chosen), note=f"{number} of {len(chosen)} methods")
                try:
                    table.results[name] = comparison.result(name, table, every or name in methods)
                except Exception as error:  # a method that fails must not end the run
                    table.left_out[name] = _reason(error)
    if not table.results:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in table.left_out.items())
        raise InputError(f"methods must hold at least one that applies; {reasons}")
    order = sorted(
        table.results, key=lambda name: -fmean(g["auroc"].value for g in table.results[name].groups.values())
    )
    table = replace(table, results={name: table.results[name] for name in order})
    measured = [name for name in columns if name in table.results[order[0]].measured]
    return with_intervals(table, measured, resamples=resamples, seed=seed) if resamples else table


@dataclass(frozen=True)
class _Shared:
    """What all methods have in common on a set: predicted labels (N,) and calibrated probabilities (N, C)."""

    label: Tensor
    probability: Tensor


class _Comparison:
    """A network and its sets: images where they were given, and their features."""

    def __init__(
        self,
        net: Classifier,
        train_set: Any,
        preprocess: Preprocess | None,
        directory: str | Path | None,
        half: bool,
        batch_size: int | None,
    ) -> None:
        self.preprocess = preprocess_for(train_set, net.record, preprocess)
        self.train = self.splittable(train_set)
        if isinstance(net, Anchored) and net.anchors is None:
            if isinstance(self.train, Features):
                raise InputError("net must have its anchors, since its features are means over them; call set_anchors")
            net = copy.deepcopy(net)
            net.set_anchors(choose(self.train, self.preprocess, DEFAULT_K, "random", seed=0))
        self.net, self.half, self.batch_size = net, half, batch_size
        self.directory = None if directory is None else Path(directory)
        self.head: str | None = None  # found in the first set
        self.pass_seconds = 0.0  # for an image
        self.tuner: Tuner | None = None
        self.checked: set[bool] = set()  # for leaks, of methods whose options were chosen and of others
        self.methods: dict[tuple[type[Detector], str], str] = {}  # names, by what they are

    def splittable(self, images: Any) -> Any:
        """A set that can be split; what is not one is read into memory."""
        return images if isinstance(images, Splittable) else gather(images, self.preprocess)

    def read(self, held_out: Any, test: Any, oods: Sequence[Any]) -> None:
        """Extract the features of all sets, and compute what the methods share."""
        self.images = {s.name: s for s in (test, *oods)}
        if len(self.images) < 1 + len(oods):
            raise InputError(f"the sets must have different names, got {[s.name for s in (test, *oods)]}")
        train, held = self._features(self.train, "train"), self._features(held_out, "held-out")
        self.features = {name: self._features(images, f"scored {name}") for name, images in self.images.items()}
        own = tuple(self.net.record.get("classes", ()))
        names = own if len(own) == train.logits.shape[1] else self.train.classes
        self.train, self.held_out, self.test = _numbered(self.train, names), _numbered(held_out, names), test.name
        self.train_features, self.held_out_features = _numbered(train, names), _numbered(held, names)
        for sets in (self.images, self.features):
            sets[test.name] = _numbered(sets[test.name], names)
        labels = self.held_out_features.labels
        self.temperature = 1.0 if labels is None else temperature_of_known(held.logits, labels)
        self.shared = {name: self._shared(features, name) for name, features in self.features.items()}
        self.classifier: dict[str, float] = {}  # its metrics, once they are known
        if not isinstance(self.images[test.name], Features):
            self.pass_seconds = pass_seconds(self.net, self.images[test.name], self.preprocess)

    def prepare_tuning(self, by: Any, judged: Any, seed: int) -> None:
        """Choose options of the methods to come on held-out images that no threshold is set on."""
        images = None if isinstance(self.train, Features) else self.train
        judged = self._features(judged, "tuning")
        self.tuner = Tuner(self.net, self.train_features, judged, by=by, seed=seed, images=images)

    def result(self, name: str, table: Evaluation, own_passes: bool) -> EvaluationResult:
        """Fit, calibrate and judge a method."""
        parameters = inspect.signature(named_methods()[name][0]).parameters
        bounded = "limit" in parameters and parameters["limit"].default is None
        options = {"limit": KEPT} if bounded else {}
        detector = make(name, self.net, **options)
        if not detector.takes_features and not own_passes:
            raise InputError(OWN_PASSES)
        same = self.methods.setdefault((type(detector), json.dumps(detector.config(), default=str)), name)
        if same != name:
            raise InputError(f"it is {same} by another name")
        if self.tuner is not None and detector.takes_features:
            detector = self.tuner.detector(name, **options)
        detections, seconds = (self._by_features if detector.takes_features else self._by_images)(detector)
        if (tuned := detector.tuned is not None) not in self.checked:
            refuse_leaks({name: detector}, self.features)
            self.checked.add(tuned)
        result = result_of(name, detector, detections, table, self.features, seconds, classifier=self.classifier)
        if detector.takes_features:
            self.classifier = {m: value for m, value in result.classifier.items() if not METRICS[m].ranks}
        return result

    def _by_features(self, detector: Detector) -> tuple[dict[str, Detection], float]:
        detector.fit(self.train_features).calibrate(self.held_out_features, temperature=self.temperature)
        assert detector.calibration is not None
        detections, started = {}, time.perf_counter()
        for name, features in self.features.items():
            out, shared = outputs_of(detector, features, ROWS)[0], self.shared[name]
            p_value, is_ood = detector.calibration.verdicts(out.score)
            words = zip(detector.reasons(out), is_ood.tolist(), strict=True)
            detections[name] = Detection(
                shared.label, features.logits, shared.probability, out.tau, out.score, p_value, is_ood,
                reasons=tuple(word if flagged else None for word, flagged in words),
            )  # fmt: skip
        seconds = time.perf_counter() - started
        return detections, seconds + self.pass_seconds * sum(map(len, self.features.values()))

    def _by_images(self, detector: Detector) -> tuple[dict[str, Detection], float]:
        if any(isinstance(images, Features) for images in (self.train, self.held_out, *self.images.values())):
            raise InputError("it needs the images themselves, and got features of them")
        detector.fit(self.train, preprocess=self.preprocess).calibrate(self.held_out)
        detections, started = {}, time.perf_counter()
        for name, images in self.images.items():
            detection = detector(images)
            if torch.allclose(detection.logits, self.features[name].logits, rtol=1e-3, atol=1e-3):  # hold them once
                shared = self.shared[name]
                detection = replace(detection, logits=self.features[name].logits, probability=shared.probability)
            detections[name] = detection
        return detections, time.perf_counter() - started

    def _features(self, images: Any, name: str) -> Features:
        if isinstance(images, Features):
            return images
        folder = None if self.directory is None else self.directory / "features" / file_name(name)
        features = extract(
            self.net, images, folder, head=self.head, preprocess=self.preprocess, half=self.half,
            batch_size=self.batch_size,
        )  # fmt: skip
        self.head = features.head
        return features

    def _shared(self, features: Features, name: str) -> _Shared:
        """Labels and probabilities, the latter in a file if there is a folder."""
        logits = features.logits
        if self.directory is None:
            probability = torch.empty_like(logits)
        else:
            path = self.directory / "probabilities" / f"{file_name(name)}.npy"
            path.parent.mkdir(parents=True, exist_ok=True)
            dtype, shape = logits.numpy().dtype, tuple(logits.shape)
            probability = torch.from_numpy(np.lib.format.open_memmap(path, mode="w+", dtype=dtype, shape=shape))
        for to, part in zip(probability.split(ROWS), logits.split(ROWS), strict=True):
            to.copy_((part / self.temperature).softmax(dim=1))
        return _Shared(logits.argmax(dim=1), probability)


def pass_seconds(net: Classifier, images: ImageSet | StreamedSet, preprocess: Preprocess) -> float:
    """Seconds of a network's pass for one image, timed on a batch of a set."""
    x, _ = next(batches(images.subset(range(min(TIMED, len(images)))), preprocess, size=TIMED))
    with evaluating(net), torch.no_grad():
        x = net.as_input(x)
        net(x)  # the first pass also prepares memory
        started = time.perf_counter()
        net(x).cpu()
    return (time.perf_counter() - started) / len(x)


def _numbered(images: Any, names: Sequence[str]) -> Any:
    """A set with its labels as the network numbers its classes, where both have names; -1 for other classes."""
    if images.labels is None or not images.classes or not names or images.classes == tuple(names):
        return images
    return replace(images, labels=renumbered(images.labels, images.classes, names), classes=tuple(names))


def _reason(error: Exception) -> str:
    text = (str(error).splitlines() or [""])[0]
    return text if isinstance(error, KedgeError) else f"{type(error).__name__}: {text}"
