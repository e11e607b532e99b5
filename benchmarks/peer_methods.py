"""The methods that kedge and pytorch-ood 0.4.0 both have, and the network and images that they are compared on.

Imported by `peers.py`; needs an environment with both libraries.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import torchvision_ops  # noqa: F401 -- before pytorch_ood

# isort: split
from pytorch_ood import detector as peers
from scipy.stats import spearmanr

import kedge
from kedge.data.digits import digits
from kedge.detectors.registry import make
from kedge.models import build
from kedge.models.compact import SCALE
from kedge.studies.outlier_images import letters
from kedge.training import Recipe

EPSILON, K, DIM, SAMPLES, POWERS = 0.0014, 50, 64, 10, [1, 2, 3, 4]
ALPHA = 0.001  # of NCI
SHARE = 0.9  # percentile of the activation shapes, and DICE's sparsity


# --- the network and the images ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Data:
    """Images in [0, 1] for fitting, holding out and scoring, and the sets that they come from."""

    net: kedge.Classifier
    train: kedge.ImageSet
    held_out: kedge.ImageSet
    test: kedge.ImageSet
    letters: kedge.ImageSet

    @property
    def images(self) -> Tensor:
        """What is scored: digits, then letters."""
        return unit(torch.cat([self.test.images, self.letters.images]))


def unit(images: Tensor) -> Tensor:
    """8-bit images as floating point numbers in [0, 1]."""
    return images.float() / 255


def load(images: kedge.ImageSet, batch: int) -> DataLoader[Any]:
    """A loader as pytorch-ood takes it."""
    return DataLoader(TensorDataset(unit(images.images), images.labels), batch_size=batch)


def prepare() -> Data:
    """Train the network on 3,000 digits, half of which the methods fit."""
    data = digits()
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(0))
    cuts = ((0, 3000), (0, 1500), (3000, 3500), (4000, 4250))
    whole, train, held_out, test = (data.subset(order[first:last]) for first, last in cuts)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = build("compact", width=16, channels=1, dropout=0.3)
    recipe = Recipe(epochs=2, batch=64, nesterov=True, schedule="one-cycle", crop=0, flip=False)
    return Data(kedge.train(net, whole, recipe), train, held_out, test, letters(250))


class Normalise(nn.Module):
    """What kedge's classifier does to images, for the peers that want the network in parts."""

    def __init__(self, net: kedge.Classifier) -> None:
        super().__init__()
        self._normalise = net.normalise  # not the network itself, whose weights would count twice

    def forward(self, x: Tensor) -> Tensor:
        """Images less their mean, over their deviation."""
        return self._normalise(x)


class Pool(nn.Module):
    """What the compact network does between its last stage and its last layer."""

    def forward(self, x: Tensor) -> Tensor:
        """The largest value of each channel, scaled."""
        return x.amax(dim=(2, 3)) * SCALE


def parts(net: kedge.Classifier) -> list[nn.Module]:
    """The network in four parts, up to the last layer."""
    n = net.network
    return [nn.Sequential(Normalise(net), n.prep, n.stage1).eval(), n.stage2, n.stage3, Pool()]


def encoder(net: kedge.Classifier) -> nn.Module:
    """From images to the vector before the last layer."""
    return nn.Sequential(*parts(net)).eval()


# --- the methods ------------------------------------------------------------------------------------------------------


def peer_scores(detector: Any, x: Tensor, batch: int) -> Tensor:
    """Scores in batches, as pytorch-ood's loops take them."""
    with torch.set_grad_enabled(isinstance(detector, peers.GradNorm)):  # torch.func fails without gradients
        return torch.cat([detector(part) for part in x.split(batch)])


@dataclass(frozen=True)
class Method:
    """A method in both libraries.

    Attributes:
        name: In the table.
        kedge: Builds and fits kedge's detector on a loader.
        peer: The same for pytorch-ood's.
        fits: Whether there is anything to fit.
        align: What brings the peer's scores to kedge's convention and precision.
        agrees: Whether the definitions are the same, so that the scores must be.
        note: A line where they differ by default, given both detectors and both scores.
    """

    name: str
    kedge: Callable[[Data, DataLoader[Any]], kedge.Detector]
    peer: Callable[[Data, DataLoader[Any]], Any]
    fits: bool = False
    align: Callable[[Tensor, Data], Tensor] = lambda scores, data: scores
    agrees: bool = True
    note: Callable[[Any, Any, Data], str] = lambda mine, its, data: ""


def fitted_temperature(data: Data, loader: DataLoader[Any]) -> kedge.Detector:
    """Fit a temperature on all held-out images, as the peer does; `calibrate` would keep half for the threshold."""
    detector = kedge.TemperatureScaling(data.net).fit(loader)
    with torch.no_grad():
        detector.fit_held_out(data.held_out.images, data.held_out.labels)
    return detector


def nll(data: Data, temperature: float) -> float:
    """The mean negative log-likelihood of the held-out labels at a temperature."""
    with torch.no_grad():
        logits = torch.cat([data.net(unit(x)) for x in data.held_out.images.split(256)])
    return float(nn.functional.cross_entropy(logits.double() / temperature, data.held_out.labels))


def note_temperature(mine: Any, its: Any, data: Data) -> str:
    """How far the peer's optimizer gets."""
    t = float(its.t.detach())
    given = kedge.TemperatureScaling(data.net, temperature=t).fit(data.train)
    x = data.images
    with torch.no_grad():
        apart = float((given.score(x) - its.predict(x)).abs().max())
    return (
        f"50 steps of L-BFGS leave the peer at T = {t:.4f}, NLL {nll(data, t):.6f}; kedge's optimum is "
        f"T = {mine.temperature:.4f}, NLL {nll(data, mine.temperature):.6f}; given the peer's T the scores differ by "
        f"{apart:.0e}"
    )


def note_odin(mine: Any, its: Any, data: Data) -> str:
    """What single precision leaves of the scores at T = 1000."""
    with torch.no_grad():
        values = its.predict(data.images).unique()
    return (
        f"at T = 1000 single precision tells the peer's scores apart into {len(values)} values; kedge "
        "divides and normalises in double"
    )


def peer_gram(data: Data, loader: DataLoader[Any], *, aligned: bool = True) -> Any:
    """The peer on the same layers and powers; aligned, with bounds by predicted class and without held-out tenth."""
    detector = peers.Gram(data.net.network.fc, parts(data.net), 10, POWERS)
    if aligned:
        detector.validation_fraction = 0.0
        loader = Relabelled(loader, data.net)
    return detector.fit(loader)


def peer_vim(data: Data, loader: DataLoader[Any]) -> Any:
    """The peer with the weights of the last layer."""
    head = data.net.network.fc
    return peers.ViM(encoder(data.net), DIM, head.weight, head.bias).fit(loader)


def vim_in_double(data: Data) -> Tensor:
    """Scores by the peer's own code, with its conversions to single precision made double."""
    loader, x = load(data.train, 128), data.images
    single = Tensor.float
    Tensor.float = Tensor.double  # type: ignore[method-assign]
    try:
        return peer_scores(peer_vim(data, loader), x, 128)
    finally:
        Tensor.float = single  # type: ignore[method-assign]


def note_vim(mine: Any, its: Any, data: Data) -> str:
    """What single precision costs the peer."""
    apart = float((mine.score(data.images) - peer_scores(its, data.images, 128)).abs().max())
    return f"aligned: the peer's code in double; the single precision of its decomposition moves scores by {apart:.0e}"


class Relabelled:
    """A loader whose labels are those that a network predicts."""

    def __init__(self, loader: DataLoader[Any], net: kedge.Classifier) -> None:
        self._loader, self._net = loader, net
        with torch.no_grad():
            self._labels = torch.cat([net(x).argmax(dim=1) for x, _ in loader])

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        first = 0
        for x, _ in self._loader:
            yield x, self._labels[first : first + len(x)]
            first += len(x)


def note_gram(mine: Any, its: Any, data: Data) -> str:
    """What the peer does by default."""
    torch.manual_seed(0)
    own = peer_gram(data, load(data.train, 128), aligned=False)
    x = data.images
    with torch.no_grad():
        rho = spearmanr(mine.score(x), own.predict(x)).statistic
    return (
        "aligned: the peer with bounds by predicted class and of all images. By default it takes the true class, holds "
        f"out a random tenth and divides each layer by its mean deviation there: rank correlation {rho:.4f}"
    )


def note_dropout(mine: Any, its: Any, data: Data) -> str:
    """How far two calls of the peer agree with each other."""
    x = data.images
    rho = spearmanr(its.predict(x), its.predict(x)).statistic
    return (
        "the peer draws other masks for every image and call, kedge the same seeded ones for all; two calls of the "
        f"peer correlate by {rho:.4f}"
    )


def gen_in_double(data: Data) -> Tensor:
    """The peer's score of logits in double precision, in which 1 - p does not cancel; as a sum."""
    with torch.no_grad():
        logits = torch.cat([data.net(x) for x in data.images.split(128)]).double()
    return logits.shape[1] * peers.GEN.score(logits)


def rmd_in_double(data: Data) -> Tensor:
    """Scores by the peer with its sums in double precision; as if its covariances were means."""
    torch.set_default_dtype(torch.float64)
    try:
        detector = peers.RMD(nn.Sequential(encoder(data.net), Double())).fit(load(data.train, 128))
        return len(data.train) * peer_scores(detector, data.images, 128)
    finally:
        torch.set_default_dtype(torch.float32)


class Double(nn.Module):
    """Features in double precision."""

    def forward(self, x: Tensor) -> Tensor:
        """The same numbers."""
        return x.double()


def note_gen(mine: Any, its: Any, data: Data) -> str:
    """What the peer's bounds do."""
    with torch.no_grad():
        p = data.net(data.images).softmax(dim=1)
    bounded = ((p < 1e-7) | (p > 1 - 1e-7)).any(dim=1)
    apart = (mine.score(data.images) - gen_in_double(data)).abs()[~bounded].max()
    return (
        "the peer in double, its mean x C; it bounds probabilities by 1e-7, which kedge does not; the "
        f"{int((~bounded).sum())} of {len(p)} images without such are {float(apart):.0e} away"
    )


def own(method: str, **options: Any) -> Callable[[Data, DataLoader[Any]], kedge.Detector]:
    """Builds and fits kedge's detector by the name of its method."""
    return lambda data, batches: make(method, data.net, **options).fit(batches)


def peer(kind: Any, parts: Callable[[kedge.Classifier], tuple[Any, ...]], **options: Any) -> Callable[..., Any]:
    """Builds the peer's detector of the network or of its parts, and fits it if it can be."""

    def build(data: Data, batches: DataLoader[Any]) -> Any:
        detector = kind(*parts(data.net), **options)
        return detector.fit(batches) if kind.requires_fit else detector

    return build


def said(text: str) -> Callable[..., str]:
    """A note that depends on nothing."""
    return lambda *_: text


def whole(net: kedge.Classifier) -> tuple[Any, ...]:
    """The network as it is."""
    return (net,)


def layered(net: kedge.Classifier) -> tuple[Any, ...]:
    """The network without checks of its input, through which torch.func can differentiate."""
    return (nn.Sequential(Normalise(net), net.network).eval(),)


def encoded(net: kedge.Classifier) -> tuple[Any, ...]:
    """What gives the vector before the last layer."""
    return (encoder(net),)


def split(net: kedge.Classifier) -> tuple[Any, ...]:
    """The same, and the last layer."""
    return encoder(net), net.network.fc


def weighted(net: kedge.Classifier) -> tuple[Any, ...]:
    """The same, and the weight and bias of the last layer."""
    return encoder(net), net.network.fc.weight, net.network.fc.bias


def as_maps(net: kedge.Classifier) -> tuple[Any, ...]:
    """The same, with the vector as a map of one position, and the last layer."""
    maps = nn.Sequential(*parts(net), nn.Unflatten(1, (-1, 1, 1))).eval()
    return maps, nn.Sequential(nn.Flatten(), net.network.fc).eval()


def halves(net: kedge.Classifier) -> tuple[Any, ...]:
    """The network up to the second stage, and what comes after it."""
    first, second, third, pool = parts(net)
    return nn.Sequential(first, second).eval(), nn.Sequential(third, pool, net.network.fc).eval()


MAHALANOBIS = "the peer's covariance is a sum, not a mean, and its score half the distance: x 2 N"
METHODS = [
    Method("MSP", own("msp"), peer(peers.MaxSoftmax, whole)),
    Method("MaxLogit", own("max_logit"), peer(peers.MaxLogit, whole)),
    Method("Entropy", own("entropy"), peer(peers.Entropy, whole)),
    Method("Energy", own("energy"), peer(peers.EnergyBased, whole)),
    Method(
        "GEN",
        own("gen"),
        peer(peers.GEN, whole),
        align=lambda scores, d: gen_in_double(d),
        agrees=False,
        note=note_gen,
    ),
    Method(
        "TemperatureScaling",
        fitted_temperature,
        lambda d, batches: peers.TemperatureScaling(d.net).fit(load(d.held_out, batches.batch_size)),
        fits=True,
        agrees=False,
        note=note_temperature,
    ),
    Method("ODIN", own("odin", epsilon=EPSILON), peer(peers.ODIN, whole, eps=EPSILON), note=note_odin),
    Method(
        "Mahalanobis",
        own("mahalanobis", layers=["flatten"]),
        peer(peers.Mahalanobis, encoded),
        fits=True,
        align=lambda scores, d: 2 * len(d.train) * scores,
        note=said(MAHALANOBIS),
    ),
    Method(
        "Mahalanobis (moved)",
        own("mahalanobis", layers=["flatten"], epsilon=EPSILON),
        peer(peers.MahalanobisODIN, encoded, eps=EPSILON),
        fits=True,
        align=lambda scores, d: 2 * len(d.train) * scores,
        note=said("as Mahalanobis, after a step of epsilon towards the closest class"),
    ),
    Method(
        "Mahalanobis (stages)",
        own("mahalanobis", layers=["stage1", "stage2", "stage3"]),
        peer(peers.MultiMahalanobis, lambda net: (parts(net)[:3],)),
        fits=True,
        align=lambda scores, d: 2 * len(d.train) * scores,
        note=said("as Mahalanobis"),
    ),
    Method(
        "RMDS",
        own("rmds", shrinkage=0.0),
        peer(peers.RMD, encoded),
        fits=True,
        align=lambda scores, d: rmd_in_double(d),
        note=said(
            "aligned: kedge without the shrinkage of its default; the peer's code in double, since differences of "
            "large distances cancel in single precision, and times N, since its covariances are sums"
        ),
    ),
    Method("KNN", own("knn", k=K), peer(peers.KNN, encoded, k=K), fits=True),
    Method("ViM", own("vim", dim=DIM), peer_vim, fits=True, align=lambda scores, d: vim_in_double(d), note=note_vim),
    Method("ReAct", own("react", percentile=SHARE), peer(peers.ReAct, split, percentile=SHARE), fits=True),
    Method(
        "VRA",
        own("vra", percentile=(0.6, 0.95)),
        peer(peers.VRA, as_maps, lower_percentile=0.6, upper_percentile=0.95),
        fits=True,
        agrees=False,
        note=said(
            "kedge takes percentiles of all activations and zeroes those below the lower, as the paper; the peer takes "
            "them of each feature and raises those below to the lower"
        ),
    ),
    *(
        Method(
            f"ASH-{kind}",
            own("energy", shape=f"ash-{kind.lower()}", percentile=SHARE),
            peer(peers.ASH, as_maps, variant=f"ash-{kind.lower()}", percentile=SHARE),
        )
        for kind in "PBS"
    ),
    Method("SCALE", own("scale", percentile=SHARE), peer(peers.SCALE, as_maps, percentile=SHARE)),
    Method("LTS", own("lts", percentile=0.95), peer(peers.LTS, split, p=0.05)),
    Method("DICE", own("dice", sparsity=SHARE), peer(peers.DICE, weighted, p=SHARE), fits=True),
    Method("RankFeat", own("rankfeat", layer="stage2"), peer(peers.RankFeat, halves)),
    Method(
        "GradNorm",
        own("gradnorm"),
        peer(peers.GradNorm, layered, param_filter=lambda name: name.endswith("fc.weight")),
        note=said("kedge computes the norm in closed form, the peer by a gradient for each image"),
    ),
    Method("fDBD", own("fdbd"), peer(peers.fDBD, split), fits=True),
    Method("NCI", own("nci", alpha=ALPHA), peer(peers.NCI, split, alpha=ALPHA), fits=True),
    Method("NNGuide", own("nnguide"), peer(peers.NNGuide, split), fits=True),
    Method("SHE", own("she"), peer(peers.SHE, split), fits=True),
    Method("KLM", own("klm"), peer(peers.KLMatching, whole), fits=True),
    Method(
        "OpenMax",
        own("openmax"),
        peer(peers.OpenMax, whole, tailsize=20),
        fits=True,
        align=lambda scores, d: torch.logit(scores),
        agrees=False,
        note=said(
            "kedge gives log-odds, which do not round to one as the peer's probability does, and learns from images "
            "that are classified correctly, as the paper does, where the peer takes all"
        ),
    ),
    Method(
        "NAC",
        lambda d, batches: kedge.NAC(d.net, layers=["flatten"], limit=len(d.train)).fit(batches),
        lambda d, batches: peers.NACUE(d.net, [d.net.network.flatten]).fit(batches),
        fits=True,
        agrees=False,
        note=said("kedge's bins are those of the published code, closer towards one half; the peer's towards 0 and 1"),
    ),
    Method("Gram", own("gram", powers=POWERS), peer_gram, fits=True, note=note_gram),
    Method(
        "MCDropout",
        own("mc_dropout", samples=SAMPLES),
        peer(peers.MCD, whole, samples=SAMPLES, mode="mean"),
        agrees=False,
        note=note_dropout,
    ),
]
