"""The file format: tensors and a JSON header in one safetensors file. Reading it never runs code from it."""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from kedge.errors import FileFormatError, InputError, KedgeError
from kedge.files import atomic
from kedge.io.schema import check

FORMAT_VERSION = 3
SHIPPED = Path(__file__).parent.parent / "shipped"
_KEY = "kedge"
_AT_ONCE = 2**24  # numbers that are looked at together, so that a large bank is not copied
_WORTH_PACKING = 1024  # numbers; below it a tensor is small whatever it is stored in


def shipped() -> list[str]:
    """The names of the detectors that come with kedge, each with a model card next to it."""
    return sorted(path.stem for path in SHIPPED.glob("*.kedge"))


def locate(path: str | os.PathLike[str]) -> Path:
    """The file of a detector: the path itself, or, if there is no such file, the shipped one of that name."""
    is_name = not Path(path).is_file() and str(path) in shipped()
    return SHIPPED / f"{path}.kedge" if is_name else Path(path)


def write(path: str | os.PathLike[str], header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Write a header and tensors to one file, whole or not at all; float32 that fits float16 exactly is packed as that.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "a.kedge"
        >>> write(path, {"kind": "example"}, {"x": torch.ones(2)})
        >>> read_header(path)["kind"], read(path)[1]["x"]
        ('example', tensor([1., 1.]))
    """
    content = _apart({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()})
    packed = sorted(name for name, tensor in content.items() if _fits_half(tensor))
    content |= {name: content[name].half() for name in packed}
    body = {"version": FORMAT_VERSION, **header, "packed": packed}
    body["sha256"] = _digest(body, content)
    with atomic(path) as temporary:
        try:
            save_file(content, temporary, metadata={_KEY: json.dumps(body, allow_nan=True)})
        except SafetensorError as error:  # how it reports a full disk
            raise OSError(str(error)) from error


def read_header(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The header of a file, with the ``sha256`` of its content; the tensors are neither read nor checked."""
    with _opened(path) as (header, _):
        return header


def read_tensor(path: str | os.PathLike[str], name: str) -> Tensor:
    """One tensor of a file, not checked; for tensors in double precision, which are never packed."""
    with _opened(path) as (_, opened):
        tensor: Tensor = opened.get_tensor(name)
        return tensor


def read(
    path: str | os.PathLike[str], *, expected_sha256: str | None = None
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read a file that `write` wrote; damage, tampering and other versions are errors.

    Args:
        path: The file.
        expected_sha256: SHA-256 of the whole file, as ``sha256sum`` prints it, from a source that you trust.
    """
    if expected_sha256 is not None and locate(path).is_file():
        with locate(path).open("rb") as file:
            actual = hashlib.file_digest(file, "sha256").hexdigest()
        if actual != expected_sha256.strip().lower():
            raise FileFormatError(f"{path} must have the sha256 {expected_sha256}; it has {actual}: get the right file")
    with _opened(path) as (header, opened):
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 -- not a mapping
    if header.pop("sha256") != _digest(header, tensors):
        raise FileFormatError(f"{path} was changed after it was saved: its sha256 does not match; get a fresh copy")
    packed = header.pop("packed", [])  # files of version 1 have none
    check(packed, list[str], f"{path} has a damaged header: packed")
    if missing := set(packed) - set(tensors):
        raise FileFormatError(f"{path} has a damaged header: there are no tensors {', '.join(sorted(missing))}")
    return header, tensors | {name: tensors[name].float() for name in packed}


@contextmanager
def _opened(given: str | os.PathLike[str]) -> Iterator[tuple[dict[str, Any], Any]]:
    """The header of a file, and the open file to read tensors from."""
    path = locate(given)
    if not path.is_file():
        names = ", ".join(shipped())
        raise InputError(f"{path} must be a saved detector, or one of kedge's own ({names}); there is no such file")
    try:
        with safe_open(path, framework="pt") as opened:
            yield _header(path, opened.metadata() or {}), opened
    except KedgeError:
        raise
    except (SafetensorError, OSError, ValueError) as error:
        raise FileFormatError(f"{path} is truncated or is not a kedge file: {error}") from error


def _header(path: Path, metadata: Mapping[str, str]) -> dict[str, Any]:
    if _KEY not in metadata:
        raise FileFormatError(f"{path} is a safetensors file, but kedge did not write it: it has no kedge header")
    try:
        header: dict[str, Any] = json.loads(metadata[_KEY])
        version, _ = header["version"], header["sha256"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise FileFormatError(f"{path} has a damaged header: {error}") from error
    if type(version) is not int or not 1 <= version <= FORMAT_VERSION:
        raise FileFormatError(
            f"{path} has format version {version!r}; this kedge reads 1 to {FORMAT_VERSION}: install a newer kedge"
        )
    return header


def part(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Any]:
    """The tensors whose names begin with a prefix, without it."""
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def _apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors, those copied that are part of larger memory or share it, which safetensors refuses."""
    seen: set[int] = set()
    result = {}
    for name, tensor in tensors.items():
        memory = tensor.untyped_storage()
        whole = memory.nbytes() == tensor.numel() * tensor.element_size() and memory.data_ptr() not in seen
        seen.add(memory.data_ptr())
        result[name] = tensor if whole else tensor.clone()
    return result


def _fits_half(tensor: Tensor) -> bool:
    worth = tensor.dtype == torch.float32 and tensor.numel() >= _WORTH_PACKING
    return worth and all(torch.equal(part.half().float(), part) for part in tensor.reshape(-1).split(_AT_ONCE))


def _digest(header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256(json.dumps(header, sort_keys=True, allow_nan=True).encode())
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        digest.update(f"\n{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
