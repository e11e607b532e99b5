"""A metric along a number: the number of anchors, or the strength of a corruption."""

from collections.abc import Mapping
from dataclasses import dataclass

from kedge.evaluation.result import Evaluation


@dataclass(frozen=True)
class Curve:
    """A metric to draw along a number.

    Args:
        title: The title of the figure.
        axis: The label of the horizontal axis.
        series: By name; for each number the label of a result, and the OOD set, or None for the mean over all.
        metric: On the vertical axis, a detection metric.

    Example:
        >>> Curve("Effect of K", "anchors", {"AMP": {2: ("AMP, K = 2", None), 5: ("AMP", None)}}).metric
        'auroc'
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
