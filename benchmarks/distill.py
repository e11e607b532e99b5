"""Compare a student's one forward pass with its teacher's K, on OOD sets that neither was trained on.

    kedge distill cifar10 --train cifar10 -o student.kedge
    python benchmarks/distill.py student.kedge [--teacher cifar10] [--train cifar10] [--test cifar10] [--images N]
                                [--repeats 9] [--threads T] [--data-dir DIR] [--json PATH]

Prints accuracy, AUROC and FPR95, as means over the OOD sets in the data folder and set by set, for the teacher, the
student, the untrained student (the teacher's network at its mean anchor), the student's score without tau and the
energy of its logits. Then the share of test images on which student and teacher agree, and the milliseconds per image
in batches of 32: medians over turns, in which teacher and student alternate.
"""

import argparse
from functools import partial
from typing import Any

import kedge
from common import save
from kedge.data import sources
from kedge.detectors import for_inference
from kedge.evaluation import SeedSummary
from kedge.experimental import Distillation, Student, split_for, untrained_student
from kedge.studies.bench.turns import Quartiles, in_turns, ratios
from kedge.studies.sets import FILES, find
from kedge.threads import use_threads

BATCH = 32
CHOSEN_WITH = "tiny-imagenet (OpenOOD)"  # settings were chosen on its validation images, so it is not in the means


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("student", help="a file that kedge distill wrote")
    parser.add_argument("--teacher", default="cifar10", help="its teacher: a file or a name")
    parser.add_argument(
        "--train", default="cifar10", help="training images of the student, with the calibration images"
    )
    parser.add_argument("--test", default="cifar10")
    parser.add_argument("--images", type=int, default=0, help="images of each set; 0 for all")
    parser.add_argument("--repeats", type=int, default=9, help="number of turns")
    parser.add_argument("--threads", type=int, default=None, help="compute threads; by default one per core")
    parser.add_argument("--data-dir", default=None, help="folder of data sets; KEDGE_DATA by default")
    parser.add_argument("--json", default=None)
    options = parser.parse_args()
    threads = use_threads(options.threads)
    teacher, student = kedge.load(options.teacher), kedge.load(options.student)
    assert isinstance(student, Student)
    assert teacher.preprocess is not None
    split = split_for(teacher, sources.load_dataset(options.train, "train", data_dir=options.data_dir))
    without = Student(student.net, score=student.score_by, rescale="none")
    others = {
        "student, untrained": untrained_student(Distillation(teacher), split.train),
        "student, no temperature": without.fit(split.train),
        "energy of the student": kedge.Energy(student.net).fit(split.train),
    }
    for detector in others.values():
        detector.calibrate(split.held_out)
    test = some(sources.load_dataset(options.test, data_dir=options.data_dir), options.images)
    there = find(list(FILES), side=teacher.preprocess.shape[-1], data_dir=options.data_dir).sets
    if not there:
        parser.error(f"none of {', '.join(FILES.values())} is in the data folder")
    ood = [some(each, options.images) for each in there]
    apart = [each.name for each in ood if each.name == CHOSEN_WITH and len(ood) > 1]
    detectors = {"teacher": teacher, "student": student, **others}
    evaluation = kedge.evaluate(detectors, test, ood, apart=apart, resamples=0)
    summary = SeedSummary({0: evaluation})
    for table in (summary.table(("accuracy", "auroc", "fpr95")), summary.by_set("auroc"), summary.by_set("fpr95")):
        print(table.markdown(), end="\n\n")
    labels = {name: result.detections[test.name].label for name, result in evaluation.results.items()}
    agreement = float((labels["student"] == labels["teacher"]).double().mean())
    print(f"agreement with the teacher: {agreement:.2%} of {len(test):,} test images")
    batch = test.images[:BATCH]
    calls = {name: partial(for_inference(detectors[name]), batch) for name in ("teacher", "student")}
    times = in_turns(calls, repeats=options.repeats)
    share = ratios(times["student"], times["teacher"])
    each = {name: 1000 * Quartiles.of(values).median / len(batch) for name, values in times.items()}
    print(f"per image, {threads} threads: teacher {each['teacher']:.2f} ms, student {each['student']:.2f} ms, ", end="")
    print(f"{share.median:.2f} of it ({share.low:.2f} to {share.high:.2f})")
    if options.json:
        record = {"options": vars(options), "threads": threads, "evaluation": evaluation.as_dict()}
        save(options.json, record | {"agreement": agreement, "milliseconds": each, "ratio": vars(share)})


def some(images: Any, count: int) -> kedge.ImageSet:
    """The first images of a set in memory, or all."""
    assert isinstance(images, kedge.ImageSet)
    return images.subset(range(count)) if 0 < count < len(images) else images


if __name__ == "__main__":
    main()
