"""Stochastic variational inference: weights that are Gaussians instead of numbers."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

from kedge.checks import at_least, between, one_of
from kedge.detectors.registry import register
from kedge.detectors.sampled import DrawnDetector
from kedge.detectors.trained.base import MethodLoss, TrainedDetector
from kedge.errors import ArchitectureError, InputError
from kedge.models.classifier import Classifier
from kedge.models.conversion import conversion, convert
from kedge.models.ensemble import Ensemble, log_mean_softmax
from kedge.models.head import in_anchored_layer
from kedge.seeds import mix_seed
from kedge.training.losses import Step, StepLoss

PRIOR_MEANS = ("zero", "weights")
LAYERS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear)
# The logarithm of the standard deviation is SPEED * rho. The gradient of the divergence is of the order of one over the
# number of training images; at the learning rate and weight decay of the means, rho itself would hardly move.
SPEED = 10.0


_NOISE: ContextVar[Mapping[nn.Module, Tensor] | None] = ContextVar("noise", default=None)  # each thread has its own


def divergence(mean: Tensor, std: Tensor, prior_mean: Tensor | float, prior_std: float) -> Tensor:
    """The Kullback-Leibler divergence of N(mean, std^2) from N(prior_mean, prior_std^2), summed over all weights."""
    ratio = std / prior_std
    return ((ratio.square() + ((mean - prior_mean) / prior_std).square() - 1) / 2 - ratio.log()).sum()


class Gaussian(nn.Module):
    """Parametrization that makes the weight of a layer a Gaussian; the layer's own weight becomes the mean.

    The standard deviation is ``initial * exp(SPEED * rho)`` and rho is zero at first, so that weight decay, which pulls
    every parameter towards zero, pulls the deviation back to its first value. Where `fixed_noise` does not fix it, the
    weight is the mean in evaluation, and drawn for each forward in training.
    """

    prior_mean: Tensor | None
    stochastic = True  # such a layer cannot be anchored

    def __init__(self, mean: Tensor, initial: float, prior: float, prior_mean: Tensor | None) -> None:
        super().__init__()
        self.rho = nn.Parameter(torch.zeros_like(mean))
        self.register_buffer("prior_mean", prior_mean)
        self.initial, self.prior = initial, prior

    @property
    def deviation(self) -> Tensor:
        """The standard deviation of each weight."""
        return self.initial * (SPEED * self.rho).exp()

    def forward(self, mean: Tensor) -> Tensor:
        """The weight that the layer uses."""
        noise = (_NOISE.get() or {}).get(self)
        if noise is None and self.training:
            noise = torch.randn_like(mean)
        return mean if noise is None else mean + self.deviation * noise

    def divergence(self, mean: Tensor) -> Tensor:
        """The divergence of these weights from their prior."""
        return divergence(mean, self.deviation, 0.0 if self.prior_mean is None else self.prior_mean, self.prior)


def gaussians(net: nn.Module) -> list[tuple[Gaussian, Tensor]]:
    """The Gaussians of a network, each with its mean, in the order of the layers."""
    return [
        (module[0], module.original)
        for module in net.modules()
        if isinstance(module, parametrize.ParametrizationList) and isinstance(module[0], Gaussian)
    ]


@contextlib.contextmanager
def fixed_noise(net: nn.Module, draw: Callable[[int, Tensor], Tensor]) -> Iterator[None]:
    """Fix the weights inside the block; ``draw`` gives the noise of a layer from its number and its mean."""
    token = _NOISE.set({gaussian: draw(number, mean) for number, (gaussian, mean) in enumerate(gaussians(net))})
    try:
        yield
    finally:
        _NOISE.reset(token)


@conversion("svi")
def gaussian_weights(network: nn.Module, *, initial: float, prior: float, prior_mean: str) -> nn.Module:
    """Make the weight of every convolution and linear layer a Gaussian."""
    between("initial", initial, 0, float("inf"), open_ends=True)
    between("prior", prior, 0, float("inf"), open_ends=True)
    one_of("prior_mean", prior_mean, PRIOR_MEANS)
    layers = {
        name: module
        for name, module in network.named_modules()
        if isinstance(module, LAYERS) and not in_anchored_layer(name)  # whose maps of the anchors are cached
    }
    if not layers:
        raise ArchitectureError("the network has no Conv1d, Conv2d, Conv3d or Linear layer to make Gaussian")
    owners: dict[int, str] = {}
    for name, layer in layers.items():
        if "weight" not in layer._parameters:
            raise ArchitectureError(
                f"the layer {name!r} computes its weight from other parameters (SVI.prepare, weight_norm, "
                "spectral_norm, ...); pass the network as it was before that"
            )
        if nn.parameter.is_lazy(layer.weight):
            raise ArchitectureError(f"the layer {name!r} is lazy; run one batch through the network first")
        if (other := owners.setdefault(id(layer.weight), name)) != name:
            raise ArchitectureError(f"the layers {other!r} and {name!r} share their weight; give each its own")
    for layer in layers.values():
        deviation = prior / layer.weight[0].numel() ** 0.5  # so that a layer keeps the scale of its inputs
        centre = layer.weight.detach().clone() if prior_mean == "weights" else None
        gaussian = Gaussian(layer.weight.detach(), initial * deviation, deviation, centre)
        # "Unsafe" leaves out a trial call, which would draw from the global generator.
        parametrize.register_parametrization(layer, "weight", gaussian, unsafe=True)
        cast(nn.Module, layer.parametrizations).train(layer.training)
    return network


def check_prepared(net: nn.Module) -> None:
    """Raise if a network has no Gaussian weights."""
    if not gaussians(net):
        raise InputError(
            "net must have Gaussian weights: make it with SVI.prepare(net) and train it with "
            "kedge.train(net, data, loss=SVI.loss())"
        )


@dataclass(eq=False)
class SVILoss(MethodLoss):
    """The negative evidence lower bound per image: cross-entropy under a draw of the weights, plus their divergence.

    The draws come from the step's generator, alike in all processes.

    Args:
        kl_weight: Factor on the divergence from the prior; 1 is the bound itself, under which a network with many more
            weights than images learns little. By default images / weights where that is less than 1, so that the loss
            has the mean divergence of a weight in place of its share per image; the posterior is then narrower than the
            exact one.
        warmup: The fraction of the training over which the divergence grows from nothing to its full weight.
        samples: Draws of the weights per step, each a forward pass.
    """

    name = "svi"

    kl_weight: float | None = None
    warmup: float = 0.3
    samples: int = 1

    def __post_init__(self) -> None:
        between("kl_weight", self.kl_weight or 0.0, 0, float("inf"))
        between("warmup", self.warmup, 0, 1)
        at_least("samples", self.samples, 1)

    def check(self, net: Classifier) -> None:
        """Raise if the network has no Gaussian weights."""
        check_prepared(net)

    def loss(self, step: Step) -> StepLoss:
        """The loss of a step."""
        bound, logits = self.bound(step)
        return StepLoss(bound, log_mean_softmax(logits))

    def bound(self, step: Step) -> tuple[Tensor, Tensor]:
        """The negative bound, and the logits under each draw, (M, B, C)."""
        # On the network's device, since drawing every weight on the CPU would take longer than the step itself.
        generator = torch.Generator(step.x.device)
        generator.manual_seed(int(torch.randint(2**62, (), generator=step.generator)))

        def draw(_: int, mean: Tensor) -> Tensor:
            return torch.empty_like(mean).normal_(generator=generator)

        logits, losses = [], []
        for _ in range(self.samples):
            with fixed_noise(step.net, draw):
                logits.append(step.logits())
            losses.append(F.cross_entropy(logits[-1], step.targets(), label_smoothing=step.label_smoothing))
        layers, weight = gaussians(step.net), self.kl_weight
        if weight is None:
            weight = min(1.0, step.images / sum(mean.numel() for _, mean in layers))
        warm = 1.0 if step.done >= self.warmup else step.done / self.warmup
        total = torch.stack([gaussian.divergence(mean) for gaussian, mean in layers]).sum()
        return torch.stack(losses).mean() + weight * warm / step.images * total, torch.stack(logits)


@register
class SVI(DrawnDetector, TrainedDetector):
    """Mean-field variational inference (Graves, NIPS 2011; Blundell et al., ICML 2015): weights that are Gaussians.

    The mean and the deviation of each weight are trained; the prediction is the mean softmax over draws of all weights,
    which disagree where the training images do not determine the weights. Use it where an ensemble takes too much
    memory: it is one network with twice the parameters, and usually neither as accurate nor as good a detector.
    Training costs about as much as usual, scoring a forward pass for each draw. All images share the draws, which come
    from a seed.

    Args:
        net: A network from ``SVI.prepare``, trained with ``SVI.loss()``; an anchored one gives the mean over its
            anchors under each draw.
        samples: Draws of the weights.
        score: ``"msp"`` or ``"entropy"`` of the mean softmax, or the ``"mutual_information"`` of label and draw, which
            needs at least two of them.
        seed: Seed of the draws.

    Example:
        >>> import kedge
        >>> data = kedge.ImageSet(torch.randint(0, 256, (64, 1, 8, 8)).byte(), torch.arange(64) % 2)
        >>> net = SVI.prepare(kedge.models.build("compact", width=4, classes=2, channels=1))
        >>> net = kedge.train(net, data, kedge.training.recipe("demo", epochs=1), loss=SVI.loss())
        >>> SVI(net, samples=4).fit(data).score(data).shape
        torch.Size([64])
    """

    name = "svi"
    loss = SVILoss

    def __init__(self, net: nn.Module, *, samples: int = 10, score: str = "msp", seed: int = 0) -> None:
        super().__init__(net, samples=samples, score=score, seed=seed)
        check_prepared(self.net)

    @classmethod
    def prepare(cls, net: nn.Module, *, initial: float = 0.1, prior: float = 1.0, prior_mean: str = "zero") -> Any:
        """A copy of a network in which the weight of every convolution and linear layer is a Gaussian.

        In training mode every forward draws new weights; in evaluation mode ``net(x)`` uses the means. Biases and
        normalisation stay numbers, and so does the anchored layer: anchor a network first and prepare it then.

        Args:
            net: Any network with Conv1d, Conv2d, Conv3d or Linear layers. Its weights become the means.
            initial: The first standard deviation, as a fraction of the prior's.
            prior: The standard deviation of the prior, in units of one over the root of a layer's inputs per output,
                which is about that of freshly drawn weights.
            prior_mean: ``"zero"``, or ``"weights"`` for the weights as they are now, if the network is trained already.
        """
        if isinstance(net, Ensemble):
            raise InputError("net must be one network, got an ensemble; prepare each of its members")
        return convert(net, "svi", initial=initial, prior=prior, prior_mean=prior_mean)

    def drawn(self, number: int) -> contextlib.AbstractContextManager[None]:
        """Fix the weights to a draw inside the block."""

        def draw(layer: int, mean: Tensor) -> Tensor:
            generator = torch.Generator().manual_seed(mix_seed(self.seed, number, layer))
            # On the CPU and in single precision whatever the network's, so that a draw is the same everywhere.
            return torch.randn(mean.shape, generator=generator, dtype=torch.float32).to(mean)

        return fixed_noise(self.net, draw)
