"""`anchor`: make an anchored copy of any network."""

import copy
from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor, nn

from kedge.anchoring import survey as layers
from kedge.anchoring.anchored import Anchored
from kedge.anchoring.corruption import Transform
from kedge.anchoring.options import VARIANTS
from kedge.anchoring.stem import SUPPORTED, Stem, check_supported
from kedge.checks import one_of
from kedge.errors import ArchitectureError, InputError
from kedge.models.classifier import Classifier
from kedge.models.ensemble import Ensemble


def anchor(
    net: nn.Module,
    *,
    init: str = "preserve",
    layer: str | None = None,
    example: Tensor | None = None,
    mean: float | Sequence[float] | Tensor | None = None,
    std: float | Sequence[float] | Tensor | None = None,
    variant: str = "paper",
    corruption: str | Transform | None = "default",
    every: int | None = None,
    per_sample: bool | None = None,
    mask: float | None = None,
    mask_target: str | None = None,
    synthetic_outliers: float | None = None,
    seed: int = 0,
) -> Anchored:
    """Make an anchored copy of a network; the original stays as it is.

    Args:
        net: Any network whose input reaches one Conv1d, Conv2d, Conv3d or Linear layer first.
        init: ``"preserve"`` keeps the network's function for every clean anchor, so a trained network can be anchored
            and tuned; ``"fresh"`` draws new weights for the first layer.
        layer: The name of the layer to widen. By default the first that reads the input: found by running ``example``,
            or the first in order of registration, which the first forward pass then checks.
        example: A batch of images (one is enough), uint8 or in [0, 1].
        mean: Normalisation of images in [0, 1], one value or one per channel; `kedge.train` sets it where it is absent.
        std: The same for the deviation.
        variant: How it is trained, where nothing else is said: ``"paper"``, ``"authors"`` or ``"recommended"``, which
            corrupts a share of the anchors of every batch instead of all of every fifth, and makes outliers.
        corruption: See `kedge.anchoring.AnchoringOptions`, as for the rest.
        every: See there.
        per_sample: See there.
        mask: See there.
        mask_target: See there.
        synthetic_outliers: See there.
        seed: See there.

    Example:
        >>> import torch
        >>> net = anchor(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 900, 10)))
        >>> net.stem.weight.shape
        torch.Size([8, 6, 3, 3])
        >>> net(torch.rand(4, 3, 32, 32)).shape  # a training batch: its images are each other's anchors
        torch.Size([4, 10])
    """
    if not isinstance(net, nn.Module):
        raise InputError(f"net must be a torch.nn.Module, got {type(net).__name__}")
    if isinstance(net, Ensemble):
        raise InputError("net must be one network, got an ensemble; anchor its members, and make an ensemble of them")
    if isinstance(net, Anchored):
        raise InputError("net is anchored already; pass the network it was made from")
    given = {
        "every": every,
        "per_sample": per_sample,
        "mask": mask,
        "mask_target": mask_target,
        "synthetic_outliers": synthetic_outliers,
    }
    options = replace(
        VARIANTS[one_of("variant", variant, tuple(VARIANTS))],
        corruption=corruption,
        seed=seed,
        **{name: value for name, value in given.items() if value is not None},  # type: ignore[arg-type]
    )
    if mask_target is not None and mask is None:
        raise InputError(f"mask_target must come with mask, the share of pairs to mask; got {mask_target!r} alone")
    kept: Classifier | None = None
    if isinstance(net, Classifier):
        kept = net
        if mean is None and std is None and net.has_statistics:
            mean, std = net.mean, net.std
        net = net.network
    try:
        network = copy.deepcopy(net)
    except (RuntimeError, TypeError) as error:
        raise ArchitectureError(
            f"net must be a network that copy.deepcopy can copy: {error}. Where a layer computes its weight from other "
            "parameters (weight_norm, spectral_norm, pruning), make that permanent first"
        ) from error
    if isinstance(network, SUPPORTED):  # a network of one layer; the stem needs a module to stand in
        network = nn.Sequential(network).train(net.training)
    normalise = Classifier(network, mean=mean, std=std).normalise
    name = _find(network, layer, None if example is None else normalise(example[:1].clone()))
    layers.check_untied(network, name)
    network.set_submodule(name, Stem(network.get_submodule(name), init, seed))
    anchored = Anchored(network, layer=name, sole_reader=layer is None, mean=mean, std=std, options=options)
    if kept is not None:  # what the network has learned from does not change by being anchored
        anchored.record = dict(kept.record)
        anchored.outliers = None if kept.outliers is None else kept.outliers.clone()
    anchored.training = net.training  # not .train(), which would undo the modes of single modules
    return anchored


def _find(network: nn.Module, layer: str | None, example: Tensor | None) -> str:
    """The layer to widen."""
    found = None if example is None else layers.survey(network, lambda: network(example))
    if layer is not None:
        try:
            module = network.get_submodule(layer)
        except AttributeError as error:
            names = [name for name, module in network.named_modules() if isinstance(module, SUPPORTED)]
            raise InputError(f"layer must name a layer of the network, such as {names[:5]}; got {layer!r}") from error
        check_supported(module, f"the layer {layer!r}")
        if found is not None:
            layers.check_called_once(layer, found)
        return layer
    if found is None or example is None:
        return layers.first_registered(network)
    name = layers.first_layer(network, found)
    layers.check_called_once(name, found)
    layers.check_sole_reader(network, name, found, example, network)
    return name
