"""``kedge watch``: has a stream of images drifted?"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from kedge.cli.options import AsJson, Overwrite, detector_and
from kedge.cli.terminal import Console
from kedge.errors import InputError, NotReadyError
from kedge.files import check_target

DRIFTED = 4  # the exit code with --fail-on-drift


def watch(
    files: Annotated[
        list[str],
        typer.Argument(
            metavar="DETECTOR ROWS",
            help="The detector that scored the images. Then files that kedge score wrote, in the order of time.",
        ),
    ],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="The page to write; by default next to the last file of rows.")
    ] = None,
    kind: Annotated[
        str | None, typer.Option("--format", help="Format of the rows, if it does not follow from their names.")
    ] = None,
    window: Annotated[int, typer.Option(min=20, help="Number of newest scores that are tested together.")] = 100,
    alpha: Annotated[float, typer.Option(help="Probability of a false alarm, for each of the two tests.")] = 0.01,
    seed: Annotated[int, typer.Option(min=0, help="Random seed of the p-values.")] = 0,
    any_detector: Annotated[
        bool,
        typer.Option(
            "--any-detector", help="Accept rows of another detector, such as rows from before a new calibration."
        ),
    ] = False,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
    fail_on_drift: Annotated[
        bool, typer.Option("--fail-on-drift", help=f"Exit with code {DRIFTED} on an alarm.")
    ] = False,
) -> None:
    """Test whether images have changed since a detector was calibrated.

    Two tests read the scores in the order of the rows. A martingale bets on every score; the probability that it ever
    raises a false alarm is at most ALPHA, however long the stream. A window compares the newest scores with the
    calibration scores, with the same guarantee over the whole stream. Rows with an error are left out. Rows of
    another detector are refused: their scores cannot be compared.

    For example:

        kedge watch detector.kedge monday.parquet tuesday.parquet

        kedge watch cifar10 out.parquet --alpha 0.001 --fail-on-drift
    """
    from kedge.detectors.load import load_calibration
    from kedge.drift import history, scores_of
    from kedge.drift.page import drift_finding, drift_page, shown_places
    from kedge.drift.replay import rows_at
    from kedge.drift.window import FEWEST
    from kedge.evaluation.report.document import write_page
    from kedge.scoring import read_rows
    from kedge.scoring.page import common_folder, row_card
    from kedge.scoring.summary import class_of

    console = Console(stderr=as_json)
    detector, given = detector_and("ROWS", files)
    rows = [Path(file) for file in given]
    target = out or rows[-1].with_name(f"{rows[-1].stem}-drift.html")
    check_target("--out", target, overwrite=overwrite)
    calibration = load_calibration(detector)
    if calibration is None:
        raise NotReadyError(f"DETECTOR must be calibrated; {detector} is not: run kedge calibrate first")

    if len(calibration.scores) < FEWEST:
        count = len(calibration.scores)
        raise InputError(
            f"DETECTOR must be calibrated on at least {FEWEST} images; {detector} has {count}: calibrate again"
        )

    def every() -> Iterator[dict[str, Any]]:
        return (row for file in rows for row in read_rows(file, kind))

    scores = scores_of(every(), detector, any_detector=any_detector)
    if not len(scores):
        raise InputError(f"rows must hold at least one score; {', '.join(map(str, rows))} hold none")
    result = history(scores, calibration.scores, window=window, alpha=alpha, seed=seed)
    title = f"Drift of {', '.join(file.name for file in rows)}"
    places = shown_places(result, scores)
    shown = rows_at(every(), (place for each in places.values() for place in each))
    folder = common_folder(row["name"] for row in shown.values())
    cards = {
        heading: [row_card(shown[place], note=f"image {place:,}", folder=folder) for place in each]
        for heading, each in places.items()
    }
    page = drift_page(
        result, scores, calibration.threshold, title=title, alpha=alpha, expected=calibration.alpha, cards=cards,
        predicted=[class_of(row) for row in every() if not row["error"]], folder=folder,
    )  # fmt: skip
    write_page(target, page)
    drifted = result.wealth_since is not None or result.window_since is not None
    if as_json:
        outputs = {
            "images": len(scores),
            "drift": drifted,
            "martingale_since": result.wealth_since,
            "window_since": result.window_since,
            "log_wealth": float(result.log_wealth[-1]),
            "smallest_p_value": float(min(result.p_any.min(), result.p_up.min())) if len(result.windows) else None,
        }
        typer.echo(json.dumps(outputs, indent=1))
    console.print(drift_finding(result))
    console.wrote("page", target)
    if drifted:
        console.next(f"look at the images of the page; if they are in distribution, kedge calibrate {detector} IMAGES")
    else:
        console.next(f"kedge watch {detector} {' '.join(given)} NEXT-ROWS")
    if drifted and fail_on_drift:
        raise typer.Exit(DRIFTED)
