"""`train`: one training loop for unanchored and anchored networks, so that comparisons between them are fair."""

import contextlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from kedge.anchoring import DEFAULT_K, Anchored
from kedge.anchoring.sampling import choose
from kedge.data import Preprocess, batches
from kedge.data.leakage import fingerprints
from kedge.errors import ArchitectureError, InputError
from kedge.models.classifier import Classifier
from kedge.models.ensemble import Ensemble
from kedge.models.graph import StoredGraph
from kedge.progress import progress_bar
from kedge.seeds import mix_seed
from kedge.training.engine import locked, make_engine
from kedge.training.frozen import fit_head
from kedge.training.loader import OutlierLoader, TrainLoader, make_loader, sample, statistics
from kedge.training.losses import Loss, make_loss
from kedge.training.recipes import Recipe
from kedge.training.recipes import recipe as named_recipe
from kedge.training.trainer import CHECKPOINT, Progress, Trainer


def train(
    net: nn.Module,
    data: Any,
    recipe: str | Recipe = "fast",
    *,
    seed: int = 0,
    directory: str | Path | None = None,
    resume: bool = True,
    checkpoint_seconds: float = 120.0,
    validation: Any = None,
    preprocess: Preprocess | None = None,
    loss: str | Loss | None = None,
    outliers: Any = None,
    workers: int = 0,
    devices: int = 1,
    nodes: int = 1,
    accelerator: str = "auto",
    precision: str | None = None,
    tensorboard: bool = False,
    progress: Callable[[Progress], None] | None = None,
) -> Classifier:
    """Train a network in place, anchored or not, and return it as a `Classifier` in evaluation mode.

    Normalization statistics and evaluation anchors that are not set yet are taken from the training images. With a
    ``directory`` the run can be stopped or killed at any time: the same call resumes from the last checkpoint and ends
    with bit-identical weights; a second run in the same directory is refused meanwhile. An image of a `StreamedSet`
    that cannot be decoded is replaced by the next, counted in the history, and listed in the record and in a warning.

    Args:
        net: A network, a `Classifier` or an `Anchored` network.
        data: Labelled images: an `ImageSet`, a data set of (image, label) pairs, or a data loader of such batches.
        recipe: A name or a `Recipe`.
        seed: Random seed for the order of images, augmentation and dropout; an `Anchored` network has its own seed for
            drawing anchors.
        directory: For checkpoints, history.jsonl and record.json.
        resume: Whether to resume from a checkpoint in ``directory``; otherwise it is overwritten.
        checkpoint_seconds: Interval between checkpoints; one is also written after every epoch.
        validation: Labelled images on which accuracy is measured after every epoch.
        preprocess: Input of the network, for data sets of PIL images or paths; a `StreamedSet` takes the network's own
            by default, see `kedge.network`.
        loss: What to minimize; by default cross entropy, with synthetic outliers if the network was anchored with
            ``synthetic_outliers``. ``"logit-norm"`` and ``"t2fnorm"`` are others by name; methods with their own
            training have one, such as ``kedge.OutlierExposure.loss()``.
        outliers: Images from outside the training set, for losses that use them, labelled or not. They must not be
            among, nor drawn from, the sets that the detector is evaluated on; `kedge.evaluate` refuses such sets.
        workers: Processes that read a data set.
        devices: Devices on this machine; above 1, and under torchrun, training is parallel through Lightning Fabric.
        nodes: Number of machines.
        accelerator: Fabric's name: "cpu", "gpu", ...; "auto" is a GPU of CUDA or ROCm if there is one, to which the
            network is moved; otherwise, and with a network that is not on the CPU, the network's device.
        precision: Fabric's name: "bf16-mixed", "16-mixed", ...
        tensorboard: Whether to write the history for TensorBoard too, into ``directory``.
        progress: Called after every step, instead of a bar in a terminal.

    Example:
        >>> from kedge import ImageSet
        >>> from kedge.models import build
        >>> images = ImageSet(torch.randint(0, 256, (64, 1, 8, 8), dtype=torch.uint8), torch.arange(64) % 2)
        >>> net = train(build("compact", width=4, classes=2, channels=1), images, named_recipe("demo", epochs=1))
        >>> net.record["epochs"]
        1
    """
    chosen = named_recipe(recipe)
    if tensorboard and directory is None:
        raise InputError("tensorboard needs a directory to write to; pass directory=")
    engine = make_engine(devices, nodes, accelerator, precision)
    data, outliers = skipping(data), skipping(outliers)
    where = {"rank": engine.rank, "world": engine.world, "workers": workers}
    classifier = net if isinstance(net, Classifier) else Classifier(net)
    engine.place(classifier)
    loss = make_loss(loss, classifier)
    _check(classifier, loss, outliers)
    loader = make_loader(data, chosen, seed, preprocess=preprocess, net=classifier, **where)
    count = loss.outliers_per_image * loader.batch
    outlier_loader = OutlierLoader(outliers, chosen, seed, count, loader.preprocess, **where) if count else None
    folder = None if directory is None else Path(directory)
    with (
        locked(folder, engine),
        torch.random.fork_rng(),
    ):  # dropout draws from torch's global generators, which are restored afterwards
        prepare(classifier, data, loader, outlier_loader, seed)
        begun = resume and folder is not None and (folder / CHECKPOINT).exists()
        if chosen.head_first and not begun:
            with contextlib.suppress(ArchitectureError):  # of a network that does not end in a linear layer
                fit_head(classifier, data, loader.preprocess, seed=seed)
        trainer = Trainer(classifier, data, loader, outlier_loader, loss, chosen, seed, engine, folder, tensorboard)
        with progress_bar("training") as update:
            report = progress or (lambda p: update(p.step, p.steps, note=p.note))
            trainer.run(resume, checkpoint_seconds, validation, report)
    classifier.eval()
    return classifier


def skipping(data: Any) -> Any:
    """A set that skips images that cannot be decoded, if it is of a kind that can."""
    return replace(data, on_error="skip") if getattr(data, "on_error", None) == "raise" else data


def prepare(net: Classifier, data: Any, loader: TrainLoader, outliers: OutlierLoader | None, seed: int) -> None:
    """Set missing statistics and anchors from the training images, and record the fingerprints of the outliers."""
    torch.manual_seed(mix_seed(seed))  # for the data set's own random transforms
    if not net.has_statistics:
        net.set_statistics(*statistics(data, loader.preprocess, seed=seed))
    initialize = getattr(net.network, "prepare", None)
    if initialize is not None:  # a network that is initialized from normalized images
        initialize(net.normalise(sample(data, loader.preprocess, seed=seed).to(net.mean.device)))
    if isinstance(net, Anchored) and net.anchors is None:
        net.set_anchors(choose(data, loader.preprocess, DEFAULT_K, "random", seed))
    if outliers is not None:
        prints = [fingerprints(x) for x, _ in batches(outliers.data, loader.preprocess)]
        if net.outliers is not None:
            prints.append(net.outliers.cpu())  # from an earlier training, or from this one before it was resumed
        net.outliers = torch.cat(prints).unique(dim=0).to(net.mean.device)


def _check(net: Classifier, loss: Loss, outliers: Any) -> None:
    """Raise an error if network, loss and outliers do not fit together."""
    if isinstance(net, Ensemble):
        raise InputError("net must be one network, got an ensemble; train its members, each with a seed of its own")
    if any(isinstance(module, StoredGraph) for module in net.modules()):
        raise InputError(
            "net must be a network that can be trained; this one is the graph of a file, which only evaluates: load "
            "the file with model= to train its network on"
        )
    if loss.unanchored_only and isinstance(net, Anchored):
        raise InputError(f"the loss {loss.name!r} trains unanchored networks; pass the network before anchoring")
    loss.check(net)
    if loss.outliers_per_image and outliers is None:
        raise InputError(f"the loss {loss.name!r} needs outliers; pass outliers= with images from elsewhere")
    if outliers is not None and not loss.outliers_per_image:
        raise InputError(f"the loss {loss.name!r} uses no outliers; leave outliers= out")
