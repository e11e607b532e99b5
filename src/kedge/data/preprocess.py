"""Preprocess: from files, PIL images, arrays and tensors to the inputs of a network."""

import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from PIL import ExifTags, Image, ImageColor, ImageOps
from torch import Tensor

from kedge.checks import between, finite, layout_hint, one_of, shape_of
from kedge.data.decoding import open_image
from kedge.errors import InputError
from kedge.pixels import dense

FILTERS = {
    "nearest": Image.Resampling.NEAREST,
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
    "lanczos": Image.Resampling.LANCZOS,
}
FITS = ("crop", "stretch")
LARGEST_INPUT = 2**24  # numbers, such as 3 x 2300 x 2300
BATCHES = 32, 256  # images in a batch by default, at least and at most
_BATCH_NUMBERS = 1 << 21  # that a batch aims at: the activations of larger ones do not fit into a processor's cache
_AT_A_TIME = 1 << 20  # pixels in floating point
_LONGEST = 16  # widths of the crop: of a longer image, scaling all of it would take memory without bound


@dataclass(frozen=True)
class Preprocess:
    """Converts and resizes images to a network's input; saved with a detector.

    Args:
        shape: Shape of one input: (D, H, W) for images; vectors and signals must have it already.
        resize: Pillow's filter for PIL images, files and uint8 images of another size.
        fit: ``"crop"`` scales the shorter side and crops the center; ``"stretch"`` does not keep the aspect ratio.
        crop: Share of the scaled image's shorter side that the crop keeps, as networks are evaluated (timm: crop_pct).
        background: The color behind transparent pixels, as Pillow names it; None takes their hidden colors instead.

    Example:
        >>> Preprocess((3, 32, 32))(Image.new("L", (64, 48), 255)).shape
        torch.Size([3, 32, 32])
    """

    shape: tuple[int, ...]
    resize: str = "bicubic"
    fit: str = "crop"
    crop: float = 1.0
    background: str | None = "white"

    def __post_init__(self) -> None:
        one_of("resize", self.resize, tuple(FILTERS))
        one_of("fit", self.fit, FITS)
        if between("crop", self.crop, 0, 1) == 0 or (self.crop < 1 and self.fit == "stretch"):
            raise InputError(f'crop must lie in (0, 1], and be 1 with fit="stretch"; got {self.crop}')
        object.__setattr__(self, "shape", tuple(int(n) for n in self.shape))
        if min(self.shape, default=0) < 1 or math.prod(self.shape) > LARGEST_INPUT:
            raise InputError(f"shape must be of at most {LARGEST_INPUT:,} numbers, and none below 1; got {self.shape}")
        try:
            _ = self.background is None or ImageColor.getrgb(self.background)
        except (ValueError, AttributeError, TypeError) as error:
            raise InputError(f"background must be a color such as 'white', or None; got {self.background!r}") from error

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> "Preprocess":
        """The rule in a file's header; files without a background, of earlier versions, keep hidden colors."""
        return cls(**{"background": None} | dict(record))

    def as_record(self) -> dict[str, Any]:
        """The rule as plain data, as a file gives it back."""
        return {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(self).items()}

    @property
    def is_image(self) -> bool:
        """Whether the inputs are images, (D, H, W), rather than vectors or signals."""
        return len(self.shape) == 3

    @property
    def batch_size(self) -> int:
        """Images in a batch where nothing else is said: 256 of 32 x 32, 32 of 224 x 224.

        Larger batches of photographs take more memory and are slower on a processor.
        """
        return max(BATCHES[0], min(BATCHES[1], _BATCH_NUMBERS // math.prod(self.shape)))

    def __call__(self, item: Any, *, nan: bool = False) -> Tensor:
        """Turn one image (PIL, path, array or tensor) into a tensor of ``shape``; see `batch`."""
        if isinstance(item, (str, os.PathLike)):
            item = open_image(item)
        if isinstance(item, Image.Image):
            return self._from_pil(item)
        if isinstance(item, np.ndarray):
            item = self._channels_first(item[None])[0]
        if not isinstance(item, Tensor):
            raise InputError(f"an image must be a PIL image, a path, an array or a tensor; got {type(item).__name__}")
        return self.batch(dense("images", item)[None], nan=nan)[0]

    def batch(self, images: Tensor | np.ndarray[Any, Any], *, nan: bool = False) -> Tensor:
        """Check a batch (B, D, H, W), or (B, H, W, D) for arrays, and resize it if needed; uint8 or floating point.

        NaN and infinite pixels are refused unless ``nan``.
        """
        x = dense("images", images) if isinstance(images, Tensor) else self._channels_first(images)
        if x.dtype == torch.bool or not (x.is_floating_point() or x.dtype == torch.uint8):
            raise InputError(f"images must be uint8 or floating point in [0, 1], got {x.dtype}")
        if not self.is_image:
            if tuple(x.shape[1:]) != self.shape:
                raise InputError(f"inputs must be {self._expected}, got {tuple(x.shape)}; for one input pass x[None]")
            return x if nan else finite("inputs", x, "drop these inputs")
        if x.ndim != 4 or x.shape[1] != self.shape[0]:
            hint = layout_hint(x.shape, self.shape[0])
            raise InputError(f"images must be {self._expected}, got {tuple(x.shape)}; {hint}")
        if x.is_floating_point():
            low, high = _range(x)
            if not math.isfinite(low + high):
                pixels = x.nan_to_num(0.0, 0.0, 0.0) if nan else finite("images", x, "drop or repair these images")
                low, high = _range(pixels)
            if low < -1e-3 or high > 1 + 1e-3:
                raise InputError(
                    f"floating point images must lie in [0, 1], got values from {low:.3g} to {high:.3g}; pass images "
                    "before normalisation (kedge normalises inside the network), or uint8"
                )
        if tuple(x.shape[2:]) == self.shape[1:]:
            return x
        if x.dtype != torch.uint8:
            raise InputError(
                f"floating point images must be {self._expected}, got {tuple(x.shape)}; "
                "pass uint8 or PIL images to have them resized"
            )
        return torch.stack([self._from_pil(_to_pil(image)) for image in x.cpu()])

    @property
    def _expected(self) -> str:
        return f"(B, {', '.join(map(str, self.shape))})"

    def _channels_first(self, array: np.ndarray[Any, Any]) -> Tensor:
        """Arrays are channels last, as image files are; (B, D, H, W) is accepted where it is unambiguous."""
        if not self.is_image:
            return _tensor(array)
        channels = self.shape[0]
        if array.ndim == 3 and channels == 1 and array.shape[-1] > 1:  # (H, W, 1) is one image, not H of width 1
            array = array[..., None]  # gray images without a channel axis
        if array.ndim != 4 or channels not in (array.shape[-1], array.shape[1]):
            raise InputError(
                f"arrays of images must be (B, H, W, {channels}) or {self._expected}, got {shape_of(array)}; "
                "for one image pass x[None]"
            )
        return _tensor(array.transpose(0, 3, 1, 2) if array.shape[-1] == channels else array)

    def _from_pil(self, image: Image.Image) -> Tensor:
        if not self.is_image:
            raise InputError(f"this network takes inputs {self._expected}, not images")
        channels, height, width = self.shape
        if channels not in (1, 3):
            raise InputError(f"PIL images have 1 or 3 channels and this network takes {channels}; pass an array")
        try:
            image = in_mode(image, "L" if channels == 1 else "RGB", self.background)
        except Exception as error:  # Pillow reads files lazily, so damage may show only here
            raise InputError(f"a PIL image ({image.mode}, {image.size}) cannot be read: {error}") from error
        if 0 in image.size:
            raise InputError(f"an image must have pixels; got one of {image.width} x {image.height}")
        if image.size != (width, height) or self.crop < 1:
            chosen = FILTERS[self.resize]
            if self.fit == "stretch":
                image = image.resize((width, height), chosen)
            elif self.crop < 1:
                image = _scaled_and_cropped(image, width, height, self.crop, chosen)
            else:
                image = ImageOps.fit(image, (width, height), chosen, centering=(0.5, 0.5))
        pixels = torch.from_numpy(np.array(image, dtype=np.uint8))  # (H, W) or (H, W, D)
        return pixels[None] if channels == 1 else pixels.permute(2, 0, 1).contiguous()


def _scaled_and_cropped(
    image: Image.Image, width: int, height: int, share: float, resample: Image.Resampling
) -> Image.Image:
    """Scale the image so that the crop covers a share of its shorter side, then crop the center, as timm does."""
    scale = max(round(width / share) / image.width, round(height / share) / image.height)
    kept = [
        min(side, math.ceil(_LONGEST * crop / scale)) for side, crop in zip(image.size, (width, height), strict=True)
    ]
    if kept != [*image.size]:
        left, top = (image.width - kept[0]) // 2, (image.height - kept[1]) // 2
        image = image.crop((left, top, left + kept[0], top + kept[1]))
    sides = [max(crop, int(side * scale + 1e-6)) for side, crop in ((image.width, width), (image.height, height))]
    image = image.resize((sides[0], sides[1]), resample)
    left, top = round((sides[0] - width) / 2), round((sides[1] - height) / 2)
    return image.crop((left, top, left + width, top + height))


def in_mode(image: Image.Image, mode: str, background: str | None = "white") -> Image.Image:
    """An image upright (by its EXIF tag), in mode "L" or "RGB", on a background, with 16 bits scaled to 8."""
    image.load()
    if image.getexif().get(ExifTags.Base.Orientation, 1) != 1:  # exif_transpose alone would copy upright images too
        image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I") or image.mode == "F":  # Pillow clips 16 bits to 8 instead of scaling them
        image = Image.fromarray(_to_8_bits(np.asarray(image), image.mode))
    if background is not None and image.has_transparency_data:
        image = Image.alpha_composite(Image.new("RGBA", image.size, background), image.convert("RGBA"))
    return image if image.mode == mode else image.convert(mode)


def _range(x: Tensor) -> tuple[float, float]:
    """The smallest and the largest value; NaN if any is."""
    low, high = x.aminmax() if x.numel() else (0.0, 0.0)
    return float(low), float(high)


def _to_8_bits(values: np.ndarray[Any, Any], mode: str) -> np.ndarray[Any, Any]:
    """Gray values (H, W) of 16 or 32 bits, or floating point, as uint8."""
    # "I" has 32 bits, and holds 16-bit images as well as 8-bit ones.
    divisor = 257 if mode.startswith("I;16") or (mode == "I" and values.max(initial=0) > 255) else 1
    scaled = np.empty(values.shape, np.uint8)
    rows = max(1, _AT_A_TIME // max(1, values.shape[1]))
    for top in range(0, len(values), rows):
        part = values[top : top + rows] / divisor
        if np.isnan(part).any():
            raise InputError("pixels must be numbers; some are NaN")
        scaled[top : top + rows] = part.clip(0, 255).round()
    return scaled


def _to_pil(image: Tensor) -> Image.Image:
    array = image.permute(1, 2, 0).numpy()  # (H, W, D)
    if array.shape[2] not in (1, 3):
        raise InputError(f"only images of 1 or 3 channels can be resized, got {array.shape[2]}; resize them yourself")
    return Image.fromarray(array[..., 0] if array.shape[2] == 1 else np.ascontiguousarray(array))


def _tensor(array: np.ndarray[Any, Any]) -> Tensor:
    if array.dtype not in (np.uint8, np.float16, np.float32, np.float64):
        raise InputError(f"arrays must be uint8 or floating point, got {array.dtype}")
    return torch.from_numpy(np.ascontiguousarray(array))
