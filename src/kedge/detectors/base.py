"""Detector: the verbs that all methods share. A method is its `outputs`, and its `fit_method` if it learns."""

import copy
import math
import os
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from kedge import calibration
from kedge.anchoring import DEFAULT_K, Anchored
from kedge.anchoring.sampling import choose
from kedge.checks import at_least, between
from kedge.data import ImageSet, Preprocess, StreamedSet, batches
from kedge.data.batches import names_of, preprocess_for
from kedge.data.features import Features
from kedge.data.labels import UNKNOWN, class_names, renumbered
from kedge.data.leakage import fingerprints, halves
from kedge.detectors.detection import Detection
from kedge.detectors.outputs import Calibration as Calibration
from kedge.detectors.outputs import Cost as Cost
from kedge.detectors.outputs import HeldOut as HeldOut
from kedge.detectors.outputs import Outputs as Outputs
from kedge.detectors.reading import as_inputs, check_features, no_features, outputs_of
from kedge.detectors.save import write_detector
from kedge.detectors.show import VERBS, describe_detector, detector_facts, summary
from kedge.detectors.training_images import refuse_training_images, training_prints
from kedge.display import html_facts
from kedge.errors import InputError, NormalisationWarning, NotReadyError
from kedge.io.tuned import Tuned
from kedge.models.classifier import Classifier, as_classifier, evaluating

GRADIENT_ROWS = 128  # images times anchors per piece where gradients are taken, since they keep every activation
OUTPUT_KINDS = ("logits", "per_anchor_logits", "output")  # `reads` of methods that need nothing inside the network
DAMAGED = "damaged pixels"  # the reason of an image with NaN or infinite pixels
REASONS = {  # what an alarm means, by what a method reads
    **dict.fromkeys(("logits", "output"), "between classes"),
    **dict.fromkeys(("per_anchor_logits", "passes"), "unstable prediction"),
    **dict.fromkeys(("features", "maps", "network"), "unlike anything seen"),
    "gradients": "unusual response of the network",
    "images": "unusual pixels",
}
UNNORMALISED = (
    "no normalisation is known for this network, so it takes pixels in [0, 1] as they are: if it was trained on "
    "normalised images, pass kedge.Classifier(net, mean=..., std=...) with the values used there, if not, "
    "kedge.Classifier(net)"
)


class Detector(ABC):
    """A network, a score and a threshold behind six verbs: build, `fit`, `score`, `calibrate`, call, `save`.

    Args:
        net: A `Classifier` or `Anchored` network, or any network that takes images in [0, 1].

    Attributes:
        name: The method's name in files and on the command line.
        reads: What the method reads: ``"logits"`` (it then has `of_logits`), ``"per_anchor_logits"`` (it then has
            `of_per_anchor_logits`), ``"output"`` (the network's raw output; it then has `of_output`), ``"features"``,
            ``"maps"`` (inside the network), ``"gradients"``, ``"passes"`` (several outputs for an image), ``"images"``,
            or ``"network"`` if something else.
        has_tau: Whether its outputs have a tau.
        needs_outliers: Whether the method is always trained with outliers.
        changes_network: Whether it runs parts of the network otherwise than evaluation does, as dropout.
        learns_held_out: Whether the method learns from held-out images; `calibrate` then gives it half of them and
            sets the threshold on the other half, since a threshold holds for images that the method never saw.
        variants: Names of further methods that are this detector with other options, with those options.
        options: Constructor arguments that are attributes; ``"k:given"`` if the attribute of ``k`` is ``given``.
        grid: Options that `kedge.tune` chooses, with the values that it tries beside the defaults.
        tuned: How options were chosen, if they were.
        learned: Attributes, tensors or numbers, that `fit` or `calibrate` set; see `state`.
    """

    name: ClassVar[str]
    reads: str = "network"
    has_tau: bool = False
    needs_outliers: ClassVar[bool] = False
    changes_network: bool = False
    learns_held_out: bool = False
    variants: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    options: ClassVar[tuple[str, ...]] = ()
    learned: tuple[str, ...] = ()
    grid: Mapping[str, Sequence[Any]] = {}

    def __init__(self, net: nn.Module) -> None:
        if not isinstance(net, nn.Module):
            raise InputError(f"net must be a torch.nn.Module, got {type(net).__name__}")
        self.net = as_classifier(net)
        self.preprocess: Preprocess | None = None
        self.calibration: Calibration | None = None
        self.classes: tuple[str, ...] = ()
        self.fitted_on = torch.empty(0, dtype=torch.int64)  # see `training_prints`
        self.tuned: Tuned | None = None
        self._prints: list[Tensor] = []
        self._fitted_to = self._anchors_version

    # What a method defines.

    @abstractmethod
    def outputs(self, x: Tensor) -> Outputs:
        """Logits and scores of a batch on the network's device."""

    def fit_method(self, train_set: Any, preprocess: Preprocess) -> None:
        """Learn from the training images: by default only the anchors of anchored networks that have none.

        Runs without gradients, on a network in evaluation mode.
        """
        for net in self.anchored:
            if net.anchors is None:
                net.set_anchors(choose(train_set, preprocess, DEFAULT_K, "random", seed=0))

    def fit_held_out(self, images: Any, labels: Tensor) -> None:
        """Learn from held-out images (N, D, ...) and labels (N,), -1 if unknown; runs as `fit_method` does.

        A method that takes features is given `Features` in place of the images if `calibrate` is.
        """
        raise NotImplementedError

    def config(self) -> dict[str, Any]:
        """The constructor arguments besides the network, as plain data: by default ``options``."""
        pairs = (option.partition(":") for option in self.options)
        return {name: getattr(self, attribute or name) for name, _, attribute in pairs}

    def state(self) -> dict[str, Tensor]:
        """What was learned, as tensors: by default the attributes in ``learned`` that are set."""
        values = {name: getattr(self, name) for name in self.learned}
        return {
            name: value if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)
            for name, value in values.items()
            if value is not None
        }

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state` returned."""
        for name in self.learned:
            if name in state:
                setattr(self, name, state[name] if state[name].ndim else float(state[name]))
            elif self.learns_held_out:
                setattr(self, name, None)
            elif getattr(self, name) is None:
                raise KeyError(f"{name} of {type(self).__name__} is missing")

    @property
    def reads_train(self) -> bool:
        """Whether `fit` reads the training images, for more than their shape and anchors."""
        return type(self).fit_method is not Detector.fit_method

    @property
    def takes_features(self) -> bool:
        """Whether the method is a function of logits and last features, so that it takes `Features` for images."""
        return False

    def of_features(self, logits: Tensor, features: Tensor) -> Outputs:
        """The outputs for logits (B, C), which they keep, and last features (B, d), of a method that takes them."""
        raise no_features(self)

    def of_extracted(self, features: Features, size: int) -> Iterator[Outputs]:
        """The outputs for extracted features, so many images at a time, of a method that takes them."""
        for part, _ in features.batches(size, self.net.mean.device):
            yield self.of_features(part.logits, part.features)

    @property
    def cost(self) -> Cost:
        """One pass, or K with K anchors or members."""
        return Cost(forward=self.net.passes)

    @property
    def reason(self) -> str:
        """What an alarm of this method means, in plain words."""
        return REASONS[self.reads]

    def reasons(self, out: Outputs) -> list[str]:
        """What an alarm would mean for each image."""
        return [self.reason] * len(out.score)

    @property
    def outliers(self) -> Tensor | None:
        """Fingerprints (N, 16) of the outliers that network or method learned from, or options were chosen on."""
        seen = [module.outliers for module in self._classifiers if module.outliers is not None]
        seen += [self.tuned.outliers] if self.tuned is not None and len(self.tuned.outliers) else []
        return torch.cat([prints.cpu() for prints in seen]) if seen else None

    @property
    def trained_on(self) -> set[str]:
        """Checksums of the sets that `kedge.train` trained the network, or its teacher, on."""
        records = [module.record for module in self._classifiers]
        records += [record.get("teacher", {}) for record in records]
        data = [each for record in records for each in (record.get("data", {}), *record.get("before", ()))]
        return {each["sha256"] for each in data if each.get("sha256") is not None}

    # The verbs.

    def fit(self, train_set: Any, *, preprocess: Preprocess | None = None) -> Self:
        """Learn from the training images: their shape, and whatever the method needs. Undoes a calibration.

        Args:
            train_set: Images in any form that `kedge.data.batches` takes, or their `Features`.
            preprocess: How images become inputs; by default they are resized to the training images' size.
        """
        given, train_set = train_set, as_inputs(self.net, train_set)
        if isinstance(train_set, Features):
            check_features(self, train_set)
        preprocess = preprocess_for(train_set, self.net.record, preprocess or self.preprocess)
        if preprocess.is_image and any(m.bare and not m.has_statistics for m in self._classifiers):
            warnings.warn(UNNORMALISED, NormalisationWarning, stacklevel=2)
        self._prints = []
        with evaluating(self.net), torch.no_grad():
            self.fit_method(train_set, preprocess)
        held_out = None if self.tuned is None else self.tuned.held_out
        self.fitted_on = training_prints(given, preprocess, self._prints, held_out)
        self._prints = []
        self._fitted_to = self._anchors_version
        self.preprocess = preprocess
        self.classes = tuple(getattr(given, "classes", ()) or self.classes)
        self.calibration = None
        return self

    def score(
        self, images: Any, *, batch_size: int | None = None, progress: Callable[[int], None] | None = None
    ) -> Tensor:
        """Scores (N,), larger for further out of distribution, on the CPU; infinite for images with NaN pixels.

        Args:
            images: In any form that `kedge.data.batches` takes.
            batch_size: Images at a time, by default `kedge.Preprocess.batch_size`; the scores do not depend on it.
            progress: Called with the number of images done after each batch, instead of a bar in a terminal.
        """
        return outputs_of(self, images, batch_size, progress)[0].score

    def calibrate(
        self,
        held_out: Any,
        *,
        alpha: float = 0.05,
        delta: float | None = None,
        batch_size: int | None = None,
        temperature: float | None = None,
    ) -> Self:
        """Set the threshold on held-out in-distribution images that were not trained on.

        A fresh in-distribution image is then flagged with probability at most alpha (split conformal), on average over
        calibration sets; with ``delta`` the guarantee holds for this very set with probability 1 - delta. Where the
        images have labels, the temperature of ``probability`` is fitted too; labels are matched to the detector's
        classes by name where both have names. Images of `fit`, and the training set of `kedge.train`, are refused.

        Args:
            held_out: In-distribution images, labelled or not.
            alpha: The largest share of in-distribution images to flag.
            delta: None, or the probability with which the guarantee may fail for this calibration set.
            batch_size: Images at a time, as for `score`.
            temperature: That of ``probability``, where it is known already; by default it is fitted to the labels.
        """
        between("alpha", alpha, 0, 1, open_ends=True)
        if batch_size is not None:
            at_least("batch_size", batch_size, 1)
        if delta is not None:
            between("delta", delta, 0, 1, open_ends=True)
        if str(getattr(held_out, "checksum", "")) in self.trained_on:
            raise InputError("held_out is the training set of the network; pass images that were held out of it")
        names = class_names(held_out, self.classes)
        held = self._on_held_out(held_out, names, alpha, delta, batch_size)
        scores = held.outputs.score.double().sort().values
        if temperature is None:
            temperature = calibration.temperature_of_known(held.outputs.logits, held.labels)
        threshold = calibration.threshold(scores, alpha, delta, **held.learned)
        self.calibration = Calibration(scores, held.prints, alpha, delta, threshold, temperature)
        return self

    def __call__(
        self, images: Any, *, batch_size: int | None = None, progress: Callable[[int], None] | None = None
    ) -> Detection:
        """Classify images and flag those that are out of distribution.

        An image with NaN or infinite pixels has the score infinity, the smallest p-value and is flagged; its label is
        -1, and its logits and probabilities are NaN.
        """
        if self.calibration is None:
            raise NotReadyError(
                "the detector has no threshold yet: call calibrate(held_out) with in-distribution images that it was "
                "not trained on, or score(images) for scores alone"
            )
        detection = self._decided(outputs_of(self, images, batch_size, progress)[0], self.calibration)
        return replace(detection, classes=self.classes, names=names_of(images))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write weights, anchors, preprocessing and threshold to one file; `kedge.load` reads it back."""
        write_detector(self, path)

    def plot(self, images: Any, *, most: int = 16, train_set: ImageSet | StreamedSet | None = None) -> Any:
        """A matplotlib figure of images as the network sees them, with class, probability and verdict.

        Args:
            images: In any form that `kedge.data.batches` takes.
            most: Number of images to show, from the first one on.
            train_set: The images that the network was trained on, if the three nearest of them are to be shown below
                each image; see `kedge.detectors.neighbours`.
        """
        from kedge.detectors.plots import plot_verdicts  # imports this module

        return plot_verdicts(self, images, most, train_set)

    @property
    def summary(self) -> str:
        """What was measured on held-out images and what it cannot promise, in a few lines to print."""
        return summary(self)

    def __repr__(self) -> str:
        return describe_detector(self)

    def _repr_html_(self) -> str:
        return html_facts(detector_facts(self))

    def __dir__(self) -> list[str]:
        own = {name for name in vars(self) if not name.startswith("_")}
        return sorted(own | {option.partition(":")[2] or option for option in self.options} | VERBS)

    # Helpers for methods.

    @property
    def anchored(self) -> list[Anchored]:
        """The anchored networks of the detector: its own, or those of an ensemble."""
        return [module for module in self._classifiers if isinstance(module, Anchored)]

    def as_input(self, x: Tensor) -> Tensor:
        """A batch as the network takes it: on its device, in its precision, in [0, 1]."""
        return self.net.as_input(x)

    def inputs(self, images: Any, preprocess: Preprocess) -> Iterator[tuple[Tensor, Tensor | None]]:
        """Batches of images as the network takes them, with their labels, for `fit_method`."""
        for x, y in batches(images, preprocess, label="fitting"):
            self._prints.append(fingerprints(x))
            yield self.as_input(x), None if y is None else y.to(self.net.mean.device)

    def add_prints(self, prints: Tensor) -> None:
        """Record the fingerprints of training images that `fit_method` has read by other means than `inputs`."""
        self._prints.append(prints)

    def pieces(self, x: Tensor) -> tuple[Tensor, ...]:
        """A batch in pieces that are small enough for taking gradients."""
        return tuple(x.split(max(1, int(GRADIENT_ROWS // self.net.passes))))

    def on(self, net: Classifier) -> Self:
        """A copy with another network that computes the same."""
        copied = copy.copy(self)
        copied.net = net
        return copied

    # Steps of the verbs.

    @property
    def _classifiers(self) -> list[Classifier]:
        # Not by net.modules(), whose nested generators take a fifth as long as a pass of one photograph.
        found: dict[Classifier, None] = {}
        waiting: list[nn.Module] = [self.net]
        while waiting:
            module = waiting.pop()
            if isinstance(module, Classifier):
                found[module] = None
            waiting += [child for child in reversed(module._modules.values()) if child is not None]
        return list(found)

    @property
    def _anchors_version(self) -> tuple[int, ...]:
        return tuple(net.anchors_version for net in self.anchored)

    def _check_fitted(self) -> Preprocess:
        if self.preprocess is None:
            raise NotReadyError(f"the detector is not fitted: call {type(self).__name__}(net).fit(train_set) first")
        if self._fitted_to != self._anchors_version:
            raise NotReadyError(
                "the network's anchors changed after this detector was fitted, so its scores and threshold no longer "
                "hold: call fit and calibrate again, or give each detector a network of its own (copy.deepcopy)"
            )
        return self.preprocess

    def _on_held_out(
        self, held_out: Any, names: Sequence[str], alpha: float, delta: float | None, batch_size: int | None
    ) -> "HeldOut":
        """Learn from held-out images, if the method does, and score those that the threshold is set on."""
        learned = torch.empty(0, 16, dtype=torch.uint8)  # no test set may hold these images either
        if self.learns_held_out:
            held_out, learned = self._learn_from_half(held_out, names)
            names = ()
        out, labels, prints = outputs_of(self, held_out, batch_size, held_out=True)
        refuse_training_images(prints, self.fitted_on)
        labels = renumbered(labels, names, self.classes)
        return HeldOut(out, labels, torch.cat([learned, prints]), {"halved": self.learns_held_out})

    def _learn_from_half(self, held_out: Any, names: Sequence[str]) -> tuple[Any, Tensor]:
        """Let the method learn from half of the held-out images; return the rest, and the half's fingerprints."""
        why = f"{type(self).__name__} learns from one and sets its threshold on the other"
        half, rest = halves(as_inputs(self.net, held_out), self._check_fitted(), why)
        refuse_training_images(torch.cat([half.prints, rest.prints]), self.fitted_on)
        if isinstance(half.images, Features):
            check_features(self, half.images)
        self.calibration = None  # what is learned changes the scores, so no earlier threshold holds
        with evaluating(self.net), torch.no_grad():
            self.fit_held_out(half.images, renumbered(half.labels, names, self.classes))
        labels = renumbered(rest.labels, names, self.classes)
        if isinstance(rest.images, Features):
            return replace(rest.images, labels=labels, classes=()), half.prints
        return list(zip(rest.images, labels.tolist(), strict=True)), half.prints

    def _decided(self, out: Outputs, calibrated: Calibration) -> Detection:
        bad = out.logits.isnan().any(dim=1)  # by NaN pixels
        score = out.score.masked_fill(bad, math.inf)
        p_value, is_ood = calibrated.verdicts(score)
        is_ood |= bad
        words = [DAMAGED if nan else word for nan, word in zip(bad.tolist(), self.reasons(out), strict=True)]
        return Detection(
            label=out.logits.argmax(dim=1).masked_fill(bad, UNKNOWN),
            logits=out.logits,
            probability=(out.logits / calibrated.temperature).softmax(dim=1),
            tau=out.tau,
            score=score,
            p_value=p_value,
            is_ood=is_ood,
            reasons=tuple(word if flagged else None for word, flagged in zip(words, is_ood.tolist(), strict=True)),
        )
