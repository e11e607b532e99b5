"""The effect of the filter that resized the images: the paper's Table 7."""

from dataclasses import replace
from functools import partial

from kedge.data import ImageSet, Preprocess, StreamedSet, gather, sources
from kedge.detectors import AMP, MSP, Energy, Gram
from kedge.errors import NotReadyError
from kedge.studies import sets
from kedge.studies.plan import MethodPlan, Need, PaperTable, Protocol, Sets, SuiteData
from kedge.studies.study import CLASSES, OTHER, SMOKE_IMAGES, SMOKE_SIDE, Setting, Study

FILTERS = ("nearest", "bilinear", "bicubic", "lanczos")  # Pillow's
SCENES = "lsun-test"


def resizing(setting: Setting) -> Study:
    """Table 7: the same 10,000 scenes, scaled to 32 x 32 by four filters."""
    rows = {kind.__name__: MethodPlan(kind, ("unanchored",), paper=kind.__name__) for kind in (MSP, Energy, Gram)}
    suites = tuple(
        setting.suite(
            known,
            f"{known} against scenes resized by four filters, ResNet-34",
            networks=setting.networks("resnet34-cifar", CLASSES[known]),
            methods={**rows, "AMP": MethodPlan(AMP, ("anchored",), paper="AMP")},
            data=_scaled(setting, known),
            protocol=Protocol(("fpr95", "auroc")),
            paper=PaperTable("7", known, "resnet34-cifar"),
        )
        for known in OTHER
    )
    about = "Resizing filters leave traces; does a detector respond to the traces or to the scene?"
    return Study("resizing", "The same scenes, resized by four filters (Table 7)", about, suites)


def _scaled(setting: Setting, known: str) -> Sets:
    base = setting.data(known, (), files=False)

    def load(seed: int) -> SuiteData:
        data = base(seed)
        if setting.scale == "smoke":
            large = sets.toy_ood(SMOKE_IMAGES, "toy scenes", side=3 * SMOKE_SIDE, seed=seed)
            return replace(data, ood=tuple(_resized(large, how, SMOKE_SIDE) for how in FILTERS))
        try:
            scenes = sources.load_dataset(SCENES, data_dir=setting.data_dir)
        except NotReadyError as error:
            return replace(data, ood=(), missing={**data.missing, SCENES: str(error)})
        return replace(data, ood=tuple(_resized(scenes, how, 32) for how in FILTERS))

    if setting.scale == "smoke":
        return replace(base, load=load)
    find = partial(sets.read_set, SCENES, data_dir=setting.data_dir)
    scaled = [Need("ood", f"{SCENES}, {how}", sets.IMAGES[SCENES], find) for how in FILTERS]
    return replace(base, load=load, needs=(*base.needs, *scaled))


def _resized(images: ImageSet | StreamedSet, how: str, side: int) -> ImageSet:
    """Every image stretched to a square by one of Pillow's filters."""
    return gather(images, Preprocess((3, side, side), resize=how, fit="stretch"), name=f"{images.name}/{how}")
