"""Anchored: a classifier that sees each image as [c, x - c]."""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kedge.anchoring import survey as layers
from kedge.anchoring.corruption import Corruption, Transform
from kedge.anchoring.options import AnchoringOptions, Draw
from kedge.anchoring.per_image import choose_per_image
from kedge.anchoring.stem import Capture, Captured, Fold, Pair, Stem
from kedge.anchoring.tta import CHOICES, view
from kedge.checks import at_least, finite, one_of, shape_of
from kedge.errors import ArchitectureError, InputError, NotReadyError
from kedge.models.classifier import Classifier, evaluating, logits_of
from kedge.models.features import read_features
from kedge.pixels import to_unit
from kedge.seeds import mix_seed, seeded
from kedge.threads import last_cache

UNKNOWN_CACHE = 32 * 2**20  # bytes, where the machine does not tell
CAPS = 8 * 2**20, 64 * 2**20  # bytes: with less the parts of a batch are too small for all cores, more gains nothing


class Anchored(Classifier):
    """A classifier on pairs [c, x - c]. Made by `anchor`.

    In training mode the anchors of a batch are its own images in another order. In evaluation mode the logits are the
    mean over the frozen anchors, so that it can stand wherever the original network stood.

    Attributes:
        anchors: The frozen anchors (K, D, ...) in [0, 1], or None before `set_anchors`.
        draw: What the last training batch drew.
        corrupting: Whether training corrupts anchors as its options say; off, they stay clean.
        memory_cap: Bytes that the activations of one pass may take; anchors are folded into the batch up to it. By
            default three quarters of the processor's last cache, since weights need room there too.
    """

    anchors: Tensor | None
    flexible_buffers = ("mean", "std", "outliers", "anchors")

    def __init__(
        self,
        network: nn.Module,
        *,
        layer: str,
        sole_reader: bool,
        mean: Any = None,
        std: Any = None,
        options: AnchoringOptions | None = None,
    ) -> None:
        super().__init__(network, mean=mean, std=std)
        self.layer = layer
        self.options = options or AnchoringOptions()
        self.register_buffer("anchors", None)
        self.anchors_version = 0  # counts changes of the anchors, so that a detector can tell that it must be refitted
        self.per_image: int | None = None
        self.draw: Draw | None = None
        self.batches_seen = 0
        self.corrupting = True
        self.memory_cap = min(max((last_cache() or UNKNOWN_CACHE) * 3 // 4, CAPS[0]), CAPS[1])
        self._must_be_sole_reader = sole_reader
        self._growth: float | None = None  # the largest activation over the size of the image, once surveyed
        self._cache: tuple[Tensor, Tensor, Tensor] | None = None  # anchors at the stem, weight, maps
        self._classes: int | None = None

    @property
    def stem(self) -> Stem:
        """The widened layer."""
        stem = self.network.get_submodule(self.layer)
        assert isinstance(stem, Stem)
        return stem

    @property
    def k(self) -> int:
        """Hypotheses of an image, 0 before `set_anchors`."""
        return (0 if self.anchors is None else len(self.anchors)) if self.per_image is None else self.per_image

    def set_anchors(self, images: Tensor, *, per_image: int | None = None) -> None:
        """Freeze the anchors of evaluation.

        Args:
            images: (K, D, ...), uint8 or in [0, 1], as images of the training set are.
            per_image: None: all images share all K anchors. A number: each image takes so many of them, chosen by its
                own pixels, so that its score does not depend on its batch.

        Example:
            >>> from kedge import anchor
            >>> net = anchor(nn.Sequential(nn.Flatten(), nn.Linear(12, 2)))
            >>> net.set_anchors(torch.rand(5, 3, 2, 2))
            >>> net.eval()(torch.rand(7, 3, 2, 2)).shape
            torch.Size([7, 2])
        """
        if not isinstance(images, Tensor) or images.ndim < 2 or len(images) < 1:
            raise InputError(f"anchors must be a tensor (K, D, ...) with at least one image, got {shape_of(images)}")
        images = self._in_unit_range(images)
        if not images.is_floating_point():
            raise InputError(f"anchors must be uint8 or floating point, got {images.dtype}")
        finite("anchors", images, "choose other training images")
        if per_image is not None and at_least("per_image", per_image, 2) > len(images):
            raise InputError(f"per_image must be at most the number of anchors, {len(images)}; got {per_image}")
        self.anchors = images.detach().clone().to(self.mean)
        self.per_image = per_image
        self.anchors_version += 1

    def forward(  # type: ignore[override]  # a pair has no raw output of its own
        self, x: Tensor, *, among: Tensor | None = None, first: int = 0
    ) -> Tensor:
        """Logits (B, C): under one drawn anchor each in training mode, the mean over the frozen anchors otherwise.

        Args:
            x: Images (B, D, ...).
            among: In training, the whole batch of which ``x`` are the rows from ``first`` on, when several processes
                share it: anchors are drawn from all of it, as one process would draw them. By default ``x``.
            first: See ``among``.
        """
        if self.training:
            return self._train_forward(x, x if among is None else among, first)
        return self.per_anchor_logits(x).mean(dim=0)

    def per_anchor_logits(
        self, x: Tensor, *, like: Tensor | None = None, tta: int = 1, which: Sequence[int] | None = None
    ) -> Tensor:
        """The logits under each anchor, (K, B, C). Runs in evaluation mode and puts the mode back.

        Args:
            x: Images (B, D, ...).
            like: Images to choose each image's own anchors by, where ``x`` is a perturbed version of them.
            tta: Augmented views that anchors are paired with in turn: 1 for the image itself, 2 for the mirrored image
                too, 6 for both shifted by a pixel as well. Fewer anchors take the first of them.
            which: The anchors to ask, by number; by default all.
        """
        return self.marginalise(x, (), like, which=which, tta=tta)[0]

    def features(
        self, x: Tensor, layers: Sequence[str] = (), *, like: Tensor | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The mean over anchors of the logits and of what the named layers give; see `Classifier.features`."""
        hypotheses, features = self.marginalise(x, layers, like)
        return hypotheses.mean(dim=0), features

    def marginalise(
        self,
        x: Tensor,
        layers: Sequence[str] = (),
        like: Tensor | None = None,
        *,
        which: Sequence[int] | None = None,
        tta: int = 1,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """All hypotheses (K, B, C), and the mean over anchors of the layers' outputs, in one pass for each anchor.

        ``which`` and ``tta`` are those of `per_anchor_logits`.
        """
        one_of("tta", tta, CHOICES)
        if self.anchors is None:
            raise NotReadyError(
                "the anchored network has no anchors to evaluate with: call set_anchors(images) with a few training "
                "images, or fit a detector, which draws them from the training set"
            )
        self._check_images(x)
        if x.shape[1:] != self.anchors.shape[1:]:
            raise InputError(
                f"x must have the shape of the anchors, (B, {', '.join(map(str, self.anchors.shape[1:]))}); "
                f"got {tuple(x.shape)}; for one image pass x[None]"
            )
        asked = list(range(self.k) if which is None else which)
        k = len(asked)
        with evaluating(self):
            self._survey(x)
            image_bytes = x[0].numel() * self.mean.element_size()
            row_bytes = 3 * math.ceil(image_bytes * (self._growth or 1.0))  # a layer's input, output and one more
            rows = max(1, self.memory_cap // row_bytes)
            maps = self.shared_maps()[asked] if self.per_image is None else None
            size = math.ceil(len(x) / math.ceil(len(x) / max(1, rows // k)))  # parts of one size
            chosen_by = (x if like is None else like).split(size)
            parts = [
                self._fold(
                    part,
                    maps if maps is not None else self._own_maps(by)[asked],
                    [number % tta for number in asked],
                    min(k, rows),
                    layers,
                )
                for part, by in zip(x.split(size), chosen_by, strict=True)
            ]
        if len(parts) == 1:
            return parts[0]
        features = {name: torch.cat([found[name] for _, found in parts]) for name in layers}
        return torch.cat([hypotheses for hypotheses, _ in parts], dim=1), features

    def targets(self, labels: Tensor) -> Tensor:
        """Class probabilities (B, C) to train the last batch towards: one-hot, or uniform for masked pairs.

        Example:
            >>> from kedge import anchor
            >>> net = anchor(nn.Sequential(nn.Flatten(), nn.Linear(12, 2)), mask=1.0, mask_target="uniform")
            >>> logits = net(torch.rand(3, 3, 2, 2))
            >>> net.targets(torch.tensor([0, 1, 1]))[0]
            tensor([0.5000, 0.5000])
        """
        if self.draw is None or self._classes is None:
            raise NotReadyError("targets belong to a training batch: call the network in training mode first")
        if labels.shape != self.draw.masked.shape:
            raise InputError(
                f"labels must be those of the last batch, ({len(self.draw.masked)},); got {tuple(labels.shape)}"
            )
        if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < self._classes:
            raise InputError(f"labels must lie in 0..{self._classes - 1}, got {int(labels.min())}..{int(labels.max())}")
        one_hot = F.one_hot(labels.long(), self._classes).to(self.mean.dtype)
        if self.options.mask_target == "label":
            return one_hot
        return torch.where(self.draw.masked.to(labels.device)[:, None], 1 / self._classes, one_hot)

    def _train_forward(self, x: Tensor, among: Tensor, first: int) -> Tensor:
        self._check_images(x)
        if first + len(x) > len(among) or among.shape[1:] != x.shape[1:]:
            raise InputError(f"among must hold x from row {first} on; x is {shape_of(x)} and among {shape_of(among)}")
        self._survey(x)
        self.batches_seen += 1
        seed = mix_seed(self.options.seed, self.batches_seen)
        generator = torch.Generator().manual_seed(seed)
        permutation = torch.randperm(len(among), generator=generator).to(x.device)
        masked = (torch.rand(len(among), generator=generator) < self.options.mask).to(x.device)
        per_sample = None
        if self.options.per_sample:
            per_sample = (torch.rand(len(among), generator=generator) < 1 / self.options.every).to(x.device)
        turn = bool(per_sample.any()) if per_sample is not None else self.batches_seen % self.options.every == 0
        corruption = self._corruption(x) if turn and self.corrupting else None
        rows = slice(first, first + len(x))
        self.draw = Draw(
            permutation[rows], corruption is not None, masked[rows], None if per_sample is None else per_sample[rows]
        )
        job = Pair(self.draw.permutation, masked=self.draw.masked if self.options.mask > 0 else None)
        if len(among) != len(x):
            job.clean = self._at_stem(self._in_unit_range(among[self.draw.permutation]))
        if corruption is not None:
            anchors = self._in_unit_range(among[permutation])
            chosen = anchors if per_sample is None else anchors[per_sample]
            with seeded(seed):
                corrupted = corruption(chosen)
            if shape_of(corrupted) != shape_of(chosen):
                raise InputError(f"corruption must keep the shape {shape_of(chosen)}, got {shape_of(corrupted)}")
            if per_sample is not None:
                corrupted = anchors.index_put((per_sample,), corrupted.to(anchors.dtype))
            job.corrupted = self._at_stem(corrupted[rows])
        with self.stem.doing(job):
            logits = logits_of(self.network(self.normalise(x)))
        self._classes = logits.shape[1]
        return logits

    def _corruption(self, x: Tensor) -> Transform | None:
        if isinstance(self.options.corruption, str):
            return Corruption() if x.ndim == 4 else None  # vectors and signals have no default corruption
        return self.options.corruption

    def _fold(
        self, x: Tensor, maps: Tensor, views: Sequence[int], group: int, layers: Sequence[str]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Hypotheses and mean features of a few images, their anchors folded into the batch in groups."""
        normalised = self.normalise(x)
        seen = {number: view(normalised, number) for number in set(views)}
        job = Fold(images=len(x), maps=maps, views=views)
        outputs, sums = [], dict.fromkeys(layers, torch.zeros((), dtype=self.mean.dtype, device=x.device))
        for first, part in zip(range(0, len(views), group), maps.split(group), strict=True):
            job.maps, job.views = part, views[first : first + group]
            with self.stem.doing(job):
                folded = torch.cat([seen[number] for number in job.views])  # networks may read B off their input
                output, found = read_features(self.network, folded, layers)
            outputs.append(logits_of(output).view(len(part), len(x), -1))  # (K, B, C)
            for name, value in found.items():
                if len(value) != len(folded):
                    raise InputError(f"layer {name!r} must give a row per image; it gives {shape_of(value)}")
                sums[name] = sums[name] + value.reshape(len(part), len(x), *value.shape[1:]).sum(dim=0)
        return torch.cat(outputs), {name: value / len(maps) for name, value in sums.items()}

    def shared_maps(self) -> Tensor:
        """The anchors' part of the stem, (K, 1, ...), from the cache while nothing that it depends on has changed."""
        assert self.anchors is not None
        weight, anchors = self.stem.weight, self._at_stem(self.anchors)
        if torch.is_grad_enabled() and (weight.requires_grad or anchors.requires_grad):
            return self.stem.anchor_maps(anchors)[:, None]
        anchors = anchors.to(weight.dtype)
        # Compared by value: a version counter misses edits through .data and of layers before the stem.
        if self._cache is None or not (_same(anchors, self._cache[0]) and _same(weight, self._cache[1])):
            # In full precision, so that maps made under autocast serve without it too; inference_mode(False) turns
            # gradients on again, and a cache must not hold a graph.
            full = torch.autocast(weight.device.type, enabled=False)
            with full, torch.inference_mode(False), torch.no_grad():
                kept = anchors.clone(), weight.detach().clone()
                self._cache = (*kept, self.stem.anchor_maps(kept[0])[:, None])
        return self._cache[2]

    def _own_maps(self, x: Tensor) -> Tensor:
        """The maps of each image's own choice of anchors, (K, B, ...)."""
        assert self.anchors is not None
        assert self.per_image is not None
        index = choose_per_image(x, len(self.anchors), self.per_image, self.options.seed)  # (K, B)
        used, inverse = index.to(self.anchors.device).unique(return_inverse=True)
        return self.stem.anchor_maps(self._at_stem(self.anchors[used]))[inverse]

    def _at_stem(self, images: Tensor) -> Tensor:
        """Images after normalisation and whatever layers precede the stem."""
        try:
            with self.stem.doing(Capture()):
                # A copy: layers before the stem may work in place, and the images are often the anchors themselves.
                self.network(self.normalise(images.to(self.mean, copy=True)))
        except Captured as captured:
            return captured.value
        raise ArchitectureError(f"the layer {self.layer!r} was not reached; pass layer= with another name")

    @torch.inference_mode(False)
    def _survey(self, x: Tensor) -> None:
        """At the first forward: is the stem the layer that reads the input, and how much memory does an image take?"""
        if self._growth is not None:
            return
        one = self._in_unit_range(x[:1].detach().clone())
        pair = Pair(torch.zeros(1, dtype=torch.long, device=x.device))

        def forward(image: Tensor) -> Any:
            with self.stem.doing(pair):
                return self.network(self.normalise(image))

        found = layers.survey(self.network, lambda: forward(one))
        layers.check_called_once(self.layer, found)
        if self._must_be_sole_reader:
            first = layers.first_called(self.network, found)
            if first != self.layer:
                raise ArchitectureError(
                    f"the layer {self.layer!r} was taken for the first because it is registered first, but {first!r} "
                    "reads the input before it; pass example= (a batch of images) or layer= to kedge.anchor"
                )
            layers.check_sole_reader(self.network, self.layer, found, one, forward)
        self._growth = found.row_bytes / (one.numel() * one.element_size())

    def _in_unit_range(self, images: Tensor) -> Tensor:
        return to_unit(images, self.mean.dtype) if images.dtype == torch.uint8 else images

    def _check_images(self, x: Tensor) -> None:
        if not isinstance(x, Tensor) or not (x.is_floating_point() or x.dtype == torch.uint8):
            raise InputError(f"x must be a uint8 or floating point tensor, got {getattr(x, 'dtype', type(x).__name__)}")
        if x.ndim < 2 or len(x) == 0:
            raise InputError(f"x must be (B, D, ...) with at least one image, got {tuple(x.shape)}")

    def get_extra_state(self) -> Tensor:
        """The number of training batches seen, on which the next draws depend, and the anchors taken per image."""
        return torch.tensor([self.batches_seen, self.per_image or 0])

    def set_extra_state(self, state: Tensor) -> None:
        """Go on from a saved state."""
        self.batches_seen, per_image = int(state[0]), int(state[1])
        self.per_image = per_image or None
        self.anchors_version += 1


def _same(a: Tensor, b: Tensor) -> bool:
    return a.device == b.device and a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
