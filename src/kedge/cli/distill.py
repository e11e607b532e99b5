"""``kedge distill``: a student that says in one forward pass what an AMP detector says in K."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from kedge import experimental as distillation
from kedge import training
from kedge.cli.bars import training_bar
from kedge.data import sources
from kedge.detectors import load
from kedge.files import check_target


def distill(
    file: Annotated[Path, typer.Argument(help="The teacher: an AMP detector, or the name of one that kedge ships.")],
    train: Annotated[str, typer.Option(help="Its training images: a data set by name, folder:PATH, npz:PATH.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The student's file.")],
    train_split: Annotated[str, typer.Option(help="Of --train.")] = "train",
    calibrate: Annotated[
        str | None,
        typer.Option(help="Images for the threshold; by default four fifths of the teacher's own that are in --train."),
    ] = None,
    calibrate_split: Annotated[str | None, typer.Option(help="Of --calibrate.")] = None,
    network: Annotated[
        str | None, typer.Option(help="A network by name, trained from scratch; by default the teacher's own.")
    ] = None,
    recipe: Annotated[
        str | None, typer.Option(help="By default distill, or fast with --network, with the teacher's crops and flips.")
    ] = None,
    epochs: Annotated[int | None, typer.Option(min=1, help="Instead of the recipe's.")] = None,
    batch: Annotated[int | None, typer.Option(min=2, help="Instead of the recipe's.")] = None,
    lr: Annotated[float | None, typer.Option(help="Instead of the recipe's.")] = None,
    mix: Annotated[
        float, typer.Option(min=0, max=1, help="Mixes of two images to learn from, for each training image.")
    ] = distillation.MIX,
    seed: Annotated[int, typer.Option(help="Of everything that is random.")] = 0,
    directory: Annotated[
        Path | None, typer.Option(help="Folder for checkpoints and history; OUT.run by default.")
    ] = None,
    resume: Annotated[bool, typer.Option(help="Go on from the last checkpoint in the folder.")] = True,
    workers: Annotated[int, typer.Option(min=0, help="Processes that read images from disk.")] = 2,
    half: Annotated[
        bool, typer.Option("--half", help="Round the weights to half precision; the file is half as large.")
    ] = False,
    data_dir: Annotated[Path | None, typer.Option(help="Where data sets are; KEDGE_DATA by default.")] = None,
) -> None:
    """Teach a plain network to say in one forward pass what an AMP detector says in K.

    Calibration images of the teacher are not trained on. The student is judged on a fifth of them, which is what to
    choose settings by, and calibrated on the others, by its own scores. Stopped at any moment, the same command goes
    on.

    For example:

        kedge distill cifar10 --train cifar10 -o student.kedge

        kedge distill detector.kedge --train folder:photos/ --calibrate folder:held-out/ -o student.kedge

        kedge distill cifar10 --train cifar10 --network compact --epochs 30 -o small.kedge

        kedge evaluate cifar10 student.kedge --test cifar10 --ood svhn   # what it keeps of its teacher
    """
    directory = directory or out.with_name(f"{out.name}.run")
    check_target("--out", out)
    check_target("--directory", directory, folder=True)
    console, teacher = Console(), load(file)
    chosen = distillation.chosen_recipe(teacher, recipe, fresh=network is not None)
    images = sources.load_dataset(train, train_split, data_dir=data_dir)
    changes = {key: value for key, value in {"epochs": epochs, "batch": batch, "lr": lr}.items() if value is not None}
    with training_bar(console, "distilling") as on_step:
        student = distillation.distill(
            teacher,
            images,
            held_out=None if calibrate is None else sources.load_dataset(calibrate, calibrate_split, data_dir=data_dir),
            network=network,
            recipe=training.recipe(chosen, **changes),
            mix=mix,
            half=half,
            seed=seed,
            directory=directory,
            resume=resume,
            workers=workers,
            progress=on_step,
        )
    student.save(out)
    judged = student.net.record["teacher"]["agreement"]
    if judged is not None:
        words = f"{judged['share']:.1%} of {judged['images']:,} images that it is not calibrated on"
        console.print(f"the teacher's label for {words}", highlight=False)
    console.print(f"student   [bold]{escape(str(out))}[/]", highlight=False)
