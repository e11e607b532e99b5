"""Studies as declarations, and the runner that they share."""

from collections.abc import Callable

from kedge.studies.ablation import ablation
from kedge.studies.cifar import cifar_resnet34, cifar_wrn, near_ood, uncertainty
from kedge.studies.cifar10_fast import cifar10_fast
from kedge.studies.cifar10_longer import cifar10_longer
from kedge.studies.imagenet_c import imagenet_c
from kedge.studies.insight import insight
from kedge.studies.methods import methods
from kedge.studies.plan import MethodPlan, NetworkPlan, PaperTable, Protocol, Suite, SuiteData
from kedge.studies.publish import Published, publish
from kedge.studies.resizing import resizing
from kedge.studies.run import SuiteRun
from kedge.studies.scood import scood
from kedge.studies.study import Setting, Study
from kedge.studies.theory.suite import run_ntk

__all__ = [
    "STUDIES",
    "MethodPlan",
    "NetworkPlan",
    "PaperTable",
    "Protocol",
    "Published",
    "Setting",
    "Study",
    "Suite",
    "SuiteData",
    "SuiteRun",
    "publish",
    "run_ntk",
]

STUDIES: dict[str, Callable[[Setting], Study]] = {
    "methods": methods,
    "cifar-wrn": cifar_wrn,
    "cifar-resnet34": cifar_resnet34,
    "near-ood": near_ood,
    "imagenet-c": imagenet_c,
    "scood": scood,
    "resizing": resizing,
    "ablation": ablation,
    "uncertainty": uncertainty,
    "cifar10-fast": cifar10_fast,
    "cifar10-longer": cifar10_longer,
    "insight": insight,
}
