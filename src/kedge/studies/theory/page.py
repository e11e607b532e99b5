"""The report of the study of the neural tangent kernel: ``kedge reproduce ntk``."""

import json
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from kedge.evaluation.report import figures
from kedge.evaluation.report.document import document
from kedge.evaluation.report.markup import Html, figure, section, table, tag
from kedge.files import write_text
from kedge.provenance import provenance
from kedge.studies.theory import figures as own
from kedge.studies.theory.approximation import COSINE
from kedge.studies.theory.disagreement import ENSEMBLE, PER_ANCHOR, trained_with
from kedge.studies.theory.study import SHOWN, NTKStudy, ntk_study

TITLE = "What anchors do to the neural tangent kernel"
PANELS = 3  # anchors whose decisions are drawn
EXPECTED = {
    "paper against its unit-norm formula": "2",
    "paper against exact": "1",
    "first order against exact": "2",
    "unanchored against exact": "1",
    "paper against exact, diagonal": "1/2",
}


def run_ntk(out: str | Path, seed: int = 0, *, anchors: int = 10, repeats: int = 10, grid: int = 61) -> NTKStudy:
    """Run the study and write ``report.html``, one self-contained file, and ``study.json``."""
    figures.require()
    options = {"anchors": anchors, "repeats": repeats, "grid": grid}
    study = ntk_study(seed=seed, **options)
    record = {"command": "kedge reproduce ntk", "seed": seed, **options, "made with": provenance()}
    text = ntk_page(study, record)
    write_text(Path(out) / "study.json", json.dumps({"record": record, **study.as_dict()}))
    write_text(Path(out) / "report.html", text)
    return study


def findings(study: NTKStudy) -> list[str]:
    """The study in sentences, the answer about disagreement first."""
    far, near = study.disagreement, study.approximation
    one, last = trained_with(SHOWN), len(far.edges) - 2
    ratio = {name: far.deviation[name][last] / far.held_out[name]["deviation"] for name in far.deviation}
    bands = [f"{low:g} to {high:g}" for low, high in pairwise(far.edges)]
    tau, agreement = far.tau[one], study.decisions.agreement

    def area(name: str, what: str) -> str:
        return f"{100 * far.separates[name][what]:.0f} % ({_span(far.spans[name][what])})"

    return [
        "Does disagreement grow away from the data? For one network trained with random anchors, only up to a bound: "
        f"with {SHOWN} anchors a point the deviation is {far.held_out[one]['deviation']:.3f} on held-out points and "
        f"{far.deviation[one][last]:.3f}, or {ratio[one]:.1f} times that, at a distance of {bands[last]}. For a "
        f"network per anchor, as in the paper's argument, it grows without bound, to {ratio[PER_ANCHOR]:.0f} times "
        f"there, as that of an ensemble does, to {ratio[ENSEMBLE]:.0f} times.",
        "The paper's tau takes the deviation after a sigmoid, and in the one network it vanishes far away: "
        f"{far.held_out[one]['tau']:.3f} on held-out points, at its highest, {max(tau):.3f}, at a distance of "
        f"{bands[tau.index(max(tau))]}, and {tau[last]:.3f} at {bands[last]}.",
        "As scores for points at a distance of 0.5 to 4, deviation and tau have an AUROC of "
        f"{area(one, 'deviation')} and {area(one, 'tau')}; with a network per anchor, "
        f"{area(PER_ANCHOR, 'deviation')} and {area(PER_ANCHOR, 'tau')} (in brackets the range over {study.repeats} "
        "draws of the problem).",
        "On the drawn square the deviation ranks points as an ensemble's does with a correlation of "
        f"{agreement[one]:.2f} for the one network and {agreement[PER_ANCHOR]:.2f} for a network per anchor.",
        "The error of the paper's approximation of the anchored kernel is of order "
        f"{near.orders['paper against exact']:.2f} in the anchor's length, like the change it describes, of which it "
        f"leaves {100 * near.unexplained['paper']:.0f} %. With the norms of the pairs taken into account the order is "
        f"{near.orders['first order against exact']:.2f}. With anchors out of the data it has a value for "
        f"{100 * near.defined:.0f} % of the pairs of points on the sphere.",
    ]


def ntk_page(study: NTKStudy, record: Mapping[str, Any]) -> str:
    """The whole report; ``record`` is how to repeat the run."""
    parts = (
        ("figure", "Spectra and decisions", _spectra(study)),
        ("decisions", "Anchor by anchor", _decisions(study)),
        ("distance", "By distance", _distance(study)),
        ("approximation", "Exact and approximate", _approximation(study)),
        ("limits", "Limits", _limits()),
        ("record", "Record", _record(record)),
    )
    first, *others = findings(study)
    return document(TITLE, first, others, parts)


def _spectra(study: NTKStudy) -> Html:
    spectra, one = study.spectra, trained_with(SHOWN)
    words = (
        "The kernel of a two-layer ReLU network whose first layer is trained, on the training points of the toy "
        "problem. Unanchored: the points with a bias. Anchored: pairs [c, x - c], with a random anchor for each point, "
        f"or with one anchor for all points (the curve is the median of {len(study.anchors)} anchors, the band their "
        "range)."
    )
    names = [f"{name}: effective rank {rank:.1f}" for name, rank in spectra.ranks.items()]
    caption = f"{one}; a line for the boundary under each anchor, shades for the mean over anchors"
    drawn = [
        figure(own.draw_spectra(spectra), tag("strong", "Spectra of the kernels"), figures.legend(names)),
        figure(
            own.draw_boundaries(study, one),
            tag("strong", f"Decisions under {len(study.anchors)} anchors"),
            tag("br"),
            caption,
        ),
    ]
    more = (
        f"Each anchor has a kernel of its own: two of them are apart by {100 * spectra.apart:.0f} % of their norm in "
        "the mean. One anchor for all concentrates the spectrum, because all pairs share a half; an anchor for each "
        "point spreads it."
    )
    return section("figure", "The paper's figure", tag("p", words), tag("div", *drawn, class_="pair"), tag("p", more))


def _decisions(study: NTKStudy) -> Html:
    predictors = {
        trained_with(SHOWN): f"One network, as anchoring trains it: every point is paired with {SHOWN} anchors.",
        PER_ANCHOR: "A network per anchor, as in the paper's argument: trained and used with that anchor alone.",
    }
    rows = []
    for predictor, words in predictors.items():
        drawn = [
            figure(own.draw_decision(study, predictor, k), tag("strong", f"anchor {k + 1}"))
            for k in range(min(PANELS, len(study.anchors)))
        ]
        rows += [tag("h3", predictor.capitalize()), tag("p", words), tag("div", *drawn, class_="panels")]
    agreement = study.decisions.agreement
    maps = [
        figure(
            own.draw_deviation(study, name),
            tag("strong", name),
            *([tag("br"), f"rank correlation with the ensemble {agreement[name]:.2f}"] if name in agreement else []),
        )
        for name in study.decisions.deviation
    ]
    words = (
        f"The deviation of f over {len(study.anchors)} anchors, and for the ensemble over initial weights, which has a "
        "closed form at infinite width. Thin lines are the boundary under each anchor."
    )
    return section(
        "decisions",
        "Decisions under each anchor",
        tag("p", "Infinitely wide networks learn f = 1 on one half circle and f = -1 on the other."),
        own.value_legend(),
        *rows,
        tag("h3", "Deviation of the decisions"),
        tag("p", words),
        own.deviation_legend(),
        tag("div", *maps, class_="panels"),
    )


def _distance(study: NTKStudy) -> Html:
    result = study.disagreement
    names = list(result.deviation)
    drawn = [
        figure(
            own.draw_by_distance(result, "deviation", "deviation of f"), tag("strong", "Deviation of decision values")
        ),
        figure(own.draw_by_distance(result, "tau", "tau"), tag("strong", "Tau, after the sigmoid")),
    ]
    words = (
        f"Means over {study.repeats} draws of the problem, in units of the data's own radius. One network is a "
        "Lipschitz function of the pair, so two anchors never disagree by more than √2 times its constant times the "
        "distance between them, however far the point. Its mean output keeps growing with the distance, so after a "
        "sigmoid the disagreement vanishes. Networks per anchor have different slopes and diverge without bound."
    )
    bands = [f"{low:g} to {high:g}" for low, high in pairwise(result.edges)]
    shown = [0, 2, 4, 6, 7]
    tables = []
    for what, caption in (("deviation", "Deviation of f"), ("tau", "Tau")):
        values: dict[str, list[float]] = getattr(result, what)
        rows = [
            [
                name,
                f"{result.held_out[name][what]:.3f}",
                *(f"{values[name][i]:.3f}" for i in shown),
                tag("span", f"{100 * result.separates[name][what]:.1f}", tag("small", _span(result.spans[name][what]))),
            ]
            for name in names
        ]
        note = (
            "by distance; AUROC of points at a distance of 0.5 to 4 against held-out ones, with its range over draws."
        )
        tables.append(
            table(f"{caption} {note}", ["Predictor", "held out", *(bands[i] for i in shown), "AUROC, %"], rows)
        )
    counts = [
        [name, f"{100 * result.accuracy[name]:.1f}", f"{result.grows[name]} of {study.repeats}"] for name in names
    ]
    caption = (
        "Accuracy on held-out points, and draws of the problem in which the deviation is larger at a distance of 8 to "
        "16 than at 0.5 to 1."
    )
    return section(
        "distance",
        "Disagreement by distance from the data",
        tag("p", words),
        figures.legend(names),
        tag("div", *drawn, class_="pair"),
        *tables,
        table(caption, ["Predictor", "Accuracy, %", "Draws in which it grows"], counts),
    )


def _approximation(study: NTKStudy) -> Html:
    result = study.approximation
    words = (
        "The paper writes the anchored kernel as K - Γ, with Γ of first order in the anchor c. Errors are the "
        f"largest over pairs of random points on the sphere in three dimensions with |x · z| up to {COSINE}, while "
        "the anchor shrinks in a fixed direction; on the diagonal x = z."
    )
    norms = (
        "The derivation takes x, z and both pairs to have unit norm. All four have it only where c · (x + z - 2c) = "
        "0, and there Γ is zero. Elsewhere the norms of the pairs change the angle by as much as the term that Γ "
        "keeps, so Γ is off in its first order. With the norms, the second term becomes d u √((1 - u)/(1 + u)) / "
        "2π, with u = x · z and d = c · (x + z - 2c): exact to first order, and finite for x = z, where the paper's "
        "has a square root's singularity."
    )
    rows = [
        [kind, EXPECTED[kind], f"{result.orders[kind]:.2f}", f"{values[0]:.2g}", f"{values[-1]:.2g}"]
        for kind, values in result.largest.items()
    ]
    heads = ["Comparison", "order expected", "order measured", "error at 1/2", "error at 1/4096"]
    signs = (
        f"The exact kernel is positive definite: its smallest eigenvalue is {result.smallest['exact']:.2g}. The exact "
        f"Γ = K - K_anc is not a kernel: it has the eigenvalue {result.smallest['exact gamma']:.2g}."
    )
    title, legend = tag("strong", "Largest error by length of the anchor"), figures.legend(list(result.largest))
    drawn = figure(own.draw_errors(result), title, legend)
    return section(
        "approximation",
        "Exact and approximate kernel",
        tag("p", words),
        tag("div", drawn, tag("div", tag("p", norms), tag("p", signs)), class_="pair"),
        table("The power of the anchor's length that the largest error falls with.", heads, rows),
    )


def _limits() -> Html:
    words = (
        "This is one hidden layer of infinite width in the kernel regime, trained to fit ±1 by squared error, on "
        "points of an unbounded plane. Images are bounded, networks deep, and features learned, so these results need "
        "not hold for them; tests on images decide. What does carry over to any network with a Lipschitz constant is "
        "that the disagreement of its anchors is bounded."
    )
    return section("limits", "Limits of this study", tag("p", words))


def _record(record: Mapping[str, Any]) -> Html:
    flat = {key: value for key, value in record.items() if key != "made with"} | record.get("made with", {})
    rows = (part for key, value in flat.items() for part in (tag("dt", key), tag("dd", str(value))))
    note = tag("p", "All numbers are in study.json beside this file.")
    return section("record", "Record of the run", tag("dl", *rows, class_="record"), note)


def _span(ends: Sequence[float]) -> str:
    """A range of shares, in percent."""
    return " to ".join(f"{100 * end:.0f}" for end in ends)
