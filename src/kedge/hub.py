"""Detectors on the Hugging Face hub: a repository holds ``detector.kedge`` and a model card."""

import os
import re
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

from torch import nn

from kedge.checks import needs
from kedge.detectors import Detector, load
from kedge.errors import InputError, NotReadyError
from kedge.files import atomic
from kedge.io import artifact
from kedge.io.facts import facts

FILE = "detector.kedge"
CARD = "README.md"
PREFIX = "hf://"
_CARD = """---
library_name: kedge
pipeline_tag: image-classification
tags:
- out-of-distribution-detection
- anomaly-detection
- kedge
---

# {name}

An image classifier that says when an image is unlike what it has learned: a detector of out-of-distribution images,
made with kedge {kedge}. {promise} A larger score is further out of distribution.

```python
import kedge

detector = kedge.from_pretrained("{repo_id}"{own}){needs}
d = detector("photo.jpg")  # d.label d.probability d.score d.p_value d.is_ood
```

| | |
|---|---|
{rows}
"""
_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+(?<!\.kedge)")  # a path that is mistyped is not looked for elsewhere
_LEFT_OUT = ("numbers", "bytes", "commit", "options")  # of a card: for `kedge info`


def push_to_hub(detector: Detector, repo_id: str, *, token: str | None = None, private: bool = False) -> str:
    """Upload a detector and a model card; the repository is made where there is none.

    Both files are written over in one commit. What the card says is read out of the detector: edit it on the hub, or
    push other files beside it with huggingface_hub.

    Args:
        detector: Fitted; a threshold makes it useful to others.
        repo_id: The repository, as ``"owner/name"``.
        token: Of the hub; by default the one that huggingface_hub keeps.
        private: Whether a repository that is made is private.

    Returns:
        The address of the repository.

    Example:
        >>> push_to_hub(kedge.load("cifar10"), "me/cifar10-anchored")  # doctest: +SKIP
        'https://.../me/cifar10-anchored'
    """
    name, hub = _repository(repo_id), _hub()
    with tempfile.TemporaryDirectory() as folder:
        save_pretrained(detector, folder, repo_id=name)
        try:
            api = hub.HfApi(token=token)
            made = api.create_repo(name, private=private, exist_ok=True)
            api.upload_folder(repo_id=name, folder_path=folder, commit_message=f"{detector.name} detector")
        except Exception as error:  # the library's own errors are many, and change with its versions
            raise NotReadyError(f"{name} could not be written to the hub: {_first_line(error)}") from error
    return str(made)


def save_pretrained(detector: Detector, folder: str | os.PathLike[str], *, repo_id: str = "owner/name") -> None:
    """Write into a folder what `push_to_hub` uploads: the detector, and its model card.

    Args:
        detector: Fitted.
        folder: Made where it is missing.
        repo_id: For the card: where the detector will be found.

    Example:
        >>> import torch
        >>> from kedge import MSP
        >>> net = nn.Sequential(nn.Flatten(), nn.Linear(12, 2))
        >>> folder = tempfile.mkdtemp()
        >>> save_pretrained(MSP(net).fit(torch.rand(8, 3, 2, 2)), folder)
        >>> sorted(os.listdir(folder))
        ['README.md', 'detector.kedge']
    """
    detector.save(Path(folder) / FILE)
    with atomic(Path(folder) / CARD) as temporary:
        temporary.write_text(model_card(Path(folder) / FILE, repo_id), encoding="utf-8")


def from_pretrained(
    name_or_folder: str | os.PathLike[str],
    *,
    revision: str | None = None,
    token: str | None = None,
    model: nn.Module | None = None,
) -> Detector:
    """Load a detector from the hub, from a folder, or as `kedge.load` does. Loading never runs code of it.

    Args:
        name_or_folder: ``"owner/name"`` or ``"hf://owner/name"`` on the hub; a folder with ``detector.kedge`` in it; a
            detector's file; or the name of a detector that comes with kedge. Such a folder or file goes first.
        revision: On the hub: a branch, tag or commit.
        token: Of the hub, for a private repository; by default the one that huggingface_hub keeps.
        model: For networks that are not kedge's own: the network, freshly built, as it was before anchoring.

    Example:
        >>> from_pretrained("hf://me/cifar10-anchored", revision="main")  # doctest: +SKIP
    """
    inside = Path(name_or_folder) / FILE
    path = inside if inside.is_file() else artifact.locate(name_or_folder)
    if path.is_dir():
        raise InputError(f"name_or_folder must hold {FILE}; the folder {name_or_folder} does not")
    if path.is_file():
        if revision is not None:
            raise InputError(f"revision is of repositories on the hub; {name_or_folder} is on this machine")
        return load(path, model=model)
    return load(_fetch(_repository(name_or_folder), revision, token), model=model)


def model_card(file: str | os.PathLike[str], repo_id: str) -> str:
    """The model card of a saved detector, as Markdown with the hub's own fields at its head.

    Args:
        file: The detector.
        repo_id: Where it will be found.
    """
    known = facts(file)
    rows = [
        f"| {name.replace('_', ' ')} | {_cell(value)} |"
        for name, value in known.items()
        if value not in (None, "", []) and name not in _LEFT_OUT
    ]
    own = "" if known["arguments"] is not None else ", model=network"
    needs = "" if not own else "  # network: freshly built, as it was before anchoring"
    return _CARD.format(
        name=repo_id.rpartition("/")[2],
        repo_id=repo_id,
        own=own,
        needs=needs,
        promise=_promise(known),
        kedge=known["kedge"],
        rows="\n".join(rows),
    )


def _promise(known: dict[str, Any]) -> str:
    if known["accepts"] is None:
        return "It has no threshold yet: call `calibrate` with in-distribution images that it was not trained on."
    flagged = f"A fresh in-distribution image is flagged with probability at most {100 * (1 - known['accepts']):.3g} %"
    if known["delta"] is None:
        return f"{flagged}, on average over draws of the {known['calibration_images']} images of its calibration."
    return f"{flagged}, with delta {100 * known['delta']:g} % in its {known['calibration_images']} images."


def _fetch(name: str, revision: str | None, token: str | None) -> str:
    hub = _hub()
    try:
        api = hub.HfApi(token=token, library_name="kedge", library_version=version("kedge"))
        return str(api.hf_hub_download(repo_id=name, filename=FILE, revision=revision))
    except Exception as error:  # the library's own errors are many, and change with its versions
        raise NotReadyError(f"{name} could not be read from the hub: {_first_line(error)}") from error


def _repository(given: str | os.PathLike[str]) -> str:
    name = str(given).removeprefix(PREFIX)
    if not _REPOSITORY.fullmatch(name):
        raise InputError(
            f"a detector must be a repository of the hub as owner/name, a folder with {FILE}, a file that is there, or "
            f"one that comes with kedge ({', '.join(artifact.shipped()) or 'none here'}); got {str(given)!r}"
        )
    return name


def _hub() -> Any:
    return needs("huggingface_hub", "hub", "the hub")


def _cell(value: Any) -> str:
    words = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
    return re.sub(r"\s+", " ", words).replace("|", r"\|")


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
