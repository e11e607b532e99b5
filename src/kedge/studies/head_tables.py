"""Tables and the figure of the study of heads, from what its metrics.json holds."""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kedge.evaluation.report.figures import require
from kedge.evaluation.summary import SeedValues, TextTable
from kedge.files import atomic
from kedge.studies.comparison import MethodTable, by_set, interval
from kedge.studies.head_scores import (
    AMP,
    ANCHORED,
    DEFAULT,
    ENSEMBLE,
    LAPLACE,
    OF_VIEWS,
    PROCESS,
    READINGS,
    RELATIVE,
    THIRD,
    UNANCHORED,
    VARIED,
    WIDE_ANCHORED,
)
from kedge.studies.kernel_of_heads import PREDICTIONS
from kedge.studies.photo_tasks import PHOTOS
from kedge.studies.task import GROUPS
from kedge.studies.tasks import DEPTHS

FAMILIES = dict.fromkeys(PHOTOS, "photographs") | {f"cifar10-resnet{depth}": "CIFAR-10" for depth in DEPTHS}
SHORT = (  # rows of the short table
    DEFAULT,
    "MDS++ + GEN + mutual information",
    THIRD,
    f"{UNANCHORED}: gen",
    f"{ANCHORED}: gen",
    f"{ENSEMBLE}: gen",
    f"{LAPLACE}: gen",
    f"{PROCESS}: gen",
    f"{UNANCHORED}: kl_uniform",
    f"{ANCHORED}: kl_uniform",
    AMP,
    RELATIVE,
    f"{WIDE_ANCHORED}: AMP",
    f"{UNANCHORED}: msp",
    f"{ANCHORED}: mutual_information",
    f"{ANCHORED}: probability_deviation",
    f"{ANCHORED}: relative_deviation",
    f"{ANCHORED}: tau",
    f"{WIDE_ANCHORED}: tau",
    f"{PROCESS}: variance",
)
PREDICTORS = (*READINGS, "AMP", "gen", "max_logit")  # of errors, beside MSP of the same head
PERCENT = 100
ACROSS = 3  # tasks beside each other in the figure


def tables_of_heads(whole: Mapping[str, Any]) -> dict[str, TextTable]:
    """All tables, by what they show; some of them only if all rows were run."""
    everything = MethodTable.from_record(whole)
    table, private = everything.public(), by_set(everything, SHORT)
    found = {
        "heads": table.summary(),
        "heads by column": table.by_column(),
        "heads, short": short(table),
        "heads, errors": errors(table),
        "heads, kernel": kernel(whole["theory"]),
    }
    if private:
        found["heads, private sets"] = private
    if set(SHORT) <= set(table.results):
        found["heads, errors beside MSP"] = beside_msp(table)
        if whole["views"]:
            found["heads, views"] = views(table, whole["views"])
    return found


def families(tasks: Sequence[str]) -> dict[str, list[str]]:
    """The tasks by kind of images."""
    found: dict[str, list[str]] = {}
    for task in dict.fromkeys(tasks):
        found.setdefault(FAMILIES.get(task, task), []).append(task)
    return found


def short(table: MethodTable) -> TextTable:
    """AUROC / FPR95 of the main rows: means over the tasks of a kind, and over all columns."""
    columns = {
        f"{family} {group}": [(task, group) for task in tasks]
        for family, tasks in families([task for task, _ in table.columns]).items()
        for group in GROUPS
    }
    columns["all"] = list(table.columns)
    rows = []
    for label in (label for label in SHORT if label in table.results):
        cells = [(table.mean(label, "auroc", part), table.mean(label, "fpr95", part)) for part in columns.values()]
        rows.append((label, *(f"{PERCENT * a.mean:.1f} / {PERCENT * f.mean:.0f}" for a, f in cells)))
    return TextTable("AUROC / FPR95 in %, means over tasks and seeds.", ("score", *columns), tuple(rows))


def failures(table: MethodTable, label: str, metric: str, tasks: Sequence[str], *, shifted: bool) -> SeedValues:
    """A metric of a row as a predictor of errors by seed: means over tasks, of test images as they are or shifted."""
    return SeedValues.averaged(
        [
            statistics.fmean(each[metric] for each in (result["shifted"].values() if shifted else [result["id"]]))
            for result in table.results[label][task].values()
        ]
        for task in tasks
    )


def error_columns(table: MethodTable) -> dict[str, tuple[list[str], bool]]:
    """The kinds of images with the tasks of each, as they are and shifted, where there are shifted ones."""
    columns: dict[str, tuple[list[str], bool]] = {}
    for family, tasks in families([task for task, _ in table.columns]).items():
        columns[family] = tasks, False
        results = next(iter(table.results.values()))
        if all(result["shifted"] for task in tasks for result in results[task].values()):
            columns[f"{family}, shifted"] = tasks, True
    return columns


def errors(table: MethodTable) -> TextTable:
    """AURC / AUGRC of every row on test images; the lowest AURC on images as they are first."""
    columns = error_columns(table)
    every = [task for task, _ in table.columns]
    rows = []
    for label in sorted(table.results, key=lambda row: failures(table, row, "aurc", every, shifted=False).mean):
        cells = [
            [failures(table, label, metric, tasks, shifted=shifted).mean for metric in ("aurc", "augrc")]
            for tasks, shifted in columns.values()
        ]
        rows.append((label, *(f"{PERCENT * aurc:.2f} / {PERCENT * augrc:.2f}" for aurc, augrc in cells)))
    caption = "AURC / AUGRC in %, by the predictions of the same head; smaller is better. Means over tasks and seeds."
    return TextTable(caption, ("score", *columns), tuple(rows))


def beside_msp(table: MethodTable) -> TextTable:
    """AURC of what anchors give less that of MSP of the same head."""
    columns = error_columns(table)
    rows = []
    for label in (f"{ANCHORED}: {each}" for each in PREDICTORS):
        cells = []
        for tasks, shifted in columns.values():
            ours, msp = (failures(table, row, "aurc", tasks, shifted=shifted) for row in (label, f"{ANCHORED}: msp"))
            cells.append(interval(ours - msp, 2))
        rows.append((label, *cells))
    caption = (
        "AURC in % less that of MSP of the same head, with half the width of 95 % intervals over seeds; positive is "
        "worse than MSP."
    )
    return TextTable(caption, ("score", *columns), tuple(rows))


def kernel(theory: Mapping[str, Sequence[Mapping[str, Any]]]) -> TextTable:
    """What the kernel predicts for the deviation over anchors, by task."""
    rows = []
    for task, found in theory.items():
        cells = []
        for prediction in PREDICTIONS:
            for kind in (ANCHORED, WIDE_ANCHORED):
                values = [each["correlation"][kind][prediction] for each in found]
                cells.append(_spread([each["all images"] for each in values]))
        for kind in (ANCHORED, *PREDICTIONS):
            of_groups = ([PERCENT * each["auroc"][kind][group] for each in found] for group in GROUPS)
            cells.append(" / ".join(f"{statistics.fmean(values):.0f}" for values in of_groups))
        rows.append((task, *cells))
    heads = (
        "task",
        *(f"{prediction}: {width}" for prediction in PREDICTIONS for width in ("128 wide", "512 wide")),
        "AUROC measured",
        *(f"AUROC {prediction}" for prediction in PREDICTIONS),
    )
    caption = (
        "Rank correlation over all images of a trained head's deviation over anchors with each prediction, mean ± "
        "deviation over seeds; AUROC near / far of the deviation measured (128 wide) and of each prediction."
    )
    return TextTable(caption, heads, tuple(rows))


def _spread(values: Sequence[float]) -> str:
    deviation = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.2f}{deviation}"


def views(table: MethodTable, of_views: Mapping[str, Any]) -> TextTable:
    """A head with no T, and with the features of augmented views as T, on the tasks that have such features."""
    tasks = list(next(iter(of_views.values())))
    joined = {label: {task: results[task] for task in tasks} for label, results in table.results.items()}
    both = MethodTable({**joined, **of_views}, table.single)
    rows = []
    for score in ("gen", "AMP", "tau", "mutual_information", "relative_deviation"):
        for kind in (ANCHORED, OF_VIEWS):
            label = f"{kind}: {score}"
            cells = [both.words(label, [(task, group) for task in tasks]) for group in GROUPS]
            rows.append((label, *cells))
    caption = "AUROC / FPR95 in %, means over the photo tasks, with half the width of 95 % intervals over seeds."
    return TextTable(caption, ("score", *GROUPS), tuple(rows))


def draw(whole: Mapping[str, Any], path: Path) -> None:
    """For each task, readings by distance from the data, and below it AUROC by the number of anchors."""
    matplotlib = require()
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogFormatter

    names = list(whole["by distance"])
    lines = [names[first : first + ACROSS] for first in range(0, len(names), ACROSS)]
    figure = Figure(figsize=(3.6 * len(lines[0]), 5.6 * len(lines)), layout="constrained")
    axes = figure.subplots(2 * len(lines), len(lines[0]), squeeze=False)
    for axis in axes.flat:
        axis.set_visible(False)
    for line, some in enumerate(lines):
        for name, upper, lower in zip(some, axes[2 * line], axes[2 * line + 1], strict=False):
            curves = whole["by distance"][name]
            for reading in READINGS:
                upper.plot(curves["distance"], curves[reading], "o-", markersize=3, label=reading.replace("_", " "))
            upper.set(title=name, xlabel="distance from the training features", yscale="log")
            upper.yaxis.set_major_formatter(LogFormatter())
            upper.yaxis.set_minor_formatter(LogFormatter(minor_thresholds=(1.5, 0.5)))
            for reading, style in zip(VARIED, ("-", "--"), strict=True):
                by_count = whole["by count"][name][reading]
                for color, group in enumerate(GROUPS):
                    values = [PERCENT * each[group] for each in by_count.values()]
                    label = f"{reading.replace('_', ' ')}, {group}"
                    lower.plot([int(k) for k in by_count], values, style, marker=".", color=f"C{color}", label=label)
            lower.set(xlabel="anchors K", xscale="log")
            for axis in (upper, lower):
                axis.set_visible(True)
                axis.grid(alpha=0.3)
        axes[2 * line][0].set_ylabel("reading / that of held-out images")
        axes[2 * line + 1][0].set_ylabel("AUROC of the reading alone, percent")
    handles = [handle for axis in axes[:2, 0] for handle in axis.get_legend_handles_labels()[0]]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(READINGS), frameon=False, fontsize=8)
    with matplotlib.rc_context({"svg.fonttype": "none"}), atomic(path) as temporary:
        figure.savefig(temporary, format="svg", metadata={"Date": None})
