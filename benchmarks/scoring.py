"""Images scored per second of one core, what a billion of them cost, and how long the network waits for them.

    python benchmarks/scoring.py [--images 2000] [--side 64] [--network compact] [--width 32] [--k 5] [--repeats 3]
                                 [--price 0.04] [--ray] [--json PATH]
    python benchmarks/scoring.py --detector birds.kedge --photos DATA/photos --side 500 --images 300 --workers 2

JPEG files go through `kedge.scoring.score_files`: smooth random pictures, or photographs enlarged to --side pixels. The
detector is that of --detector, or AMP on an untrained network that sees 32 x 32 pixels: what is measured does not
depend on the weights. Time is that of the processor, of all threads of the process together, so that whatever else the
machine does counts little, and waiting for the disk not at all.
Printed are the median and the spread over repetitions of images per second of one core, r; the same for reading,
decoding and resizing alone; and what N = 1,000,000,000 images cost: N / r / 3600 core-hours.

Then, by the wall clock and with all cores, the share of time in which the network waits for images: in `kedge score`,
and in `Detector.score` over a folder, a list of paths and a data loader with two workers. Threads can hide decoding
behind the network where all cores together decode faster than the network computes; files of many pixels before a
small network are decoded more slowly than that, and then the network waits whatever anybody does.

With --ray, the same files go through one worker of Ray as well, by the wall clock, on a machine that should be idle:
what a run costs at its start, and what a shard costs beyond what it costs in this process.
"""

import argparse
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

import kedge
from common import processor_seconds, save
from kedge.data.decoding import open_image
from kedge.data.reading import readers
from kedge.data.sources import Files, StreamedSet
from kedge.detectors import for_inference
from kedge.provenance import processor
from kedge.scoring import RayEngine, plan, score_files
from kedge.scoring.inputs import openers
from kedge.scoring.job import score_shards
from kedge.studies.bench import detector_of
from kedge.threads import keep_freed_memory, use_threads

SEES = 32  # pixels of a side that the network takes
MANY = 1_000_000_000
SHARD = 100


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=2000)
    parser.add_argument("--side", type=int, default=64, help="pixels of an image's side in its file")
    parser.add_argument("--network", default="compact")
    parser.add_argument("--width", type=int, default=32, help="of the compact network")
    parser.add_argument("--k", type=int, default=5, help="anchors")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--price", type=float, default=0.04, help="of a core for an hour")
    parser.add_argument("--detector", type=Path, default=None, help="a calibrated detector's file")
    parser.add_argument("--photos", type=Path, default=None, help="a folder of photographs, for random pictures")
    parser.add_argument("--workers", type=int, default=None, help="threads that read images, in kedge score")
    parser.add_argument("--threads", type=int, default=None, help="of the network, while its waiting is measured")
    parser.add_argument("--ray", action="store_true", help="time Ray beside this process")
    parser.add_argument("--json", default=None)
    options = parser.parse_args()
    cores = use_threads(options.threads)
    keep_freed_memory()  # as the command line does
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="kedge-bench-") as temporary:
        home = Path(temporary)
        size = make_images(home / "images", options.images, options.side, options.photos)
        if options.detector is None:
            arguments = {"width": options.width} if options.network == "compact" else {}
            detector_of(options.network, anchors=options.k, side=SEES, **arguments).save(home / "detector.kedge")
            title = f"AMP with {options.k} anchors on {options.network} {arguments} at {SEES} x {SEES}"
        else:
            shutil.copy(options.detector, home / "detector.kedge")
            title = str(kedge.load(home / "detector.kedge"))
        print(f"{options.images:,} JPEG files of {options.side} pixels, {size / options.images:,.0f} bytes each")
        print(f"{title}; {processor()}")
        results: dict[str, Any] = {
            name: [options.images / processor_seconds(partial(call, home)) for _ in range(options.repeats)]
            for name, call in (("decoding", decode), ("scoring", score))
        }
        results["ray"] = ray_costs(home) if options.ray else None
        torch.set_num_threads(cores)
        results["waiting"] = {name: [] for name in WAITING}
        for _ in range(options.repeats):
            for name, call in WAITING.items():
                results["waiting"][name].append(call(home, options.workers or readers()))
    for name, rates in (("decoding alone", results["decoding"]), ("all of scoring, r", results["scoring"])):
        print(f"  {name:<18} {spread(rates)} images/s of one core")
    rate = statistics.median(results["scoring"])
    hours = MANY / rate / 3600
    results |= {"core_hours": hours, "cost": hours * options.price}
    print(f"  {MANY:,} images: {hours:,.0f} core-hours; at {options.price} an hour {results['cost']:,.2f}")
    print(f"  share of time in which the network, with {cores} threads, waits")
    for name, shares in results["waiting"].items():
        print(f"    {name:<36} {statistics.median(shares):6.1%} ({min(shares):.1%} to {max(shares):.1%})")
    if results["ray"]:
        costs = results["ray"]
        for name in ("local", "ray"):
            first, each = costs[name]
            print(f"  {name:<5} first shard of {SHARD} after {first:.1f} s, {1000 * each:.0f} ms for each after it")
    save(options.json, {**vars(options), **results})


def make_images(folder: Path, number: int, side: int, photos: Path | None = None) -> int:
    """Write JPEG files, of photographs or of pictures as smooth as these; return their size in bytes."""
    folder.mkdir()
    rng = np.random.default_rng(0)
    if photos is not None:
        files = sorted(photos.rglob("*.jpg"))
        for each, place in enumerate(rng.permutation(len(files))[:number]):
            image = open_image(files[place]).convert("RGB")
            scale = side / max(image.size)
            sides = (round(image.width * scale), round(image.height * scale))
            image.resize(sides, Image.Resampling.BICUBIC).save(folder / f"{each:07}.jpg", quality=90)
        return sum(file.stat().st_size for file in folder.iterdir())
    for each in range(number):
        coarse = Image.fromarray(rng.integers(0, 256, (side // 8 + 1, side // 8 + 1, 3), np.uint8))
        coarse.resize((side, side), Image.Resampling.BICUBIC).save(folder / f"{each:07}.jpg", quality=90)
    return sum(file.stat().st_size for file in folder.iterdir())


def decode(home: Path) -> None:
    """Read, decode and resize every image."""
    preprocess = kedge.load(home / "detector.kedge").preprocess
    assert preprocess is not None
    for opener in openers(plan([home / "images"])):
        preprocess(opener())


def score(home: Path) -> None:
    """Score every image into a file of rows."""
    score_files(home / "detector.kedge", [str(home / "images")], home / "out.jsonl", workers=1, overwrite=True)


def ray_costs(home: Path) -> dict[str, tuple[float, float]]:
    """Seconds until the first shard is done and for each after it, in this process and by one worker of Ray."""
    costs = {}
    for name, engine in (("local", None), ("ray", RayEngine("local", parallel=1))):
        moments = [time.perf_counter()]
        score_files(
            home / "detector.kedge", [str(home / "images")], home / "out.jsonl", workers=1, overwrite=True, shard=SHARD,
            engine=engine, progress=lambda done, total, moments=moments: moments.append(time.perf_counter()),
        )  # fmt: skip
        began, first, last = moments[1], moments[2], moments[-1]  # the first report says that nothing is done yet
        costs[name] = (first - began, (last - first) / max(1, len(moments) - 3))
    return costs


class Busy:
    """Adds up the time that a detector spends in its network."""

    def __init__(self, detector: kedge.Detector) -> None:
        self.detector, self.seconds = detector, 0.0
        self._outputs = detector.outputs
        detector.outputs = self._timed  # type: ignore[method-assign]

    def _timed(self, x: torch.Tensor) -> Any:
        began = time.perf_counter()
        found = self._outputs(x)
        self.seconds += time.perf_counter() - began
        return found

    def waits(self, call: Callable[[], Any]) -> float:
        """The share of the time of a call in which the network has nothing to do."""
        assert self.detector.preprocess is not None
        shape = self.detector.preprocess.shape
        self.detector.score(torch.zeros(self.detector.preprocess.batch_size, *shape))  # the first batch is slow
        self.seconds, began = 0.0, time.perf_counter()
        call()
        return 1 - self.seconds / (time.perf_counter() - began)


def waits_in_job(home: Path, workers: int) -> float:
    """In what `kedge score` does once it has read the detector."""
    detector = for_inference(kedge.load(home / "detector.kedge"))
    shards = enumerate(plan([home / "images"]))
    return Busy(detector).waits(lambda: list(score_shards(detector, shards, workers=workers)))


def waits_in_score(home: Path, kind: str) -> float:
    """In `Detector.score` of a folder, of paths, or of a data loader."""
    detector = for_inference(kedge.load(home / "detector.kedge"))
    rule = detector.preprocess
    assert rule is not None
    files = sorted((home / "images").iterdir())
    folder = StreamedSet(Files(home / "images", tuple(file.name for file in files)), preprocess=detector.preprocess)
    sources: dict[str, Callable[[], Any]] = {
        "folder": lambda: folder,
        "paths": lambda: files,
        "loader": lambda: torch.utils.data.DataLoader(folder, batch_size=rule.batch_size, num_workers=2),
    }
    return Busy(detector).waits(lambda: detector.score(sources[kind]()))


WAITING: dict[str, Callable[[Path, int], float]] = {
    "kedge score": waits_in_job,
    "Detector.score, a folder": lambda home, _: waits_in_score(home, "folder"),
    "Detector.score, paths": lambda home, _: waits_in_score(home, "paths"),
    "Detector.score, a loader of two workers": lambda home, _: waits_in_score(home, "loader"),
}


def spread(values: Sequence[float]) -> str:
    """The median and the range."""
    return f"{statistics.median(values):8,.0f} ({min(values):,.0f} to {max(values):,.0f})"


if __name__ == "__main__":
    main()
