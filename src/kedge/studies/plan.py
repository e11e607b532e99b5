"""Declarations of a suite: the networks to train, the methods to compare, and the sets to compare them on."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from torch import nn

from kedge.anchoring.corruption import describe_corruption
from kedge.checks import between
from kedge.data import ImageSet, Preprocess, StreamedSet
from kedge.detectors import Detector, TrainedDetector
from kedge.errors import InputError
from kedge.evaluation.paired import RESAMPLES
from kedge.evaluation.result import Curve
from kedge.models import build
from kedge.models.classifier import Classifier
from kedge.models.named import load_weights
from kedge.seeds import seeded
from kedge.training import Recipe
from kedge.training.losses import Loss


@dataclass(frozen=True)
class Weights:
    """Weights that a network is loaded with instead of being trained.

    Args:
        files: For each seed, a file as `kedge.models.named.load_weights` takes it.
        mean: The normalisation of images in [0, 1] that they were trained with, by channel.
        std: The same for the deviation.
    """

    files: tuple[Path, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def described(self) -> dict[str, Any]:
        """As plain data, with the sha256 of each file in place of its path."""
        digests = [hashlib.sha256(Path(file).read_bytes()).hexdigest() for file in self.files]
        return {"files": digests, "mean": self.mean, "std": self.std}


@dataclass(frozen=True)
class NetworkPlan:
    """How a network of a suite is built and trained.

    Args:
        network: A name for `kedge.models.build`, or a function that returns the network.
        recipe: How to train it.
        arguments: Arguments of the network's builder.
        anchored: Whether it is anchored before it is trained.
        anchoring: Arguments of `kedge.anchor`.
        method: A method with its own training, whose `prepare` and `loss` apply.
        prepare: Arguments of the method's `prepare`.
        loss: Arguments of the method's `loss`; without a method, a loss itself.
        member: Added to the seed, for members of an ensemble.
        share: Share of the training images to train on, for a training shorter than an epoch.
        seed: A fixed seed for all runs, for members that the runs share.
        start: The name of a network of the suite whose trained weights it starts from.
        weights: Weights to load; the network is then not trained.

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
    weights: Weights | None = None

    def __post_init__(self) -> None:
        if self.start is not None and self.member:
            raise InputError("member must be 0 for a network with start, which has the run's own seed")
        if not 0 < self.share <= 1:
            raise InputError(f"share must be above 0 and at most 1; got {self.share}")
        if self.method is None and (self.prepare or (self.loss and not isinstance(self.loss, Loss))):
            raise InputError("prepare and loss are arguments of a method's; pass method= too")
        if self.method is not None and isinstance(self.loss, Loss):
            raise InputError(f"loss must be arguments of the method's own loss; got {self.loss.name!r}, another loss")

    def training_loss(self) -> Loss | None:
        """The loss of its training, or None for the cross-entropy."""
        if isinstance(self.loss, Loss):
            return self.loss
        return None if self.method is None else self.method.loss(**self.loss)

    def training_seed(self, seed: int) -> int:
        """The seed of its training, in a run of a seed."""
        return (seed if self.seed is None else self.seed) + self.member

    def build(self, seed: int = 0) -> nn.Module:
        """The network, with weights drawn from the seed."""
        with seeded(seed):
            return (
                build(self.network, **self.arguments)
                if isinstance(self.network, str)
                else self.network(**self.arguments)
            )

    def loaded(self, seed: int) -> Classifier:
        """The network with the weights of a seed."""
        assert self.weights is not None
        net = Classifier(self.build(), mean=self.weights.mean, std=self.weights.std)
        load_weights(net.network, self.weights.files[seed])
        return net.eval()

    def described(self) -> dict[str, Any]:
        """The plan as plain data; a function is its name and a digest of its layers, since names may coincide."""
        plain = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("seed", "weights")}
        if self.weights is not None:
            plain["weights"] = self.weights.described()
        plain["recipe"] = asdict(self.recipe)
        if not isinstance(self.network, str):
            digest = hashlib.sha256(repr(self.build()).encode()).hexdigest()[:8]
            plain["network"] = f"{self.network.__qualname__} {digest}"
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
        permuted: The control: the same detector with its tau permuted across all images.
        paper: The row's name in the paper, as `kedge.studies.paper` has it, or in a leaderboard.

    Example:
        >>> from kedge import MSP
        >>> MethodPlan(MSP, ("unanchored",)).described()["kind"]
        'msp'
    """

    kind: type[Detector]
    networks: tuple[str, ...]
    options: Mapping[str, Any] = field(default_factory=dict)
    outliers: bool = False
    permuted: bool = False
    paper: str | None = None

    def __post_init__(self) -> None:
        if self.permuted and not self.kind.has_tau:
            raise InputError(f"permuted must be False for {self.kind.__name__}: it has no tau to permute")

    def build(self, networks: Sequence[nn.Module], outliers: ImageSet | None) -> Detector:
        """The detector on its networks, not yet fitted."""
        build: Callable[..., Detector] = self.kind
        more = {"outliers": outliers} if self.outliers else {}
        return build(networks[0] if len(networks) == 1 else list(networks), **self.options, **more)

    def described(self) -> dict[str, Any]:
        """The plan as plain data."""
        plain = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "paper"}
        return plain | {"kind": self.kind.name}


@dataclass(frozen=True)
class SuiteData:
    """The sets of a suite.

    Args:
        train: Labelled images to train on.
        held_out: Labelled images to calibrate on.
        test: Labelled images to test on.
        ood: Out-of-distribution sets.
        outliers: For the methods that use some; never among, nor drawn from, ``ood``.
        shifted: Labelled images of the known classes in other conditions.
        known_in: By OOD set, images from its source that show known classes; see `kedge.evaluate`.
        missing: Sets that are not on this machine, with how to get them.
        preprocess: How streamed images become inputs; by default they are scaled to the test images' size.
    """

    train: ImageSet | StreamedSet
    held_out: ImageSet | StreamedSet
    test: ImageSet
    ood: tuple[ImageSet, ...]
    outliers: ImageSet | None = None
    shifted: tuple[ImageSet, ...] = ()
    known_in: Mapping[str, ImageSet] = field(default_factory=dict)
    missing: Mapping[str, str] = field(default_factory=dict)
    preprocess: Preprocess | None = None

    @property
    def tested(self) -> dict[str, ImageSet]:
        """All sets that are scored, by name, the in-distribution set first."""
        return {s.name: s for s in (self.test, *self.ood, *self.shifted, *self.known_in.values())}


ROLES = ("train", "held out", "test", "ood", "outliers")


@dataclass(frozen=True)
class Need:
    """A set that a suite reads, as far as it is known before it is read.

    Args:
        role: One of `ROLES`.
        name: Of the set.
        images: Their number at its source, or as many as the suite takes.
        find: Loads it, or raises `NotReadyError` with how to get it; None for a part of another set.
    """

    role: str
    name: str
    images: int
    find: Callable[[], Any] | None = None


@dataclass(frozen=True)
class Sets:
    """The data of a suite: a function that loads the sets for a seed, and what is known before.

    Args:
        load: See `Suite.data`.
        needs: What it reads.
        shape: Of the network's inputs, (D, H, W).
        streamed: Whether training and held-out images stay on disk.
    """

    load: Callable[[int], SuiteData]
    needs: tuple[Need, ...]
    shape: tuple[int, ...] = (3, 32, 32)
    streamed: bool = False

    def __call__(self, seed: int) -> SuiteData:
        """The sets of a seed."""
        return self.load(seed)


@dataclass(frozen=True)
class Protocol:
    """How the detection metrics are computed.

    Args:
        metrics: Names of the metrics to show.
        ood_ratio: None: all OOD images. A number: as many OOD images as this multiple of the ID test images, drawn
            ``draws`` times; the mean is reported.
        draws: See ``ood_ratio``.
    """

    metrics: tuple[str, ...] = ("fpr95", "auroc", "aupr_in")
    ood_ratio: float | None = None
    draws: int = 10


@dataclass(frozen=True)
class PaperTable:
    """The table of the paper with the same numbers."""

    table: str
    id_set: str
    network: str


@dataclass(frozen=True)
class Board:
    """The leaderboard of OpenOOD with the same numbers, and the network whose rows compare."""

    name: str
    network: str


@dataclass(frozen=True)
class Suite:
    """A comparison of methods, each on its network, on the same sets.

    Args:
        name: Name of its folder.
        title: Title of its report.
        networks: Plans of the networks, by name.
        methods: Rows of the table, by label.
        data: Loads the sets for a seed.
        seeds: One run each.
        resamples: Resamples of the bootstrap for intervals; 0 for none.
        comparisons: Resamples of the paired bootstrap that compares the rows.
        protocol: How the metrics are computed.
        paper: The table of the paper that has the same rows and columns.
        leads: Labels of the rows that the report shows in detail; by default the first with tau, or the first.
        draws: By label, the labels of the same method with other anchors, for a table of noise.
        curves: Curves for the report.
        apart: OOD sets that are shown separately and left out of the means.
        groups: By title, OOD sets whose means are shown apart, such as near and far ones.
        board: The leaderboard that has means over the same groups.
        extract: Whether the images pass through an unanchored network once, for all rows that take `kedge.Features`.
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
    groups: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    board: Board | None = None
    extract: bool = False

    @property
    def shown(self) -> tuple[str, ...]:
        """The labels of the rows that the report shows in detail."""
        with_tau = [label for label, method in self.methods.items() if method.kind.has_tau]
        return self.leads or tuple(with_tau or self.methods)[:1]

    def only(self, *patterns: str) -> "Suite":
        """The suite with the rows whose label matches one of the patterns, in which ``*`` is any text.

        Finished cells are the same files, so a run of the whole suite reuses them.
        """
        kept = {label: row for label, row in self.methods.items() if any(fnmatchcase(label, p) for p in patterns)}
        if not kept:
            some = "; ".join(list(self.methods)[:12]) + (" and more" if len(self.methods) > 12 else "")
            raise InputError(
                f"rows must match some label of {self.name!r}, where * is any text; got {', '.join(patterns)}; "
                f"it has {some}"
            )
        draws = {label: others for label, others in self.draws.items() if {label, *others} <= set(kept)}
        return replace(self, methods=kept, leads=tuple(filter(kept.__contains__, self.leads)), draws=draws)

    def __post_init__(self) -> None:
        between("resamples", self.resamples, 0, float("inf"))
        for name, plan in self.networks.items():
            if plan.start is not None and (plan.start not in self.networks or self.networks[plan.start].start):
                raise InputError(
                    f"start of the network {name!r} must be one that is trained from scratch; got {plan.start!r}"
                )
        for label, method in self.methods.items():
            unknown = [name for name in method.networks if name not in self.networks]
            if unknown or not method.networks:
                raise InputError(
                    f"networks of the row {label!r} must be of the suite, some of {', '.join(self.networks)}; got "
                    f"{unknown}"
                )
