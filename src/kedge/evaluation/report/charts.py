"""The sections with figures: curves, scores, ROC curves, tau and reliability, with the words around them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kedge.evaluation import Evaluation, EvaluationResult
from kedge.evaluation.report import figures
from kedge.evaluation.report.figures import Array
from kedge.evaluation.report.markup import Html, percent, render_template
from kedge.evaluation.result import Curve
from kedge.metrics import METRICS, ece

MOST = 6  # curves or diagrams side by side


@dataclass(frozen=True)
class Drawing:
    """A figure with its title, its caption, and the names of its curves for the legend."""

    picture: Html
    title: str = ""
    caption: str = ""
    names: Sequence[str] = ()


@dataclass(frozen=True)
class Group:
    """Drawings side by side, with an optional heading and note."""

    drawings: Sequence[Drawing]
    heading: str = ""
    note: str = ""


def figure_section(
    identifier: str, heading: str, words: str, *groups: Group, layout: str = "panels", id_name: str = ""
) -> Html:
    """A section of figures, ``"panels"`` (small), ``"pair"`` (two in a row) or ``"wide"``; id_name: for the legend."""
    return render_template(
        "figures.html", id=identifier, heading=heading, words=words, groups=groups, layout=layout, id_name=id_name
    )


def curve_section(evaluation: Evaluation, curves: Sequence[Curve]) -> Html | None:
    """Curves along a number, such as that of the anchors; None if none has a point."""
    drawings = []
    for i, curve in enumerate(curves):
        values = curve.values(evaluation)
        if not values:
            continue
        metric = METRICS[curve.metric]
        lines = [(np.array(list(points)), np.array(list(points.values()))) for points in values.values()]
        listed = "; ".join(
            f"{name}: {', '.join(f'{percent(y)} % at {x:g}' for x, y in points.items())}"
            for name, points in values.items()
        )
        label = f"{metric.label} by {curve.axis}. {listed}."
        picture = figures.lines(f"curve-{i}", lines, axis=curve.axis, value=metric.label, label=label)
        over = "" if all(ood for points in curve.series.values() for _, ood in points.values()) else ", mean over sets"
        caption = f"{metric.label}{over}; {metric.better} is better"
        drawings.append(Drawing(picture, curve.title, caption, list(values)))
    return figure_section("curves", "Curves", "", Group(drawings), layout="pair") if drawings else None


def score_section(evaluation: Evaluation, leads: Sequence[str]) -> Html:
    """Histograms of the scores, one panel per OOD set."""
    id_name, oods, groups = evaluation.id_name, evaluation.ood_names, []
    for i, lead in enumerate(leads):
        result = evaluation.results[lead]
        inside = {ood: _array(evaluation.inside(lead, ood)) for ood in oods}
        outside = {ood: _array(result.detections[ood].score) for ood in oods}
        captions = {
            ood: f"{percent(result.flagged[ood])} % flagged, AUROC {percent(result.metrics[ood]['auroc'].value)} %"
            for ood in oods
        }
        panels = _panels(f"scores-{i}", id_name, inside, outside, "score", captions, flagging_threshold(result))
        share = f"The threshold flags {percent(result.flagged[id_name])} % of {id_name}."
        groups.append(Group(panels, lead if len(leads) > 1 else "", share))
    words = (
        "Further right is further out. The dashed line is the threshold: it flags everything beyond it. The first and "
        "the last bar include everything beyond them."
    )
    heading = f"Scores of {leads[0]}" if len(leads) == 1 else "Scores"
    return figure_section("scores", heading, words, *groups, id_name=id_name)


def flagging_threshold(result: EvaluationResult) -> float | None:
    """A threshold between flagged and accepted scores; None if all are flagged, or none is."""
    scores = torch.cat([d.score.double() for d in result.detections.values()])
    flagged = torch.cat([d.is_ood for d in result.detections.values()])
    if not 0 < int(flagged.sum()) < len(flagged):
        return None
    return (float(scores[~flagged].max()) + float(scores[flagged].min())) / 2


def tau_section(evaluation: Evaluation, leads: Sequence[str]) -> Html | None:
    """Histograms of tau, of the first detector that has one, leads before others; None if none has."""
    names = dict.fromkeys([*leads, *evaluation.results])
    have = (n for n in names if all(d.tau is not None for d in evaluation.results[n].detections.values()))
    name = next(have, None)
    if name is None:
        return None
    detections = evaluation.results[name].detections
    values = {s: _array(d.tau) for s, d in detections.items() if d.tau is not None}
    inside, outside = values[evaluation.id_name], {ood: values[ood] for ood in evaluation.ood_names}
    captions = {
        ood: f"median {float(np.median(there)):.3g}, in distribution {float(np.median(inside)):.3g}"
        for ood, there in outside.items()
    }
    panels = _panels("tau", evaluation.id_name, dict.fromkeys(outside, inside), outside, "tau", captions, None)
    words = "How far the predictions with different anchors disagree about an image; further right is more."
    return figure_section("tau", f"Tau of {name}", words, Group(panels), id_name=evaluation.id_name)


def roc_section(evaluation: Evaluation, leads: Sequence[str]) -> Html:
    """The first lead on each OOD set, and the leads and the best detectors on the hardest set."""
    lead, oods, every = leads[0], evaluation.ood_names, list(evaluation.results)

    def pair(name: str, ood: str) -> tuple[Array, Array]:
        return _array(evaluation.inside(name, ood)), _array(evaluation.results[name].detections[ood].score)

    def area(name: str, ood: str) -> float:
        return evaluation.results[name].metrics[ood]["auroc"].value

    hardest = min(oods, key=lambda ood: sum(area(name, ood) for name in every))
    names = every
    if len(every) > MOST:
        best = sorted(every, key=lambda name: -area(name, hardest))
        chosen = list(dict.fromkeys([*leads, *best]))[:MOST]
        names = [name for name in every if name in chosen]
    by_set = "; ".join(f"{ood} {percent(area(lead, ood))} %" for ood in oods)
    label = f"ROC curves of {lead}, one per OOD set. AUROC: {by_set}."
    picture = figures.roc("roc-sets", [pair(lead, ood) for ood in oods], oods, label=label)
    drawings = [Drawing(picture, f"{lead} on each OOD set", names=oods)]
    if len(names) > 1:
        by_detector = "; ".join(f"{name} {percent(area(name, hardest))} %" for name in names)
        label = f"ROC curves on {hardest}, one per detector. AUROC: {by_detector}."
        picture = figures.roc("roc-detectors", [pair(name, hardest) for name in names], names, label=label)
        which = f"the hardest set, {hardest}" if len(oods) > 1 else hardest
        who = "Each detector" if names == every else f"The best {len(names)} of {len(every)} detectors, leads included,"
        drawings.append(Drawing(picture, f"{who} on {which}", names=names))
    words = (
        "Every threshold is a point: the share of ID images that it flags, on a logarithmic axis, and the share of OOD "
        "images. Higher is better. At the dotted line 5 % of the ID images are flagged; the distance from the curve to "
        "the top is FPR95."
    )
    return figure_section("roc", "ROC curves", words, Group(drawings), layout="pair")


def reliability_section(evaluation: Evaluation, leads: Sequence[str]) -> Html | None:
    """One diagram per classifier: detectors with equal probabilities share one. None without labels."""
    labels = evaluation.sets[evaluation.id_name].labels
    if labels is None or not bool((labels >= 0).any()):
        return None
    labelled = labels >= 0
    groups: list[tuple[list[str], Tensor]] = []
    for name, result in evaluation.results.items():
        probability = result.detections[evaluation.id_name].probability[labelled]
        same = next((members for members, p in groups if p.shape == probability.shape and p.equal(probability)), None)
        if same is None:
            groups.append(([name], probability))
        else:
            same.append(name)
    groups.sort(key=lambda group: not set(leads) & set(group[0]))  # leads first, otherwise in order
    drawings = []
    for i, (members, probability) in enumerate(groups[:MOST]):
        right, sure = probability.argmax(dim=1) == labels[labelled], _array(probability.amax(dim=1))
        numbers = (
            f"mean confidence {percent(float(sure.mean()))} %, accuracy {percent(float(right.double().mean()))} %, "
            f"ECE {percent(ece(probability, labels[labelled]))} %"
        )
        label = f"Reliability of {', '.join(members)}: {numbers}."
        picture = figures.reliability_diagram(f"reliability-{i}", sure, right.numpy(), label=label)
        drawings.append(Drawing(picture, ", ".join(members), numbers))
    words = (
        "The share of correct predictions by their confidence. On the dotted line they are equal; below it the "
        "classifier is overconfident. A larger dot stands for more images; bars are 95 % intervals."
    )
    if len(groups) > MOST:
        words += f" Shown are {MOST} of {len(groups)} classifiers, leads first."
    return figure_section("reliability", "Reliability", words, Group(drawings))


def _panels(
    kind: str,
    id_name: str,
    insides: dict[str, Array],
    outsides: dict[str, Array],
    axis: str,
    captions: dict[str, str],
    threshold: float | None,
) -> list[Drawing]:
    bins = figures.edges([*insides.values(), *outsides.values()])
    drawings = []
    for i, (ood, outside) in enumerate(outsides.items()):
        inside = insides[ood]
        label = f"Histograms of {axis}. {_quantiles(id_name, inside)}; {_quantiles(ood, outside)}. {captions[ood]}."
        picture = figures.histograms(f"{kind}-{i}", inside, outside, bins, axis=axis, label=label, threshold=threshold)
        drawings.append(Drawing(picture, ood, captions[ood]))
    return drawings


def _quantiles(name: str, values: Array) -> str:
    low, middle, high = np.quantile(values, [0.05, 0.5, 0.95])
    return f"{name}: median {middle:.3g}, 90 % from {low:.3g} to {high:.3g}"


def _array(values: Tensor) -> Array:
    return values.double().numpy()


# The figures of every report, in order: by identifier, the name in the links and the section; a new one is a row here.
SECTIONS: dict[str, tuple[str, Callable[[Evaluation, Sequence[str]], Html | None]]] = {
    "scores": ("Scores", score_section),
    "roc": ("ROC curves", roc_section),
    "tau": ("Tau", tau_section),
    "reliability": ("Reliability", reliability_section),
}
