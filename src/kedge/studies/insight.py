"""What makes anchors speak: trainings and readings side by side, judged on images that no table has."""

from dataclasses import replace
from functools import partial
from typing import Any

import torch

from kedge.anchoring.corruption import Corruption
from kedge.data import ImageSet
from kedge.detectors import AMP, KNN, TTA, Detector, Energy, Mahalanobis, ViM
from kedge.pixels import to_unit
from kedge.seeds import seeded
from kedge.studies import sets
from kedge.studies.cifar10_fast import EPOCHS, MASKED, small_network, small_recipe
from kedge.studies.insight_trainings import (
    Agreement,
    AliveAnchors,
    AsNoise,
    Differences,
    SameClass,
    as_published,
    twice,
)
from kedge.studies.plan import MethodPlan, NetworkPlan, Protocol, Suite, SuiteData
from kedge.studies.study import HELD_OUT, Setting, Study, smoke_data
from kedge.training import Recipe
from kedge.training.losses import LogitNorm, SyntheticOutliers
from kedge.training.synthetic_outliers import scramble

NEAR = "tiny-imagenet (OpenOOD)"
MOST = 1_000  # images of a set to judge by
SHORT = 2  # epochs; half of those of cifar10-fast, whose twins are "twice as long" here
BUDGETS, NARROW = (2, 8, 16, 32), 16  # epochs, on a network of half the width
LONG = 24  # epochs of the compact network, four times as many as at the small scale
SMOOTHED = 0.2  # label smoothing, where there is any
FEATURES: tuple[type[Detector], ...] = (KNN, ViM, Mahalanobis)  # the readings of features, mean ones under anchors
# How each reads the hypotheses of an anchored network. The last two leave the temperature out, or everything else.
READINGS: dict[str, dict[str, Any]] = {
    "AMP": {},
    "AMP, tau mean": {"tau": "mean"},
    "AMP, recommended": {"variant": "recommended"},
    "no temperature": {"rescale": "none"},
    "temperature alone": {"score": "temperature", "tau": "mean"},
}
# More of them, of the network without variations; anchors that are means of the one too that they change most.
MORE: dict[str, dict[str, Any]] = {
    "mutual information": {"score": "mutual_information"},
    "AMP, tau mean, 10 anchors": {"tau": "mean", "k": 10},
    "AMP, tau mean, balanced anchors": {"tau": "mean", "anchors": "balanced"},
    "AMP, tau mean, means of classes": {"tau": "mean", "anchors": "means"},
    "AMP, tau mean, 2 views": {"tau": "mean", "views": 2},
    "AMP, tau mean, means of classes, 6 views": {"tau": "mean", "anchors": "means", "views": 6},
}
# Of the network that is sure of itself under anchors of the image's own class alone: one anchor of each.
OF_ALL_CLASSES: dict[str, dict[str, Any]] = {
    "AMP, tau mean, an anchor of each class": {"tau": "mean", "anchors": "balanced", "k": 10},
    "no temperature, an anchor of each class": {"rescale": "none", "anchors": "balanced", "k": 10},
    "AMP, tau mean, means of classes": MORE["AMP, tau mean, means of classes"],
}


def insight(setting: Setting) -> Study:
    """Variations of training by anchors, each read in several ways, and the plain twins of those that have one.

    Example:
        >>> sorted(insight(Setting("smoke")).suites[0].networks)[:2]
        ['T as published', 'T in every batch']
    """
    short, longer = (small_recipe(setting, epochs) for epochs in (SHORT, EPOCHS))

    def network(how: Recipe = short, **plan: Any) -> NetworkPlan:
        return small_network(setting, how, **plan)

    def anchored(how: Recipe = short, loss: Any = None, **anchoring: Any) -> NetworkPlan:
        more = {} if loss is None else {"loss": loss}
        return network(how, anchored=True, anchoring={"spread": True} | anchoring, **more)

    networks = {
        "anchored": anchored(),
        "no T": anchored(corruption=None),
        "T in every batch": anchored(every=1),
        "T in whole batches": anchored(per_sample=False),
        "T to the end": anchored(replace(short, clean_final_fraction=0.0)),
        "T weaker": anchored(corruption=Corruption(jitter=False, blur=False, gray=False)),
        "T stronger": anchored(corruption=twice),
        "T as published": anchored(replace(short, clean_final_fraction=0.0), corruption=as_published, per_sample=False),
        "fresh stem": anchored(init="fresh"),
        "masked, label": anchored(mask=MASKED),
        "masked, uniform": anchored(mask=MASKED, mask_target="uniform"),
        "masked less, uniform": anchored(mask=0.1, mask_target="uniform"),
        "masked, made outliers": anchored(loss=SyntheticOutliers(), mask=MASKED, mask_target="uniform"),
        "mismatched": anchored(loss=SyntheticOutliers(kinds=("mismatch",))),
        "made outliers": anchored(loss=SyntheticOutliers()),
        "logit norm": anchored(loss=LogitNorm()),
        "label smoothing": anchored(replace(short, label_smoothing=SMOOTHED)),
        "two anchors agree": anchored(loss=Agreement()),
        "anchors kept alive": anchored(loss=AliveAnchors()),
        "twice as long": anchored(longer),
        "made outliers, twice as long": anchored(longer, SyntheticOutliers()),
        "masked, made outliers, twice as long": anchored(
            longer, SyntheticOutliers(), mask=MASKED, mask_target="uniform"
        ),
    }
    plain = {
        "plain": network(),
        "plain, differences": network(loss=Differences()),
        "plain, T as noise": network(loss=AsNoise(short.clean_final_fraction)),
        "plain, made outliers": network(loss=SyntheticOutliers()),
        "plain, logit norm": network(loss=LogitNorm()),
        "plain, label smoothing": network(replace(short, label_smoothing=SMOOTHED)),
        "plain, twice as long": network(longer),
        "plain, made outliers, twice as long": network(longer, loss=SyntheticOutliers()),
    }
    for epochs in () if setting.scale == "smoke" else BUDGETS:
        narrow = partial(network, small_recipe(setting, epochs), arguments={"width": NARROW})
        networks[f"narrow, {epochs} epochs"] = narrow(anchored=True, anchoring={"spread": True})
        plain[f"plain, narrow, {epochs} epochs"] = narrow()
        if epochs == BUDGETS[-1]:  # which part of anchored training tells, where the budget lets it
            networks[f"no T, narrow, {epochs} epochs"] = narrow(
                anchored=True, anchoring={"spread": True, "corruption": None}
            )
            plain[f"plain, T as noise, narrow, {epochs} epochs"] = narrow(loss=AsNoise(short.clean_final_fraction))
            networks[f"made outliers, narrow, {epochs} epochs"] = narrow(
                anchored=True, anchoring={"spread": True}, loss=SyntheticOutliers()
            )
            plain[f"plain, made outliers, narrow, {epochs} epochs"] = narrow(loss=SyntheticOutliers())
    other = partial(setting.network, "compact", 10)  # whose first layer is drawn at random, and learns like all others
    networks["compact, anchored"] = other(anchored=True, anchoring={"spread": True})
    networks["compact, fresh stem"] = other(anchored=True, anchoring={"spread": True, "init": "fresh"})
    networks["compact, same class"] = other(
        anchored=True, anchoring={"init": "fresh", "corruption": None}, loss=SameClass()
    )
    plain["compact, plain"] = other()
    if setting.scale == "small":
        longer_yet = replace(setting.recipe(), epochs=LONG)
        networks[f"compact, fresh stem, {LONG} epochs"] = replace(networks["compact, fresh stem"], recipe=longer_yet)
        plain[f"compact, plain, {LONG} epochs"] = replace(plain["compact, plain"], recipe=longer_yet)
    rows = {
        f"{name}: {reading}": MethodPlan(AMP, (name,), options)
        for name in networks
        for reading, options in READINGS.items()
    }
    rows |= {
        f"{name}: {reading}": MethodPlan(AMP, (name,), options)
        for name in ("anchored", "masked, uniform")
        for reading, options in MORE.items()
        if name == "anchored" or "means" in options.values()
    }
    rows |= {
        f"compact, same class: {reading}": MethodPlan(AMP, ("compact, same class",), options)
        for reading, options in OF_ALL_CLASSES.items()
    }
    rows |= {f"{name}: Energy": MethodPlan(Energy, (name,)) for name in (*networks, *plain)}
    rows |= {
        f"{name}: {kind.__name__}": MethodPlan(kind, (name,)) for name in ("anchored", "plain") for kind in FEATURES
    }
    rows |= {f"{name}: Energy, centred": MethodPlan(Energy, (name,), {"centred": True}) for name in plain}
    rows |= {
        f"{name}: Energy, centred, 5 flips and crops": MethodPlan(
            TTA, (name,), {"k": 5, "shift": 1, "score": "kl_uniform"}
        )
        for name in plain
    }
    suite = Suite(
        name="cifar10",
        title="What makes anchors speak",
        networks=networks | plain,
        methods=rows,
        data=partial(_data, setting),
        seeds=setting.seeds,
        comparisons=setting.comparisons,
        resamples=0,
        protocol=Protocol(("auroc", "fpr95")),
        leads=("anchored: AMP",),
    )
    about = "Variations of training and of reading the anchors, judged on held-out images and one validation set."
    return Study("insight", "What makes anchors speak", about, (suite,))


def _data(setting: Setting, seed: int) -> SuiteData:
    """The split of cifar10-fast; its held-out images in halves, one to calibrate on and one to judge by."""
    if setting.scale == "smoke":
        return smoke_data(seed)
    train = sets.load("cifar10", side=32, data_dir=setting.data_dir, split="train")
    part, held_out = train.split(1 - HELD_OUT, seed=0)
    calibration, known = held_out.split(0.5, seed=0)
    found = sets.find([NEAR], side=32, data_dir=setting.data_dir, split="val_x")
    some = to_unit(known.images[:MOST])
    with seeded(0):
        made = ImageSet((255 * scramble(some)).round().to(torch.uint8), name="scrambled held-out images")
    near = tuple(replace(images, name=f"{images.name}, validation") for images in found.sets)
    return SuiteData(part, calibration, known, (*near, made), missing=found.missing)
