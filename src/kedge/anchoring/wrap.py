"""`anchor`: an anchored copy of any network."""

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from kedge.anchoring.anchored import Anchored
from kedge.anchoring.layer import TORCH_LAYERS, AnchoredLayer, check_can_be_anchored
from kedge.anchoring.options import VARIANTS, AnchoringOptions
from kedge.anchoring.survey import check_untied, first_layer, first_registered
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
    seed: int = 0,
    **options: Any,
) -> Anchored:
    """Make an anchored copy of a network; the original stays as it is.

    Args:
        net: Any network whose input reaches one affine layer first: a convolution, a linear layer, a patch embedding.
        init: ``"preserve"`` keeps the network's function for every clean anchor, so a trained network can be anchored
            and tuned; ``"fresh"`` draws new weights for the anchored layer.
        layer: The name of the layer to anchor. By default the first that reads the input: found by running ``example``,
            or the first in order of registration, which the first forward pass then checks.
        example: A batch of images (one is enough), uint8 or in [0, 1].
        mean: Normalisation of images in [0, 1], one value or one per channel; `kedge.train` sets it if it is missing.
        std: The same for the deviation.
        variant: Defaults of the options: ``"paper"``, ``"authors"`` or ``"recommended"``, which corrupts a share
            of the anchors of every batch instead of all of every fifth, and trains with synthetic outliers.
        seed: Seed of fresh weights, permutations, corruptions and masks.
        **options: Fields of `kedge.anchoring.AnchoringOptions`: ``corruption`` (``"default"`` is the variant's),
            ``every``, ``per_sample``, ``mask``, ``mask_target`` and ``synthetic_outliers``; None is the variant's.

    Example:
        >>> import torch
        >>> net = anchor(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 900, 10)))
        >>> net.anchored_layer.layer_c
        Conv2d(3, 8, kernel_size=(3, 3), stride=(1, 1), bias=False)
        >>> net(torch.rand(4, 3, 32, 32)).shape  # a training batch: its images are each other's anchors
        torch.Size([4, 10])
    """
    if not isinstance(net, nn.Module):
        raise InputError(f"net must be a torch.nn.Module, got {type(net).__name__}")
    if isinstance(net, Ensemble):
        raise InputError("net must be one network, got an ensemble; anchor its members, and make an ensemble of them")
    if isinstance(net, Anchored):
        raise InputError("net is anchored already; pass the network it was made from")
    variants, fields = VARIANTS[one_of("variant", variant, tuple(VARIANTS))], tuple(AnchoringOptions.__annotations__)
    for name in options:
        one_of("an option of anchor", name, fields)
    unset = {"corruption": "default"}  # where None means no consistency
    given = {name: value for name, value in options.items() if value != unset.get(name)}
    chosen = replace(variants, seed=seed, **given)
    if "mask_target" in given and "mask" not in given:
        raise InputError("mask_target must come with mask, the share of pairs to mask; got mask_target alone")
    classifier = net if isinstance(net, Classifier) else None
    if classifier is not None:
        net = classifier.network
        if mean is None and std is None and classifier.has_statistics:
            mean, std = classifier.mean, classifier.std
    try:
        network = copy.deepcopy(net)
    except (RuntimeError, TypeError) as error:
        raise ArchitectureError(
            f"net must be a network that copy.deepcopy can copy: {error}. If a layer computes its weight from other "
            "parameters by a hook (old weight_norm, pruning), make that permanent first"
        ) from error
    if isinstance(network, TORCH_LAYERS) or next(network.children(), None) is None:
        network = nn.Sequential(network).train(net.training)  # the anchored layer needs a module around it
    reader = Classifier(network, mean=mean, std=std)
    if layer is not None:
        name = layer
    elif example is None:
        name = first_registered(network)
    else:
        name = first_layer(network, lambda: reader(example[:1].clone(), raw=True))
    try:
        check_can_be_anchored(network.get_submodule(name), f"the layer {name!r}")
    except AttributeError as error:
        names = [each for each, module in network.named_modules() if isinstance(module, TORCH_LAYERS)]
        raise InputError(f"layer must name a layer of the network, such as {names[:5]}; got {name!r}") from error
    check_untied(network, name)
    network.set_submodule(name, AnchoredLayer(network.get_submodule(name), init, seed))
    anchored = Anchored(network, layer=name, must_be_first=layer is None, mean=mean, std=std, options=chosen)
    if classifier is not None:  # anchoring does not change what the network was trained on
        anchored.record = dict(classifier.record)
        anchored.outliers = None if classifier.outliers is None else classifier.outliers.clone()
    anchored.training = net.training  # not .train(), which would undo the modes of single modules
    if example is not None:
        anchored.check(example)
    return anchored
