"""ImageNet's classes, with EfficientNet-Lite0: photographs of other things, and blur of growing strength.

The known images are few, so intervals are from the bootstrap over images. The network as it is has every method that
does without labels of training images, and the default detector; tuned on the few images to fit on, anchored or not,
it has scores of logits and AMP.
"""

import copy
from collections.abc import Sequence
from functools import partial
from typing import Any

from kedge.anchoring import anchor
from kedge.checks import one_of
from kedge.detectors.registry import method_of
from kedge.errors import NotReadyError
from kedge.metrics import accuracy
from kedge.studies.comparison import Row, matching, single_methods
from kedge.studies.feature_run import FeatureRun, Written
from kedge.studies.imagenet_images import NAME, Pictures, features_of_pictures, read_pictures, task_of, toy_pictures
from kedge.studies.imagenet_tables import bootstrap, interval_tables
from kedge.studies.photo_tasks import LAYERS
from kedge.studies.task import Task
from kedge.training import recipe, train

RESAMPLES, SMOKE_RESAMPLES = 500, 10
LARGE = ("vim", "residual")  # methods that need more training images than features
COMBINED = {name: Row("combined", parts=tuple(name.split(" + "))) for name in ("mds++ + gen", "knn + gen", "cop + gen")}
AS_IT_IS = "as it is"
TUNED = {"tuned": "", "first layer": LAYERS["first layer"], "last convolution": LAYERS["last convolution"]}  # anchored
SMOKE_TUNED = {"tuned": "", "first layer": "prep.0", "last convolution": "stage3.2.conv2.0"}  # of `compact`
# For so few images of so many classes: not the head first, and of 3e-4, 1e-4, 3e-5 and 1e-5 the rate with the best
# accuracy without anchors on the held-out images of seed 0.
TUNING = recipe("finetune", head_first=False, lr=3e-5)
TUNED_ROWS = {name: Row(name) for name in ("msp", "energy", "kl_uniform")}
ANCHORED_ROWS = TUNED_ROWS | {
    "AMP": Row("amp"),
    "AMP, 1 + exp(tau)": Row("amp", {"rescale": "exp"}),  # as with up to 200 classes
    "AMP, tau relative": Row("amp", {"tau": "relative"}),
    "tau": Row("amp", {"score": "tau"}),
    "gen + AMP": Row("combined", parts=("gen", "amp")),
}


def run_imagenet(run: FeatureRun) -> Written:
    """Run what is missing, and write metrics.json and tables.md; `FeatureRun.only` names networks of the study."""
    smoke = run.setting.scale == "smoke"
    networks = {AS_IT_IS: "", **(SMOKE_TUNED if smoke else TUNED)}
    try:
        pictures = toy_pictures() if smoke else read_pictures(run.setting.data_dir)
    except NotReadyError as error:
        return run.write({}, (), {NAME: str(error)})
    results: dict[str, Any] = {"single": [], "results": {}, "bootstrap": {}, "accuracy by level of blur": {}}
    for name in [one_of("--tasks", each, tuple(networks)) for each in run.only or networks]:
        if name == AS_IT_IS:
            rows, load = (
                matching(label_free() | COMBINED, run.patterns),
                features_of_pictures(pictures, run.features).task,
            )
        else:
            rows = ANCHORED_ROWS if networks[name] else TUNED_ROWS
            load = partial(tuned_task, run, pictures, name, networks[name])
        tasks = {seed: load(seed) for seed in run.setting.seeds}
        table = run.rows(rows, {tasks[run.setting.seeds[0]].name: tasks.__getitem__})
        found = bootstrap(pictures, rows, list(tasks.values()), run.cells, SMOKE_RESAMPLES if smoke else RESAMPLES)
        for label in rows:
            shown = label if name == AS_IT_IS else f"{name}: {label}"
            (by_seed,) = table.results[label].values()
            results["results"][shown] = {NAME: by_seed}
            results["bootstrap"][shown] = found[label]
            results["single"] += [shown] if label in table.single else []
        results["accuracy by level of blur"][name] = accuracies(list(tasks.values()))
    return run.write(results, interval_tables(results), {})


def label_free() -> dict[str, Row]:
    """A row for each single method that needs no labels of training images, and does with a hundred of them."""
    return {
        label: row
        for label, row in single_methods().items()
        if label not in LARGE and not getattr(method_of(row.method)[0], "needs_labels", False)
    }


def tuned_task(run: FeatureRun, pictures: Pictures, name: str, layer: str, seed: int) -> Task:
    """The task of a seed with a network that is tuned on the images to fit on.

    Anchored or not, the networks of a seed see the same images in the same order.
    """
    fit, held_out, test = (pictures.known.subset(part) for part in pictures.parts(seed))
    home = run.features / "imagenet-tuned" / f"seed-{seed}" / name.replace(" ", "-")
    net = anchor(pictures.net, layer=layer, seed=seed) if layer else copy.deepcopy(pictures.net)
    how = run.setting.recipe() if run.setting.scale == "smoke" else TUNING
    net = train(net, fit, how, seed=seed, directory=home / "network", preprocess=pictures.preprocess)
    known = (
        pictures.read(net, fit, home, "fit"),
        pictures.read(net, held_out, home, "held-out"),
        pictures.read(net, test, home, "test"),
    )
    others, blurred = pictures.read_others(net, home), pictures.read_blurred(net, test, home)
    return task_of(f"{NAME}, {name}", seed, net, known, others, blurred)


def accuracies(tasks: Sequence[Task]) -> dict[str, list[float]]:
    """The classifier's accuracy on test images, as they are (0) and by level of blur, by seed."""
    found: dict[str, list[float]] = {}
    for task in tasks:
        assert task.test.labels is not None
        for level, each in enumerate((task.test, *task.shifted)):
            found.setdefault(str(level), []).append(float(accuracy(each.logits, task.test.labels)))
    return found
