"""Semantically coherent OOD detection: the paper's Tables 6, 10 and 11."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from kedge.data import ImageSet, Preprocess, StreamedSet, gather, sources
from kedge.detectors import AMP, ODIN, UDG, ClassifierDiscrepancy, Energy, OutlierExposure
from kedge.errors import InputError, NotReadyError
from kedge.studies import sets
from kedge.studies.plan import MethodPlan, Need, PaperTable, Protocol, Sets, Suite, SuiteData
from kedge.studies.study import CLASSES, HELD_OUT, OTHER, SMOKE_IMAGES, SMOKE_SIDE, Setting, Study, smoke_data

LISTS = ("texture", "svhn", "tin", "lsun", "places365")
TABLES = {"cifar10": "10", "cifar100": "11"}  # Table 6 has the means of both
GROUPS = {"cifar10": 1000, "cifar100": 2000}
IMAGES = {  # in its lists
    "train": 50_000, "cifar10": 10_000, "cifar100": 10_000, "texture": 5_640, "svhn": 26_032, "tin": 10_000,
    "lsun": 10_000, "places365": 36_500, "tin train": 100_000,
}  # fmt: skip


def coherent_ood(setting: Setting) -> Study:
    """Tables 6, 10 and 11: ResNet-18 on SCOOD's lists, where an OOD source's images of known classes count as known."""
    suites = tuple(_suite(setting, known) for known in OTHER)
    about = "Images of known classes in the OOD sources count as known; three methods learn from Tiny-ImageNet."
    return Study("scood", "Semantically coherent OOD detection (Tables 6, 10, 11)", about, suites)


def _suite(setting: Setting, known: str) -> Suite:
    classes = CLASSES[known]
    groups = {"groups": GROUPS[known] if setting.scale != "smoke" else 8}
    networks = setting.networks("resnet18-cifar", classes)
    networks["outlier exposure"] = setting.network("resnet18-cifar", classes, method=OutlierExposure)
    networks["discrepancy"] = setting.network("resnet18-cifar", classes, method=ClassifierDiscrepancy)
    networks["udg"] = setting.network(
        "resnet18-cifar", classes, method=UDG, prepare=groups, loss=groups | {"outliers_per_image": 2}
    )
    return setting.suite(
        known,
        f"SCOOD, {known}, ResNet-18",
        networks=networks,
        methods={
            "ODIN": MethodPlan(ODIN, ("unanchored",), paper="ODIN"),
            "Energy": MethodPlan(Energy, ("unanchored",), paper="Energy"),
            "OutlierExposure": MethodPlan(OutlierExposure, ("outlier exposure",), paper="OutlierExposure"),
            "ClassifierDiscrepancy": MethodPlan(ClassifierDiscrepancy, ("discrepancy",), paper="ClassifierDiscrepancy"),
            "UDG": MethodPlan(UDG, ("udg",), paper="UDG"),
            "AMP": MethodPlan(AMP, ("anchored",), paper="AMP"),
            "Energy (anchored)": MethodPlan(Energy, ("anchored",)),
        },
        data=_data(setting, known),
        protocol=Protocol(("fpr95", "auroc", "aupr_in", "aupr_out")),
        paper=PaperTable(TABLES[known], known, "resnet18-cifar"),
    )


def _data(setting: Setting, known: str) -> Sets:
    """SCOOD's own lists; a list's images of known classes count as in distribution against the rest of that list."""

    def load(seed: int) -> SuiteData:
        if setting.scale == "smoke":
            data = smoke_data(seed, outliers=True)
            known_images = sets.toy_images(SMOKE_IMAGES // 4, "toy known", side=SMOKE_SIDE, seed=seed)
            return replace(data, known_in={data.ood[0].name: known_images})
        home = sources.data_folder(setting.data_dir) / "scood"
        train, _ = _lists(known, known, "train", home)
        part, held_out = train.split(1 - HELD_OUT, seed=seed)
        test = replace(_lists(known, known, "test", home)[0], name=f"scood/{known}")
        ood, known_in = [], {}
        for name in (*LISTS, OTHER[known]):
            coherent, unknown = _lists(known, name, "test", home)
            ood.append(ImageSet(unknown.images, name=f"scood/{name}"))
            if len(coherent):
                known_in[ood[-1].name] = ImageSet(coherent.images, coherent.labels, name=f"scood/{name} (known)")
        both = _lists(known, "tin", "train", home)
        outliers = ImageSet(torch.cat([s.images for s in both]), name="scood/tin train")
        return SuiteData(part, held_out, test, tuple(ood), outliers, known_in=known_in)

    home = sources.data_folder(setting.data_dir) / "scood"

    def need(role: str, name: str, split: str, images: int) -> Need:
        return Need(role, f"scood/{name} {split}", images, partial(_lists, known, name, split, home))

    held_out = round(HELD_OUT * IMAGES["train"])
    needs = (
        need("train", known, "train", IMAGES["train"] - held_out),
        Need("held out", f"scood/{known}, part of the training images", held_out),
        need("test", known, "test", IMAGES[known]),
        *(need("ood", name, "test", IMAGES[name]) for name in (*LISTS, OTHER[known])),
        need("outliers", "tin", "train", IMAGES["tin train"]),
    )
    return Sets(load, () if setting.scale == "smoke" else needs)


def _lists(benchmark: str, name: str, split: str, home: Path) -> tuple[ImageSet, ImageSet]:
    """A list's images of known classes, and the others, at 32 x 32."""
    try:
        inside, outside = sources.scood_parts(benchmark, name, split, data_dir=home)
    except (InputError, NotReadyError) as error:
        raise NotReadyError(f"scood is not complete in {home}: {error}; see `kedge data get scood`") from error
    return _small(inside), _small(outside)


def _small(images: ImageSet | StreamedSet) -> ImageSet:
    if len(images) == 0:
        return ImageSet(torch.empty(0, 3, 32, 32, dtype=torch.uint8), torch.empty(0, dtype=torch.long), images.name)
    return gather(images, Preprocess((3, 32, 32)), name=images.name)
