"""CIFAR-10 and CIFAR-100 against sets of other images: the paper's Tables 2, 3, 4, 9 and 12."""

from kedge.detectors import AMP, DUQ, MSP, DeepEnsemble, Gram, Mahalanobis
from kedge.studies.plan import MethodPlan, PaperTable, Protocol, Suite
from kedge.studies.study import CLASSES, Setting, Study, common

OTHER = {"cifar10": "cifar100", "cifar100": "cifar10"}
OF_WRN = ("isun", "lsun-resize", "lsun-crop", "places365", "textures", "svhn")
OF_RESNET = ("isun", "lsun-resize", "lsun-crop", "tiny-imagenet-resize", "tiny-imagenet-crop", "svhn")
OUTLIERS = "places365"  # for Mahalanobis*; of none of the sets that it is evaluated on
MEMBERS = 5


def cifar_wrn(setting: Setting) -> Study:
    """Table 2: WRN-40-2, six OOD sets, by the protocol of the Energy paper.

    Example:
        >>> [suite.name for suite in cifar_wrn(Setting("smoke")).suites]
        ['cifar10', 'cifar100']
    """
    suites = tuple(
        Suite(
            name=known,
            title=f"{known} and what is not, WRN-40-2",
            networks=setting.twins("wrn-40-2", CLASSES[known]),
            methods=common(),
            data=setting.data(known, OF_WRN),
            seeds=setting.seeds,
            comparisons=setting.comparisons,
            protocol=Protocol(("fpr95", "auroc", "aupr_in"), ood_ratio=0.2),
            paper=PaperTable("2", known, "wrn-40-2"),
        )
        for known in OTHER
    )
    return Study("cifar-wrn", "CIFAR against six sets, WRN-40-2 (Table 2)", _ABOUT_WRN, suites)


def cifar_resnet34(setting: Setting) -> Study:
    """Tables 3 and 12: ResNet-34, seven OOD sets, with the methods that read features.

    Example:
        >>> "Mahalanobis*" in cifar_resnet34(Setting("smoke")).suites[0].methods
        True
    """
    suites = tuple(
        Suite(
            name=known,
            title=f"{known} and what is not, ResNet-34",
            networks=setting.twins("resnet34-cifar", CLASSES[known]),
            methods=common(_STARRED, _GRAM),
            data=setting.data(known, (*OF_RESNET, other), outliers=OUTLIERS),
            seeds=setting.seeds,
            comparisons=setting.comparisons,
            protocol=Protocol(("fpr95", "auroc", "dtacc")),
            paper=PaperTable("12", known, "resnet34-cifar"),
        )
        for known, other in OTHER.items()
    )
    return Study("cifar-resnet34", "CIFAR against seven sets, ResNet-34 (Tables 3, 12)", _ABOUT_RESNET, suites)


def near_ood(setting: Setting) -> Study:
    """Table 4: CIFAR-10 against CIFAR-100 and the other way round.

    Example:
        >>> near_ood(Setting("smoke")).suites[0].protocol.metrics
        ('fpr95', 'auroc')
    """
    suites = tuple(
        Suite(
            name=known,
            title=f"{known} against {other}, ResNet-34",
            networks=setting.twins("resnet34-cifar", CLASSES[known]),
            methods=common(_STARRED, _GRAM),
            data=setting.data(known, (other,), outliers=OUTLIERS),
            seeds=setting.seeds,
            comparisons=setting.comparisons,
            protocol=Protocol(("fpr95", "auroc")),
            paper=PaperTable("4", known, "resnet34-cifar"),
        )
        for known, other in OTHER.items()
    )
    return Study("near-ood", "CIFAR-10 and CIFAR-100 against each other (Table 4)", _ABOUT_NEAR, suites)


def uncertainty(setting: Setting) -> Study:
    """Table 9: methods of uncertainty on CIFAR-10 against SVHN, ResNet-18, mean and deviation over seeds.

    Example:
        >>> list(uncertainty(Setting("smoke")).suites[0].methods)
        ['MSP', 'DUQ', 'DeepEnsemble', 'AMP']
    """
    classes, members = CLASSES["cifar10"], MEMBERS if setting.scale == "full" else 2
    networks = setting.twins("resnet18-cifar", classes)
    networks["duq"] = setting.network("resnet18-cifar", classes, method=DUQ)
    names = ["plain"]
    for number in range(1, members):
        names.append(f"plain {number}")
        networks[names[-1]] = setting.network("resnet18-cifar", classes, member=1000 * number)
    suite = Suite(
        name="cifar10",
        title="Uncertainty on cifar10 against svhn, ResNet-18",
        networks=networks,
        methods={
            "MSP": MethodPlan(MSP, ("plain",), paper="plain"),
            "DUQ": MethodPlan(DUQ, ("duq",), paper="DUQ"),
            "DeepEnsemble": MethodPlan(DeepEnsemble, tuple(names), {"score": "entropy"}, paper="DeepEnsemble"),
            "AMP": MethodPlan(AMP, ("anchored",), paper="AMP"),
        },
        data=setting.data("cifar10", ("svhn",)),
        seeds=setting.seeds,
        comparisons=setting.comparisons,
        protocol=Protocol(("auroc",)),
        paper=PaperTable("9", "cifar10", "resnet18-cifar"),
    )
    return Study("uncertainty", "Methods of uncertainty, CIFAR-10 against SVHN (Table 9)", _ABOUT_UNCERTAINTY, (suite,))


_STARRED = (
    "Mahalanobis*",
    MethodPlan(Mahalanobis, ("plain",), {"epsilon": 0.0014}, outliers=True, paper="Mahalanobis*"),
)
_GRAM = ("Gram", MethodPlan(Gram, ("plain",), paper="Gram"))
_ABOUT_WRN = "Six sets that show no CIFAR class, and how many of them pass for one."
_ABOUT_RESNET = "Seven sets and two methods that read the network's features; Mahalanobis* learns from outliers."
_ABOUT_NEAR = "Near OOD: photographs of other things, taken and scaled in the same way."
_ABOUT_UNCERTAINTY = "Does the disagreement of anchors tell as much as that of networks trained apart?"
