"""Combined: one score of several detectors on one network."""

import copy
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import repeat
from typing import Any, ClassVar, Self, TypedDict

import torch
from torch import Tensor, nn

from kedge.calibration import to_learn_from
from kedge.checks import one_of
from kedge.data import Features, Preprocess
from kedge.data.labels import renumbered
from kedge.data.leakage import halves, smallest_prints
from kedge.detectors.base import Cost, Detector, HeldOut, Outputs
from kedge.detectors.features import FeatureDetector
from kedge.detectors.reading import outputs_of
from kedge.detectors.registry import named_methods, register
from kedge.detectors.rules import RULES, STANDARDS
from kedge.detectors.shared import fit_together, shared_reading
from kedge.detectors.training_images import refuse_training_images
from kedge.errors import InputError, NotReadyError
from kedge.io import artifact
from kedge.io.schema import arguments
from kedge.models.classifier import Classifier, evaluating
from kedge.training.synthetic_outliers import synthetic_outliers

DEFAULT: Mapping[str, Any] = {"parts": ("mds++", "gen"), "rule": "sum"}  # what `kedge.protect` does
MOST_PARTS = 8
SHARE, LEAST = 0.2, 20  # of the held-out images that the standardisation is learned from


class Part(TypedDict):
    """A detector in a file: its name and its arguments."""

    name: str
    config: dict[str, Any]


@register
class Combined(Detector):
    """Several detectors on one network as one: each score is standardised, and a rule makes one score of them.

    No single method suits every task: distances in feature space miss new classes that resemble known ones, and scores
    of the logits miss images that are unlike anything seen. Combined needs no OOD images to choose between them. Use it
    where you do not know what will come, near or far. What the parts read is computed in one forward pass where they
    can share it.

    `calibrate` learns the standardisation from some of the held-out images, a fifth and at least 20 where there are
    enough, and sets the threshold on the others. So the threshold holds for fresh images whatever was learned.

    | rule | score | of |
    |---|---|---|
    | ``"sum"`` | ``sum_j max(z_j, -2)`` | z-scores |
    | ``"mahalanobis"`` | the distance to the nearest point none of whose scores is raised, with their correlation | \
z-scores |
    | ``"learned"`` | ``sum_j w_j z_j``, with weights from a logistic regression against synthetic outliers | z-scores |
    | ``"fisher"`` | ``-2 sum_j log p_j`` | p-values |
    | ``"max"`` | the smallest p-value, with Sidak's correction | p-values |
    | ``"stouffer"`` | the sum of normal scores | p-values |
    | ``"copula"`` | as mahalanobis, of normal scores: a Gaussian copula | p-values |

    P-values have exponential tails, so that scores beyond all held-out ones are still ordered; see
    `kedge.detectors.rules`. Labels and probabilities are those of the first part.

    Args:
        detectors: Detectors on one network, fitted or not; or a network, for ``parts``.
        parts: For a network: names of methods, ``"mds++"`` and ``"gen"`` by default.
        rule: See above.
        standardise: How z-scores are made: ``"moments"``, by mean and deviation, or ``"quantiles"``, by median and
            quartiles.

    Example:
        >>> from kedge import GEN, KNN
        >>> net = nn.Sequential(nn.Flatten(), nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> detector = Combined([KNN(net, k=3), GEN(net)]).fit(torch.rand(20, 3, 2, 2))
        >>> detector.calibrate(torch.rand(60, 3, 2, 2))(torch.rand(4, 3, 2, 2)).is_ood.shape
        torch.Size([4])
    """

    name = "combined"
    learns_held_out = True
    variants: ClassVar[Mapping[str, Mapping[str, Any]]] = {"default": DEFAULT}

    def __init__(
        self,
        detectors: Sequence[Detector] | nn.Module,
        *,
        parts: Sequence[str | Part] | None = None,
        rule: str = "sum",
        standardise: str = "moments",
    ) -> None:
        if isinstance(detectors, nn.Module):
            super().__init__(detectors)
            given = DEFAULT["parts"] if parts is None else parts
            built = [self._built(part, f"parts[{i}]") for i, part in enumerate(given)]
            self._names = [part if isinstance(part, str) else part["name"] for part in given]
        else:
            built = _on_one_network(detectors, parts)
            super().__init__(built[0].net)
            self._names = [part.name for part in built]
        self.parts = [copy.copy(part) for part in built]
        if not 2 <= len(self.parts) <= MOST_PARTS:
            raise InputError(f"detectors must be 2 to {MOST_PARTS}; got {len(self.parts)}")
        self.rule = one_of("rule", rule, tuple(RULES))
        self.standardise = one_of("standardise", standardise, tuple(STANDARDS))
        self.standard: dict[str, Tensor] = {}  # what `calibrate` learned, see `Rule`
        self._raw = False  # whether outputs are the scores of the parts as they are
        for part in self.parts:
            part.net = self.net
        self.has_tau = any(part.has_tau for part in self.parts)
        self.changes_network = any(part.changes_network for part in self.parts)
        self.reads = self._reads()
        self._adopt(built)

    @property
    def takes_features(self) -> bool:
        """Whether all parts do; `calibrate` needs images all the same if the rule makes outliers of them."""
        return all(part.takes_features for part in self.parts)

    @property
    def cost(self) -> Cost:
        """One pass for all parts that can share it, and those of the others."""
        own = [part.cost for part in self.parts if shared_reading(part) is None]
        shared = self.net.passes if len(own) < len(self.parts) else 0
        return Cost(shared + sum(each.forward for each in own), sum(each.backward for each in own))

    @property
    def outliers(self) -> Tensor | None:
        """Fingerprints of the outliers that the network or a part learned from, or None."""
        seen = [each for each in (part.outliers for part in self.parts) if each is not None]
        return torch.cat(seen).unique(dim=0) if seen else None

    def fit_method(self, train_set: Any, preprocess: Preprocess) -> None:
        """Let each part learn from the training images; those that read last features do so in one pass."""
        self.standard = {}
        anchoring = [part for part in self.parts if part.reads == "per_anchor_logits"]
        versions = set()
        for part in anchoring:  # they may set anchors, which all others then use
            part.fit_method(train_set, preprocess)
            versions.add(self._anchors_version)
        if len(versions) > 1:
            raise InputError("detectors must share the anchors of their network; two of them draw anchors of their own")
        super().fit_method(train_set, preprocess)
        fit_together(self, [part for part in self.parts if part not in anchoring], train_set, preprocess)
        for part in self.parts:
            part.preprocess = preprocess

    def outputs(self, x: Tensor) -> Outputs:
        """The outputs of all parts for one pass, combined."""
        logits, per_anchor = None, None
        features: dict[str, Tensor] = {}
        if any(map(shared_reading, self.parts)):
            logits, per_anchor, features = self.net.read(x, self.layers)
        return self._combined([self._of_shared(part, x, logits, per_anchor, *features.values()) for part in self.parts])

    def of_extracted(self, features: Features, size: int) -> Iterator[Outputs]:
        """The outputs of all parts for extracted features, combined."""
        device = self.net.mean.device
        anchors = any(shared_reading(part) == "anchors" for part in self.parts)
        per_anchor = features.anchor_batches(size, device) if anchors else repeat(None)
        for (part, _), each in zip(features.batches(size, device), per_anchor, strict=False):
            yield self.of_pass(part.logits, each, part.features)

    def of_features(self, logits: Tensor, features: Tensor) -> Outputs:
        """The outputs for logits (B, C) and last features (B, d)."""
        if not self.takes_features:
            return super().of_features(logits, features)
        return self._combined([part.of_features(logits, features) for part in self.parts])

    def of_logits(self, logits: Tensor) -> Outputs:
        """The outputs for logits (B, C), if all parts read logits alone."""
        return self._combined([part.of_logits(logits) for part in self.parts])  # type: ignore[attr-defined]

    def on(self, net: Classifier) -> Self:
        """A copy with another network that computes the same, also for its parts."""
        copied = super().on(net)
        copied.parts = [part.on(net) for part in self.parts]
        return copied

    @property
    def in_one_pass(self) -> bool:
        """Whether all parts share a pass, so that `of_pass` gives the outputs."""
        return all(map(shared_reading, self.parts))

    def of_pass(self, logits: Tensor, per_anchor: Tensor | None = None, features: Tensor | None = None) -> Outputs:
        """The outputs for logits (B, C), those per anchor (K, B, C), and the features of `layers` (B, d)."""
        return self._combined([self._of_shared(part, logits, logits, per_anchor, features) for part in self.parts])

    def reasons(self, out: Outputs) -> list[str]:
        """What raised the score of each image: the words of the part that adds the most."""
        assert out.parts is not None
        return [self.parts[number].reason for number in out.parts.argmax(dim=1).tolist()]

    def config(self) -> dict[str, Any]:
        """The parts with their arguments, the rule and the standardisation."""
        parts = [
            {"name": name, "config": json.loads(json.dumps(part.config()))}
            for name, part in zip(self._names, self.parts, strict=True)
        ]
        return {"parts": parts, "rule": self.rule, "standardise": self.standardise}

    def state(self) -> dict[str, Tensor]:
        """What the parts learned, and what standardises their scores."""
        states = {f"{i}.{name}": value for i, part in enumerate(self.parts) for name, value in part.state().items()}
        return states | {f"rule.{name}": value for name, value in self.standard.items()}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state` returned, checked."""
        for i, part in enumerate(self.parts):
            part.preprocess = self.preprocess
            part.load_state(artifact.part(state, f"{i}."))
        self.standard = artifact.part(state, "rule.")
        if self.standard:
            RULES[self.rule].check(self.standard, len(self.parts))

    # Steps.

    @property
    def layers(self) -> list[str]:
        """The one layer that parts share, if any reads it."""
        sharing = [
            part for part in self.parts if shared_reading(part) == "features" and isinstance(part, FeatureDetector)
        ]
        layers = {part.layer for part in sharing if part.reads_features}
        if len(layers) > 1:
            raise InputError(f"detectors must read the same last layer; they read {' and '.join(sorted(layers))}")
        return list(layers)

    def _of_shared(
        self, part: Any, x: Tensor, logits: Tensor | None, per_anchor: Tensor | None, features: Tensor | None = None
    ) -> Outputs:
        """The outputs of a part, from what was computed for several if it can be."""
        shares = shared_reading(part)
        if shares is None:
            return part.outputs(x)  # type: ignore[no-any-return]
        if shares == "features":
            assert logits is not None
            return part.of_features(logits, logits[:, :0] if features is None else features)  # type: ignore[no-any-return]
        return part.of_logits(logits) if shares == "logits" else part.of_per_anchor_logits(per_anchor)  # type: ignore[no-any-return]

    def _combined(self, outs: Sequence[Outputs]) -> Outputs:
        logits, tau = outs[0].logits, next((out.tau for out in outs if out.tau is not None), None)
        scores = torch.stack([out.score.double() for out in outs], dim=1)  # (B, d)
        return self._ruled(Outputs(logits, outs[0].score, tau, scores))

    def _ruled(self, out: Outputs) -> Outputs:
        """The combined score of outputs whose ``parts`` are the scores of the parts."""
        if self._raw:
            return out
        if not self.standard:
            raise NotReadyError("Combined has no standardisation yet: call calibrate(held_out), which learns it")
        assert out.parts is not None
        rule, learned = RULES[self.rule], {key: value.to(out.parts.device) for key, value in self.standard.items()}
        evidence = rule.evidence(out.parts, learned)
        return replace(out, score=rule.combine(evidence, learned).to(out.logits.dtype), parts=evidence)

    def _on_held_out(
        self, held_out: Any, names: Sequence[str], alpha: float, delta: float | None, batch_size: int | None
    ) -> HeldOut:
        """Learn the standardisation from some images, and score the others."""
        preprocess, rule = self._check_fitted(), RULES[self.rule]
        if rule.weighed and isinstance(held_out, Features):
            raise InputError(
                f"held_out must be images with rule={self.rule!r}, which makes synthetic outliers of them; got "
                "Features: pass the images themselves"
            )
        raw = copy.copy(self)
        raw._raw = True

        def first_of(prints: Tensor) -> Tensor:
            if len(prints) < 3:
                raise InputError(f"held_out must have at least 3 images, some of them to learn from; got {len(prints)}")
            return smallest_prints(prints, to_learn_from(len(prints), alpha, delta, share=SHARE, least=LEAST))

        outside = None
        if rule.weighed or any(part.learns_held_out for part in self.parts):  # from the images themselves
            one, other = halves(held_out, preprocess, "Combined learns from some", first_of)
            refuse_training_images(torch.cat([one.prints, other.prints]), self.fitted_on)
            self.calibration = None  # what parts learn changes the scores, so no earlier threshold holds
            labels = [renumbered(each.labels, names, self.classes) for each in (one, other)]
            with evaluating(self.net), torch.no_grad():
                for part in self.parts:
                    if part.learns_held_out:
                        part.fit_held_out(one.images, labels[0])
                if rule.weighed:
                    outside = raw._of_outliers(one.images)
            if not isinstance(held_out, Features):
                held_out = [*zip(one.images, labels[0].tolist(), strict=True)]
                held_out += zip(other.images, labels[1].tolist(), strict=True)
                names = ()
        out, given, prints = outputs_of(raw, held_out, batch_size, held_out=True)
        refuse_training_images(prints, self.fitted_on)
        first = first_of(prints)
        if bool(first.all()):
            raise InputError("held_out must hold images that differ; all of these are the same")
        assert out.parts is not None
        self.calibration = None
        self.standard = rule.learn(out.parts[first], outside, self.standardise)
        labels_of_rest = renumbered(given, names, self.classes)[~first]
        return HeldOut(self._ruled(out.of_rows(~first)), labels_of_rest, prints, {"learned": int(first.sum())})

    def _of_outliers(self, images: Tensor) -> Tensor:
        """The scores (N, d) of synthetic outliers made of images."""
        generator = torch.Generator().manual_seed(0)
        made = [synthetic_outliers(x, generator=generator) for x in self.as_input(images).split(256)]
        outs = [self.outputs(x) for x in made if len(x)]
        if not outs:
            raise InputError('held_out must have more images for rule="learned", which makes outliers of them')
        return torch.cat([out.parts for out in outs if out.parts is not None])

    def _built(self, part: str | Part, name: str) -> Detector:
        """A part by its name, or by what a file holds."""
        if isinstance(part, str):
            kind, options = named_methods()[one_of("parts", part, tuple(named_methods()))]
            return kind(self.net, **options)
        kind = named_methods()[one_of(f"{name}.name", part["name"], tuple(named_methods()))][0]
        config = json.loads(json.dumps(part["config"]))
        if config.get("score", "") is None:
            raise InputError(f"{name} must have a score with a name; this one was saved with a function")
        return kind(self.net, **arguments(kind, config, f"{name}.config"))

    def _reads(self) -> str:
        """What the combination as a whole reads; see `Detector`."""
        if all(part.reads == "logits" for part in self.parts):
            return "logits"
        anchors = any(part.reads == "per_anchor_logits" for part in self.parts)
        return "features" if self.takes_features and not anchors else "network"

    def _adopt(self, detectors: Sequence[Detector]) -> None:
        """Take over what detectors that are fitted alike have in common."""
        first = detectors[0]
        if first.preprocess is not None and all(each.preprocess == first.preprocess for each in detectors):
            for each in detectors:
                each._check_fitted()
            self.preprocess, self.classes = first.preprocess, first.classes
            self.fitted_on = torch.cat([each.fitted_on for each in detectors]).unique()


def _on_one_network(detectors: Any, parts: Any) -> list[Detector]:
    given = detectors if isinstance(detectors, list | tuple) else [detectors]
    if given is not detectors or not all(isinstance(each, Detector) for each in given):
        came = ", ".join(type(each).__name__ for each in given)
        raise InputError(f"detectors must be a list of detectors, or a network (a torch.nn.Module); got {came}")
    if parts is not None:
        raise InputError("parts must not be given with detectors; they are for a network")
    nets = [each.net for each in detectors]
    bare = not any(net.has_statistics for net in nets)
    if any(net is not nets[0] and not (bare and net.network is nets[0].network) for net in nets):
        raise InputError("detectors must be of one network; build all with the same kedge.Classifier")
    return list(detectors)
