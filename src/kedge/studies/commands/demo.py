"""``kedge demo``: train, calibrate, evaluate and report, on data that came with the installation."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.table import Table

from kedge.cli.options import Overwrite
from kedge.cli.serve import require_service, run_service
from kedge.cli.terminal import Console
from kedge.files import atomic, check_target
from kedge.progress import progress_bar
from kedge.studies.commands import StudyProgress

if TYPE_CHECKING:
    from fastapi import FastAPI

    from kedge.evaluation import Evaluation

INTRO = (
    "Two networks of one shape learned the handwritten digits 0 to 7 from 2,800 images: an anchored one takes each "
    "image as a pair [c, x - c] with a random anchor c, the unanchored baseline takes the image itself. Which of them "
    "detects other images?"
)


def demo(
    out: Annotated[Path, typer.Option(help="Folder for the detector, the metrics and the report.")] = Path("runs/demo"),
    seed: Annotated[int, typer.Option(help="Random seed.")] = 0,
    epochs: Annotated[int | None, typer.Option(min=1, help="Passes over the training images; 12 by default.")] = None,
    app: Annotated[
        bool, typer.Option("--app", help="Then serve a page to try images on; a detector of an earlier demo is kept.")
    ] = False,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port of --app; 0 for any free one.")] = 8000,
    overwrite: Overwrite = False,
) -> None:
    """Train an anchored network and an unanchored baseline on digits, and compare how they detect other images.

    Takes two to three minutes on two cores and downloads nothing. Then open report.html, or use the detector:

        [dim]>>>[/] detector = kedge.load("runs/demo/detector.kedge")
        [dim]>>>[/] detector("photo.png").is_ood

    For example:

        kedge demo --out runs/demo --seed 1

        kedge demo --app

        kedge score runs/demo/detector.kedge photo.png
    """
    serving = require_service() if app else None
    check_target("--out", out, folder=True)
    if not (app and not overwrite and (out / "metrics.json").exists()):
        check_target("--out", out / "detector.kedge", overwrite=overwrite)
        _run(out, seed, epochs)
    if serving is not None:
        settings = serving.Settings()
        run_service(lambda: _app(out, serving), settings, host="127.0.0.1", port=port)


def _app(out: Path, serving: Any) -> "FastAPI":
    """The service of a demo's detector, with its images."""
    from kedge.detectors import load
    from kedge.studies.demo import demo_data

    data = demo_data(seed=json.loads((out / "metrics.json").read_text())["record"]["seed"])
    gallery = serving.Gallery(data.train, (data.test, *data.ood))
    app: FastAPI = serving.create_app(load(out / "detector.kedge"), gallery=gallery)
    return app


def _run(out: Path, seed: int, epochs: int | None) -> None:
    """Train, evaluate, and write everything."""
    from kedge.evaluation.neighbours import Neighbours
    from kedge.evaluation.report import write_report
    from kedge.evaluation.report.figures import require
    from kedge.provenance import provenance
    from kedge.studies.demo import demo_data, run_demo
    from kedge.studies.publish import command_line

    console = Console()
    require()
    with progress_bar("training") as update:
        detector, evaluation = run_demo(
            seed=seed, epochs=epochs, training_progress=StudyProgress(update).on_training,
            scoring_progress=lambda done, total: update(done, total, label="scoring"),
        )  # fmt: skip
    record = {"command": command_line(), "seed": seed, "training": detector.net.record, "made with": provenance()}
    detector.save(out / "detector.kedge")
    with atomic(out / "metrics.json") as temporary:
        temporary.write_text(json.dumps({"record": record, **evaluation.as_dict()}, indent=1))
    title = "kedge demo: digits and other images"
    near = Neighbours(detector.net, demo_data(seed=seed).train, preprocess=detector.preprocess)
    report = write_report(
        out / "report.html", evaluation, title=title, intro=INTRO, detector=detector, neighbours=near, record=record
    )
    console.print(results_table(evaluation))
    for what, path in {"detector": out / "detector.kedge", "metrics": out / "metrics.json", "report": report}.items():
        console.wrote(what, path)
    console.next(f"kedge score {out / 'detector.kedge'} PHOTOS", f"kedge serve {out / 'detector.kedge'}")


def results_table(evaluation: "Evaluation") -> Table:
    """The results as a table that fits a terminal: means over the OOD sets, and the set with the highest FPR95."""
    caption = f"in-distribution: {evaluation.id_name}; means over {len(evaluation.ood_names)} OOD sets, in %"
    table = Table(box=box.SIMPLE_HEAD, caption=caption)
    table.add_column("detector", no_wrap=True)
    for name in ("accuracy ↑", "AUROC ↑", "FPR95 ↓", "hardest set: FPR95 ↓"):
        table.add_column(name, justify="right")
    for name, result in evaluation.results.items():
        accuracy = "" if result.accuracy is None else f"{100 * result.accuracy:.1f}"
        hardest = max(evaluation.ood_names, key=lambda ood: result.metrics[ood]["fpr95"].value)
        worst = f"{hardest}: {100 * result.metrics[hardest]['fpr95'].value:.1f}"
        table.add_row(name, accuracy, *(f"{100 * result.mean(metric):.1f}" for metric in ("auroc", "fpr95")), worst)
    return table
