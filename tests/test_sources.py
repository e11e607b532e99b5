"""The catalogue, and the readers of public data sets on small files in the official formats."""

import contextlib
import gzip
import hashlib
import io
import json
import os
import pickle
import socket
import struct
import sys
import tarfile
import tracemalloc
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import scipy.io
import torch
from PIL import Image, ImageOps
from torch.utils.data import DataLoader

from helpers import encoded, refused
from kedge.data import ImageSet, Preprocess, StreamedSet, batches, load_dataset, open_image, shape_of_inputs, sources
from kedge.data.sources import archive, arrays, catalogue, cifar, downloads, svhn
from kedge.data.sources.entry import Checksum, File
from kedge.data.sources.folders import endings, folder, image_names
from kedge.data.sources.summary import contact_sheet, evenly_spaced, summarize_dataset
from kedge.data.streamed import in_memory_if_small
from kedge.errors import FileFormatError, InputError, KedgeError, KedgeWarning, NotReadyError
from kedge.files import read_limited, regular_file


def pixels(*shape, seed=0):
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def save(path, size=(8, 8), mode="RGB", seed=0):
    path.parent.mkdir(parents=True, exist_ok=True)
    shape = (size[1], size[0]) if mode == "L" else (size[1], size[0], len(mode))
    Image.fromarray(pixels(*shape, seed=seed), mode).save(path)
    return path


def tree(root, files, **options):
    for seed, name in enumerate(files):
        save(root / name, seed=seed, **options)
    return root


def tar_of(path, members):
    """Pack (name, bytes) pairs, exactly as named."""
    with tarfile.open(path, "w:gz") as packed:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            packed.addfile(info, io.BytesIO(content))
    return path


def channels_last(images):
    return images.permute(0, 2, 3, 1).numpy()


@pytest.fixture(autouse=True)
def _home(monkeypatch, tmp_path):
    """All sets are in the test's own folder."""
    monkeypatch.setenv("KEDGE_DATA", str(tmp_path))


@pytest.fixture
def unchecked(monkeypatch):
    """Remove the published checksums of a set whose files the test writes itself."""

    def change(name):
        entry = catalogue.SOURCES[name]
        files = tuple(replace(file, checksum=None) for file in entry.files)
        monkeypatch.setitem(catalogue.SOURCES, name, replace(entry, files=files))

    return change


# --- the catalogue ---------------------------------------------------------------------------------------------------

NAMES = {
    "cifar10", "cifar100", "svhn", "textures", "places365", "isun", "lsun-crop", "lsun-resize", "lsun-test",
    "tiny-imagenet-crop", "tiny-imagenet-resize", "tiny-imagenet-200", "imagenet", "imagenet-c", "scood", "mnist",
    "fashion-mnist", "oxford-pets", "flowers-102", "caltech-101", "cub-200", "imagenette-160", "imagenette-320",
    "stanford-dogs", "food-101", "eurosat", "gtsrb", "ninco", "openood",
}  # fmt: skip


def test_the_catalogue_holds_complete_entries_of_the_field_s_benchmarks():
    assert set(sources.dataset_names()) == NAMES
    for name in NAMES:
        entry = sources.source(name)
        assert entry.name == name
        assert entry.licence
        assert "\n" not in entry.licence
        assert entry.homepage.startswith("https://")
        assert entry.default in entry.splits
        assert set(entry.on_request) <= set(entry.splits)
        assert entry.files or entry.by_hand
        for file in entry.files:
            assert set(file.splits) <= set(entry.splits)
            assert file.urls or entry.by_hand or "/" in file.name  # the last is a file that an archive holds
            assert all(url.startswith("https://") and url.endswith(file.name) for url in file.urls)
            if file.checksum is not None:  # every checksum has an origin that can be looked up
                assert len(file.checksum.digest) == 32
                origins = ("torchvision", "pytorch-ood 0.4.0, ", "Zenodo record ", "avalanche-lib, ")
                assert file.checksum.origin.startswith(tuple(f"md5, {origin}" for origin in origins))
    with pytest.raises(InputError, match="https"):  # http is only for files with a published checksum
        File("a.zip", ("http://example.org/a.zip",))


def test_an_unknown_name_or_split_lists_the_valid_ones_and_a_missing_set_the_files(tmp_path):
    near = {"cifar-10": "cifar10", "CIFAR10": "cifar10", "fashion_mnist": "fashion-mnist", "lsun": "lsun-crop"}
    for name, meant in near.items():
        refused(InputError, f"did you mean .*{meant}.*Known: cifar10, .*folder:PATH", load_dataset, name)
    refused(InputError, "did you mean folder:", load_dataset, str(tmp_path))
    refused(InputError, "split of cifar10 must be one of train, test; got 'val'", load_dataset, "cifar10", "val")
    with pytest.raises(NotReadyError, match=r"kedge data get cifar10.*put into .*cifar-10-python.tar.gz \(https://"):
        load_dataset("cifar10")
    assert not sources.is_here("cifar10")
    assert list(tmp_path.iterdir()) == []


def test_the_data_directory_is_the_argument_then_the_variable_then_the_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("KEDGE_DATA", str(tmp_path / "variable"))
    assert sources.data_folder(tmp_path / "argument") == tmp_path / "argument"
    assert sources.data_folder() == tmp_path / "variable"
    monkeypatch.delenv("KEDGE_DATA")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path / "local"))
    caches = {"linux": tmp_path / "cache", "win32": tmp_path / "local", "darwin": Path.home() / "Library" / "Caches"}
    for platform, cache in caches.items():
        monkeypatch.setattr(sys, "platform", platform)
        assert sources.data_folder() == cache / "kedge" / "data"


# --- streamed sets ---------------------------------------------------------------------------------------------------


@pytest.fixture
def photos(tmp_path):
    for seed, (name, size) in enumerate({"a/1.png": (70, 50), "a/2.jpg": (64, 80), "b/3.png": (90, 90)}.items()):
        save(tmp_path / "photos" / name, size, seed=seed)
    return tmp_path / "photos"


def test_a_streamed_set_gives_pil_images_and_labels_or_tensors_with_preprocess(photos):
    streamed = folder(photos)
    assert isinstance(streamed, StreamedSet)
    assert (len(streamed), streamed.classes, streamed.name) == (3, ("a", "b"), "photos")
    assert streamed.labels.tolist() == [0, 0, 1]
    image, label = streamed[2]
    assert (image.size, label) == ((90, 90), 1)
    assert np.array_equal(np.asarray(image), np.asarray(Image.open(photos / "b" / "3.png")))
    with pytest.raises(IndexError):
        streamed[3]
    refused(InputError, "preprocess", shape_of_inputs, streamed)
    streamed = replace(folder(photos), preprocess=Preprocess((3, 16, 16)))
    expected = ImageOps.fit(Image.open(photos / "a" / "1.png"), (16, 16), Image.Resampling.BICUBIC)
    assert torch.equal(streamed[0][0], torch.from_numpy(np.array(expected)).permute(2, 0, 1))
    assert shape_of_inputs(streamed) == (3, 16, 16)


def test_a_streamed_set_and_its_copy_in_memory_give_the_same_batches(photos):
    rule, streamed = Preprocess((3, 16, 16)), folder(photos)
    memory = streamed.to_memory(rule)
    assert (memory.name, memory.classes, memory.labels.tolist()) == ("photos", ("a", "b"), [0, 0, 1])
    x, y = next(batches(streamed, rule))
    assert torch.equal(x, memory.images)
    assert y.tolist() == [0, 0, 1]
    loader = DataLoader(replace(streamed, preprocess=rule), batch_size=3, num_workers=1)
    assert torch.equal(next(iter(loader))[0], memory.images)
    refused(InputError, "is empty", streamed.subset([]).to_memory, rule)


def test_subsets_and_splits_read_nothing(photos):
    streamed = folder(photos)
    for file in photos.rglob("*.*"):
        file.write_bytes(b"gone")
    assert streamed.subset([2, 0]).store.names == ("b/3.png", "a/1.png")
    assert streamed.subset(torch.tensor([True, False, True]), name="some").labels.tolist() == [0, 1]
    first, rest = streamed.split(0.67, seed=1)
    assert sorted(first.store.names + rest.store.names) == sorted(streamed.store.names)
    refused(InputError, "mask", streamed.subset, torch.tensor([True]))


def test_the_checksum_is_of_names_sizes_and_labels(photos):
    streamed = folder(photos)
    lines = [f"{n}\t{(photos / n).stat().st_size}\t{y}\n" for n, y in zip(streamed.store.names, [0, 0, 1], strict=True)]
    assert streamed.checksum == hashlib.sha256("".join(sorted(lines)).encode()).hexdigest()
    assert streamed.subset([2, 1, 0]).checksum == streamed.checksum
    assert streamed.subset([0, 1]).checksum != streamed.checksum
    assert replace(streamed, labels=None).checksum != streamed.checksum
    (photos / "b" / "3.png").write_bytes(b"longer")
    assert folder(photos).checksum != streamed.checksum


def test_an_image_that_cannot_be_decoded_is_refused_by_name(photos):
    streamed = folder(photos)
    (photos / "a" / "1.png").write_bytes((photos / "a" / "1.png").read_bytes()[:500])
    (photos / "b" / "3.png").write_text("not an image")
    (photos / "a" / "2.jpg").unlink()
    messages = (r"a/1.png .*cannot be read", r"a/2.jpg .*No such file", r"b/3.png .*not an image")
    for index, message in enumerate(messages):
        refused(InputError, message, streamed.__getitem__, index)
    refused(InputError, r"a/1.png", streamed.to_memory, Preprocess((3, 8, 8)))


def test_damaged_images_are_skipped_on_request_and_listed(photos):
    (photos / "a" / "1.png").write_bytes((photos / "a" / "1.png").read_bytes()[:500])
    (photos / "b" / "3.png").write_text("not an image")
    with pytest.warns(KedgeWarning, match=r"2 images were skipped: a/1.png .*; b/3.png .*not an image"):
        streamed = load_dataset(f"folder:{photos}", on_error="skip")
    assert (streamed.store.names, streamed.labels.tolist()) == (("a/2.jpg",), [0])
    assert [text.split()[0] for text in streamed.skipped] == ["a/1.png", "b/3.png"]
    (photos / "a" / "2.jpg").write_text("")
    refused(InputError, "none of the 3 images", load_dataset, f"folder:{photos}", on_error="skip")
    refused(InputError, "on_error must be one of 'raise', 'skip'", load_dataset, f"folder:{photos}", on_error="ignore")


def test_only_small_images_of_one_size_come_into_memory(tmp_path, monkeypatch):
    small = tree(tmp_path / "small", ["0.png", "1.png"], size=(32, 32))
    loaded = load_dataset(f"folder:{small}")
    assert isinstance(loaded, ImageSet)
    assert np.array_equal(channels_last(loaded.images)[1], pixels(32, 32, 3, seed=1))
    assert isinstance(load_dataset(f"folder:{tree(tmp_path / 'large', ['0.png'], size=(65, 64))}"), StreamedSet)
    with monkeypatch.context() as patch:
        patch.setattr("kedge.data.streamed.SMALL_BYTES", 2 * 3 * 32 * 32 - 1)
        assert isinstance(in_memory_if_small(folder(small)), StreamedSet)
    assert isinstance(in_memory_if_small(folder(small).subset([])), StreamedSet)
    save(small / "2.png", (31, 32))
    assert isinstance(load_dataset(f"folder:{small}"), StreamedSet)
    with pytest.raises(InputError, match=r"0.png .* is 32 x 32 and 2.png is 31 x 32: pass to_memory\(Preprocess"):
        folder(small).to_memory()
    assert folder(small).to_memory(Preprocess((3, 8, 8))).images.shape == (3, 3, 8, 8)
    tree(tmp_path / "gray", ["a.png", "b.png"], mode="L")
    assert folder(tmp_path / "gray").to_memory().images.shape == (2, 1, 8, 8)
    save(tmp_path / "gray" / "c.png")
    assert folder(tmp_path / "gray").to_memory().images.shape == (3, 3, 8, 8)  # one has color


# --- folders ---------------------------------------------------------------------------------------------------------


def test_a_flat_folder_has_no_labels_and_only_what_pillow_decodes_counts(tmp_path):
    tree(tmp_path / "flat", ["b.png", "a.JPEG", "deep/er/c.bmp", ".hidden.png", "__MACOSX/d.png"])
    (tmp_path / "flat" / "notes.txt").write_text("no image")
    loaded = folder(tmp_path / "flat")
    assert loaded.store.names == ("a.JPEG", "b.png", "deep/er/c.bmp")
    assert (loaded.labels, loaded[0][1]) == (None, -1)
    assert {".png", ".pdf", ".eps", ".jpeg", ".webp", ".npz"} & endings() == {".png", ".jpeg", ".webp"}
    assert image_names(Path("nowhere")) == ()
    (tmp_path / "empty").mkdir()
    for name, message in (("empty", r"there is none in .*of .*\.png"), ("nowhere", "does not exist")):
        refused(InputError, message, load_dataset, f"folder:{tmp_path / name}")


def test_a_folder_with_parts_gives_the_requested_part_and_not_parts_as_classes(tmp_path):
    tree(tmp_path, ["train/cat/1.png", "train/dog/2.png", "test/cat/3.png", "test/dog/4.png"])
    train, test = (load_dataset(f"folder:{tmp_path}", split) for split in ("train", "test"))
    assert (len(train), train.classes, train.name) == (2, ("cat", "dog"), f"{tmp_path.name} train")
    assert not torch.equal(train.images, test.images)
    refused(InputError, "must be one of train, test; got 'val'", load_dataset, f"folder:{tmp_path}", "val")
    with pytest.raises(InputError, match=r"split must be given for .*, which holds train, test and no .*name .*/test"):
        load_dataset(f"folder:{tmp_path}")
    assert len(load_dataset(f"folder:{tmp_path / 'train'}", "train")) == 2  # no parts: the whole folder
    tree(tmp_path, ["plane/5.png"])
    assert folder(tmp_path).classes == ("plane", "test", "train")


def test_odin_s_sets_are_folders_of_small_pngs(tmp_path):
    stems = {"isun": "iSUN", "lsun-crop": "LSUN", "lsun-resize": "LSUN_resize", "tiny-imagenet-crop": "Imagenet"}
    for name, stem in (stems | {"tiny-imagenet-resize": "Imagenet_resize"}).items():
        tree(tmp_path / name / stem / "test", ["0.png", "1.png", "2.png"], size=(36, 36))
        loaded = load_dataset(name)
        assert (loaded.images.shape, loaded.labels, loaded.name) == ((3, 3, 36, 36), None, name)
        for file in (tmp_path / name / stem / "test").iterdir():
            file.unlink()
        refused(FileFormatError, "holds no images", load_dataset, name)


def test_textures_come_whole_or_by_partition(tmp_path):
    root = tmp_path / "textures" / "dtd"
    tree(root / "images", [f"{kind}/{kind}_{i}.jpg" for kind in ("dotted", "banded") for i in range(2)], size=(80, 70))
    (root / "labels").mkdir()
    (root / "labels" / "test1.txt").write_text("dotted/dotted_1.jpg\nbanded/banded_0.jpg\n")
    (root / "labels" / "test2.txt").write_text("dotted/dotted_0.jpg\n")
    (root / "labels" / "val1.txt").write_text("dotted/dotted_9.jpg\n")
    whole, test, second = (load_dataset("textures", split) for split in (None, "test", "test2"))
    assert (len(whole), whole.classes, whole.labels.tolist()) == (4, ("banded", "dotted"), [0, 0, 1, 1])
    assert (test.store.names, test.labels.tolist()) == (("dotted/dotted_1.jpg", "banded/banded_0.jpg"), [1, 0])
    assert second.labels.tolist() == [1]
    for split, message in (("train", r"train1.txt cannot be read"), ("val", r"names dotted/dotted_9.jpg, which")):
        refused(KedgeError, message, load_dataset, "textures", split)


def test_places365_takes_labels_from_its_list_if_that_fits(tmp_path):
    root = tmp_path / "places365"
    tree(root / "val_256", [f"Places365_val_0000000{i}.jpg" for i in range(1, 4)], size=(256, 256))
    (root / "categories_places365.txt").write_text("/a/airfield 0\n/c/cafe 1\n")
    lines = [f"Places365_val_0000000{i}.jpg {label}" for i, label in ((1, 1), (2, 0), (3, 1))]
    (root / "places365_val.txt").write_text("\n".join(lines))
    loaded = load_dataset("places365")
    assert (loaded.classes, loaded.labels.tolist()) == (("/a/airfield", "/c/cafe"), [1, 0, 1])
    assert loaded[0][0].size == (256, 256)
    for file, text, message in (
        ("places365_val.txt", "Places365_val_00000009.jpg 0", "does not hold"),
        ("places365_val.txt", "Places365_val_00000001.jpg", "a path and a whole number per line; line 1"),
        ("places365_val.txt", "Places365_val_00000001.jpg 7", "7 is the label"),
        ("categories_places365.txt", "/a/airfield 0\n/c/cafe 5", "number its classes from 0"),
    ):
        (root / file).write_text(text)
        (root / downloads.RECORD).unlink(missing_ok=True)
        refused((FileFormatError, InputError), message, load_dataset, "places365")


def test_tiny_imagenet_200_numbers_its_classes_as_an_image_folder_does(tmp_path):
    root = tmp_path / "tiny-imagenet-200" / "tiny-imagenet-200"
    tree(root, [f"train/{w}/images/{w}_{i}.JPEG" for w in ("n02", "n01") for i in range(2)], size=(64, 64))
    tree(root / "val" / "images", ["val_0.JPEG", "val_1.JPEG"], size=(64, 64))
    (root / "wnids.txt").write_text("n02\nn01\n")
    annotations = root / "val" / "val_annotations.txt"
    annotations.write_text("val_0.JPEG\tn02\t0\t32\t44\t62\nval_1.JPEG\tn01\t1\t2\t3\t4\n")
    train, val = (load_dataset("tiny-imagenet-200", split) for split in ("train", "val"))
    assert train.images.shape == (4, 3, 64, 64)
    assert train.classes == val.classes == ("n01", "n02")
    assert (train.labels.tolist(), val.labels.tolist()) == ([0, 0, 1, 1], [1, 0])
    assert (train.name, val.name) == ("tiny-imagenet-200 train", "tiny-imagenet-200")
    lines = {"val_0.JPEG\tn09": "the class 'n09'", "val_0.JPEG": "and a class", "val_7.JPEG\tn01": "does not hold"}
    for line, message in lines.items():
        annotations.write_text(line)
        refused(KedgeError, message, load_dataset, "tiny-imagenet-200")
    tree(root / "train", ["n09/images/n09_0.JPEG"])
    refused(FileFormatError, "the class 'n09'", load_dataset, "tiny-imagenet-200", "train")


def test_imagenet_is_a_streamed_folder_of_wnids(tmp_path):
    tree(tmp_path / "imagenet" / "val", ["n02/b.JPEG", "n01/a.JPEG"], size=(100, 75))
    loaded = load_dataset("imagenet")
    assert isinstance(loaded, StreamedSet)
    assert (loaded.classes, loaded.labels.tolist(), loaded.name) == (("n01", "n02"), [0, 1], "imagenet")
    save(tmp_path / "imagenet" / "val" / "ILSVRC2012_val_00000001.JPEG")
    refused(FileFormatError, "sort the images", load_dataset, "imagenet")
    refused(NotReadyError, r"register at https://image-net.org.*imagenet/train/WNID", load_dataset, "imagenet", "train")


def test_imagenet_c_is_loaded_by_corruption_and_level(tmp_path):
    tree(tmp_path / "imagenet-c" / "gaussian_blur" / "5", ["n01/a.JPEG", "n02/b.JPEG"], size=(224, 224))
    assert load_dataset("imagenet-c", "gaussian_blur/5").labels.tolist() == [0, 1]
    refused(NotReadyError, r"blur.tar \(https://zenodo.org", load_dataset, "imagenet-c", "zoom_blur/1")
    refused(InputError, "CORRUPTION/LEVEL", load_dataset, "imagenet-c", "gaussian_blur/6")
    assert len(sources.source("imagenet-c").splits) == 19 * 5


# --- lists -----------------------------------------------------------------------------------------------------------


def test_an_openood_list_names_images_relative_to_a_root(tmp_path):
    tree(tmp_path / "images", ["tin/val/val_0.JPEG", "tin/val/with space.JPEG"])
    listed = tmp_path / "test_tin.txt"
    listed.write_text("tin/val/val_0.JPEG -1\n\ntin/val/with space.JPEG 3\n")
    loaded = load_dataset(f"list:{listed}", data_dir=tmp_path / "images")
    assert (loaded.labels.tolist(), loaded.name, len(loaded)) == ([-1, 3], "test_tin", 2)
    assert sources.image_list(listed, tmp_path / "images").store.names[1] == "tin/val/with space.JPEG"


def test_a_list_that_cannot_be_read_is_an_error(tmp_path):
    root = tree(tmp_path / "root", ["a.png"])
    save(tmp_path / "secret.png")
    for text, message in {
        "a.png 0\ngone.png 1\ngone2.png 1": "names gone.png and 1 more, which .* does not hold; is the root right",
        "a.png": "a path and a whole number per line; line 1 is 'a.png'",
        "a.png cat": "a path and a whole number",
        "\xe4.png 0": "must be text in UTF-8",
        "/etc/passwd 0": "is outside",
        "../secret.png 0": "is outside",
        "\n\n": "at least one image; it is empty",
    }.items():
        (root / "list.txt").write_text(text, encoding="latin-1")
        refused((InputError, FileFormatError), message, load_dataset, f"list:{root / 'list.txt'}")


@pytest.mark.parametrize("top", ["data", ""], ids=["as unpacked", "without its top folder"])
def test_scood_labels_images_by_content_and_not_by_origin(tmp_path, top):
    home = tmp_path / "scood" / top
    tree(home / "images" / "lsun", ["0.jpg", "1.jpg", "2.jpg"])
    listed = home / "imglist" / "benchmark_cifar10" / "test_lsun.txt"
    listed.parent.mkdir(parents=True)
    rows = [f"lsun/{i}.jpg " + json.dumps({"label": -1, "sc_label": y}) for i, y in enumerate((-1, 8, -1))]
    listed.write_text("\n".join(rows))
    inside, outside = sources.scood_parts("cifar10", "lsun", data_dir=tmp_path / "scood")
    assert (inside.store.names, inside.labels.tolist()) == (("lsun/1.jpg",), [8])  # from LSUN, and in-distribution
    assert (outside.store.names, outside.labels.tolist()) == (("lsun/0.jpg", "lsun/2.jpg"), [-1, -1])
    assert (inside.name, outside.name) == ("scood cifar10 lsun (id)", "scood cifar10 lsun (ood)")
    parts = {"": [-1, 8, -1], "/id": [8], "/ood": [-1, -1]}
    for part, labels in parts.items():
        assert load_dataset("scood", f"cifar10/test_lsun{part}").labels.tolist() == labels
    refused(InputError, r"must name a list of .*\(test_lsun\); got", load_dataset, "scood", "cifar10/test_svhn")
    refused(NotReadyError, "images are not in", sources.scood_parts, "cifar10", "lsun", data_dir=tmp_path / "none")
    refused(InputError, "benchmark must be one of", sources.scood_parts, "svhn", "lsun", data_dir=home)
    for line in ('lsun/0.jpg {"label": -1}', "lsun/0.jpg -1", 'lsun/0.jpg {"sc_label": "8"}'):
        listed.write_text(line)
        refused(FileFormatError, "line 1", load_dataset, "scood", "cifar10/test_lsun")


# --- CIFAR -----------------------------------------------------------------------------------------------------------


def rows_of(images):
    return images.transpose(0, 3, 1, 2).reshape(len(images), -1)  # planes, as the files hold them


def python2_pickle(entry):
    """Pickle as Python 2's NumPy did: protocol 2, text for bytes, and numpy.core for the array's constructor."""

    def text(value):
        raw = value.encode("latin-1") if isinstance(value, str) else value
        return b"T" + struct.pack("<i", len(raw)) + raw

    def value(item):
        if isinstance(item, np.ndarray):
            shape = b"(" + b"".join(b"J" + struct.pack("<i", n) for n in item.shape) + b"t"
            dtype = b"cnumpy\ndtype\n(" + text("u1") + b"K\x00K\x01tR(K\x03" + text("|")
            dtype += b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
            array = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(K\x00t" + text("b") + b"tR"
            return array + b"(K\x01" + shape + dtype + b"\x89" + text(item.tobytes()) + b"tb"
        if isinstance(item, list):
            return b"](" + b"".join(value(i) for i in item) + b"e"
        return b"J" + struct.pack("<i", item) if isinstance(item, int) else text(item)

    return b"\x80\x02}(" + b"".join(text(k) + value(v) for k, v in entry.items()) + b"u."


def binary_batch(entry, kind):
    rows = zip(entry[kind.labels], entry["data"], strict=True)
    return b"".join(bytes([9] * (kind.label_bytes - 1) + [label]) + row.tobytes() for label, row in rows)


WRITERS = {
    "python 2": python2_pickle,
    "protocol 2": lambda entry: pickle.dumps(entry, protocol=2),
    "bytes keys": lambda entry: pickle.dumps({k.encode(): v for k, v in entry.items()}, protocol=4),
    "binary": None,
}


def cifar_members(kind, writer, per_batch=3):
    """The files of a CIFAR with a few images per batch, and the images and labels in them."""
    members, images, labels = {}, {}, {}
    for split in ("train", "test"):
        for number, batch in enumerate(kind.batches(split)):
            x = pixels(per_batch, 32, 32, 3, seed=len(members))
            y = [(number + i) % kind.count for i in range(per_batch)]
            entry = {"batch_label": batch, kind.labels: y, "data": rows_of(x), "filenames": ["a.png"] * per_batch}
            if writer == "binary":
                members[f"{batch}.bin"] = binary_batch(entry, kind)
            else:
                members[batch] = WRITERS[writer](entry)
            images.setdefault(split, []).append(x)
            labels.setdefault(split, []).extend(y)
    names = [f"class{i}" for i in range(kind.count)]
    if writer == "binary":
        members[kind.names] = "\n".join(names).encode() + b"\n\n"
    else:
        members[kind.meta] = WRITERS[writer]({kind.meta_key: names, "num_vis": 3072})
    return members, {split: np.concatenate(parts) for split, parts in images.items()}, labels


KINDS = {
    "cifar10": (cifar.CIFAR10, "cifar-10", "cifar-10-batches-py", "cifar-10-batches-bin"),
    "cifar100": (cifar.CIFAR100, "cifar-100", "cifar-100-python", "cifar-100-binary"),
}


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("packed", [True, False], ids=["tar.gz", "folder"])
def test_cifar_is_read_from_pickles_and_binaries_packed_or_not(tmp_path, unchecked, name, writer, packed):
    kind, stem, python, binary = KINDS[name]
    unchecked(name)
    members, images, labels = cifar_members(kind, writer)
    home, inside = tmp_path / name, binary if writer == "binary" else python
    home.mkdir()
    if packed:
        version = "binary" if writer == "binary" else "python"
        tar_of(home / f"{stem}-{version}.tar.gz", [(f"{inside}/{m}", content) for m, content in members.items()])
    else:
        (home / inside).mkdir()
        for member, content in members.items():
            (home / inside / member).write_bytes(content)
    for split in ("train", "test"):
        loaded = load_dataset(name, split)
        assert np.array_equal(channels_last(loaded.images), images[split])
        assert loaded.labels.tolist() == labels[split]
        assert loaded.classes == tuple(f"class{i}" for i in range(kind.count))
        assert loaded.name == (name if split == "test" else f"{name} train")


class Malicious:
    """What a pickle runs when it is loaded without care."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (Path(self.path),)


@pytest.mark.parametrize("protocol", range(6))
def test_a_pickle_never_runs_what_it_names(tmp_path, protocol):
    mark = tmp_path / "ran"
    evil = pickle.dumps({"data": Malicious(mark), "labels": [0]}, protocol=protocol)
    refused(FileFormatError, "which no data file needs; nothing of it was run", cifar.unpickle, evil, "data_batch_1")
    assert not mark.exists()
    pickle.loads(evil)  # the file is a real one
    assert mark.exists()


def test_pickles_of_other_things_are_refused():
    for evil in (
        b"cos\nsystem\n(S'true'\ntR.",
        b"cbuiltins\neval\n(S'1'\ntR.",
        b"cnumpy\nload\n(S'a'\ntR.",
        b"cnumpy.core.multiarray\nfromfile\n(S'a'\ntR.",
        b"c_codecs\nencode\n(Vabc\nVrot13\ntR.",
        b"\x80\x04\x8c\x02os\x94\x8c\x06system\x94\x93\x94.",
        b"",
        b"garbage",
        b"\x80\x02]r\xff\xff\xff\x7f.",  # of 8 bytes, for which Python would take 32 GB
        *map(pickle.dumps, ([1, 2], {"data": np.zeros(3, object)}, {"data": np.zeros(3)})),
    ):
        refused(FileFormatError, "batch is not a CIFAR pickle", cifar.unpickle, evil, "batch")


def test_a_damaged_pickle_raises_one_kind_of_error():
    good = cifar_members(cifar.CIFAR10, "protocol 2", per_batch=1)[0]["test_batch"]
    rng = np.random.default_rng(0)
    for _ in range(300):
        bad = bytearray(good)
        for at in rng.integers(0, len(bad), 4):
            bad[at] = rng.integers(256)
        with contextlib.suppress(FileFormatError):
            cifar.unpickle(bytes(bad), "batch")


def test_batches_of_something_else_are_refused(tmp_path):
    zeros = np.zeros((1, 3072), np.uint8)
    for entry, names, message in (
        ({"labels": [0], "data": zeros[:, :7]}, 10, r"data \(N, 3072\)"),
        ({"labels": [0]}, 10, r"data \(N, 3072\)"),
        ({"labels": [0, 1], "data": zeros}, 10, "one whole number per image"),
        ({"labels": ["cat"], "data": zeros}, 10, "one whole number per image"),
        ({"labels": [10], "data": zeros}, 10, "10 is the label of image 0 in the set 'cifar10'"),
        ({"labels": [-2], "data": zeros}, 10, "-2 is the label"),
        ({"labels": [0], "data": zeros}, 9, "must list 10 label_names"),
    ):
        (tmp_path / "test_batch").write_bytes(pickle.dumps(entry))
        (tmp_path / "batches.meta").write_bytes(pickle.dumps({"label_names": ["a"] * names}))
        refused(KedgeError, message, cifar.read_pickles, tmp_path, "test", "cifar10", kind=cifar.CIFAR10)
    for batch, names, message in ((b"", 10, "3073 bytes"), (bytes(3073), 9, "it lists 9")):
        (tmp_path / "test_batch.bin").write_bytes(batch)
        (tmp_path / "batches.meta.txt").write_text("a\n" * names)
        refused(FileFormatError, message, cifar.read_binary, tmp_path, "test", "cifar10", kind=cifar.CIFAR10)


def test_a_damaged_or_oversized_archive_is_named(tmp_path, unchecked, monkeypatch):
    unchecked("cifar10")
    (tmp_path / "cifar10").mkdir()
    path = tmp_path / "cifar10" / "cifar-10-python.tar.gz"
    members = cifar_members(cifar.CIFAR10, "protocol 2")[0]
    whole = tar_of(path, [(f"cifar-10-batches-py/{m}", c) for m, c in members.items()]).read_bytes()
    for content in (b"", b"no archive", whole[: len(whole) // 2], whole[:2000] + b"x" * 99 + whole[2099:]):
        path.write_bytes(content)
        (tmp_path / "cifar10" / downloads.RECORD).unlink(missing_ok=True)
        refused(FileFormatError, r"is damaged|holds no", load_dataset, "cifar10")
    path.write_bytes(whole)
    (tmp_path / "cifar10" / downloads.RECORD).unlink()
    with monkeypatch.context() as patch:
        patch.setattr(cifar, "_LARGEST", 9000)
        refused(FileFormatError, "the room for it", load_dataset, "cifar10")
    official = tuple(
        replace(file, checksum=Checksum("md5", "0", "a test")) for file in catalogue.SOURCES["cifar10"].files
    )
    monkeypatch.setitem(catalogue.SOURCES, "cifar10", replace(catalogue.SOURCES["cifar10"], files=official))
    refused(FileFormatError, r"another md5 than the one published \(a test", load_dataset, "cifar10")


# --- SVHN, MNIST, NumPy ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compressed", [True, False])
@pytest.mark.parametrize("dtype", ["u1", "f8", "i1", "u2", "i4", "f4", "i8"])
def test_svhn_is_read_as_scipy_reads_it(tmp_path, unchecked, compressed, dtype):
    unchecked("svhn")
    path = tmp_path / "svhn" / "test_32x32.mat"
    path.parent.mkdir()
    content = {"X": pixels(32, 32, 3, 5), "y": np.array([[1], [10], [9], [10], [2]], dtype)}
    others = {"note": "text", "cell": np.array([1, "a"], object), "long_name_of_a_value": np.ones((1, 3), dtype)}
    scipy.io.savemat(path, content | others, do_compression=compressed)
    ours, theirs = svhn.read_mat(path), scipy.io.loadmat(path)
    for key in ("X", "y", "long_name_of_a_value"):
        assert np.array_equal(ours[key], theirs[key])
        assert ours[key].dtype == theirs[key].dtype
    loaded = load_dataset("svhn")
    assert np.array_equal(loaded.images.permute(2, 3, 1, 0).numpy(), theirs["X"])
    assert loaded.labels.tolist() == [1, 0, 9, 0, 2]  # 10 is the digit 0
    assert loaded.classes == tuple("0123456789")


def test_svhn_files_that_do_not_fit_are_refused(tmp_path):
    path, x = tmp_path / "test_32x32.mat", pixels(32, 32, 3, 2)
    for content, message in (
        ({"X": x, "y": np.array([[1], [11]])}, "labels 1 to 10"),
        ({"X": x, "y": np.array([[0], [1]])}, "labels 1 to 10"),
        ({"X": x, "y": np.array([[1]])}, "2 images and 1 labels"),
        ({"X": x[:8, :8], "y": np.array([[1], [2]])}, r"X \(32, 32, 3, N\)"),
        ({"y": np.array([[1]])}, r"it holds y int64 \(1, 1\)"),
        ({"X": x.astype(float), "y": np.array([[1], [2]])}, "of uint8"),
    ):
        scipy.io.savemat(path, content)
        refused(FileFormatError, message, svhn.read_svhn, path, "test", "svhn")


def test_a_damaged_matlab_file_raises_one_kind_of_error(tmp_path):
    path = tmp_path / "test_32x32.mat"
    refused(InputError, "No such file", svhn.read_mat, path)
    scipy.io.savemat(path, {"X": pixels(32, 32, 3, 2), "y": np.array([[1], [2]])}, do_compression=True)
    good = path.read_bytes()
    rng = np.random.default_rng(0)
    for cut in (0, 100, 130, 140, len(good) // 2, len(good) - 1):
        path.write_bytes(good[:cut])
        refused(FileFormatError, "mat", svhn.read_svhn, path, "test", "svhn")
    for _ in range(200):
        bad = bytearray(good)
        bad[rng.integers(128, len(bad))] ^= 1 << rng.integers(8)
        path.write_bytes(bad)
        with contextlib.suppress(FileFormatError):
            svhn.read_svhn(path, "test", "svhn")
    path.write_bytes(b"MATLAB 7.3 MAT-file" + b" " * 200)
    refused(FileFormatError, r"version 7.3", svhn.read_mat, path)
    packed = zlib.compress(struct.pack("<II", 14, 2**31 + 8) + bytes(10_000))
    path.write_bytes(b" " * 124 + b"\x00\x01IM" + struct.pack("<II", 15, len(packed)) + packed)
    refused(FileFormatError, "an array of 2147483656 bytes", svhn.read_mat, path)


def idx_bytes(values):
    return bytes([0, 0, 8, values.ndim]) + struct.pack(f">{values.ndim}I", *values.shape) + values.tobytes()


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist"])
@pytest.mark.parametrize("packed", [True, False], ids=["gz", "unpacked"])
def test_mnist_is_read_from_idx_files(tmp_path, unchecked, name, packed):
    unchecked(name)
    (tmp_path / name).mkdir()
    x, y = pixels(4, 28, 28), np.array([3, 0, 9, 1], np.uint8)
    for kind, values in (("images-idx3", x), ("labels-idx1", y)):
        path = tmp_path / name / f"t10k-{kind}-ubyte{'.gz' if packed else ''}"
        path.write_bytes(gzip.compress(idx_bytes(values), mtime=0) if packed else idx_bytes(values))
    loaded = load_dataset(name)
    assert np.array_equal(loaded.images[:, 0].numpy(), x)
    assert loaded.labels.tolist() == [3, 0, 9, 1]
    assert loaded.classes[9] == {"mnist": "9", "fashion-mnist": "Ankle boot"}[name]
    refused(NotReadyError, r"train-images-idx3-ubyte.gz", load_dataset, name, "train")


def test_idx_files_that_do_not_fit_are_refused(tmp_path):
    two, labels = idx_bytes(pixels(2, 28, 28)), idx_bytes(np.array([1, 2], np.uint8))
    for content, numbers, message in (
        (two, idx_bytes(np.array([1], np.uint8)), r"\(2, 28, 28\) and \(1,\)"),
        (two, idx_bytes(np.array([1, 10], np.uint8)), "10 is the label"),
        (two[:-1], labels, "must hold 1568 values"),
        (two + b"x", labels, "must hold 1568 values"),
        (b"\x00\x00\x08\x03\xff\xff\xff\xff\xff\xff\xff\xff\x00\x00\x00\x09", b"", "another number"),
        (b"\x00\x00\x0d\x03", b"", "not an idx file of bytes"),
        (b"\x00\x00\x08\x03\x00", b"", "not an idx file of bytes"),
        (gzip.compress(two, mtime=0)[:100], b"", "cannot be read"),
        (b"", b"", "not an idx file"),
    ):
        path = tmp_path / "t10k-images-idx3-ubyte"
        path.write_bytes(content)
        (tmp_path / "t10k-labels-idx1-ubyte").write_bytes(numbers)
        refused(KedgeError, message, arrays.read_idx_pair, path, "test", "mnist", classes=tuple("0123456789"))


def test_a_npz_holds_images_labels_and_names_in_one_or_several_parts(tmp_path):
    path = tmp_path / "own.npz"
    x, val = pixels(5, 8, 8, 3), pixels(2, 8, 8, 3, seed=1)
    np.savez(path, x=x, y=np.array([0, 1, 1, 0, -1]), names=np.array(["cat", "dog"]), val_x=val, val_y=np.array([1, 0]))
    loaded = load_dataset(f"npz:{path}")
    assert np.array_equal(channels_last(loaded.images), x)
    assert (loaded.labels.tolist(), loaded.classes, loaded.name) == ([0, 1, 1, 0, -1], ("cat", "dog"), "own")
    for key in ("val_x", "val"):
        part = load_dataset(f"npz:{path}", key)
        assert np.array_equal(channels_last(part.images), val)
        assert part.labels.tolist() == [1, 0]
    assert len(load_dataset(f"npz:{path}", "train")) == 5  # no such part: x
    refused(InputError, r"arrays of images \(x, val_x\); got 'other'", load_dataset, f"npz:{path}", "other")


def test_npz_files_that_do_not_fit_or_are_damaged_are_refused(tmp_path, monkeypatch):
    path, x = tmp_path / "a.npz", pixels(2, 8, 8)
    for content, message in (
        ({"x": np.zeros((2, 8, 8))}, "uint8"),
        ({"x": x[0]}, "uint8"),
        ({"x": x[:0]}, "at least one image"),
        ({"images": x}, r"arrays of images \(none\)"),
        ({"x": x, "y": np.array([0.5, 1])}, "whole numbers"),
        ({"x": x, "y": np.array([0])}, "one per image"),
        ({"x": x, "y": np.array([0, -2])}, "-1"),
        ({"x": x, "y": np.array([0, 2]), "names": np.array(["a", "b"])}, r"-1 \(none\) to 1"),
        ({"x": np.array([{"a": 1}], object)}, "cannot be read as a NumPy archive"),
    ):
        np.savez(path, **content)
        refused(KedgeError, message, load_dataset, f"npz:{path}")
    np.savez(path, x=x)
    with monkeypatch.context() as patch:
        patch.setattr(arrays, "_LARGEST", 100)
        refused(InputError, "at most 100 bytes", load_dataset, f"npz:{path}")
    whole = path.read_bytes()
    for content in (b"", b"text", whole[:100], whole[:-30]):
        path.write_bytes(content)
        refused(FileFormatError, "cannot be read as a NumPy archive", sources.npz, path)
    np.save(tmp_path / "b.npy", x)
    for file, message in (("b.npy", "it is none"), ("c.npz", "No such file")):
        refused(KedgeError, message, sources.npz, tmp_path / file)


# --- LSUN ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def database(tmp_path):
    lmdb = pytest.importorskip("lmdb")
    path = tmp_path / "lsun-test" / "test_lmdb"
    path.mkdir(parents=True)

    def put(values):
        with lmdb.open(str(path), map_size=2**22) as environment, environment.begin(write=True) as transaction:
            for key, value in values.items():
                transaction.put(key.encode(), value)
        return path

    return put


def jpeg(width):
    return encoded(Image.fromarray(pixels(90, width, 3)), "JPEG")


def test_lsun_is_streamed_from_its_database(tmp_path, database):
    database({f"{i:040x}": jpeg(120 + i) for i in range(4)})
    loaded = load_dataset("lsun-test")
    assert isinstance(loaded, StreamedSet)
    assert [loaded[i][0].size for i in range(4)] == [(120 + i, 90) for i in range(4)]
    assert loaded[0][1] == -1
    assert loaded.subset([2]).store.names == (f"{2:040x}",)
    assert len(loaded.checksum) == 64
    loader = DataLoader(replace(loaded, preprocess=Preprocess((3, 16, 16))), batch_size=2, num_workers=1)
    x = torch.cat([x for x, _ in loader])
    assert torch.equal(x, loaded.to_memory(Preprocess((3, 16, 16))).images)
    refused(FileFormatError, "no longer holds", replace(loaded.store, names=("gone",)).size, 0)


def test_damaged_images_in_a_database_are_named(database):
    database({"aa": jpeg(120), "zz": b"not an image"})
    with pytest.warns(KedgeWarning, match="1 image was skipped: zz in the set 'lsun-test' cannot be read"):
        assert len(load_dataset("lsun-test", on_error="skip")) == 1


def test_an_invalid_or_empty_database_is_an_error(tmp_path, monkeypatch, database):
    home = tmp_path / "lsun-test" / "test_lmdb"
    refused(FileFormatError, r"must hold data.mdb", load_dataset, "lsun-test")
    (home / "data.mdb").write_bytes(b"nothing of the kind" * 1000)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "lmdb", None)
        refused(NotReadyError, r"pip install 'kedge\[lsun\]'", load_dataset, "lsun-test")
    refused(FileFormatError, "is not an LMDB database", load_dataset, "lsun-test")
    (home / "data.mdb").unlink()
    database({})
    refused(FileFormatError, "holds no images", load_dataset, "lsun-test")


# --- summaries -------------------------------------------------------------------------------------------------------


def test_a_summary_measures_all_of_a_set_in_memory():
    x = pixels(2500, 5, 4, 3)
    data = ImageSet.from_arrays(x, np.arange(2500) % 2, name="noise", classes=("a", "b"))
    summary = summarize_dataset(data)
    assert summary.mean == pytest.approx(x.reshape(-1, 3).mean(axis=0) / 255, abs=1e-12)
    assert summary.std == pytest.approx(x.reshape(-1, 3).std(axis=0) / 255, abs=1e-12)
    assert (summary.images, summary.measured, summary.size, summary.channels) == (2500, 2500, "4 x 5", 3)
    assert summary.counts == {"a": 1250, "b": 1250}
    assert (summary.checksum, summary.checksum_of) == (data.checksum, "sha256 of the pixels and labels")
    json.dumps(summary.as_dict())


def test_a_summary_of_a_streamed_set_measures_a_part_of_it(photos):
    summary = summarize_dataset(folder(photos), sample=2)
    parts = [np.asarray(Image.open(photos / name)).reshape(-1, 3) for name in ("a/1.png", "a/2.jpg")]
    assert summary.mean == pytest.approx(np.concatenate(parts).mean(axis=0) / 255, abs=1e-12)
    assert (summary.images, summary.measured, summary.size) == (3, 2, "64 to 70 x 50 to 80")
    assert summary.counts == {"a": 2, "b": 1}
    assert "names" in summary.checksum_of


def test_labels_without_names_are_counted_by_number():
    summary = summarize_dataset(ImageSet.from_arrays(pixels(3, 8, 8), np.array([2, 0, -1])))
    assert (summary.counts, summary.unlabelled, summary.classes) == ({"0": 1, "1": 0, "2": 1}, 1, 3)
    assert summarize_dataset(ImageSet.from_arrays(pixels(3, 8, 8))).counts == {}


def test_a_contact_sheet_shows_the_pixels_enlarged():
    data = ImageSet.from_arrays(pixels(4, 8, 8, 3))
    sheet = np.asarray(contact_sheet(data, 4, cell=16))
    assert sheet.shape == (48, 48, 3)
    for place in range(4):
        top, left = 4 + 24 * (place // 2), 4 + 24 * (place % 2)
        assert np.array_equal(sheet[top : top + 16 : 2, left : left + 16 : 2], channels_last(data.images)[place])


def test_a_contact_sheet_has_room_for_captions(photos):
    assert contact_sheet(folder(photos)).size == (2 * 104, 2 * 118)
    titles = ("a name far too long for its cell", "b")
    captioned = ImageSet.from_arrays(pixels(3, 8, 8), np.array([0, 1, -1]), classes=titles)
    assert contact_sheet(captioned, 2).size == (208, 118)
    refused(InputError, "n must be", contact_sheet, captioned, 0)
    assert evenly_spaced(1000, 3) == [0, 333, 666]


# --- hostile files ---------------------------------------------------------------------------------------------------


def test_an_image_skipped_in_training_is_replaced_by_the_next_and_listed_by_all_processes(photos):
    streamed = replace(folder(photos), on_error="skip", preprocess=Preprocess((3, 8, 8)))
    (photos / "a" / "2.jpg").write_bytes((photos / "a" / "2.jpg").read_bytes()[:300])
    (photos / "b" / "3.png").unlink()
    whole = [streamed[0][0].tolist(), streamed[0][1]]
    for workers in (0, 2):
        fresh = replace(streamed)
        assert fresh.skipped == ()
        rows = [(x[0].tolist(), int(y[0])) for x, y in DataLoader(fresh, num_workers=workers)]
        assert rows == [tuple(whole)] * 3  # the image after the last is the first
        assert [text.split()[0] for text in fresh.skipped] == ["a/2.jpg", "b/3.png"]
        assert "No such file" in fresh.skipped[1]
    with pytest.raises(IndexError):
        streamed[3]
    (photos / "a" / "1.png").write_text("")
    with pytest.raises(InputError, match="none of the 3 images"):
        replace(streamed)[0]
    refused(InputError, "on_error must be", replace, streamed, on_error="refuse")


def every_reader(path):
    """Each function that opens a path which a user or a listing gives."""
    listed = path.with_suffix(".txt")
    return {
        "regular_file": lambda: read_limited(regular_file(path), 2**20),
        "open_image": lambda: open_image(path),
        "preprocess": lambda: Preprocess((3, 8, 8))(str(path)),
        "batches": lambda: list(batches([path], Preprocess((3, 8, 8)))),
        "folder": lambda: load_dataset(f"folder:{path.parent}"),
        "npz": lambda: load_dataset(f"npz:{path}"),
        "list": lambda: load_dataset(f"list:{path}"),
        "listed": lambda: listed.write_text(f"{path.name} 0") and load_dataset(f"list:{listed}"),
        "mat": lambda: svhn.read_mat(path),
        "idx": lambda: arrays.read_idx(path),
        "archive": lambda: archive.unpack(path, path.parent / "out", ["data"]),
        "members": lambda: archive.read_members(path, ["a"], 100),
        "record": lambda: downloads.read_record(path.parent),
    }


@pytest.mark.parametrize("reader", every_reader(Path("a.png")))
def test_pipes_devices_and_sockets_are_refused_at_once(tmp_path, reader):
    os.mkfifo(tmp_path / "a.png")
    os.mkfifo(tmp_path / downloads.RECORD)
    with socket.socket(socket.AF_UNIX) as listening, socket.socket(socket.AF_UNIX) as other:
        (tmp_path / "b").mkdir()
        listening.bind(str(tmp_path / "b" / "a.png"))
        other.bind(str(tmp_path / "b" / downloads.RECORD))
        (tmp_path / "c").mkdir()
        for name in ("a.png", downloads.RECORD):
            (tmp_path / "c" / name).symlink_to("/dev/zero")
        for where in (tmp_path, tmp_path / "b", tmp_path / "c"):
            refused(KedgeError, r"not a regular file|does not hold", every_reader(where / "a.png")[reader])


@pytest.mark.parametrize("reader", [name for name in every_reader(Path("a.png")) if name not in ("record", "listed")])
def test_a_huge_file_is_refused_by_its_size_or_header(tmp_path, reader):
    """Sparse files of 3 GiB that begin as each format does; none is read."""
    heads = [
        b"",
        b"\x89PNG\r\n\x1a\n",
        b"\xff\xd8\xff\xe0",
        b"PK\3\4",
        b"\x93NUMPY\1\0",
        b"\0\0\x08\x03" + b"\xff" * 12,
    ]
    heads += [b" " * 124 + b"\0\1IM" + struct.pack("<II", 14, 3 * 2**30), b"\x1f\x8b\x08" + bytes(7)]
    for number, head in enumerate(heads):
        path = tmp_path / str(number) / "a.png"
        path.parent.mkdir()
        with path.open("wb") as file:
            file.write(head)
            file.truncate(3 * 2**30)
        tracemalloc.start()
        with pytest.raises(KedgeError):
            every_reader(path)[reader]()
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 2**23, (head, peak)


def test_large_images_are_not_copied_before_they_are_decoded(tmp_path):
    with (tmp_path / "long.jpg").open("wb") as file:
        file.write(encoded(Image.fromarray(pixels(32, 32, 3)), "JPEG"))
        file.truncate(200 * 2**20)  # cameras append films to their photographs
    tracemalloc.start()
    assert open_image(tmp_path / "long.jpg").size == (32, 32)
    assert tracemalloc.get_traced_memory()[1] < 2**22
    tracemalloc.stop()


def test_labels_that_are_not_class_numbers_are_an_error_and_no_allocation(tmp_path, photos):
    for labels, message in (
        ([0, 1], "one per image"),
        ([0.0, 1.0, 1.0], "whole numbers"),
        ([0, 1000, 1], r"-1 \(none\) to 1; 1000 is the label of a/2.jpg in the set 'photos'"),
        ([0, 1, -2], "-2 is the label of b/3.png in the set 'photos'"),
    ):
        refused(InputError, message, replace, folder(photos), labels=torch.tensor(labels))
    for y in ([0, 2**40], [0, -7]):
        np.savez(tmp_path / "a.npz", x=pixels(2, 8, 8), y=np.array(y))
        refused(InputError, f"{y[1]} is the label of image 1 in the set 'a'", load_dataset, f"npz:{tmp_path / 'a.npz'}")
        tree(tmp_path, ["0.png", "1.png"])
        (tmp_path / "list.txt").write_text(f"0.png 0\n1.png {max(y[1], 2**40)}")
        refused(InputError, r"is the label of 1.png", load_dataset, f"list:{tmp_path / 'list.txt'}")
    np.savez(tmp_path / "a.npz", x=pixels(3, 8, 8), y=np.array([0, 3, 1000]))
    assert summarize_dataset(load_dataset(f"npz:{tmp_path / 'a.npz'}")).classes == 1001
    np.savez(tmp_path / "a.npz", x=pixels(3, 8, 8), y=np.array([0, 3, 1000]), names=np.array(list("abcd")))
    refused(InputError, r"-1 \(none\) to 3; 1000 is the label of image 2", load_dataset, f"npz:{tmp_path / 'a.npz'}")
