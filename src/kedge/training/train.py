"""One training loop for plain and anchored networks, so that comparisons between them are fair."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from kedge.anchoring import DEFAULT_K, Anchored
from kedge.data import Preprocess, batches, choose
from kedge.data.leakage import fingerprints
from kedge.errors import InputError
from kedge.models.classifier import Classifier
from kedge.models.ensemble import Ensemble
from kedge.seeds import mix_seed
from kedge.training.engine import Engine, make_engine
from kedge.training.loader import TrainLoader, make_feed
from kedge.training.losses import Loss, loss_of
from kedge.training.outlier_loader import OutlierLoader
from kedge.training.recipe import Recipe
from kedge.training.recipe import recipe as named_recipe
from kedge.training.statistics import sample, statistics
from kedge.training.trainer import Progress, Run


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
    loss: Loss | None = None,
    outliers: Any = None,
    workers: int = 0,
    devices: int = 1,
    nodes: int = 1,
    accelerator: str = "auto",
    precision: str | None = None,
    tensorboard: bool = False,
    progress: Callable[[Progress], None] | None = None,
) -> Classifier:
    """Train a network in place, plain or anchored, and return it as a `Classifier` in evaluation mode.

    Normalisation statistics and evaluation anchors that are not set yet are taken from the training images. With a
    ``directory`` the run can be stopped at any moment, even by a crash, and started again with the same call: it goes
    on from the last checkpoint and ends with the very same weights.

    Args:
        net: A network, a `Classifier` or an `Anchored` network.
        data: Labelled images: an `ImageSet`, a data set of (image, label) pairs, or a data loader of such batches.
        recipe: A name or a `Recipe`.
        seed: Of the order of images, augmentation and dropout; an `Anchored` network has its own for its anchors.
        directory: For checkpoints, history.jsonl and record.json.
        resume: Whether to go on from a checkpoint in ``directory``; otherwise it is overwritten.
        checkpoint_seconds: Write a checkpoint this often, besides after every epoch.
        validation: Labelled images on which to measure accuracy after every epoch.
        preprocess: For data sets of PIL images or paths: what the network takes.
        loss: What to minimise: by default the cross-entropy, and made outliers where the network was anchored with
            ``made``; or what a method with its own training asks for, such as ``kedge.OutlierExposure.loss()``.
        outliers: For losses that use them: images beside the training set, labelled or not. They must not be
            among, nor drawn from, the sets that the detector is evaluated on; `kedge.evaluate` refuses such sets.
        workers: Processes that read a data set.
        devices: On this machine; above 1, and under torchrun, training runs in parallel through Lightning Fabric.
        nodes: Machines.
        accelerator: As Fabric names it: "cpu", "gpu", ...; "auto" with one device stays where the network is.
        precision: As Fabric names it: "bf16-mixed", "16-mixed", ...
        tensorboard: Whether to write the history for TensorBoard too, into ``directory``.
        progress: Called after every step.

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
    feed = make_feed(data, chosen, seed, rank=engine.rank, world=engine.world, workers=workers, preprocess=preprocess)
    classifier = net if isinstance(net, Classifier) else Classifier(net)
    beside = _beside(classifier, feed, loss := loss or loss_of(classifier), outliers, chosen, seed, engine, workers)
    with torch.random.fork_rng():  # dropout draws from torch's own generators, which are put back afterwards
        prepare(classifier, data, feed, beside, seed)
        run = Run(classifier, data, feed, beside, loss, chosen, seed, engine, directory, tensorboard)
        run.go(resume, checkpoint_seconds, validation, progress)
    classifier.eval()
    return classifier


def _beside(
    net: Classifier,
    feed: TrainLoader,
    loss: Loss,
    outliers: Any,
    recipe: Recipe,
    seed: int,
    engine: Engine,
    workers: int,
) -> OutlierLoader | None:
    """The outliers that an loss asks for; network, loss and outliers are checked against each other."""
    if isinstance(net, Ensemble):
        raise InputError("net must be one network, got an ensemble; train its members, each with a seed of its own")
    if loss.unanchored_only and isinstance(net, Anchored):
        raise InputError(f"the loss {loss.name!r} trains plain networks; pass the network before anchoring")
    loss.check(net)
    count = loss.outliers_per_image * feed.batch
    if (count > 0) != (outliers is not None):
        asked = "needs outliers" if count else "uses no outliers"
        raise InputError(
            f"the loss {loss.name!r} {asked}; "
            + ("pass outliers= with images beside the training set" if count else "leave outliers= out")
        )
    if outliers is None:
        return None
    where = {"rank": engine.rank, "world": engine.world, "workers": workers}
    return OutlierLoader(outliers, recipe, seed, count, feed.preprocess, **where)


def prepare(net: Classifier, data: Any, feed: TrainLoader, outliers: OutlierLoader | None, seed: int) -> None:
    """Set what is absent from the training images, and note down the outliers."""
    torch.manual_seed(mix_seed(seed))  # for random transforms of a data set's own
    if not net.has_statistics:
        net.set_statistics(*statistics(data, feed.preprocess, seed=seed))
    look = getattr(net.network, "prepare", None)
    if look is not None:  # a network that looks at normalised images before its training
        look(net.normalise(sample(data, feed.preprocess, seed=seed).to(net.mean.device)))
    if isinstance(net, Anchored) and net.anchors is None:
        net.set_anchors(choose(data, feed.preprocess, DEFAULT_K, "random", seed))
    if outliers is not None:
        prints = [fingerprints(x) for x, _ in batches(outliers.data, feed.preprocess)]
        if net.outliers is not None:
            prints.append(net.outliers.cpu())  # of an earlier training, or of the same one before it was resumed
        net.outliers = torch.cat(prints).unique(dim=0).to(net.mean.device)
