"""T, the corruption of anchors in consistency training: the paper's five, in pixel space, or noise on features."""

import functools
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kedge.checks import between, shape_of
from kedge.errors import InputError
from kedge.seeds import seeded

Transform = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Corruption:
    """Resized crop, flip, brightness jitter, blur and grayscale, each of which can be switched off.

    Jitter and grayscale act on three-channel images only. kornia draws from torch's global generator, so `Anchored`
    calls it inside `seeded`.

    Args:
        crop: Crop and resize.
        flip: Mirror half of the images.
        jitter: Change the brightness of four fifths of the images.
        blur: Blur four fifths of the images.
        gray: Make a fifth of the images gray.
        crop_scale: The least and the largest share of the image's area to crop; the paper's Algorithm 1, for ImageNet,
            has (0.08, 1).
        joint_jitter_blur: Whether one draw decides on jitter and blur together, as in the published code.

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
    crop_scale: tuple[float, float] = (0.6, 1.0)
    joint_jitter_blur: bool = False

    def __post_init__(self) -> None:
        scale = tuple(self.crop_scale)  # a list if it comes from a file
        if len(scale) != 2 or not 0 < scale[0] <= scale[1] <= 1:
            raise InputError(f"crop_scale must be two shares, 0 < low <= high <= 1; got {self.crop_scale}")
        object.__setattr__(self, "crop_scale", scale)

    def __call__(self, images: Tensor) -> Tensor:
        """Corrupt a batch of images in [0, 1], each by its own draw."""
        if images.ndim != 4:
            raise InputError(
                f"images must be (B, D, H, W) for the built-in corruption, got {tuple(images.shape)}; "
                "for vectors and signals pass a function of your own as corruption="
            )
        if len(images) == 0:  # a random share of a small batch
            return images
        low, high = float(images.min()), float(images.max())
        if low < -1e-3 or high > 1 + 1e-3:
            raise InputError(
                f"images must lie in [0, 1] for the built-in corruption, got values from {low:.3g} to {high:.3g}; "
                "pass images before normalisation and give mean= and std= to kedge.anchor"
            )
        corrupted: Tensor = _pipeline(self, images.shape[1], tuple(images.shape[2:]))(images)
        return corrupted.clamp(0, 1)


@dataclass(frozen=True)
class FeatureNoise:
    """Normal noise on anchors as they reach the anchored layer, for one inside a network or on features.

    Args:
        scale: The noise's deviation, relative to that of each feature over the batch.

    Example:
        >>> net = nn.Sequential(nn.Flatten(), nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> from kedge import anchor
        >>> anchor(net, layer="3", corruption=FeatureNoise(0.5), every=1).train()(torch.rand(4, 3, 2, 2)).shape
        torch.Size([4, 2])
    """

    scale: float = 0.5

    def __post_init__(self) -> None:
        between("scale", self.scale, 0, 100)

    def __call__(self, features: Tensor) -> Tensor:
        """Add noise to features (B, ...) of a batch."""
        return features + self.scale * features.std(dim=0, correction=0) * torch.randn_like(features)


class FeatureViews:
    """The features of anchors in augmented views of their images, for a head on features; a view is drawn every time.

    Args:
        features: All anchors that may come, (N, d).
        views: The features of the same images in each view, (V, N, d).

    Example:
        >>> flipped = FeatureViews(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[[2.0, 1.0], [4.0, 3.0]]]))
        >>> flipped(torch.tensor([[3.0, 4.0]]))
        tensor([[4., 3.]])
    """

    def __init__(self, features: Tensor, views: Tensor) -> None:
        if views.shape[1:] != features.shape:
            raise InputError(f"views must be (V, {len(features)}, {features.shape[1]}); got {tuple(views.shape)}")
        self.views = views
        self._rows = {key: row for row, key in enumerate(_keys(features))}

    def __call__(self, anchors: Tensor) -> Tensor:
        """The anchors (B, d), each in one of its views."""
        view = torch.randint(len(self.views), (len(anchors),))
        return self.views[view, [self._rows[key] for key in _keys(anchors)]]


def _keys(features: Tensor) -> list[bytes]:
    return [row.tobytes() for row in features.detach().cpu().numpy()]


def corrupted_anchors(
    corruption: Transform, anchors: Tensor, *, seed: int, chosen: Tensor | None, all_together: bool = False
) -> Tensor:
    """T of all anchors or of the ``chosen`` ones; ``all_together`` if it depends on the others."""
    taken = anchors if chosen is None or all_together else anchors[chosen]
    with seeded(seed):
        corrupted = corruption(taken)
    if shape_of(corrupted) != shape_of(taken):
        raise InputError(f"corruption must keep the shape {shape_of(taken)}, got {shape_of(corrupted)}")
    if chosen is None:
        return corrupted
    corrupted = corrupted[chosen] if all_together else corrupted
    return anchors.index_put((chosen,), corrupted.to(anchors.dtype))


def describe_corruption(corruption: str | Transform | None) -> Any:
    """The option ``corruption`` as plain data; of a function of the user's own only the name is kept."""
    if isinstance(corruption, (Corruption, FeatureNoise)):
        return asdict(corruption)
    if callable(corruption):
        return {"function": getattr(corruption, "__qualname__", type(corruption).__name__)}
    return corruption


@functools.lru_cache(maxsize=16)
def _pipeline(corruption: Corruption, channels: int, size: tuple[int, int]) -> nn.Module:
    import kornia.augmentation as K  # importing kornia takes a second, which inference need not pay

    kernel = min(9, 2 * size[0] - 1), min(3, 2 * size[1] - 1)  # reflecting, it reaches no further than the image
    joint, color = corruption.joint_jitter_blur, channels == 3
    p = 1.0 if joint else 0.8
    both = [  # with the strengths of the published code
        (corruption.jitter and color, K.ColorJitter(brightness=0.5, p=p)),
        (corruption.blur, K.RandomGaussianBlur(kernel_size=kernel, sigma=(0.1, 5.0), p=p)),
    ]
    steps = [
        (corruption.crop, K.RandomResizedCrop(size, scale=corruption.crop_scale, cropping_mode="resample")),
        (corruption.flip, K.RandomHorizontalFlip(p=0.5)),
        *([(True, _Together([step for used, step in both if used], p=0.8))] if joint else both),
        (corruption.gray and color, K.RandomGrayscale(p=0.2)),
    ]
    return nn.Sequential(*(step for used, step in steps if used))


class _Together(nn.Module):
    """Apply all steps to an image with probability p, or none; torchvision's RandomApply, per image."""

    def __init__(self, steps: list[nn.Module], p: float) -> None:
        super().__init__()
        self.steps, self.p = nn.Sequential(*steps), p

    def forward(self, images: Tensor) -> Tensor:
        chosen = torch.rand(len(images)) < self.p
        return torch.where(chosen.to(images.device).view(-1, 1, 1, 1), self.steps(images), images)
