"""T, the corruption of anchors in consistency training: the paper's five, in pixel space, a draw per image."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kedge.errors import InputError

Transform = Callable[[Tensor], Tensor]

_MASK = (1 << 64) - 1


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed torch's CPU generator inside the block, and put it back as it was afterwards.

    Example:
        >>> with seeded(0):
        ...     first = torch.rand(1)
        >>> with seeded(0):
        ...     print(bool(torch.rand(1) == first))
        True
    """
    state = torch.get_rng_state()
    try:
        torch.default_generator.manual_seed(seed)
        yield
    finally:
        torch.set_rng_state(state)


def mix_seed(seed: int, *more: int) -> int:
    """Derive a seed from several whole numbers, so that neighbouring ones give unrelated draws.

    Example:
        >>> mix_seed(0, 1) != mix_seed(1, 0)
        True
    """
    mixed = 0
    for value in (seed, *more):
        # The finaliser of splitmix64, which spreads every input bit over the whole word.
        mixed = (mixed + 0x9E3779B97F4A7C15 + (value & _MASK)) & _MASK
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
        mixed ^= mixed >> 31
    return mixed >> 1  # torch takes seeds below 2 ** 63


@dataclass(frozen=True)
class Corruption:
    """Resized crop, flip, brightness jitter, blur and grey, each of which can be switched off.

    Randomness comes from torch's generator; `Anchored` calls it inside `seeded`. Jitter and grey act on three-channel
    images only and are left out for others.

    Example:
        >>> images = torch.rand(4, 3, 32, 32)
        >>> Corruption(crop=False)(images).shape
        torch.Size([4, 3, 32, 32])
    """

    crop: bool = True
    flip: bool = True
    jitter: bool = True
    blur: bool = True
    grey: bool = True

    def __call__(self, images: Tensor) -> Tensor:
        """Corrupt a batch of images in [0, 1], each by its own draw."""
        if images.ndim != 4:
            raise InputError(
                f"images must be (B, D, H, W) for the built-in corruption, got {tuple(images.shape)}; "
                "for vectors and signals pass a function of your own as corruption="
            )
        low, high = float(images.min()), float(images.max())
        if low < -1e-3 or high > 1 + 1e-3:
            raise InputError(
                f"images must lie in [0, 1] for the built-in corruption, got values from {low:.3g} to {high:.3g}; "
                "pass images before normalisation and give mean= and std= to kedge.anchor"
            )
        pipeline = _pipeline(self, images.shape[1], tuple(images.shape[2:]))
        corrupted: Tensor = pipeline(images)
        return corrupted.clamp(0, 1)


def describe_corruption(corruption: str | Transform | None) -> Any:
    """What is asked for as T, as JSON holds it; a function of the user's own is left as its name.

    Example:
        >>> describe_corruption(torch.nn.functional.pad)
        {'function': 'pad'}
    """
    if isinstance(corruption, Corruption):
        return asdict(corruption)
    if callable(corruption):
        return {"function": getattr(corruption, "__qualname__", type(corruption).__name__)}
    return corruption


@functools.lru_cache(maxsize=16)
def _pipeline(corruption: Corruption, channels: int, size: tuple[int, int]) -> nn.Module:
    import kornia.augmentation as K  # importing kornia takes a second, which plain inference need not pay

    colour = channels == 3
    # The strengths of the published code. There jitter and blur are switched together with probability 0.8.
    steps: list[Any] = []
    if corruption.crop:
        steps.append(K.RandomResizedCrop(size, scale=(0.6, 1.0), cropping_mode="resample"))
    if corruption.flip:
        steps.append(K.RandomHorizontalFlip(p=0.5))
    if corruption.jitter and colour:
        steps.append(K.ColorJitter(brightness=0.5, p=0.8))
    if corruption.blur:
        kernel = min(9, 2 * size[0] - 1), min(3, 2 * size[1] - 1)  # reflecting, it reaches no further than the image
        steps.append(K.RandomGaussianBlur(kernel_size=kernel, sigma=(0.1, 5.0), p=0.8))
    if corruption.grey and colour:
        steps.append(K.RandomGrayscale(p=0.2))
    return nn.Sequential(*steps)
