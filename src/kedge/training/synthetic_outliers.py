"""Synthetic outliers made from training images: they keep many statistics of an image and none of its content."""

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from kedge.errors import InputError


def patch_shuffle(images: Tensor, generator: Generator) -> Tensor:
    """Patches of each image, an eighth or a quarter of its side long, in random order."""
    height, width = images.shape[2:]
    share = 8 if torch.rand((), generator=generator) < 0.5 else 4
    tile = max(1, height // share), max(1, width // share)
    inside = images[:, :, : height // tile[0] * tile[0], : width // tile[1] * tile[1]]
    tiles = F.unfold(inside, tile, stride=tile)  # (B, D * h * w, tiles)
    order = torch.rand(len(images), tiles.shape[2], generator=generator).argsort(dim=1).to(images.device)
    shuffled = tiles.gather(2, order[:, None].expand_as(tiles))
    result = images.clone()
    result[:, :, : inside.shape[2], : inside.shape[3]] = F.fold(shuffled, inside.shape[2:], tile, stride=tile)
    return result


def hybrid(images: Tensor, generator: Generator) -> Tensor:
    """Low frequencies of each image with the high frequencies of another."""
    (other,) = _others(images, 1, generator)
    return (_coarse(images) + 1.5 * (other - _coarse(other))).clamp(0, 1)


def mismatch(images: Tensor, generator: Generator) -> Tensor:
    """Sum of the pair ``[c, x - c']``, whose residual belongs to another anchor than c: x + c - c'."""
    shown, taken = _others(images, 2, generator)
    return (images + shown - taken).clamp(0, 1)


def zoom(images: Tensor, generator: Generator) -> Tensor:
    """A random window of each image, a sixth to a third of its side, enlarged to the size of the image."""
    batch = len(images)
    size = 1 / 6 + torch.rand(batch, generator=generator) / 6
    center = (2 * torch.rand(batch, 2, generator=generator) - 1) * (1 - size[:, None])
    window = torch.zeros(batch, 2, 3)
    window[:, 0, 0] = window[:, 1, 1] = size
    window[:, :, 2] = center
    grid = F.affine_grid(window.to(images), list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, mode="bicubic", padding_mode="reflection", align_corners=False).clamp(0, 1)


def recolor(images: Tensor, generator: Generator) -> Tensor:
    """The lighter and the darker half of each image, each in one random color."""
    batch, channels = images.shape[:2]
    gray = images.mean(dim=1, keepdim=True)  # (B, 1, H, W)
    median = gray.flatten(start_dim=1).median(dim=1).values.view(batch, 1, 1, 1)
    light = torch.sigmoid(30 * (gray - median))
    one, other = torch.rand(2, batch, channels, 1, 1, generator=generator).to(images)
    result: Tensor = one * light + other * (1 - light)
    return result


def phase_randomization(images: Tensor, generator: Generator) -> Tensor:
    """Each image with its amplitude spectrum and random phases. Kept for evaluation, so not in `KINDS`."""
    spectrum = torch.fft.fft2(images)
    noise = torch.fft.fft2(torch.rand(len(images), 1, *images.shape[2:], generator=generator)).to(spectrum.device)
    result: Tensor = torch.fft.ifft2(spectrum * noise / noise.abs().clamp_min(1e-12)).real
    return result.clamp(0, 1)


KINDS = {"patch_shuffle": patch_shuffle, "hybrid": hybrid, "mismatch": mismatch, "zoom": zoom, "recolor": recolor}
NEED_OTHERS = ("hybrid", "mismatch")  # kinds that combine several images
SEVERAL = 3  # images that these need


def synthetic_outliers(images: Tensor, kinds: tuple[str, ...] = tuple(KINDS), *, generator: Generator) -> Tensor:
    """Make one outlier from each image, the same number of each kind; from few images, of fewer kinds, drawn at random.

    Returns none for one or two images if all kinds need more.

    Args:
        images: (B, D, H, W) in [0, 1].
        kinds: Names in `KINDS`.
        generator: Source of random numbers, on the CPU.

    Example:
        >>> synthetic_outliers(torch.rand(10, 3, 32, 32), generator=Generator().manual_seed(0)).shape
        torch.Size([10, 3, 32, 32])
    """
    if images.ndim != 4:
        raise InputError(f"images must be (B, D, H, W) to make outliers of; got {tuple(images.shape)}")
    if len(images) < SEVERAL * len(kinds):
        able = [kind for kind in kinds if len(images) >= SEVERAL or kind not in NEED_OTHERS]
        if not able or not len(images):
            return images[:0]
        drawn = torch.randperm(len(able), generator=generator)[: max(1, len(images) // SEVERAL)]
        kinds = tuple(able[number] for number in drawn.tolist())
    parts = images.tensor_split(len(kinds))
    return torch.cat([KINDS[kind](part, generator) for kind, part in zip(kinds, parts, strict=True)])


def _others(images: Tensor, count: int, generator: Generator) -> list[Tensor]:
    """``count`` other images of the batch for each image, all different."""
    shifts = torch.randperm(len(images) - 1, generator=generator)[:count] + 1
    return [images.roll(int(shift), dims=0) for shift in shifts]


def _coarse(images: Tensor) -> Tensor:
    height, width = images.shape[2:]
    small = F.adaptive_avg_pool2d(images, (max(1, height // 4), max(1, width // 4)))
    return F.interpolate(small, size=images.shape[2:], mode="bilinear", align_corners=False)
