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
from common import save
from kedge import adapters
from kedge.detectors.features import KEPT_BYTES
from kedge.metrics import auroc
from peer_methods import EPSILON, METHODS, POWERS, Data, Method, load, peer_scores, prepare, unit

TOLERANCE = 1e-5  # of the largest score, in single precision
MEMORY_IMAGES = 5_000


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
        rows: list[Row] = []
        record = {
            "repeats": options.repeats, "batch": options.batch, "threads": options.threads,
            "clock": "processor" if options.cpu else "wall", "fitted": len(data.train), "scored": len(data.images),
            "load": load_before,
        }  # fmt: skip
        for method in chosen:
            rows.append(compare(method, data, batch=options.batch, repeats=options.repeats, clock=clock))
            print(line(rows[-1]), flush=True)
            save(options.json, record | {"rows": [vars(row) for row in rows]})
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
    if adapted:
        save(options.json, record | {"rows": [vars(row) for row in rows], "memory": memory, "adapters": adapted})
    return 0 if all(row.passed for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
