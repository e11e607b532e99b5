"""Sets of a study by name: a file, or the public set that it was made of, with the same pixels."""

import struct

import numpy as np
import pytest
import torch
from PIL import Image

from helpers import picture
from kedge.errors import NotReadyError
from kedge.studies import sets


def bicubic(image, side=32):
    """By hand: Pillow's filter on the whole image, aspect ratio not kept."""
    pixels = np.asarray(image.convert("RGB").resize((side, side), Image.Resampling.BICUBIC))
    return torch.from_numpy(pixels.copy()).permute(2, 0, 1)


def test_traffic_signs_are_made_of_the_official_test_images(tmp_path):
    home = tmp_path / "gtsrb" / "GTSRB" / "Final_Test" / "Images"
    home.mkdir(parents=True)
    signs = [picture(number, size) for number, size in enumerate(((53, 54), (42, 45), (25, 61)))]
    for number, sign in enumerate(signs):
        sign.save(home / f"{number:05d}.ppm")
    images = sets.load_set("traffic signs", side=32, data_dir=tmp_path)
    assert (images.name, images.labels) == ("traffic signs", None)
    assert torch.equal(images.images, torch.stack([bicubic(sign) for sign in signs]))


def test_mnist_is_made_of_the_official_test_images(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (3, 28, 28), dtype=np.uint8)
    (tmp_path / "mnist").mkdir()
    images, labels = (tmp_path / "mnist" / f"t10k-{kind}-ubyte" for kind in ("images-idx3", "labels-idx1"))
    images.write_bytes(struct.pack(">IIII", 2051, *pixels.shape) + pixels.tobytes())
    labels.write_bytes(struct.pack(">II", 2049, 3) + bytes(3))
    made = sets.load_set("MNIST (RGB)", side=32, data_dir=tmp_path)
    assert torch.equal(made.images, torch.stack([bicubic(Image.fromarray(digit)) for digit in pixels]))


def test_tiny_imagenet_without_known_classes_is_made_of_openood_s_lists(tmp_path):
    lists = tmp_path / "openood" / "benchmark_imglist" / "cifar10"
    places = tmp_path / "openood" / "images_classic" / "tin" / "val" / "images"
    for folder in (lists, places):
        folder.mkdir(parents=True)
    photos = [picture(number, (64, 64)) for number in range(3)]
    for number, photo in enumerate(photos):
        photo.save(places / f"val_{number}.png")
    (lists / "test_tin.txt").write_text("tin/val/images/val_2.png -1\ntin/val/images/val_0.png -1\n")
    (lists / "val_tin.txt").write_text("tin/val/images/val_1.png -1\n")
    test, validation = (
        sets.load_set("tiny-imagenet (OpenOOD)", side=32, data_dir=tmp_path, split=split) for split in (None, "val_x")
    )
    assert torch.equal(test.images, torch.stack([bicubic(photos[2]), bicubic(photos[0])]))
    assert torch.equal(validation.images[0], bicubic(photos[1]))


def test_a_file_comes_first_and_a_set_without_a_public_source_says_so(tmp_path):
    np.savez(tmp_path / sets.FILES["traffic signs"], x=np.full((2, 32, 32, 3), 7, dtype=np.uint8))
    assert sets.load_set("traffic signs", side=32, data_dir=tmp_path).images.unique().tolist() == [7]
    with pytest.raises(NotReadyError, match="no public source"):
        sets.load_set("scenes", side=32, data_dir=tmp_path)
    with pytest.raises(NotReadyError, match=r"mnist_test_32rgb.npz.*kedge data get mnist"):
        sets.load_set("MNIST (RGB)", side=32, data_dir=tmp_path)
