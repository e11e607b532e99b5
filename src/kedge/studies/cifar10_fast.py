"""CIFAR-10 on two cores: every method without outliers, on twins that train in minutes."""

from dataclasses import replace
from functools import partial
from typing import Any

from kedge.detectors import (
    AMP,
    DEUP,
    DUQ,
    KNN,
    MSP,
    ODIN,
    SVI,
    TTA,
    DeepEnsemble,
    Detector,
    Energy,
    Entropy,
    Gram,
    LowLevelStatistics,
    Mahalanobis,
    MaxLogit,
    MCDropout,
    ReAct,
    SVIAvUC,
    TemperatureScaling,
    ViM,
)
from kedge.studies.plan import MethodPlan, NetworkPlan, Protocol, Suite
from kedge.studies.study import DRAWS, SHIFTS, SMOKE_CLASSES, Setting, Study, draw_label
from kedge.training import Recipe, recipe
from kedge.training.losses import SyntheticOutliers

WIDTH, EPOCHS = 32, 4
MASKED = 0.25  # share of pairs that are masked and trained towards uniform, where any are
MOST = (5_000, 2_000)  # ID images to test on, and of any other set
TUNED = 0.4  # of an epoch: a tenth of a training
LATER = 0.5  # of an epoch, from the plain twin on: methods that learn too little in a short training from scratch
MEMBERS = 3  # of the ensemble: the plain twins of the first seeds
NEAR = "tiny-imagenet (OpenOOD)"  # of another kind than the others, so it stands by itself
ON_PLAIN: tuple[type[Detector], ...] = (
    MSP, MaxLogit, Entropy, Energy, TemperatureScaling, ODIN, Mahalanobis, Gram, KNN, ViM, ReAct, DEUP,
)  # fmt: skip
LEAD = "AMP"


def cifar10_fast(setting: Setting) -> Study:
    """Twins of the airbench network on CIFAR-10 against six sets of other images, at one scale but for the smoke scale.

    Example:
        >>> sorted(cifar10_fast(Setting("smoke")).suites[0].networks)[:3]
        ['anchored', 'anchored, made outliers', 'dropout']
    """
    load, network = setting.data("cifar10", (), shifts=SHIFTS, most=MOST), partial(small_network, setting)

    def later(plan: NetworkPlan, share: float) -> NetworkPlan:
        return replace(plan, start="plain", share=share, recipe=small_recipe(setting, 1, lr=0.06))

    networks = {
        "plain": network(),
        "anchored": network(anchored=True, anchoring={"spread": True}),
        "masked": network(anchored=True, anchoring={"spread": True, "mask": MASKED, "mask_target": "uniform"}),
        "made outliers": network(loss=SyntheticOutliers()),
        "anchored, made outliers": network(loss=SyntheticOutliers(), anchored=True, anchoring={"spread": True}),
        "dropout": network(arguments={"dropout": 0.2}),
        "svi": later(network(method=SVI, prepare={"prior_mean": "weights"}), LATER),
        "svi-avuc": later(network(method=SVIAvUC, prepare={"prior_mean": "weights"}), LATER),
        "duq": later(network(method=DUQ), LATER),
        "tuned": later(network(anchored=True, anchoring={"spread": True}), TUNED),
    }
    members = {f"plain {number}": network(seed=number) for number in range(MEMBERS)}
    rows: dict[str, MethodPlan] = {
        LEAD: MethodPlan(AMP, ("anchored",)),
        "AMP, tau mean": MethodPlan(AMP, ("anchored",), {"tau": "mean"}),
        "AMP, energy": MethodPlan(AMP, ("anchored",), {"score": "energy"}),
        "AMP, authors": MethodPlan(AMP, ("anchored",), {"variant": "authors"}),
        "AMP, tau mean, 6 views": MethodPlan(AMP, ("anchored",), {"tau": "mean", "views": 6}),
        "AMP, recommended": MethodPlan(AMP, ("anchored, made outliers",), {"variant": "recommended"}),
        "AMP (made outliers)": MethodPlan(AMP, ("anchored, made outliers",)),
        "AMP (masked)": MethodPlan(AMP, ("masked",)),
        "AMP, means of classes, 6 views (masked)": MethodPlan(
            AMP, ("masked",), {"tau": "mean", "views": 6, "anchors": "means"}
        ),
        "AMP, tuned": MethodPlan(AMP, ("tuned",)),
        "Energy (anchored)": MethodPlan(Energy, ("anchored",)),
        "MSP (anchored)": MethodPlan(MSP, ("anchored",)),
    }
    rows |= {kind.__name__: MethodPlan(kind, ("plain",)) for kind in ON_PLAIN}
    rows |= {
        "DeepEnsemble": MethodPlan(DeepEnsemble, tuple(members)),
        "MCDropout": MethodPlan(MCDropout, ("dropout",)),
        "SVI": MethodPlan(SVI, ("svi",)),
        "SVIAvUC": MethodPlan(SVIAvUC, ("svi-avuc",)),
        "DUQ": MethodPlan(DUQ, ("duq",)),
        "AMP, temperature permuted": MethodPlan(AMP, ("anchored",), permuted=True),
        "AMP, recommended, temperature permuted": MethodPlan(
            AMP, ("anchored, made outliers",), {"variant": "recommended"}, permuted=True
        ),
        "AMP, one temperature for all": MethodPlan(AMP, ("anchored",), {"temperature": "global"}),
        "Energy, centred": MethodPlan(Energy, ("plain",), {"centred": True}),
        "Energy, 5 flips and crops": MethodPlan(TTA, ("plain",), {"k": 5, "shift": 2}),
        "Energy, centred, 5 flips and crops": MethodPlan(TTA, ("plain",), {"k": 5, "shift": 1, "score": "kl_uniform"}),
        "Energy, centred (made outliers)": MethodPlan(Energy, ("made outliers",), {"centred": True}),
        "Energy, centred, 5 flips and crops (made outliers)": MethodPlan(
            TTA, ("made outliers",), {"k": 5, "shift": 1, "score": "kl_uniform"}
        ),
        "pixel statistics": MethodPlan(LowLevelStatistics, ("plain",)),
    }
    rows |= {draw_label(seed): MethodPlan(AMP, ("anchored",), {"seed": seed}) for seed in DRAWS}
    suite = Suite(
        name="cifar10",
        title="CIFAR-10 on two cores",
        networks=networks | members,
        methods=rows,
        data=lambda seed: load(0),  # the same split for all seeds, so that no member has seen another's held-out images
        seeds=setting.seeds,
        comparisons=setting.comparisons,
        resamples=0 if setting.scale == "smoke" else 500,
        protocol=Protocol(("auroc", "fpr95", "aupr_in", "aupr_out", "dtacc")),
        leads=(LEAD,),
        draws={LEAD: tuple(map(draw_label, DRAWS))},
        apart=(NEAR,),
    )
    about = "Every method without outliers, on networks that two cores train in minutes."
    return Study("cifar10-fast", "CIFAR-10 on two cores", about, (suite,))


def small_network(setting: Setting, how: Recipe | None = None, **plan: Any) -> NetworkPlan:
    """The airbench network of the width that two cores train in minutes."""
    smoke = setting.scale == "smoke"
    size = {"width": 2 if smoke else WIDTH, "classes": SMOKE_CLASSES if smoke else 10}
    arguments = size | plan.pop("arguments", {})
    return NetworkPlan("airbench", how or small_recipe(setting), arguments, **plan)


def small_recipe(setting: Setting, epochs: int = EPOCHS, **changes: float) -> Recipe:
    """Its recipe; one short epoch at the smoke scale."""
    if setting.scale == "smoke":
        return recipe("airbench", epochs=1, batch=32)
    return recipe("airbench", epochs=epochs, **changes)
