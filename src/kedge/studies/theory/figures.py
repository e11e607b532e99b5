"""Figures of the kernel's study: spectra, decisions by anchor, disagreement, and errors of the approximation."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kedge.evaluation.report.figures import CURVES, ID, INK, OOD, look, render
from kedge.evaluation.report.markup import SERIES, Html, tag
from kedge.studies.theory.approximation import Approximation
from kedge.studies.theory.disagreement import Disagreement
from kedge.studies.theory.study import NTKStudy, Spectra

Array = NDArray[Any]

SQUARE = (3.2, 3.2), (0.09, 0.08, 0.98, 0.97)
WIDE = (4.6, 3.4), (0.14, 0.14, 0.97, 0.97)
VALUES = (0.25, 0.5, 1.0)  # decision values at which the shade changes, on either side of zero
DEVIATIONS = (0.02, 0.05, 0.1, 0.2, 0.5, 1.0)  # deviations at which the shade changes
SHADES = (0.06, 0.14, 0.24, 0.36, 0.5, 0.66, 0.85)
HELD_OUT = 0.09  # place of the held-out points on the axis of distance


def draw_spectra(spectra: Spectra) -> Html:
    """Eigenvalues as shares of the trace; a band spans the anchors where there is one kernel for each."""
    each = _share(spectra.shared.numpy())
    shares = [_share(spectra.unanchored.numpy()), _share(spectra.own.numpy()), np.median(each, axis=0)]
    number = np.arange(1, each.shape[1] + 1)

    def draw(axes: Any) -> None:
        axes.fill_between(number, each.min(axis=0), each.max(axis=0), color=CURVES[2], alpha=0.2, linewidth=0)
        _curves(axes, number, shares)
        axes.set_yscale("log")
        axes.set(xlim=(0, len(number)), xlabel="eigenvalue, largest first", ylabel="share of the trace")

    label = "Spectra on a logarithmic axis. " + "; ".join(
        f"{name}: from {values[0]:.2f} to {values[-1]:.1e} of the trace, effective rank {rank:.1f}"
        for (name, rank), values in zip(spectra.ranks.items(), shares, strict=True)
    )
    return render("spectra", *WIDE, f"{label}.", draw)


def draw_boundaries(study: NTKStudy, predictor: str) -> Html:
    """The mean decision over anchors, and the boundary under each of them."""
    values = study.decisions.values[predictor].numpy()

    def draw(axes: Any) -> None:
        _classes(axes, study, values.mean(axis=0))
        _boundaries(axes, study, values, 0.7)
        _points(axes, study)

    parted = np.mean((values > 0).any(axis=0) & (values < 0).any(axis=0))
    label = f"Decisions of {predictor}: its {len(values)} anchors give {parted:.0%} of the square to different classes."
    return render("boundaries", (4.6, 3.4), (0.08, 0.09, 0.97, 0.97), label, draw)


def draw_decision(study: NTKStudy, predictor: str, anchor: int) -> Html:
    """The decisions under one anchor, with the training points and the anchor itself."""
    values = study.decisions.values[predictor][anchor].numpy()

    def draw(axes: Any) -> None:
        _classes(axes, study, values)
        _boundaries(axes, study, values[None], 1.3)
        _points(axes, study)
        axes.plot(*study.anchors[anchor].numpy(), marker="*", markersize=13, color=INK, linestyle="none", zorder=4)

    place = ", ".join(f"{v:.1f}" for v in study.anchors[anchor].tolist())
    label = f"Decisions of {predictor} under anchor {anchor + 1} at ({place}); {np.mean(values > 0):.0%} of the square "
    return render(f"decision-{_slug(predictor)}-{anchor}", *SQUARE, label + "goes to the first class.", draw)


def draw_deviation(study: NTKStudy, predictor: str) -> Html:
    """A map of the deviation of the decisions, and the boundary of each anchor."""
    deviation, axis = study.decisions.deviation[predictor].numpy(), study.decisions.axis.numpy()
    values = study.decisions.values.get(predictor)

    def draw(axes: Any) -> None:
        for (low, high), shade in zip(pairwise((0.0, *DEVIATIONS, np.inf)), SHADES, strict=True):
            _shade(axes, axis, deviation, low, high, CURVES[3], shade)
        if values is not None:
            _boundaries(axes, study, values.numpy(), 0.6)
        _points(axes, study)

    middle, corner = deviation[len(axis) // 2, len(axis) // 2], np.mean(deviation[[0, 0, -1, -1], [0, -1, 0, -1]])
    label = f"Deviation of {predictor}: {middle:.2f} in the middle of the data, {corner:.2f} in the corners."
    return render(f"deviation-{_slug(predictor)}", *SQUARE, label, draw)


def draw_by_distance(disagreement: Disagreement, what: str, axis: str) -> Html:
    """Deviation or tau against the distance from the data; dots at the left are held-out points."""
    curves: dict[str, list[float]] = getattr(disagreement, what)
    edges = np.array(disagreement.edges)
    middle = np.sqrt(np.maximum(edges[:-1], edges[1] / 2) * edges[1:])
    held_out = {name: disagreement.held_out[name][what] for name in curves}

    def draw(axes: Any) -> None:
        _curves(axes, middle, list(curves.values()))
        for i, value in enumerate(held_out.values()):
            axes.plot(HELD_OUT, value, marker="o", markersize=4.5, color=CURVES[i % SERIES])
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xticks([HELD_OUT, *edges[1:]], ["held out", *(f"{t:g}" for t in edges[1:])])
        axes.set_xticks([], minor=True)
        axes.set(xlim=(HELD_OUT / 1.5, edges[-1]), xlabel="distance from the nearest training point", ylabel=axis)

    label = f"{axis.capitalize()} by distance. " + "; ".join(
        f"{name}: {held_out[name]:.3f} held out, then {', '.join(f'{v:.3f}' for v in values)}"
        for name, values in curves.items()
    )
    return render(f"distance-{what}", *WIDE, f"{label}.", draw)


def draw_errors(approximation: Approximation) -> Html:
    """Largest errors of the approximations against the length of the anchor."""

    def draw(axes: Any) -> None:
        _curves(axes, np.array(approximation.lengths), list(approximation.largest.values()))
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks([0.5, 2**-4, 2**-8, 2**-12], ["1/2", "1/16", "1/256", "1/4096"])
        axes.set_xticks([], minor=True)
        axes.set(xlabel="length of the anchor", ylabel="largest error")

    label = "Largest errors, falling with the anchor's length. " + "; ".join(
        f"{kind}: {values[0]:.2g} to {values[-1]:.2g}, order {approximation.orders[kind]:.2f}"
        for kind, values in approximation.largest.items()
    )
    return render("errors", *WIDE, f"{label}.", draw)


def value_legend() -> Html:
    """The colours of `draw_decision`."""
    items = [_swatch("--id", 0.5, "first class"), _swatch("--ood", 0.5, "second class")]
    words = "stronger where |f| is above " + ", ".join(f"{v:g}" for v in VALUES)
    return tag("ul", *items, tag("li", tag("span", words)), tag("li", tag("span", "★ the anchor")), class_="legend")


def deviation_legend() -> Html:
    """The colours of `draw_deviation`."""
    bounds = ["0", *(f"{v:g}" for v in DEVIATIONS)]
    names = [*(f"{low} to {high}" for low, high in pairwise(bounds)), f"above {bounds[-1]}"]
    items = (_swatch("--s4", shade, name) for shade, name in zip(SHADES, names, strict=True))
    return tag("ul", *items, class_="legend")


def _curves(axes: Any, x: Array, curves: Sequence[Any]) -> None:
    for i, y in enumerate(curves):
        axes.plot(x, y, **look(i))


def _classes(axes: Any, study: NTKStudy, values: Array) -> None:
    for sign, colour in ((1, ID), (-1, OOD)):
        for (low, high), shade in zip(pairwise((0.0, *VALUES, np.inf)), SHADES[:4], strict=True):
            _shade(axes, study.decisions.axis.numpy(), sign * values, low, high, colour, shade)


def _boundaries(axes: Any, study: NTKStudy, every: Array, width: float) -> None:
    axis = study.decisions.axis.numpy()
    for values in every:
        if values.min() < 0 < values.max():
            axes.contour(axis, axis, values, levels=[0], colors=[INK], linewidths=width)


def _shade(axes: Any, axis: Array, values: Array, low: float, high: float, colour: str, shade: float) -> None:
    top = max(float(values.max()), low) + 1 if np.isinf(high) else high
    if float(values.max()) > low and float(values.min()) < top:
        axes.contourf(axis, axis, values, levels=[low, top], colors=[colour], alpha=shade, antialiased=False)


def _points(axes: Any, study: NTKStudy) -> None:
    x, first = study.problem.x.numpy(), study.problem.y.numpy() > 0
    for chosen, colour, marker in ((first, ID, "o"), (~first, OOD, "s")):
        axes.scatter(*x[chosen].T, s=14, color=colour, marker=marker, linewidths=0.5, edgecolors=INK, zorder=3)
    reach = float(study.decisions.axis[-1])
    axes.set(xlim=(-reach, reach), ylim=(-reach, reach), aspect="equal", xticks=[-2, 0, 2], yticks=[-2, 0, 2])


def _share(eigenvalues: Array) -> Array:
    shares: Array = eigenvalues / eigenvalues.sum(axis=-1, keepdims=True)
    return shares


def _slug(name: str) -> str:
    return "".join(letter if letter.isalnum() else "-" for letter in name)


def _swatch(colour: str, shade: float, name: str) -> Html:
    style = f"fill: var({colour}); fill-opacity: {shade}; stroke: currentColor; stroke-width: 0.5"
    box = tag("path", d="M1 1 H15 V11 H1 Z", style=style)
    picture = tag("svg", box, width="16", height="12", viewBox="0 0 16 12", aria_hidden="true")
    return tag("li", picture, tag("span", name))
