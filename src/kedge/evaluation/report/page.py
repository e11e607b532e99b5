"""The page: what the report shows, in which order."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kedge.detectors import AMP
from kedge.errors import InputError
from kedge.evaluation import Evaluation
from kedge.evaluation.curve import Curve
from kedge.evaluation.paired import RESAMPLES, best_beyond_noise
from kedge.evaluation.report import charts, figures
from kedge.evaluation.report.anchors import anchors
from kedge.evaluation.report.curves import curves
from kedge.evaluation.report.document import document
from kedge.evaluation.report.gallery import galleries
from kedge.evaluation.report.markup import Html, join, section, tag
from kedge.evaluation.report.shifted import shifted
from kedge.evaluation.report.tables import COLUMNS, by_set, data, finding, headline
from kedge.files import atomic

READING = (
    ("Score", "One number per image. A larger score always means further out of distribution, for every detector."),
    (
        "Threshold",
        "Set on held-out ID images so that on average at most the promised share of fresh ID images is flagged; on one "
        "test set of a few hundred images the share may well be a point higher or lower.",
    ),
    ("p-value", "The share of ID images that would score at least this high; an image is flagged when it is small."),
    ("Temperature", "How far the hypotheses of the anchors disagree about an image, for detectors with anchors."),
    ("Interval", "Where the value lies for 95 % of redrawn image samples. It knows nothing of other training runs."),
    (
        "passes",
        "How often one image goes through all but the first layer of the network; after a plus sign, backwards.",
    ),
    ("ms", "Milliseconds per image in this run on the machine that made the report; good for orders of magnitude."),
)


LONG = 300  # characters of a line of the record that stands open


def write_report(
    path: str | os.PathLike[str],
    evaluation: Evaluation,
    *,
    title: str,
    intro: str = "",
    leads: Sequence[str] = (),
    detector: AMP | None = None,
    curves: Sequence[Curve] = (),
    record: Mapping[str, Any] | None = None,
    resamples: int = RESAMPLES,
) -> Path:
    """Write an evaluation as one HTML file: tables, figures, the hardest images and the record of the run.

    The file needs nothing from outside. The same arguments give the same bytes.

    Args:
        path: Of the file; its folder is made where it is missing.
        evaluation: From `kedge.evaluation.evaluate`.
        title: Of the page.
        intro: A few words before the tables; a blank line starts a new paragraph.
        leads: Names of detectors whose scores are drawn, by default the first of the evaluation; of the first of them
            the galleries show the mistakes.
        detector: The AMP detector of the first lead, to show its anchors and what each of them predicts.
        curves: To draw along a number, such as that of the anchors.
        record: How the run can be repeated: configuration, seeds, versions, command; plain data.
        resamples: Of the bootstrap that tells which leads are beyond noise.

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
        >>> write_report(tempfile.mkdtemp() + "/report.html", evaluation, title="Greys").name
        'report.html'
    """
    if not evaluation.results or not evaluation.ood_names:
        raise InputError("evaluation must hold at least one detector and one OOD set; make one with kedge.evaluation")
    if detector is not None and not isinstance(detector, AMP):
        raise InputError(f"detector must be an AMP detector, which has anchors to show; got {type(detector).__name__}")
    figures.require()  # before the minutes that a large evaluation may take
    unknown = [name for name in leads if name not in evaluation.results]
    if unknown:
        raise InputError(f"leads must name detectors of the evaluation; got {', '.join(map(repr, unknown))}")
    leads = leads or [next(iter(evaluation.results))]
    text = _page(evaluation, title, intro, leads, detector, curves, record or {}, resamples)
    with atomic(path) as temporary:
        temporary.write_text(text, encoding="utf-8", errors="replace", newline="\n")
    return Path(path)


def _page(
    evaluation: Evaluation,
    title: str,
    intro: str,
    leads: Sequence[str],
    detector: AMP | None,
    wanted: Sequence[Curve],
    record: Mapping[str, Any],
    resamples: int,
) -> str:
    lead = leads[0]
    anchored = None if detector is None else anchors(detector, evaluation, lead)  # first: it fails if not fitted
    best = best_beyond_noise(evaluation, resamples=resamples)
    parts = (  # by the identifier of the section, for the links
        ("summary", "Summary", headline(evaluation, best)),
        ("curves", "Curves", curves(evaluation, wanted)),
        ("sets", "Set by set", by_set(evaluation, best)),
        ("shifted", "Shifted images", shifted(evaluation)),
        ("scores", "Scores", charts.scores(evaluation, leads)),
        ("roc", "ROC curves", charts.roc_curves(evaluation, leads)),
        ("temperature", "Temperature", charts.temperatures(evaluation, leads)),
        ("reliability", "Reliability", charts.reliability(evaluation, leads)),
        ("images", "Images", galleries(evaluation, lead, detector)),
        ("anchors", "Anchors", anchored),
        ("reading", "How to read this", _reading()),
        ("record", "Record", _record(evaluation, record)),
    )
    paragraphs = [paragraph.strip() for paragraph in intro.split("\n\n") if paragraph.strip()]
    return document(title, finding(evaluation, best), paragraphs, parts)


def _reading() -> Html:
    terms = [("ID and OOD", "In distribution: like the training images. Out of distribution: anything else.")]
    terms += READING[:4]
    terms += [(f"{column.head} {column.arrow}", column.meaning) for column in COLUMNS]
    terms += READING[4:]
    rows = (tag("div", tag("dt", term), tag("dd", meaning)) for term, meaning in terms)
    arrows = tag("p", "↑ marks a metric of which more is better, ↓ one of which less is better.")
    return section("reading", "How to read this", arrows, tag("dl", *rows, class_="terms"))


def _record(evaluation: Evaluation, record: Mapping[str, Any]) -> Html:
    rows = (part for name, value in record.items() for part in (tag("dt", str(name)), tag("dd", _value(value))))
    listed = tag("dl", *rows, class_="record") if record else tag("p", "No record was given.")
    numbers = _folded("All numbers as JSON", evaluation.as_dict())
    return section("record", "Record of the run", listed, data(evaluation), numbers)


def _value(value: Any) -> Html:
    if not isinstance(value, (Mapping, list, tuple)):
        return join([str(value)])
    items = list(value.values()) if isinstance(value, Mapping) else list(value)
    heads = [f"{key}: " for key in value] if isinstance(value, Mapping) else [""] * len(items)
    line = ", ".join(f"{head}{item}" for head, item in zip(heads, items, strict=True))
    nested = any(isinstance(item, (Mapping, list, tuple)) for item in items)
    return _folded(f"{len(value)} entries", value) if nested or len(line) > LONG else join([line])


def _folded(summary: str, value: Any) -> Html:
    text = json.dumps(value, indent=2, default=str, ensure_ascii=False)
    return tag("details", tag("summary", summary), tag("pre", text))
