"""kedge's numbers beside the paper's."""

from kedge.evaluation import SeedSummary, TextTable
from kedge.evaluation.summary import starred
from kedge.metrics import METRICS
from kedge.studies.paper import AVERAGE, Reported, reported
from kedge.studies.plan import Suite

NOTHING = ""


def beside_paper(summary: SeedSummary, suite: Suite, metric: str) -> TextTable:
    """One row per method, one column per OOD set: kedge's value, and the paper's in brackets where it has the cell.

    The paper's mean is over its own sets, so it stands beside kedge's only where all of them are here.

    Args:
        summary: Of the suite's runs.
        suite: Says which rows and columns the paper has.
        metric: Which to show.
    """
    known = _cells(suite, metric)
    oods = summary.first.ood_names
    whole = bool(known) and {ood for _, ood in known if ood != AVERAGE} <= set(oods)
    rows = []
    for label, result in summary.first.results.items():
        method = suite.methods[label].paper
        cells = [_both(summary.words(label, metric, ood), known.get((method, ood)) if method else None) for ood in oods]
        theirs = known.get((method, AVERAGE)) if method and whole else None
        rows.append((starred(label, result), *cells, _both(summary.words(label, metric), theirs)))
    caption = f"{METRICS[metric].head} in %, in distribution: {summary.first.id_name}."
    if suite.paper is not None:
        caption += f" In brackets the paper's Table {suite.paper.table} where it has the same cell; ? a printed slip."
    return TextTable(caption, ("method", *oods, "mean"), tuple(rows))


def _cells(suite: Suite, metric: str) -> dict[tuple[str, str], Reported]:
    """The paper's numbers by method and OOD set; TNR is turned into FPR."""
    if suite.paper is None:
        return {}
    found = reported(table=suite.paper.table, id_set=suite.paper.id_set)
    if metric == "fpr95":
        found = [each.as_fpr95() if each.metric == "tnr95" else each for each in found]
    return {(row(each), each.ood_set): each for each in found if each.metric == metric and each.ood_set is not None}


def row(each: Reported) -> str:
    """What `MethodPlan.paper` calls a row of the paper: the method, and in the ablation its corruption and anchors.

    Example:
        >>> row(reported(table=8)[0])
        'AMP, T: none, K = 2'
    """
    if each.anchors is None:
        return each.method
    return f"{each.method}, T: {', '.join(each.corruption or ()) or 'none'}, K = {each.anchors}"


def _both(ours: str, theirs: Reported | None) -> str:
    if theirs is None:
        return ours
    return f"{ours} ({theirs.value:g}{'?' if theirs.slip else ''})"
