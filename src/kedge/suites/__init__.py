"""Studies as declarations, and the runner that they share."""

from collections.abc import Callable

from kedge.suites.ablation import ablation
from kedge.suites.cifar import cifar_resnet34, cifar_wrn, near_ood, uncertainty
from kedge.suites.cifar10_fast import cifar10_fast
from kedge.suites.cifar10_longer import cifar10_longer
from kedge.suites.imagenet_c import imagenet_c
from kedge.suites.insight import insight
from kedge.suites.methods import methods
from kedge.suites.ntk import run_ntk
from kedge.suites.plan import MethodPlan, NetworkPlan, PaperTable, Protocol, Suite, SuiteData
from kedge.suites.publish import Published, publish
from kedge.suites.resizing import resizing
from kedge.suites.run import SuiteRun
from kedge.suites.scood import scood
from kedge.suites.study import Setting, Study

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
