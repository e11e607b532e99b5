"""Pixels that stay on disk: written once, part by part, and memory-mapped."""

import hashlib
import json
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kedge.errors import FileFormatError
from kedge.files import atomic, file_name


def mapped_pixels(
    folder: Path, name: str, identity: Any, shape: tuple[int, ...], parts: Callable[[], Iterable[Tensor]]
) -> Tensor:
    """A uint8 tensor in a file, memory-mapped; only the parts in use are in memory.

    Args:
        folder: For files of this kind.
        name: Of the images, for the file's name.
        identity: What the pixels are made of, as plain data; a file of the same identity is opened, not made again.
        shape: Of all parts together.
        parts: Makes the tensors (n, D, H, W) to write, one after another.
    """
    digest = hashlib.sha256(json.dumps([identity, shape], sort_keys=True).encode()).hexdigest()
    path = folder / f"{file_name(name)}-{digest[:12]}.npy"
    if not path.exists():
        with atomic(path) as temporary, temporary.open("wb") as file:
            header = {"descr": "|u1", "fortran_order": False, "shape": shape}
            np.lib.format.write_array_header_1_0(file, header)
            for part in parts():
                file.write(part.contiguous().numpy().data)
    try:
        array = np.load(path, mmap_mode="c", allow_pickle=False)  # of a file that is too short this is an error
    except (OSError, ValueError, EOFError, SyntaxError) as error:
        raise FileFormatError(f"{path} is damaged: {error}; delete it to have it made again") from error
    if array.shape != shape or array.dtype != np.uint8:
        came = f"{array.dtype} {array.shape}"
        raise FileFormatError(f"{path} must hold uint8 {shape}, not {came}; delete it to have it made again")
    return torch.from_numpy(array) if math.prod(shape) else torch.empty(shape, dtype=torch.uint8)
