"""Score image files with an exported detector, using onnxruntime, numpy and Pillow: no kedge, no torch.

python examples/onnx_only.py detector.onnx photo.jpg
"""

import json
import sys
from typing import Any

import numpy as np
import onnxruntime
from PIL import Image, ImageOps


def score(model: str, files: list[str]) -> dict[str, Any]:
    """Outputs of the detector for 8-bit image files: by name, an array with one value per file."""
    session = onnxruntime.InferenceSession(model)
    rule = json.loads(session.get_modelmeta().custom_metadata_map["kedge.preprocess"])
    channels, height, width = rule["shape"]
    images = [np.asarray(prepared(Image.open(file), rule)).reshape(height, width, channels) for file in files]
    pixels = np.stack(images).transpose(0, 3, 1, 2)
    return dict(zip([o.name for o in session.get_outputs()], session.run(None, {"images": pixels}), strict=True))


def prepared(image: Image.Image, rule: dict[str, Any]) -> Image.Image:
    """The image as the rule in the file's metadata wants it."""
    channels, height, width = rule["shape"]
    how, share = Image.Resampling[rule["resize"].upper()], rule.get("crop", 1)
    image = ImageOps.exif_transpose(image)
    if rule.get("background") and image.has_transparency_data:
        image = Image.alpha_composite(Image.new("RGBA", image.size, rule["background"]), image.convert("RGBA"))
    image = image.convert("L" if channels == 1 else "RGB")
    if rule["fit"] == "stretch":
        return image.resize((width, height), how)
    if share == 1:
        return ImageOps.fit(image, (width, height), how)
    scale = max(round(width / share) / image.width, round(height / share) / image.height)
    sides = max(width, int(image.width * scale + 1e-6)), max(height, int(image.height * scale + 1e-6))
    left, top = round((sides[0] - width) / 2), round((sides[1] - height) / 2)
    return image.resize(sides, how).crop((left, top, left + width, top + height))


def main(model: str, *files: str) -> None:
    """Print the outputs of each file."""
    outputs = score(model, list(files))
    for number, file in enumerate(files):
        print(file, *(f"{name} {values[number]:.3g}" for name, values in outputs.items()), sep="  ")


if __name__ == "__main__":
    main(*sys.argv[1:])
