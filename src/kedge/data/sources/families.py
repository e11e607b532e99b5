"""Families of public data sets that differ in little: the two CIFARs, the sets in idx files, the ones made for ODIN."""

from functools import partial

from kedge.data.sources import cifar, folders, idx
from kedge.data.sources.arrays import read_converted, verify_70000
from kedge.data.sources.entry import Checksum, File, Form, Source

NOT_STATED = "not stated by its authors"


def torchvision(digest: str, module: str) -> Checksum:
    """A checksum that torchvision publishes in its source.

    Example:
        >>> torchvision("c58f30108f718f92721af3b95e74349a", "cifar").origin
        'md5, torchvision 0.28.0, datasets/cifar.py'
    """
    return Checksum("md5", digest, f"md5, torchvision 0.28.0, datasets/{module}.py")


def pytorch_ood(digest: str, module: str) -> Checksum:
    """A checksum that pytorch-ood publishes in its source.

    Example:
        >>> pytorch_ood("458a0a0ab8e5f1cb4516d7400568e460", "odin").origin
        'md5, pytorch-ood 0.4.0, dataset/img/odin.py'
    """
    return Checksum("md5", digest, f"md5, pytorch-ood 0.4.0, dataset/img/{module}.py")


def cifar_source(title: str, kind: cifar.Kind, unpacked: tuple[str, str], digest: str) -> Source:
    """CIFAR-10 or CIFAR-100, with the folders that its Python and binary archives hold.

    Example:
        >>> cifar_source("CIFAR-10", cifar.CIFAR10, ("cifar-10-batches-py", "cifar-10-batches-bin"), "").name
        'cifar10'
    """
    stem, name = title.lower(), title.lower().replace("-", "")
    pickles, binary = partial(cifar.read_pickles, kind=kind), partial(cifar.read_binary, kind=kind)
    archive = f"{stem}-python.tar.gz"
    return Source(
        name=name,
        title=title,
        homepage="https://www.cs.toronto.edu/~kriz/cifar.html",
        licence=NOT_STATED,
        splits=("train", "test"),
        files=(File(archive, (f"https://www.cs.toronto.edu/~kriz/{archive}",), torchvision(digest, "cifar")),),
        forms=(
            Form((archive,), pickles),
            Form((unpacked[0],), pickles),
            Form((f"{stem}-binary.tar.gz",), binary),
            Form((unpacked[1],), binary),
            Form((f"{name}.npz",), read_converted),
        ),
    )


def idx_source(
    title: str,
    homepage: str,
    licence: str,
    *,
    classes: tuple[str, ...],
    urls: tuple[str, ...],
    digests: tuple[str, str, str, str],
) -> Source:
    """MNIST, or a set in the same four files: training images and labels, test images and labels.

    Example:
        >>> idx_source("MNIST", "", "", classes=(), urls=(), digests=("", "", "", "")).files[3].name
        't10k-labels-idx1-ubyte.gz'
    """
    name = title.lower()
    pairs = {s: (f"{stem}-images-idx3-ubyte", f"{stem}-labels-idx1-ubyte") for s, stem in idx.STEMS.items()}
    packed = {split: tuple(f"{file}.gz" for file in pair) for split, pair in pairs.items()}
    listed = [(split, file) for split, pair in packed.items() for file in pair]
    read = partial(idx.read_pair, classes=classes)
    return Source(
        name=name,
        title=title,
        homepage=homepage,
        licence=licence,
        splits=("train", "test"),
        classes=classes,
        files=tuple(
            File(file, tuple(url + file for url in urls), torchvision(digest, "mnist"), splits=(split,))
            for (split, file), digest in zip(listed, digests, strict=True)
        ),
        forms=(Form(packed, read), Form(pairs, read), Form((f"{name}.npz",), read_converted)),
        verify=verify_70000,
    )


def odin_source(name: str, title: str, stem: str, link: str, checksum: Checksum | None) -> Source:
    """A folder of small PNG files that the authors of ODIN made and share.

    Example:
        >>> odin_source("isun", "iSUN", "iSUN", "ssz7qxfqae0cca5", None).files[0].name
        'iSUN.tar.gz'
    """
    archive = f"{stem}.tar.gz"
    return Source(
        name=name,
        title=title,
        homepage="https://github.com/facebookresearch/odin",
        licence=NOT_STATED,
        splits=("test",),
        files=(File(archive, (f"https://www.dropbox.com/s/raw/{link}/{archive}",), checksum, holds=(stem,)),),
        forms=(Form((stem,), folders.flat),),
    )
