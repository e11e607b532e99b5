"""NAC."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from kedge.anchoring.sampling import choose
from kedge.checks import at_least, between, finite, shape_of
from kedge.data import Preprocess
from kedge.detectors.base import Cost, Detector, Outputs
from kedge.detectors.registry import register
from kedge.errors import InputError
from kedge.models.features import INPUT
from kedge.models.head import chosen_layers
from kedge.threads import own_thread

BASE = 1000  # bins become narrower towards the middle by the logarithm of this base


@register
class NAC(Detector):
    """Neuron activation coverage (NAC-UE; Liu et al., ICLR 2024): how usual the state of each neuron is.

    The state of a neuron is ``sigmoid(alpha o g)``, with o its output and g the gradient of ``KL(uniform, softmax(z))``
    for it, both averaged over the positions of a map. [0, 1] is cut into bins, and a bin's coverage is the number of
    training images with their state in it over ``full``, at most one. The score is minus the coverage of the states of
    an image, averaged over the neurons of each layer and over layers. Use it where several layers can be read and a
    gradient is affordable: it uses what the last layer has discarded. One forward and one backward pass; `fit` reads
    1,000 images. The paper chooses layers, alpha, bins and ``full`` for each layer with OOD validation images, which
    kedge does not take; the defaults are the published ones for the last layer of CIFAR-10, and its code sums over the
    positions instead of averaging, which belongs to alpha. With anchors o is a mean over them, and g the gradient for a
    change that they share. https://arxiv.org/abs/2306.02879

    Args:
        net: Any classifier, unanchored or anchored.
        layers: Names of layers inside the network, ``"fc:in"`` for the input of one, that give (B, channels, ...). By
            default all stages of kedge's networks, and the input of the head of others.
        alpha: The steepness of the sigmoid, of all layers or of each.
        bins: The number of bins, even; they are narrower around one half, as in the published code.
        full: The number of training images with which a bin is fully covered; the paper's O.
        limit: Training images to use at most, a random sample.
        seed: Random seed of the sample.

    Example:
        >>> net = nn.Sequential(nn.Flatten(), nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> NAC(net, layers=["1", "3:in"]).fit(torch.rand(50, 3, 2, 2)).score(torch.rand(4, 3, 2, 2)).shape
        torch.Size([4])
    """

    name = "nac"
    reads_train = False  # a sample is enough
    reads = "gradients"
    options = ("layers", "alpha", "bins", "full", "limit", "seed")
    grid: Mapping[str, Sequence[Any]] = {"alpha": (1.0, 10.0, 100.0, 1000.0), "full": (5, 50, 500)}

    def __init__(
        self,
        net: nn.Module,
        *,
        layers: Sequence[str] | None = None,
        alpha: float | Sequence[float] = 100.0,
        bins: int = 50,
        full: int = 50,
        limit: int = 1000,
        seed: int = 0,
    ) -> None:
        super().__init__(net)
        self.layers = chosen_layers(self.net.network, layers)
        self.alpha = alpha if isinstance(alpha, int | float) else tuple(alpha)
        self._alphas = (self.alpha,) * len(self.layers) if isinstance(self.alpha, int | float) else self.alpha
        for value in self._alphas:
            between("alpha", value, 0, math.inf, open_ends=True)
        if len(self._alphas) != len(self.layers):
            raise InputError(f"alpha must be one number, or one for each of {list(self.layers)}; got {alpha!r}")
        self.bins, self.full = at_least("bins", bins, 2), at_least("full", full, 1)
        if bins % 2:
            raise InputError(f"bins must be even, half of them on each side of one half; got {bins}")
        self.limit, self.seed = at_least("limit", limit, 1), at_least("seed", seed, 0)
        self.coverage: dict[str, Tensor] = {}  # of each neuron's bins, (neurons, bins)

    @property
    def cost(self) -> Cost:
        """A pass and its gradient."""
        return Cost(forward=self.net.passes, backward=self.net.passes)

    def fit_method(self, train_set: Any, preprocess: Preprocess) -> None:
        """Count the states of a sample of the training images."""
        super().fit_method(train_set, preprocess)
        sample = self.as_input(choose(train_set, preprocess, self.limit, "random", self.seed, at_least=1))
        self.net.features(sample[:1], self.layers)  # checks the layers
        counts: dict[str, Tensor] = {}
        for piece in self.pieces(sample):
            logits, bins = self._bins_of(piece)
            finite("logits", logits, "check the network's weights")
            for name, index in bins.items():
                counts.setdefault(name, torch.zeros(index.shape[1], self.bins, device=index.device))
                counts[name].scatter_add_(1, index.T, torch.ones_like(index.T, dtype=torch.float32))
        self.coverage = {name: (count / self.full).clamp(max=1) for name, count in counts.items()}

    def outputs(self, x: Tensor) -> Outputs:
        """The network's logits, and minus the mean coverage of the states."""
        logits, coverages = [], []
        for piece in self.pieces(x):
            some, bins = self._bins_of(piece)
            logits.append(some)
            layers = [self.coverage[name].to(some).gather(1, index.T).mean(dim=0) for name, index in bins.items()]
            coverages.append(torch.stack(layers).mean(dim=0))  # (B,)
        return Outputs(torch.cat(logits), -torch.cat(coverages))

    def state(self) -> dict[str, Tensor]:
        """The coverage of each layer."""
        return dict(self.coverage)

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore the coverage."""
        self.coverage = {name: state[name] for name in self.layers}
        if any(each.ndim != 2 or each.shape[1] != self.bins for each in self.coverage.values()):
            raise InputError(f"the coverage of NAC must be (neurons, {self.bins})")

    def _bins_of(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Logits (B, C), and of each layer the bins of its states, (B, neurons)."""
        logits, states = self._states(x)
        inner = state_edges(self.bins)[1:-1].to(logits)
        return logits, {name: torch.bucketize(state, inner, right=True) for name, state in states.items()}

    def _states(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Logits (B, C), and the states (B, neurons) of each layer."""
        with torch.inference_mode(False), torch.enable_grad(), captured(self.net.network, self.layers) as values:
            logits = self.net(x.clone().requires_grad_())
            loss = -logits.log_softmax(dim=1).mean(dim=1).sum()  # KL(uniform, softmax), up to a constant
            calls = [call for name in self.layers for call in values[name]]
            gradients = iter(torch.autograd.grad(loss, calls, materialize_grads=True))
        if len(calls) > len(self.layers) and len(x) > 1:  # groups of anchors or of images: then one image at a time
            parts = [self._states(image) for image in x.split(1)]
            names = {name: torch.cat([states[name] for _, states in parts]) for name in self.layers}
            return torch.cat([each for each, _ in parts]), names
        states = {}
        for name, alpha in zip(self.layers, self._alphas, strict=True):
            o = torch.cat([_pooled(value.detach(), len(x), name) for value in values[name]]).mean(dim=0)
            g = torch.cat([_pooled(next(gradients), len(x), name) for _ in values[name]]).sum(dim=0)
            states[name] = (alpha * o * g).sigmoid()
        return logits.detach(), states


def state_edges(bins: int) -> Tensor:
    """The ends of the bins, (bins + 1,): from 0 to 1, closer to each other towards one half."""
    half = torch.linspace(1, math.sqrt(BASE), bins // 2 + 1, dtype=torch.float64).log() / math.log(BASE)
    return torch.cat([half, 1 - half.flip(0)[1:]])


def _pooled(values: Tensor, images: int, name: str) -> Tensor:
    """Values of a layer for each anchor and image, (K, B, channels), averaged over positions."""
    if values.ndim < 2 or len(values) % images:
        raise InputError(f"layer {name!r} must give (B, channels, ...); it gives {shape_of(values)}")
    return (values.flatten(2).mean(dim=2) if values.ndim > 2 else values).view(-1, images, values.shape[1])


@contextmanager
def captured(network: nn.Module, layers: Sequence[str]) -> Iterator[dict[str, list[Tensor]]]:
    """Inside the block, the values of the named layers in each forward of this thread that records gradients."""
    values: dict[str, list[Tensor]] = {name: [] for name in layers}

    def keep(name: str, value: Tensor) -> Tensor:
        if value.requires_grad:  # not in the forward by which an anchored network is checked
            values[name].append(value)
        return value.clone()  # a later in-place layer must not change what is kept

    def hook(name: str) -> Any:
        module = network.get_submodule(name.removesuffix(INPUT))
        if name.endswith(INPUT):
            before = own_thread(lambda _, inputs: (keep(name, inputs[0]), *inputs[1:]))
            return module.register_forward_pre_hook(before)
        return module.register_forward_hook(own_thread(lambda _, inputs, output: keep(name, output)))

    with ExitStack() as hooks:
        for name in layers:
            hooks.enter_context(hook(name))
        yield values
