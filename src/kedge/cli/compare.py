"""``kedge compare``: all methods that apply to a network, in one table."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from kedge.checks import one_of
from kedge.cli.options import (
    AS_IT_IS,
    AsJson,
    Batch,
    DataDir,
    Half,
    Metric,
    Network,
    NetworkOptions,
    Overwrite,
    Resamples,
    Threads,
    Tune,
)
from kedge.cli.terminal import Console, printable
from kedge.files import check_target, write_json
from kedge.threads import use_threads

ANEW = "remove this folder to extract anew"


def compare(
    network: Network,
    train: Annotated[
        str, typer.Option(help="Images that it was trained on: a name, folder:PATH, npz:PATH or features:FOLDER.")
    ],
    held_out: Annotated[
        str,
        typer.Option(help="In-distribution images that it was not trained on; half of them are tested without --test."),
    ],
    near: Annotated[
        list[str] | None,
        typer.Option(help="OOD images of the same kind, such as other classes of the data set; may be repeated."),
    ] = None,
    far: Annotated[list[str] | None, typer.Option(help="OOD images of other kinds; may be repeated.")] = None,
    ood: Annotated[list[str] | None, typer.Option(help="OOD images that are in no group; may be repeated.")] = None,
    test: Annotated[str | None, typer.Option(help="In-distribution test images.")] = None,
    methods: Annotated[
        str | None,
        typer.Option(help="Names as in docs/methods.md, separated by commas; by default all that read features."),
    ] = None,
    every: Annotated[
        bool, typer.Option("--all", help="Also run methods that need passes of their own, such as gradients.")
    ] = False,
    tune: Tune = None,
    metric: Metric = None,
    by_set: Annotated[bool, typer.Option("--by-set", help="Print a column for each OOD set as well.")] = False,
    out: Annotated[
        Path, typer.Option("--out", "-o", help="Folder for the features, metrics.json and report.html.")
    ] = Path("runs/compare"),
    half: Half = False,
    resamples: Resamples = 500,
    seed: Annotated[int, typer.Option(min=0, help="Random seed of the split and the bootstrap.")] = 0,
    batch: Batch = None,
    given: NetworkOptions = AS_IT_IS,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
    threads: Threads = None,
    data_dir: DataDir = None,
) -> None:
    """Fit and judge every method that applies to a classifier as it is; images pass through the network once.

    Features are kept in --out: a stopped run resumes there, and later runs reuse them.
    To judge saved detectors, use `kedge evaluate`.

    For example:

        kedge compare timm:resnet50 --train imagenet --held-out folder:val --near folder:ssb_hard --far textures

        kedge compare birds.kedge --train folder:train --held-out folder:val --ood folder:other --methods msp,knn,mds++
    """
    from kedge.cli.inputs import open_network, open_set, open_sets
    from kedge.data import Features
    from kedge.detectors.neighbours import Neighbours
    from kedge.detectors.registry import named_methods
    from kedge.evaluation import compare as compare_methods
    from kedge.evaluation.report import write_report
    from kedge.evaluation.report.figures import require
    from kedge.evaluation.result import HEADLINE
    from kedge.evaluation.summary import grouped_table
    from kedge.io.tuned import WAYS
    from kedge.metrics import METRICS
    from kedge.provenance import provenance

    console = Console(stderr=as_json)
    columns = [one_of("--metric", name, tuple(METRICS)) for name in metric or HEADLINE]
    names = [one_of("--methods", name.strip(), tuple(named_methods())) for name in (methods or "").split(",") if name]
    check_target("--out", out, folder=True)
    check_target("--out", out / "metrics.json", overwrite=overwrite)
    require()  # before minutes of work, not after
    console.resumable(out / "features", begun=(out / "features").is_dir(), anew=ANEW)
    use_threads(threads)
    images = open_set("--train", train, "train", data_dir=data_dir)
    near, far, ood = near or [], far or [], ood or []
    tests = [] if test is None else [test]
    sets = {"--held-out": [held_out], "--test": tests, "--near": near, "--far": far, "--ood": ood}
    held, *others = open_sets(sets, data_dir=data_dir)  # all of them at once, so that their names differ
    tested, oods = (None, others) if test is None else (others[0], others[1:])
    net = open_network(network, images, given)
    by = tune if tune is None or tune in WAYS else open_set("--tune", tune, data_dir=data_dir)
    first, second = len(near), len(near) + len(far)
    evaluation = compare_methods(
        net, images, held, oods[second:], near=oods[:first], far=oods[first:second], test=tested, methods=names,
        every=every, tune=by, directory=out, half=half, metrics=columns, resamples=resamples, seed=seed,
        batch_size=batch,
    )  # fmt: skip
    record = {"command": " ".join(["kedge", *sys.argv[1:]]), "made with": provenance()}
    result = {"record": record, **evaluation.as_dict()}
    write_json(out / "metrics.json", result)
    neighbours = None
    if not isinstance(images, Features) and getattr(net, "anchors", images) is not None:
        neighbours = Neighbours(net, images, features=Features.open(out / "features" / "train"))
    report = write_report(out / "report.html", evaluation, neighbours=neighbours, record=record)
    if as_json:
        typer.echo(json.dumps(result, indent=1))
        return
    console.print(grouped_table(evaluation, columns).terminal())
    for column in columns if by_set else ():
        console.print(grouped_table(evaluation, [column], by_set=True).terminal())
    for name, reason in evaluation.left_out.items():
        console.print(f"[yellow]left out[/]  {name}: {escape(printable(reason))}")
    console.wrote("metrics", out / "metrics.json")
    console.wrote("report", report)
    best = grouped_table(evaluation, columns).rows[0][0].rstrip("*")
    console.next(f"kedge fit {network} --train {train} --held-out {held_out} --method {best}")
