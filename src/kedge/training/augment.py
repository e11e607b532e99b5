"""Random crops and flips. The draw of an image depends on the seed, the epoch and its index in the set alone."""

import math

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from kedge.data import Preprocess
from kedge.data.preprocess import FILTERS, in_mode
from kedge.training.recipes import Recipe

CROP_DRAWS = 40  # uniform numbers of a resized crop: ten attempts


def uniforms(seed: int, epoch: int, indices: Tensor, n: int) -> Tensor:
    """``n`` uniform numbers in [0, 1) for each image index, (B,) -> (B, n), independent of the batch and process."""
    first = indices.cpu().numpy().astype(np.uint64)[:, None] * np.uint64(n)  # (B, 1)
    keys: NDArray[np.uint64] = np.add(first, np.arange(n), dtype=np.uint64, casting="unsafe")
    for salt in (seed, epoch):
        keys = _mix(keys ^ _mix(np.asarray(salt & (2**64 - 1), dtype=np.uint64)))
    return torch.from_numpy((keys >> np.uint64(11)).astype(np.float64) / 2**53)


def crop_and_flip(images: Tensor, draws: Tensor, *, padding: int, flip: bool, pad: str = "zeros") -> Tensor:
    """Shift each image by up to ``padding`` pixels, and flip it if its last draw is below one half.

    ``draws`` (B, 3) are uniform numbers for row, column and flip; ``pad`` is ``"zeros"`` or ``"reflect"``.
    """
    height, width = images.shape[2:]
    draws = draws.to(images.device)
    rows = torch.arange(height, device=images.device) + (draws[:, 0:1] * (2 * padding + 1)).long()  # (B, H)
    columns = torch.arange(width, device=images.device) + (draws[:, 1:2] * (2 * padding + 1)).long()  # (B, W)
    if flip:
        columns = torch.where(draws[:, 2:3] < 0.5, columns.flip(1), columns)
    if padding and pad == "reflect":  # which does not support uint8
        padded = F.pad(images.float(), (padding,) * 4, mode="reflect").to(images.dtype)
    else:
        padded = F.pad(images, (padding,) * 4) if padding else images
    batch = torch.arange(len(images), device=images.device)[:, None, None]
    cropped = padded.permute(0, 2, 3, 1)[batch, rows[:, :, None], columns[:, None, :]]  # (B, H, W, D)
    return cropped.permute(0, 3, 1, 2)


def augment(images: Tensor, recipe: Recipe, seed: int, epoch: int, index: Tensor) -> Tensor:
    """Crop and flip a batch by a recipe; ``index`` are the images' indices in the set."""
    if images.ndim != 4:
        return images
    if recipe.resized_crop:
        images = resized_crops(images, uniforms(seed, epoch, index, CROP_DRAWS), recipe.smallest_crop)
    if not (recipe.crop or recipe.flip):
        return images
    draws = uniforms(seed, epoch, index, 3)
    if recipe.alternate:
        first = uniforms(seed, 0, index, 3)[:, 2]  # as in the first epoch, then the other way, in turn
        draws[:, 2] = first if epoch % 2 == 0 else 1 - first
    return crop_and_flip(images, draws, padding=recipe.crop, flip=recipe.flip, pad=recipe.pad)


def random_resized_crop(image: Image.Image, preprocess: Preprocess, draws: Tensor, smallest: float) -> Image.Image:
    """Crop a random part of at least a share of the area, and resize it to the network's input; see `_box`."""
    image = in_mode(image, "L" if preprocess.shape[0] == 1 else "RGB", preprocess.background)
    target = (preprocess.shape[2], preprocess.shape[1])
    return image.resize(target, FILTERS[preprocess.resize], box=_box(image.width, image.height, draws, smallest))


def resized_crops(images: Tensor, draws: Tensor, smallest: float) -> Tensor:
    """Such crops of a batch (B, D, H, W), bilinear, of the images' own size; ``draws`` (B, 4 per attempt)."""
    height, width = images.shape[2:]
    boxes = torch.tensor([_box(width, height, each, smallest) for each in draws], device=images.device)
    left, top, right, bottom = boxes.T
    zero = torch.zeros_like(left)
    columns = torch.stack([(right - left) / width, zero, (left + right) / width - 1], dim=1)
    rows = torch.stack([zero, (bottom - top) / height, (top + bottom) / height - 1], dim=1)
    pixels = images if images.is_floating_point() else images.float()
    grid = F.affine_grid(torch.stack([columns, rows], dim=1).to(pixels), list(images.shape), align_corners=False)
    crops = F.grid_sample(pixels, grid, padding_mode="border", align_corners=False)
    return crops if images.is_floating_point() else crops.round_().to(images.dtype)


def _box(width: int, height: int, draws: Tensor, smallest: float) -> tuple[float, float, float, float]:
    """Left, top, right and bottom of a random part with aspect ratio 3:4 to 4:3.

    ``draws`` are uniform numbers, four for each attempt to fit such a part into the image.
    """
    for scale, shape, left, top in draws.view(-1, 4).tolist():
        area = (smallest + (1 - smallest) * scale) * width * height
        ratio = math.exp(math.log(3 / 4) + shape * math.log(16 / 9))
        w, h = math.sqrt(area * ratio), math.sqrt(area / ratio)
        if w <= width and h <= height:
            return (left * (width - w), top * (height - h), left * (width - w) + w, top * (height - h) + h)
    side = min(width, height)  # no attempt fitted: center crop
    return ((width - side) / 2, (height - side) / 2, (width + side) / 2, (height + side) / 2)


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Finalizer of splitmix64 on arrays, with wrap-around overflow."""
    with np.errstate(over="ignore"):
        values = values + np.uint64(0x9E3779B97F4A7C15)
        values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return values ^ (values >> np.uint64(31))
