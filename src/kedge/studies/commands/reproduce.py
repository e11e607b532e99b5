"""``kedge reproduce``: a study of the paper, end to end."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from kedge.checks import one_of
from kedge.cli.options import Accelerator, DataDir, Overwrite, Precision
from kedge.cli.terminal import Console
from kedge.errors import InputError, NotReadyError
from kedge.files import check_target
from kedge.progress import progress_bar
from kedge.studies.commands import StudyProgress

if TYPE_CHECKING:
    from kedge.studies.feature_run import FeatureRun
    from kedge.studies.plan import Suite

NTK = "ntk"
ANEW = "finished networks and scores are reused"
ON_TASKS = ("default", "heads", "photos", "cifar10-trained", "imagenet")  # on features extracted once


def reproduce(
    name: Annotated[str, typer.Argument(help="The study, such as methods or cifar-wrn; an unknown name lists all.")],
    scale: Annotated[
        str,
        typer.Option(
            help="Size of the study. full: the paper's networks, epochs and data, for a GPU machine. small: for two "
            "cores, in minutes to hours, with local data. smoke: tiny generated images, in seconds, as a test."
        ),
    ] = "small",
    seeds: Annotated[int, typer.Option(min=1, help="Number of seeds, from 0 on; each has its own trainings.")] = 1,
    rows: Annotated[
        list[str] | None,
        typer.Option(
            help="Only rows whose label matches this pattern, where * is any text; may be repeated. Only their "
            "networks are trained, and a later run of the whole study reuses finished rows."
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for all results; runs/NAME-SCALE by default.")] = None,
    networks: Annotated[
        Path | None,
        typer.Option(help="Folder of trained networks, which studies share; runs/networks, or OUT/networks."),
    ] = None,
    features: Annotated[
        Path | None,
        typer.Option(
            help="For studies on extracted features, such as default: their folder; runs/features, or OUT/features."
        ),
    ] = None,
    tasks: Annotated[
        list[str] | None,
        typer.Option(
            help="For default and heads: only this task; for photos: only this part; for cifar10-trained and imagenet: "
            "only this network; may be repeated."
        ),
    ] = None,
    weights: Annotated[
        list[Path] | None,
        typer.Option(
            help="For an openood study: a file of its network's weights, in place of training; repeated, one for each "
            "seed, in place of --seeds. For default, heads and cifar10-trained: files of the public CIFAR-10 networks, "
            "resnet20 and resnet56."
        ),
    ] = None,
    accelerator: Accelerator = "auto",
    precision: Precision = None,
    workers: Annotated[int, typer.Option(min=0, help="Processes that read images of ImageNet's size.")] = 2,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Do not run the study: print which data sets are missing and how to get them, and estimate its hours, "
            "memory and disk on this machine from a few steps of each training and a batch of each row.",
        ),
    ] = False,
    overwrite: Overwrite = False,
    data_dir: DataDir = None,
) -> None:
    """Train, score, evaluate and report a study. If it is interrupted, the same command resumes it.

    The tables and reports of a complete study are replaced with --overwrite; trained networks and scores are kept.

    For example:

        kedge reproduce methods

        kedge reproduce ablation --scale small --data-dir ~/images

        kedge reproduce cifar-wrn --scale full --dry-run

        kedge reproduce cifar-wrn --scale full --seeds 3

        kedge reproduce insight --rows "*narrow*"

        kedge reproduce openood-cifar10 --scale full --weights s0/best.ckpt --data-dir OpenOOD/data

        kedge reproduce default --seeds 5 --data-dir ~/images --weights cifar10_resnet20.safetensors

        kedge reproduce heads --seeds 5 --data-dir ~/images

        kedge reproduce cifar10-trained --tasks resnet20 --weights cifar10_resnet20.safetensors

        kedge reproduce ntk
    """
    import torch

    from kedge.data.sources import data_folder
    from kedge.evaluation.report.figures import require
    from kedge.studies import STUDIES, run_ntk
    from kedge.studies.feature_run import FeatureRun
    from kedge.studies.publish import command_line
    from kedge.studies.study import SCALES, Setting

    console = Console()
    folder = out or Path("runs") / f"{name}-{scale}"
    networks = networks or (folder if out else folder.parent) / "networks"
    one_of("NAME", name, (*STUDIES, *ON_TASKS, NTK))
    if dry_run and name not in STUDIES:
        raise InputError(f"--dry-run is not available for {', '.join((*ON_TASKS, NTK))}; got {name}: leave it out")
    check_target("--out", folder, folder=True)
    if name in (NTK, *ON_TASKS):
        check_target("--out", folder / ("report.html" if name == NTK else "tables.md"), overwrite=overwrite)
    require()  # before hours of training, not after
    if name == NTK:
        run_ntk(folder)
        console.wrote("report", folder / "report.html")
        console.next(f"open {folder / 'report.html'}")
        return
    one_of("--scale", scale, SCALES)
    files = tuple(weights or ())
    if name in ON_TASKS:
        setting = Setting(scale, tuple(range(seeds)), data_dir, files)
        features = features or (folder if out else folder.parent) / "features"
        run = FeatureRun(setting, folder, features, tuple(rows or ()), tuple(tasks or ()), precision, command_line())
        compare_on_tasks(name, run, console)
        return
    if tasks:
        raise InputError(f"--tasks is for {', '.join(ON_TASKS)}; {name} has none: leave it out")
    check_target("--networks", networks, folder=True)
    numbers = tuple(range(len(files) or seeds))
    study = STUDIES[name](Setting(scale, numbers, data_dir, files, folder / "images"))
    if files and not any(plan.weights for suite in study.suites for plan in suite.networks.values()):
        raise InputError(
            f"--weights is for the openood studies, default, heads and cifar10-trained; {name} takes none: leave it out"
        )
    console.print(f"[bold]{escape(study.title)}[/]\n{escape(study.about)}")
    if accelerator == "auto" and torch.cuda.is_available():
        accelerator = "gpu"
    how = {"accelerator": accelerator, "precision": precision, "workers": workers}
    suites = [suite.only(*rows) for suite in study.suites] if rows else study.suites
    if dry_run:
        for suite in suites:
            estimate(suite, how, console)
        return
    finished = [folder / suite.name / "tables.md" for suite in suites]
    if all(tables.is_file() for tables in finished):
        check_target("--out", finished[0], overwrite=overwrite)
    begun = any((folder / suite.name).is_dir() for suite in suites)
    console.resumable(folder, begun=begun, anew=ANEW)
    done = [run_suite(suite, folder / suite.name, networks, how, console) for suite in suites]
    if not any(done):
        raise NotReadyError(f"{name} needs data that is not in {data_folder(data_dir)}: see above")


def compare_on_tasks(name: str, run: "FeatureRun", console: Console) -> None:
    """Run a study on features, print its tables and write them."""
    from kedge.studies.cifar10_trained import run_cifar10_trained
    from kedge.studies.default import run_default
    from kedge.studies.heads import run_heads
    from kedge.studies.imagenet import run_imagenet
    from kedge.studies.photographs import photographs_in_words
    from kedge.studies.photos import run_photos

    runs = {
        "default": run_default,
        "heads": run_heads,
        "photos": run_photos,
        "cifar10-trained": run_cifar10_trained,
        "imagenet": run_imagenet,
    }
    check_target("--features", run.features, folder=True)
    console.resumable(run.features, begun=False)
    with progress_bar(name) as update:
        shown = replace(run, progress=lambda label, done, total: update(done, total, label=label))
        written = runs[name](shown)
    for table in written.tables:
        console.print(table.terminal())
    console.print(photographs_in_words(run.setting.data_dir))
    for task, hint in written.missing.items():
        console.print(f"[yellow]missing {escape(task)}:[/] {escape(hint)}")
    console.wrote("tables", f"{run.out / 'tables.md'}, metrics.json")
    console.next(f"read {run.out / 'tables.md'}")


def estimate(suite: "Suite", how: dict[str, Any], console: Console) -> None:
    """Print what a suite would take on this machine."""
    from kedge.studies.dry_run import dry_run

    with progress_bar(suite.name) as update:
        outcome = dry_run(suite, how, lambda what: update(0, label=what))
    for table in outcome.tables():
        console.print(table.terminal())
    for name, hint in outcome.sets.missing.items():
        console.print(f"[yellow]missing {escape(name)}:[/] {escape(hint)}")


def run_suite(suite: "Suite", folder: Path, networks: Path, how: dict[str, Any], console: Console) -> bool:
    """Run one suite of a study, print its tables and write its report; False if its data is missing."""
    from kedge.studies.publish import command_line, publish
    from kedge.studies.run import SuiteRun

    try:
        with progress_bar(suite.name) as update:
            shown = StudyProgress(update)
            run = SuiteRun(
                suite, folder, networks=networks, training=how, on_training=shown.on_training,
                on_scoring=shown.on_scoring,
            )  # fmt: skip
            missing = run.data(suite.seeds[0]).missing
            evaluations = run.run()
    except NotReadyError as error:
        console.print(f"[yellow]{suite.name} left out:[/] {escape(str(error))}")
        return False
    published = publish(run, evaluations, command=command_line())
    for table in (*published.summary.tables(console.width), *published.tables):
        console.print(table.terminal())
    for name, hint in missing.items():
        console.print(f"[yellow]missing {escape(name)}:[/] {escape(hint)}")
    for path in published.reports:
        console.wrote("report", path)
    console.wrote("tables", f"{folder / 'tables.md'}, tables.tex, metrics.json")
    console.next(f"open {published.reports[-1]}")
    return True
