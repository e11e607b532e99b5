"""``kedge train``: a calibrated detector from a data set, in one command."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from kedge import metrics, training
from kedge.anchoring import anchor
from kedge.anchoring.options import MASK_TARGETS
from kedge.checks import between, one_of
from kedge.cli.bars import training_bar
from kedge.data import ImageSet, Preprocess, sources
from kedge.detectors import AMP, Detector, KLUniform
from kedge.detectors.amp import VARIANTS
from kedge.errors import InputError
from kedge.files import check_target
from kedge.models import build
from kedge.seeds import seeded
from kedge.training.losses import SyntheticOutliers


def train(
    data: Annotated[str, typer.Argument(help="A data set by name (see kedge data list), or folder:PATH, npz:PATH.")],
    network: Annotated[
        str, typer.Option(help="A network by name, such as compact, wrn-40-2, resnet18-cifar.")
    ] = "compact",
    recipe: Annotated[str, typer.Option(help=f"One of {', '.join(training.RECIPES)}.")] = "fast",
    out: Annotated[Path, typer.Option(help="Folder for checkpoints, history and the detector.")] = Path("runs/train"),
    plain: Annotated[
        bool, typer.Option("--plain", help="Train without anchors; the detector is then Energy, centred.")
    ] = False,
    variant: Annotated[
        str, typer.Option(help="Of training and of AMP: paper, authors or recommended; see docs/insight.md.")
    ] = "paper",
    init: Annotated[str, typer.Option(help="First layer of the anchored network: preserve or fresh.")] = "preserve",
    epochs: Annotated[int | None, typer.Option(min=1, help="Instead of the recipe's.")] = None,
    batch: Annotated[int | None, typer.Option(min=2, help="Instead of the recipe's.")] = None,
    lr: Annotated[float | None, typer.Option(help="Instead of the recipe's.")] = None,
    every: Annotated[
        int | None, typer.Option(min=1, help="Corrupt the anchors of every n-th batch: 5, and 10 on ImageNet.")
    ] = None,
    spread: Annotated[
        bool | None, typer.Option(help="Corrupt a share 1/EVERY of all anchors instead of whole batches.")
    ] = None,
    mask: Annotated[float | None, typer.Option(min=0, max=1, help="Share of pairs whose anchor is masked.")] = None,
    mask_target: Annotated[
        str | None, typer.Option(help=f"What these are trained towards: {' or '.join(MASK_TARGETS)}.")
    ] = None,
    synthetic_outliers: Annotated[
        float | None,
        typer.Option(min=0, max=1, help="Outliers to make of training images and to refuse, for each of them."),
    ] = None,
    size: Annotated[int | None, typer.Option(min=8, help="Side of the input, for images of other sizes.")] = None,
    workers: Annotated[int, typer.Option(min=0, help="Processes that read images from disk.")] = 2,
    hold_out: Annotated[float, typer.Option(help="Share of the training images to calibrate on.")] = 0.1,
    seed: Annotated[int, typer.Option(help="Of everything that is random.")] = 0,
    devices: Annotated[int, typer.Option(min=1, help="Processes or GPUs on this machine.")] = 1,
    nodes: Annotated[int, typer.Option(min=1, help="Machines.")] = 1,
    accelerator: Annotated[str, typer.Option(help="cpu, gpu, ... as Fabric names it; auto is the CPU.")] = "auto",
    precision: Annotated[str | None, typer.Option(help="bf16-mixed, 16-mixed, ...")] = None,
    resume: Annotated[bool, typer.Option(help="Go on from the last checkpoint in the folder.")] = True,
    half: Annotated[
        bool, typer.Option("--half", help="Round the weights to half precision; the file is half as large.")
    ] = False,
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help="Write TensorBoard files too.")] = False,
    data_dir: Annotated[Path | None, typer.Option(help="Where data sets are; KEDGE_DATA by default.")] = None,
) -> None:
    """Train a network and save a calibrated detector. Stopped at any moment, the same command goes on.

    For example:

        kedge train cifar10

        kedge train cifar10 --network wrn-40-2 --recipe cifar --out runs/wrn

        kedge train cifar10 --plain --synthetic-outliers 0.2

        kedge train cifar10 --network airbench --recipe airbench --variant recommended --half

        kedge train folder:photos/ --size 64 --epochs 30 --devices 2 --accelerator cpu

        kedge train imagenet --network resnet50 --recipe imagenet --size 224 --every 10 --accelerator gpu --devices 8
    """
    console = Console()
    between("--hold-out", hold_out, 0, 1, open_ends=True)
    check_target("--out", out, folder=True)
    images = sources.load_dataset(data, "train", data_dir=data_dir)
    if images.labels is None:
        raise InputError(f"{data} must have labels to train on; it has none")
    one_of("variant", variant, tuple(VARIANTS))  # now, and not after an hour of training
    how: dict[str, Any] = {"every": every, "spread": spread, "mask": mask, "mask_target": mask_target}
    stray = [f"--{name.replace('_', '-')}" for name, value in how.items() if value is not None]
    if plain and stray:
        raise InputError(f"{', '.join(stray)} must not come with --plain, which trains without anchors; leave out one")
    preprocess = None
    if not isinstance(images, ImageSet):
        if size is None:
            raise InputError(f"{data} has images of different or large sizes; say with --size what the network takes")
        preprocess = Preprocess((3, size, size))
    channels = images.images.shape[1] if isinstance(images, ImageSet) else 3
    part, held_out = images.split(1 - hold_out, seed=seed)
    changes = {key: value for key, value in {"epochs": epochs, "batch": batch, "lr": lr}.items() if value is not None}
    classes = int(images.labels.max()) + 1
    with seeded(seed):
        net = build(network, classes=classes, channels=channels)
    with training_bar(console, "training") as on_step:
        trained = training.train(
            net
            if plain
            else anchor(net, init=init, variant=variant, synthetic_outliers=synthetic_outliers, seed=seed, **how),
            part,
            training.recipe(recipe, **changes),
            seed=seed,
            loss=SyntheticOutliers(synthetic_outliers) if plain and synthetic_outliers else None,
            directory=out,
            resume=resume,
            preprocess=preprocess,
            workers=workers,
            devices=devices,
            nodes=nodes,
            accelerator=accelerator,
            precision=precision,
            tensorboard=tensorboard,
            progress=on_step,
        )
    if training.is_first_process():
        if half:
            trained.round_weights()
        detector: Detector = KLUniform(trained) if plain else AMP(trained, variant=variant)
        detector.fit(part, preprocess=preprocess).calibrate(held_out)
        detector.save(out / "detector.kedge")
        found = detector(held_out)
        assert held_out.labels is not None
        accuracy = metrics.accuracy(found.label, held_out.labels)
        console.print(f"held-out accuracy {accuracy:.1%} on {len(held_out):,} images", highlight=False)
        console.print(f"detector  [bold]{escape(str(out / 'detector.kedge'))}[/]", highlight=False)
