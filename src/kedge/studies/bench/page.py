"""A benchmark as a page: times in plain forward passes as bars, and every number in a table."""

from collections.abc import Mapping
from typing import Any

from kedge.evaluation.report import figures
from kedge.evaluation.report.document import document
from kedge.evaluation.report.markup import NOTHING, Html, figure, section, table, tag
from kedge.studies.bench.engines import PLAIN, TITLES
from kedge.studies.bench.measure import against, subject_of, title_of

Record = Mapping[str, Any]


def page(now: Record, then: Record | None = None) -> str:
    """The whole page, which loads nothing.

    Args:
        now: What `measure` gave.
        then: An earlier record to compare it with.
    """
    rows = [row for row in now["inference"] if row["engine"] != PLAIN]
    best = min(rows, key=lambda row: row["ratio"], default=None)
    finding = (
        "Nothing but the plain forward pass could run."
        if best is None
        else f"A verdict costs {best['ratio']:.2f} plain forward passes at best: {TITLES[best['engine']]}, "
        f"batch {best['batch']}."
    )
    made = now["made with"]
    intro = [f"kedge {made['kedge']}, torch {made['torch']}, {made['machine']}."]
    if then is not None:
        intro.append(f"Compared with kedge {then['made with']['kedge']} on {then['made with']['machine']}.")
    parts = (
        ("inference", "Inference", _bars(now)),
        ("numbers", "Numbers", _numbers(now, then)),
        ("training", "Training", _training(now)),
        ("left-out", "Left out", _left_out(now)),
    )
    return document(f"What a verdict of {subject_of(now)} costs", finding, intro, parts)


def _bars(now: Record) -> Html | None:
    batches = sorted({row["batch"] for row in now["inference"]})
    engines = [name for name in TITLES if any(row["engine"] == name for row in now["inference"]) and name != PLAIN]
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
            ends = [row[end] for end in ("low", "high") for _, row in held]
            axes.hlines(middles, ends[: len(held)], ends[len(held) :], color=figures.INK, linewidth=0.8)
        axes.set_yticks(range(len(engines)), [TITLES[name] for name in engines])
        axes.invert_yaxis()
        axes.set(xlabel="time of a verdict / time of one plain forward pass", xlim=(0, None))

    said = "; ".join(
        f"{TITLES[name]}, batch {batch}: {by_key[name, batch]['ratio']:.2f}"
        for name in engines
        for batch in batches
        if (name, batch) in by_key
    )
    size = (7.2, 0.7 + 0.42 * len(engines))
    picture = figures.render("inference", size, (0.36, 0.5 / size[1], 0.98, 0.99), f"Bars. {said}.", draw)
    words = (
        "The time of a verdict over that of one plain forward pass of the same network without anchoring, which is the "
        "dashed line: the median over turns, with its quartiles. Shorter is better."
    )
    names = figures.legend([f"batch {batch}" for batch in batches])
    return section("inference", "Inference", tag("p", words), names, figure(picture, "In plain forward passes."))


def _numbers(now: Record, then: Record | None) -> Html:
    heads = ["Engine", "batch", "images/s", "plain passes", "quartiles", "peak memory, MB"]
    heads += ["images/s, now / then", "plain passes, now / then"] if then is not None else []
    changes = {} if then is None else against(now, then)
    rows = []
    for row in now["inference"]:
        memory = row.get("memory")
        cells = [
            str(row["batch"]),
            f"{row['images_per_second']:,.1f}",
            f"{row['ratio']:.2f}",
            f"{row['low']:.2f} to {row['high']:.2f}",
            NOTHING if memory is None else f"{memory / 1e6:,.0f}",
        ]
        if then is not None:
            change = changes.get((row["engine"], row["batch"]))
            cells += [NOTHING, NOTHING] if change is None else [f"{value:.2f}" for value in change]
        title = tag("th", title_of(row), scope="row")
        rows.append(tag("tr", title, *(tag("td", cell) for cell in cells)))
    made = table("", [tag("th", head, scope="col") for head in heads], rows, label="Every engine")
    return section("numbers", "Every engine", made)


def _training(now: Record) -> Html | None:
    steps = now["training"]
    if steps is None:
        return None
    parts = [
        f"{name} {1000 * steps[name]['step']['median']:.0f} ms a step, {steps[name]['outside']:.1%} of it outside "
        "forward, backward and optimizer"
        for name in ("plain", "anchored")
    ]
    ratio = steps["ratio"]
    words = (
        f"An anchored training step takes {ratio['median']:.2f} plain ones (quartiles {ratio['low']:.2f} to "
        f"{ratio['high']:.2f}), at a batch of {steps['batch']}: {'; '.join(parts)}."
    )
    return section("training", "Training", tag("p", words))


def _left_out(now: Record) -> Html | None:
    if not now["left_out"]:
        return None
    items = [tag("li", f"{TITLES[name]}: {reason}") for name, reason in now["left_out"].items()]
    return section("left-out", "Left out", tag("ul", *items))
