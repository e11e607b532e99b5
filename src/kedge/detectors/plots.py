"""A figure of images with their verdicts, and the nearest training images below them."""

import itertools
import math
from typing import Any

import torch
from torch import Tensor

from kedge.checks import needs
from kedge.data import ImageSet, StreamedSet
from kedge.data.batches import batches, names_of
from kedge.detectors.base import Detector
from kedge.detectors.neighbours import Neighbours
from kedge.errors import NotReadyError

COLUMNS = 4
NEAREST = 3  # training images below an image


def plot_verdicts(detector: Detector, images: Any, most: int, train_set: ImageSet | StreamedSet | None) -> Any:
    """See `Detector.plot`."""
    pyplot = needs("matplotlib.figure", "report", "plot")
    if detector.preprocess is None or detector.calibration is None or not detector.preprocess.is_image:
        raise NotReadyError("plot needs a fitted and calibrated detector of images: call fit and calibrate first")
    read = itertools.islice(batches(images, detector.preprocess, size=most), 1)
    x = torch.cat([part for part, _ in read])[:most]
    names = names_of(images)
    below = None if train_set is None else _nearest(detector, x, train_set)
    columns = min(len(x), COLUMNS)
    height = 3.3 + 0.2 * bool(names) + 0.9 * bool(below)
    size = 2.6 * columns, height * math.ceil(len(x) / columns)
    figure = pyplot.Figure(figsize=size, layout="constrained")
    panels = figure.subfigures(math.ceil(len(x) / columns), columns, squeeze=False).flat
    for place, row in enumerate(detector(x).to_rows()):
        label = row["class"] or f"class {row['label']}"
        words = [
            *names[place : place + 1],
            f"{label} {row['probability'] or 0:.0%}",
            f"{'out of' if row['is_ood'] else 'in'} distribution, p {row['p_value']:.2g}",
            *([row["reason"]] if row["reason"] else []),
        ]
        grid = panels[place].add_gridspec(2, NEAREST, height_ratios=(3.2, 1)) if below else panels[place].add_gridspec()
        axes = panels[place].add_subplot(grid[0, :])
        axes.set_title("\n".join(words), fontsize=8, color="#b3261e" if row["is_ood"] else "black")
        _show(axes, detector.as_input(x[place : place + 1])[0])
        for number, (picture, title) in enumerate(below[place] if below else ()):
            axes = panels[place].add_subplot(grid[1, number])
            axes.set_title(title, fontsize=6)
            _show(axes, picture)
    return figure


def _nearest(detector: Detector, x: Tensor, train_set: ImageSet | StreamedSet) -> list[list[tuple[Tensor, str]]]:
    """The nearest training images of each input as the network sees them, with their classes; the nearest first."""
    assert detector.preprocess is not None
    search = Neighbours(detector.net, train_set, preprocess=detector.preprocess)
    found = []
    for places in search.nearest(x, min(NEAREST, len(search.images))).tolist():
        near = search.images.subset(places)
        pictures = detector.as_input(torch.cat([part for part, _ in batches(near, detector.preprocess)]))
        labels = [] if near.labels is None or not near.classes else near.labels.tolist()
        titles = [near.classes[label] for label in labels] or [f"image {place}" for place in places]
        found.append(list(zip(pictures, titles, strict=True)))
    return found


def _show(axes: Any, picture: Tensor) -> None:
    """Draw an image (D, H, W) of values from 0 to 1."""
    pixels = picture.float().cpu().clamp(0, 1).permute(1, 2, 0).numpy()
    axes.axis("off")
    axes.imshow(pixels if pixels.shape[2] == 3 else pixels[..., 0], cmap="gray", vmin=0, vmax=1)
