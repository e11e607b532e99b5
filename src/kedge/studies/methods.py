"""Every method on the digits: what each needs, what it costs, and what it finds."""

from kedge.data import ImageSet
from kedge.detectors import (
    AMP,
    DEUP,
    DUQ,
    KNN,
    MSP,
    ODIN,
    SVI,
    UDG,
    ClassifierDiscrepancy,
    DeepEnsemble,
    Energy,
    Entropy,
    Gram,
    Mahalanobis,
    MaxLogit,
    MCDropout,
    OutlierExposure,
    ReAct,
    SVIAvUC,
    TemperatureScaling,
    TrainedDetector,
    ViM,
)
from kedge.studies.demo import KNOWN, demo_data
from kedge.studies.outlier_images import shapes
from kedge.studies.plan import MethodPlan, NetworkPlan, Protocol, Suite, SuiteData
from kedge.studies.study import Setting, Study
from kedge.training import recipe

MEMBERS = 3  # of the ensembles
SMOKE_IMAGES = 64  # of each set at the smallest scale
ON_PLAIN = (MSP, MaxLogit, Entropy, TemperatureScaling, ODIN, Energy, Mahalanobis, Gram, KNN, ViM, ReAct, DEUP)
ON_ANCHORED = (AMP, MSP, Entropy, Energy, ODIN, Mahalanobis, Gram, KNN, ViM, ReAct, DEUP)


def methods(setting: Setting) -> Study:
    """All methods on digits 0 to 7 against the demo's five sets; outliers, where used, are drawings of shapes.

    The networks and epochs are the demo's at every scale but the smoke scale, which takes a few images of each set.

    Example:
        >>> "AMP (anchored)" in methods(Setting("smoke")).suites[0].methods
        True
    """
    small = setting.scale != "smoke"
    how = recipe("demo") if small else recipe("demo", epochs=1, batch=32)
    groups = 50 if small else 8

    def network(method: type[TrainedDetector] | None = None, **plan: object) -> NetworkPlan:
        more = plan.pop("arguments", {})
        size = {"width": 16 if small else 4, "classes": len(KNOWN), "channels": 1}
        return NetworkPlan("compact", how, size | more, method=method, **plan)  # type: ignore[operator, arg-type]

    networks = {
        "plain": network(),
        "anchored": network(anchored=True),
        "dropout": network(arguments={"dropout": 0.3}),
        "svi": network(SVI),
        "svi-avuc": network(SVIAvUC),
        "duq": network(DUQ),
        "outlier exposure": network(OutlierExposure),
        "discrepancy": network(ClassifierDiscrepancy),
        "udg": network(UDG, prepare={"groups": groups}, loss={"groups": groups}),
    }
    for kind in ("plain", "anchored"):
        for number in range(1, MEMBERS):
            networks[f"{kind} {number}"] = network(anchored=kind == "anchored", member=1000 * number)
    members = {kind: (kind, *(f"{kind} {n}" for n in range(1, MEMBERS))) for kind in ("plain", "anchored")}
    rows = {f"{kind.__name__} (anchored)": MethodPlan(kind, ("anchored",)) for kind in ON_ANCHORED}
    rows["AMP, energy (anchored)"] = MethodPlan(AMP, ("anchored",), {"score": "energy"})
    rows["DeepEnsemble (anchored)"] = MethodPlan(DeepEnsemble, members["anchored"])
    rows |= {f"{kind.__name__} (plain)": MethodPlan(kind, ("plain",)) for kind in ON_PLAIN}
    rows |= {
        "DeepEnsemble (plain)": MethodPlan(DeepEnsemble, members["plain"]),
        "MCDropout": MethodPlan(MCDropout, ("dropout",)),
        "SVI": MethodPlan(SVI, ("svi",)),
        "SVIAvUC": MethodPlan(SVIAvUC, ("svi-avuc",)),
        "DUQ": MethodPlan(DUQ, ("duq",)),
        "Mahalanobis, tuned (plain)": MethodPlan(Mahalanobis, ("plain",), outliers=True),
        "OutlierExposure": MethodPlan(OutlierExposure, ("outlier exposure",)),
        "ClassifierDiscrepancy": MethodPlan(ClassifierDiscrepancy, ("discrepancy",)),
        "UDG": MethodPlan(UDG, ("udg",)),
    }
    suite = Suite(
        name="digits",
        title="Every method on the digits",
        networks=networks,
        methods=rows,
        data=lambda seed: _data(seed, small),
        seeds=setting.seeds,
        comparisons=setting.comparisons,
        resamples=1000 if small else 0,
        protocol=Protocol(("auroc", "fpr95")),
    )
    about = "Digits 0 to 7 against five sets of other images; networks of the same shape, trained for as many epochs."
    return Study("methods", "Every method on the digits", about, (suite,))


def _data(seed: int, small: bool) -> SuiteData:
    whole = demo_data(seed=seed)
    made = shapes(2000 if small else SMOKE_IMAGES, seed=seed)
    if small:
        return SuiteData(whole.train, whole.calibration, whole.test, whole.ood, made)

    def few(images: ImageSet) -> ImageSet:
        return images.subset(range(min(len(images), SMOKE_IMAGES)))

    return SuiteData(few(whole.train), few(whole.calibration), few(whole.test), tuple(map(few, whole.ood)), made)
