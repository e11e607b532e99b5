"""Methods that average the softmax over several predictions: deep ensembles and Monte Carlo dropout."""

import contextlib
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from kedge import scores
from kedge.checks import at_least, one_of, shape_of
from kedge.detectors.base import Cost, Detector, Outputs
from kedge.detectors.registry import register
from kedge.errors import ArchitectureError, InputError
from kedge.models.classifier import Classifier, evaluating
from kedge.models.ensemble import Ensemble, log_mean_softmax
from kedge.seeds import mix_seed
from kedge.threads import own_thread

CHANNELWISE = (nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)  # these drop whole channels
UNSUPPORTED = (nn.AlphaDropout, nn.FeatureAlphaDropout)

# By the sampled logits (M, B, C) and the logarithm of their mean softmax (B, C).
SAMPLED_SCORES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "msp": lambda sampled, logits: scores.msp(logits),
    "entropy": lambda sampled, logits: scores.entropy(logits),
    "mutual_information": lambda sampled, logits: scores.mutual_information(sampled),
}


class SampledDetector(Detector):
    """A detector that takes the mean softmax of several networks, or of several draws in one."""

    reads = "passes"

    def __init__(self, net: nn.Module, *, samples: int, score: str) -> None:
        super().__init__(net)
        self.samples = at_least("samples", samples, 1)
        self.score_by = one_of("score", score, tuple(SAMPLED_SCORES))
        if score == "mutual_information" and samples < 2:
            raise InputError("the score 'mutual_information' needs at least two samples, got 1; use 'entropy'")

    @abstractmethod
    def sampled_logits(self, x: Tensor) -> Tensor:
        """The logits of a batch in each sample, (M, B, C)."""

    def outputs(self, x: Tensor) -> Outputs:
        """The logarithm of the mean softmax, and the score."""
        sampled = self.sampled_logits(x)  # (M, B, C)
        logits = log_mean_softmax(sampled)  # (B, C)
        return Outputs(logits, SAMPLED_SCORES[self.score_by](sampled, logits))

    def config(self) -> dict[str, Any]:
        """The score."""
        return {"score": self.score_by}


@register
class DeepEnsemble(SampledDetector):
    """Deep ensembles (Lakshminarayanan, Pritzel and Blundell, NeurIPS 2017): the mean softmax of several networks.

    Networks trained from different seeds agree on images like those they were trained on and often differ elsewhere.
    Use it where M times the training, the memory and the forward passes of one network are affordable: it is usually
    more accurate and better calibrated than any member, and hard to beat. An ensemble of one with the score ``"msp"``
    is MSP. An anchored member gives the mean over its own anchors.

    Args:
        members: A list of networks, anchored or not, or an `Ensemble` of them.
        score: ``"msp"`` or ``"entropy"`` of the mean softmax, or the ``"mutual_information"`` of label and member,
            which needs at least two of them.

    Example:
        >>> members = [nn.Sequential(nn.Flatten(), nn.Linear(12, 2)) for _ in range(3)]
        >>> detector = DeepEnsemble(members).fit(torch.rand(8, 3, 2, 2))
        >>> detector.score(torch.rand(4, 3, 2, 2)).shape, detector.cost.forward
        (torch.Size([4]), 3)
    """

    name = "ensemble"
    net: Ensemble

    def __init__(self, members: Sequence[nn.Module] | Ensemble, *, score: str = "msp") -> None:
        net = members if isinstance(members, Ensemble) else Ensemble(members)
        super().__init__(net, samples=len(net.members), score=score)

    def sampled_logits(self, x: Tensor) -> Tensor:
        """The logits of each member, (M, B, C)."""
        with evaluating(self.net):
            return self.net.members_logits(x)


class DrawnDetector(SampledDetector):
    """A detector that draws something at random in a network, such as dropout masks, once for each sample."""

    def __init__(self, net: nn.Module, *, samples: int = 10, score: str = "msp", seed: int = 0) -> None:
        super().__init__(net, samples=samples, score=score)
        self.seed = at_least("seed", seed, -(2**63))

    @abstractmethod
    def drawn(self, number: int) -> contextlib.AbstractContextManager[None]:
        """Set a draw in the network inside the block: the same for all images, and at every call."""

    def sampled_logits(self, x: Tensor) -> Tensor:
        """The logits of a batch under each draw, (M, B, C); for an anchored network, the means over its anchors."""
        logits = []
        with evaluating(self.net):
            for number in range(self.samples):
                with self.drawn(number):
                    logits.append(self.net(x))
        return torch.stack(logits)

    @property
    def cost(self) -> Cost:
        """A pass for each draw, and for each anchor."""
        return Cost(forward=self.samples * self.net.passes)

    def config(self) -> dict[str, Any]:
        """The samples, the score and the seed."""
        return super().config() | {"samples": self.samples, "seed": self.seed}


@register
class MCDropout(DrawnDetector):
    """Monte Carlo dropout (Gal and Ghahramani, ICML 2016): the mean softmax with dropout left on.

    Passes in which other values are dropped disagree where the training images do not determine the prediction. Use it
    for a network that was trained with dropout anyway, though an ensemble is usually better. Costs as many forward
    passes as there are samples. All images share the masks of a pass, which come from a seed; everything else,
    including batch norm, stays in evaluation mode.

    Args:
        net: A network with `nn.Dropout` or `nn.Dropout1d` to `nn.Dropout3d` layers, anchored or not; an anchored one
            gives the mean over its anchors in each pass. Dropout applied by a function, as in attention layers, stays
            off.
        samples: Number of passes.
        score: ``"msp"`` or ``"entropy"`` of the mean softmax, or the ``"mutual_information"`` of label and mask, which
            needs at least two passes.
        seed: Seed of the masks.

    Example:
        >>> from kedge.models import build
        >>> net = build("compact", width=4, classes=2, dropout=0.3)
        >>> detector = MCDropout(net, score="mutual_information").fit(torch.rand(8, 3, 8, 8))
        >>> detector.score(torch.rand(4, 3, 8, 8)).shape, detector.cost.forward
        (torch.Size([4]), 10)
    """

    name = "mc_dropout"
    changes_network = True

    def __init__(self, net: nn.Module, *, samples: int = 10, score: str = "msp", seed: int = 0) -> None:
        super().__init__(net, samples=samples, score=score, seed=seed)
        self.layers = _dropout_layers(self.net)

    @contextlib.contextmanager
    def drawn(self, number: int) -> Iterator[None]:
        """Apply the masks of a pass inside the block."""
        uses: Counter[int] = Counter()  # of each layer in the current forward; a layer may be called more than once
        rows, ran = 0, False

        @own_thread
        def begin(_module: nn.Module, inputs: tuple[Any, ...]) -> None:
            nonlocal rows
            uses.clear()
            rows = len(inputs[0])

        @own_thread
        def drop(layer: int, module: nn.Module, output: Tensor) -> Tensor:
            nonlocal ran
            if len(output) != rows:
                raise ArchitectureError(
                    f"the dropout layer {list(self.layers)[layer]!r} must get one row per image, so that all images "
                    f"can share a mask; it gets {shape_of(output)} for {rows} images"
                )
            ran, use = True, uses[layer]
            uses[layer] += 1
            return output * _mask(module, output, mix_seed(self.seed, number, layer, *([use] if use else [])))

        with contextlib.ExitStack() as hooks:
            for root in (module for module in self.net.modules() if isinstance(module, Classifier)):
                hooks.enter_context(root.network.register_forward_pre_hook(begin))
            for layer, module in enumerate(self.layers.values()):
                hook = module.register_forward_hook(lambda m, _, output, layer=layer: drop(layer, m, output))
                hooks.enter_context(hook)
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
    """The factor on all rows, (1, ...): 0 with probability p, otherwise 1 / (1 - p)."""
    p = float(module.p)  # type: ignore[arg-type]
    channels = values.shape[1:2] + (1,) * (values.ndim - 2)
    shape = (1, *(channels if isinstance(module, CHANNELWISE) else values.shape[1:]))
    # On the CPU and in single precision whatever the network's, so that its masks are the same everywhere.
    draws = torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)
    return (draws >= p).to(values) / (1 - p if p < 1 else 1)
