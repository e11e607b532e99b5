"""``kedge evaluate``: how well saved detectors separate ID from OOD images."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from kedge.checks import one_of
from kedge.cli.options import AsJson, DataDir, Metric, Model, Overwrite, Resamples
from kedge.cli.terminal import Console
from kedge.errors import InputError
from kedge.files import check_target


def evaluate(
    files: Annotated[
        list[Path],
        typer.Argument(metavar="DETECTOR", help="Files of calibrated detectors, or names of those that kedge ships."),
    ],
    test: Annotated[str, typer.Option(help="In-distribution test images: a name, folder:PATH or npz:PATH.")],
    ood: Annotated[list[str], typer.Option(help="Out-of-distribution images, given like --test; may be repeated.")],
    controls: Annotated[
        bool, typer.Option("--controls", help="Add a row with tau permuted across images for AMP and its students.")
    ] = False,
    resamples: Resamples = 1000,
    seed: Annotated[int, typer.Option(help="Random seed of the bootstrap and the permutation.")] = 0,
    metric: Metric = None,
    report: Annotated[Path | None, typer.Option(help="Write an HTML report here.")] = None,
    train: Annotated[
        str | None, typer.Option(help="Training images; the report shows the nearest ones beside each error.")
    ] = None,
    overwrite: Overwrite = False,
    model: Model = None,
    as_json: AsJson = False,
    data_dir: DataDir = None,
) -> None:
    """Measure how well detectors separate in-distribution from out-of-distribution images.

    Test sets that contain images used to build or calibrate a detector are refused.

    For example:

        kedge evaluate runs/train/detector.kedge --test cifar10 --ood svhn --report report.html --train cifar10

        kedge evaluate amp.kedge --test cifar10 --ood svhn --metric auroc --metric oscr --metric scod_aurc

        kedge evaluate amp.kedge energy.kedge --test folder:known/ --ood folder:strange/ --json | jq .results
    """
    from kedge.cli.inputs import open_images, open_sets
    from kedge.detectors import load
    from kedge.detectors.neighbours import Neighbours
    from kedge.evaluation import SeedSummary
    from kedge.evaluation import evaluate as evaluate_detectors
    from kedge.evaluation.report import write_report
    from kedge.evaluation.report.figures import require
    from kedge.evaluation.summary import BY_SET, SHOWN, rows_by_set
    from kedge.metrics import METRICS
    from kedge.provenance import provenance

    console = Console(stderr=as_json)
    columns = [one_of("--metric", name, tuple(METRICS)) for name in metric or SHOWN]
    if report is not None:  # before minutes of scoring, not after
        check_target("--report", report, overwrite=overwrite)
        require()
    elif train is not None:
        raise InputError("--train must come with --report, which shows the nearest training images: add --report")
    detectors = {
        file.stem if len({f.stem for f in files}) == len(files) else str(file): load(file, model=model)
        for file in files
    }
    if len(detectors) != len(files):
        raise InputError(f"files must be different detectors; got {', '.join(map(str, files))}")
    sets = open_sets({"--test": [test], "--ood": ood}, data_dir=data_dir)
    lead, neighbours = next(iter(detectors.values())), None
    if train is not None:
        images = open_images("--train", train, "train", data_dir=data_dir)
        neighbours = Neighbours(lead.net, images, preprocess=lead.preprocess)
    evaluation = evaluate_detectors(detectors, sets[0], sets[1:], controls=controls, resamples=resamples, seed=seed)
    if as_json:
        typer.echo(json.dumps(evaluation.as_dict(), indent=1))
    else:
        for table in SeedSummary({seed: evaluation}).tables(console.width, columns):
            console.print(table.terminal())
        console.print(rows_by_set(evaluation, metric or BY_SET).terminal())
    if report is not None:
        record = {"command": " ".join(["kedge", *sys.argv[1:]]), "made with": provenance()}
        written = write_report(report, evaluation, detector=lead, neighbours=neighbours, record=record)
        console.wrote("report", written)
        console.next(f"open {written}")
    elif not as_json:
        console.next("add --report report.html for the figures and the images behind the numbers")
