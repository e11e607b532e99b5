"""Anchored: a classifier that sees each image as [c, x - c]."""

import math
import threading
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kedge.anchoring import inner, survey
from kedge.anchoring.corruption import FeatureNoise, corrupted_anchors
from kedge.anchoring.layer import AnchoredLayer, Call, Folded, Pairs, calling, check_affine
from kedge.anchoring.options import AnchoringOptions, Draw
from kedge.anchoring.sampling import choose_per_image
from kedge.anchoring.tta import CHOICES, view
from kedge.checks import at_least, finite, one_of, shape_of
from kedge.errors import ArchitectureError, FileFormatError, InputError, NotReadyError
from kedge.models.classifier import Classifier, evaluating, logits_of
from kedge.models.features import read_features
from kedge.threads import last_cache

DEFAULT_CACHE = 32 * 2**20  # bytes, if the size of the processor's cache is unknown
CAPS = 8 * 2**20, 64 * 2**20  # bytes: with less the parts of a batch are too small for all cores, more gains nothing
LEAST_ROWS = 32  # of a pass, unless the memory is capped: with fewer large images each costs more
_SURVEYING = threading.RLock()


class Anchored(Classifier):
    """A classifier on pairs [c, x - c], made by `anchor`; it can take the place of the original network.

    In training mode the anchors of a batch are its own images in another order. In evaluation mode the logits are the
    mean over the frozen anchors.

    Attributes:
        anchors: The frozen anchors (K, D, ...) in [0, 1], or None before `set_anchors`.
        draw: The random choices of the last training batch.
        corrupting: Whether training applies T to anchors; off, they stay clean.
        memory_cap: Bytes that the activations of one pass may take; anchors are folded into the batch up to it. None
            for half the processor's last cache, or 32 images if these take more: a pass of fewer costs more per image,
            so that K anchors would cost more than K passes of pairs.
        weights_fixed: Whether the anchors' part is kept without a look at the weights that it depends on.
    """

    anchors: Tensor | None
    flexible_buffers = ("mean", "std", "outliers", "anchors")

    shown = Classifier.shown | {"anchors", "k", "options", "set_anchors", "per_anchor_logits", "targets"}

    def __init__(
        self,
        network: nn.Module,
        *,
        layer: str,
        must_be_first: bool,
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
        self.memory_cap: int | None = None
        self._room = min(max((last_cache() or DEFAULT_CACHE) // 2, CAPS[0]), CAPS[1])  # bytes, without a cap
        self.weights_fixed = False
        self._must_be_first = must_be_first
        self._growth: float | None = None  # the largest activation over the size of the image, once surveyed
        self._by_vmap = False  # for one inside the network, whether that takes vmap
        self._behind: float | None = None  # the share of operations behind an inner layer, if what is before runs once
        self._before: tuple[str, ...] = ()  # the layers called before the anchored one
        self._in_turn = False  # whether applying them in turn is all that happens before it
        self._cache: tuple[list[Tensor], Tensor] | None = None  # anchors and weights of the layer, and its maps
        self._classes: int | None = None

    @property
    def anchored_layer(self) -> AnchoredLayer:
        """The pair of layers that takes [c, x - c]."""
        layer = self.network.get_submodule(self.layer)
        assert isinstance(layer, AnchoredLayer)
        return layer

    @property
    def k(self) -> int:
        """Anchors per image, 0 before `set_anchors`."""
        return (0 if self.anchors is None else len(self.anchors)) if self.per_image is None else self.per_image

    @property
    def runs_once(self) -> bool:
        """Whether layers with weights come before the anchored one and run once per image; known after `check`."""
        return self._behind is not None

    @property
    def passes(self) -> float:
        """Forward passes through the network for each image: K, for an anchored layer that reads it.

        Where other layers come before the anchored one, they run once, and only the operations behind it count K times.
        """
        if self.anchors is None:
            return super().passes
        self.check(self.anchors)
        return self.k if self._behind is None else round(1 + (self.k - 1) * self._behind, 3)

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
        if not images.is_floating_point() and images.dtype != torch.uint8:
            raise InputError(f"anchors must be uint8 or floating point, got {images.dtype}")
        images = self.as_input(images)
        finite("anchors", images, "choose other training images")
        if per_image is not None and at_least("per_image", per_image, 2) > len(images):
            raise InputError(f"per_image must be at most the number of anchors, {len(images)}; got {per_image}")
        self.anchors = images.detach().clone()
        self._cache = None
        self.per_image = per_image
        self.anchors_version += 1

    def fix_weights(self) -> None:
        """Keep the anchors' part from now on without a look at the weights, which must not change any more."""
        self._cache, self.weights_fixed = None, True

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
            which: The anchors to use, by number; by default all.
        """
        return self.marginalise(x, (), like, which=which, tta=tta)[0]

    def features(
        self, x: Tensor, layers: Sequence[str] = (), *, like: Tensor | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The mean over anchors of the logits and of what the named layers give; see `Classifier.features`."""
        per_anchor, features = self.marginalise(x, layers, like)
        return per_anchor.mean(dim=0), features

    def read(self, x: Tensor, layers: Sequence[str] = ()) -> tuple[Tensor, Tensor | None, dict[str, Tensor]]:
        """See `Classifier.read`."""
        per_anchor, features = self.marginalise(x, layers)
        return per_anchor.mean(dim=0), per_anchor, features

    def marginalise(
        self, x: Tensor, layers: Sequence[str] = (), like: Tensor | None = None, *, which: Any = None, tta: int = 1
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Per-anchor logits (K, B, C) and the mean over anchors of the layers' outputs; see `per_anchor_logits`."""
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
        numbers = list(range(self.k) if which is None else which)
        if not numbers or not 0 <= min(numbers) <= max(numbers) < self.k:
            raise InputError(f"which must hold numbers of anchors, 0 to {self.k - 1}; got {numbers}")
        k, views, parts = len(numbers), [number % tta for number in numbers], []
        with evaluating(self):
            self.check(x)
            size, group = self._split(x, k)
            shared = self.shared_maps() if self.per_image is None else None
            for part, chosen_by in zip(x.split(size), (x if like is None else like).split(size), strict=True):
                maps = self._own_maps(chosen_by) if shared is None else shared
                normalised = self.normalise(part)
                augmented = {number: view(normalised, number) if number else normalised for number in set(views)}
                if self._behind is None:
                    parts.append(self._fold(augmented, maps[numbers], views, group, layers))
                else:
                    of_all = maps[numbers], views, layers
                    parts.append(inner.per_anchor(self.network, augmented, *of_all, by_vmap=self._by_vmap))
        features = {name: torch.cat([values[name] for _, values in parts]) for name in layers}
        return torch.cat([logits for logits, _ in parts], dim=1), features

    def targets(self, labels: Tensor) -> Tensor:
        """Class probabilities (B, C) to train the last batch towards: one-hot, or uniform for masked pairs."""
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
        self.check(x)
        self.batches_seen += 1
        seed, rows = self.options.seed_of(self.batches_seen), slice(first, first + len(x))
        whole = self.options.draw(self.batches_seen, len(among), x.device)
        corruption = self.options.transform(x.ndim) if whole.corrupted and self.corrupting else None
        self.draw = replace(whole.of(rows), corrupted=corruption is not None)
        normalised, anchors = self.normalise(x), among[whole.permutation]
        call = Pairs(self.draw.permutation, masked=self.draw.masked if self.options.mask > 0 else None)
        if len(among) != len(x):
            call.clean = self._at_layer(anchors[rows], normalised)
        if isinstance(corruption, FeatureNoise):
            chosen = self.draw.per_sample
            call.corrupt = partial(corrupted_anchors, corruption, seed=seed, chosen=chosen, all_together=True)
        elif corruption is not None:
            anchors = self.as_input(anchors) if anchors.dtype == torch.uint8 else anchors
            corrupted = corrupted_anchors(corruption, anchors, seed=seed, chosen=whole.per_sample)
            call.corrupted = self._at_layer(corrupted[rows], normalised)
        with calling(call):
            logits = logits_of(self.network(normalised))
        self._classes = logits.shape[1]
        return logits

    def _split(self, x: Tensor, k: int) -> tuple[int, int]:
        """The number of images of each part of a batch, and the number of anchors folded into a pass over them."""
        image_bytes = x[0].numel() * self.mean.element_size()
        row_bytes = 3 * math.ceil(image_bytes * (self._growth or 1.0))  # a layer's input, output and one more
        cap = self.memory_cap
        rows = max(self._room // row_bytes, LEAST_ROWS) if cap is None else max(1, cap // row_bytes)
        images = rows if self._behind is None else max(1, rows // k)  # all anchors at once behind an inner layer
        parts = max(1, round(len(x) / images)) if cap is None else math.ceil(len(x) / images)
        size = math.ceil(len(x) / parts)  # parts and groups of one size
        return size, math.ceil(k / math.ceil(k / max(1, rows // size)))

    def _fold(
        self, augmented: dict[int, Tensor], maps: Tensor, views: Sequence[int], group: int, layers: Sequence[str]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Per-anchor logits and mean features of a few images, their anchors folded into the batch in groups."""
        count = len(augmented[views[0]])
        call = Folded(images=count, maps=maps, views=views)
        outputs, sums = [], dict.fromkeys(layers, torch.zeros((), dtype=maps.dtype, device=maps.device))
        for first, part in zip(range(0, len(views), group), maps.split(group), strict=True):
            call.maps, call.views = part, views[first : first + group]
            with calling(call):
                folded = torch.cat([augmented[number] for number in call.views])  # networks may read B off their input
                output, features = read_features(self.network, folded, layers) if layers else (self.network(folded), {})
            outputs.append(logits_of(output).view(len(part), count, -1))  # (K, B, C)
            for name, value in features.items():
                if len(value) != len(folded):
                    raise InputError(f"layer {name!r} must give a row per image; it gives {shape_of(value)}")
                sums[name] = sums[name] + value.reshape(len(part), count, *value.shape[1:]).sum(dim=0)
        return torch.cat(outputs), {name: value / len(maps) for name, value in sums.items()}

    def shared_maps(self) -> Tensor:
        """The anchors' part of the anchored layer, (K, 1, ...), from the cache while nothing it depends on changed."""
        assert self.anchors is not None
        self.check(self.anchors)
        if self.weights_fixed and self._cache is not None:
            return self._cache[1]
        layer, before, hooked = self.anchored_layer, *self._layers_before()
        state = [*layer.parameters(), *layer.buffers()]
        run_once = self._behind is not None  # many layers come before it, which is too much to do for every batch
        weights = [tensor for each in before for tensor in (*each.parameters(), *each.buffers())] if run_once else []
        anchors = None if run_once else self._at_layer(self.anchors)
        needed = [*state, *weights] if anchors is None else [anchors, *state]
        if (hooked and run_once) or (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in needed)):
            return layer.anchor_maps(self._at_layer(self.anchors))[:, None]
        # Compared by value: a version counter misses edits through .data and of the layers before.
        if anchors is None:
            state = [self.anchors, self.mean, self.std, inner.fingerprint(weights), *state]
        else:
            state = [anchors.to(self.mean.dtype), *state]
        if self._cache is None or not _same(state, self._cache[0]):
            # In full precision, so that maps made under autocast serve without it too; inference_mode(False) turns
            # gradients on again, and a cache must not hold a graph.
            full = torch.autocast(self.mean.device.type, enabled=False)
            with full, torch.inference_mode(False), torch.no_grad():
                kept = [tensor.detach().clone() for tensor in state]
                reached = kept[0] if anchors is not None else self._at_layer(kept[0]).clone()
                self._cache = kept, layer.anchor_maps(reached)[:, None]
        return self._cache[1]

    def _layers_before(self) -> tuple[list[nn.Module], bool]:
        """The layers called before the anchored one, and whether any has hooks, which may change what it gives."""
        layers = [self.network.get_submodule(name) for name in self._before]
        return layers, any(layer._forward_hooks or layer._forward_pre_hooks for layer in layers)

    def _own_maps(self, x: Tensor) -> Tensor:
        """The maps of each image's own anchors, (K, B, ...)."""
        assert self.anchors is not None
        assert self.per_image is not None
        index = choose_per_image(x, len(self.anchors), self.per_image, self.options.seed)  # (K, B)
        used, inverse = index.to(self.anchors.device).unique(return_inverse=True)
        return self.anchored_layer.anchor_maps(self._at_layer(self.anchors[used]))[inverse]

    def _at_layer(self, anchors: Tensor, batch: Tensor | None = None) -> Tensor:
        """Anchors as they reach the anchored layer; see `survey.through` for ``batch``, normalised training images."""
        anchors = self.normalise(self.as_input(anchors))
        layers, hooked = self._layers_before()
        if self._in_turn and not hooked:
            return survey.through(layers, anchors, batch)
        # It takes more than calling layers in turn: run the network, in evaluation mode so that no statistics change.
        call = Call()
        with evaluating(self.network), calling(call):
            self.network(anchors)
        if call.reached is None:
            raise ArchitectureError(
                f"the layer {self.layer!r} is called in training alone, as those of a torch.nn.TransformerEncoder are, "
                "whose fast path reads their weights; pass layer= with the name of another, or call "
                "torch.backends.mha.set_fastpath_enabled(False) before"
            )
        return call.reached

    @torch.inference_mode(False)
    def check(self, x: Tensor) -> None:
        """Raise if the layer cannot be anchored for images like these; the first forward pass does it otherwise."""
        if self._growth is None:
            with _SURVEYING:  # it changes the network for a while
                self._survey(x)

    def _survey(self, x: Tensor) -> None:
        if self._growth is not None:  # another thread was first
            return
        one = x[:1].detach().clone()
        one = self.as_input(one) if one.dtype == torch.uint8 else one
        call = Pairs(torch.zeros(1, dtype=torch.long, device=x.device))

        def forward(image: Tensor) -> Any:
            with calling(call):
                return self.network(self.normalise(image))

        result = survey.survey(self.network, lambda: forward(one))
        survey.check_called_once(self.layer, result)
        assert call.reached is not None
        check_affine(self.anchored_layer.layer_x, f"the layer {self.layer!r}", call.reached)
        self._before = tuple(result.before(self.layer))
        self._in_turn = survey.in_turn(self.network, self._before, self.normalise(one), call.reached)
        if self._must_be_first:
            survey.check_first(self.network, self.layer, result, one, forward)
        if survey.has_weights_before(self.network, self.layer, result):
            with evaluating(self.network):
                output = self.anchored_layer.layer_x(call.reached)
                for self._by_vmap in (False, True):
                    if inner.runs_once(self.network, self.normalise(one), output.detach(), by_vmap=self._by_vmap):
                        self._behind = result.share_behind(self.layer)
                        break
        row_bytes = result.row_bytes(result.calls[0] if self._behind is None else self.layer)
        self._growth = row_bytes / (one.numel() * one.element_size())

    def _check_images(self, x: Tensor) -> None:
        if not isinstance(x, Tensor) or not (x.is_floating_point() or x.dtype == torch.uint8):
            raise InputError(f"x must be a uint8 or floating point tensor, got {getattr(x, 'dtype', type(x).__name__)}")
        if x.ndim < 2 or len(x) == 0:
            raise InputError(f"x must be (B, D, ...) with at least one image, got {tuple(x.shape)}")

    def get_extra_state(self) -> Tensor:
        """The number of training batches seen, on which the next draws depend, and the anchors taken per image."""
        return torch.tensor([self.batches_seen, self.per_image or 0])

    def set_extra_state(self, state: Tensor) -> None:
        """Continue from a saved state."""
        seen, per_image = state.tolist() if state.shape == (2,) and not state.is_floating_point() else (-1, 0)
        pool = 0 if self.anchors is None else len(finite("anchors", self.anchors, "the file is damaged"))
        if seen < 0 or per_image not in (0, *range(2, pool + 1)):
            expected = f"a number of batches and one of anchors per image, 0 or 2 to {pool}"
            raise FileFormatError(f"the state of an anchored network must be {expected}; got {state.tolist()}")
        self.batches_seen, self.per_image = seen, per_image or None
        self.anchors_version += 1


def _same(state: Sequence[Tensor], kept: Sequence[Tensor]) -> bool:
    return len(state) == len(kept) and all(
        a.device == b.device and a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
        for a, b in zip(state, kept, strict=True)
    )
