"""Studies: the paper's tables and figures, kedge's own studies, the kernel theory, and the timing harness.

`plan` declares a suite, `run` trains and scores it, `publish` writes its tables and report; `paper` holds the paper's
numbers. The suites of the paper are in `cifar`, `ablation`, `imagenet_c`, `scood` and `resizing`; kedge's own in
`methods`, `cifar10_fast`, `cifar10_longer` and `insight`; OpenOOD's in `openood`, with its leaderboard in
`leaderboard`. `tasks` are classifiers with frozen features, on which `comparison` runs methods for the study `default`.
"""

from collections.abc import Callable
from functools import partial

from kedge.studies.ablation import ablation
from kedge.studies.cifar import cifar_resnet34, cifar_wrn, near_ood, uncertainty
from kedge.studies.cifar10_fast import cifar10_fast
from kedge.studies.cifar10_longer import cifar10_longer
from kedge.studies.imagenet_c import imagenet_c
from kedge.studies.insight import insight
from kedge.studies.methods import methods
from kedge.studies.openood import BENCHMARKS, openood
from kedge.studies.plan import MethodPlan, NetworkPlan, PaperTable, Protocol, Suite, SuiteData
from kedge.studies.publish import Published, publish
from kedge.studies.resizing import resizing
from kedge.studies.run import SuiteRun
from kedge.studies.scood import coherent_ood
from kedge.studies.study import Setting, Study
from kedge.studies.theory.page import run_ntk

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
    "scood": coherent_ood,
    "resizing": resizing,
    "ablation": ablation,
    "uncertainty": uncertainty,
    "cifar10-fast": cifar10_fast,
    "cifar10-longer": cifar10_longer,
    "insight": insight,
    **{f"openood-{known}": partial(openood, known) for known in BENCHMARKS},
}
