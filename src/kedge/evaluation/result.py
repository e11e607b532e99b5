"""What an evaluation found: results by detector, on one in-distribution set and several others."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kedge.data import ImageSet
from kedge.detectors import Cost, Detection
from kedge.metrics import Estimate

METRICS = ("auroc", "fpr95", "aupr_in", "aupr_out", "dtacc", "fpr95_ood")


@dataclass(frozen=True)
class Shifted:
    """What a detector makes of known classes in other conditions, where to accept what it gets right is no error.

    Attributes:
        accuracy: Of all images.
        accepted_accuracy: Of those that the threshold accepts, or None where it accepts none.
        aurc: Area under the risk-coverage curve.
    """

    accuracy: float
    accepted_accuracy: float | None
    aurc: float


@dataclass(frozen=True)
class Result:
    """One detector's results.

    Attributes:
        metrics: By OOD set, then by metric.
        accuracy: On the in-distribution test set, or None without labels.
        ece: Expected calibration error there, of the calibrated probabilities.
        aurc: Area under the risk-coverage curve there: whether the score also tells when the classifier errs.
        flagged: Share of each set that the threshold flags, the in-distribution set among them.
        milliseconds: Wall time per image.
        cost: Passes through the network per image.
        uses_outliers: Whether network or method learned from outliers; the tables mark it with a star.
        detections: What the detector said of each set.
        shifted: By set of known classes in other conditions.
        apart: OOD sets that the mean leaves out.
    """

    metrics: dict[str, dict[str, Estimate]]
    accuracy: float | None
    ece: float | None
    aurc: float | None
    flagged: dict[str, float]
    milliseconds: float
    cost: Cost
    uses_outliers: bool
    detections: dict[str, Detection] = field(repr=False)
    shifted: dict[str, Shifted] = field(default_factory=dict)
    apart: tuple[str, ...] = ()

    def mean(self, metric: str) -> float:
        """The mean of a metric over the OOD sets, less those apart."""
        values = [by_metric[metric].value for ood, by_metric in self.metrics.items() if ood not in self.apart]
        return sum(values) / len(values)


@dataclass(frozen=True)
class Evaluation:
    """Results by detector, and the sets they were measured on, the in-distribution set first.

    Attributes:
        results: By detector.
        sets: By name, the in-distribution set first.
        id_name: The name of that set.
        resamples: Of the bootstrap.
        shifted_names: The sets of known classes in other conditions.
        known_in: By OOD set, the set of images from its source that count as in distribution against it.
        apart: OOD sets that stand by themselves and are in no mean.
    """

    results: dict[str, Result]
    sets: dict[str, ImageSet]
    id_name: str
    resamples: int
    shifted_names: tuple[str, ...] = ()
    known_in: dict[str, str] = field(default_factory=dict)
    apart: tuple[str, ...] = ()

    @property
    def averaged(self) -> tuple[int, ...]:
        """The places in ``ood_names`` of the sets that means are taken over."""
        return tuple(place for place, name in enumerate(self.ood_names) if name not in self.apart)

    @property
    def over(self) -> str:
        """What means are over, in words."""
        places = self.averaged
        words = f"{len(places)} OOD sets" if len(places) > 1 else self.ood_names[places[0]]
        return words + (f" ({', '.join(self.apart)} apart)" if self.apart else "")

    @property
    def ood_names(self) -> tuple[str, ...]:
        """The names of the OOD sets, in the order given."""
        others = {self.id_name, *self.shifted_names, *self.known_in.values()}
        return tuple(name for name in self.sets if name not in others)

    def pairs(self) -> list[tuple[tuple[int, ...], int]]:
        """For each OOD set, the places in ``sets`` of those that are in distribution beside it, and its own place."""
        place = {name: number for number, name in enumerate(self.sets)}
        names = [
            (self.id_name, self.known_in[ood]) if ood in self.known_in else (self.id_name,) for ood in self.ood_names
        ]
        return [
            (tuple(place[s] for s in inside), place[ood]) for inside, ood in zip(names, self.ood_names, strict=True)
        ]

    def inside(self, label: str, ood: str) -> Tensor:
        """The scores of the in-distribution images that an OOD set is held against, (N,)."""
        return inside_scores(self.results[label].detections, self.id_name, self.known_in.get(ood))

    def as_dict(self) -> dict[str, Any]:
        """Everything but the images and single scores, as plain data for JSON."""
        return {
            "id": self.id_name,
            "sets": {name: {"images": len(s), "sha256": s.checksum} for name, s in self.sets.items()},
            "resamples": self.resamples,
            "shifted": list(self.shifted_names),
            "known in": self.known_in,
            "apart": list(self.apart),
            "results": {
                name: {
                    "accuracy": result.accuracy,
                    "ece": result.ece,
                    "aurc": result.aurc,
                    "milliseconds_per_image": result.milliseconds,
                    "passes_per_image": vars(result.cost),
                    "uses_outliers": result.uses_outliers,
                    "flagged": result.flagged,
                    "shifted": {name: vars(shifted) for name, shifted in result.shifted.items()},
                    "mean": {metric: result.mean(metric) for metric in METRICS},
                    "metrics": {
                        ood: {metric: vars(estimate) for metric, estimate in by_metric.items()}
                        for ood, by_metric in result.metrics.items()
                    },
                }
                for name, result in self.results.items()
            },
        }


def inside_scores(detections: Mapping[str, Detection], id_name: str, known: str | None) -> Tensor:
    """The scores of the in-distribution set, and of the known images in an OOD set's source."""
    scores = detections[id_name].score
    return scores if known is None else torch.cat([scores, detections[known].score])
