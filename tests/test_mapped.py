"""Images on disk: the same pixels as in memory, made once, and only the parts in use in memory."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from helpers import picture
from kedge import ImageSet
from kedge.data import Preprocess, batches, gather
from kedge.data.batches import gather_on_disk
from kedge.data.mapped import mapped_pixels
from kedge.data.sources import folder
from kedge.errors import FileFormatError, InputError
from kedge.studies import STUDIES
from kedge.studies.corruptions import corrupt
from kedge.studies.study import Setting

HALF = Preprocess((3, 16, 16))


def photographs(home, n=5):
    for number in range(n):
        (home / "ab"[number % 2]).mkdir(parents=True, exist_ok=True)
        picture(number, (40, 24)).save(home / "ab"[number % 2] / f"{number}.png")
    return folder(home)


def in_a_file(pixels):
    """Whether a tensor's values are those of a mapped file, by the kernel's list of them."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        low, high, path = re.match(r"(\w+)-(\w+) \S+ \S+ \S+ \S+ *(.*)", line).groups()
        if int(low, 16) <= pixels.data_ptr() < int(high, 16):
            return path.endswith(".npy")
    return False


def anonymous():
    """Megabytes of the process that are not pages of files."""
    (kilobytes,) = re.findall(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(kilobytes) / 1024


def test_images_on_disk_are_those_in_memory_and_are_read_once(tmp_path, monkeypatch):
    photos = photographs(tmp_path / "photos")
    stored, expected = gather_on_disk(photos, HALF, tmp_path / "pixels"), gather(photos, HALF)
    assert torch.equal(stored.images, expected.images)
    assert (stored.labels.tolist(), stored.classes, stored.name) == (expected.labels.tolist(), ("a", "b"), "photos")
    assert stored.checksum == expected.checksum
    assert in_a_file(stored.images)
    assert not in_a_file(expected.images)
    monkeypatch.setattr(type(photos), "image", lambda *_: pytest.fail("read again"))
    assert gather_on_disk(photos, HALF, tmp_path / "pixels").checksum == expected.checksum
    with pytest.raises(pytest.fail.Exception):  # other inputs are another file
        gather_on_disk(photos, Preprocess((3, 8, 8)), tmp_path / "pixels")


def test_corrupted_images_on_disk_are_those_in_memory(tmp_path):
    clean = ImageSet(torch.randint(0, 256, (3, 3, 80, 80), dtype=torch.uint8), torch.arange(3), name="clean")
    stored, expected = (corrupt(clean, "brightness", 2, folder=where) for where in (tmp_path, None))
    assert (stored.checksum, stored.name) == (expected.checksum, expected.name)
    assert in_a_file(stored.images)


def test_images_on_disk_take_no_memory_of_their_own(tmp_path):
    part, count, before, peak = torch.zeros(4, 3, 256, 256, dtype=torch.uint8), 40, anonymous(), 0.0

    def parts():
        for number in range(count):
            yield part + number
            watch()

    def watch():
        nonlocal peak
        peak = max(peak, anonymous() - before)

    size = count * part.numel() / 2**20
    images = ImageSet(mapped_pixels(tmp_path, "large", {}, (4 * count, 3, 256, 256), parts))
    watch()
    assert len(images.checksum) == 64
    watch()
    for x, _ in batches(images, Preprocess((3, 256, 256)), size=4):
        assert x.max() == x.min()
        watch()
    assert (size, peak < 8) == (30.0, True), f"{peak:.1f} MB"


def test_a_damaged_or_interrupted_file_is_never_read(tmp_path):
    def stops():
        yield torch.zeros(1, 1, 8, 8, dtype=torch.uint8)
        raise InputError("an image cannot be decoded")

    with pytest.raises(InputError, match="decoded"):
        mapped_pixels(tmp_path, "x", {}, (2, 1, 8, 8), stops)
    assert not list(tmp_path.iterdir())
    mapped_pixels(tmp_path, "x", {}, (2, 1, 8, 8), lambda: [torch.zeros(2, 1, 8, 8, dtype=torch.uint8)])
    (file,) = tmp_path.iterdir()
    whole = file.read_bytes()
    np.save(file, np.zeros((1, 1, 8, 8), dtype=np.uint8))
    for damaged in (whole[:-1], b"", file.read_bytes()):
        file.write_bytes(damaged)
        with pytest.raises(FileFormatError, match="delete it"):
            mapped_pixels(tmp_path, "x", {}, (2, 1, 8, 8), list)


def test_imagenet_c_keeps_its_blurred_images_on_disk(tmp_path):
    pytest.importorskip("scipy")
    (suite,) = STUDIES["imagenet-c"](Setting("smoke", pixels=tmp_path)).suites
    data = suite.data(0)
    assert len(data.ood) == 5
    assert all(in_a_file(images.images) for images in data.ood)
    assert suite.extract  # logits and features too
