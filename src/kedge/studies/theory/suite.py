"""The study of the neural tangent kernel, from numbers to a page: ``kedge reproduce ntk``."""

import json
from itertools import pairwise
from pathlib import Path

from kedge.evaluation.report import figures
from kedge.files import atomic
from kedge.provenance import provenance
from kedge.studies.theory.disagreement import ENSEMBLE, PER_ANCHOR, Disagreement, trained_with
from kedge.studies.theory.page import page, span
from kedge.studies.theory.study import SHOWN, NTKStudy, ntk_study


def run_ntk(out: str | Path, seed: int = 0, *, anchors: int = 10, repeats: int = 10, grid: int = 61) -> NTKStudy:
    """Run the study and write ``report.html``, one self-contained file, and ``study.json``.

    Args:
        out: Folder for both; it is made where it is missing.
        seed: Of everything that is random.
        anchors: To predict with.
        repeats: Draws of the toy problem.
        grid: Points along a side of the drawn square.

    Returns:
        The study; `findings` puts it into words.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> study = run_ntk(folder, anchors=3, repeats=1, grid=9)
        >>> sorted(path.name for path in folder.iterdir())
        ['report.html', 'study.json']
    """
    figures.require()
    study = ntk_study(seed=seed, anchors=anchors, repeats=repeats, grid=grid)
    options = {"seed": seed, "anchors": anchors, "repeats": repeats, "grid": grid}
    record = {"command": "kedge reproduce ntk", **options, "made with": provenance()}
    text = page(study, findings(study), record)
    with atomic(Path(out) / "study.json") as temporary:
        temporary.write_text(json.dumps({"record": record, **study.as_dict()}), encoding="utf-8")
    with atomic(Path(out) / "report.html") as temporary:
        temporary.write_text(text, encoding="utf-8", newline="\n")
    return study


def findings(study: NTKStudy) -> list[str]:
    """The study in sentences, the answer about disagreement first.

    Example:
        >>> findings(ntk_study(anchors=2, repeats=1, grid=3))[0][:23]
        'Does disagreement grow '
    """
    far, near = study.disagreement, study.approximation
    one, last = trained_with(SHOWN), len(far.edges) - 2
    ratio = {name: far.deviation[name][last] / far.held_out[name]["deviation"] for name in far.deviation}
    bands = [f"{low:g} to {high:g}" for low, high in pairwise(far.edges)]
    tau, agreement = far.temperature[one], study.decisions.agreement
    return [
        "Does disagreement grow away from the data? For one network trained with random anchors, only up to a bound: "
        f"with {SHOWN} anchors a point the deviation is {far.held_out[one]['deviation']:.3f} on held-out points and "
        f"{far.deviation[one][last]:.3f}, or {ratio[one]:.1f} times that, at a distance of {bands[last]}. For a "
        f"network per anchor, as in the paper's argument, it grows without bound, to {ratio[PER_ANCHOR]:.0f} times "
        f"there, as that of an ensemble does, to {ratio[ENSEMBLE]:.0f} times.",
        "The paper's temperature takes the deviation behind a sigmoid, and in the one network it vanishes far away: "
        f"{far.held_out[one]['temperature']:.3f} on held-out points, at its highest, {max(tau):.3f}, at a distance of "
        f"{bands[tau.index(max(tau))]}, and {tau[last]:.3f} at {bands[last]}.",
        "As scores for points at a distance of 0.5 to 4, deviation and temperature have an AUROC of "
        f"{_area(far, one, 'deviation')} and {_area(far, one, 'temperature')}; with a network per anchor, "
        f"{_area(far, PER_ANCHOR, 'deviation')} and {_area(far, PER_ANCHOR, 'temperature')} (in brackets the range "
        f"over {study.repeats} draws of the problem).",
        "On the drawn square the deviation ranks points as an ensemble's does with a correlation of "
        f"{agreement[one]:.2f} for the one network and {agreement[PER_ANCHOR]:.2f} for a network per anchor.",
        "The paper's approximation of the anchored kernel is off by an error of order "
        f"{near.orders['paper against exact']:.2f} in the anchor's length, and so as coarse as the change it "
        f"describes, of which it leaves {100 * near.unexplained['paper']:.0f} %. With the norms of the pairs minded, "
        f"the order is {near.orders['first order against exact']:.2f}. With anchors out of the data it has a value "
        f"for {100 * near.defined:.0f} % of the pairs of points on the sphere.",
    ]


def _area(found: Disagreement, name: str, what: str) -> str:
    return f"{100 * found.separates[name][what]:.0f} % ({span(found.spans[name][what])})"
