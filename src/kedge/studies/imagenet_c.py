"""ImageNet against its blurred images: the paper's Table 5 and Figure 5."""

from dataclasses import replace

from kedge.anchoring.corruption import Corruption
from kedge.data import ImageSet
from kedge.detectors import AMP, MSP, SVI, DeepEnsemble, Energy, MCDropout, SVIAvUC, TemperatureScaling
from kedge.evaluation.result import Curve
from kedge.studies.corruptions import SEVERITIES, corrupt
from kedge.studies.plan import MethodPlan, Need, PaperTable, Protocol, Sets, SuiteData
from kedge.studies.study import CLASSES, Setting, Study

BLUR = "gaussian_blur"
MEMBERS = 5
SCORINGS = ("AMP", "AMP, entropy", "AMP, energy")  # the paper shows three scoring functions without their names

# Algorithm 1 of the paper.
IMAGENET_T = Corruption(crop_scale=(0.08, 1.0), gray=False, joint_jitter_blur=True)


def imagenet_c(setting: Setting) -> Study:
    """Table 5 and Figure 5: Gaussian blur at levels 1 to 5, and the methods of uncertainty beside AMP."""
    full = setting.scale == "full"
    known, network = ("imagenet", "resnet50") if full else ("cifar10", "resnet18-cifar")
    classes, members = CLASSES[known], MEMBERS if full else 2
    networks = setting.networks(network, classes, members)
    ensemble = tuple(name for name in networks if name.startswith("unanchored"))
    if full:
        networks["anchored"] = replace(networks["anchored"], anchoring={"every": 10, "corruption": IMAGENET_T})
    networks["dropout"] = setting.network(network, classes, arguments={"dropout": 0.2})
    networks["svi"] = setting.network(network, classes, method=SVI)
    networks["svi-avuc"] = setting.network(network, classes, method=SVIAvUC)
    clean = "toy test" if setting.scale == "smoke" else known
    entropy = {"score": "entropy"}
    suite = setting.suite(
        known,
        f"{known} against its blurred images",
        networks=networks,
        methods={
            "MSP": MethodPlan(MSP, ("unanchored",), paper="unanchored"),
            "TemperatureScaling": MethodPlan(TemperatureScaling, ("unanchored",), paper="TemperatureScaling"),
            "DeepEnsemble": MethodPlan(DeepEnsemble, ensemble, entropy, paper="DeepEnsemble"),
            "MCDropout": MethodPlan(MCDropout, ("dropout",), entropy, paper="MCDropout"),
            "SVI": MethodPlan(SVI, ("svi",), entropy, paper="SVI"),
            "SVIAvUC": MethodPlan(SVIAvUC, ("svi-avuc",), entropy, paper="SVIAvUC"),
            "AMP": MethodPlan(AMP, ("anchored",), paper="AMP"),
            "AMP, entropy": MethodPlan(AMP, ("anchored",), entropy),
            "AMP, energy": MethodPlan(AMP, ("anchored",), {"score": "energy"}),
            "Energy": MethodPlan(Energy, ("unanchored",)),
        },
        data=_with_levels(setting, known),
        protocol=Protocol(("auroc", "dtacc", "aupr_in", "aupr_out")),
        paper=PaperTable("5", "imagenet", "resnet50") if full else None,
        leads=SCORINGS,
        curves=(
            Curve(
                "The strength of the blur",
                "level of the blur",
                {label: {level: (label, _name(clean, level)) for level in SEVERITIES} for label in (*SCORINGS, "MSP")},
            ),
        ),
        extract=True,  # onto disk: the logits of 428,000 images by 5 anchors take 9 GB
    )
    title = "ImageNet against its blurred images (Table 5, Figure 5)"
    return Study("imagenet-c", title, "How much blur does it take to be detected?", (suite,))


def _with_levels(setting: Setting, known: str) -> Sets:
    """The test set, and the same images blurred at each level."""
    base = setting.data(known, (), side=224 if known == "imagenet" else 32, files=False)

    def load(seed: int) -> SuiteData:
        data = base(seed)
        corrupted = [(level, corrupt(data.test, BLUR, level, folder=setting.pixels)) for level in SEVERITIES]
        blurred = tuple(ImageSet(images.images, name=_name(data.test.name, level)) for level, images in corrupted)
        return replace(data, ood=blurred)

    tested = sum(need.images for need in base.needs if need.role == "test")
    levels = [Need("ood", _name(known, level), tested) for level in SEVERITIES if tested]
    return replace(base, load=load, needs=(*base.needs, *levels))


def _name(clean: str, level: int) -> str:
    return f"imagenet-c/{BLUR}/{level}" if clean == "imagenet" else f"{clean} {BLUR} {level}"
