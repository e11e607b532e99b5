"""How much of a detector's K passes one pass of a student keeps, on OOD sets that neither has seen.

    python benchmarks/distil.py [--detector cifar10] [--train cifar10] [--test cifar10] [--epochs 2] [--network NAME]
                                [--lr RATE] [--ood SET ...] [--data-dir DIR] [--images N] [--repeats 5] [--seed 0]
                                [--out FILE] [--json PATH]

A student of the detector is trained for so many epochs; below 1, on such a share of the training images. How it is
trained was chosen on CIFAR-10 images that the teacher was not trained on, and on val_x of tin_openood_cifar10.npz.

Printed, for each OOD set (by default every .npz in the data folder), are AUROC and FPR95 of the teacher; of the student
before it was trained, which is the teacher's network under the mean of its anchors; of the student; and of the energy
of the student's logits, as it is and centred, which is what its temperature can be held against. Beside them stand
accuracy, the share of test images with the teacher's label, and milliseconds of one thread of the processor for an
image, in batches of 32: the median of repetitions, in which the detectors take turns.
"""

import argparse
import json
import statistics
import time
from typing import Any

import torch
from torch import Tensor

import kedge
from kedge import metrics, scores, training
from kedge.data import ImageSet, sources
from kedge.detectors import Detector, Student
from kedge.distillation import Distillation, chosen_recipe, set_apart, untrained
from kedge.files import atomic
from kedge.provenance import provenance

TIMED = 128  # images
BATCH = 32
Said = tuple[Tensor, Tensor]  # labels and scores


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--detector", default="cifar10", help="the teacher: a file, or a name that kedge ships")
    parser.add_argument("--train", default="cifar10", help="its training images, calibration images included")
    parser.add_argument("--test", default="cifar10")
    parser.add_argument("--epochs", type=float, default=None, help="the recipe's by default; may be a share of one")
    parser.add_argument("--lr", type=float, default=None, help="the recipe's by default")
    parser.add_argument("--network", default=None, help="of the student, by name; the teacher's own by default")
    parser.add_argument("--ood", nargs="*", default=None, help="every .npz in the data folder by default")
    parser.add_argument("--data-dir", default=None, help="KEDGE_DATA by default")
    parser.add_argument("--images", type=int, default=None, help="of each set, at most")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", default=None, help="where to keep the student")
    parser.add_argument("--json", default=None)
    options = parser.parse_args()
    teacher = kedge.load(options.detector)
    home = sources.data_folder(options.data_dir)
    named = options.ood if options.ood is not None else [f"npz:{path}" for path in sorted(home.glob("*.npz"))]
    test, *others = (load(name, None, options) for name in (options.test, *named))
    began = time.perf_counter()
    student, begun = taught(teacher, options)
    minutes = (time.perf_counter() - began) / 60
    trained = student.net.record["data"]["images"], student.net.record["epochs"]
    print(f"student of {options.detector}: {trained[0]:,} images, {trained[1]} epochs, {minutes:.1f} minutes")
    if options.out:
        student.save(options.out)
    rows = everything({"teacher": teacher, "student, untrained": begun, "student": student}, (test, *others))
    results = summarise(rows, test, others)
    times = timed({"teacher": teacher, "student": student}, test, options.repeats)
    show(results, times, others, student)
    if options.json:
        with atomic(options.json) as path:
            plain = {"results": results, "milliseconds": times, "minutes": minutes}
            path.write_text(json.dumps({"made with": provenance(), **vars(options), **plain}, indent=1))


def load(name: str, split: str | None, options: argparse.Namespace) -> ImageSet:
    """A set in memory, or the first images of it."""
    images = sources.load(name, split, data_dir=options.data_dir)
    assert isinstance(images, ImageSet)
    few = len(images) if options.images is None else min(options.images, len(images))
    return images.subset(range(few))


def taught(teacher: Detector, options: argparse.Namespace) -> tuple[Student, Student]:
    """The student, trained and calibrated; and as it was before."""
    images = sources.load(options.train, "train", data_dir=options.data_dir)
    assert isinstance(images, ImageSet)
    assert teacher.calibration is not None
    how = chosen_recipe(teacher, None, fresh=options.network is not None)
    epochs = how.epochs if options.epochs is None else options.epochs
    part, held_out = set_apart(teacher, images)
    if epochs < 1:
        part = part.split(epochs, seed=options.seed)[0]
    if options.images is not None:
        held_out = held_out.subset(range(min(options.images, len(held_out))))
    same = {"network": options.network, "seed": options.seed}
    how = training.recipe(how, epochs=max(1, round(epochs)), lr=options.lr or how.lr)
    begun = untrained(Distillation(teacher), part, **same).calibrate(held_out)
    return kedge.distil(teacher, part, held_out=held_out, recipe=how, **same), begun


def everything(detectors: dict[str, Detector], sets: tuple[ImageSet, ...]) -> dict[str, dict[str, Said]]:
    """Labels and scores of all images, by row and set."""
    rows: dict[str, dict[str, Said]] = {}
    for images in sets:
        found = {name: detector(images) for name, detector in detectors.items()}
        for name, said in found.items():
            rows.setdefault(name, {})[images.name] = (said.label, said.score)
        logits = found["student"].logits
        for name, score in (("its energy", scores.energy), ("its energy, centred", scores.amp)):
            rows.setdefault(name, {})[images.name] = (logits.argmax(dim=1), score(logits))
    return rows


def summarise(rows: dict[str, dict[str, Said]], test: ImageSet, others: list[ImageSet]) -> dict[str, dict[str, Any]]:
    """Accuracy, agreement, AUROC and FPR95 of every row, in percent."""
    results: dict[str, dict[str, Any]] = {}
    for name, row in rows.items():
        label, inside = row[test.name]
        assert test.labels is not None
        results[name] = {
            "accuracy": 100 * metrics.accuracy(label, test.labels),
            "agreement": 100 * float((label == rows["teacher"][test.name][0]).double().mean()),
            "auroc": {s.name: 100 * metrics.auroc(inside, row[s.name][1]) for s in others},
            "fpr95": {s.name: 100 * metrics.fpr95(inside, row[s.name][1]) for s in others},
        }
    return results


def timed(detectors: dict[str, Detector], images: ImageSet, repeats: int) -> dict[str, float]:
    """Milliseconds of one thread for an image: the median over repetitions."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    some, found = images.subset(range(min(TIMED, len(images)))), {name: [] for name in detectors}  # type: ignore[var-annotated]
    for repeat in range(repeats + 1):
        for name, detector in detectors.items():
            began = time.process_time()
            detector.score(some, batch_size=BATCH)
            if repeat:  # the first warms up
                found[name].append(1000 * (time.process_time() - began) / len(some))
    torch.set_num_threads(threads)
    return {name: statistics.median(times) for name, times in found.items()}


def show(results: dict[str, dict[str, Any]], times: dict[str, float], others: list[ImageSet], student: Student) -> None:
    """Print the tables."""
    print(f"  {'':<22}{'accuracy':>9}{'same label':>12}{'passes':>8}{'ms':>8}")
    for name, found in results.items():
        cost = times["teacher" if name == "teacher" else "student"]
        passes = student.net.record["teacher"]["anchors"] if name == "teacher" else 1
        print(f"  {name:<22}{found['accuracy']:9.2f}{found['agreement']:12.2f}{passes:8}{cost:8.2f}")
    for metric in ("auroc", "fpr95"):
        print(f"\n  {metric.upper():<40}" + "".join(f"{name:>20}" for name in results))
        for images in others:
            values = "".join(f"{found[metric][images.name]:20.2f}" for found in results.values())
            print(f"  {images.name[:28]:<29}{len(images):>10,} {values}")
        means = (statistics.mean(found[metric].values()) for found in results.values())
        print(f"  {'mean':<40}" + "".join(f"{mean:20.2f}" for mean in means))


if __name__ == "__main__":
    main()
