"""UDG: unsupervised dual grouping."""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from kedge.checks import at_least, between
from kedge.data import Preprocess, batches
from kedge.detectors.kmeans import kmeans
from kedge.detectors.registry import register
from kedge.detectors.trained.base import LogitTrainedDetector, MethodLoss
from kedge.errors import InputError
from kedge.models.classifier import Classifier, evaluating
from kedge.models.conversion import convert, head_conversion
from kedge.models.head import HeadOutput, head_to_prepare, prepared_head
from kedge.seeds import mix_seed, seeded
from kedge.training.engine import in_parallel
from kedge.training.losses import Step, StepLoss

INITIAL = 0.01  # standard deviation of the group head's weights when they are drawn


class GroupHead(nn.Module):
    """A network's own head, and a second one that predicts the group of an image."""

    def __init__(self, head: nn.Linear, groups: int, seed: int) -> None:
        super().__init__()
        with seeded(seed):
            self.groups = nn.Linear(head.in_features, at_least("groups", groups, 2)).to(head.weight)
        self.draw(seed)
        self.classes = head  # after the groups, since the last linear layer of a network is its head

    def draw(self, seed: int) -> None:
        """Draw the weights of the groups anew."""
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            self.groups.weight.copy_(INITIAL * torch.randn(self.groups.weight.shape, generator=generator))
            self.groups.bias.zero_()

    def forward(self, features: Tensor) -> HeadOutput:
        """Features (B, d) to the logits of the classes, with those of the groups."""
        return HeadOutput(self.classes(features), (self.groups(features),))


head_conversion("udg", GroupHead)


def filter_known(groups: Tensor, labels: Tensor, unlabelled: Tensor, purity: float) -> Tensor:
    """The classes of the unlabelled images that lie in groups of one class, -1 for the others: (M,).

    ``groups`` (N,) and ``unlabelled`` (M,) are the groups of the labelled and the unlabelled images. A group is of one
    class if more than ``purity`` of all its images, labelled or not, have that label.
    """
    count, classes = int(torch.cat([groups, unlabelled]).max()) + 1, int(labels.max()) + 1
    known = torch.bincount(groups * classes + labels, minlength=count * classes).view(count, classes)
    sizes = known.sum(dim=1) + torch.bincount(unlabelled, minlength=count)
    share = known.double() / sizes.clamp_min(1)[:, None]  # (groups, classes)
    return torch.where(share.amax(dim=1) > purity, share.argmax(dim=1), -1)[unlabelled]


@dataclass(eq=False)
class GroupingLoss(MethodLoss):
    """Cross-entropy of labels and pseudo-labels, outlier exposure of the other unlabelled images, and of the groups.

    Before each epoch all images, labelled or not, are grouped by k-means on the features under the head, in evaluation
    mode and without augmentation. Unlabelled images in a group of one class count as images of that class for this
    epoch (`filter_known`); the others are trained towards equal probabilities. The group head learns the groups of all
    images; its weights are drawn anew before each epoch, since the numbers of the groups change.

    The published code also whitens the features and scales them to unit length, counts the pseudo-labels of the epoch
    before as labels when it looks for groups of one class, gives images of small groups more weight, and passes the
    unlabelled images through the network as a batch of their own. Here only true labels make a group one of a class.

    Args:
        groups: Number of groups; an error if the network was prepared for another.
        purity: The fraction of one class above which a group is of that class.
        weight_groups: Weight of the cross-entropy of the groups.
        weight_outliers: Weight of the cross-entropy of the remaining unlabelled images to the uniform distribution.
        outliers_per_image: Unlabelled images per training image; 2 in the published code.
        start: Epochs with labels alone before the first grouping; none in the published code.
        seed: Seed of the groups.
    """

    name = "unsupervised dual grouping"
    unanchored_only = True

    groups: int | None = None
    purity: float = 0.8
    weight_groups: float = 0.1
    weight_outliers: float = 0.5
    outliers_per_image: int = 1
    start: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        at_least("groups", 2 if self.groups is None else self.groups, 2)
        between("purity", self.purity, 0, 1)
        between("weight_groups", self.weight_groups, 0, float("inf"))
        between("weight_outliers", self.weight_outliers, 0, float("inf"))
        at_least("outliers_per_image", self.outliers_per_image, 1)
        at_least("start", self.start, 0)
        self._epoch: dict[str, Tensor] = {}  # groups and pseudo-labels of the current epoch

    def check(self, net: Classifier) -> None:
        """Raise if the network has no group head, or one for another number of groups."""
        _, head = prepared_head(net, GroupHead, "UDG")
        if self.groups not in (None, head.groups.out_features):
            raise InputError(
                f"groups must be {head.groups.out_features}, as the network was prepared for; got {self.groups}: "
                "leave it out, or pass it to UDG.prepare"
            )

    def begin_epoch(self, net: Classifier, data: Any, outliers: Any, preprocess: Preprocess, epoch: int) -> None:
        """Group all images, and give pseudo-labels to the unlabelled ones of a known class."""
        self._epoch = {}
        name, head = prepared_head(net, GroupHead, "UDG")
        k = head.groups.out_features
        if isinstance(data, DataLoader):
            raise InputError("data must be a set, since its images are grouped by their number; got a data loader")
        if len(data) + len(outliers) < k:
            raise InputError(
                f"groups must be at most the number of images, {len(data) + len(outliers)} with the unlabelled ones; "
                f"got {k}: pass fewer to UDG.prepare, such as one for thirty images"
            )
        if epoch < self.start:
            return
        seed = mix_seed(self.seed, epoch)
        with evaluating(net), seeded(seed):  # for random transforms of a data set's own
            features, labels = _features_and_labels(net, (data, outliers), preprocess, f"{name}.classes:in")
        classes = head.classes.out_features
        if len(labels) < len(data) or not 0 <= int(labels.min()) <= int(labels.max()) < classes:
            raise InputError(
                f"data must have a label in 0..{classes - 1} for each image, since the network has {classes} outputs; "
                f"got {labels.unique().tolist()[:5] or 'none'}"
            )
        groups, _ = kmeans(features, k, seed=seed)
        if in_parallel():
            torch.distributed.broadcast(groups, src=0)  # processes have batch statistics of their own
        labelled, unlabelled = groups.cpu().split([len(data), len(outliers)])
        self._epoch = {
            "groups": labelled,
            "outlier_groups": unlabelled,
            "pseudo_labels": filter_known(labelled, labels, unlabelled, self.purity),
        }
        head.draw(seed)

    def loss(self, step: Step) -> StepLoss:
        """The loss of labelled and unlabelled images, which go through the network as one batch."""
        assert step.outliers is not None
        output = step.forward(torch.cat([step.x, step.outliers]) if self._epoch else step.x, raw=True)
        logits = step.fitting(output.logits[: len(step.x)])
        if not self._epoch:
            value = F.cross_entropy(logits, step.y, label_smoothing=step.label_smoothing)
            # It adds nothing, but processes that share the work wait for a gradient of every weight.
            return StepLoss(value + 0 * output.extra[0].sum(), logits)
        groups = torch.cat([self._epoch["groups"][step.index], self._epoch["outlier_groups"][step.outlier_index]])
        labels = torch.cat([step.y, self._epoch["pseudo_labels"][step.outlier_index].to(step.y)])
        known = labels >= 0
        value = F.cross_entropy(output.logits[known], labels[known], label_smoothing=step.label_smoothing)
        if not bool(known.all()):
            value = value - self.weight_outliers * output.logits[~known].log_softmax(dim=1).mean()
        value = value + self.weight_groups * F.cross_entropy(output.extra[0], groups.to(step.y))
        return StepLoss(value, logits)

    def state(self) -> dict[str, Tensor]:
        """The groups and pseudo-labels of the current epoch."""
        return dict(self._epoch)

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore the groups and pseudo-labels."""
        self._epoch = dict(state)


@register
class UDG(LogitTrainedDetector):
    """Unsupervised dual grouping (Yang et al., ICCV 2021): outlier exposure that spares the known among the outliers.

    Before each epoch labelled and unlabelled images are grouped by their features; unlabelled images in a group that is
    nearly all of one class are trained as that class, the others towards equal probabilities, and a second head learns
    the groups. Use it in place of Outlier Exposure where the unlabelled images are unsorted; the known ones among
    them are recognised as long as the labelled images of their class outnumber them (four to one at a purity of 0.8).
    Tables mark it as having used outliers. Training takes about twice as long as usual, plus a forward pass of all
    images and a k-means for each epoch; scoring costs one forward pass.

    Args:
        net: A network from ``UDG.prepare``, trained with ``UDG.loss()``.
        score: ``"msp"``, as in the paper, ``"max_logit"``, ``"entropy"``, ``"energy"`` or ``"kl_uniform"``.

    Example:
        >>> import kedge
        >>> noise = lambda name: kedge.ImageSet(torch.randint(0, 256, (64, 1, 8, 8)).byte(), torch.arange(64) % 2, name)
        >>> net = UDG.prepare(kedge.models.build("compact", width=4, classes=2, channels=1), groups=4)
        >>> recipe = kedge.training.recipe("demo", epochs=1)
        >>> net = kedge.train(net, noise("a"), recipe, loss=UDG.loss(), outliers=noise("b"))
        >>> UDG(net).fit(noise("a")).score(noise("c")).shape
        torch.Size([64])
    """

    name = "udg"
    needs_outliers = True
    loss = GroupingLoss

    def __init__(self, net: nn.Module, *, score: str = "msp") -> None:
        super().__init__(net, score=score)
        prepared_head(self.net, GroupHead, "UDG")

    @classmethod
    def prepare(cls, net: nn.Module, *, groups: int = 1000, head: str | None = None, seed: int = 0) -> Any:
        """A copy of a network with a head for groups next to its last linear layer, or next to ``head``.

        ``groups`` is 1000 in the paper, for 150,000 images; one for thirty images or more suits smaller sets.
        """
        name, _ = head_to_prepare(net, GroupHead, head)
        return convert(net, "udg", head=name, groups=groups, seed=seed)


def _features_and_labels(
    net: Classifier, sets: tuple[Any, Any], preprocess: Preprocess, layer: str
) -> tuple[Tensor, Tensor]:
    """The features of all images of both sets, (N + M, d), and the labels (N,) of the first."""
    matrix, labels, done = torch.empty(0), [torch.empty(0, dtype=torch.long)], 0
    for x, y in itertools.chain(*(batches(images, preprocess) for images in sets)):
        with torch.no_grad():
            features = net.features(net.as_input(x), [layer])[1][layer]
        if done == 0:  # filled row by row: a list of batches would need twice the memory
            dtype = torch.promote_types(features.dtype, torch.float)
            matrix = features.new_empty((sum(map(len, sets)), features.shape[1]), dtype=dtype)
        matrix[done : done + len(x)] = features
        if done < len(sets[0]) and y is not None:
            labels.append(y)
        done += len(x)
    return matrix, torch.cat(labels)
