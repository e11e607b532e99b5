"""The cost of the default detector: a verdict against a plain forward pass, and `fit` against a pass over its images.

    python benchmarks/default.py --data-dir DATA --features runs/tasks [--json docs/results/default-cost.json]

The networks are EfficientNet-Lite0 with ImageNet's weights (extra `pretrained`) and a last layer for half of the breeds
of pets, and ResNet-50 with random weights; the images are photographs, from DATA/photos. A plain pass is `net(x)` in
float32 as the network's own code has it, on images that are ready. A verdict is all from 8-bit pixels to p-values: of
the detector loaded from its file, as `kedge score` and `kedge serve` run it, and of its exports. All run in turns, and
times are those of the processor, so that other work on the machine counts little. Printed are the median and the
quartiles of the ratio by turn.

Then, for Lite0 at 160 pixels: which share of labels each 8-bit file keeps, and its AUROC beside the exact one, on test
images, new breeds and other photographs; and `fit` on --fit photographs, from files, beside a plain loop over the same
files, once each, with the peak memory of the process after a fit on a fifth of them and after the fit on all.
"""

import argparse
import resource
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import kedge
from common import save
from kedge.data import ImageSet, Preprocess, StreamedSet, batches, class_split, gather, sources
from kedge.data.sources import load_dataset
from kedge.detectors import for_inference
from kedge.detectors.registry import make
from kedge.export import OnnxDetector, export_onnx, quantise
from kedge.metrics import auroc
from kedge.models.classifier import evaluating
from kedge.models.named import replace_head
from kedge.studies.bench.turns import in_turns, ratios
from kedge.studies.photo_tasks import CENTER, lite0, others_of, photo_task, photos, split
from kedge.studies.study import Setting, some
from kedge.threads import keep_freed_memory, use_threads

SUBJECTS = ("lite0@160", "lite0@224", "resnet50@224")
RANGES, HELD_OUT, TESTED = 128, 100, 200  # images for 8-bit ranges, for thresholds, and of each OOD set
ENGINES = ("onnxruntime", "openvino")
PLAIN = "plain forward pass"


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, default=None, help="folder of all data sets; by default KEDGE_DATA")
    parser.add_argument("--features", type=Path, default=Path("runs/tasks"), help="folder for extracted features")
    parser.add_argument("--subjects", nargs="*", default=list(SUBJECTS), help="networks, each with the side of images")
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 32])
    parser.add_argument("--repeats", type=int, default=5, help="turns of each")
    parser.add_argument("--fit", type=int, default=5000, help="photographs to fit on; 0 for none")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    use_threads(options.threads)
    keep_freed_memory()  # as the command line does
    result: dict[str, Any] = {"threads": options.threads, "repeats": options.repeats}
    result |= {"verdicts": [], "quality": {}, "fit": None}
    with tempfile.TemporaryDirectory(prefix="kedge-bench-") as folder:
        for subject in options.subjects:
            rows, kept = verdicts(subject, Path(folder), options)
            result["verdicts"] += rows
            result["quality"] |= kept
            save(options.json, result)
    if options.fit:
        result["fit"] = fitting(options.data_dir, options.fit)
        save(options.json, result)


def verdicts(subject: str, home: Path, options: argparse.Namespace) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Time a network and the engines of its default detector; for Lite0 at 160 pixels also test what 8 bits keep."""
    name, _, side = subject.partition("@")
    real = subject == SUBJECTS[0]
    rule = CENTER if real else Preprocess((3, int(side), int(side)))
    known, near = class_split(photos("pets", options.data_dir))
    train, held_out, test = (
        some(part, count) for part, count in zip(split(known, 0), (RANGES, HELD_OUT, len(known)), strict=True)
    )
    ranges, held = gather(train, rule), gather(held_out, rule)
    if real:
        task = photo_task("pets", Setting("small", data_dir=options.data_dir), options.features, 0)
        net = task.network
        detector = make("default", net).fit(task.train).calibrate(task.held_out)
    else:
        net = lite0() if name == "lite0" else kedge.network(name, classes=len(known.classes), pretrained=False)
        if name == "lite0":
            replace_head(net, len(known.classes), torch.zeros(2, *rule.shape), seed=0)
        detector = make("default", net).fit(ranges, preprocess=rule).calibrate(held)
    detector.save(home / "d.kedge")
    export_onnx(detector, home / "float32.onnx")
    engines: dict[str, Callable[[Any, int], Any]] = {}
    loaded = for_inference(kedge.load(home / "d.kedge"))
    engines["kedge"] = lambda x, size: loaded(x, batch_size=size)
    engines["kedge, without for_inference"] = lambda x, size: detector(x, batch_size=size)
    files = {}
    for engine in ENGINES:
        files[f"{engine}, float32"] = OnnxDetector(home / "float32.onnx", engine=engine)
        quantise(home / "float32.onnx", home / f"{engine}.onnx", ranges, held, engine=engine, images=RANGES)
        files[f"{engine}, int8"] = OnnxDetector(home / f"{engine}.onnx", engine=engine)
    engines |= {title: lambda x, size, run=run: run(x, batch_size=size) for title, run in files.items()}
    rows = []
    for batch in options.batches:
        pixels = held.images[:batch]
        ready = pixels.float() / 255

        @torch.no_grad()
        def plain(ready: torch.Tensor = ready) -> Any:
            with evaluating(net):
                return net(ready)

        calls = {PLAIN: plain, **{each: lambda run=run, x=pixels: run(x, len(x)) for each, run in engines.items()}}
        times = in_turns(calls, repeats=options.repeats, clock=time.process_time)
        for each in calls:
            ratio = ratios(times[each], times[PLAIN])
            rows.append({"subject": subject, "engine": each, "batch": batch, **vars(ratio)})
            rows[-1]["milliseconds"] = 1000 * min(times[each]) / batch
            spread = f"({ratio.low:.2f} to {ratio.high:.2f})"
            print(f"{subject:14} batch {batch:<4} {each:30} {ratio.median:.2f} {spread}", flush=True)
    kept: dict[str, Any] = {}
    if real:
        far = [some(photos(each, options.data_dir), TESTED) for each in others_of("pets")]
        sets = {"test": test, "new breeds": some(near, TESTED), **{each.name: each for each in far}}
        kept = quality(engines["kedge"], files, {each: gather(x, rule) for each, x in sets.items()})
    return rows, kept


def quality(exact: Any, files: dict[str, OnnxDetector], sets: dict[str, ImageSet]) -> dict[str, Any]:
    """The share of labels that each file keeps on all images, and by how many points its AUROC differs."""
    expected = {name: exact(images.images, 32) for name, images in sets.items()}

    def areas(scores: dict[str, torch.Tensor]) -> dict[str, float]:
        known = scores["test"].double()
        return {name: 100 * auroc(known, value.double()) for name, value in scores.items() if name != "test"}

    before = areas({name: each.score for name, each in expected.items()})
    found: dict[str, Any] = {"images": {name: len(each) for name, each in sets.items()}, "exact": before}
    for title, run in files.items():
        out = {name: run(images.images, batch_size=32) for name, images in sets.items()}
        same = torch.cat([torch.from_numpy(out[name]["label"]) == each.label for name, each in expected.items()])
        after = areas({name: torch.from_numpy(each["score"]) for name, each in out.items()})
        on_test = (torch.from_numpy(out["test"]["label"]) == expected["test"].label).double().mean()
        found[title] = {
            "labels": float(on_test),
            "labels of all": float(same.double().mean()),
            "points": {name: after[name] - before[name] for name in after},
        }
        points = ", ".join(f"{name} {value:+.2f}" for name, value in found[title]["points"].items())
        print(f"{title}: {100 * float(on_test):.1f} % of test labels kept; AUROC {points} points", flush=True)
    return found


def fitting(data_dir: Path | None, count: int) -> dict[str, Any]:
    """`fit` on photographs beside a plain loop over the same files, and the peak memory after parts."""
    whole = load_dataset(f"folder:{sources.data_folder(data_dir) / 'photos'}")
    assert isinstance(whole, StreamedSet)
    train, net, spent = some(whole, count), lite0(), {}
    peaks: dict[int, float] = {}

    @torch.no_grad()
    def read(images: StreamedSet) -> None:
        with evaluating(net):
            for x, _ in batches(images, CENTER):
                net(net.as_input(x))

    def fit(images: StreamedSet) -> None:
        make("default", net).fit(images, preprocess=CENTER)
        peaks[len(images)] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10  # MiB, on Linux

    fit(some(train, count // 5))
    for way, run in (("pass", read), ("fit", fit)):
        began = time.process_time()
        run(train)
        spent[way] = time.process_time() - began
    ratio = spent["fit"] / spent["pass"]
    print(
        f"fit on {len(train):,} photographs to a pass over them: {ratio:.2f}; peak MiB by images: {peaks}", flush=True
    )
    return {"images": len(train), "ratio": ratio, "seconds": spent, "peak": peaks}


if __name__ == "__main__":
    main()
