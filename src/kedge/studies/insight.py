"""What anchors contribute: variations of training and scoring, judged on images that no table has."""

from dataclasses import replace
from functools import partial
from typing import Any

import torch

from kedge.anchoring.corruption import Corruption
from kedge.data import ImageSet
from kedge.detectors import AMP, KNN, TTA, Detector, Energy, KLUniform, Mahalanobis, ViM
from kedge.pixels import to_unit
from kedge.studies import insight_trainings as own
from kedge.studies import sets
from kedge.studies.cifar10_fast import EPOCHS, MASKED, NEAR, PER_SAMPLE, VIEWS, small_network, small_recipe
from kedge.studies.plan import MethodPlan, NetworkPlan, Protocol, SuiteData
from kedge.studies.study import HELD_OUT, Setting, Study, smoke_data
from kedge.training import Recipe
from kedge.training.losses import LogitNorm, SyntheticOutliers
from kedge.training.synthetic_outliers import phase_randomization

MOST = 1_000  # images of a set to judge by
SHORT = 2  # epochs; half of those of cifar10-fast, whose networks are "twice as long" here
BUDGETS, NARROW = (2, 8, 16, 32), 16  # epochs, on a network of half the width
LONG = 24  # epochs of the compact network, four times as many as at the small scale
SMOOTHED = 0.2  # label smoothing, where there is any
FEATURE_KINDS: tuple[type[Detector], ...] = (KNN, ViM, Mahalanobis)  # on anchored networks, of the mean features
# Scores of every anchored network. The last two leave out tau, or everything else.
SCORES: dict[str, dict[str, Any]] = {
    "AMP": {},
    "AMP, tau mean": {"tau": "mean"},
    "AMP, recommended": {"variant": "recommended"},
    "no tau": {"rescale": "none"},
    "tau alone": {"score": "tau", "tau": "mean"},
}
# More scores for the network without variations; class means also for the masked one, which they change most.
MORE: dict[str, dict[str, Any]] = {
    "mutual information": {"score": "mutual_information"},
    "AMP, tau mean, 10 anchors": {"tau": "mean", "k": 10},
    "AMP, tau mean, balanced anchors": {"tau": "mean", "anchors": "balanced"},
    "AMP, tau mean, class means": {"tau": "mean", "anchors": "means"},
    "AMP, tau mean, TTA, 2 views": {"tau": "mean", "tta": 2},
    "AMP, tau mean, class means, TTA, 6 views": {"tau": "mean", "anchors": "means", "tta": 6},
}
# For the network that is trained to be confident only under anchors of the image's own class: one anchor of each.
ALL_CLASSES: dict[str, dict[str, Any]] = {
    "AMP, tau mean, an anchor of each class": {"tau": "mean", "anchors": "balanced", "k": 10},
    "no tau, an anchor of each class": {"rescale": "none", "anchors": "balanced", "k": 10},
    "AMP, tau mean, class means": MORE["AMP, tau mean, class means"],
}


def insight(setting: Setting) -> Study:
    """Variations of anchored training, each with several scores, and their unanchored baselines."""
    short, longer = (small_recipe(setting, epochs) for epochs in (SHORT, EPOCHS))

    def network(how: Recipe = short, **plan: Any) -> NetworkPlan:
        return small_network(setting, how, **plan)

    def anchored(how: Recipe = short, loss: Any = None, **anchoring: Any) -> NetworkPlan:
        more = {} if loss is None else {"loss": loss}
        return network(how, anchored=True, anchoring={"per_sample": True} | anchoring, **more)

    to_the_end = replace(short, clean_final_fraction=0.0)
    smoothed = replace(short, label_smoothing=SMOOTHED)
    masking: dict[str, Any] = {"mask": MASKED, "mask_target": "uniform"}
    networks = {
        "anchored": anchored(),
        "no T": anchored(corruption=None),
        "T in every batch": anchored(every=1),
        "T in whole batches": anchored(per_sample=False),
        "T to the end": anchored(to_the_end),
        "T weaker": anchored(corruption=Corruption(jitter=False, blur=False, gray=False)),
        "T stronger": anchored(corruption=own.twice),
        "T as published": anchored(to_the_end, corruption=own.as_published, per_sample=False),
        "fresh stem": anchored(init="fresh"),
        "masked, label": anchored(mask=MASKED),
        "masked, uniform": anchored(**masking),
        "masked less, uniform": anchored(mask=0.1, mask_target="uniform"),
        "masked, synthetic outliers": anchored(loss=SyntheticOutliers(), **masking),
        "mismatched": anchored(loss=SyntheticOutliers(kinds=("mismatch",))),
        "synthetic outliers": anchored(loss=SyntheticOutliers()),
        "logit norm": anchored(loss=LogitNorm()),
        "label smoothing": anchored(smoothed),
        "two anchors agree": anchored(loss=own.Agreement()),
        "anchors kept alive": anchored(loss=own.AliveAnchors()),
        "twice as long": anchored(longer),
        "synthetic outliers, twice as long": anchored(longer, SyntheticOutliers()),
        "masked, synthetic outliers, twice as long": anchored(longer, SyntheticOutliers(), **masking),
    }
    unanchored = {
        "unanchored": network(),
        "unanchored, differences": network(loss=own.Differences()),
        "unanchored, T as noise": network(loss=own.AsNoise(short.clean_final_fraction)),
        "unanchored, synthetic outliers": network(loss=SyntheticOutliers()),
        "unanchored, logit norm": network(loss=LogitNorm()),
        "unanchored, label smoothing": network(smoothed),
        "unanchored, twice as long": network(longer),
        "unanchored, synthetic outliers, twice as long": network(longer, loss=SyntheticOutliers()),
    }
    for epochs in () if setting.scale == "smoke" else BUDGETS:
        narrow, budget = (
            partial(network, small_recipe(setting, epochs), arguments={"width": NARROW}),
            f"{epochs} epochs",
        )
        networks[f"narrow, {budget}"] = narrow(**PER_SAMPLE)
        unanchored[f"unanchored, narrow, {budget}"] = narrow()
        if epochs == BUDGETS[-1]:  # which part of anchored training matters at the longest budget
            no_corruption = {"per_sample": True, "corruption": None}
            networks[f"no T, narrow, {budget}"] = narrow(anchored=True, anchoring=no_corruption)
            unanchored[f"unanchored, T as noise, narrow, {budget}"] = narrow(
                loss=own.AsNoise(short.clean_final_fraction)
            )
            networks[f"synthetic outliers, narrow, {budget}"] = narrow(**PER_SAMPLE, loss=SyntheticOutliers())
            unanchored[f"unanchored, synthetic outliers, narrow, {budget}"] = narrow(loss=SyntheticOutliers())
    compact = partial(setting.network, "compact", 10)  # its first layer starts from random weights and is trained
    networks["compact, anchored"] = compact(**PER_SAMPLE)
    networks["compact, fresh stem"] = compact(anchored=True, anchoring={"per_sample": True, "init": "fresh"})
    own_class = {"init": "fresh", "corruption": None}
    networks["compact, same class"] = compact(anchored=True, anchoring=own_class, loss=own.SameClass())
    unanchored["compact, unanchored"] = compact()
    if setting.scale == "small":
        long = replace(setting.recipe(), epochs=LONG)
        networks[f"compact, fresh stem, {LONG} epochs"] = replace(networks["compact, fresh stem"], recipe=long)
        unanchored[f"compact, unanchored, {LONG} epochs"] = replace(unanchored["compact, unanchored"], recipe=long)
    scores = [(name, score, options) for name in networks for score, options in SCORES.items()]
    scores += [("anchored", score, options) for score, options in MORE.items()]
    scores += [("masked, uniform", score, options) for score, options in MORE.items() if "means" in options.values()]
    scores += [("compact, same class", score, options) for score, options in ALL_CLASSES.items()]
    rows = {f"{name}: {score}": MethodPlan(AMP, (name,), options) for name, score, options in scores}
    rows |= {f"{name}: Energy": MethodPlan(Energy, (name,)) for name in (*networks, *unanchored)}
    rows |= {
        f"{name}: {kind.__name__}": MethodPlan(kind, (name,))
        for name in ("anchored", "unanchored")
        for kind in FEATURE_KINDS
    }
    rows |= {f"{name}: KL to uniform": MethodPlan(KLUniform, (name,)) for name in unanchored}
    rows |= {f"{name}: KL to uniform, TTA, 5 views": MethodPlan(TTA, (name,), VIEWS) for name in unanchored}
    suite = setting.suite(
        "cifar10",
        "What anchors contribute",
        networks=networks | unanchored,
        methods=rows,
        data=partial(_data, setting),
        protocol=Protocol(("auroc", "fpr95")),
        leads=("anchored: AMP",),
    )
    about = "Variations of anchored training and of the score, judged on held-out images and one validation set."
    return Study("insight", "What anchors contribute", about, (suite,))


def _data(setting: Setting, seed: int) -> SuiteData:
    """The split of cifar10-fast; its held-out images in halves, one to calibrate on and one to judge by."""
    if setting.scale == "smoke":
        return smoke_data(seed)
    train = sets.load_set("cifar10", side=32, data_dir=setting.data_dir, split="train")
    part, held_out = train.split(1 - HELD_OUT, seed=0)
    calibration, known = held_out.split(0.5, seed=0)
    near = sets.find([NEAR], side=32, data_dir=setting.data_dir, split="val_x")
    scrambled = phase_randomization(to_unit(known.images[:MOST]), torch.Generator().manual_seed(0))
    ood = [replace(images, name=f"{images.name}, validation") for images in near.sets]
    ood.append(ImageSet((255 * scrambled).round().to(torch.uint8), name="phase-randomized held-out images"))
    return SuiteData(part, calibration, known, tuple(ood), missing=near.missing)
