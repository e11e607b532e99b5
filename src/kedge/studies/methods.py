"""Every method on the digits: what each needs, costs, and detects."""

from typing import Any

from kedge.data import ImageSet
from kedge.detectors import AMP, UDG, DeepEnsemble, Mahalanobis, MCDropout
from kedge.detectors.registry import DETECTORS
from kedge.studies.demo import KNOWN, demo_data
from kedge.studies.outlier_images import shapes
from kedge.studies.plan import MethodPlan, NetworkPlan, Protocol, SuiteData
from kedge.studies.study import Setting, Study
from kedge.training import recipe

MEMBERS = 3  # of the ensembles
SMOKE_IMAGES = 64  # of each set at the smallest scale
UNANCHORED = "msp max_logit entropy temperature_scaling odin energy mahalanobis gram knn vim react deup"
ANCHORED = "amp msp entropy energy odin mahalanobis gram knn vim react deup"
OWN_TRAINING = "svi svi_avuc duq outlier_exposure discrepancy udg"


def methods(setting: Setting) -> Study:
    """All methods on digits 0 to 7 against the demo's five sets; outliers, where used, are drawings of shapes.

    The networks and epochs are the demo's at every scale but the smoke scale, which takes a few images of each set.
    """
    small = setting.scale != "smoke"
    how = recipe("demo") if small else recipe("demo", epochs=1, batch=32)
    groups = {"groups": 50 if small else 8}

    def network(arguments: dict[str, Any] | None = None, **plan: Any) -> NetworkPlan:
        size = {"width": 16 if small else 4, "classes": len(KNOWN), "channels": 1}
        return NetworkPlan("compact", how, size | (arguments or {}), **plan)

    networks = {
        "unanchored": network(),
        "anchored": network(anchored=True),
        "dropout": network({"dropout": 0.3}),
        **{kind.name: network(method=kind) for kind in _kinds(OWN_TRAINING) if kind is not UDG},
        "udg": network(method=UDG, prepare=groups, loss=groups),
    }
    members: dict[str, tuple[str, ...]] = {}
    for kind in ("unanchored", "anchored"):
        more = {f"{kind} {n}": network(anchored=kind == "anchored", member=1000 * n) for n in range(1, MEMBERS)}
        members[kind], networks = (kind, *more), networks | more
    rows = {f"{kind.__name__} (anchored)": MethodPlan(kind, ("anchored",)) for kind in _kinds(ANCHORED)}
    rows["AMP, energy (anchored)"] = MethodPlan(AMP, ("anchored",), {"score": "energy"})
    rows["DeepEnsemble (anchored)"] = MethodPlan(DeepEnsemble, members["anchored"])
    rows |= {f"{kind.__name__} (unanchored)": MethodPlan(kind, ("unanchored",)) for kind in _kinds(UNANCHORED)}
    rows["DeepEnsemble (unanchored)"] = MethodPlan(DeepEnsemble, members["unanchored"])
    rows["MCDropout"] = MethodPlan(MCDropout, ("dropout",))
    rows["Mahalanobis, with outliers (unanchored)"] = MethodPlan(Mahalanobis, ("unanchored",), outliers=True)
    rows |= {kind.__name__: MethodPlan(kind, (kind.name,)) for kind in _kinds(OWN_TRAINING)}
    suite = setting.suite(
        "digits",
        "Every method on the digits",
        networks=networks,
        methods=rows,
        data=lambda seed: _data(seed, small),
        resamples=1000 if small else 0,
        protocol=Protocol(("auroc", "fpr95")),
    )
    about = "Digits 0 to 7 against five sets of other images; networks of the same shape, trained for as many epochs."
    return Study("methods", "Every method on the digits", about, (suite,))


def _kinds(names: str) -> list[Any]:
    return [DETECTORS[name] for name in names.split()]


def _data(seed: int, small: bool) -> SuiteData:
    whole, outliers = demo_data(seed=seed), shapes(2000 if small else SMOKE_IMAGES, seed=seed)

    def some(images: ImageSet) -> ImageSet:
        return images if small else images.subset(range(min(len(images), SMOKE_IMAGES)))

    ood = tuple(map(some, whole.ood))
    return SuiteData(some(whole.train), some(whole.calibration), some(whole.test), ood, outliers)
