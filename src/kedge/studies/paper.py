"""The paper's numbers as it prints them: every table of "Out of Distribution Detection via Neural Network Anchoring".

Values are in percent. Methods, networks, sets and metrics have kedge's names. Where a printed number disagrees with the
numbers beside it, the number stays as printed and its `Reported.slip` explains the conflict.
"""

import functools
import importlib.resources
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Self

from kedge.checks import one_of
from kedge.errors import InputError

AVERAGE = "average"  # the OOD set of a mean over OOD sets


@dataclass(frozen=True)
class Reported:
    """One number of the paper.

    Attributes:
        table: Number of the table, or ``"text"`` for a number in the text alone.
        id_set: In-distribution set.
        network: A name for `kedge.models.build`.
        method: kedge's name of the method; ``"unanchored"`` for an ordinary network without a method of its own.
        ood_set: Out-of-distribution set; `AVERAGE` for a mean over sets, None for an accuracy.
        metric: As in `kedge.metrics`, or ``"tnr95"``, which `as_fpr95` converts.
        value: In percent.
        deviation: The number after the plus-minus sign.
        slip: Why the number cannot be what was meant, or None.
        doubt: Why the number, or its reading, may mislead, or None.
        printed_as: The row's name in the paper.
        uses_outliers: Whether the paper marks the method as one that learns from outliers.
        corruption: In the ablation, the corruptions of the anchors in training, by the switches of
            `kedge.anchoring.corruption.Corruption`; elsewhere None, and AMP's networks have all five.
        anchors: In the ablation, the number of anchors per image; elsewhere None, and AMP uses 5.
    """

    table: str
    id_set: str
    network: str
    method: str
    ood_set: str | None
    metric: str
    value: float
    deviation: float | None = None
    slip: str | None = None
    doubt: str | None = None
    printed_as: str = ""
    uses_outliers: bool = False
    corruption: tuple[str, ...] | None = None
    anchors: int | None = None

    @property
    def row(self) -> str:
        """The name of its row in `MethodPlan.paper`: the method, and in the ablation its corruptions and anchors."""
        if self.anchors is None:
            return self.method
        return f"{self.method}, T: {', '.join(self.corruption or ()) or 'none'}, K = {self.anchors}"

    def as_fpr95(self) -> Self:
        """The same number as FPR95, which is 100 - TNR95."""
        if self.metric == "fpr95":
            return self
        if self.metric != "tnr95":
            raise InputError(f"metric must be 'tnr95' or 'fpr95' to be given as FPR95; got {self.metric!r}")
        return replace(self, metric="fpr95", value=round(100 - self.value, 2))  # no more decimals than are printed


def reported(
    *,
    table: str | int | None = None,
    id_set: str | None = None,
    method: str | None = None,
    ood_set: str | None = None,
    metric: str | None = None,
    network: str | None = None,
) -> list[Reported]:
    """The paper's numbers that match every argument given, in the order of its tables; see `Reported`.

    Example:
        >>> [r.value for r in reported(table=2, method="AMP", ood_set="svhn", metric="fpr95")]  # CIFAR-10 and CIFAR-100
        [5.19, 12.57]
    """
    wanted = {"table": None if table is None else str(table), "id_set": id_set, "method": method}
    wanted |= {"ood_set": ood_set, "metric": metric, "network": network}
    given = {name: value for name, value in wanted.items() if value is not None}
    for name, value in given.items():
        one_of(name, value, tuple(dict.fromkeys(getattr(r, name) for r in _numbers() if getattr(r, name) is not None)))
    return [r for r in _numbers() if all(getattr(r, name) == value for name, value in given.items())]


@functools.cache
def _numbers() -> tuple[Reported, ...]:
    text = importlib.resources.files("kedge.studies").joinpath("paper.json").read_text(encoding="utf-8")
    tables = json.loads(text)["tables"].items()
    return tuple(number for table, held in tables for row in held["rows"] for number in _row(table, row))


def _row(table: str, row: dict[str, Any]) -> Iterator[Reported]:
    common = {name: value for name, value in row.items() if name != "values"}
    if "corruption" in common:
        common["corruption"] = tuple(common["corruption"])
    for ood_set, by_metric in row["values"].items():
        for metric, cell in by_metric.items():
            printed = cell if isinstance(cell, dict) else {"value": cell}  # a bare number without remarks
            yield Reported(table=table, ood_set=ood_set or None, metric=metric, **common, **printed)
