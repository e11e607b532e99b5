"""The studies that ``kedge reproduce`` runs, by name."""

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
from kedge.studies.resizing import resizing
from kedge.studies.scood import coherent_ood
from kedge.studies.study import Setting, Study

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
