"""``kedge reproduce``: a study of the paper, end to end."""

import sys
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from kedge import training
from kedge.checks import one_of
from kedge.data.sources import data_folder
from kedge.errors import NotReadyError
from kedge.evaluation.report.figures import require
from kedge.files import check_target
from kedge.studies import STUDIES, run_ntk
from kedge.studies.plan import Suite
from kedge.studies.publish import publish
from kedge.studies.run import SuiteRun
from kedge.studies.study import SCALES, Setting

NTK = "ntk"


def reproduce(
    name: Annotated[str, typer.Argument(help=f"The study: {', '.join([*STUDIES, NTK])}.")],
    scale: Annotated[
        str,
        typer.Option(
            help="full: the paper's networks, epochs and data, for a GPU machine. small: what two cores do in minutes "
            "to hours with the data at hand. smoke: tiny made images, in seconds, to see that it runs."
        ),
    ] = "small",
    seeds: Annotated[int, typer.Option(min=1, help="Trainings of everything, from seed 0 on.")] = 1,
    rows: Annotated[
        list[str] | None,
        typer.Option(
            help="Only rows whose label fits this pattern, where * is any text; may be given more than once. What "
            "their networks need is trained, and the whole study takes finished rows as they are."
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for all it makes; runs/NAME-SCALE by default.")] = None,
    networks: Annotated[
        Path | None,
        typer.Option(help="Folder of trained networks, which studies share; runs/networks, or OUT/networks."),
    ] = None,
    accelerator: Annotated[
        str, typer.Option(help="cpu, gpu, ... as Fabric names it; auto: a GPU if there is one.")
    ] = "auto",
    precision: Annotated[str | None, typer.Option(help="To train in: bf16-mixed, 16-mixed, ...")] = None,
    workers: Annotated[int, typer.Option(min=0, help="Processes that read images of ImageNet's size.")] = 2,
    data_dir: Annotated[Path | None, typer.Option(help="Where data sets are; KEDGE_DATA by default.")] = None,
) -> None:
    """Train, score, evaluate and report a study. Stopped at any moment, the same command goes on where it was.

    For example:

        kedge reproduce methods

        kedge reproduce ablation --scale small --data-dir ~/images

        kedge reproduce cifar-wrn --scale full --seeds 3

        kedge reproduce insight --rows "*narrow*"

        kedge reproduce ntk
    """
    console = Console()
    folder = out or Path("runs") / f"{name}-{scale}"
    networks = networks or (folder if out else folder.parent) / "networks"
    one_of("name", name, (*STUDIES, NTK))
    check_target("--out", folder, folder=True)
    require()  # before hours of training, not after
    if name == NTK:
        run_ntk(folder)
        console.print(f"report    [bold]{escape(str(folder / 'report.html'))}[/]", highlight=False)
        return
    check_target("--networks", networks, folder=True)
    study = STUDIES[name](Setting(one_of("scale", scale, SCALES), tuple(range(seeds)), data_dir))
    console.print(f"[bold]{escape(study.title)}[/]\n{escape(study.about)}", highlight=False)
    if accelerator == "auto" and torch.cuda.is_available():
        accelerator = "gpu"
    how = {"accelerator": accelerator, "precision": precision, "workers": workers}
    suites = [suite.only(*rows) for suite in study.suites] if rows else study.suites
    done = [run_suite(suite, folder / suite.name, networks, how, console) for suite in suites]
    if not any(done):
        raise NotReadyError(f"nothing of {name} could be run: see above what is missing in {data_folder(data_dir)}")


def run_suite(suite: Suite, folder: Path, networks: Path, how: dict[str, Any], console: Console) -> bool:
    """Run one suite of a study, print its tables and write its report; False where its data is not here."""
    try:
        with Progress(
            TextColumn("{task.description:<32}"), BarColumn(), TimeRemainingColumn(), TextColumn("{task.fields[note]}"),
            console=console,
        ) as bars:  # fmt: skip
            shown = Bars(bars)
            run = SuiteRun(
                suite,
                folder,
                networks=networks,
                training=how,
                on_training=shown.on_training,
                on_scoring=shown.on_scoring,
            )
            missing = run.data(suite.seeds[0]).missing
            tables = run.run()
    except NotReadyError as error:
        console.print(f"[yellow]{suite.name} left out:[/] {escape(str(error))}", highlight=False)
        return False
    published = publish(run, tables, command=" ".join(["kedge", *sys.argv[1:]]))
    for table in (*published.summary.tables(console.width), *published.tables):
        console.print(table.terminal())
    for name, hint in missing.items():
        console.print(f"[yellow]missing {escape(name)}:[/] {escape(hint)}", highlight=False)
    for path in published.reports:
        console.print(f"report    [bold]{escape(str(path))}[/]", highlight=False)
    console.print(f"tables    {folder / 'tables.md'}, tables.tex, metrics.json", highlight=False, markup=False)
    return True


class Bars:
    """Shows the progress of a suite: a bar for each training, and one for the scoring."""

    def __init__(self, bars: Progress) -> None:
        self.bars = bars
        self.tasks: dict[str, TaskID] = {}

    def on_training(self, network: str, p: training.Progress) -> None:
        """Move the bar of a network."""
        note = f"loss {p.loss:.3f}  accuracy {p.accuracy:.1%}  {p.images_per_second:,.0f} images/s"
        self._show(f"training {network}", p.step, p.steps, note)

    def on_scoring(self, label: str, done: int, total: int) -> None:
        """Move the bar of the method that is scoring."""
        self._show("scoring", done, total, label)

    def _show(self, task: str, done: int, total: int, note: str) -> None:
        if task not in self.tasks:
            self.tasks[task] = self.bars.add_task(escape(task), note="")
        self.bars.update(self.tasks[task], total=total, completed=done, note=escape(note))
