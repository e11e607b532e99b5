"""`extract`: one pass of a network over a set of images, for any number of detectors."""

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from kedge.checks import at_least, finite
from kedge.data import Preprocess, batches
from kedge.data.batches import name_of, preprocess_for
from kedge.data.features import MANIFEST, Features, open_columns, read_manifest
from kedge.data.imageset import Splittable
from kedge.data.labels import UNKNOWN
from kedge.data.leakage import fingerprints
from kedge.errors import InputError
from kedge.files import write_json
from kedge.models.classifier import Classifier, as_classifier, checksum, evaluating
from kedge.models.features import INPUT
from kedge.models.head import find_head

SAVE_SECONDS = 15.0  # between two records of how far an extraction has come


def extract(
    net: nn.Module,
    data: Any,
    directory: str | Path | None = None,
    *,
    preprocess: Preprocess | None = None,
    head: str | None = None,
    half: bool = False,
    batch_size: int | None = None,
) -> Features:
    """Run a network over images once; every detector that reads logits or last features takes the result instead.

    ``fit``, ``calibrate``, ``score``, a call and `kedge.evaluate` take `Features` in place of images. With a
    ``directory`` they are written to disk as they come, in constant memory, and the same call goes on where one was
    interrupted, or opens what is complete.

    Args:
        net: A classifier; an anchored one must have its anchors.
        data: Images in any form that `kedge.data.batches` takes; to be resumed, a set that can be split.
        directory: A folder for the result; by default it is kept in memory.
        preprocess: How images become inputs; by default what the network's record says, or the images' size.
        head: The name of the last linear layer; by default it is found by running the network.
        half: Whether to store features in half precision.
        batch_size: Images at a time, by default `kedge.Preprocess.batch_size`.

    Example:
        >>> from kedge import KNN, Classifier, ImageSet
        >>> images = ImageSet(torch.randint(0, 256, (60, 3, 2, 2), dtype=torch.uint8))
        >>> layers = nn.Flatten(), nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 2)
        >>> net = Classifier(nn.Sequential(*layers), mean=0.5, std=0.3)
        >>> features = extract(net, images)
        >>> features
        Features('images', 60 images, 2 logits, 8 features)
        >>> KNN(net, k=3).fit(features.subset(range(40))).score(features).shape
        torch.Size([60])
    """
    if batch_size is not None:
        at_least("batch_size", batch_size, 1)
    classifier = as_classifier(net)
    preprocess = preprocess_for(data, classifier.record, preprocess)
    folder = None if directory is None else Path(directory)
    if folder is not None and not isinstance(data, Splittable):
        raise InputError(f"data must be an ImageSet or a StreamedSet to be stored; got {type(data).__name__}")
    identity = {
        "name": name_of(data),
        "checksum": str(getattr(data, "checksum", "")),
        "classes": list(getattr(data, "classes", ())),
        "network": checksum(classifier),
        "preprocess": preprocess.as_record(),
        "half": half,
    }
    extraction = Extraction(classifier, preprocess, head, batch_size, f"extracting {identity['name']}")
    if folder is None:
        return _in_memory(extraction, data, identity)
    return _on_disk(extraction, data, folder, identity)


@torch.no_grad()
def with_head(features: Features, net: nn.Module) -> Features:
    """Features for a network that differs from theirs in the last linear layer alone, whose logits are computed.

    Args:
        features: Of the network before.
        net: A copy of that network with another layer of the same name, as `train_head` leaves it.
    """
    classifier = as_classifier(net)
    head = classifier.network.get_submodule(features.head)
    logits = [head(part.features) for part, _ in features.batches(1024, classifier.mean.device)]
    return replace(features, logits=torch.cat(logits).cpu(), network=checksum(classifier))


@dataclass
class Extraction:
    """A pass of a network over images; ``head`` is found in the first batch if it is not given."""

    net: Classifier
    preprocess: Preprocess
    head: str | None
    batch_size: int | None
    label: str | None  # for a progress bar

    def rows(self, data: Any) -> Iterator[dict[str, Tensor]]:
        """Columns of `Features` batch by batch, on the CPU."""
        with evaluating(self.net), torch.no_grad():
            for images, labels in batches(data, self.preprocess, size=self.batch_size, label=self.label):
                x = self.net.as_input(images)
                self.head = self.head or find_head(self.net, x[:2])
                logits, per_anchor, features = self.net.read(x, [self.head + INPUT])
                columns = {} if per_anchor is None else {"per_anchor": per_anchor.transpose(0, 1).cpu()}
                yield columns | {
                    "logits": finite("logits", logits, "check the network's weights").cpu(),
                    "features": finite("features", features[self.head + INPUT], "check the network's weights").cpu(),
                    "labels": torch.full((len(x),), UNKNOWN) if labels is None else labels,
                    "prints": fingerprints(images),
                }


def _in_memory(extraction: Extraction, data: Any, identity: dict[str, Any]) -> Features:
    parts = list(extraction.rows(data))
    columns: dict[str, Any] = {key: torch.cat([part[key] for part in parts]) for key in parts[0]}
    if identity.pop("half"):
        columns["features"] = columns["features"].half()
    if bool((columns["labels"] < 0).all()):
        columns["labels"] = None
    identity |= {"preprocess": extraction.preprocess, "classes": tuple(identity["classes"])}
    return Features(**columns, head=str(extraction.head), **identity)


def _on_disk(extraction: Extraction, data: Any, folder: Path, identity: dict[str, Any]) -> Features:
    """Write the columns as they come; how many rows are complete is recorded after they are on disk."""
    manifest: dict[str, Any] | None = None
    if (folder / MANIFEST).exists():
        manifest = read_manifest(folder)
        if other := [key for key, value in identity.items() if manifest[key] != value]:
            raise InputError(
                f"directory must be empty or hold features of the same network and images; {folder} differs in "
                f"{', '.join(other)}: choose another, or delete it"
            )
        extraction.head = manifest["head"]
    columns = {} if manifest is None else open_columns(folder, manifest, mode="r+")
    done = 0 if manifest is None else manifest["done"]
    saved = time.monotonic()
    rest = data if done == 0 else data.subset(range(done, len(data)))
    for part in extraction.rows(rest) if done < len(data) else ():
        if manifest is None:
            folder.mkdir(parents=True, exist_ok=True)
            sizes = {"outputs": part["logits"].shape[1], "width": part["features"].shape[1]}
            sizes["anchors"] = part["per_anchor"].shape[1] if "per_anchor" in part else 0
            dtype = str(part["logits"].numpy().dtype)
            manifest = {**identity, "head": extraction.head, "dtype": dtype, "images": len(data), "done": 0, **sizes}
            columns = open_columns(folder, manifest, mode="r+", create=True)
            write_json(folder / MANIFEST, manifest)
        for key, value in part.items():
            columns[key][done : done + len(value)] = value.numpy()
        done += len(part["logits"])
        if done == len(data) or time.monotonic() - saved > SAVE_SECONDS:
            for column in columns.values():
                column.flush()
            manifest["done"], saved = done, time.monotonic()
            write_json(folder / MANIFEST, manifest)
    return Features.open(folder)
