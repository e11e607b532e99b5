"""`tune`: options chosen without OOD images, on classes that are held out or on synthetic outliers."""

import copy
import itertools
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import fmean
from typing import Any

import torch
from torch import Generator, Tensor, nn

from kedge.anchoring import DEFAULT_K, Anchored
from kedge.anchoring.sampling import choose
from kedge.checks import one_of
from kedge.data import ImageSet, Preprocess, gather
from kedge.data.batches import preprocess_for
from kedge.data.features import Features
from kedge.data.imageset import Splittable
from kedge.data.labels import renumbered
from kedge.data.leakage import fingerprints
from kedge.detectors.base import Detector
from kedge.detectors.extraction import extract
from kedge.detectors.registry import make
from kedge.errors import InputError, KedgeError, KedgeWarning
from kedge.io.tuned import WAYS, Tuned
from kedge.metrics import auroc
from kedge.models.classifier import Classifier, as_classifier, checksum
from kedge.models.head import find_head
from kedge.pixels import to_unit
from kedge.progress import progress_bar
from kedge.training.synthetic_outliers import hybrid, patch_shuffle, phase_randomization

TRAINING, JUDGED = 20_000, 1_000  # images to learn from, and of each kind to judge by, at most
ROUNDS = 3  # parts of the classes, each held out in turn
MAKERS = (patch_shuffle, phase_randomization, hybrid)


def tune(
    method: str,
    net: nn.Module,
    train_set: Any,
    held_out: Any,
    *,
    by: Any = "classes",
    seed: int = 0,
    preprocess: Preprocess | None = None,
    **options: Any,
) -> Detector:
    """A detector, before `fit`, with the options that separate best what stands for unknown images from known ones.

    The combinations of `Detector.grid` are compared by AUROC, on in-distribution images alone:

    - ``by="classes"``: a third of the classes is held out in turn. The method learns from training images of the
      others, and held-out images of the others are to be told from those of the third. The last layer loses the rows
      of the classes that are held out, so that no logit names them; the features still come from a network that was
      trained on them.
    - ``by="synthetic"``: held-out images are to be told from training images whose patches are shuffled, whose phases
      are random, or that have the high frequencies of another image.

    With OOD images as ``by`` the options are chosen on those; tables mark such a detector with a star, and
    `kedge.evaluate` refuses test sets that hold any of them. ``detector.tuned`` records the choice, also in its file.
    `Detector.calibrate` refuses the held-out images of the choice, since the threshold must be set on others.

    Args:
        method: Name of a detector, as in docs/methods.md.
        net: The network.
        train_set: Labelled training images, or their `Features`.
        held_out: Labelled in-distribution images that the network was not trained on, or their `Features`.
        by: ``"classes"``, ``"synthetic"``, or OOD images.
        seed: Random seed of the samples and of the classes that are held out.
        preprocess: As in `Detector.fit`.
        **options: Options of the detector that are not to be chosen.

    Example:
        >>> from kedge import Classifier, ImageSet
        >>> images = ImageSet(torch.randint(0, 256, (180, 3, 4, 4), dtype=torch.uint8), torch.arange(180) % 3)
        >>> layers = nn.Flatten(), nn.Linear(48, 8), nn.ReLU(), nn.Linear(8, 3)
        >>> net = Classifier(nn.Sequential(*layers), mean=0.5, std=0.3)
        >>> tune("knn", net, *images.split(0.5)).tuned.tried
        6
    """
    tuner = Tuner(net, train_set, held_out, by=by, seed=seed, preprocess=preprocess)
    detector = tuner.detector(method, **options)
    if detector.tuned is None:
        raise InputError(
            f"method must have options to choose; {method!r} has none{' left' * bool(options)}: build it as it is"
        )
    return detector


@dataclass(frozen=True)
class Round:
    """A network, what a method learns from, and the images that it is to tell apart."""

    net: Classifier
    train: Any
    inside: Any
    outside: Any


class Tuner:
    """Chooses options of any number of methods for one network; what they share is computed once.

    Args:
        net: See `tune`.
        train_set: See `tune`.
        held_out: See `tune`.
        by: See `tune`.
        seed: See `tune`.
        preprocess: See `tune`.
        images: Training images to make synthetic outliers of, where ``train_set`` are `Features`.
    """

    def __init__(
        self,
        net: nn.Module,
        train_set: Any,
        held_out: Any,
        *,
        by: Any = "classes",
        seed: int = 0,
        preprocess: Preprocess | None = None,
        images: Any = None,
    ) -> None:
        self.net, self.seed, self.by = as_classifier(net), seed, by
        if isinstance(by, str):
            one_of("by", by, tuple(WAYS))
        self.preprocess = preprocess_for(train_set, self.net.record, preprocess)
        for module in self.net.modules():
            if isinstance(module, Anchored) and module.anchors is None:
                module.set_anchors(choose(train_set, self.preprocess, DEFAULT_K, "random", seed=0))
        self.train = self._sample(train_set, TRAINING)
        self.inside = self._sample(held_out, JUDGED)
        if not isinstance(by, str):
            self.outside = self._sample(by, JUDGED)
        elif by == "synthetic":
            self.outside = self._synthetic(self.train if images is None else images)

    def detector(self, method: str, **options: Any) -> Detector:
        """A detector before `fit`, with options chosen and recorded as ``tuned``, if there are any to choose."""
        detector = make(method, self.net, **options)
        combinations = list(candidates(detector, options))
        if len(combinations) < 2:
            return detector
        fixed = {name: value for name, value in options.items() if name != "head" or not detector.takes_features}
        values: list[tuple[float, dict[str, Any]]] = []
        error: KedgeError | None = None
        with warnings.catch_warnings(), progress_bar(f"tuning {method}", len(combinations)) as update:
            warnings.simplefilter("ignore", KedgeWarning)
            rounds = self._of_features if detector.takes_features else self._of_images
            for done, candidate in enumerate(combinations, 1):
                try:
                    values.append((self._auroc(method, fixed | candidate, rounds), candidate))
                except KedgeError as reason:  # such as more neighbours than images
                    error = error or reason
                update(done)
        if not values:
            assert error is not None
            raise error
        best, chosen = max(values, key=lambda each: each[0])  # the first of equal ones
        default = next((value for value, candidate in values if not candidate), None)
        detector = make(method, self.net, **options, **chosen)
        by = self.by if isinstance(self.by, str) else str(self.outside.name)
        detector.tuned = Tuned(chosen, by, best, default, len(values), self.seed, *self._prints)
        return detector

    def _auroc(self, method: str, options: Mapping[str, Any], rounds: Sequence[Round]) -> float:
        """The mean AUROC over rounds."""
        values = []
        for each in rounds:
            detector = make(method, each.net, **options).fit(each.train, preprocess=self.preprocess)
            inside = each.inside
            if detector.learns_held_out:
                first, inside = inside.split(0.5, seed=self.seed)
                detector.calibrate(first)
            values.append(auroc(detector.score(inside), detector.score(each.outside)))
        return fmean(values)

    @cached_property
    def _of_features(self) -> list[Round]:
        """Rounds of features that are extracted once, on networks that are the last layer alone."""
        sets = [s if isinstance(s, Features) else extract(self.net, s, preprocess=self.preprocess) for s in self._sets]
        head, rounds = sets[0].head, []
        for kept, *masks in self._splits(sets[0].logits.shape[1]):
            layer = with_rows(self.net.network.get_submodule(head), kept)
            net = Classifier(nn.Sequential(nn.Identity(), layer)).to(self.net.mean.device).eval()
            parts = [restricted(s, mask, kept) for s, mask in zip(sets, masks, strict=True)]
            network = checksum(net)
            rounds.append(Round(net, *(replace(part, network=network, head="1") for part in parts)))
        return rounds

    @cached_property
    def _of_images(self) -> list[Round]:
        """Rounds of images, on networks that share all weights but those of the last layer."""
        if self.by != "classes":
            return [Round(self.net, *self._sets)]
        example = self.net.as_input(choose(self.train, self.preprocess, 2, "random", seed=0, at_least=1))
        head = find_head(self.net, example)
        layer = self.net.network.get_submodule(head)
        shared = (*self.net.parameters(), *self.net.buffers())
        rounds = []
        for kept, *masks in self._splits(int(layer.out_features)):  # type: ignore[arg-type]
            net = copy.deepcopy(self.net, {id(tensor): tensor for tensor in shared})
            net.network.set_submodule(head, with_rows(layer, kept))
            rounds.append(Round(net, *(restricted(s, mask, kept) for s, mask in zip(self._sets, masks, strict=True))))
        return rounds

    @property
    def _sets(self) -> tuple[Any, Any, Any]:
        return self.train, self.inside, self.inside if self.by == "classes" else self.outside

    def _splits(self, outputs: int) -> Iterator[tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]]:
        """For each round the outputs to keep, and masks: which images to learn from and to tell apart. None for all."""
        if self.by != "classes":
            yield None, None, None, None
            return
        train, inside = self.train, self.inside
        if train.labels is None or inside.labels is None:
            raise InputError('by="classes" needs labels in train_set and held_out; add them, or pass by="synthetic"')
        judged = renumbered(inside.labels, inside.classes, train.classes)
        shown = train.labels.unique()
        shown = shown[(shown >= 0) & torch.isin(shown, judged)]
        if len(shown) < 3:
            raise InputError(
                f'by="classes" needs at least three classes with held-out images, got {len(shown)}: pass more images, '
                'or by="synthetic"'
            )
        own = len(train.classes) in (0, outputs) and int(train.labels.max()) < outputs
        order = shown[torch.randperm(len(shown), generator=Generator().manual_seed(self.seed))]
        for part in order.tensor_split(ROUNDS):
            kept = torch.arange(outputs)[~torch.isin(torch.arange(outputs), part)] if own else None
            left = torch.isin(judged, part)
            yield kept, ~torch.isin(train.labels, part), (judged >= 0) & ~left, left

    def _sample(self, images: Any, most: int) -> Any:
        """At most so many images of a set."""
        if not isinstance(images, Splittable):
            images = gather(images, self.preprocess)
        order = torch.randperm(len(images), generator=Generator().manual_seed(self.seed))
        return images.subset(order[:most].sort().values) if len(images) > most else images

    def _synthetic(self, images: Any) -> ImageSet:
        """Outliers made of training images."""
        if isinstance(images, Features):
            raise InputError('by="synthetic" needs images to make outliers of; pass images= beside the Features')
        if len(self.preprocess.shape) != 3:
            raise InputError(f'by="synthetic" needs images (D, H, W); got inputs {self.preprocess.shape}')
        count = 2 * len(MAKERS)  # a hybrid takes two images
        x = to_unit(choose(images, self.preprocess, JUDGED, "random", self.seed, at_least=count), torch.float32)
        generator = Generator().manual_seed(self.seed)
        made = [maker(part, generator) for maker, part in zip(MAKERS, x.tensor_split(len(MAKERS)), strict=True)]
        return ImageSet((torch.cat(made) * 255).round().to(torch.uint8), name="synthetic outliers")

    @cached_property
    def _prints(self) -> tuple[Tensor, Tensor]:
        """Fingerprints of the held-out images and of the OOD images that were given, as the network takes them."""
        sets = [self.inside, *([] if isinstance(self.by, str) else [self.outside])]
        prints = [
            s.prints if isinstance(s, Features) else fingerprints(gather(s, self.preprocess).images) for s in sets
        ]
        return prints[0], prints[1] if len(prints) > 1 else torch.empty(0, 16, dtype=torch.uint8)


def candidates(detector: Detector, given: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The default options, which are none, and the combinations of the grid without those that are given."""
    grid: Mapping[str, Sequence[Any]] = {name: values for name, values in detector.grid.items() if name not in given}
    config = detector.config()
    yield {}
    for values in itertools.product(*grid.values()):
        if differing := {name: value for name, value in zip(grid, values, strict=True) if config[name] != value}:
            yield differing


def with_rows(layer: nn.Module, rows: Tensor | None) -> nn.Linear:
    """A copy of a linear layer with some of its outputs, or all."""
    result = copy.deepcopy(layer)
    assert isinstance(result, nn.Linear)
    if rows is not None:
        result.weight = nn.Parameter(result.weight.detach()[rows])
        result.bias = None if result.bias is None else nn.Parameter(result.bias.detach()[rows])
        result.out_features = len(rows)
    return result


def restricted(images: Any, mask: Tensor | None, kept: Tensor | None) -> Any:
    """The images where a mask is true, with labels and logits of the outputs that are kept."""
    if mask is None:
        return images
    part = images.subset(mask)
    if kept is None:
        return part
    places = torch.full((max(int(kept.max()), int(part.labels.max())) + 2,), -1)
    places[kept] = torch.arange(len(kept))
    logits = {"logits": part.logits[:, kept]} if isinstance(part, Features) else {}
    return replace(part, labels=places[part.labels], classes=(), **logits)
