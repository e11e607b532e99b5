"""The sections with figures: scores, ROC curves, temperatures and reliability, with the words around them."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from kedge.evaluation import Evaluation, Result
from kedge.evaluation.report import figures
from kedge.evaluation.report.figures import Array
from kedge.evaluation.report.markup import Html, figure, section, tag
from kedge.evaluation.report.tables import percent
from kedge.metrics import ece

MOST = 6  # curves or diagrams beside each other


def threshold(result: Result) -> float | None:
    """A threshold that tells flagged scores from accepted ones; None if all are, or none is."""
    scores = torch.cat([d.score.double() for d in result.detections.values()])
    flagged = torch.cat([d.is_ood for d in result.detections.values()])
    if not 0 < int(flagged.sum()) < len(flagged):
        return None
    return (float(scores[~flagged].max()) + float(scores[flagged].min())) / 2


def scores(evaluation: Evaluation, leads: Sequence[str]) -> Html:
    """Histograms of the scores, one panel per OOD set."""
    id_name, parts = evaluation.id_name, []
    for number, lead in enumerate(leads):
        result = evaluation.results[lead]
        inside = {ood: _array(evaluation.inside(lead, ood)) for ood in evaluation.ood_names}
        outside = {ood: _array(result.detections[ood].score) for ood in evaluation.ood_names}
        captions = {
            name: f"{percent(result.flagged[name])} % flagged, AUROC {percent(result.metrics[name]['auroc'].value)} %"
            for name in evaluation.ood_names
        }
        share = f"The threshold flags {percent(result.flagged[id_name])} % of {id_name}."
        parts += [tag("h3", lead)] if len(leads) > 1 else []
        parts.append(tag("p", share))
        parts.append(_panels(f"scores-{number}", id_name, inside, outside, "score", captions, threshold(result)))
    words = (
        "Further right is further out. The dashed line is the threshold: it flags what lies beyond it. Each panel is "
        "scaled to its own highest bar; the first and the last bar hold what lies beyond them."
    )
    heading = f"Scores of {leads[0]}" if len(leads) == 1 else "Scores"
    return section("scores", heading, tag("p", words), _sides(id_name), *parts)


def temperatures(evaluation: Evaluation, leads: Sequence[str]) -> Html | None:
    """Histograms of the temperature, of the first detector that has one, leads before others; None if none has."""
    names = dict.fromkeys([*leads, *evaluation.results])
    have = (n for n in names if all(d.tau is not None for d in evaluation.results[n].detections.values()))
    name = next(have, None)
    if name is None:
        return None
    said = evaluation.results[name].detections
    values = {s: _array(d.tau) for s, d in said.items() if d.tau is not None}
    inside = values[evaluation.id_name]
    outside = {ood: values[ood] for ood in evaluation.ood_names}
    captions = {
        ood: f"median {float(np.median(there)):.3g}, in distribution {float(np.median(inside)):.3g}"
        for ood, there in outside.items()
    }
    return section(
        "temperature",
        f"Temperature of {name}",
        tag("p", "How far the anchors disagree about an image; further right is more disagreement."),
        _sides(evaluation.id_name),
        _panels(
            "temperature", evaluation.id_name, dict.fromkeys(outside, inside), outside, "temperature", captions, None
        ),
    )


def roc_curves(evaluation: Evaluation, leads: Sequence[str]) -> Html:
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
    drawn = [
        figure(
            figures.roc(
                "roc-sets",
                [pair(lead, ood) for ood in oods],
                label=f"ROC curves of {lead}, one per OOD set. AUROC: {by_set}.",
            ),
            tag("strong", f"{lead} on each OOD set"),
            figures.legend(oods),
        )
    ]
    if len(names) > 1:
        by_detector = "; ".join(f"{name} {percent(area(name, hardest))} %" for name in names)
        curves = figures.roc(
            "roc-detectors",
            [pair(name, hardest) for name in names],
            label=f"ROC curves on {hardest}, one per detector. AUROC: {by_detector}.",
        )
        which = f"the hardest set, {hardest}" if len(oods) > 1 else hardest
        who = "Each detector" if names == every else f"The best {len(names)} of {len(every)} detectors, leads included,"
        drawn.append(figure(curves, tag("strong", f"{who} on {which}"), figures.legend(names)))
    words = (
        "Every threshold is a point: how many ID images it flags, on a logarithmic axis, and how many OOD images. "
        "Higher is better. At the dotted line 5 % of the ID images are flagged; from the curve up to the top is FPR95."
    )
    return section("roc", "ROC curves", tag("p", words), tag("div", *drawn, class_="pair"))


def reliability(evaluation: Evaluation, leads: Sequence[str]) -> Html | None:
    """One diagram for each network, since detectors share them: those with equal probabilities; None without labels."""
    labels = evaluation.sets[evaluation.id_name].labels
    if labels is None:
        return None
    groups: list[tuple[list[str], Tensor]] = []
    for name, result in evaluation.results.items():
        probability = result.detections[evaluation.id_name].probability
        same = next((members for members, p in groups if p.shape == probability.shape and p.equal(probability)), None)
        if same is None:
            groups.append(([name], probability))
        else:
            same.append(name)
    groups.sort(key=lambda group: not set(leads) & set(group[0]))  # leads first, otherwise as they are
    drawn = []
    for i, (members, probability) in enumerate(groups[:MOST]):
        right, sure = probability.argmax(dim=1) == labels, _array(probability.amax(dim=1))
        gap = percent(ece(probability, labels))
        said = f"mean confidence {percent(float(sure.mean()))} %, accuracy {percent(float(right.double().mean()))} %"
        picture = figures.reliability(
            f"reliability-{i}", sure, right.numpy(), label=f"Reliability of {', '.join(members)}: {said}, ECE {gap} %."
        )
        drawn.append(figure(picture, tag("strong", ", ".join(members)), tag("br"), f"{said}, ECE {gap} %"))
    words = (
        "Of the predictions with a given confidence, how many are right? On the dotted line confidence can be taken "
        "at its word; below it the classifier is too sure. A larger dot holds more images; bars are 95 % intervals."
    )
    if len(groups) > MOST:
        words += f" Shown are {MOST} of {len(groups)} classifiers, leads first."
    return section("reliability", "Reliability", tag("p", words), tag("div", *drawn, class_="panels"))


def _panels(
    kind: str,
    id_name: str,
    insides: dict[str, Array],
    outsides: dict[str, Array],
    axis: str,
    captions: dict[str, str],
    threshold: float | None,
) -> Html:
    bins = figures.edges([*insides.values(), *outsides.values()])
    drawn = []
    for i, (ood, outside) in enumerate(outsides.items()):
        label = (
            f"Histograms of the {axis}. {_summary(id_name, insides[ood])}; {_summary(ood, outside)}. {captions[ood]}."
        )
        picture = figures.histograms(
            f"{kind}-{i}", insides[ood], outside, bins, axis=axis, label=label, threshold=threshold
        )
        drawn.append(figure(picture, tag("strong", ood), tag("br"), captions[ood]))
    return tag("div", *drawn, class_="panels")


def _summary(name: str, values: Array) -> str:
    low, middle, high = np.quantile(values, [0.05, 0.5, 0.95])
    return f"{name}: median {middle:.3g}, 90 % from {low:.3g} to {high:.3g}"


def _sides(id_name: str) -> Html:
    def swatch(colour: str) -> Html:
        style = f"fill: var({colour}); fill-opacity: 0.35; stroke: var({colour})"
        box = tag("path", d="M0 0 H14 V10 H0 Z", style=style)
        return tag("svg", box, width="14", height="10", viewBox="0 0 14 10", aria_hidden="true")

    inside = tag("li", swatch("--id"), tag("span", f"in distribution: {id_name}"))
    return tag("ul", inside, tag("li", swatch("--ood"), tag("span", "the OOD set of the panel")), class_="legend")


def _array(values: Tensor) -> Array:
    return values.double().numpy()
