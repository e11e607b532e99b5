"""Monte Carlo dropout."""

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from kedge.checks import shape_of
from kedge.detectors.registry import register
from kedge.detectors.sampled import DrawnDetector
from kedge.errors import ArchitectureError, InputError
from kedge.models.classifier import Classifier
from kedge.seeds import mix_seed

CHANNELWISE = (nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)  # these drop whole channels
UNSUPPORTED = (nn.AlphaDropout, nn.FeatureAlphaDropout)


@register
class MCDropout(DrawnDetector):
    """Monte Carlo dropout (Gal and Ghahramani, ICML 2016): the mean softmax with dropout left on.

    Each pass goes through a sub-network in which other values are dropped; where the sub-networks disagree, the network
    is unsure of what it learned. Use it for a network that was trained with dropout anyway: it needs no other training
    and no second network, though an ensemble is usually better. Costs as many forward passes as there are samples. The
    masks of a pass are drawn once from a seed and shared by all images, so that scores repeat and do not depend on the
    batch; everything else, batch norm among it, stays in evaluation mode.

    Args:
        net: A network with `nn.Dropout` or `nn.Dropout1d` to `nn.Dropout3d` layers, plain or anchored; an anchored one
            gives the mean over its anchors in each pass. Dropout that a network applies by a function, as attention
            layers do, stays off.
        samples: Passes.
        score: ``"msp"`` or ``"entropy"`` of the mean softmax, or the ``"mutual_information"`` of label and mask, which
            needs at least two passes.
        seed: Of the masks.

    Example:
        >>> from kedge.models import build
        >>> net = build("compact", width=4, classes=2, dropout=0.3)
        >>> detector = MCDropout(net, score="mutual_information").fit(torch.rand(8, 3, 8, 8))
        >>> detector.score(torch.rand(4, 3, 8, 8)).shape, detector.cost.forward
        (torch.Size([4]), 10)
    """

    name = "mc_dropout"

    def __init__(self, net: nn.Module, *, samples: int = 10, score: str = "msp", seed: int = 0) -> None:
        super().__init__(net, samples=samples, score=score, seed=seed)
        self.layers = _dropout_layers(self.net)

    @contextlib.contextmanager
    def drawn(self, number: int) -> Iterator[None]:
        """Apply the masks of a pass inside the block."""
        uses: Counter[int] = Counter()  # of each layer in the current forward; a layer may be called more than once
        rows, ran = 0, False

        def begin(_module: nn.Module, inputs: tuple[Any, ...]) -> None:
            nonlocal rows
            uses.clear()
            rows = len(inputs[0])

        def drop(layer: int, module: nn.Module, output: Tensor) -> Tensor:
            nonlocal ran
            if len(output) != rows:
                raise ArchitectureError(
                    f"the dropout layer {list(self.layers)[layer]!r} must see one row per image, so that all images "
                    f"can share a mask; it sees {shape_of(output)} for {rows} images"
                )
            ran, use = True, uses[layer]
            uses[layer] += 1
            return output * _mask(module, output, mix_seed(self.seed, number, layer, *([use] if use else [])))

        with contextlib.ExitStack() as hooks:
            for root in (module for module in self.net.modules() if isinstance(module, Classifier)):
                hooks.callback(root.network.register_forward_pre_hook(begin).remove)
            for layer, module in enumerate(self.layers.values()):
                hook = module.register_forward_hook(lambda m, _, output, layer=layer: drop(layer, m, output))
                hooks.callback(hook.remove)
            yield
        if not ran:
            raise InputError(
                f"none of the dropout layers {list(self.layers)} runs in a forward pass, so every pass would be the "
                "same; put one on the way from the image to the logits"
            )


def _dropout_layers(net: Classifier) -> dict[str, nn.Module]:
    """The dropout layers that drop something, by their names."""
    layers: dict[str, nn.Module] = {}
    for name, module in net.named_modules():
        if isinstance(module, UNSUPPORTED) and module.p > 0:
            raise ArchitectureError(
                f"the layer {name!r} is an {type(module).__name__}, which shifts values instead of dropping them; "
                "MCDropout needs Dropout, Dropout1d, Dropout2d or Dropout3d layers"
            )
        if isinstance(module, nn.Dropout | nn.Dropout1d | nn.Dropout2d | nn.Dropout3d) and module.p > 0:
            layers[name] = module
    if not layers:
        raise InputError(
            "MCDropout needs a network with dropout layers of p above 0, and this one has none; build one with "
            'kedge.models.build("wrn-40-2", dropout=0.3), or put nn.Dropout layers in your own, and train it'
        )
    return layers


def _mask(module: nn.Module, values: Tensor, seed: int) -> Tensor:
    """What to multiply all rows by, (1, ...): 0 with probability p, otherwise 1 / (1 - p)."""
    p = float(module.p)  # type: ignore[arg-type]
    channels = values.shape[1:2] + (1,) * (values.ndim - 2)
    shape = (1, *(channels if isinstance(module, CHANNELWISE) else values.shape[1:]))
    # On the CPU and in single precision whatever the network's, so that its masks are the same everywhere.
    draws = torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)
    return (draws >= p).to(values) / (1 - p if p < 1 else 1)
