"""Detectors on the Hugging Face hub: a repository holds ``detector.kedge`` and a model card.

huggingface_hub's mixin is a base class, which an optional dependency cannot be; `HfApi` does the transfers.
"""

import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

from torch import nn

from kedge.checks import needs
from kedge.detectors import Detector, load
from kedge.errors import InputError, NotReadyError
from kedge.files import write_text
from kedge.io import artifact
from kedge.io.facts import facts

FILE = "detector.kedge"
CARD = "README.md"
_CARD = """---
library_name: kedge
pipeline_tag: image-classification
tags:
- out-of-distribution-detection
- anomaly-detection
- kedge
---

# {name}

An image classifier that flags images unlike its training data: a detector of out-of-distribution images, made with
kedge {kedge}. {guarantee} A larger score means further out of distribution.

```python
import kedge

detector = kedge.from_pretrained("{repo_id}"{model})
d = detector("photo.jpg")  # d.label d.probability d.score d.p_value d.is_ood
```

| | |
|---|---|
{rows}
"""
_REPOSITORY = re.compile(r"\w[\w.-]*/\w[\w.-]*(?<!\.kedge)")  # a mistyped path is not looked up on the hub
_NOT_IN_CARD = ("numbers", "bytes", "commit", "options")


def push_to_hub(detector: Detector, repo_id: str, *, token: str | None = None, private: bool = False) -> str:
    """Upload a detector and a model card in one commit; the repository is created if there is none.

    Args:
        detector: Fitted; calibrate it to make it useful to others.
        repo_id: The repository, as ``"owner/name"``.
        token: Access token of the hub; by default the one that huggingface_hub has stored.
        private: Whether a new repository is private.

    Returns:
        The address of the repository.
    """
    name = _repository(repo_id)
    with tempfile.TemporaryDirectory() as folder:
        save_pretrained(detector, folder, repo_id=name)
        with _api(token, f"{name} could not be written to the hub") as api:
            address = api.create_repo(name, private=private, exist_ok=True)
            api.upload_folder(repo_id=name, folder_path=folder, commit_message=f"{detector.name} detector")
    return str(address)


def save_pretrained(detector: Detector, folder: str | os.PathLike[str], *, repo_id: str = "owner/name") -> None:
    """Write what `push_to_hub` uploads into a folder: the detector and its model card, which names ``repo_id``."""
    repo_id = _repository(repo_id)
    detector.save(Path(folder) / FILE)
    write_text(Path(folder) / CARD, model_card(Path(folder) / FILE, repo_id))


def from_pretrained(
    name_or_folder: str | os.PathLike[str],
    *,
    revision: str | None = None,
    token: str | None = None,
    model: nn.Module | str | None = None,
) -> Detector:
    """Load a detector from the hub, from a folder, or as `kedge.load` does. No code from it is run.

    Args:
        name_or_folder: ``"owner/name"`` or ``"hf://owner/name"`` on the hub; a folder that holds ``detector.kedge``; a
            detector's file; or the name of a detector that comes with kedge. Files and folders take precedence.
        revision: A branch, tag or commit on the hub.
        token: Access token of the hub for a private repository; by default the one that huggingface_hub has stored.
        model: See `kedge.load`.

    Example:
        >>> from_pretrained("hf://me/cifar10-anchored", revision="main")  # doctest: +SKIP
    """
    inside = Path(name_or_folder) / FILE
    path = inside if inside.is_file() else artifact.locate(name_or_folder)
    if path.is_dir():
        raise InputError(f"name_or_folder must hold {FILE}; the folder {name_or_folder} does not")
    if not path.is_file():
        name = _repository(name_or_folder)
        with _api(token, f"{name} could not be read from the hub") as api:
            path = Path(api.hf_hub_download(repo_id=name, filename=FILE, revision=revision))
    elif revision is not None:
        raise InputError(f"revision is only for repositories on the hub; {name_or_folder} is a local file")
    return load(path, model=model)


def model_card(file: str | os.PathLike[str], repo_id: str) -> str:
    """The model card of a saved detector, as Markdown with the hub's metadata at the top."""
    described = facts(file)
    rows = [
        f"| {name.replace('_', ' ')} | {_cell(value)} |"
        for name, value in described.items()
        if value not in (None, "", []) and name not in _NOT_IN_CARD
    ]
    own = described["arguments"] is not None  # one of kedge's networks, which kedge builds itself
    return _CARD.format(
        name=repo_id.rpartition("/")[2],
        repo_id=repo_id,
        model="" if own else ", model=network",
        guarantee=_guarantee(described) + ("" if own else " `network` is the network, freshly built."),
        kedge=described["kedge"],
        rows="\n".join(rows),
    )


def _guarantee(described: dict[str, Any]) -> str:
    alpha, delta, images = (described[name] for name in ("alpha", "delta", "calibration_images"))
    if alpha is None:
        return "It has no threshold yet: call `calibrate` with in-distribution images that it was not trained on."
    flagged = f"A fresh in-distribution image is flagged with probability at most {100 * alpha:.3g} %"
    if delta is None:
        return f"{flagged}, on average over draws of the {images} calibration images."
    return f"{flagged}, for all but {100 * delta:g} % of the draws of the {images} calibration images."


@contextmanager
def _api(token: str | None, failure: str) -> Iterator[Any]:
    """The hub's API; a failure inside the block becomes an error of one line."""
    hub = needs("huggingface_hub", "hub", "the hub")
    try:
        yield hub.HfApi(token=token, library_name="kedge", library_version=version("kedge"))
    except Exception as error:  # huggingface_hub has many kinds of errors, which change with its versions
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise NotReadyError(f"{failure}: {reason}") from error


def _repository(given: str | os.PathLike[str]) -> str:
    name = str(given).removeprefix("hf://")
    if not _REPOSITORY.fullmatch(name):
        expected = f"a repository on the hub as owner/name, a folder with {FILE}, a file, or one of kedge's own"
        raise InputError(f"a detector must be {expected} ({', '.join(artifact.shipped())}); got {str(given)!r}")
    return name


def _cell(value: Any) -> str:
    words = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
    printable = "".join(letter if letter.isprintable() else " " for letter in words)
    return re.sub(r"\s+", " ", printable).replace("|", r"\|")
