"""A metric along a number: over the anchors, or over the strength of a corruption."""

from collections.abc import Mapping
from dataclasses import dataclass

from kedge.evaluation.result import Evaluation


@dataclass(frozen=True)
class Curve:
    """What to draw along a number.

    Args:
        title: What is shown.
        axis: What the number is.
        series: By name; for each number the label of a result, and the OOD set, or None for the mean over all.
        metric: Of the vertical axis.

    Example:
        >>> Curve("Effect of K", "anchors", {"AMP": {2: ("AMP, K = 2", None), 5: ("AMP", None)}}).metric
        'auroc'
    """

    title: str
    axis: str
    series: Mapping[str, Mapping[float, tuple[str, str | None]]]
    metric: str = "auroc"

    def values(self, evaluation: Evaluation) -> dict[str, dict[float, float]]:
        """The metric by series and number, upwards; results and sets that are not there are left out."""
        found: dict[str, dict[float, float]] = {}
        for name, points in self.series.items():
            known = {
                number: _value(evaluation, label, ood, self.metric)
                for number, (label, ood) in sorted(points.items())
                if label in evaluation.results and (ood is None or ood in evaluation.ood_names)
            }
            if known:
                found[name] = known
        return found


def _value(evaluation: Evaluation, label: str, ood: str | None, metric: str) -> float:
    result = evaluation.results[label]
    return result.mean(metric) if ood is None else result.metrics[ood][metric].value
