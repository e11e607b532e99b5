"""A suite as a declaration: the networks to train, the methods to compare, and the sets to compare them on."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from kedge.anchoring.corruption import describe_corruption
from kedge.checks import between
from kedge.data import ImageSet, StreamedSet
from kedge.detectors import AMP, Detector, TrainedDetector
from kedge.errors import InputError
from kedge.evaluation.curve import Curve
from kedge.evaluation.paired import RESAMPLES
from kedge.models import build
from kedge.seeds import seeded
from kedge.training import Recipe
from kedge.training.losses import Loss


@dataclass(frozen=True)
class NetworkPlan:
    """How a network of a suite comes about.

    Args:
        network: A name that `kedge.models.build` knows, or a function that makes the network.
        recipe: How to train it.
        arguments: Of the network's builder.
        anchored: Whether it is anchored before it is trained.
        anchoring: Arguments of `kedge.anchor`.
        method: A method with its own training, whose `prepare` and `loss` apply.
        prepare: Arguments of the method's `prepare`.
        loss: Arguments of the method's `loss`; without a method, an loss itself.
        member: Added to the seed, for members of an ensemble.
        share: Of the training images, to train on: for a training that is shorter than an epoch.
        seed: Its seed, where it should be the same whatever the run's: for members that the runs share.
        start: The name of a network of the suite whose trained weights it begins with, instead of ``network``'s own.

    Example:
        >>> NetworkPlan("compact", Recipe(epochs=1), arguments={"width": 8}).build().spec.arguments["width"]
        8
    """

    network: str | Callable[..., nn.Module]
    recipe: Recipe
    arguments: Mapping[str, Any] = field(default_factory=dict)
    anchored: bool = False
    anchoring: Mapping[str, Any] = field(default_factory=dict)
    method: type[TrainedDetector] | None = None
    prepare: Mapping[str, Any] = field(default_factory=dict)
    loss: Mapping[str, Any] | Loss = field(default_factory=dict)
    member: int = 0
    share: float = 1.0
    seed: int | None = None
    start: str | None = None

    def __post_init__(self) -> None:
        if self.start is not None and self.member:
            raise InputError("start is a trained network of the run's own seed, so member does not go with it")
        if not 0 < self.share <= 1:
            raise InputError(f"share must be above 0 and at most 1; got {self.share}")
        if self.method is None and (self.prepare or (self.loss and not isinstance(self.loss, Loss))):
            raise InputError("prepare and loss are arguments of a method's; pass method= too")
        if self.method is not None and isinstance(self.loss, Loss):
            raise InputError("loss must be arguments of the method's own; got another loss")

    def trained_by(self) -> Loss | None:
        """What its training minimises, or None for the cross-entropy."""
        if isinstance(self.loss, Loss):
            return self.loss
        return None if self.method is None else self.method.loss(**self.loss)

    def number(self, seed: int) -> int:
        """The seed of its training, in a run of a seed."""
        return (seed if self.seed is None else self.seed) + self.member

    def build(self, seed: int = 0) -> nn.Module:
        """The network, with weights drawn from the seed."""
        with seeded(seed):
            if isinstance(self.network, str):
                return build(self.network, **self.arguments)
            return self.network(**self.arguments)

    def _made(self) -> str:
        """A function's name and a digest of the layers that it gives, since two functions may have one name."""
        assert not isinstance(self.network, str)
        return f"{self.network.__qualname__} {hashlib.sha256(repr(self.build()).encode()).hexdigest()[:8]}"

    def described(self) -> dict[str, Any]:
        """The plan as plain data."""
        plain = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "seed"} | {
            "recipe": asdict(self.recipe)
        }
        plain["network"] = self.network if isinstance(self.network, str) else self._made()
        plain["method"] = None if self.method is None else self.method.name
        if isinstance(self.loss, Loss):
            plain["loss"] = {"name": self.loss.name, **self.loss.config()}
        if "corruption" in self.anchoring:
            plain["anchoring"] = {**self.anchoring, "corruption": describe_corruption(self.anchoring["corruption"])}
        return plain


@dataclass(frozen=True)
class MethodPlan:
    """A row of the table: a detector on one of the suite's networks, or on several as an ensemble.

    Args:
        kind: The detector.
        networks: Names of networks in the suite; a detector on several gets them as a list.
        options: Arguments of the detector, plain data.
        outliers: Whether the detector itself takes the suite's outliers, as its argument ``outliers``.
        permuted: The control: the same detector with its temperatures permuted across all images.
        paper: What the paper calls the row, as `kedge.studies.paper` has it.

    Example:
        >>> from kedge import MSP
        >>> MethodPlan(MSP, ("plain",)).described()["kind"]
        'msp'
    """

    kind: Callable[..., Detector]
    networks: tuple[str, ...]
    options: Mapping[str, Any] = field(default_factory=dict)
    outliers: bool = False
    permuted: bool = False
    paper: str | None = None

    def __post_init__(self) -> None:
        if self.permuted and self.kind is not AMP:
            raise InputError("permuted is a control of AMP's temperatures; the method is another")

    def build(self, networks: Sequence[nn.Module], outliers: ImageSet | None) -> Detector:
        """The detector on its networks, not yet fitted."""
        net = networks[0] if len(networks) == 1 else list(networks)
        more = {"outliers": outliers} if self.outliers else {}
        return self.kind(net, **self.options, **more)

    def described(self) -> dict[str, Any]:
        """The plan as plain data."""
        name = getattr(self.kind, "name", getattr(self.kind, "__qualname__", "?"))
        plain = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "paper"}
        return plain | {"kind": name}


@dataclass(frozen=True)
class SuiteData:
    """The sets of a suite.

    Args:
        train: Labelled images to train on.
        held_out: Labelled images to calibrate on.
        test: Labelled images to test on.
        ood: What does not belong.
        outliers: For the methods that use some; never among, nor drawn from, ``ood``.
        shifted: Labelled images of the known classes in other conditions.
        known_in: By OOD set, images from its source that show known classes; see `kedge.evaluate`.
        missing: What is not on this machine, with how to get it.
    """

    train: ImageSet | StreamedSet
    held_out: ImageSet | StreamedSet
    test: ImageSet
    ood: tuple[ImageSet, ...]
    outliers: ImageSet | None = None
    shifted: tuple[ImageSet, ...] = ()
    known_in: Mapping[str, ImageSet] = field(default_factory=dict)
    missing: Mapping[str, str] = field(default_factory=dict)

    @property
    def tested(self) -> dict[str, ImageSet]:
        """All sets that are scored, by name, the in-distribution set first."""
        return {s.name: s for s in (self.test, *self.ood, *self.shifted, *self.known_in.values())}


@dataclass(frozen=True)
class Protocol:
    """How the detection metrics are taken.

    Args:
        metrics: Which of them to show.
        ood_ratio: None: all OOD images. A number: so many times as many as there are ID test images, drawn anew
            ``draws`` times, of which the mean is taken.
        draws: See ``ood_ratio``.
    """

    metrics: tuple[str, ...] = ("fpr95", "auroc", "aupr_in")
    ood_ratio: float | None = None
    draws: int = 10


@dataclass(frozen=True)
class PaperTable:
    """Where the paper has the same numbers."""

    table: str
    id_set: str
    network: str


@dataclass(frozen=True)
class Suite:
    """Every method on its network, on the same sets.

    Args:
        name: Of its folder.
        title: Of its report.
        networks: By name.
        methods: By the label that the table shows.
        data: Makes the sets for a seed.
        seeds: One run each.
        resamples: Of the bootstrap for intervals; 0 for none.
        comparisons: Resamples of the paired bootstrap that tells which leads are beyond noise.
        protocol: How the metrics are taken.
        paper: The table of the paper that has the same rows and columns.
        leads: Labels of the methods that the report shows in detail; by default the first AMP, or the first method.
        draws: By label, the labels of the same method with other anchors, for a table of noise.
        curves: For the report.
        apart: OOD sets that stand by themselves and are left out of the means.
    """

    name: str
    title: str
    networks: Mapping[str, NetworkPlan]
    methods: Mapping[str, MethodPlan]
    data: Callable[[int], SuiteData]
    seeds: tuple[int, ...] = (0,)
    resamples: int = 0
    comparisons: int = RESAMPLES
    protocol: Protocol = Protocol()
    paper: PaperTable | None = None
    leads: tuple[str, ...] = ()
    draws: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    curves: tuple[Curve, ...] = ()
    apart: tuple[str, ...] = ()

    @property
    def shown(self) -> tuple[str, ...]:
        """The labels of the methods that the report shows in detail."""
        amps = [label for label, method in self.methods.items() if method.kind is AMP]
        return self.leads or tuple(amps or self.methods)[:1]

    def only(self, *patterns: str) -> "Suite":
        """The suite with some of its rows: those whose label fits one of the patterns, in which ``*`` is any text.

        Finished cells are the same files, so rows can be run apart and put together by a run of the whole suite.
        """
        kept = {
            label: method
            for label, method in self.methods.items()
            if any(fnmatchcase(label, pattern) for pattern in patterns)
        }
        if not kept:
            some = "; ".join(list(self.methods)[:12]) + (" and more" if len(self.methods) > 12 else "")
            raise InputError(
                f"rows must fit some label of {self.name!r}, where * is any text; got {', '.join(patterns)}; it has "
                f"{some}"
            )
        draws = {label: others for label, others in self.draws.items() if {label, *others} <= set(kept)}
        return replace(self, methods=kept, leads=tuple(filter(kept.__contains__, self.leads)), draws=draws)

    def __post_init__(self) -> None:
        between("resamples", self.resamples, 0, float("inf"))
        for name, plan in self.networks.items():
            if plan.start is not None and (plan.start not in self.networks or self.networks[plan.start].start):
                raise InputError(
                    f"the network {name!r} must start from one that is trained from scratch; got {plan.start!r}"
                )
        for label, method in self.methods.items():
            unknown = [name for name in method.networks if name not in self.networks]
            if unknown or not method.networks:
                raise InputError(
                    f"the method {label!r} must name networks of the suite, some of {', '.join(self.networks)}; got "
                    f"{unknown}"
                )
