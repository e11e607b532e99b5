"""Curves along a number: the effect of K, AUROC over the strength of a corruption."""

from collections.abc import Sequence

import numpy as np

from kedge.evaluation import Evaluation
from kedge.evaluation.curve import Curve
from kedge.evaluation.report import figures
from kedge.evaluation.report.markup import Html, figure, section, tag
from kedge.evaluation.report.tables import percent
from kedge.evaluation.summary import HEADS


def curves(evaluation: Evaluation, wanted: Sequence[Curve]) -> Html | None:
    """One figure each; None where none has a point."""
    drawn = []
    for i, curve in enumerate(wanted):
        values = curve.values(evaluation)
        if not values:
            continue
        named, better = HEADS[curve.metric].rsplit(" ", 1)
        lines = [(np.array(list(points)), np.array(list(points.values()))) for points in values.values()]
        said = "; ".join(
            f"{name}: {', '.join(f'{percent(y)} % at {x:g}' for x, y in points.items())}"
            for name, points in values.items()
        )
        picture = figures.lines(
            f"curve-{i}", lines, axis=curve.axis, value=named, label=f"{named} by {curve.axis}. {said}."
        )
        over = "" if all(ood for points in curve.series.values() for _, ood in points.values()) else ", mean over sets"
        words = f"{named}{over}; {'higher' if better == '↑' else 'lower'} is better"
        drawn.append(figure(picture, tag("strong", curve.title), tag("br"), words, figures.legend(list(values))))
    return section("curves", "Curves", tag("div", *drawn, class_="pair")) if drawn else None
