"""PixMix: training images mixed with altered copies of themselves and with fractals (Hendrycks et al., CVPR 2022).

The fractals are Julia sets that kedge draws, where the paper collected pictures of fractals. Operations and constants
are those of the paper's code for CIFAR, without the operations that overlap with common corruptions.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from kedge.pixels import to_unit
from kedge.seeds import mix_seed
from kedge.training.augment import crop_and_flip, uniforms

ROUNDS = 4  # at most so many mixings for an image: k of the paper
STRENGTH = 3  # beta of the paper: a larger one leaves more of the image
SEVERITY = 3  # of altered copies, out of 10
PICTURES = 256  # fractals that a training draws from
SHIFT = 16  # a fractal is shifted by at most one part in so many
ITERATIONS = 32
OPERATIONS = 9
SALT = 0x7069786D  # sets these draws apart from those of crops and flips
ALTERING = 3  # draws of an altered copy: operation, level, sign
DRAWS = 1 + ALTERING + 1 + ROUNDS * (1 + ALTERING + 4) + 4


class PixMix:
    """Mixes the images of a batch, each by draws that depend on the seed, the epoch and its index alone.

    Args:
        shape: Of one image, (D, H, W).
        seed: Of the fractals and the draws.

    Example:
        >>> PixMix((3, 8, 8), seed=0)(torch.rand(2, 3, 8, 8), 0, torch.arange(2)).shape
        torch.Size([2, 3, 8, 8])
    """

    def __init__(self, shape: tuple[int, ...], seed: int) -> None:
        self.seed, self.padding = mix_seed(seed, SALT), min(shape[1:]) // SHIFT
        generator = torch.Generator().manual_seed(self.seed)
        self.fractals = torch.cat([fractals(8, shape, generator) for _ in range(PICTURES // 8)])  # (N, D, H, W)

    def __call__(self, images: Tensor, epoch: int, index: Tensor) -> Tensor:
        """Images (B, D, H, W) in [0, 1], mixed."""
        draws = uniforms(self.seed, epoch, index, DRAWS).to(images)
        return pixmix(images, self.pictures(draws[:, -4:]), draws[:, :-4])

    def pictures(self, draws: Tensor) -> Tensor:
        """A fractal for each image, shifted and flipped at random."""
        chosen = self.fractals[(draws[:, 0] * len(self.fractals)).long()]
        return to_unit(crop_and_flip(chosen, draws[:, 1:], padding=self.padding, flip=True, pad="reflect")).to(draws)


def pixmix(images: Tensor, pictures: Tensor, draws: Tensor) -> Tensor:
    """Mix images (B, D, H, W) in [0, 1] with pictures of their shape.

    It starts with the image or an altered copy of it. In each of 0 to ``ROUNDS`` rounds it is mixed with another
    altered copy or with the picture, by a weighted sum or a weighted product.

    Args:
        images: (B, D, H, W) in [0, 1].
        pictures: The same shape.
        draws: Uniform numbers, (B, DRAWS - 4).
    """
    columns = iter(draws.split([1, ALTERING, 1, *[1, ALTERING, 4] * ROUNDS], dim=1))
    mixed = _altered_or(images, images, next(columns), next(columns))
    rounds = (next(columns)[:, 0] * (ROUNDS + 1)).long()  # (B,)
    for number in range(ROUNDS):
        rows = number < rounds
        other = _altered_or(pictures[rows], images[rows], next(columns)[rows], next(columns)[rows])
        kind, growing, first, second = next(columns)[rows].unbind(1)
        # Beta(s, 1) and Beta(1, s) are powers of uniform numbers.
        shrunk, small = first ** (1 / STRENGTH), 1 - second ** (1 / STRENGTH)
        a = torch.where(growing < 0.5, shrunk, 2 - shrunk)
        b = torch.where(growing < 0.5, small, -small)
        result, product = add(mixed[rows], other, a, b), kind >= 0.5
        result[product] = multiply(mixed[rows][product], other[product], a[product], b[product])
        mixed[rows] = result.clamp(0, 1)
    return mixed


def add(one: Tensor, other: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """The weighted sum of images in [-1, 1], given and returned in [0, 1]."""
    return (_each(a) * (2 * one - 1) + _each(b) * (2 * other - 1) + 1) / 2


def multiply(one: Tensor, other: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """The weighted product of images in [0, 2], given and returned in [0, 1]."""
    return (2 * one) ** _each(a) * (2 * other).clamp_min(1e-37) ** _each(b) / 2


def altered(images: Tensor, draws: Tensor) -> Tensor:
    """Each image after one random operation; ``draws`` (B, 3) are for the operation, its level and its sign."""
    operation = (draws[:, 0] * OPERATIONS).long()
    level = (0.1 + draws[:, 1] * (SEVERITY - 0.1)) / 10  # (B,)
    signed = torch.where(draws[:, 2] < 0.5, -level, level)
    result = images.clone()
    for number, function in enumerate((_autocontrast, _equalize, _posterize, _solarize)):
        rows = operation == number
        result[rows] = function(images[rows], level[rows])
    rows = operation >= 4
    if bool(rows.any()):
        grid = F.affine_grid(_moves(operation[rows] - 4, signed[rows], images), list(images[rows].shape), False)
        result[rows] = F.grid_sample(images[rows], grid, align_corners=False)
    return result


def _moves(kind: Tensor, amount: Tensor, images: Tensor) -> Tensor:
    """Affine matrices (B, 2, 3) by kind: rotate, shear in x and in y, shift in x and in y."""
    height, width = images.shape[2:]
    angle = torch.where(kind == 0, amount * math.pi / 6, 0.0)
    sine = torch.stack([-angle.sin() * height / width, angle.sin() * width / height], dim=1)
    matrix = F.pad(torch.diag_embed(angle.cos()[:, None].expand(-1, 2)), (0, 1))
    matrix[:, 0, 1] = sine[:, 0] + torch.where(kind == 1, 0.3 * amount * height / width, 0.0)
    matrix[:, 1, 0] = sine[:, 1] + torch.where(kind == 2, 0.3 * amount * width / height, 0.0)
    matrix[:, 0, 2] = torch.where(kind == 3, 2 / 3 * amount, 0.0)
    matrix[:, 1, 2] = torch.where(kind == 4, 2 / 3 * amount, 0.0)
    return matrix


def fractals(count: int, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Julia sets of z^2 + c in random colors, uint8 (count, D, H, W).

    The points c lie along the border of the Mandelbrot set's main body, where Julia sets are intricate.
    """
    channels, height, width = shape
    u = torch.rand(count, 6, generator=generator)
    t = 2 * math.pi * u[:, 0]
    body = torch.polar(torch.full_like(t, 0.5), t) - torch.polar(torch.full_like(t, 0.25), 2 * t)
    c = (body * (1 + 0.1 * u[:, 1])).view(-1, 1, 1)
    zoom = (0.4 + 1.2 * u[:, 2]).view(-1, 1, 1)
    y, x = torch.meshgrid(torch.linspace(-1, 1, height), torch.linspace(-1, 1, width), indexing="ij")
    z = torch.polar(zoom, (2 * math.pi * u[:, 3]).view(-1, 1, 1)) * torch.complex(x, y)
    z = z + torch.complex(u[:, 4] - 0.5, u[:, 5] - 0.5).view(-1, 1, 1)
    escaped = torch.zeros(count, height, width)
    for _ in range(ITERATIONS):
        z = z * z + c
        inside = z.abs() < 4
        z = torch.where(inside, z, 4)  # stays outside, without overflow
        escaped += inside
    escaped = (escaped + (1 + z.abs()).log() / 4)[:, None]  # (N, 1, H, W)
    rate, phase = torch.rand(2, count, channels, 1, 1, generator=generator)
    colors = 0.5 + 0.5 * torch.cos((0.1 + 0.7 * rate) * escaped + 2 * math.pi * phase)
    return (255 * colors).round().to(torch.uint8)


def _autocontrast(images: Tensor, level: Tensor) -> Tensor:
    low, high = images.amin(dim=(2, 3), keepdim=True), images.amax(dim=(2, 3), keepdim=True)
    return torch.where(high > low, (images - low) / (high - low).clamp_min(1e-12), images)


def _equalize(images: Tensor, level: Tensor) -> Tensor:
    """Each channel's pixels by the share of pixels that are not brighter, over 256 levels."""
    values = (images.flatten(2) * 255).round().long()  # (B, D, HW)
    counts = images.new_zeros(*values.shape[:2], 256).scatter_add_(2, values, images.new_ones(values.shape))
    return (counts.cumsum(dim=2) / values.shape[2]).gather(2, values).view_as(images)


def _posterize(images: Tensor, level: Tensor) -> Tensor:
    steps = _each(2 ** (4 - (4 * level).floor()))  # four bits, or fewer
    return (images * 255 / 256 * steps).floor() / steps * 256 / 255


def _solarize(images: Tensor, level: Tensor) -> Tensor:
    return torch.where(images < _each(1 - level), images, 1 - images)


def _each(values: Tensor) -> Tensor:
    return values.view(-1, 1, 1, 1)


def _altered_or(otherwise: Tensor, images: Tensor, chosen: Tensor, draws: Tensor) -> Tensor:
    """Altered images where ``chosen`` (B, 1) is below one half, else those of ``otherwise``."""
    result, rows = otherwise.clone(), chosen[:, 0] < 0.5
    result[rows] = altered(images[rows], draws[rows])
    return result
