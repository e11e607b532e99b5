"""CIFAR-10 and CIFAR-100 against sets of other images: the paper's Tables 2, 3, 4, 9 and 12."""

from kedge.detectors import AMP, DUQ, MSP, DeepEnsemble, Gram, Mahalanobis
from kedge.studies.plan import MethodPlan, PaperTable, Protocol
from kedge.studies.study import CLASSES, OTHER, Setting, Study, common_rows

OOD_OF_WRN = ("isun", "lsun-resize", "lsun-crop", "places365", "textures", "svhn")
OOD_OF_RESNET = ("isun", "lsun-resize", "lsun-crop", "tiny-imagenet-resize", "tiny-imagenet-crop", "svhn")
OUTLIERS = "places365"  # for Mahalanobis*; in none of the sets that it is evaluated on
MEMBERS = 5
FEATURE_ROWS = {
    "Mahalanobis*": MethodPlan(Mahalanobis, ("unanchored",), {"epsilon": 0.0014}, outliers=True, paper="Mahalanobis*"),
    "Gram": MethodPlan(Gram, ("unanchored",), paper="Gram"),
}


def cifar_wrn(setting: Setting) -> Study:
    """Table 2: WRN-40-2, six OOD sets, by the protocol of the Energy paper."""
    suites = tuple(
        setting.suite(
            known,
            f"{known} against six OOD sets, WRN-40-2",
            networks=setting.networks("wrn-40-2", CLASSES[known]),
            methods=common_rows(),
            data=setting.data(known, OOD_OF_WRN),
            protocol=Protocol(("fpr95", "auroc", "aupr_in"), ood_ratio=0.2),
            paper=PaperTable("2", known, "wrn-40-2"),
        )
        for known in OTHER
    )
    about = "How many images of six sets without any CIFAR class are accepted?"
    return Study("cifar-wrn", "CIFAR against six sets, WRN-40-2 (Table 2)", about, suites)


def cifar_resnet34(setting: Setting) -> Study:
    """Tables 3 and 12: ResNet-34, seven OOD sets, with the methods that read features."""
    suites = tuple(
        setting.suite(
            known,
            f"{known} against seven OOD sets, ResNet-34",
            networks=setting.networks("resnet34-cifar", CLASSES[known]),
            methods=common_rows(**FEATURE_ROWS),
            data=setting.data(known, (*OOD_OF_RESNET, other), outliers=OUTLIERS),
            protocol=Protocol(("fpr95", "auroc", "dtacc")),
            paper=PaperTable("12", known, "resnet34-cifar"),
        )
        for known, other in OTHER.items()
    )
    about = "Seven sets and two methods that read the network's features; Mahalanobis* learns from outliers."
    return Study("cifar-resnet34", "CIFAR against seven sets, ResNet-34 (Tables 3, 12)", about, suites)


def near_ood(setting: Setting) -> Study:
    """Table 4: CIFAR-10 against CIFAR-100 and the other way round."""
    suites = tuple(
        setting.suite(
            known,
            f"{known} against {other}, ResNet-34",
            networks=setting.networks("resnet34-cifar", CLASSES[known]),
            methods=common_rows(**FEATURE_ROWS),
            data=setting.data(known, (other,), outliers=OUTLIERS),
            protocol=Protocol(("fpr95", "auroc")),
            paper=PaperTable("4", known, "resnet34-cifar"),
        )
        for known, other in OTHER.items()
    )
    about = "Near OOD: photographs of other things, taken and scaled in the same way."
    return Study("near-ood", "CIFAR-10 and CIFAR-100 against each other (Table 4)", about, suites)


def uncertainty(setting: Setting) -> Study:
    """Table 9: methods of uncertainty on CIFAR-10 against SVHN, ResNet-18, mean and deviation over seeds."""
    classes, members = CLASSES["cifar10"], MEMBERS if setting.scale == "full" else 2
    networks = setting.networks("resnet18-cifar", classes, members)
    ensemble = tuple(name for name in networks if name.startswith("unanchored"))
    networks["duq"] = setting.network("resnet18-cifar", classes, method=DUQ)
    suite = setting.suite(
        "cifar10",
        "Uncertainty on cifar10 against svhn, ResNet-18",
        networks=networks,
        methods={
            "MSP": MethodPlan(MSP, ("unanchored",), paper="unanchored"),
            "DUQ": MethodPlan(DUQ, ("duq",), paper="DUQ"),
            "DeepEnsemble": MethodPlan(DeepEnsemble, ensemble, {"score": "entropy"}, paper="DeepEnsemble"),
            "AMP": MethodPlan(AMP, ("anchored",), paper="AMP"),
        },
        data=setting.data("cifar10", ("svhn",)),
        protocol=Protocol(("auroc",)),
        paper=PaperTable("9", "cifar10", "resnet18-cifar"),
    )
    about = "Is the disagreement of anchors as informative as that of independently trained networks?"
    return Study("uncertainty", "Methods of uncertainty, CIFAR-10 against SVHN (Table 9)", about, (suite,))
