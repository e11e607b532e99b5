"""The page that shows the study of the neural tangent kernel."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from kedge.evaluation.report import figures
from kedge.evaluation.report.document import document
from kedge.evaluation.report.markup import Html, figure, section, table, tag
from kedge.studies.theory import figures as draw
from kedge.studies.theory.approximation import COSINE
from kedge.studies.theory.disagreement import PER_ANCHOR, trained_with
from kedge.studies.theory.study import SHOWN, NTKStudy

TITLE = "What anchors do to the neural tangent kernel"
PANELS = 3  # anchors whose decisions are drawn
EXPECTED = {
    "paper against its unit-norm formula": "2",
    "paper against exact": "1",
    "first order against exact": "2",
    "plain against exact": "1",
    "paper against exact, diagonal": "1/2",
}


def page(study: NTKStudy, findings: Sequence[str], record: Mapping[str, Any]) -> str:
    """The whole report.

    Args:
        study: What it shows.
        findings: The sentences at its head.
        record: How the run can be repeated.
    """
    parts = {
        "figure": ("Spectra and decisions", _spectra(study)),
        "decisions": ("Anchor by anchor", _decisions(study)),
        "distance": ("By distance", _distance(study)),
        "approximation": ("Exact and approximate", _approximation(study)),
        "limits": ("Limits", _limits()),
        "record": ("Record", _record(study, record)),
    }
    return document(TITLE, findings[0], findings[1:], ((key, name, part) for key, (name, part) in parts.items()))


def _spectra(study: NTKStudy) -> Html:
    found, one = study.spectra, trained_with(SHOWN)
    words = (
        "The kernel of a two-layer ReLU network whose first layer is trained, on the training points of the toy "
        "problem. Plain: the points with a bias. Anchored: pairs [c, x - c], with a random anchor for each point, or "
        f"with one anchor for all points (the curve is the median of {len(study.anchors)} anchors, the band their "
        "range)."
    )
    names = [f"{name}: effective rank {rank:.1f}" for name, rank in found.ranks.items()]
    drawn = [
        figure(draw.spectra(found), tag("strong", "Spectra of plain and anchored inputs"), figures.legend(names)),
        figure(
            draw.boundaries(study, one),
            tag("strong", f"Decisions under {len(study.anchors)} anchors"),
            tag("br"),
            f"{one}; a line for the boundary under each anchor, shades for the mean over anchors",
        ),
    ]
    more = (
        f"Each anchor has a kernel of its own: two of them are apart by {100 * found.apart:.0f} % of their norm in the "
        "mean. One anchor for all concentrates the spectrum, because all pairs share a half; an anchor for each point "
        "spreads it."
    )
    return section("figure", "The paper's figure", tag("p", words), tag("div", *drawn, class_="pair"), tag("p", more))


def _decisions(study: NTKStudy) -> Html:
    one = trained_with(SHOWN)
    rows = []
    for predictor, words in (
        (
            one,
            f"One network, as anchoring trains it: every point was seen with {SHOWN} anchors, and is read with any.",
        ),
        (PER_ANCHOR, "A network per anchor, as in the paper's argument: trained and read with that anchor alone."),
    ):
        drawn = [
            figure(draw.decision(study, predictor, k), tag("strong", f"anchor {k + 1}"))
            for k in range(min(PANELS, len(study.anchors)))
        ]
        rows += [tag("h3", predictor.capitalize()), tag("p", words), tag("div", *drawn, class_="panels")]
    spread = [
        figure(draw.deviation(study, name), tag("strong", name), *_agreement(study, name))
        for name in study.decisions.deviation
    ]
    words = (
        f"The deviation of f over {len(study.anchors)} anchors, and for the ensemble over initial weights, which has a "
        "closed form at infinite width. Thin lines are the boundary under each anchor."
    )
    return section(
        "decisions",
        "What each anchor decides",
        tag("p", "Infinitely wide networks learn f = 1 on one half circle and f = -1 on the other."),
        draw.value_legend(),
        *rows,
        tag("h3", "Where the decisions deviate"),
        tag("p", words),
        draw.deviation_legend(),
        tag("div", *spread, class_="panels"),
    )


def _agreement(study: NTKStudy, name: str) -> list[str]:
    found = study.decisions.agreement.get(name)
    return [] if found is None else [tag("br"), f"rank correlation with the ensemble {found:.2f}"]


def _distance(study: NTKStudy) -> Html:
    found = study.disagreement
    names = list(found.deviation)
    drawn = [
        figure(draw.by_distance(found, "deviation", "deviation of f"), tag("strong", "Deviation of decision values")),
        figure(draw.by_distance(found, "temperature", "temperature"), tag("strong", "Temperature, behind the sigmoid")),
    ]
    words = (
        f"Means over {study.repeats} draws of the problem, in units of the data's own radius. One network is a "
        "Lipschitz function of the pair, so two anchors never disagree by more than √2 times its constant times the "
        "distance between them, however far the point. Its mean output grows with the distance all the while, so "
        "that behind a sigmoid the disagreement vanishes. Networks per anchor have slopes of their own and part "
        "without bound."
    )
    bands = [f"{low:g} to {high:g}" for low, high in pairwise(found.edges)]
    shown = [0, 2, 4, 6, 7]
    tables = []
    for what, caption in (("deviation", "Deviation of f"), ("temperature", "Temperature")):
        heads = ["Predictor", "held out", *(bands[i] for i in shown), "AUROC, %"]
        values: dict[str, list[float]] = getattr(found, what)
        rows = [
            [
                name,
                f"{found.held_out[name][what]:.3f}",
                *(f"{values[name][i]:.3f}" for i in shown),
                Html(f"{100 * found.separates[name][what]:.1f}") + tag("small", span(found.spans[name][what])),
            ]
            for name in names
        ]
        note = (
            "by distance; AUROC of points at a distance of 0.5 to 4 against held-out ones, with its range over draws."
        )
        tables.append(_table(f"{caption} {note}", heads, rows))
    counts = [[name, f"{100 * found.accuracy[name]:.1f}", f"{found.grows[name]} of {study.repeats}"] for name in names]
    return section(
        "distance",
        "Disagreement by distance from the data",
        tag("p", words),
        figures.legend(names),
        tag("div", *drawn, class_="pair"),
        *tables,
        _table(
            "Accuracy on held-out points, and draws of the problem in which the deviation is larger at a distance of "
            "8 to 16 than at 0.5 to 1.",
            ["Predictor", "Accuracy, %", "Draws in which it grows"],
            counts,
        ),
    )


def _approximation(study: NTKStudy) -> Html:
    found = study.approximation
    words = (
        "The paper writes the anchored kernel as K - Γ, with Γ of first order in the anchor c. Errors are the "
        f"largest over pairs of random points on the sphere in three dimensions with |x · z| up to {COSINE}, while "
        "the anchor shrinks in a fixed direction; on the diagonal x = z."
    )
    norms = (
        "The derivation takes x, z and both pairs to have unit norm. All four have it only where c · (x + z - 2c) = "
        "0, and there Γ is zero. Elsewhere the norms of the pairs change the angle by as much as the term that Γ "
        "keeps, so Γ is off in its first order. Mind the norms, and the second term becomes d u √((1 - u)/(1 + u)) / "
        "2π, with u = x · z and d = c · (x + z - 2c): exact to first order, and finite for x = z, where the paper's "
        "has a square root's singularity."
    )
    rows = [
        [kind, EXPECTED[kind], f"{found.orders[kind]:.2f}", f"{values[0]:.2g}", f"{values[-1]:.2g}"]
        for kind, values in found.largest.items()
    ]
    heads = ["Comparison", "order expected", "order found", "error at 1/2", "error at 1/4096"]
    low = found.smallest
    signs = (
        f"The exact kernel is positive definite: its smallest eigenvalue is {low['exact']:.2g}. The exact Γ = K - "
        f"K_anc is not a kernel: it has the eigenvalue {low['exact gamma']:.2g}."
    )
    drawn = figure(
        draw.errors(found), tag("strong", "Largest error by length of the anchor"), figures.legend(list(found.largest))
    )
    return section(
        "approximation",
        "Exact and approximate kernel",
        tag("p", words),
        tag("div", drawn, tag("div", tag("p", norms), tag("p", signs)), class_="pair"),
        _table("The power of the anchor's length that the largest error falls with.", heads, rows),
    )


def _limits() -> Html:
    words = (
        "This is one hidden layer of infinite width in the kernel regime, trained to fit ±1 by squared error, on "
        "points of a plane that reaches as far as one likes. Images are bounded, networks deep, and features "
        "learned: what holds here need not hold there, and tests on images decide. What does carry over to any "
        "network with a Lipschitz constant is that the disagreement of its anchors is bounded."
    )
    return section("limits", "What this does not say", tag("p", words))


def _record(study: NTKStudy, record: Mapping[str, Any]) -> Html:
    made = record.get("made with", {})
    flat = {key: value for key, value in record.items() if key != "made with"} | made
    rows = (part for key, value in flat.items() for part in (tag("dt", key), tag("dd", str(value))))
    note = tag("p", "All numbers are in study.json beside this file.")
    return section("record", "Record of the run", tag("dl", *rows, class_="record"), note)


def span(ends: Sequence[float]) -> str:
    """A range of shares, in percent.

    Example:
        >>> span([0.5, 0.75])
        '50 to 75'
    """
    return " to ".join(f"{100 * end:.0f}" for end in ends)


def _table(caption: str, heads: Iterable[str], rows: Iterable[list[str]]) -> Html:
    head = [tag("th", words, scope="col") for words in heads]
    body = [tag("tr", tag("th", row[0], scope="row"), *(tag("td", cell) for cell in row[1:])) for row in rows]
    return table(caption, head, body, label=caption)
