"""kedge beside pytorch-ood 0.4.0: the same network, the same images, every method that both have.

    make peers      or, in an environment that has both:
    python benchmarks/peers.py [--repeats N] [--batch B] [--threads T] [--cpu] [--methods A,B] [--json FILE]

A small network is trained lightly on the demo's digits, and scores digits that it did not see and letters. Where both
define a method alike, or can be told to, the scores must agree to 1e-5 of the largest, and the command fails if they do
not; where they differ, a line says how. The two take turns, so that whatever else the machine does falls on both alike;
both get the same batches and threads, and pytorch-ood runs without gradients wherever it can. Printed are medians over
turns, and the median of the ratio in each turn: below 1, kedge is faster. Then the peak memory of fitting N and 4 N
images, each in a process of its own, and a check of `kedge.adapters`.
"""

import argparse
import json
import logging
import os
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, DataLoader, IterableDataset, TensorDataset

import torchvision_ops  # noqa: F401 -- before pytorch_ood

# isort: split
import pytorch_ood
import pytorch_ood.benchmark
import pytorch_ood.metrics
import timm
from pytorch_ood import detector as peers
from scipy.stats import spearmanr
from threadpoolctl import threadpool_limits

import kedge
from kedge import adapters
from kedge.data.digits import digits
from kedge.detectors.features import KEPT_BYTES
from kedge.files import atomic
from kedge.metrics import auroc
from kedge.models import build
from kedge.models.compact import SCALE
from kedge.provenance import provenance
from kedge.studies.outlier_images import letters
from kedge.training import Recipe

TOLERANCE = 1e-5  # of the largest score, in single precision
EPSILON, K, DIM, SAMPLES, POWERS = 0.0014, 50, 64, 10, [1, 2, 3, 4]
MEMORY_IMAGES = 5_000


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
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        """Images less their mean, over their deviation."""
        return self.net.normalise(x)


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
    fits: bool = True
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


METHODS = [
    Method(
        "MSP", lambda d, batches: kedge.MSP(d.net).fit(batches), lambda d, batches: peers.MaxSoftmax(d.net), fits=False
    ),
    Method(
        "MaxLogit",
        lambda d, batches: kedge.MaxLogit(d.net).fit(batches),
        lambda d, batches: peers.MaxLogit(d.net),
        fits=False,
    ),
    Method(
        "Entropy",
        lambda d, batches: kedge.Entropy(d.net).fit(batches),
        lambda d, batches: peers.Entropy(d.net),
        fits=False,
    ),
    Method(
        "Energy",
        lambda d, batches: kedge.Energy(d.net).fit(batches),
        lambda d, batches: peers.EnergyBased(d.net),
        fits=False,
    ),
    Method(
        "TemperatureScaling",
        fitted_temperature,
        lambda d, batches: peers.TemperatureScaling(d.net).fit(load(d.held_out, batches.batch_size)),
        agrees=False,
        note=note_temperature,
    ),
    Method(
        "ODIN",
        lambda d, batches: kedge.ODIN(d.net, epsilon=EPSILON).fit(batches),
        lambda d, batches: peers.ODIN(d.net, eps=EPSILON),
        fits=False,
        note=note_odin,
    ),
    Method(
        "Mahalanobis",
        lambda d, batches: kedge.Mahalanobis(d.net, layers=["flatten"]).fit(batches),
        lambda d, batches: peers.Mahalanobis(encoder(d.net)).fit(batches),
        align=lambda scores, d: 2 * len(d.train) * scores,
        note=lambda mine, its, d: "the peer's covariance is a sum, not a mean, and its score half the distance: x 2 N",
    ),
    Method(
        "Mahalanobis moved",
        lambda d, batches: kedge.Mahalanobis(d.net, layers=["flatten"], epsilon=EPSILON).fit(batches),
        lambda d, batches: peers.MahalanobisODIN(encoder(d.net), eps=EPSILON).fit(batches),
        align=lambda scores, d: 2 * len(d.train) * scores,
        note=lambda mine, its, d: "as above, after a step of epsilon towards the closest class",
    ),
    Method(
        "KNN",
        lambda d, batches: kedge.KNN(d.net, k=K).fit(batches),
        lambda d, batches: peers.KNN(encoder(d.net), k=K).fit(batches),
    ),
    Method(
        "ViM",
        lambda d, batches: kedge.ViM(d.net, dim=DIM).fit(batches),
        peer_vim,
        align=lambda scores, d: vim_in_double(d),
        note=note_vim,
    ),
    Method(
        "ReAct",
        lambda d, batches: kedge.ReAct(d.net, percentile=0.9).fit(batches),
        lambda d, batches: peers.ReAct(encoder(d.net), d.net.network.fc, percentile=0.9).fit(batches),
    ),
    Method("Gram", lambda d, batches: kedge.Gram(d.net, powers=POWERS).fit(batches), peer_gram, note=note_gram),
    Method(
        "MCDropout",
        lambda d, batches: kedge.MCDropout(d.net, samples=SAMPLES).fit(batches),
        lambda d, batches: peers.MCD(d.net, samples=SAMPLES, mode="mean"),
        fits=False,
        agrees=False,
        note=note_dropout,
    ),
]


# --- side by side -----------------------------------------------------------------------------------------------------


@dataclass
class Row:
    """What was found of one method."""

    name: str
    correlation: float
    difference: float
    scale: float
    agrees: bool
    fit: tuple[float, float] | None  # seconds of kedge and the peer
    fit_ratio: float | None
    score: tuple[float, float]
    score_ratio: float
    note: str

    @property
    def passed(self) -> bool:
        """Whether the scores agree where they must."""
        return not self.agrees or self.difference <= TOLERANCE * self.scale


def seconds(function: Callable[[], Any], clock: Callable[[], float]) -> float:
    """How long one call takes."""
    started = clock()
    function()
    return clock() - started


def peer_scores(detector: Any, x: Tensor, batch: int) -> Tensor:
    """Scores in batches, as pytorch-ood's loops take them."""
    with torch.no_grad():
        return torch.cat([detector(part) for part in x.split(batch)])


def compare(method: Method, data: Data, *, batch: int, repeats: int, clock: Callable[[], float]) -> Row:
    """Run a method in both libraries, in turns."""
    loader, x = load(data.train, batch), data.images
    mine, its = method.kedge(data, loader), method.peer(data, loader)  # these warm up
    scores = {"kedge": mine.score(x, batch_size=batch), "peer": peer_scores(its, x, batch)}
    build = {"kedge": lambda: method.kedge(data, loader), "peer": lambda: method.peer(data, loader)}
    run = {"kedge": lambda: mine.score(x, batch_size=batch), "peer": lambda: peer_scores(its, x, batch)}
    times: dict[tuple[str, str], list[float]] = {}
    for turn in range(repeats):
        order = ("kedge", "peer") if turn % 2 == 0 else ("peer", "kedge")
        for what, calls in (("fit", build), ("score", run)):
            for side in order if what == "score" or method.fits else ():
                times.setdefault((what, side), []).append(seconds(calls[side], clock))
    ours, theirs = scores["kedge"].double(), method.align(scores["peer"].double(), data)
    return Row(
        name=method.name,
        correlation=float(spearmanr(ours, theirs).statistic),
        difference=float((ours - theirs).abs().max()),
        scale=float(theirs.abs().max()),
        agrees=method.agrees,
        fit=medians(times, "fit") if method.fits else None,
        fit_ratio=ratio(times, "fit") if method.fits else None,
        score=medians(times, "score"),
        score_ratio=ratio(times, "score"),
        note=method.note(mine, its, data),
    )


def medians(times: dict[tuple[str, str], list[float]], what: str) -> tuple[float, float]:
    """The median seconds of kedge and of the peer."""
    return statistics.median(times[what, "kedge"]), statistics.median(times[what, "peer"])


def ratio(times: dict[tuple[str, str], list[float]], what: str) -> float:
    """The median over turns of kedge's time over the peer's."""
    pairs = zip(times[what, "kedge"], times[what, "peer"], strict=True)
    return statistics.median(mine / its for mine, its in pairs)


HEAD = (
    f"{'':20}{'rank':>9}{'largest':>11}{'allowed':>10}   {'fit, s':^24}   {'score, s':^24}\n"
    f"{'method':20}{'corr.':>9}{'difference':>11}{'':>10}" + f"   {'kedge':>8}{'peer':>8}{'ratio':>8}" * 2
)


def line(row: Row) -> str:
    """A method's line of the table."""
    allowed = f"{TOLERANCE * row.scale:.1e}" if row.agrees else "differ"
    fit = f"{'-':>8}" * 3 if row.fit is None else f"{row.fit[0]:8.3f}{row.fit[1]:8.3f}{row.fit_ratio:8.2f}"
    score = f"{row.score[0]:8.3f}{row.score[1]:8.3f}{row.score_ratio:8.2f}"
    verdict = "" if row.passed else "  NOT EQUAL"
    return f"{row.name:20}{row.correlation:9.6f}{row.difference:11.1e}{allowed:>10}   {fit}   {score}{verdict}"


# --- memory -----------------------------------------------------------------------------------------------------------


class Generated(IterableDataset[Any]):
    """Batches that are made as they are asked for, so that none of the memory is theirs."""

    def __init__(self, images: int, batch: int = 125) -> None:
        self.batches, self.batch = images // batch, batch

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(0)
        for _ in range(self.batches):
            yield torch.rand(self.batch, 1, 28, 28, generator=generator), torch.arange(self.batch) % 10

    def __len__(self) -> int:
        return self.batches


def wide() -> kedge.Classifier:
    """A network that is quick and has many features: the time is short and what is kept of each image counts."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 256, 7, stride=7), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 10)]
    layers[-1].bias.data += 1  # ViM needs logits that are positive on average
    return kedge.Classifier(nn.Sequential(*layers)).eval()


STREAMING: dict[str, tuple[Callable[[kedge.Classifier], Any], Callable[[nn.Module], Any]]] = {
    "Mahalanobis": (lambda net: kedge.Mahalanobis(net, layers=["4:in"]), lambda n: peers.Mahalanobis(n[:4])),
    "ViM": (lambda net: kedge.ViM(net, dim=128), lambda n: peers.ViM(n[:4], 128, n[4].weight, n[4].bias)),
    "ReAct": (lambda net: kedge.ReAct(net), lambda n: peers.ReAct(n[:4], n[4])),
    "Gram": (
        lambda net: kedge.Gram(net, layers=["1", "4:in"], powers=POWERS),
        lambda n: peers.Gram(n[4], [n[:2], n[2:4]], 10, POWERS),
    ),
}


def peak(method: str, side: str, images: int) -> float:
    """The peak resident memory, in MB, of a process that fits a method; this one's."""
    torch.set_num_threads(1)
    net = wide()
    mine, its = STREAMING[method]
    detector = mine(net) if side == "kedge" else its(net.network)
    with torch.no_grad():
        detector.fit(DataLoader(Generated(images), batch_size=None))
    # Not ru_maxrss, in which a process starts with its parent's.
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["VmHWM"].split()[0]) / 1024


def growth() -> dict[str, dict[str, tuple[float, float]]]:
    """The peaks for N and 4 N images, of each streaming method on both sides, each in a fresh process."""
    found: dict[str, dict[str, tuple[float, float]]] = {}
    for method in STREAMING:
        for side in ("kedge", "peer"):
            peaks = []
            for images in (MEMORY_IMAGES, 4 * MEMORY_IMAGES):
                command = [sys.executable, __file__, "--peak", method, side, str(images)]
                out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
                peaks.append(float(out.split()[-1]))
            found.setdefault(method, {})[side] = (peaks[0], peaks[1])
    return found


# --- adapters ---------------------------------------------------------------------------------------------------------


class DigitsAndLetters(pytorch_ood.benchmark.Benchmark):
    """A benchmark of pytorch-ood's own kind, with negative labels for letters."""

    ood_names = ("letters",)

    def __init__(self, data: Data) -> None:
        self._data = data

    def train_set(self) -> Any:
        """Digits."""
        return load(self._data.train, 1).dataset

    def test_sets(self, known: bool = True, unknown: bool = True) -> list[Any]:
        """Digits and letters."""
        outside = unit(self._data.letters.images)
        return [
            ConcatDataset([load(self._data.test, 1).dataset, TensorDataset(outside, torch.full((len(outside),), -1))])
        ]


def check_adapters(data: Data, batch: int) -> str:
    """Run each library's detectors inside the other, and compare with its own."""
    anchored = kedge.anchor(data.net.network, mean=data.net.mean, std=data.net.std).eval()
    torch.manual_seed(0)
    timm_net = timm.create_model("resnet10t", num_classes=10, in_chans=1).eval()

    def read(x: Tensor) -> Tensor:
        return anchored.features(x, ["flatten"])[1]["flatten"]

    detectors = {
        "MaxSoftmax": adapters.pytorch_ood(peers.MaxSoftmax(anchored)),
        "ODIN": adapters.pytorch_ood(peers.ODIN(anchored, eps=EPSILON)),
        "Mahalanobis": adapters.pytorch_ood(peers.Mahalanobis(read), net=anchored),
        "MaxSoftmax of an anchored timm network": adapters.pytorch_ood(peers.MaxSoftmax(kedge.anchor(timm_net))),
    }
    own = {
        "MaxSoftmax": kedge.MSP(anchored),
        "ODIN": kedge.ODIN(anchored, epsilon=EPSILON),
        "Mahalanobis": kedge.Mahalanobis(anchored, layers=["flatten"]),
        "MaxSoftmax of an anchored timm network": kedge.MSP(kedge.anchor(timm_net)),
    }
    part = data.train.subset(torch.arange(500)), data.held_out.subset(torch.arange(200))
    for detector in (*detectors.values(), *own.values()):
        detector.fit(part[0]).calibrate(part[1])
    test, outside = data.test.subset(torch.arange(100)), data.letters.subset(torch.arange(100))
    found, expected = (kedge.evaluate(each, test, [outside]).results for each in (detectors, own))
    inside = [f"{name} {found[name].mean('auroc'):.4f} ({expected[name].mean('auroc'):.4f})" for name in detectors]

    energy = adapters.pytorch_ood(kedge.Energy(data.net)).fit(load(data.train, batch))
    (benchmark,) = DigitsAndLetters(data).evaluate(energy, loader_kwargs={"batch_size": batch})
    metrics = pytorch_ood.metrics.OODMetrics()
    for x, y in DataLoader(DigitsAndLetters(data).test_sets()[0], batch_size=batch):
        metrics.update(energy(x), y)
    values = (metrics.compute()["AUROC"], benchmark["AUROC"])
    scores = energy.detector.score(data.test), energy.detector.score(data.letters)
    return (
        f"adapters: AUROC of pytorch-ood's detectors on an anchored network in kedge.evaluate (kedge's own): "
        f"{', '.join(inside)}; kedge's Energy in pytorch-ood's OODMetrics and Benchmark {values[0]:.4f}, "
        f"{values[1]:.4f} (kedge's AUROC {auroc(*scores):.4f})"
    )


def main() -> int:
    """Run the comparison, print it, and return 1 if scores that must agree do not."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--cpu", action="store_true", help="count processor time, on a machine that others use")
    parser.add_argument("--methods", default=None, help="some of them, with commas; all by default")
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--peak", nargs=3, metavar=("METHOD", "SIDE", "IMAGES"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    logging.getLogger("pytorch_ood").setLevel(logging.ERROR)  # it warns of every network that is on the CPU
    if options.peak:
        print(peak(options.peak[0], options.peak[1], int(options.peak[2])))
        return 0
    chosen = [m for m in METHODS if options.methods is None or m.name in options.methods.split(",")]
    warnings.filterwarnings("ignore", module="pytorch_ood")
    torch.set_num_threads(options.threads)
    load_before = os.getloadavg()[0]
    with threadpool_limits(options.threads):
        data = prepare()
        clock = time.process_time if options.cpu else time.perf_counter
        print(
            f"pytorch-ood {pytorch_ood.__version__} and kedge on a compact network of width 16, images of 28 x 28: "
            f"{len(data.train)} fitted, {len(data.images)} scored, batch {options.batch}, {options.threads} threads, "
            f"{options.repeats} turns, {'processor' if options.cpu else 'wall-clock'} time; load of the machine before "
            f"{load_before:.1f}\n\n{HEAD}",
            flush=True,
        )
        rows = []
        for method in chosen:
            rows.append(compare(method, data, batch=options.batch, repeats=options.repeats, clock=clock))
            print(line(rows[-1]), flush=True)
        print(*(f"  {row.name}: {row.note}" for row in rows if row.note), sep="\n")
        memory = growth() if options.methods is None else {}
        if memory:
            print(
                f"\npeak memory of fit, MB: {MEMORY_IMAGES} images -> {4 * MEMORY_IMAGES} images (growth); kedge's ViM "
                f"keeps up to {KEPT_BYTES >> 20} MB of features and reads larger sets twice"
            )
        for method, sides in memory.items():
            texts = [f"{side} {low:.0f} -> {high:.0f} ({high - low:+.0f})" for side, (low, high) in sides.items()]
            print(f"  {method:12} {'   '.join(texts)}")
        adapted = check_adapters(data, options.batch) if options.methods is None else ""
        print(f"\n{adapted}" if adapted else "")
    if options.json:
        result = {"made with": provenance(), "repeats": options.repeats, "load": load_before}
        result |= {"rows": [vars(row) for row in rows], "memory": memory, "adapters": adapted}
        with atomic(options.json) as temporary:
            temporary.write_text(json.dumps(result, indent=1))
    return 0 if all(row.passed for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
