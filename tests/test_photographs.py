"""Readers of sets of photographs, on small files in the layout of the official archives."""

import tarfile
import zipfile
from dataclasses import replace

import numpy as np
import pytest
import scipy.io

from helpers import picture, refused
from kedge.data import load_dataset
from kedge.data.sources import catalogue
from kedge.errors import FileFormatError, InputError, NotReadyError


@pytest.fixture(autouse=True)
def _home(monkeypatch, tmp_path):
    """All sets are in the test's own folder, and the archives that it writes have no published checksums."""
    monkeypatch.setenv("KEDGE_DATA", str(tmp_path))
    for name in ("caltech-101", "flowers-102"):
        entry = catalogue.SOURCES[name]
        files = tuple(replace(file, checksum=None) for file in entry.files)
        monkeypatch.setitem(catalogue.SOURCES, name, replace(entry, files=files))


def tree(root, *files):
    for seed, name in enumerate(files):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        picture(seed, size=(80, 70)).save(root / name)


def test_pets_are_named_by_their_files_and_split_by_lists(tmp_path):
    home = tmp_path / "oxford-pets"
    tree(home / "images", "great_pyrenees_1.jpg", "Abyssinian_1.jpg", "Abyssinian_2.jpg", "not_listed_1.jpg")
    (home / "annotations").mkdir()
    (home / "annotations" / "trainval.txt").write_text("Abyssinian_2 1 1 1\ngreat_pyrenees_1 16 2 10\n")
    (home / "annotations" / "test.txt").write_text("Abyssinian_1 1 1 1\n")
    train, test, whole = (load_dataset("oxford-pets", split) for split in ("trainval", "test", "all"))
    assert (train.classes, train.labels.tolist()) == (("Abyssinian", "great_pyrenees"), [0, 1])
    assert (test.store.names, len(whole)) == (("Abyssinian_1.jpg",), 3)
    (home / "annotations" / "test.txt").write_text("Abyssinian_3 1 1 1\n")
    refused(InputError, "test.txt names Abyssinian_3.jpg, which", load_dataset, "oxford-pets", "test")


def test_flowers_are_split_by_the_numbers_of_their_images(tmp_path):
    home = tmp_path / "flowers-102"
    tree(home / "jpg", *(f"image_{number:05d}.jpg" for number in range(1, 5)))
    scipy.io.savemat(home / "imagelabels.mat", {"labels": np.array([[2, 1, 2, 3]], np.uint8)})
    parts = {"trnid": [[4, 1]], "tstid": [[5]]}
    scipy.io.savemat(home / "setid.mat", {key: np.array(ids, np.uint16) for key, ids in parts.items()})
    train, whole = (load_dataset("flowers-102", split) for split in ("train", "all"))
    assert train.store.names == ("image_00004.jpg", "image_00001.jpg")
    assert [train.classes[label] for label in train.labels.tolist()] == ["3", "2"]
    assert [whole.classes[label] for label in whole.labels.tolist()] == ["2", "1", "2", "3"]
    refused(FileFormatError, "number the 4 images", load_dataset, "flowers-102", "test")
    refused(FileFormatError, "whole numbers as valid; it holds trnid, tstid", load_dataset, "flowers-102", "val")


def test_caltech101_is_unpacked_out_of_its_two_archives_without_backgrounds(tmp_path):
    made, home = tmp_path / "made", tmp_path / "caltech-101"
    tree(made / "101", "ant/image_0001.jpg", "BACKGROUND_Google/image_0001.jpg", "yin_yang/image_0001.jpg")
    with tarfile.open(made / "inner.tar.gz", "w:gz") as packed:
        packed.add(made / "101", "101_ObjectCategories")
    home.mkdir()
    with zipfile.ZipFile(home / "caltech-101.zip", "w") as packed:
        packed.write(made / "inner.tar.gz", "caltech-101/101_ObjectCategories.tar.gz")
    loaded = load_dataset("caltech-101")
    assert (loaded.classes, loaded.labels.tolist()) == (("ant", "yin_yang"), [0, 1])


def test_cub_joins_its_lists_by_number(tmp_path):
    root = tmp_path / "cub-200" / "CUB_200_2011"
    files = ["001.Albatross/a_1.jpg", "001.Albatross/a_2.jpg", "002.Auk/b_1.jpg"]
    tree(root / "images", *files)
    (root / "images.txt").write_text("".join(f"{n} {file}\n" for n, file in enumerate(files, start=1)))
    (root / "train_test_split.txt").write_text("2 0\n1 1\n3 0\n")
    train, test, whole = (load_dataset("cub-200", split) for split in ("train", "test", "all"))
    assert (train.store.names, train.classes) == (("001.Albatross/a_1.jpg",), ("001.Albatross", "002.Auk"))
    assert (test.labels.tolist(), whole.labels.tolist()) == ([0, 1], [0, 0, 1])
    (root / "train_test_split.txt").write_text("1\n")
    refused(FileFormatError, "a number and a value per line; got '1'", load_dataset, "cub-200")


def test_food_is_split_by_lists_without_endings(tmp_path):
    root = tmp_path / "food-101" / "food-101"
    tree(root / "images", "pho/1.jpg", "pho/2.jpg", "sushi/3.jpg")
    (root / "meta").mkdir()
    (root / "meta" / "train.txt").write_text("sushi/3\npho/1\n")
    (root / "meta" / "test.txt").write_text("pho/2\n")
    train = load_dataset("food-101", "train")
    assert (train.classes, train.labels.tolist()) == (("pho", "sushi"), [1, 0])
    assert load_dataset("food-101").store.names == ("pho/2.jpg",)


@pytest.mark.parametrize(
    ("name", "split", "root"),
    [
        ("imagenette-160", "val", "imagenette2-160/val"),
        ("imagenette-320", "train", "imagenette2-320/train"),
        ("stanford-dogs", "all", "Images"),
        ("eurosat", "all", "EuroSAT_RGB"),
    ],
)
def test_sets_with_a_folder_for_each_class(tmp_path, name, split, root):
    tree(tmp_path / name / root, "n01/a.jpg", "n02/b.jpg")
    loaded = load_dataset(name, split)
    assert (loaded.classes, loaded.labels.tolist()) == (("n01", "n02"), [0, 1])


def test_ninco_has_no_labels_and_openood_s_lists_are_relative_to_two_folders(tmp_path):
    tree(tmp_path / "ninco" / "NINCO" / "NINCO_OOD_classes", "amphiuma_means/1.jpg")
    assert load_dataset("ninco").labels is None
    home = tmp_path / "openood"
    tree(home / "images_largescale", "ssb_hard/n0/1.jpg")
    tree(home / "images_classic", "texture/dotted/1.jpg")
    lists = home / "benchmark_imglist" / "imagenet"
    lists.mkdir(parents=True)
    for stem, file in (("test_ssb_hard", "ssb_hard/n0/1.jpg"), ("test_textures", "texture/dotted/1.jpg")):
        (lists / f"{stem}.txt").write_text(f"{file} -1\n")
        assert load_dataset("openood", f"imagenet/{stem}").store.names == (file,)
    with pytest.raises(NotReadyError, match=r"download\.py"):
        load_dataset("openood", "imagenet/test_ninco")
