"""The summary of a scoring job as a page: shares, a plot, and a contact sheet of the most suspicious images."""

from collections.abc import Iterable, Mapping
from itertools import takewhile
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kedge.data.preprocess import in_mode
from kedge.errors import KedgeError
from kedge.evaluation.report import figures
from kedge.evaluation.report.document import document
from kedge.evaluation.report.gallery import ENLARGED, data_address, verdict_words
from kedge.evaluation.report.markup import Html, figure, gallery, number, percent, section, sides, table, tag
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
    names = ("calibration", "these images")
    drawn = figures.histograms("scores", calibration, summary.scores, edges, axis="score", label=label, sides=names)
    words = tag("p", "Further right is further out of distribution.")
    return section("scores", "Scores", words, sides(*names), tag("div", figure(drawn, label), class_="pair"))


def _classes(summary: RowSummary) -> Html:
    heads = ("Predicted class", "images", "flagged", "share, %")
    rows = [(name, f"{n:,}", f"{m:,}", percent(m / n)) for name, (n, m) in summary.by_class.items()]
    return section("classes", "By predicted class", table("", heads, rows, label="Flagged by class"))


def _contact_sheet(summary: RowSummary, column: str | None) -> Html:
    folder = common_folder(row["name"] for row in summary.suspicious)
    words = f"The images with the highest scores, the highest first{f', of {folder}' if folder else ''}."
    note = tag("p", words, " A click enlarges one.")
    cards = gallery(row_card(row, column, folder=folder) for row in summary.suspicious)
    return section("suspicious", "The most suspicious images", note, cards)


def common_folder(names: Iterable[str]) -> str:
    """The folder that names have in common, with its slash; empty if they have none.

    Example:
        >>> common_folder(["new/monday/1.jpg", "new/monday/2.jpg", "new/more/1.jpg"])
        'new/'
    """
    levels = zip(*(name.split("/")[:-1] for name in names), strict=False)
    return "".join(f"{level[0]}/" for level in takewhile(lambda level: len(set(level)) == 1, levels))


def row_card(row: Mapping[str, Any], column: str | None = None, *, note: str = "", folder: str = "") -> dict[str, Any]:
    """The image of a row with its verdict, for `gallery`; without a picture if the image is gone.

    Its name is shown without ``folder``.
    """
    lines = [note] if note else []
    if row["probability"] is not None:
        lines.append(f"{class_of(row)} ({100 * row['probability']:.0f} %)")
    lines.append(f"score {number(row['score'])}" + (f", p {number(row['p_value'], 2)}" if row["p_value"] else ""))
    try:
        image = in_mode(open_named(row["name"], column), "RGB")
    except KedgeError:
        source, lines = "", [*lines, "cannot be shown"]
    else:
        image.thumbnail((ENLARGED, ENLARGED))
        source = data_address(torch.from_numpy(np.array(image)).permute(2, 0, 1), ENLARGED)
    return {
        "source": source,
        "alt": row["name"],
        "set": row["name"].removeprefix(folder),
        "lines": lines,
        "nearest": [],
        "flagged": bool(row["is_ood"]),
        "verdict": verdict_words(bool(row["is_ood"]), row["reason"]),
    }
