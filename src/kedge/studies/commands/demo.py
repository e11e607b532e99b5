"""``kedge demo``: train, calibrate, evaluate and report, on data that came with the installation."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.markup import escape
from rich.table import Table

from kedge.cli.options import DataDir, Overwrite
from kedge.cli.serve import require_service, run_service
from kedge.cli.terminal import Console
from kedge.errors import NotReadyError
from kedge.files import check_target, write_json
from kedge.progress import progress_bar
from kedge.studies.commands import StudyProgress

if TYPE_CHECKING:
    from fastapi import FastAPI

    from kedge.data import StreamedSet
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
    photos: Annotated[
        Path | None,
        typer.Option(
            help="Photographs for the second part, with a folder for each class; by default pets, flowers or "
            "caltech101 in the data folder, if they are there."
        ),
    ] = None,
    data_dir: DataDir = None,
    app: Annotated[
        bool,
        typer.Option(
            "--app",
            help="Then serve a page to try images on; a finished demo in --out is used as it is.",
        ),
    ] = False,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port of --app; 0 for any free one.")] = 8000,
    overwrite: Overwrite = False,
) -> None:
    """Train an anchored network and an unanchored baseline on digits, and compare how they detect other images.

    If there are photographs and the extra `pretrained` is installed, it also protects a pretrained network on them.

    Takes two to four minutes on two cores and downloads nothing. Then open report.html, or use the detector:

        [dim]>>>[/] detector = kedge.load("runs/demo/detector.kedge")
        [dim]>>>[/] detector("photo.png").is_ood

    For example:

        kedge demo --out runs/demo --seed 1

        kedge demo --photos ~/birds

        kedge demo --app

        kedge score runs/demo/detector.kedge photo.png
    """
    serving = require_service() if app else None
    check_target("--out", out, folder=True)
    if not (app and not overwrite and (out / "metrics.json").exists()):
        check_target("--out", out / "detector.kedge", overwrite=overwrite)
        _run(out, seed, epochs, photos, data_dir)
    if serving is not None:
        settings = serving.Settings()
        run_service(lambda: _app(out, data_dir, serving), settings, host="127.0.0.1", port=port)


def _app(out: Path, data_dir: Path | None, serving: Any) -> "FastAPI":
    """The service of a demo's detector, with its images: of its photographs, if it had any."""
    from kedge.detectors import load
    from kedge.studies.demo import demo_data
    from kedge.studies.demo_photos import demo_photographs, photo_sets

    if (out / "photos.json").exists():
        record = json.loads((out / "photos.json").read_text())["record"]
        images = demo_photographs(Path(record["folder"]) if record["folder"] else None, data_dir)
        sets = photo_sets(images, data_dir, seed=record["seed"])
        detector, gallery = out / "photos.kedge", serving.Gallery(sets.fitted, (sets.test, *sets.others))
    else:
        data = demo_data(seed=json.loads((out / "metrics.json").read_text())["record"]["seed"])
        detector, gallery = out / "detector.kedge", serving.Gallery(data.train, (data.test, *data.ood))
    app: FastAPI = serving.create_app(load(detector), gallery=gallery)
    return app


def _run(out: Path, seed: int, epochs: int | None, folder: Path | None, data_dir: Path | None) -> None:
    """Train, evaluate, and write everything; then the same with photographs, if there are any."""
    from kedge.detectors.neighbours import Neighbours
    from kedge.evaluation.report import write_report
    from kedge.evaluation.report.figures import require
    from kedge.provenance import provenance
    from kedge.studies.demo import demo_data, run_demo
    from kedge.studies.demo_photos import demo_photographs, write_examples
    from kedge.studies.publish import command_line

    console = Console()
    require()
    photographs, reason = None, ""
    try:  # before minutes of training
        photographs = demo_photographs(folder, data_dir)
    except NotReadyError as error:
        if folder is not None:
            raise
        reason = str(error)
    with progress_bar("training") as update:
        detector, evaluation = run_demo(
            seed=seed, epochs=epochs, training_progress=StudyProgress(update).on_training,
            scoring_progress=lambda done, total: update(done, total, label="scoring"),
        )  # fmt: skip
    record = {"command": command_line(), "seed": seed, "training": detector.net.record, "made with": provenance()}
    detector.save(out / "detector.kedge")
    write_json(out / "metrics.json", {"record": record, **evaluation.as_dict()})
    title = "kedge demo: digits and other images"
    near = Neighbours(detector.net, demo_data(seed=seed).train, preprocess=detector.preprocess)
    report = write_report(
        out / "report.html", evaluation, title=title, intro=INTRO, detector=detector, neighbours=near, record=record
    )
    console.print(results_table(evaluation))
    for what, path in {"detector": out / "detector.kedge", "metrics": out / "metrics.json", "report": report}.items():
        console.wrote(what, path)
    write_examples(evaluation, out / "images")
    console.next(f"kedge score {out / 'detector.kedge'} {out / 'images'}", f"kedge serve {out / 'detector.kedge'}")
    if photographs is None:
        (out / "photos.json").unlink(missing_ok=True)  # of an earlier demo
        console.print(f"photographs are left out: {escape(reason)}")
    else:
        _run_photos(photographs, out, seed, folder, data_dir, console)


def _run_photos(
    images: "StreamedSet", out: Path, seed: int, folder: Path | None, data_dir: Path | None, console: Console
) -> None:
    """The second part: evaluate on photographs, and write the detector, the metrics and a report."""
    from kedge.detectors.neighbours import Neighbours
    from kedge.evaluation.report import write_report
    from kedge.provenance import provenance
    from kedge.studies.demo_photos import run_photo_demo, write_examples
    from kedge.studies.publish import command_line

    done = run_photo_demo(images, data_dir, seed=seed)
    detector, path = done.detector, out / "photos.kedge"
    detector.save(path)
    near = Neighbours(detector.net, done.fitted, features=done.features)
    given = None if folder is None else str(folder.resolve())
    record = {"command": command_line(), "seed": seed, "photographs": images.name, "folder": given}
    record["made with"] = provenance()
    write_json(out / "photos.json", {"record": record, **done.evaluation.as_dict()})
    title = f"kedge demo: {images.name} and other photographs"
    report = write_report(
        out / "photos.html", done.evaluation, title=title, intro=done.intro, detector=detector, neighbours=near,
        record=record,
    )  # fmt: skip
    write_examples(done.evaluation, out / "photographs")
    console.print(f"\n[bold]Photographs[/] ({escape(images.name)}). {escape(done.intro)}")
    console.print(results_table(done.evaluation))
    for what, written in {"detector": path, "metrics": out / "photos.json", "report": report}.items():
        console.wrote(what, written)
    console.next(f"kedge score {path} {out / 'photographs'}", f"kedge serve {path}")


def results_table(evaluation: "Evaluation") -> Table:
    """The results as a table that fits a terminal: means over the OOD sets, and the set with the highest FPR95."""
    caption = f"in-distribution: {evaluation.id_name}; means over {evaluation.over}, in %"
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
