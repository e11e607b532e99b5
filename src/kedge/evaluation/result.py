"""The outcome of an evaluation: results by detector, on one in-distribution set and several others."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kedge.checks import needs
from kedge.data import ImageSet
from kedge.detectors import Cost, Detection
from kedge.display import html_table
from kedge.metrics import CLASSIFIER_METRICS, METRICS, Estimate

HEADLINE = ("auroc", "fpr95")  # of groups of OOD sets, and of a report's first sentence


@dataclass(frozen=True)
class ShiftedResult:
    """A detector on known classes in other conditions, where accepting a correct prediction is no error.

    Attributes:
        accuracy: Of all images.
        accepted_accuracy: Of the accepted images, or None if there are none.
        aurc: Area under the risk-coverage curve.
    """

    accuracy: float
    accepted_accuracy: float | None
    aurc: float


@dataclass(frozen=True, repr=False)
class EvaluationResult:
    """One detector's results.

    Attributes:
        metrics: By OOD set, then by metric of ID against OOD images; without labels those of detection alone.
        classifier: By metric of the classifier, on the in-distribution test set; empty without labels.
        flagged: Share of each set that the threshold flags, the in-distribution set among them.
        milliseconds: Wall time per image.
        cost: Passes through the network per image.
        uses_outliers: Whether network or method learned from outliers, or options were chosen on some; the tables mark
            it with a star.
        detections: The detector's output on each set.
        shifted: By set of known classes in other conditions.
        apart: OOD sets that the mean leaves out.
        groups: By group of OOD sets, then by metric, the mean over the sets of the group.
        tuned: How `kedge.tune` chose options, in words; empty if it did not.
    """

    metrics: dict[str, dict[str, Estimate]]
    classifier: dict[str, float]
    flagged: dict[str, float]
    milliseconds: float
    cost: Cost
    uses_outliers: bool
    detections: dict[str, Detection]
    shifted: dict[str, ShiftedResult] = field(default_factory=dict)
    apart: tuple[str, ...] = ()
    groups: dict[str, dict[str, Estimate]] = field(default_factory=dict)
    tuned: str = ""

    def __repr__(self) -> str:
        means = [f"{metric} {self.mean(metric):.3f}" for metric in HEADLINE if metric in self.measured]
        right = [] if self.accuracy is None else [f"accuracy {self.accuracy:.3f}"]
        return f"EvaluationResult({', '.join([*means, *right, f'OOD sets {len(self.metrics)}'])})"

    def value(self, metric: str, ood: str | None = None) -> float | None:
        """Any metric of `kedge.metrics.METRICS`, see `detection_value`; None for one that was not measured."""
        if METRICS[metric].of_counts is None:
            return self.classifier.get(metric)
        return self.detection_value(metric, ood) if metric in self.measured else None

    def detection_value(self, metric: str, ood: str | None = None) -> float:
        """A metric of ID against OOD images on one OOD set, or its mean over all."""
        return self.mean(metric) if ood is None else self.metrics[ood][metric].value

    def mean(self, metric: str) -> float:
        """The mean of a metric of ID against OOD images over the OOD sets, without those apart."""
        values = [by_metric[metric].value for ood, by_metric in self.metrics.items() if ood not in self.apart]
        return sum(values) / len(values)

    @property
    def measured(self) -> tuple[str, ...]:
        """The metrics of ID against OOD images: those of detection and, with labels, of detector and classifier."""
        return tuple(next(iter(self.metrics.values()), ()))

    @property
    def accuracy(self) -> float | None:
        """Accuracy on the in-distribution test set, or None without labels."""
        return self.classifier.get("accuracy")


@dataclass(frozen=True)
class Drawn:
    """Metrics of every detector on redrawn images."""

    metrics: tuple[str, ...]
    values: NDArray[np.float64]  # (resamples, detectors, OOD sets, metrics)


@dataclass(frozen=True, repr=False)
class Evaluation:
    """Results by detector, and the sets that they were measured on.

    ``print(evaluation)`` shows the table, `plot` the curves, and `to_rows` and `to_pandas` every number.

    Attributes:
        results: By detector.
        sets: By name, the in-distribution set first.
        id_name: The name of that set.
        resamples: Number of bootstrap resamples.
        shifted_names: The sets of known classes in other conditions.
        known_in: By OOD set, the set of images from its source that count as in distribution against it.
        apart: OOD sets that are in no mean.
        groups: By title, OOD sets whose means are shown apart, such as near and far ones.
        left_out: Methods that have no result, with the reason.
        drawn: Metrics on redrawn images, for all detectors, if they were kept.
    """

    results: dict[str, EvaluationResult]
    sets: dict[str, ImageSet]
    id_name: str
    resamples: int
    shifted_names: tuple[str, ...] = ()
    known_in: dict[str, str] = field(default_factory=dict)
    apart: tuple[str, ...] = ()
    groups: dict[str, tuple[str, ...]] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    drawn: "Drawn | None" = field(default=None, repr=False)

    def __repr__(self) -> str:
        return f"Evaluation({', '.join(self.results)}; {self.id_name} against {', '.join(self.ood_names)})"

    def __str__(self) -> str:
        return str(self._table())

    def __dir__(self) -> list[str]:
        fields = ("results", "sets", "id_name", "ood_names", "shifted_names", "groups", "left_out")
        return [*fields, "plot", "to_pandas", "to_rows", "as_dict"]

    def _repr_html_(self) -> str:
        table = self._table()
        return html_table(table.heads, table.rows, table.caption)

    def _table(self) -> Any:
        from kedge.evaluation.summary import SeedSummary, grouped_table  # which imports this module

        return grouped_table(self, HEADLINE) if self.groups else SeedSummary({0: self}).table()

    def to_rows(self) -> list[dict[str, Any]]:
        """One dictionary per detector and OOD set: every metric of the pair, and the share of the set that is flagged.

        Intervals are in ``auroc_low`` and ``auroc_high``, where there are any.
        """
        rows = []
        for name, result in self.results.items():
            for ood, by_metric in result.metrics.items():
                row: dict[str, Any] = {"detector": name, "ood": ood}
                for metric, estimate in by_metric.items():
                    row[metric] = estimate.value
                    if estimate.low is not None:
                        row |= {f"{metric}_low": estimate.low, f"{metric}_high": estimate.high}
                rows.append(row | {"flagged": result.flagged[ood], **result.classifier})
        return rows

    def to_pandas(self) -> Any:
        """The rows of `to_rows` as a DataFrame, indexed by detector and OOD set."""
        return needs("pandas", "pandas", "to_pandas").DataFrame(self.to_rows()).set_index(["detector", "ood"])

    def plot(self, kind: str = "roc", detector: str | None = None) -> Any:
        """A matplotlib figure.

        Args:
            kind: ``"roc"``, ``"scores"`` (histograms) or ``"reliability"`` (of labelled test images).
            detector: Its name; by default the first one.
        """
        from kedge.evaluation.plots import plot_evaluation  # which imports this module

        return plot_evaluation(self, kind, detector)

    @property
    def ood_names(self) -> tuple[str, ...]:
        """The names of the OOD sets, in the order given."""
        others = {self.id_name, *self.shifted_names, *self.known_in.values()}
        return tuple(name for name in self.sets if name not in others)

    @property
    def averaged(self) -> tuple[int, ...]:
        """The places in ``ood_names`` of the sets that means are taken over."""
        return tuple(place for place, name in enumerate(self.ood_names) if name not in self.apart)

    @property
    def over(self) -> str:
        """The sets that means are taken over, in words."""
        places = self.averaged
        words = f"{len(places)} OOD sets" if len(places) > 1 else self.ood_names[places[0]]
        return words + (f" ({', '.join(self.apart)} apart)" if self.apart else "")

    def pairs(self) -> list[tuple[tuple[int, ...], int]]:
        """For each OOD set, the places in ``sets`` of those that are in distribution against it, and its own place."""
        place = {name: number for number, name in enumerate(self.sets)}
        inside = [(self.id_name, *filter(None, [self.known_in.get(ood)])) for ood in self.ood_names]
        return [(tuple(map(place.__getitem__, s)), place[ood]) for s, ood in zip(inside, self.ood_names, strict=True)]

    def inside(self, label: str, ood: str) -> Tensor:
        """The scores of the in-distribution images that an OOD set is held against, (N,)."""
        return inside_scores(self.results[label].detections, self.id_name, self.known_in.get(ood))

    def right(self, label: str, ood: str) -> Tensor | None:
        """Whether each of the images of `inside` was classified correctly, see `inside_right`."""
        return inside_right(self.results[label].detections, self.sets[self.id_name], self.known_in.get(ood))

    def as_dict(self) -> dict[str, Any]:
        """Everything but the images and single scores, as plain data for JSON."""
        return {
            "id": self.id_name,
            "sets": {name: {"images": len(s), "sha256": s.checksum} for name, s in self.sets.items()},
            "resamples": self.resamples,
            "shifted": list(self.shifted_names),
            "known in": self.known_in,
            "apart": list(self.apart),
            "groups": {group: list(oods) for group, oods in self.groups.items()},
            "left out": self.left_out,
            "results": {
                name: {
                    **{metric: result.value(metric) for metric in CLASSIFIER_METRICS},
                    "milliseconds_per_image": result.milliseconds,
                    "passes_per_image": vars(result.cost),
                    "uses_outliers": result.uses_outliers,
                    "tuned": result.tuned,
                    "flagged": result.flagged,
                    "shifted": {name: vars(shifted) for name, shifted in result.shifted.items()},
                    "mean": {metric: result.mean(metric) for metric in result.measured},
                    "groups": {
                        group: {metric: vars(estimate) for metric, estimate in by_metric.items()}
                        for group, by_metric in result.groups.items()
                    },
                    "metrics": {
                        ood: {metric: vars(estimate) for metric, estimate in by_metric.items()}
                        for ood, by_metric in result.metrics.items()
                    },
                }
                for name, result in self.results.items()
            },
        }


def inside_scores(detections: Mapping[str, Detection], id_name: str, known: str | None) -> Tensor:
    """The scores of the in-distribution set, and of the known images from an OOD set's source."""
    scores = detections[id_name].score
    return scores if known is None else torch.cat([scores, detections[known].score])


def inside_right(detections: Mapping[str, Detection], test: ImageSet, known: str | None) -> Tensor | None:
    """Whether each image of `inside_scores` was classified correctly: 1, 0, or -1 for one without a label, (N,).

    The known images from an OOD set's source count as unlabelled. None if no image has a label.
    """
    if test.labels is None or not bool((test.labels >= 0).any()):
        return None
    right = torch.where(test.labels >= 0, (detections[test.name].label == test.labels).long(), -1)
    return right if known is None else torch.cat([right, torch.full((len(detections[known]),), -1)])


@dataclass(frozen=True)
class Curve:
    """A metric to draw along a number: the number of anchors, or the strength of a corruption.

    Args:
        title: The title of the figure.
        axis: The label of the horizontal axis.
        series: By name; for each number the label of a result, and the OOD set, or None for the mean over all.
        metric: On the vertical axis, a detection metric.
    """

    title: str
    axis: str
    series: Mapping[str, Mapping[float, tuple[str, str | None]]]
    metric: str = "auroc"

    def values(self, evaluation: Evaluation) -> dict[str, dict[float, float]]:
        """The metric by series and number, ascending; results and sets that are missing are left out."""
        values = {
            name: {
                number: evaluation.results[label].detection_value(self.metric, ood)
                for number, (label, ood) in sorted(points.items())
                if label in evaluation.results and (ood is None or ood in evaluation.ood_names)
            }
            for name, points in self.series.items()
        }
        return {name: points for name, points in values.items() if points}
