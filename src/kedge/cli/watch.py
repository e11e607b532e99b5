"""``kedge watch``: has a stream of images drifted?"""

import json
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.markup import escape

from kedge.detectors import load
from kedge.drift import history
from kedge.drift.page import drift_page, finding
from kedge.errors import InputError, NotReadyError
from kedge.files import atomic, check_target
from kedge.scoring import read_rows

DRIFTED = 4  # the exit code with --fail-on-drift


def watch(
    rows: Annotated[list[Path], typer.Argument(help="What kedge score wrote, in the order of time.")],
    detector: Annotated[Path, typer.Option(help="The detector that scored them.")],
    out: Annotated[Path | None, typer.Option("--out", "-o", help="The page; by default beside the last rows.")] = None,
    kind: Annotated[str | None, typer.Option("--format", help="Of the rows, where their names do not tell.")] = None,
    window: Annotated[int, typer.Option(min=20, help="Newest scores that are tested together.")] = 100,
    alpha: Annotated[float, typer.Option(help="Chance of a false alarm, of each of the two instruments.")] = 0.01,
    seed: Annotated[int, typer.Option(min=0, help="Of the smoothing of p-values.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead, for programs.")] = False,
    fail_on_drift: Annotated[bool, typer.Option(help=f"Exit with code {DRIFTED} on an alarm.")] = False,
) -> None:
    """Tell whether images have become other than those that a detector was calibrated on.

    Two instruments read the scores in the order of the rows. A martingale bets on every score; the chance that it ever
    raises a false alarm is at most ALPHA, however long the stream. A window compares the newest scores with the
    calibration scores; its promise holds over the whole stream. Rows with an error are left out.

    For example:

        kedge watch monday.parquet tuesday.parquet --detector detector.kedge

        kedge watch out.parquet --detector cifar10 --alpha 0.001 --fail-on-drift
    """
    console = Console(stderr=as_json)
    written = out or rows[-1].with_name(f"{rows[-1].stem}-drift.html")
    check_target("--out", written)
    known = load(detector).calibration
    if known is None:
        raise NotReadyError(f"detector must be calibrated; {detector} is not: run kedge calibrate first")
    scores = np.array(
        [row["score"] for file in rows for row in read_rows(file, kind) if not row["error"]], dtype=np.float64
    )
    if not len(scores):
        raise InputError(f"rows must hold at least one score; {', '.join(map(str, rows))} hold none")
    found = history(scores, known.scores, window=window, alpha=alpha, seed=seed)
    with atomic(written) as temporary:
        title = f"Drift of {', '.join(file.name for file in rows)}"
        temporary.write_text(drift_page(found, scores, known.threshold, title=title, alpha=alpha), encoding="utf-8")
    drifted = found.wealth_since is not None or found.window_since is not None
    if as_json:
        said = {
            "images": len(scores),
            "drift": drifted,
            "martingale_since": found.wealth_since,
            "window_since": found.window_since,
            "log_wealth": float(found.log_wealth[-1]),
            "smallest_p_value": float(min(found.p_any.min(), found.p_up.min())) if len(found.windows) else None,
        }
        typer.echo(json.dumps(said, indent=1))
    console.print(finding(found), highlight=False)
    console.print(f"plot      [bold]{escape(str(written))}[/]", highlight=False)
    if drifted and fail_on_drift:
        raise typer.Exit(DRIFTED)
