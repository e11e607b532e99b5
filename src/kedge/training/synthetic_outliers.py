"""Outliers made of nothing but training images: each keeps much of how images look, and shows nothing."""

import torch
import torch.nn.functional as F
from torch import Tensor

from kedge.errors import InputError


def jigsaw(images: Tensor) -> Tensor:
    """Tiles of an image, an eighth or a quarter of its side long, in another order."""
    height, width = images.shape[2:]
    share = 8 if torch.rand(()) < 0.5 else 4
    tile = max(1, height // share), max(1, width // share)
    inside = images[:, :, : height // tile[0] * tile[0], : width // tile[1] * tile[1]]
    tiles = F.unfold(inside, tile, stride=tile)  # (B, D * h * w, tiles)
    order = torch.rand(len(images), tiles.shape[2]).argsort(dim=1).to(images.device)
    shuffled = tiles.gather(2, order[:, None].expand_as(tiles))
    mixed = images.clone()
    mixed[:, :, : inside.shape[2], : inside.shape[3]] = F.fold(shuffled, inside.shape[2:], tile, stride=tile)
    return mixed


def remix(images: Tensor) -> Tensor:
    """The coarse shapes of an image under the details of another."""
    (other,) = _others(images, 1)
    return (_coarse(images) + 1.5 * (other - _coarse(other))).clamp(0, 1)


def mismatch(images: Tensor) -> Tensor:
    """What a network sees of the pair ``[c, x - c']``, whose difference is to another anchor than c: x + c - c'."""
    shown, taken = _others(images, 2)
    return (images + shown - taken).clamp(0, 1)


def zoom(images: Tensor) -> Tensor:
    """A small window of an image, a sixth to a third of its side, as large as the image."""
    batch = len(images)
    size = 1 / 6 + torch.rand(batch) / 6
    centre = (2 * torch.rand(batch, 2) - 1) * (1 - size[:, None])
    place = torch.zeros(batch, 2, 3)
    place[:, 0, 0] = place[:, 1, 1] = size
    place[:, :, 2] = centre
    grid = F.affine_grid(place.to(images), list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, mode="bicubic", padding_mode="reflection", align_corners=False).clamp(0, 1)


def recolour(images: Tensor) -> Tensor:
    """The lighter and the darker half of an image, each in one colour."""
    batch, channels = images.shape[:2]
    grey = images.mean(dim=1, keepdim=True)  # (B, 1, H, W)
    middle = grey.flatten(start_dim=1).median(dim=1).values.view(batch, 1, 1, 1)
    light = torch.sigmoid(30 * (grey - middle))
    one, other = torch.rand(2, batch, channels, 1, 1).to(images)
    mixed: Tensor = one * light + other * (1 - light)
    return mixed


def scramble(images: Tensor) -> Tensor:
    """The waves that an image is made of, all at other places."""
    waves = torch.fft.fft2(images)
    noise = torch.fft.fft2(torch.rand(len(images), 1, *images.shape[2:])).to(waves.device)
    moved: Tensor = torch.fft.ifft2(waves * noise / noise.abs().clamp_min(1e-12)).real
    return moved.clamp(0, 1)


MAKERS = {"jigsaw": jigsaw, "remix": remix, "mismatch": mismatch, "zoom": zoom, "recolour": recolour}


OF_SEVERAL = ("remix", "mismatch")  # kinds that need images beside an image
SEVERAL = 3  # so that they are others


def synthetic_outliers(images: Tensor, kinds: tuple[str, ...] = tuple(MAKERS)) -> Tensor:
    """Make an outlier of each image, an equal part of them of every kind; of fewer kinds, drawn, where images are few.

    None are made of one or two images where all kinds need more. Randomness comes from torch's generator: see
    `kedge.anchoring.corruption.seeded`.

    Args:
        images: (B, D, H, W) in [0, 1].
        kinds: Names of `MAKERS`.

    Example:
        >>> synthetic_outliers(torch.rand(10, 3, 32, 32)).shape
        torch.Size([10, 3, 32, 32])
    """
    if images.ndim != 4:
        raise InputError(f"images must be (B, D, H, W) to make outliers of; got {tuple(images.shape)}")
    if len(images) < SEVERAL * len(kinds):
        able = [kind for kind in kinds if len(images) >= SEVERAL or kind not in OF_SEVERAL]
        if not able or not len(images):
            return images[:0]
        drawn = torch.randperm(len(able))[: max(1, len(images) // SEVERAL)]
        kinds = tuple(able[number] for number in drawn.tolist())
    parts = images.tensor_split(len(kinds))
    return torch.cat([MAKERS[kind](part) for kind, part in zip(kinds, parts, strict=True)])


def _others(images: Tensor, count: int) -> list[Tensor]:
    """For each image other images of the batch, no two of them the same."""
    steps = torch.randperm(len(images) - 1)[:count] + 1
    return [images.roll(int(step), dims=0) for step in steps]


def _coarse(images: Tensor) -> Tensor:
    height, width = images.shape[2:]
    small = F.adaptive_avg_pool2d(images, (max(1, height // 4), max(1, width // 4)))
    return F.interpolate(small, size=images.shape[2:], mode="bilinear", align_corners=False)
