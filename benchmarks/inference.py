"""The cost of a detection, in forward passes of the unanchored classifier.

    python benchmarks/inference.py [--networks wrn-40-2 airbench] [--batches 1 32 256] [--repeats 9] [--threads T]
                                   [--memory] [--peers] [--quick] [--json PATH]
                                   [--shipped [--tta N] [--data-dir DIR] [--images N] [--held-out N]]

Engines score the same images in turns, so that other load on the machine affects all alike. Printed are the images per
second of each (median over turns), its time relative to one eager float32 forward pass of the unanchored network
(median and quartiles of the ratio by turn), and with --memory the peak memory that it adds to its own process. With
--peers, in the environment of `make peers`, pytorch-ood's detectors on the unanchored network are timed, too.

Weights are random; early exit takes a share of --full-share images to all anchors. With --shipped the detector that
comes with kedge is measured and, where CIFAR-10 and OOD sets are in the data folder, the quality of each engine,
calibrated on its own scores, against the exact one; the share of early exit is then that on CIFAR-10's test images.
With --tta 1 all anchors are paired with the image itself, as in the paper.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

import kedge
from kedge.data import sources
from kedge.errors import KedgeError
from kedge.files import write_json
from kedge.studies.bench import (
    FULL_SHARE,
    TITLES,
    Prepared,
    detector_of,
    full_share,
    measure,
    prepare_engines,
    quality,
    row_title,
    subject_title,
)
from kedge.studies.bench.plain import channels_last, without_anchors
from kedge.studies.bench.subjects import noise_images
from kedge.studies.bench.turns import Quartiles, in_turns, ratios
from kedge.studies.sets import FILES, find
from kedge.threads import keep_freed_memory, use_threads

NETWORKS: dict[str, dict[str, int]]
NETWORKS = {"wrn-40-2": {}, "resnet18-cifar": {}, "compact": {"width": 32}, "airbench": {"width": 64}, "resnet50": {}}
DEFAULT = ("wrn-40-2", "resnet18-cifar", "compact", "airbench")
QUICK = {"networks": ["compact"], "batches": [1, 32], "repeats": 3}
SHIPPED = "cifar10"


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="*", default=list(DEFAULT), choices=list(NETWORKS))
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 32, 256])
    parser.add_argument("--engines", nargs="+", default=None, choices=list(TITLES), help="only these")
    parser.add_argument("--repeats", type=int, default=9, help="turns of each engine")
    parser.add_argument("--threads", type=int, default=None, help="of every engine; by default one for each core")
    parser.add_argument("--full-share", type=float, default=FULL_SHARE, help="share of images that take all anchors")
    parser.add_argument("--memory", action="store_true", help="peak memory, each in a process of its own")
    parser.add_argument("--peers", action="store_true", help="pytorch-ood's detectors too; it must be installed")
    parser.add_argument("--shipped", action="store_true", help=f"the detector {SHIPPED} instead of random weights")
    parser.add_argument("--tta", type=int, default=None, help="test-time augmentation, with --shipped")
    parser.add_argument("--data-dir", default=None, help="where data sets are; KEDGE_DATA by default")
    parser.add_argument("--images", type=int, default=2000, help="at most, of a set, for quality; 0 for all")
    parser.add_argument("--held-out", type=int, default=0, help="at most, to calibrate on; 0 for all")
    parser.add_argument("--processor", action="store_true", help="seconds of the processor, where others use it too")
    parser.add_argument("--quick", action="store_true", help="one network and few turns")
    parser.add_argument("--json", default=None)
    options = parser.parse_args()
    if options.quick:
        vars(options).update(QUICK)
    theirs = pytorch_ood() if options.peers else None  # before minutes of measuring, not after
    keep_freed_memory()  # as the command line does
    threads = use_threads(options.threads)
    result: dict[str, Any] = {"options": vars(options), "threads": threads, "networks": [], "quality": None}
    with tempfile.TemporaryDirectory(prefix="kedge-bench-") as folder:
        for name in [SHIPPED] if options.shipped else options.networks:
            detector = kedge.load(SHIPPED) if options.shipped else detector_of(name, **NETWORKS[name])
            prepared, share = None, options.full_share
            if options.shipped and (sets := Sets.found(options.data_dir, options.images, options.held_out)):
                if options.tta is not None:
                    detector = with_tta(detector, options.tta, sets.held_out)
                prepared = prepare_engines(
                    detector, Path(folder), engines=options.engines, training_images=sets.train, held_out=sets.held_out
                )
                result["quality"] = quality(prepared, sets.test, sets.ood, report=note)
                share = measured_share(prepared, result["quality"], sets.test.name, share)
                print("\n".join(quality_table(result["quality"], sets.test.name)), end="\n\n")
            if options.tta is not None and prepared is None:
                parser.error("--tta needs --shipped and images to calibrate on, in the data folder")
            record = measure(
                detector,
                name=name,
                batches=options.batches,
                repeats=options.repeats,
                engines=options.engines,
                share=share,
                memory=options.memory,
                report=note,
                prepared=prepared,
                clock=time.process_time if options.processor else None,
            )
            result["networks"].append(record)
            print("\n".join(time_table(record)), end="\n\n", flush=True)
            if theirs is not None:
                record["peers"] = [
                    row for batch in options.batches for row in peers(theirs, detector.net, batch, options.repeats)
                ]
                print("\n".join(peers_table(record["peers"])), end="\n\n", flush=True)
    if options.json:
        write_json(options.json, result)


def pytorch_ood() -> Any:
    """Its detectors."""
    try:
        import_module("torchvision_ops")  # first
        return import_module("pytorch_ood.detector")
    except ImportError as error:
        raise SystemExit(f"--peers needs pytorch-ood: run it with the Python of `make peers` ({error})") from error


def peers(theirs: Any, net: kedge.Anchored, batch: int, repeats: int) -> list[dict[str, Any]]:
    """pytorch-ood's detectors on the network without anchoring, in turns with one forward pass of it."""
    plain = channels_last(without_anchors(net)).eval()
    layer = plain.network.feature_layers[-1]  # type: ignore[union-attr]

    def features(x: torch.Tensor) -> torch.Tensor:
        return plain.features(x, [layer])[1][layer].flatten(1)

    assert net.anchors is not None
    shape = tuple(net.anchors.shape[1:])
    train = torch.utils.data.TensorDataset(noise_images(100, shape) / 255, torch.arange(100) % 10)
    detectors = {
        "MSP": theirs.MaxSoftmax(plain),
        "Energy": theirs.EnergyBased(plain),
        "ODIN": theirs.ODIN(plain),
        "Mahalanobis": theirs.Mahalanobis(features).fit(torch.utils.data.DataLoader(train, batch_size=50)),
    }
    images = noise_images(batch, shape, seed=4)
    calls = {"unanchored": torch.inference_mode()(lambda: plain(images))}
    for name, peer in detectors.items():  # ODIN takes a gradient
        run = peer if name == "ODIN" else torch.no_grad()(peer.predict)
        calls[name] = lambda run=run: run(images / 255)
    times = in_turns(calls, repeats=repeats)
    return [
        {
            "method": name,
            "batch": batch,
            "images_per_second": batch / Quartiles.of(times[name]).median,
            "ratio": ratios(times[name], times["unanchored"]).median,
        }
        for name in detectors
    ]


def peers_table(rows: list[dict[str, Any]]) -> Iterator[str]:
    """The peers as text."""
    yield f"  {'pytorch-ood, without anchoring':<38} batch   images/s   unanchored passes"
    for row in rows:
        yield f"  {row['method']:<38} {row['batch']:5} {row['images_per_second']:10,.1f} {row['ratio']:7.2f}"


class Sets:
    """The images that the quality of engines is measured on."""

    def __init__(self, data_dir: str | None, images: int, held_out: int) -> None:
        whole = sources.load_dataset("cifar10", "train", data_dir=data_dir)
        test = sources.load_dataset("cifar10", "test", data_dir=data_dir)
        assert isinstance(whole, kedge.ImageSet)
        assert isinstance(test, kedge.ImageSet)
        self.train, rest = whole.split(0.95, seed=0)  # as the shipped detector was trained and calibrated
        self.held_out = some(rest, held_out)
        self.test = some(test, images)
        self.ood = [some(each, images) for each in find(list(FILES), side=32, data_dir=data_dir).sets]

    @classmethod
    def found(cls, data_dir: str | None, images: int, held_out: int) -> "Sets | None":
        """The sets, or None with a note where they are not there."""
        try:
            sets = cls(data_dir, images, held_out)
            if sets.ood:
                return sets
            reason = f"none of {', '.join(FILES.values())} is in the data folder"
        except KedgeError as error:
            reason = str(error)
        print(f"quality left out: {reason}", file=sys.stderr)
        return None


def with_tta(detector: kedge.AMP, tta: int, held_out: kedge.ImageSet) -> kedge.AMP:
    """A detector with the same network and anchors and another test-time augmentation."""
    copied = kedge.AMP(detector.net, **detector.config() | {"tta": tta})
    copied.preprocess, copied.classes = detector.preprocess, detector.classes
    return copied.calibrate(held_out)


def some(images: kedge.ImageSet, most: int) -> kedge.ImageSet:
    """At most this many images of a set, evenly spaced."""
    if not most or len(images) <= most:
        return images
    return images.subset([place * len(images) // most for place in range(most)])


def measured_share(prepared: Prepared, found: dict[str, Any], test: str, default: float) -> float:
    """The share of test images that take all anchors; the default without early exit."""
    return full_share(found["early-exit"]["passes"][test], prepared.passes) if "early-exit" in found else default


def time_table(record: dict[str, Any]) -> Iterator[str]:
    """One network as text."""
    spec = record["network"]["spec"]
    size = f" of width {spec['arguments']['width']}" if spec and spec["name"] in ("compact", "airbench") else ""
    title = f"{subject_title(record)} ({record['network']['type']}{size}), {record['passes']} anchors"
    yield f"{title}, {record['threads']} threads; {record['made with']['machine']}"
    yield f"  median and quartiles of {record['repeats']} turns"
    yield f"  {'engine':<48} batch   images/s   unanchored passes             MB"
    for row in record["inference"]:
        memory = f"{row['memory'] / 1e6:6,.0f}" if "memory" in row else ""
        spread = f"({row['low']:.2f} to {row['high']:.2f})"
        head = f"  {row_title(row):<48} {row['batch']:5} {row['images_per_second']:10,.1f}"
        yield f"{head} {row['ratio']:7.2f} {spread:<16} {memory}".rstrip()
    for name, reason in record["left_out"].items():
        yield f"  {TITLES[name]} is left out: {reason}"


def quality_table(found: dict[str, Any], test: str) -> Iterator[str]:
    """The quality of the engines as text."""
    yield f"Quality beside the exact engine, on {test}; points are percentage points more than it has"
    for engine, values in found.items():
        passes = "" if values["passes"] is None else f", {values['passes'][test]:.2f} passes an image"
        labels = f"{values['agreement']:.2%} the same labels, {values['flagged'][test]:.2%} flagged"
        yield f"  {TITLES[engine]}: {labels}{passes}"
        for ood, value in values["auroc"].items():
            area = f"AUROC {100 * value:6.2f} ({values['auroc_points'][ood]:+.2f})"
            rate = f"FPR95 {100 * values['fpr95'][ood]:6.2f} ({values['fpr95_points'][ood]:+.2f})"
            yield f"    {ood:<32} {area}   {rate}   flagged {values['flagged'][ood]:6.2%}"


def note(what: str) -> None:
    """Print the progress to a terminal."""
    if sys.stderr.isatty():
        print(f"\r\033[K{time.strftime('%H:%M:%S')} {what}", end="", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
