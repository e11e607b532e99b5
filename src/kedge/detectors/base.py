"""Detector: build, fit, score, calibrate, call, save. A method is its `outputs`, and its `fit_method` if it learns."""

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from kedge import calibration
from kedge.anchoring import DEFAULT_K, Anchored
from kedge.checks import at_least, between, finite
from kedge.data import Preprocess, batches, choose, shape_of_inputs
from kedge.data.halves import halves
from kedge.data.labels import UNKNOWN, names_beside, renumbered
from kedge.data.leakage import fingerprints
from kedge.detectors.detection import Detection
from kedge.errors import InputError, NotReadyError
from kedge.io import artifact
from kedge.io.rebuild import describe
from kedge.models.classifier import Classifier, evaluating
from kedge.models.ensemble import Ensemble

GRADIENT_ROWS = 128  # a gradient keeps every activation, so images times anchors go in pieces of so many


@dataclass(frozen=True)
class Cost:
    """What a method asks of the network for one image, in passes through all but the first layer."""

    forward: int
    backward: int = 0


@dataclass(frozen=True)
class Outputs:
    """What a method computes for a batch; larger scores are further out of distribution."""

    logits: Tensor  # (B, C)
    score: Tensor  # (B,)
    tau: Tensor | None = None  # (B,)


@dataclass(frozen=True)
class Calibration:
    """A threshold and what it was made of: sorted scores, and the fingerprints of all images given to calibrate."""

    scores: Tensor
    fingerprints: Tensor
    alpha: float
    delta: float | None
    threshold: float
    temperature: float


class Detector(ABC):
    """A network, a score and a threshold behind six verbs: build, `fit`, `score`, `calibrate`, call, `save`.

    Args:
        net: A `Classifier` or `Anchored` network, or any network that takes images in [0, 1].

    Attributes:
        name: In files.
        needs_outliers: Whether the method is always trained with outliers.
        reads: What the method reads: ``"logits"`` (it then has `of_logits`), ``"per_anchor_logits"`` (it then has
            `of_per_anchor_logits`), ``"features"``, ``"gradients"``, ``"images"``, or ``"network"`` if none of these alone.
        has_tau: Whether its outputs have a tau.
        learns_held_out: Whether the method learns from held-out images; `calibrate` then gives it half of them and
            sets the threshold on the other half, since a threshold holds for images that the method never saw.
    """

    name: ClassVar[str]
    needs_outliers: ClassVar[bool] = False
    learns_held_out: bool = False
    reads: ClassVar[str] = "network"
    has_tau: ClassVar[bool] = False

    def __init__(self, net: nn.Module) -> None:
        if not isinstance(net, nn.Module):
            raise InputError(f"net must be a torch.nn.Module, got {type(net).__name__}")
        self.net = net if isinstance(net, Classifier) else Classifier(net)
        self.preprocess: Preprocess | None = None
        self.calibration: Calibration | None = None
        self.classes: tuple[str, ...] = ()
        self._fitted_to = self._anchors_version

    @abstractmethod
    def outputs(self, x: Tensor) -> Outputs:
        """The method itself: logits and scores of a batch on the network's device."""

    @abstractmethod
    def config(self) -> dict[str, Any]:
        """The arguments, beside the network, that build this detector again: plain data."""

    def fit_method(self, train_set: Any, preprocess: Preprocess) -> None:
        """Learn what the method needs: by default nothing but the anchors of anchored networks that have none."""
        for net in self.anchored:
            if net.anchors is None:
                net.set_anchors(choose(train_set, preprocess, DEFAULT_K, "random", seed=0))

    def fit_held_out(self, images: Tensor, labels: Tensor) -> None:
        """Learn from held-out images (N, D, ...) and their labels (N,), -1 where there is none.

        Called by `calibrate` where ``learns_held_out``.
        """
        raise NotImplementedError

    def state(self) -> dict[str, Tensor]:
        """What `fit_method` learned, as tensors; nothing by default."""
        return {}

    def load_state(self, state: Mapping[str, Tensor]) -> None:  # noqa: B027
        """Take back what `state` gave."""

    @property
    def anchored(self) -> list[Anchored]:
        """The anchored networks that the detector asks: its own, or those of an ensemble."""
        return [module for module in self.net.modules() if isinstance(module, Anchored)]

    @property
    def cost(self) -> Cost:
        """What one image costs; an anchored network takes a pass for each anchor."""
        return Cost(forward=passes(self.net))

    @property
    def outliers(self) -> Tensor | None:
        """Fingerprints (N, 16) of the outliers that the network or the method learned from, or None."""
        seen = [m.outliers for m in self.net.modules() if isinstance(m, Classifier) and m.outliers is not None]
        return torch.cat([prints.cpu() for prints in seen]) if seen else None

    def fit(self, train_set: Any, *, preprocess: Preprocess | None = None) -> Self:
        """Learn from the training images: their shape, and whatever the method needs. Undoes a calibration.

        Args:
            train_set: Images in any form that `kedge.data.batches` takes.
            preprocess: How images become inputs; by default they must have, or are resized to, the training images'
                size.
        """
        recorded = self.net.record.get("preprocess")  # what `kedge.train` made the images into
        trained = None if recorded is None else Preprocess(**recorded)
        preprocess = preprocess or self.preprocess or trained or Preprocess(shape_of_inputs(train_set))
        with evaluating(self.net), torch.no_grad():
            self.fit_method(train_set, preprocess)
        self._fitted_to = self._anchors_version
        self.preprocess = preprocess
        self.classes = tuple(getattr(train_set, "classes", ()) or self.classes)
        self.calibration = None
        return self

    def score(self, images: Any, *, batch_size: int = 256, progress: Callable[[int], None] | None = None) -> Tensor:
        """Scores (N,), larger for further out of distribution, on the CPU.

        Args:
            images: In any form that `kedge.data.batches` takes.
            batch_size: Images at a time; the scores do not depend on it.
            progress: Called with the number of images done after each batch.
        """
        return torch.cat([out.score for out, _, _ in self._run(images, batch_size, progress)])

    def calibrate(
        self, held_out: Any, *, alpha: float = 0.05, delta: float | None = None, batch_size: int = 256
    ) -> Self:
        """Set the threshold on held-out in-distribution images that were not trained on.

        A fresh in-distribution image is then flagged with probability at most alpha (split conformal), on average
        over calibration sets; with ``delta`` the promise holds for this very set with that probability. Where the
        images have labels, the temperature of ``probability`` is fitted too; where the set and the detector have names
        of classes, labels are matched by them.

        Args:
            held_out: In-distribution images, labelled or not.
            alpha: The largest share of in-distribution images to flag.
            delta: None, or the probability with which the promise must hold for this calibration set.
            batch_size: Images at a time.
        """
        between("alpha", alpha, 0, 1, open_ends=True)
        at_least("batch_size", batch_size, 1)
        if delta is not None:
            between("delta", delta, 0, 1, open_ends=True)
        outs, prints, labels = [], [], []
        names = names_beside(held_out, self.classes)
        if self.learns_held_out:
            held_out, learned = self._learn_from_half(held_out, names)
            names = ()
            prints.append(learned)  # a test set must not hold these either
        for out, x, y in self._run(held_out, batch_size):
            outs.append(out)
            prints.append(fingerprints(x))
            # -1 marks images without a label.
            labels.append(torch.full((len(x),), UNKNOWN) if y is None else renumbered(y, names, self.classes))
        scores = torch.cat([out.score for out in outs]).double().sort().values
        logits, numbers = torch.cat([out.logits for out in outs]), torch.cat(labels)
        known = numbers >= 0
        wrong = known & (logits.argmax(dim=1) != numbers)
        # Where no label is wrong there is nothing to fit: the likelihood rises without end as T goes to zero.
        temperature = calibration.fit_temperature(logits[known], numbers[known]) if bool(wrong.any()) else 1.0
        threshold = calibration.threshold(scores, alpha, delta)
        self.calibration = Calibration(scores, torch.cat(prints), alpha, delta, threshold, temperature)
        return self

    def __call__(
        self, images: Any, *, batch_size: int = 256, progress: Callable[[int], None] | None = None
    ) -> Detection:
        """Classify images and say which of them are out of distribution."""
        if self.calibration is None:
            raise NotReadyError(
                "the detector has no threshold yet: call calibrate(held_out) with in-distribution images that it was "
                "not trained on, or score(images) for scores alone"
            )
        outs = [out for out, _, _ in self._run(images, batch_size, progress)]
        taus = [o.tau for o in outs if o.tau is not None]
        return self._decided(
            torch.cat([o.logits for o in outs]),
            torch.cat([o.score for o in outs]),
            torch.cat(taus) if taus else None,
            self.calibration,
        )

    @staticmethod
    def _decided(logits: Tensor, score: Tensor, tau: Tensor | None, known: Calibration) -> Detection:
        return Detection(
            label=logits.argmax(dim=1),
            logits=logits,
            probability=(logits / known.temperature).softmax(dim=1),
            tau=tau,
            score=score,
            p_value=calibration.p_values(known.scores, score),
            is_ood=score.double() > known.threshold,
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write weights, anchors, preprocessing and threshold to one file; `kedge.load` reads it back."""
        if self.preprocess is None:
            raise NotReadyError(f"an unfitted {type(self).__name__} has nothing to save: call fit(train_set) first")
        known = self.calibration
        header = {
            "detector": {"name": self.name, "config": self.config()},
            "network": describe(self.net),
            "preprocess": asdict(self.preprocess),
            "classes": list(self.classes),
            "calibration": None
            if known is None
            else {name: value for name, value in vars(known).items() if not isinstance(value, Tensor)}
            | {"images": len(known.scores)},
            "versions": {"kedge": version("kedge"), "torch": str(torch.__version__)},
        }
        tensors = {f"net.{name}": value for name, value in self.net.state_dict().items()}
        tensors |= {f"detector.{name}": value for name, value in self.state().items()}
        if known is not None:
            tensors["calibration.scores"], tensors["calibration.fingerprints"] = known.scores, known.fingerprints
        artifact.write(path, header, tensors)

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

    def _learn_from_half(self, held_out: Any, names: Sequence[str]) -> tuple[list[tuple[Tensor, int]], Tensor]:
        """Let the method learn from half of the held-out images; return the rest, and the half's fingerprints."""
        why = f"{type(self).__name__} learns from one and sets its threshold on the other"
        mine, other = halves(held_out, self._check_fitted(), why)
        self.calibration = None  # what is learned changes the scores, so that no earlier threshold holds from here on
        with evaluating(self.net):
            self.fit_held_out(mine.images, renumbered(mine.labels, names, self.classes))
        rest = renumbered(other.labels, names, self.classes).tolist()
        return list(zip(other.images, rest, strict=True)), mine.prints

    def _run(
        self, images: Any, batch_size: int, progress: Callable[[int], None] | None = None
    ) -> Iterator[tuple[Outputs, Tensor, Tensor | None]]:
        """Outputs, images and labels batch by batch, on the CPU."""
        preprocess = self._check_fitted()
        at_least("batch_size", batch_size, 1)
        done = 0
        with evaluating(self.net):
            for x, y in batches(images, preprocess, size=batch_size):
                with torch.no_grad():
                    out = self.outputs(self.as_input(x))
                finite(
                    "scores", out.score, "the network gives NaN or infinite logits for these images; check its weights"
                )
                tau = None if out.tau is None else out.tau.cpu()
                done += len(x)
                if progress is not None:
                    progress(done)
                yield Outputs(out.logits.cpu(), out.score.cpu(), tau), x, y

    def as_input(self, x: Tensor) -> Tensor:
        """A batch as the network takes it: on its device, in its precision, in [0, 1]."""
        return self.net.as_input(x)

    def inputs(self, images: Any, preprocess: Preprocess) -> Iterator[tuple[Tensor, Tensor | None]]:
        """Batches of images as the network takes them, with their labels, for `fit_method` to learn from."""
        for x, y in batches(images, preprocess):
            yield self.as_input(x), None if y is None else y.to(self.net.mean.device)


def passes(net: Classifier) -> int:
    """Forward passes per image: one, one per anchor, or those of an ensemble's members together."""
    if isinstance(net, Ensemble):
        return sum(passes(member) for member in net.members)
    if isinstance(net, Anchored) and net.anchors is not None:
        return net.per_image or len(net.anchors)
    return 1
