"""``kedge distill``: train a student that needs one forward pass instead of an AMP detector's K."""

from pathlib import Path
from typing import Annotated

import typer

from kedge.cli.options import DataDir, Epochs, HalfWeights, LearningRate, Model, Overwrite, Seed, StepSize
from kedge.cli.terminal import Console
from kedge.files import check_target


def distill(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="DETECTOR", help="Teacher: a saved AMP detector, or the name of one that comes with kedge."
        ),
    ],
    train: Annotated[str, typer.Option(help="Training images: data set by name, folder:PATH or npz:PATH.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The student's file.")],
    train_split: Annotated[str, typer.Option(help="Split of --train.")] = "train",
    calibrate: Annotated[
        str | None,
        typer.Option(help="Calibration images; by default four fifths of the teacher's that are in --train."),
    ] = None,
    calibrate_split: Annotated[str | None, typer.Option(help="Split of --calibrate.")] = None,
    network: Annotated[
        str | None, typer.Option(help="Network by name, trained from scratch; by default the teacher's own.")
    ] = None,
    recipe: Annotated[
        str | None,
        typer.Option(help="Recipe; by default distill, or fast with --network, with the teacher's crops and flips."),
    ] = None,
    epochs: Epochs = None,
    batch: StepSize = None,
    lr: LearningRate = None,
    mix: Annotated[float, typer.Option(min=0, max=1, help="Mixes of two images per training image.")] = 0.5,
    seed: Seed = 0,
    directory: Annotated[
        Path | None, typer.Option(help="Folder for checkpoints and history; OUT.run by default.")
    ] = None,
    workers: Annotated[int, typer.Option(min=0, help="Processes that read images from disk.")] = 2,
    overwrite: Overwrite = False,
    half: HalfWeights = False,
    model: Model = None,
    data_dir: DataDir = None,
) -> None:
    """Train an unanchored network to predict in one forward pass what an AMP detector computes in K.

    Calibration images of the teacher are not trained on: a fifth of them is for validation, the others calibrate the
    student. If stopped, the same command resumes; --overwrite begins anew.

    For example:

        kedge distill cifar10 --train cifar10 -o student.kedge

        kedge distill detector.kedge --train folder:photos/ --calibrate folder:held-out/ -o student.kedge

        kedge distill cifar10 --train cifar10 --network compact --epochs 30 -o small.kedge

        kedge evaluate cifar10 student.kedge --test cifar10 --ood svhn   # compare it with its teacher
    """
    from kedge import experimental, training
    from kedge.cli.inputs import open_images
    from kedge.detectors import load
    from kedge.training.trainer import CHECKPOINT

    directory = directory or out.with_name(f"{out.name}.run")
    check_target("--out", out, overwrite=overwrite)
    check_target("--directory", directory, folder=True)
    console, teacher = Console(), load(file, model=model)
    console.resumable(directory / CHECKPOINT, begun=not overwrite and (directory / CHECKPOINT).exists())
    chosen = experimental.distillation_recipe(teacher, recipe, fresh=network is not None)
    images = open_images("--train", train, train_split, data_dir=data_dir)
    changes = {key: value for key, value in {"epochs": epochs, "batch": batch, "lr": lr}.items() if value is not None}
    held_out = None
    if calibrate is not None:
        held_out = open_images("--calibrate", calibrate, calibrate_split, data_dir=data_dir)
    student = experimental.distill(
        teacher, images, held_out=held_out, network=network, recipe=training.recipe(chosen, **changes), mix=mix,
        half=half, seed=seed, directory=directory, resume=not overwrite, workers=workers,
    )  # fmt: skip
    student.save(out)
    agreement = student.net.record["teacher"]["agreement"]
    if agreement is not None:
        share, count = agreement["share"], agreement["images"]
        console.print(f"agrees with the teacher on {share:.1%} of {count:,} validation images")
    console.wrote("student", out)
    console.next(f"kedge evaluate {file} {out} --test {train} --ood IMAGES")
