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
    resize = ImageOps.fit if rule["fit"] == "crop" else Image.Image.resize
    images = [ImageOps.exif_transpose(Image.open(file)).convert("L" if channels == 1 else "RGB") for file in files]
    small = [resize(image, (width, height), Image.Resampling[rule["resize"].upper()]) for image in images]
    pixels = np.stack([np.asarray(image).reshape(height, width, channels).transpose(2, 0, 1) for image in small])
    return dict(zip([o.name for o in session.get_outputs()], session.run(None, {"images": pixels}), strict=True))


def main(model: str, *files: str) -> None:
    """Print the outputs of each file."""
    outputs = score(model, list(files))
    for number, file in enumerate(files):
        print(file, *(f"{name} {values[number]:.3g}" for name, values in outputs.items()), sep="  ")


if __name__ == "__main__":
    main(*sys.argv[1:])
