"""`train_head`: the last layer alone, on features that are extracted once; seconds after one pass over the images."""

import math
import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kedge.checks import at_least
from kedge.data import Features, Preprocess, batches
from kedge.data.batches import name_of
from kedge.errors import InputError
from kedge.models.classifier import Classifier, evaluating
from kedge.models.head import find_head
from kedge.provenance import provenance
from kedge.seeds import seeded
from kedge.training.trainer import warn_skipped

EPOCHS, LR, WEIGHT_DECAY, BATCH = 40, 1e-3, 1e-2, 64
RECIPE = {"freeze": True, "lr": LR, "weight_decay": WEIGHT_DECAY, "batch": BATCH}  # in a record
FEWEST_STEPS = 1000  # few images take more epochs
CONSTANT = 1e-2  # of the mean deviation of the features


def train_head(
    net: Classifier,
    data: Any,
    *,
    epochs: int = EPOCHS,
    seed: int = 0,
    preprocess: Preprocess | None = None,
) -> Classifier:
    """Train the last linear layer of a network in place; all other layers stay as they are.

    The features before it are extracted once, without augmentation, and standardised for the training; the layer that
    results takes them as they are. AdamW with a cosine schedule.

    Args:
        net: A network that ends in a linear layer, with the right number of classes; see `kedge.network`.
        data: Labelled images in any form that `kedge.data.batches` takes, or their `Features` from this network.
        epochs: Passes over the features, more for few images: at least 1,000 steps are made.
        seed: Random seed of the first weights and the order.
        preprocess: How images become inputs; by default what the network's library gives.

    Example:
        >>> images = torch.randint(0, 256, (40, 3, 8, 8), dtype=torch.uint8)
        >>> net = Classifier(nn.Sequential(nn.Flatten(), nn.Linear(192, 16), nn.ReLU(), nn.Linear(16, 2)))
        >>> pairs = [(image, i % 2) for i, image in enumerate(images)]
        >>> train_head(net, pairs, preprocess=Preprocess((3, 8, 8)), epochs=2).record["epochs"]
        2
    """
    at_least("epochs", epochs, 1)
    preprocess = data.preprocess if isinstance(data, Features) else given_or_recorded(net, preprocess)
    started = time.monotonic()
    images = fit_head(net, data, preprocess, epochs=epochs, seed=seed)
    net.record |= {
        "recipe": {**RECIPE, "epochs": epochs},
        "epochs": epochs,
        "seed": seed,
        "made with": provenance(),
        **record_of(data, preprocess, images, started),
    }
    return net.eval()


def given_or_recorded(net: Classifier, preprocess: Preprocess | None) -> Preprocess:
    """How images become inputs: as given, or as the network's record says."""
    if preprocess is not None:
        return preprocess
    if net.record.get("preprocess") is None:
        raise InputError("preprocess must be given: the network does not say what size its inputs have")
    return Preprocess.from_record(net.record["preprocess"])


def record_of(data: Any, preprocess: Preprocess, images: int, started: float) -> dict[str, Any]:
    """What a record says of the images that a head was trained on; those that were skipped are in a warning too."""
    skipped = list(getattr(data, "skipped", ()))
    warn_skipped(skipped)
    return {
        "preprocess": preprocess.as_record(),
        "data": {"name": name_of(data), "images": images},
        "seconds": round(time.monotonic() - started, 1),
        "skipped": skipped,
    }


def fit_head(net: Classifier, data: Any, preprocess: Preprocess, *, epochs: int = EPOCHS, seed: int = 0) -> int:
    """Train the last linear layer in place, as `train_head` does, without a record; return the number of images."""
    x, y, name = _stored(net, data) if isinstance(data, Features) else features_of(net, data, preprocess)
    head = net.network.get_submodule(name)
    assert isinstance(head, nn.Linear)
    check_classes(y, head.out_features)
    mean, std = x.mean(dim=0), x.std(dim=0, correction=0)
    std[std <= CONSTANT * std.mean()] = math.inf  # such a feature gets no weight: it says nothing here
    if head.bias is None:
        mean = torch.zeros_like(mean)  # there is no place for it
    fresh = _fitted((x - mean) / std, y, head, epochs, seed)
    with torch.no_grad():
        head.weight.copy_(fresh.weight / std)  # W (h - mean) / std + b
        if head.bias is not None:
            head.bias.copy_(fresh.bias - fresh.weight @ (mean / std))
    return len(y)


def _stored(net: Classifier, data: Features) -> tuple[Tensor, Tensor, str]:
    """The same from extracted features."""
    if data.labels is None or bool((data.labels < 0).any()):
        raise InputError("data must have a label for each image to train on")
    return data.features.to(net.mean.device, torch.float32), data.labels.to(net.mean.device), data.head


def check_classes(y: Tensor, classes: int) -> None:
    """Raise unless labels are those of at least two of so many classes."""
    if not 0 <= int(y.min()) <= int(y.max()) < classes or len(y.unique()) < 2:
        raise InputError(
            f"labels must lie in 0..{classes - 1}, of at least two classes; got {int(y.min())}..{int(y.max())}"
        )


@torch.no_grad()
def features_of(net: Classifier, data: Any, preprocess: Preprocess) -> tuple[Tensor, Tensor, str]:
    """The head's inputs (N, d), the labels (N,) and the head's name."""
    features, labels, name = [], [], None
    with evaluating(net):
        for images, y in batches(data, preprocess, size=64, label="features"):
            if y is None or bool((y < 0).any()):
                raise InputError("data must have a label for each image to train on")
            x = net.as_input(images)
            name = name or find_head(net, x)
            features.append(net.features(x, [f"{name}:in"])[1][f"{name}:in"].flatten(1).float())
            labels.append(y)
    assert name is not None
    return torch.cat(features), torch.cat(labels).to(net.mean.device), name


def _fitted(x: Tensor, y: Tensor, like: nn.Linear, epochs: int, seed: int) -> nn.Linear:
    """A linear layer trained on standardised features."""
    with seeded(seed):
        head = nn.Linear(x.shape[1], like.out_features, bias=like.bias is not None, device=x.device)
        descend(head, x, y, epochs)
    return head


@torch.enable_grad()
def descend(head: nn.Module, x: Tensor, y: Tensor, epochs: int) -> None:
    """Train a head in place on features (N, d) and labels (N,); the order is drawn from torch's own generator."""
    optimizer = torch.optim.AdamW(head.parameters(), lr=LR, weight_decay=WEIGHT_DECAY)
    passes = max(epochs, math.ceil(FEWEST_STEPS / math.ceil(len(x) / BATCH)))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, passes)
    for _ in range(passes):
        for part in torch.randperm(len(x)).to(x.device).split(BATCH):
            optimizer.zero_grad()
            F.cross_entropy(head(x[part]), y[part]).backward()
            optimizer.step()
        schedule.step()
