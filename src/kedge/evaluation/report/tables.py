"""The finding of an evaluation in one sentence, and the guarantee of a detector."""

from kedge.evaluation import Evaluation, EvaluationResult
from kedge.evaluation.paired import Best
from kedge.evaluation.report.markup import percent
from kedge.metrics import METRICS

HEADLINE = ("auroc", "fpr95")


def guaranteed(result: EvaluationResult) -> float | None:
    """The share of ID images that the threshold may flag: the largest p-value flagged, or None if none was.

    It is k / (n + 1) for n calibration images, the guarantee of split conformal prediction, which alpha bounds.
    """
    flagged = [float(d.p_value[d.is_ood].max()) for d in result.detections.values() if bool(d.is_ood.any())]
    return max(flagged, default=None)


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
