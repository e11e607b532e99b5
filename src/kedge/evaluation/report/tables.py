"""The finding in one sentence, and the tables behind it."""

from dataclasses import dataclass

from kedge.evaluation import Evaluation, Result
from kedge.evaluation.paired import BETTER, FEWEST, Best
from kedge.evaluation.report.markup import NOTHING, Html, join, section, table, tag
from kedge.evaluation.summary import STAR, passes, starred
from kedge.metrics import Estimate


@dataclass(frozen=True)
class Column:
    """A metric as the report shows it."""

    metric: str
    head: str
    meaning: str

    @property
    def arrow(self) -> str:
        """Up where larger is better."""
        return "↑" if BETTER[self.metric] > 0 else "↓"

    def of(self, result: Result) -> float | None:
        """The value of a detector, over all OOD sets where the metric has one for each."""
        if self.metric == "accuracy":
            return result.accuracy
        return result.ece if self.metric == "ece" else result.mean(self.metric)


AUROC = Column("auroc", "AUROC", "The chance that an OOD image scores above an ID image: 50 % is guessing.")
FPR95 = Column("fpr95", "FPR95", "The share of OOD images that slip through when 95 % of the ID images are accepted.")
COLUMNS = (
    Column("accuracy", "Accuracy", "The share of ID test images that are classified rightly."),
    AUROC,
    FPR95,
    Column("aupr_in", "AUPR-in", "Average precision of finding ID images by a low score; depends on the sets' sizes."),
    Column("aupr_out", "AUPR-out", "Average precision of finding OOD images by a high score; depends on the sizes."),
    Column("dtacc", "DTACC", "The mean of ID accepted and OOD flagged at the best threshold in hindsight."),
    Column("ece", "ECE", "The gap between how sure the classifier is and how often it is right, on ID images."),
)


def percent(value: float | None) -> str:
    """A share in percent to one decimal, without the sign; a dash where there is none.

    Example:
        >>> percent(0.98765)
        '98.8'
    """
    return NOTHING if value is None else f"{100 * value:.1f}"


def promised(result: Result) -> float | None:
    """The share of ID images that the threshold may flag: the largest p-value flagged, or None if none was.

    It is k / (n + 1) for n calibration images, the promise of split conformal prediction, which 1 - tpr bounds.
    """
    flagged = [float(d.p_value[d.is_ood].max()) for d in result.detections.values() if bool(d.is_ood.any())]
    return max(flagged, default=None)


def finding(evaluation: Evaluation, best: Best) -> str:
    """What the numbers say, in a sentence.

    Args:
        evaluation: Of one or more detectors.
        best: Who is best beyond noise.
    """
    results, sets = evaluation.results, len(evaluation.averaged)
    explained = evaluation.over.replace(" OOD sets", " out-of-distribution (OOD) sets", 1)
    over = f"over {explained}" if sets > 1 else f"on {evaluation.over}"
    if len(results) > 1:
        leads = " and ".join(_leader(evaluation, best, column) for column in (AUROC, FPR95))
        spans = " and ".join(_span(evaluation, column) for column in (AUROC, FPR95))
        return f"Of {len(results)} detectors {over}, {leads}; {spans}."
    (name, result), *_ = results.items()
    text = f"{name} reaches an AUROC of {percent(result.mean('auroc'))} % and an FPR95 of "
    text += f"{percent(result.mean('fpr95'))} % {over}"
    if sets == 1:
        return text + "."
    order = sorted(result.metrics, key=lambda ood: result.metrics[ood]["auroc"].value)
    low, high = (f"{percent(result.metrics[ood]['auroc'].value)} % ({ood})" for ood in (order[0], order[-1]))
    return f"{text} in the mean; from set to set the AUROC runs from {low} to {high}."


def headline(evaluation: Evaluation, best: Best) -> Html:
    """One row per detector."""
    heads = [tag("th", "Detector", scope="col"), *(_head(c.head, c.arrow) for c in COLUMNS)]
    heads += [tag("th", words, scope="col") for words in ("ID flagged", "promised", "passes", "ms")]
    rows = []
    for name, result in evaluation.results.items():
        cells = [tag("td", _marked(percent(c.of(result)), best.overall.get(c.metric) == name)) for c in COLUMNS]
        promise = promised(result)
        aim = NOTHING if promise is None else f"≤ {percent(promise)}"
        last = (percent(result.flagged[evaluation.id_name]), aim, passes(result), f"{result.milliseconds:.2f}")
        cells += [tag("td", words) for words in last]
        rows.append(tag("tr", tag("th", starred(name, result), scope="row"), *cells))
    means = f"the mean over the {evaluation.over}" if len(evaluation.averaged) > 1 else f"on {evaluation.over}"
    caption = f"In percent, except for passes and time. AUROC to DTACC are {means}."
    if any(result.uses_outliers for result in evaluation.results.values()):
        caption += f" {STAR}"
    return section(
        "summary", "Summary", table(caption, heads, rows, label="Summary by detector"), _note(evaluation, best)
    )


def by_set(evaluation: Evaluation, best: Best) -> Html:
    """AUROC and FPR95 of every detector on every OOD set, with intervals."""
    interval = "with 95 % bootstrap intervals" if evaluation.resamples else "without intervals: none were asked for"
    tables = []
    for column in (AUROC, FPR95):
        heads = [tag("th", "Detector", scope="col")]
        for ood in evaluation.ood_names:
            heads.append(tag("th", ood, tag("small", _images(len(evaluation.sets[ood]))), scope="col"))
        rows = []
        for name, result in evaluation.results.items():
            cells = [
                _estimate(result.metrics[ood][column.metric], best.by_set.get((ood, column.metric)) == name)
                for ood in evaluation.ood_names
            ]
            rows.append(tag("tr", tag("th", starred(name, result), scope="row"), *cells))
        caption = f"{column.head} in percent, {'higher' if column.arrow == '↑' else 'lower'} is better; {interval}."
        tables += [tag("h3", column.head), table(caption, heads, rows, label=f"{column.head} by OOD set")]
    size = _images(len(evaluation.sets[evaluation.id_name]))
    words = f"Every OOD set against {evaluation.id_name}, the in-distribution (ID) test set of {size}."
    if any(best.by_set.values()):
        words += " Marked values lead beyond noise, each comparison taken on its own."
    return section("sets", "Set by set", tag("p", words), *tables)


def data(evaluation: Evaluation) -> Html:
    """What every set is, with the checksum that names its content."""
    heads = [tag("th", "Set", scope="col"), tag("th", "Images", scope="col"), tag("th", "Size", scope="col")]
    heads.append(tag("th", "SHA-256", scope="col", class_="left"))
    rows = []
    for name, images in evaluation.sets.items():
        size = " by ".join(map(str, images.images.shape[1:]))
        code = tag("td", tag("code", images.checksum), class_="left")
        rows.append(tag("tr", tag("th", name, scope="row"), tag("td", str(len(images))), tag("td", size), code))
    return table("The images, their size (channels by height by width) and checksum.", heads, rows, label="Image sets")


def _leader(evaluation: Evaluation, best: Best, column: Column) -> str:
    metric, better = column.metric, BETTER[column.metric]
    order = sorted(evaluation.results, key=lambda name: -better * evaluation.results[name].mean(metric))
    values = [evaluation.results[name].mean(metric) for name in order]
    mean = "mean " if len(evaluation.averaged) > 1 else ""
    what = f"the {'highest' if better > 0 else 'lowest'} {mean}{column.head}"
    tied = [name for name, value in zip(order, values, strict=True) if value == values[0]]
    if len(tied) > 1:
        return f"{', '.join(tied[:-1])} and {tied[-1]} share {what} ({percent(values[0])} %)"
    lead = "a lead beyond noise" if best.overall.get(metric) else "a lead within noise"
    lead = lead if best.enough else "too few images to tell"
    return f"{order[0]} has {what} ({percent(values[0])} %; next {order[1]}, {percent(values[1])} %; {lead})"


def _span(evaluation: Evaluation, column: Column) -> str:
    values = [result.mean(column.metric) for result in evaluation.results.values()]
    return f"{column.head} spans {percent(min(values))} to {percent(max(values))} %"


def _note(evaluation: Evaluation, best: Best) -> Html:
    if len(evaluation.results) < 2:
        return Html("")
    if not best.enough:
        words = f"No value is marked as best: a set has fewer than {FEWEST} images, too few to tell."
        return tag("p", words, class_="note")
    none = "No value is marked as best, because no lead is beyond noise."
    start = [_marked("Marked", True), " values lead beyond noise."] if any(best.overall.values()) else [none]
    rule = (
        " A lead is beyond noise where the 95 % interval of the difference to every other detector, from "
        f"{best.resamples} paired resamples of the same images, excludes zero. ECE, the share flagged and "
        "the time are never marked. Another training run may change more than this noise."
    )
    return tag("p", *start, rule, class_="note")


def _head(words: str, arrow: str) -> Html:
    said = tag("span", "higher is better" if arrow == "↑" else "lower is better", class_="hidden")
    unbroken = words.replace("-", "\N{NON-BREAKING HYPHEN}")
    return tag("th", unbroken, tag("small", tag("span", arrow, aria_hidden="true"), said), scope="col")


def _marked(words: str, best: bool) -> Html:
    return tag("strong", words, tag("span", " (best)", class_="hidden"), class_="best") if best else join([words])


def _estimate(estimate: Estimate, best: bool) -> Html:
    value = _marked(percent(estimate.value), best)
    if estimate.low is None or estimate.high is None:
        return tag("td", value)
    return tag("td", value, tag("small", f"{percent(estimate.low)} to {percent(estimate.high)}"))


def _images(n: int) -> str:
    return f"{n} image" if n == 1 else f"{n} images"
