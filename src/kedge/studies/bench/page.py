"""The page of a benchmark: times relative to an unanchored forward pass as bars, and every number in a table."""

from collections.abc import Mapping
from typing import Any

from kedge.evaluation.report import figures
from kedge.evaluation.report.document import document
from kedge.evaluation.report.markup import Html, figure, section, table, tag
from kedge.studies.bench.engines import TITLES, UNANCHORED
from kedge.studies.bench.measure import subject_title, table_of, training_words

Record = Mapping[str, Any]


def bench_page(now: Record, then: Record | None = None) -> str:
    """The whole page, which loads nothing, of a record by `measure`; compared with an earlier one if given."""
    rows = [row for row in now["inference"] if row["engine"] != UNANCHORED]
    best = min(rows, key=lambda row: row["ratio"], default=None)
    finding = (
        "Nothing but the unanchored forward pass could run."
        if best is None
        else f"A detection costs {best['ratio']:.2f} unanchored forward passes at best: {TITLES[best['engine']]}, "
        f"batch {best['batch']}."
    )
    made = now["made with"]
    intro = [f"kedge {made['kedge']}, torch {made['torch']}, {made['machine']}."]
    if then is not None:
        intro.append(f"Compared with kedge {then['made with']['kedge']} on {then['made with']['machine']}.")
    steps = now["training"]
    parts = (
        ("inference", "Inference", _bars(now)),
        ("numbers", "Numbers", _numbers(now, then)),
        ("training", "Training", None if steps is None else section("training", "Training", *_training(steps))),
        ("left-out", "Left out", _left_out(now)),
    )
    return document(f"The cost of a detection by {subject_title(now)}", finding, intro, parts)


def _bars(now: Record) -> Html | None:
    batches = sorted({row["batch"] for row in now["inference"]})
    engines = [name for name in TITLES if any(row["engine"] == name for row in now["inference"]) and name != UNANCHORED]
    if not engines:
        return None
    by_key = {(row["engine"], row["batch"]): row for row in now["inference"]}
    height = 0.8 / len(batches)

    def draw(axes: Any) -> None:
        axes.axvline(1, color=figures.INK, linewidth=0.9, dashes=(4, 2))
        for i, batch in enumerate(batches):
            held = [(place, by_key[name, batch]) for place, name in enumerate(engines) if (name, batch) in by_key]
            middles = [place + (i - (len(batches) - 1) / 2) * height for place, _ in held]
            values = [row["ratio"] for _, row in held]
            axes.barh(middles, values, height=0.9 * height, color=figures.CURVES[i % len(figures.CURVES)])
            low, high = ([row[end] for _, row in held] for end in ("low", "high"))
            axes.hlines(middles, low, high, color=figures.INK, linewidth=0.8)
        axes.set_yticks(range(len(engines)), [TITLES[name] for name in engines])
        axes.invert_yaxis()
        axes.set(xlabel="time of a detection / time of one unanchored forward pass", xlim=(0, None))

    label = "; ".join(
        f"{TITLES[name]}, batch {batch}: {by_key[name, batch]['ratio']:.2f}"
        for name in engines
        for batch in batches
        if (name, batch) in by_key
    )
    size = (7.2, 0.7 + 0.42 * len(engines))
    picture = figures.render("inference", size, (0.36, 0.5 / size[1], 0.98, 0.99), f"Bars. {label}.", draw)
    words = (
        "The time of a detection over that of one forward pass of the same network without anchoring (the dashed "
        "line): the median over turns, with its quartiles. Shorter is better."
    )
    names = figures.legend([f"batch {batch}" for batch in batches])
    caption = "In forward passes of the unanchored network."
    return section("inference", "Inference", tag("p", words), names, figure(picture, caption))


def _numbers(now: Record, then: Record | None) -> Html:
    heads, rows = table_of(now, then)
    return section("numbers", "Every engine", table("", heads, rows, label="Every engine"))


def _training(steps: Record) -> list[Html]:
    parts = [
        f"{name} {1000 * steps[name]['step']['median']:.0f} ms a step, {steps[name]['outside']:.1%} of it outside "
        "forward, backward and optimizer"
        for name in ("unanchored", "anchored")
    ]
    return [tag("p", training_words(steps)), tag("p", f"{'; '.join(parts)}.")]


def _left_out(now: Record) -> Html | None:
    if not now["left_out"]:
        return None
    items = [tag("li", f"{TITLES[name]}: {reason}") for name, reason in now["left_out"].items()]
    return section("left-out", "Left out", tag("ul", *items))
