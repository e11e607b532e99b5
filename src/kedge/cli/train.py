"""``kedge train``: train a network and save a calibrated detector."""

from pathlib import Path
from typing import Annotated, Any

import typer

from kedge.checks import between, one_of
from kedge.cli.fit import print_result
from kedge.cli.options import (
    Accelerator,
    DataDir,
    Epochs,
    HalfWeights,
    LearningRate,
    Overwrite,
    Precision,
    Seed,
    StepSize,
)
from kedge.cli.terminal import Console
from kedge.errors import InputError
from kedge.files import check_target
from kedge.threads import cores

HEAD_ANCHORS = 50  # of an anchored head, which cost little beside the network before it


def train(
    data: Annotated[str, typer.Argument(help="Data set by name (see kedge data list), folder:PATH or npz:PATH.")],
    network: Annotated[
        str,
        typer.Option(
            help="Network by name: compact, wrn-40-2, ..., timm:NAME, hf:NAME, torchvision:NAME, module:factory."
        ),
    ] = "compact",
    pretrained: Annotated[
        bool,
        typer.Option(
            "--pretrained", help="Begin with the weights that the network's library publishes, or a factory loads."
        ),
    ] = False,
    weights: Annotated[
        Path | None, typer.Option(help="Begin with the weights in a file: safetensors or a torch state dict.")
    ] = None,
    freeze: Annotated[
        bool, typer.Option("--freeze", help="Train the last layer alone, on features that are extracted once.")
    ] = False,
    head_width: Annotated[
        int | None,
        typer.Option(
            min=0, help="With --freeze: units of a hidden layer, 0 for none; by default 512 with --anchor, else none."
        ),
    ] = None,
    recipe: Annotated[
        str | None,
        typer.Option(
            help="Recipe, by default finetune with --pretrained or --weights, else fast; an unknown name lists all."
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for checkpoints, history and the detector.")] = Path("runs/train"),
    anchor: Annotated[
        bool | None,
        typer.Option(
            help="Anchor the network, for an AMP detector; the default without --pretrained, --weights and --freeze."
        ),
    ] = None,
    variant: Annotated[
        str, typer.Option(help="Variant of anchored training and of AMP: paper, authors or recommended.")
    ] = "paper",
    init: Annotated[
        str | None, typer.Option(help="Start of the anchored layer: preserve, or fresh, the default with --freeze.")
    ] = None,
    epochs: Epochs = None,
    batch: StepSize = None,
    lr: LearningRate = None,
    every: Annotated[
        int | None, typer.Option(min=1, help="Apply T every N batches: 5 by default; 10 for ImageNet.")
    ] = None,
    per_sample: Annotated[
        bool | None, typer.Option(help="Apply T to 1/EVERY of the pairs of each batch instead of to whole batches.")
    ] = None,
    mask: Annotated[float | None, typer.Option(min=0, max=1, help="Probability of masking the anchor.")] = None,
    mask_target: Annotated[str | None, typer.Option(help="Training target of masked pairs: label or uniform.")] = None,
    synthetic_outliers: Annotated[
        float | None, typer.Option(min=0, max=1, help="Synthetic outliers per training image, trained to uniform.")
    ] = None,
    loss: Annotated[str | None, typer.Option(help="Loss, such as logit-norm; an unknown name lists all.")] = None,
    pixmix: Annotated[bool, typer.Option("--pixmix", help="Mix training images with fractals (PixMix).")] = False,
    size: Annotated[int | None, typer.Option(min=8, help="Input size in pixels, for images on disk.")] = None,
    workers: Annotated[
        int | None, typer.Option(min=0, help="Processes that read images from disk; by default one per core, up to 8.")
    ] = None,
    hold_out: Annotated[
        float | None,
        typer.Option(help="Share of the images to calibrate on: a tenth, or a fifth with --pretrained or --weights."),
    ] = None,
    seed: Seed = 0,
    devices: Annotated[int, typer.Option(min=1, help="Processes or GPUs on this machine.")] = 1,
    nodes: Annotated[int, typer.Option(min=1, help="Number of machines.")] = 1,
    accelerator: Accelerator = "auto",
    precision: Precision = None,
    overwrite: Overwrite = False,
    half: HalfWeights = False,
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help="Write TensorBoard files too.")] = False,
    data_dir: DataDir = None,
) -> None:
    """Train a network and save a calibrated detector. If stopped, the same command resumes; --overwrite begins anew.

    For example:

        kedge train cifar10

        kedge train cifar10 --network wrn-40-2 --recipe cifar --out runs/wrn

        kedge train cifar10 --no-anchor --synthetic-outliers 0.2

        kedge train cifar10 --network airbench --recipe airbench --variant recommended --half

        kedge train folder:photos/ --size 64 --epochs 30 --devices 2 --accelerator cpu

        kedge train folder:photos/ --network timm:efficientnet_lite0 --pretrained

        kedge train folder:photos/ --network timm:efficientnet_lite0 --pretrained --freeze

        kedge train folder:photos/ --network timm:efficientnet_lite0 --pretrained --freeze --anchor

        kedge train imagenet --network resnet50 --recipe imagenet --size 224 --every 10 --accelerator gpu --devices 8
    """
    from kedge import anchoring, training
    from kedge.cli.inputs import open_images
    from kedge.data import ImageSet, Preprocess
    from kedge.detectors.amp import VARIANTS
    from kedge.models.classifier import Classifier
    from kedge.models.named import network as named_network
    from kedge.protect import DEFAULT_METHOD, protect
    from kedge.training.api import skipping
    from kedge.training.frozen import train_head
    from kedge.training.trainer import CHECKPOINT

    tuned = pretrained or weights is not None
    anchor = not (tuned or freeze) if anchor is None else anchor
    hold_out = (0.2 if tuned else 0.1) if hold_out is None else hold_out
    between("--hold-out", hold_out, 0, 1, open_ends=True)
    check_target("--out", out, folder=True)
    check_target("--out", out / "detector.kedge", overwrite=overwrite)
    try:
        images = open_images("DATA", data, "train", data_dir=data_dir)
    except InputError:  # a small set is read at once, with its damaged images
        images = open_images("DATA", data, "train", data_dir=data_dir, on_error="skip")
    if images.labels is None:
        raise InputError(f"DATA must have labels to train on; {data} has none")
    one_of("--variant", variant, tuple(VARIANTS))  # now, not after the training
    options: dict[str, Any] = {"every": every, "per_sample": per_sample, "mask": mask, "mask_target": mask_target}
    stray = [f"--{name.replace('_', '-')}" for name, value in (options | {"init": init}).items() if value is not None]
    if stray and not anchor:
        raise InputError(f"{', '.join(stray)} must come with --anchor: an unanchored network has no anchors")
    of_passes = {
        "--recipe": recipe, "--batch": batch, "--lr": lr, "--synthetic-outliers": synthetic_outliers or None,
        "--loss": loss, "--pixmix": pixmix or None, "--mask": mask, "--mask-target": mask_target,
        "--variant recommended": True if variant == "recommended" else None,
    }  # fmt: skip
    if freeze and (stray := [name for name, value in of_passes.items() if value is not None]):
        raise InputError(f"{', '.join(stray)} must come without --freeze, which trains the head alone, on features")
    recipe = recipe or ("finetune" if tuned else "fast")
    if head_width is not None and not freeze:
        raise InputError("--head-width must come with --freeze: it is the width of a head on frozen features")
    if loss is not None:
        one_of("--loss", loss, tuple(training.LOSSES))
    count, channels = int(images.labels.max()) + 1, images.images.shape[1] if isinstance(images, ImageSet) else 3
    if count < 2:
        raise InputError(f"DATA must have at least two classes, with a folder for each; {data} has {count}")
    base = named_network(
        network, classes=count, channels=channels, pretrained=pretrained, weights=weights, size=size, fresh_head=True,
        seed=seed,
    )  # fmt: skip
    if isinstance(images, ImageSet):
        preprocess = Preprocess(tuple(images.images.shape[1:]))
    else:
        recorded = base.record.get("preprocess")
        if recorded is None:
            raise InputError(f"--size must be given, since the images of {data} have different or large sizes")
        preprocess = Preprocess.from_record(recorded)
    part, held_out = images.split(1 - hold_out, seed=seed)
    if not isinstance(held_out, ImageSet):
        part, held_out = skipping(part), held_out.readable()  # a damaged image must not stop the run at its end
    given = {"epochs": epochs, "batch": batch, "lr": lr, "pixmix": pixmix or None}
    changes = {key: value for key, value in given.items() if value is not None}
    net: Classifier = base
    minimized: str | training.Loss | None = loss
    if anchor and not freeze:
        options |= {
            "init": init or "preserve",
            "variant": variant,
            "synthetic_outliers": synthetic_outliers,
            "seed": seed,
        }
        anchored = anchoring.anchor(net, **options)
        net, synthetic_outliers = anchored, anchored.options.synthetic_outliers
    elif synthetic_outliers:
        minimized = training.SyntheticOutliers(synthetic_outliers)
    if loss and synthetic_outliers:
        raise InputError(f"--loss {loss} must come without synthetic outliers; add --synthetic-outliers 0")
    if not freeze:
        Console().resumable(out / CHECKPOINT, begun=not overwrite and (out / CHECKPOINT).exists())
    if freeze:
        more: dict[str, Any] = {} if epochs is None else {"epochs": epochs}
        if anchor or head_width:
            chosen = {"every": every, "per_sample": per_sample, "init": init, "width": head_width}
            more |= {key: value for key, value in chosen.items() if value is not None}
            head = training.AnchoredHead(anchored=anchor, seed=seed, **more)
            trained = head.attach(net, part, preprocess=preprocess)
        else:
            trained = train_head(net, part, seed=seed, preprocess=preprocess, **more)
    else:
        trained = training.train(
            net, part, training.recipe(recipe, **changes), seed=seed, loss=minimized, directory=out,
            resume=not overwrite, preprocess=preprocess, workers=min(8, cores()) if workers is None else workers,
            devices=devices, nodes=nodes, accelerator=accelerator, precision=precision, tensorboard=tensorboard,
        )  # fmt: skip
    if not training.is_first_process():
        return
    if half:
        trained.round_weights()
    if anchor:
        many = {"k": min(HEAD_ANCHORS, len(part))} if freeze else {}
        detector = protect(trained, part, held_out, method="amp", seed=seed, variant=variant, **many)
    else:
        detector = protect(trained, part, held_out, method=DEFAULT_METHOD if tuned else "kl_uniform", seed=seed)
    detector.save(out / "detector.kedge")
    print_result(detector, out / "detector.kedge")
