"""How images were scaled decides much: the paper's Table 7."""

from collections.abc import Callable
from dataclasses import replace

from kedge.data import ImageSet, Preprocess, StreamedSet, gather, sources
from kedge.detectors import AMP, MSP, Energy, Gram
from kedge.errors import NotReadyError
from kedge.studies import sets
from kedge.studies.plan import MethodPlan, PaperTable, Protocol, Suite, SuiteData
from kedge.studies.study import CLASSES, SMOKE_IMAGES, SMOKE_SIDE, Setting, Study

FILTERS = ("nearest", "bilinear", "bicubic", "lanczos")  # Pillow's
AT_HAND = "lsun-test"


def resizing(setting: Setting) -> Study:
    """Table 7: the same 10,000 scenes, scaled to 32 x 32 by four filters.

    Example:
        >>> [s.name for s in resizing(Setting("smoke")).suites[0].data(0).ood]
        ['made scenes/nearest', 'made scenes/bilinear', 'made scenes/bicubic', 'made scenes/lanczos']
    """
    suites = tuple(
        Suite(
            name=known,
            title=f"{known} against scenes scaled in four ways, ResNet-34",
            networks=setting.twins("resnet34-cifar", CLASSES[known]),
            methods={
                "MSP": MethodPlan(MSP, ("plain",), paper="MSP"),
                "Energy": MethodPlan(Energy, ("plain",), paper="Energy"),
                "Gram": MethodPlan(Gram, ("plain",), paper="Gram"),
                "AMP": MethodPlan(AMP, ("anchored",), paper="AMP"),
            },
            data=_scaled(setting, known),
            seeds=setting.seeds,
            comparisons=setting.comparisons,
            protocol=Protocol(("fpr95", "auroc")),
            paper=PaperTable("7", known, "resnet34-cifar"),
        )
        for known in ("cifar10", "cifar100")
    )
    about = "The filter that scaled an image leaves traces; a detector that reads them does not see the scene."
    return Study("resizing", "The same scenes, scaled in four ways (Table 7)", about, suites)


def _scaled(setting: Setting, known: str) -> Callable[[int], SuiteData]:
    base = setting.data(known, (), files=False)

    def load(seed: int) -> SuiteData:
        data = base(seed)
        if setting.scale == "smoke":
            large = sets.made_ood(SMOKE_IMAGES, "made scenes", side=3 * SMOKE_SIDE, seed=seed)
            return replace(data, ood=tuple(_resized(large, how, SMOKE_SIDE) for how in FILTERS))
        try:
            scenes = sources.load_dataset(AT_HAND, data_dir=setting.data_dir)
        except NotReadyError as error:
            return replace(data, ood=(), missing={**data.missing, AT_HAND: str(error)})
        return replace(data, ood=tuple(_resized(scenes, how, 32) for how in FILTERS))

    return load


def _resized(images: ImageSet | StreamedSet, how: str, side: int) -> ImageSet:
    """Every image stretched to a square by one of Pillow's filters."""
    return gather(images, Preprocess((3, side, side), resize=how, fit="stretch"), name=f"{images.name}/{how}")
