"""One training loop for plain and anchored networks, so that comparisons between them are fair."""

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kedge.anchoring import Anchored
from kedge.data import ImageSet, Preprocess, choose
from kedge.errors import InputError, KedgeError
from kedge.models.classifier import Classifier
from kedge.provenance import provenance
from kedge.training.augment import crop_and_flip, uniforms
from kedge.training.recipe import Recipe
from kedge.training.recipe import recipe as named_recipe
from kedge.transforms import mix_seed


@dataclass(frozen=True)
class Progress:
    """Where training stands after a step; loss and accuracy are running means over the epoch."""

    step: int
    steps: int
    epoch: int
    epochs: int
    loss: float
    accuracy: float
    images_per_second: float


def train(
    net: nn.Module,
    data: ImageSet,
    recipe: str | Recipe = "demo",
    *,
    seed: int = 0,
    progress: Callable[[Progress], None] | None = None,
) -> Classifier:
    """Train a network in place, plain or anchored, and return it as a `Classifier`.

    Normalisation statistics and evaluation anchors that are not set yet are taken from the training images.

    Args:
        net: A network, a `Classifier` or an `Anchored` network.
        data: Labelled images.
        recipe: A name or a `Recipe`.
        seed: Of the order of images and of augmentation.
        progress: Called after every step.

    Example:
        >>> from kedge.models import build
        >>> images = ImageSet(torch.randint(0, 256, (64, 1, 8, 8), dtype=torch.uint8), torch.arange(64) % 2)
        >>> net = train(build("compact", width=4, classes=2, channels=1), images, named_recipe("demo", epochs=1))
        >>> net.record["epochs_done"]
        1
    """
    chosen = named_recipe(recipe)
    classifier = net if isinstance(net, Classifier) else Classifier(net)
    labels = _check(data, chosen)
    if not classifier.has_statistics:
        classifier.set_statistics(*statistics(data))
    if isinstance(classifier, Anchored) and classifier.anchors is None:
        shape = Preprocess(tuple(data.images.shape[1:]))
        classifier.set_anchors(choose(data, shape, 5, "random", seed))
    started = time.monotonic()
    loss, accuracy = _run(classifier, data.images, labels, chosen, seed, progress)
    classifier.eval()
    classifier.record = {
        "recipe": asdict(chosen),
        "seed": seed,
        "data": {"name": data.name, "images": len(data), "sha256": data.checksum},
        "epochs_done": chosen.epochs,
        "final_loss": loss,
        "final_accuracy": accuracy,
        "seconds": round(time.monotonic() - started, 1),
        "made with": provenance(),
    }
    return classifier


def statistics(data: ImageSet) -> tuple[Tensor, Tensor]:
    """Mean and deviation of each channel over a set of images, in [0, 1].

    Example:
        >>> mean, std = statistics(ImageSet(torch.full((2, 3, 4, 4), 255, dtype=torch.uint8)))
        >>> mean
        tensor([1., 1., 1.], dtype=torch.float64)
    """
    channels = data.images.transpose(0, 1)
    counts = torch.stack([torch.bincount(c.flatten().int(), minlength=256) for c in channels]).double()
    values = torch.arange(256, dtype=torch.float64) / 255
    share = counts / counts.sum(dim=1, keepdim=True)  # (D, 256): exact, and needs no float copy of the set
    mean = share @ values
    variance = share @ values.square() - mean.square()
    return mean, variance.clamp_min(1e-12).sqrt()


def _run(
    net: Classifier,
    images: Tensor,
    labels: Tensor,
    recipe: Recipe,
    seed: int,
    progress: Callable[[Progress], None] | None,
) -> tuple[float, float]:
    optimiser = torch.optim.SGD(
        net.parameters(), lr=recipe.lr, momentum=recipe.momentum, weight_decay=recipe.weight_decay, nesterov=True
    )
    like = net.mean
    per_epoch = len(images) // recipe.batch
    loss_mean = accuracy = 0.0
    net.train()
    for epoch in range(recipe.epochs):
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(mix_seed(seed, epoch)))
        loss_sum, right, seen, started = 0.0, 0, 0, time.monotonic()
        for i in range(per_epoch):
            index = order[i * recipe.batch : (i + 1) * recipe.batch]
            x, y = images[index], labels[index]
            if recipe.crop or recipe.flip:
                draws = uniforms(seed, epoch, index, 3)
                x = crop_and_flip(x, draws, padding=recipe.crop, flip=recipe.flip)
            x, y = x.to(like.device).to(like.dtype) / 255, y.to(like.device)
            for group in optimiser.param_groups:
                group["lr"] = recipe.rate(epoch + (i + 1) / per_epoch)
            logits = net(x)
            target = net.targets(y) if isinstance(net, Anchored) and net.options.mask > 0 else y
            loss = F.cross_entropy(logits, target, label_smoothing=recipe.label_smoothing)
            optimiser.zero_grad(set_to_none=True)
            loss.backward()
            value = float(loss.detach())
            if not math.isfinite(value):
                raise KedgeError(
                    f"the loss became {value} in step {i + 1} of epoch {epoch + 1}; try a lower learning rate "
                    f"(lr={recipe.lr}), and check the images and labels"
                )
            optimiser.step()
            seen += len(x)
            loss_sum += value * len(x)
            right += int((logits.argmax(dim=1) == y).sum())
            loss_mean, accuracy = loss_sum / seen, right / seen
            if progress is not None:
                rate = seen / (time.monotonic() - started)
                step = epoch * per_epoch + i + 1
                progress(Progress(step, recipe.epochs * per_epoch, epoch + 1, recipe.epochs, loss_mean, accuracy, rate))
    return loss_mean, accuracy


def _check(data: ImageSet, recipe: Recipe) -> Tensor:
    if not isinstance(data, ImageSet):
        raise InputError(f"data must be an ImageSet, got {type(data).__name__}; ImageSet.from_arrays makes one")
    if data.labels is None:
        raise InputError(f"data must have labels to train on; the set {data.name!r} has none")
    if len(data) < recipe.batch:
        raise InputError(f"data must hold at least one batch of {recipe.batch} images, got {len(data)}; lower batch")
    if int(data.labels.min()) < 0 or len(data.labels.unique()) < 2:
        raise InputError(
            f"labels must be 0, 1, ... with at least two classes, got {data.labels.unique().tolist()[:5]} "
            f"in the set {data.name!r}"
        )
    return data.labels
