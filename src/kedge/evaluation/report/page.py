"""The report: its finding in one sentence, and its sections, in order."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from kedge.detectors import AMP, Detector
from kedge.detectors.neighbours import Neighbours
from kedge.errors import InputError
from kedge.evaluation import Evaluation, EvaluationResult
from kedge.evaluation.paired import FEWEST, RESAMPLES, Best, best_beyond_noise
from kedge.evaluation.report import charts, figures
from kedge.evaluation.report.document import document, write_page
from kedge.evaluation.report.gallery import anchor_section, image_section, opening_pictures
from kedge.evaluation.report.markup import percent, render_template
from kedge.evaluation.result import HEADLINE, Curve
from kedge.evaluation.summary import SHOWN, STAR, chosen_options, passes_text, starred
from kedge.metrics import METRICS

FEW = 3  # names in a title


def write_report(
    path: str | os.PathLike[str],
    evaluation: Evaluation,
    *,
    title: str | None = None,
    intro: str = "",
    leads: Sequence[str] = (),
    detector: Detector | None = None,
    neighbours: Neighbours | None = None,
    curves: Sequence[Curve] = (),
    record: Mapping[str, Any] | None = None,
    resamples: int = RESAMPLES,
) -> Path:
    """Write an evaluation as one HTML file: tables, figures, the hardest images and the record of the run.

    The file is self-contained. The same arguments give the same bytes.

    Args:
        path: The file to write; its folder is created if needed.
        evaluation: From `kedge.evaluate`.
        title: The title of the page; by default what was compared.
        intro: Text before the tables; a blank line starts a new paragraph.
        leads: Names of detectors whose scores are drawn, by default the first of the evaluation; the galleries show
            the errors of the first of them.
        detector: The detector of the first lead; one with anchors is shown with them and the prediction under each.
        neighbours: Training images, of which the nearest are shown beside each error.
        curves: To draw along a number, such as that of the anchors.
        record: How to repeat the run: configuration, seeds, versions, command; plain data.
        resamples: Number of bootstrap resamples that decide which leads are beyond noise.

    Returns:
        The path written.

    Example:
        >>> import tempfile, torch
        >>> from kedge import MSP, ImageSet
        >>> from kedge.evaluation import evaluate
        >>> noise = lambda name: ImageSet(torch.randint(0, 256, (40, 3, 4, 4), dtype=torch.uint8), name=name)
        >>> net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(48, 2))
        >>> msp = MSP(net).fit(noise("train")).calibrate(noise("held out"))
        >>> evaluation = evaluate({"MSP": msp}, noise("test"), [noise("other")])
        >>> write_report(tempfile.mkdtemp() + "/report.html", evaluation).name
        'report.html'
    """
    if not evaluation.results or not evaluation.ood_names:
        raise InputError("evaluation must hold at least one detector and one OOD set; make one with kedge.evaluate")
    figures.require()  # before the minutes that a large evaluation may take
    if unknown := [name for name in leads if name not in evaluation.results]:
        raise InputError(f"leads must name detectors of the evaluation; got {', '.join(map(repr, unknown))}")
    leads = leads or [next(iter(evaluation.results))]
    lead, anchored = leads[0], None
    if detector is not None and detector.reads == "per_anchor_logits":
        anchored = cast(AMP, detector)
    anchors = None if anchored is None else anchor_section(anchored, evaluation, lead)  # first: it fails if not fitted
    best = best_beyond_noise(evaluation, resamples=resamples)
    context = {
        "evaluation": evaluation,
        "best": best,
        "metrics": {name: METRICS[name] for name in SHOWN},
        "more": {name: metric for name, metric in METRICS.items() if name not in SHOWN},
        "outliers": any(result.uses_outliers for result in evaluation.results.values()),
        "headline": HEADLINE,
        "record": record or {},
        "starred": starred,
        "chosen_options": chosen_options,
        "guaranteed": guaranteed,
        "passes_text": passes_text,
        "STAR": STAR,
        "FEWEST": FEWEST,
    }
    parts = (  # identifier, name in the links, content
        ("summary", "Summary", render_template("summary.html", **context)),
        ("groups", "Groups", render_template("groups.html", **context) if evaluation.groups else None),
        ("curves", "Curves", charts.curve_section(evaluation, curves)),
        ("sets", "Set by set", render_template("sets.html", **context)),
        ("shifted", "Shifted images", render_template("shifted.html", **context) if evaluation.shifted_names else None),
        *((identifier, name, draw(evaluation, leads)) for identifier, (name, draw) in charts.SECTIONS.items()),
        ("images", "Images", image_section(evaluation, lead, anchored, neighbours)),
        ("anchors", "Anchors", anchors),
        ("reading", "How to read this", render_template("reading.html", **context)),
        ("record", "Record", render_template("record.html", **context)),
    )
    paragraphs = [paragraph.strip() for paragraph in intro.split("\n\n") if paragraph.strip()]
    page = document(
        comparison_title(evaluation) if title is None else title, plain_finding(evaluation, lead),
        [evaluation_finding(evaluation, best), *paragraphs], parts, opening=opening_pictures(evaluation, lead),
    )  # fmt: skip
    return write_page(path, page)


def comparison_title(evaluation: Evaluation) -> str:
    """What was compared, on which sets."""
    results, oods = evaluation.results, evaluation.ood_names
    who = ", ".join(results) if len(results) <= FEW else f"{len(results)} detectors"
    against = ", ".join(oods) if len(oods) <= FEW else f"{len(oods)} other sets"
    return f"{who} on {evaluation.id_name} against {against}"


def guaranteed(result: EvaluationResult) -> float | None:
    """The share of ID images that the threshold may flag: the largest p-value flagged, or None if none was.

    It is k / (n + 1) for n calibration images, the guarantee of split conformal prediction, which alpha bounds.
    """
    flagged = [float(d.p_value[d.is_ood].max()) for d in result.detections.values() if bool(d.is_ood.any())]
    return max(flagged, default=None)


def plain_finding(evaluation: Evaluation, lead: str) -> str:
    """What the threshold of a detector does with the images, in a sentence that needs no other."""
    flagged, over = evaluation.results[lead].flagged, [evaluation.ood_names[place] for place in evaluation.averaged]
    share = sum(flagged[ood] for ood in over) / len(over)
    easiest, hardest = (choose(over, key=lambda ood: flagged[ood]) for choose in (max, min))
    what = f"{percent(share)} % of {hardest}, which it should"
    if len(over) > 1:
        ends = f"{percent(flagged[hardest])} % of {hardest} up to {percent(flagged[easiest])} % of {easiest}"
        what = f"{percent(share)} % of the images that it should flag, from {ends}"
    inside = f"{percent(flagged[evaluation.id_name])} % of {evaluation.id_name}, which it should not"
    return f"{lead} flags {what}; and {inside}."


def evaluation_finding(evaluation: Evaluation, best: Best) -> str:
    """The result of an evaluation in a sentence."""
    results, sets = evaluation.results, len(evaluation.averaged)
    explained = evaluation.over.replace(" OOD sets", " out-of-distribution (OOD) sets", 1)
    over = f"over {explained}" if sets > 1 else f"on {evaluation.over}"
    if len(results) > 1:
        leads = " and ".join(_leader(evaluation, best, metric) for metric in HEADLINE)
        spans = " and ".join(_span(evaluation, metric) for metric in HEADLINE)
        return f"Of {len(results)} detectors {over}, {leads}; {spans}."
    (name, result), *_ = results.items()
    values = " and an ".join(f"{METRICS[m].label} of {percent(result.mean(m))} %" for m in HEADLINE)
    text = f"{name} reaches an {values} {over}"
    if sets == 1:
        return text + "."
    order = sorted(result.metrics, key=lambda ood: result.metrics[ood]["auroc"].value)
    low, high = (f"{percent(result.metrics[ood]['auroc'].value)} % ({ood})" for ood in (order[0], order[-1]))
    return f"{text} in the mean; from set to set the AUROC ranges from {low} to {high}."


def _leader(evaluation: Evaluation, best: Best, name: str) -> str:
    metric = METRICS[name]
    order = sorted(evaluation.results, key=lambda label: -metric.sign * evaluation.results[label].mean(name))
    values = [evaluation.results[label].mean(name) for label in order]
    mean = "mean " if len(evaluation.averaged) > 1 else ""
    what = f"the {'highest' if metric.higher_is_better else 'lowest'} {mean}{metric.label}"
    tied = [label for label, value in zip(order, values, strict=True) if value == values[0]]
    if len(tied) > 1:
        return f"{', '.join(tied[:-1])} and {tied[-1]} share {what} ({percent(values[0])} %)"
    lead = "a lead beyond noise" if best.overall.get(name) else "a lead within noise"
    lead = lead if best.enough else "too few images for a comparison"
    return f"{order[0]} has {what} ({percent(values[0])} %; next {order[1]}, {percent(values[1])} %; {lead})"


def _span(evaluation: Evaluation, metric: str) -> str:
    values = [result.mean(metric) for result in evaluation.results.values()]
    return f"{METRICS[metric].label} spans {percent(min(values))} to {percent(max(values))} %"
