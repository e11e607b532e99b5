"""A summary of a set in numbers, and a contact sheet of its images."""

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont, ImageOps
from torch import Tensor

from kedge.checks import at_least
from kedge.data.imageset import ImageSet
from kedge.data.preprocess import in_mode
from kedge.data.streamed import StreamedSet


@dataclass(frozen=True)
class DatasetSummary:
    """Counts of a set, and the mean and std of its pixels in [0, 1] per channel, over ``measured`` images."""

    name: str
    images: int
    size: str
    channels: int
    classes: int
    counts: dict[str, int]
    unlabelled: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    measured: int
    checksum: str
    checksum_of: str

    def as_dict(self) -> dict[str, object]:
        """The summary as plain data, for JSON."""
        return dataclasses.asdict(self)


def summarize_dataset(data: ImageSet | StreamedSet, *, sample: int = 500) -> DatasetSummary:
    """Summarize a set: all images of one in memory, evenly spaced images of a streamed one.

    Args:
        data: The set.
        sample: Number of images of a streamed set to decode.
    """
    at_least("sample", sample, 1)
    labels = torch.full((len(data),), -1) if data.labels is None else data.labels
    top = int(labels.max()) + 1 if len(labels) else 0
    titles = data.classes or tuple(str(number) for number in range(top))
    counts = torch.bincount(labels[labels >= 0], minlength=len(titles)).tolist()
    sizes, measured, pixels, sums, squares = set(), 0, 0, torch.tensor(0), torch.tensor(0)
    for part in data.images.split(1000) if isinstance(data, ImageSet) else _sampled(data, sample):
        values = part.transpose(0, 1).flatten(1)  # (D, pixels)
        sizes.add((part.shape[3], part.shape[2]))
        measured, pixels = measured + len(part), pixels + values.shape[1]
        sums = sums + values.sum(dim=1, dtype=torch.int64)  # exact up to the last division
        squares = squares + (values.int() ** 2).sum(dim=1, dtype=torch.int64)
    mean = sums.double() / pixels
    std = (squares.double() / pixels - mean**2).clamp(min=0).sqrt()
    spans = [f"{min(side)} to {max(side)}" if len(set(side)) > 1 else f"{side[0]}" for side in zip(*sizes, strict=True)]
    content = "pixels and labels" if isinstance(data, ImageSet) else "names, sizes and labels of the files"
    return DatasetSummary(
        name=data.name,
        images=len(data),
        size=" x ".join(spans),
        channels=len(mean),
        classes=len(titles),
        counts=dict(zip(titles, counts, strict=True)),
        unlabelled=int((labels < 0).sum()),
        mean=tuple((mean / 255).tolist()),
        std=tuple((std / 255).tolist()),
        measured=measured,
        checksum=data.checksum,
        checksum_of=f"sha256 of the {content}",
    )


def contact_sheet(data: ImageSet | StreamedSet, n: int = 64, *, cell: int = 96) -> Image.Image:
    """Draw n evenly spaced images of a set, each with its class below it; small ones are enlarged without smoothing.

    Args:
        data: The set.
        n: Largest number of images.
        cell: Side in pixels of the square for each image.
    """
    picked = evenly_spaced(len(data), at_least("n", n, 1))
    columns = math.ceil(math.sqrt(len(picked)))
    rows = math.ceil(len(picked) / columns)
    gap = 8
    caption = 0 if data.labels is None else 14
    step = (cell + gap, cell + gap + caption)
    sheet = Image.new("RGB", (columns * step[0], rows * step[1]), "white")
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(size=11)
    for place, index in enumerate(picked):
        image = _fitted(_picture(data, index), cell)
        left, top = gap // 2 + place % columns * step[0], gap // 2 + place // columns * step[1]
        sheet.paste(image, (left + (cell - image.width) // 2, top + (cell - image.height) // 2))
        if data.labels is not None:
            label = int(data.labels[index])
            text = "" if label < 0 else data.classes[label] if label < len(data.classes) else str(label)
            while len(text) > 1 and draw.textlength(text, font=font) > cell:
                text = text.removesuffix("…")[:-1] + "…"
            draw.text((left + cell / 2, top + cell + 1), text, fill="black", font=font, anchor="ma")
    return sheet


def evenly_spaced(total: int, n: int) -> list[int]:
    """At most n indices, evenly spaced over a set."""
    return [i * total // min(n, total) for i in range(min(n, total))]


def _sampled(data: StreamedSet, n: int) -> Iterator[Tensor]:
    """Some images, (1, 3, H, W) each; only one at a time is in memory."""
    for index in evenly_spaced(len(data), n):
        yield torch.from_numpy(np.array(in_mode(data.image(index), "RGB"))).permute(2, 0, 1)[None]


def _picture(data: ImageSet | StreamedSet, index: int) -> Image.Image:
    if isinstance(data, StreamedSet):
        return in_mode(data.image(index), "RGB")
    pixels = data.images[index].permute(1, 2, 0).numpy()  # (H, W, D)
    image = Image.fromarray(pixels[..., 0] if pixels.shape[2] != 3 else np.ascontiguousarray(pixels))
    return in_mode(image, "RGB")


def _fitted(image: Image.Image, cell: int) -> Image.Image:
    if max(image.size) <= cell:
        return ImageOps.scale(image, cell // max(image.size), Image.Resampling.NEAREST)
    image = image.copy()
    image.thumbnail((cell, cell), Image.Resampling.LANCZOS)
    return image
