"""ImageNet, parts of it, and the sets that its classifiers are compared on."""

from kedge.data.sources import folders, photographs
from kedge.data.sources.entry import NOT_STATED, Form, Source, archive_at, from_pytorch_ood, from_torchvision

_IMAGENET_C = {  # archives, their checksums and the corruptions that each holds
    "blur": ("2d8e81fdd8e07fef67b9334fa635e45c", ("defocus_blur", "glass_blur", "motion_blur", "zoom_blur")),
    "digital": ("89157860d7b10d5797849337ca2e5c03", ("contrast", "elastic_transform", "jpeg_compression", "pixelate")),
    "extra": ("d492dfba5fc162d8ec2c3cd8ee672984", ("gaussian_blur", "saturate", "spatter", "speckle_noise")),
    "noise": ("e80562d7f6c3f8834afb1ecf27252745", ("gaussian_noise", "impulse_noise", "shot_noise")),
    "weather": ("33ffea4db4d93fe4a428c40a6ce0c25d", ("brightness", "fog", "frost", "snow")),
}
_OPENOOD = (
    "test_ninco", "test_ssb_hard", "test_inaturalist", "test_textures", "test_openimage_o", "val_openimage_o",
)  # fmt: skip
_LEVELS = {
    part: tuple(f"{c}/{level}" for c in held for level in range(1, 6)) for part, (_, held) in _IMAGENET_C.items()
}


def _imagenette(side: int, digest: str) -> Source:
    """Ten classes of ImageNet, scaled to a shorter side."""
    stem = f"imagenette2-{side}"
    return Source(
        name=f"imagenette-{side}",
        title=f"Imagenette ({side} pixels)",
        homepage="https://github.com/fastai/imagenette",
        licence="Apache-2.0; the images are ImageNet's",
        splits=("train", "val"),
        default="val",
        files=(
            archive_at(
                f"https://s3.amazonaws.com/fast-ai-imageclas/{stem}.tgz", from_torchvision(digest, "imagenette"), stem
            ),
        ),
        forms=(Form((f"{stem}/{{split}}",), folders.read_classes),),
    )


IMAGENET_SETS = (
    Source(
        name="imagenet",
        title="ImageNet-1K",
        homepage="https://image-net.org/download.php",
        licence="ImageNet terms of access: non-commercial research and education",
        splits=("train", "val"),
        default="val",
        forms=(Form(("{split}",), folders.read_classes),),
        by_hand="register at https://image-net.org/download.php, and sort its images into {folder}/train/WNID/*.JPEG "
        "and {folder}/val/WNID/*.JPEG",
    ),
    Source(
        name="imagenet-c",
        title="ImageNet-C",
        homepage="https://github.com/hendrycks/robustness",
        licence="CC-BY-4.0",
        splits=tuple(split for splits in _LEVELS.values() for split in splits),
        on_request=tuple(split for splits in _LEVELS.values() for split in splits),
        split_help="CORRUPTION/LEVEL, such as gaussian_blur/5",
        default="gaussian_blur/5",
        files=tuple(
            archive_at(
                f"https://zenodo.org/record/2235448/files/{part}.tar",
                from_pytorch_ood(digest, "imagenet"),
                *held,
                splits=_LEVELS[part],
            )
            for part, (digest, held) in _IMAGENET_C.items()
        ),
        forms=(Form(("{split}",), folders.read_classes),),
    ),
    _imagenette(160, "e793b78cc4c9e9a4ccc0c1155377a412"),
    _imagenette(320, "3df6f0d01a2c9592104656642f5e78a3"),
    Source(
        name="ninco",
        title="NINCO (no ImageNet class objects)",
        homepage="https://zenodo.org/records/8013288",
        licence="MIT; the images are those of their sources",
        splits=("test",),
        files=(
            archive_at(
                "https://zenodo.org/records/8013288/files/NINCO_all.tar.gz",
                from_pytorch_ood("b9ffae324363cd900a81ce3c367cd834", "ninco"),
                "NINCO",
            ),
        ),
        forms=(Form(("NINCO/NINCO_OOD_classes",), folders.read_unlabelled),),
    ),
    Source(
        name="openood",
        title="OpenOOD v1.5 (image lists for ImageNet)",
        homepage="https://github.com/Jingkang50/OpenOOD",
        licence=f"{NOT_STATED}; the images are those of their sources",
        splits=(*(f"imagenet/{split}" for split in _OPENOOD), "cifar10/test_tin", "cifar10/val_tin"),
        split_help="imagenet/LIST, such as imagenet/test_ssb_hard; cifar10/test_tin, cifar10/val_tin",
        default="imagenet/test_ninco",
        forms=(Form((f"{photographs.OPENOOD_LISTS}/{{split}}.txt",), photographs.read_openood),),
        by_hand="run OpenOOD's scripts/download/download.py and put its folders "
        f"{photographs.OPENOOD_LISTS}, {photographs.OPENOOD_CLASSIC} and {photographs.OPENOOD_LARGE} into {{folder}}",
    ),
)
