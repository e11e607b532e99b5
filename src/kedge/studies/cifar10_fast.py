"""CIFAR-10 on two cores: every method without outliers, on networks that train in minutes."""

from dataclasses import replace
from functools import partial
from typing import Any

from kedge.detectors import AMP, DUQ, SVI, TTA, DeepEnsemble, KLUniform, LowLevelStatistics, MCDropout, SVIAvUC
from kedge.detectors.registry import DETECTORS
from kedge.studies.plan import MethodPlan, NetworkPlan, Protocol
from kedge.studies.study import DRAWS, SHIFTS, SMOKE_CLASSES, Setting, Study, draw_label
from kedge.training import Recipe, recipe
from kedge.training.losses import SyntheticOutliers

WIDTH, EPOCHS = 32, 4
MASKED = 0.25  # share of pairs that are masked and trained towards uniform, where any are
MOST = (5_000, 2_000)  # ID images to test on, and of any other set
FINE_TUNED = 0.4  # of an epoch: a tenth of a training
LATER = 0.5  # of an epoch, starting from the unanchored baseline: methods that learn too little from scratch
MEMBERS = 3  # of the ensemble: the unanchored baselines of the first seeds
NEAR = "tiny-imagenet (OpenOOD)"  # near OOD, the others are far; it is left out of the means
KINDS = "msp max_logit entropy energy temperature_scaling odin mahalanobis gram knn vim react deup"  # unanchored
LEAD = "AMP"
PER_SAMPLE: dict[str, Any] = {"anchored": True, "anchoring": {"per_sample": True}}
VIEWS = {"k": 5, "shift": 1, "score": "kl_uniform"}  # of TTA
METRICS = Protocol(("auroc", "fpr95", "aupr_in", "aupr_out", "dtacc"))


def cifar10_fast(setting: Setting) -> Study:
    """Anchored and unanchored airbench networks on CIFAR-10 against six sets; "small" and "full" are the same scale."""
    load, network = setting.data("cifar10", (), shifts=SHIFTS, most=MOST), partial(small_network, setting)

    def later(plan: NetworkPlan, share: float) -> NetworkPlan:
        return replace(plan, start="unanchored", share=share, recipe=small_recipe(setting, 1, lr=0.06))

    masking = {"per_sample": True, "mask": MASKED, "mask_target": "uniform"}
    networks = {
        "unanchored": network(),
        "anchored": network(**PER_SAMPLE),
        "masked": network(anchored=True, anchoring=masking),
        "synthetic outliers": network(loss=SyntheticOutliers()),
        "anchored, synthetic outliers": network(loss=SyntheticOutliers(), **PER_SAMPLE),
        "dropout": network(arguments={"dropout": 0.2}),
        "svi": later(network(method=SVI, prepare={"prior_mean": "weights"}), LATER),
        "svi-avuc": later(network(method=SVIAvUC, prepare={"prior_mean": "weights"}), LATER),
        "duq": later(network(method=DUQ), LATER),
        "fine-tuned": later(network(**PER_SAMPLE), FINE_TUNED),
    }
    members = {f"unanchored {number}": network(seed=number) for number in range(MEMBERS)}
    amp = partial(MethodPlan, AMP)
    recommended = amp(("anchored, synthetic outliers",), {"variant": "recommended"})
    rows: dict[str, MethodPlan] = {
        LEAD: amp(("anchored",)),
        "AMP, tau mean": amp(("anchored",), {"tau": "mean"}),
        "AMP, energy": amp(("anchored",), {"score": "energy"}),
        "AMP, authors": amp(("anchored",), {"variant": "authors"}),
        "AMP, tau mean, TTA, 6 views": amp(("anchored",), {"tau": "mean", "tta": 6}),
        "AMP, recommended": recommended,
        "AMP (synthetic outliers)": amp(("anchored, synthetic outliers",)),
        "AMP (masked)": amp(("masked",)),
        "AMP, class means, TTA, 6 views (masked)": amp(("masked",), {"tau": "mean", "tta": 6, "anchors": "means"}),
        "AMP, fine-tuned": amp(("fine-tuned",)),
        "Energy (anchored)": MethodPlan(DETECTORS["energy"], ("anchored",)),
        "MSP (anchored)": MethodPlan(DETECTORS["msp"], ("anchored",)),
        **{DETECTORS[kind].__name__: MethodPlan(DETECTORS[kind], ("unanchored",)) for kind in KINDS.split()},
        "DeepEnsemble": MethodPlan(DeepEnsemble, tuple(members)),
        "MCDropout": MethodPlan(MCDropout, ("dropout",)),
        "SVI": MethodPlan(SVI, ("svi",)),
        "SVIAvUC": MethodPlan(SVIAvUC, ("svi-avuc",)),
        "DUQ": MethodPlan(DUQ, ("duq",)),
        "AMP, tau permuted": amp(("anchored",), permuted=True),
        "AMP, recommended, tau permuted": replace(recommended, permuted=True),
        "AMP, shared tau": amp(("anchored",), {"shared_tau": True}),
        "KL to uniform": MethodPlan(KLUniform, ("unanchored",)),
        "Energy, TTA, 5 views": MethodPlan(TTA, ("unanchored",), {"k": 5, "shift": 2}),
        "KL to uniform, TTA, 5 views": MethodPlan(TTA, ("unanchored",), VIEWS),
        "KL to uniform (synthetic outliers)": MethodPlan(KLUniform, ("synthetic outliers",)),
        "KL to uniform, TTA, 5 views (synthetic outliers)": MethodPlan(TTA, ("synthetic outliers",), VIEWS),
        "low-level statistics": MethodPlan(LowLevelStatistics, ("unanchored",)),
        **{draw_label(seed): amp(("anchored",), {"seed": seed}) for seed in DRAWS},
    }
    suite = setting.suite(
        "cifar10",
        "CIFAR-10 on two cores",
        networks=networks | members,
        methods=rows,
        data=replace(
            load, load=lambda seed: load(0)
        ),  # the same split for all seeds, so that no member has seen another's held-out images
        resamples=0 if setting.scale == "smoke" else 500,
        protocol=METRICS,
        leads=(LEAD,),
        draws={LEAD: tuple(map(draw_label, DRAWS))},
        apart=(NEAR,),
    )
    about = "Every method without outliers, on networks that two cores train in minutes."
    return Study("cifar10-fast", "CIFAR-10 on two cores", about, (suite,))


def small_network(setting: Setting, how: Recipe | None = None, **plan: Any) -> NetworkPlan:
    """The airbench network at a width that two cores train in minutes."""
    smoke = setting.scale == "smoke"
    size = {"width": 2 if smoke else WIDTH, "classes": SMOKE_CLASSES if smoke else 10}
    arguments = size | plan.pop("arguments", {})
    return NetworkPlan("airbench", how or small_recipe(setting), arguments, **plan)


def small_recipe(setting: Setting, epochs: int = EPOCHS, **changes: float) -> Recipe:
    """Its recipe; one short epoch at the smoke scale."""
    if setting.scale == "smoke":
        return recipe("airbench", epochs=1, batch=32)
    return recipe("airbench", epochs=epochs, **changes)
