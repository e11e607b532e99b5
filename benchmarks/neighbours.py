"""KNN and NNGuide with a large bank: a query by the index, by the exact scan, and the network's pass over the images.

    python benchmarks/neighbours.py --data-dir DATA [--rows 100000 1000000] [--features runs/features] [--json FILE]

The bank is made of features of EfficientNet-Lite0 (extra `pretrained`) of photographs of 121 classes of pets, flowers
and Caltech-101, and extended to --rows: a row is a mixture of two random photographs of a class, in random shares, and
noise, 0.41 times the difference of two other photographs of a random class, so that the means of classes and the
variance within them stay as they are; no value falls below zero. The queries are photographs as they are: others of
the same classes (test), of other classes of the same sets (near), textures and other objects (far).

Timed in turns, by the processor's clock: a batch of queries by exact scan and by index, and the plain forward pass over
as many images of 160 pixels. Printed too are the recall at k for each set of queries, AUROC with either, the time that
the index takes to build, its memory beside the bank's, and with --save the size of the file. By calculation a
million rows take 8 GB of memory, and 6 GB on disk with --save.
"""

import argparse
import itertools
import json
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import kedge
from kedge.data import Features, class_split
from kedge.detectors.bank import BankDetector
from kedge.detectors.extraction import extract
from kedge.detectors.search import directions, largest
from kedge.files import atomic
from kedge.metrics import auroc
from kedge.models.classifier import evaluating
from kedge.provenance import provenance
from kedge.studies.bench.turns import in_turns, ratios
from kedge.studies.photo_tasks import (
    CENTER,
    EVERYTHING,
    PHOTOS,
    SIDE,
    UNLABELLED,
    joined,
    linear_head,
    lite0,
    photos,
)
from kedge.threads import keep_freed_memory, use_threads

METHODS = {"knn": kedge.KNN, "nnguide": kedge.NNGuide}
NOISE = 6**-0.5  # mixtures of two keep 2/3 of the variance on average, and a difference of two has twice as much
BLOCK = 2**13
PLAIN, EXACT, INDEX = "plain forward pass", "exact scan", "index"


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, default=None, help="folder of all data sets; by default KEDGE_DATA")
    parser.add_argument("--features", type=Path, default=Path("runs/features"), help="folder for extracted features")
    parser.add_argument("--rows", nargs="+", type=int, default=[1_000_000])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--k", type=int, default=50, help="which neighbour, or how many")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--queries", type=int, default=200, help="photographs of each kind for recall and AUROC")
    parser.add_argument("--repeats", type=int, default=5, help="turns of each")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--save", action="store_true", help="also save the detector, which takes as much disk")
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    use_threads(options.threads)
    keep_freed_memory()  # as the command line does
    fit, queries = photographs(options.data_dir, options.features, options.queries)
    net = linear_head(lite0(), fit, seed=0)
    last = net.network.get_submodule(fit.head)
    result: dict[str, Any] = {"made with": provenance(), "photographs": len(fit), "banks": []}
    result |= {key: getattr(options, key) for key in ("k", "batch", "queries", "repeats", "threads")}
    with torch.no_grad(), evaluating(net):
        for count, name in itertools.product(options.rows, options.methods):
            result["banks"].append(measured(METHODS[name], net, last, extended(fit, count), queries, options))
            if options.json is not None:
                with atomic(options.json) as temporary:
                    temporary.write_text(json.dumps(result, indent=1) + "\n")


def photographs(data_dir: Path | None, folder: Path, count: int) -> tuple[Features, dict[str, Tensor]]:
    """Features to fit on, and so many of each kind as queries."""
    backbone = lite0()
    read = {}
    for name in (*PHOTOS, *UNLABELLED):
        images = photos(name, data_dir)
        read[name] = extract(backbone, images, folder / "lite0" / images.name, preprocess=CENTER)
    known, near = (joined(parts, "photographs") for parts in zip(*(class_split(read[n]) for n in PHOTOS), strict=True))
    fit, _, test = EVERYTHING.split(known, 0)
    draw = torch.Generator().manual_seed(0)
    kinds = {"test": test, "near": near, **{name: read[name] for name in UNLABELLED}}
    return fit, {
        kind: each.features[torch.randperm(len(each), generator=draw)[:count]].float() for kind, each in kinds.items()
    }


def extended(fit: Features, rows: int) -> Tensor:
    """Features of photographs, extended to so many rows (N, d); see the top of this file."""
    draw = torch.Generator().manual_seed(0)
    assert fit.labels is not None
    labels, order = fit.labels.sort()
    z, counts = fit.features.float()[order], torch.bincount(labels)
    starts = counts.cumsum(0) - counts

    def two(count: int) -> tuple[Tensor, Tensor]:
        """Two random photographs of a class, so many times."""
        first = torch.randint(len(z), (count,), generator=draw)
        own = labels[first]
        second = starts[own] + (torch.rand(count, generator=draw, dtype=torch.float64) * counts[own]).long()
        return z[first], z[second]

    result = torch.empty(rows, z.shape[1])
    for part in result.split(BLOCK):
        share = torch.rand(len(part), 1, generator=draw)
        (one, other), (more, less) = two(len(part)), two(len(part))
        part.copy_((share * one + (1 - share) * other + NOISE * (more - less)).clamp_(min=0))
    return result


def measured(
    method: type[BankDetector],
    net: kedge.Classifier,
    last: Any,
    rows: Tensor,
    queries: dict[str, Tensor],
    options: argparse.Namespace,
) -> dict[str, Any]:
    """Times, recall, AUROC, memory and size of one method."""
    detector = method(net, k=options.k, limit=len(rows), index="ivf")  # type: ignore[call-arg]
    for part in rows.split(BLOCK):
        part.copy_(detector.rows(part, last(part)))  # in place, since `fit` keeps no more than these
    detector.bank = rows
    began = time.process_time()
    detector.build_index()
    built = time.process_time() - began
    index = detector.inverted_file
    assert index is not None
    by_logits = {kind: (last(z), z) for kind, z in queries.items()}

    def scores(by_index: bool) -> dict[str, Tensor]:
        detector.inverted_file = index if by_index else None
        return {kind: detector.of_features(*each).score.double() for kind, each in by_logits.items()}

    exact, approximate = scores(False), scores(True)
    recall = {kind: found(detector, directions(z)) for kind, z in queries.items()}
    areas = [
        {kind: 100 * auroc(each["test"], each[kind]) for kind in each if kind != "test"}
        for each in (exact, approximate)
    ]
    images = torch.rand(options.batch, 3, SIDE, SIDE)
    batch = tuple(each[: options.batch] for each in by_logits["test"])

    def query(by_index: bool) -> None:
        detector.inverted_file = index if by_index else None
        detector.of_features(*batch)

    calls = {PLAIN: lambda: net(images), EXACT: lambda: query(False), INDEX: lambda: query(True)}
    times = in_turns(calls, repeats=options.repeats, clock=time.process_time)
    detector.inverted_file = index
    result: dict[str, Any] = {
        "method": method.name,
        "rows": len(rows),
        "index": {name: getattr(index, name) for name in ("probes", "count", "recall")} | {"cells": len(index.centres)},
        "ratios": {name: vars(ratios(times[name], times[PLAIN])) for name in (EXACT, INDEX)},
        "seconds": {name: min(each) for name, each in times.items()} | {"build": built},
        "recall": recall,
        "auroc exact": areas[0],
        "auroc index": areas[1],
        "MB": {
            "bank": rows.nbytes / 1e6,
            "index": sum(value.nbytes for value in index.state().values()) / 1e6,
            "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3,  # kB on Linux
        },
    }
    if options.save:
        with tempfile.TemporaryDirectory(prefix="kedge-bench-") as folder:
            detector.preprocess = CENTER
            detector.save(Path(folder) / "bank.kedge")
            result["MB"]["file"] = (Path(folder) / "bank.kedge").stat().st_size / 1e6
    report(options, result)
    return result


def found(detector: BankDetector, queries: Tensor) -> float:
    """The share of the k rows nearest to queries (B, d) that are among the candidates of the index."""
    index = detector.inverted_file
    assert index is not None
    _, nearest = largest(queries, detector.bank, detector.k, lambda q, rows: q @ rows.T)  # rows have equal lengths
    each = [torch.isin(own, index.candidates(q)) for own, q in zip(nearest, queries, strict=True)]
    return float(torch.cat(each).double().mean())


def report(options: argparse.Namespace, result: dict[str, Any]) -> None:
    """Print what was measured."""
    index, seconds = result["index"], result["seconds"]
    print(
        f"{result['method']}, {result['rows']:,} rows, k = {options.k}: {index['probes']} of {index['cells']:,} cells,",
        end=" ",
    )
    print(f"{index['count']} candidates, recall in fit {index['recall']:.4f}, built in {seconds['build']:.0f} s")
    for way in (EXACT, INDEX):
        ratio = result["ratios"][way]
        spread = f"({ratio['low']:.2f} to {ratio['high']:.2f})"
        print(f"  {way:10} {ratio['median']:.2f} {spread} passes, {1000 * seconds[way]:.0f} ms for {options.batch}")
    for kind, recall in result["recall"].items():
        areas = [result[f"auroc {way}"].get(kind) for way in ("exact", "index")]
        text = "" if areas[0] is None else f", AUROC {areas[0]:.2f} exact, {areas[1]:.2f} by index"
        print(f"  {kind:16} recall {recall:.4f}{text}")
    print("  MB: " + ", ".join(f"{what} {size:,.0f}" for what, size in result["MB"].items()), flush=True)


if __name__ == "__main__":
    main()
