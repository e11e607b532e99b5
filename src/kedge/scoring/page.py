"""The summary of a scoring job as a page: shares, a plot, and a contact sheet of the most suspicious images."""

import numpy as np
import torch
from numpy.typing import NDArray

from kedge.data.preprocess import in_mode
from kedge.errors import KedgeError
from kedge.evaluation.report import figures
from kedge.evaluation.report.document import document
from kedge.evaluation.report.gallery import SIDE, picture
from kedge.evaluation.report.markup import Html, figure, number, percent, section, table, tag
from kedge.scoring.inputs import open_named
from kedge.scoring.summary import RowSummary, class_of


def score_page(
    summary: RowSummary, *, title: str, calibration: NDArray[np.float64] | None = None, column: str | None = None
) -> str:
    """The page, which loads nothing; with ``calibration`` scores to compare, and the image ``column`` of parquet."""
    read = summary.images - summary.errors
    finding = f"{summary.flagged:,} of {read:,} images are flagged as out of distribution, {percent(summary.share)} %."
    unread = [f"{summary.errors:,} files could not be read as images; their rows say why."] if summary.errors else []
    parts = (
        ("scores", "Scores", _scores(summary, calibration)),
        ("classes", "Classes", _classes(summary)),
        ("suspicious", "Most suspicious", _contact_sheet(summary, column)),
    )
    return document(title, finding, unread, parts)


def _scores(summary: RowSummary, calibration: NDArray[np.float64] | None) -> Html | None:
    if not len(summary.scores) or calibration is None:
        return None
    edges = figures.edges([calibration, summary.scores])
    low, middle, high = np.quantile(summary.scores, [0.05, 0.5, 0.95])
    label = f"Histogram of scores. Of these images 90 % score from {low:.3g} to {high:.3g}, the median is {middle:.3g}."
    drawn = figures.histograms("scores", calibration, summary.scores, edges, axis="score", label=label)
    words = tag("p", "Blue: calibration scores. Orange: these images. Further right is further out of distribution.")
    return section("scores", "Scores", words, tag("div", figure(drawn, label), class_="pair"))


def _classes(summary: RowSummary) -> Html:
    heads = [tag("th", words, scope="col") for words in ("Predicted class", "images", "flagged", "share, %")]
    rows = [
        tag("tr", tag("th", name, scope="row"), *(tag("td", cell) for cell in (f"{n:,}", f"{m:,}", percent(m / n))))
        for name, (n, m) in summary.by_class.items()
    ]
    return section("classes", "By predicted class", table("", heads, rows, label="Flagged by class"))


def _contact_sheet(summary: RowSummary, column: str | None) -> Html:
    cards = []
    for row in summary.suspicious:
        words = (
            tag("strong", row["name"]),
            f"{class_of(row)} ({100 * row['probability']:.0f} %)",
            f"score {number(row['score'])}, p {number(row['p_value'], 2)}",
            f"flagged: {row['reason']}" if row["reason"] else "flagged" if row["is_ood"] else "accepted",
        )
        cards.append(figure(_thumbnail(row["name"], column), tag("br").join(words)))
    note = tag("p", "The images with the highest scores, the highest first.")
    return section("suspicious", "The most suspicious images", note, tag("div", *cards, class_="gallery"))


def _thumbnail(name: str, column: str | None) -> Html:
    try:
        image = in_mode(open_named(name, column), "RGB")
    except KedgeError:  # it may be gone by now
        return tag("p", "cannot be shown", class_="note")
    image.thumbnail((SIDE, SIDE))
    return picture(torch.from_numpy(np.array(image)).permute(2, 0, 1), f"{name}")
