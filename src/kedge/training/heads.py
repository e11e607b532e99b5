"""`AnchoredHead`: a small head on frozen features, trained on [c, h - c] in seconds, and its unanchored baseline."""

import copy
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kedge.anchoring import DEFAULT_K, Anchored, FeatureNoise, anchor
from kedge.anchoring.corruption import FeatureViews
from kedge.anchoring.layer import INITS
from kedge.anchoring.sampling import choose
from kedge.checks import at_least, between, one_of
from kedge.data import Features, Preprocess
from kedge.errors import InputError
from kedge.models.classifier import Classifier, checksum
from kedge.provenance import provenance
from kedge.seeds import seeded
from kedge.training import frozen

EPS = 1e-6  # of the mean square of a feature vector, below which it is not scaled up to unit length


@dataclass(frozen=True)
class AnchoredHead:
    """A small head on frozen features h, anchored at its first layer: it is trained on pairs [c, h - c].

    `train` makes an ordinary network whose inputs are features; `join` puts it behind the network that they came from.
    Only the head runs once per anchor, so hundreds of anchors cost little beside the network before it.

    Args:
        width: Units of the hidden layer; 0 for a linear head, whose logits deviate over anchors by a constant.
        normalise: Whether each h is scaled to one length, the root of its size; otherwise each feature is scaled by its
            mean and deviation over the training images.
        anchored: False for the unanchored baseline: the same layers, trained in the same way on h alone.
        init: ``"fresh"`` draws the weights of both halves of the first layer, ``"preserve"`` starts them equal.
        noise: T: the deviation of the noise on anchors, relative to that of each feature; 0 for none.
        every: T acts on every N-th batch.
        per_sample: Whether T acts on a share 1 / every of the pairs of each batch instead.
        epochs: Passes over the features, more for few images: at least 1,000 steps are made.
        seed: Random seed of the first weights, the order, the anchors and the noise.

    Example:
        >>> import kedge
        >>> images = kedge.ImageSet(torch.randint(0, 256, (60, 3, 2, 2), dtype=torch.uint8), torch.arange(60) % 2)
        >>> layers = nn.Flatten(), nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 2)
        >>> net = kedge.Classifier(nn.Sequential(*layers), mean=0.5, std=0.3)
        >>> features = kedge.extract(net, images)
        >>> head = AnchoredHead(width=16, epochs=1).train(features)
        >>> kedge.AMP(head, k=20).fit(features).score(features).shape
        torch.Size([60])
        >>> whole = AnchoredHead.join(head, net)
        >>> kedge.AMP(whole, k=20).fit(images).score(images).shape
        torch.Size([60])
    """

    width: int = 512
    normalise: bool = True
    anchored: bool = True
    init: str = "fresh"
    noise: float = 0.5
    every: int = 5
    per_sample: bool = False
    epochs: int = frozen.EPOCHS
    seed: int = 0

    def __post_init__(self) -> None:
        for name, low in (("width", 0), ("every", 1), ("epochs", 1)):
            at_least(name, getattr(self, name), low)
        one_of("init", self.init, INITS)
        between("noise", self.noise, 0, 100)

    def build(self, inputs: int, classes: int, views: FeatureViews | None = None) -> Classifier:
        """The head before training, for feature vectors (B, inputs); T takes ``views`` in place of noise."""
        layers: OrderedDict[str, nn.Module] = OrderedDict()
        if self.normalise:
            layers["normalise"] = nn.RMSNorm(inputs, eps=EPS, elementwise_affine=False)
        else:
            layers["normalise"] = nn.BatchNorm1d(inputs, affine=False)
        with seeded(self.seed):
            if self.width:
                layers |= {"hidden": nn.Linear(inputs, self.width), "relu": nn.ReLU()}
            layers["fc"] = nn.Linear(self.width or inputs, classes)
        network = nn.Sequential(layers)
        if not self.anchored:
            return Classifier(network)
        options: dict[str, Any] = {"every": self.every, "per_sample": self.per_sample, "seed": self.seed}
        options["corruption"] = views or (FeatureNoise(self.noise) if self.noise else None)
        return anchor(network, layer="hidden" if self.width else "fc", init=self.init, **options)

    def train(self, features: Features, views: Sequence[Features] = ()) -> Classifier:
        """A head trained on labelled features: an `kedge.Anchored` network of vectors, or a `kedge.Classifier`.

        Args:
            features: What `kedge.extract` gave for the training images.
            views: What it gave for augmented views of the same images in the same order. T then is the anchor's
                features in one of them, in place of noise.
        """
        if features.labels is None or bool((features.labels < 0).any()):
            raise InputError("features must have a label for each image to train on")
        classes = len(features.classes) or int(features.labels.max()) + 1
        x = features.features.float()
        if views and not self.anchored:
            raise InputError("views are for anchored=True, since T acts on anchors; got anchored=False")
        if any(view.network != features.network or len(view) != len(x) for view in views):
            raise InputError(f"views must be features of the same {len(x):,} images by the same network")
        drawn = FeatureViews(x, torch.stack([view.features.float() for view in views])) if views else None
        head = self._trained(x, features.labels, classes, drawn)
        head.record |= {
            "features": {"network": features.network, "head": features.head},
            "data": {"name": features.name, "images": len(features)},
        }
        if features.classes:
            head.record["classes"] = list(features.classes)
        return head

    def attach(self, net: Classifier, data: Any, *, preprocess: Preprocess | None = None) -> Classifier:
        """A copy of a network with a head trained on labelled images in place of its last linear layer.

        Args:
            net: A network that ends in a linear layer with the right number of classes; see `kedge.network`.
            data: Labelled images in any form that `kedge.data.batches` takes.
            preprocess: How images become inputs; by default what the network's record says.
        """
        preprocess = frozen.given_or_recorded(net, preprocess)
        started = time.monotonic()
        x, y, name = frozen.features_of(net, data, preprocess)
        layer = net.network.get_submodule(name)
        assert isinstance(layer, nn.Linear)
        head = self._trained(x, y, layer.out_features)
        head.record["features"] = {"network": checksum(net), "head": name}
        whole = self.join(head, net)
        whole.record |= frozen.record_of(data, preprocess, len(y), started)
        if isinstance(whole, Anchored):
            whole.set_anchors(choose(data, preprocess, DEFAULT_K, "random", self.seed, at_least=2))
        return whole

    @staticmethod
    def join(head: Classifier, net: Classifier) -> Classifier:
        """A copy of a network with a head in place of its last linear layer; an anchored one needs anchors then.

        Args:
            head: What `train` gave.
            net: The network that its features came from.
        """
        source = head.record.get("features")
        if source is None or source["network"] != checksum(net):
            raise InputError(
                "net must be the network that the head's features were extracted from, with the same weights"
            )
        network = copy.deepcopy(net.network)
        network.set_submodule(source["head"], copy.deepcopy(head.network))
        if hasattr(network, "spec"):
            network.spec = None  # type: ignore[assignment]  # a file keeps it as a graph
        whole = Classifier(network)
        if isinstance(head, Anchored):
            name = f"{source['head']}.{head.layer}"
            whole = Anchored(network, layer=name, must_be_first=False, options=head.options)
        if net.has_statistics:
            whole.set_statistics(net.mean, net.std)
        kept = {key: value for key, value in head.record.items() if key != "features"}
        whole.record = copy.deepcopy({**net.record, **kept})
        whole.outliers = None if net.outliers is None else net.outliers.clone()
        return whole.eval()

    def _trained(self, x: Tensor, y: Tensor, classes: int, views: FeatureViews | None = None) -> Classifier:
        frozen.check_classes(y, classes)
        started = time.monotonic()
        net = self.build(x.shape[1], classes, views).to(x.device).train()
        norm = net.network.get_submodule("normalise")
        if isinstance(norm, nn.BatchNorm1d):
            norm.running_var, norm.running_mean = torch.var_mean(x, dim=0, correction=0)
            norm.eval()
        with seeded(self.seed):
            frozen.descend(net, x, y, self.epochs)
        net.record = {
            "recipe": {**frozen.RECIPE, **asdict(self)},
            "epochs": self.epochs,
            "seed": self.seed,
            "seconds": round(time.monotonic() - started, 1),
            "made with": provenance(),
        }
        if isinstance(net, Anchored):
            net.set_anchors(choose(x, Preprocess((x.shape[1],)), DEFAULT_K, "random", self.seed, at_least=2))
        return net.eval()
