"""T, the corruption of anchors in consistency training: the paper's five, in pixel space, a draw per image."""

import functools
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch  # noqa: F401 -- for the examples below
from torch import Tensor, nn

from kedge.errors import InputError

Transform = Callable[[Tensor], Tensor]


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
    gray: bool = True

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
    if corruption.gray and colour:
        steps.append(K.RandomGrayscale(p=0.2))
    return nn.Sequential(*steps)
