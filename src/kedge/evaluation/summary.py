"""Several evaluations of the same methods, one for each seed: their means and deviations."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kedge.errors import InputError
from kedge.evaluation.result import Evaluation, Result
from kedge.evaluation.table import Table

HEADS = {
    "accuracy": "accuracy ↑",
    "auroc": "AUROC ↑",
    "fpr95": "FPR95 ↓",
    "aupr_in": "AUPR-in ↑",
    "aupr_out": "AUPR-out ↑",
    "dtacc": "DTACC ↑",
    "fpr95_ood": "FPR95 (OOD) ↓",
    "ece": "ECE ↓",
    "aurc": "AURC ↓",
}
SHOWN = ("accuracy", "auroc", "fpr95", "dtacc", "aupr_in", "aupr_out", "ece", "aurc")
WIDE = 130  # columns of a terminal that shows all of them side by side
OF_CLASSIFIER = ("accuracy", "ece", "aurc")


@dataclass(frozen=True)
class Spread:
    """A value by seed, as a share; its mean, and its deviation (unbiased) where there are several.

    Example:
        >>> Spread((0.5, 0.75, 1.0)).words()
        '75.0 ± 25.0'
    """

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        """Over the seeds."""
        return statistics.fmean(self.values)

    @property
    def deviation(self) -> float | None:
        """Over the seeds, or None for one."""
        return statistics.stdev(self.values) if len(self.values) > 1 else None

    def words(self) -> str:
        """In percent."""
        return f"{100 * self.mean:.1f}" + ("" if self.deviation is None else f" ± {100 * self.deviation:.1f}")


@dataclass(frozen=True)
class Summary:
    """Evaluations by seed, of the same methods on sets of the same names.

    Example:
        >>> import torch, kedge
        >>> noise = lambda name: kedge.ImageSet(torch.randint(0, 256, (40, 3, 4, 4)).byte(), torch.arange(40) % 2, name)
        >>> net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(48, 2))
        >>> msp = kedge.MSP(net).fit(noise("train")).calibrate(noise("held out"))
        >>> summary = Summary({0: kedge.evaluate({"MSP": msp}, noise("test"), [noise("other")])})
        >>> summary.table(("auroc",)).heads
        ('method', 'AUROC ↑', 'passes', 'ms')
    """

    evaluations: Mapping[int, Evaluation]

    def __post_init__(self) -> None:
        if not self.evaluations:
            raise InputError("evaluations must hold at least one, by its seed; got none")
        first = self.first
        for seed, evaluation in self.evaluations.items():
            if (evaluation.id_name, evaluation.ood_names, evaluation.apart) != (
                first.id_name,
                first.ood_names,
                first.apart,
            ):
                raise InputError(f"evaluations must be on sets of the same names; those of seed {seed} differ")
            if list(evaluation.results) != list(first.results):
                raise InputError(f"evaluations must be of the same methods; those of seed {seed} differ")

    @property
    def first(self) -> Evaluation:
        """The evaluation of the first seed."""
        return next(iter(self.evaluations.values()))

    def value(self, label: str, metric: str, ood: str | None = None) -> Spread | None:
        """A method's metric on one OOD set, or its mean over all; None where the test set has no labels."""
        values = [_value(evaluation.results[label], metric, ood) for evaluation in self.evaluations.values()]
        known = tuple(value for value in values if value is not None)
        return Spread(known) if len(known) == len(values) else None

    def table(self, metrics: Sequence[str] = SHOWN) -> Table:
        """One row per method: means over the OOD sets, and the cost."""
        rows = []
        for label, result in self.first.results.items():
            cells = [words(self.value(label, metric)) for metric in metrics]
            times = [e.results[label].milliseconds for e in self.evaluations.values()]
            rows.append((starred(label, result), *cells, passes(result), f"{statistics.fmean(times):.2f}"))
        caption = (
            f"In distribution: {self.first.id_name}. In %, means over {self.first.over}{self._seeds()}. {self._star()}"
            "passes: through the network for one image, forward + backward; ms: for one image, on this machine."
        )
        return Table(caption, ("method", *(HEADS[metric] for metric in metrics), "passes", "ms"), tuple(rows))

    def tables(self, columns: int) -> tuple[Table, ...]:
        """`table` for a terminal of so many columns: in two where it is too narrow for all metrics side by side."""
        halves = (SHOWN,) if columns >= WIDE else (SHOWN[:4], SHOWN[4:])
        return tuple(map(self.table, halves))

    def by_set(self, metric: str) -> Table:
        """One row per method, one column per OOD set, and their mean."""
        rows = [
            (
                starred(label, result),
                *(words(self.value(label, metric, ood)) for ood in self.first.ood_names),
                words(self.value(label, metric)),
            )
            for label, result in self.first.results.items()
        ]
        caption = f"{HEADS[metric]} in %, in distribution: {self.first.id_name}{self._seeds()}. {self._star()}"
        caption += f"Mean over {self.first.over}."
        return Table(caption, ("method", *self.first.ood_names, "mean"), tuple(rows))

    def as_dict(self) -> dict[str, Any]:
        """Everything but images and single scores, as plain data for JSON."""
        return {
            "seeds": {str(seed): evaluation.as_dict() for seed, evaluation in self.evaluations.items()},
            "summary": {
                label: {
                    metric: {"mean": spread.mean, "deviation": spread.deviation, "values": list(spread.values)}
                    for metric in HEADS
                    if (spread := self.value(label, metric)) is not None
                }
                for label in self.first.results
            },
        }

    def _star(self) -> str:
        return f"{STAR} " if any(result.uses_outliers for result in self.first.results.values()) else ""

    def _seeds(self) -> str:
        number = len(self.evaluations)
        return f", mean ± deviation over {number} seeds" if number > 1 else ""


STAR = "* learned from outliers."


def starred(label: str, result: Result) -> str:
    """A method's label, with a star where it learned from outliers."""
    return f"{label.rstrip('* ')} *" if result.uses_outliers else label


def words(spread: Spread | None) -> str:
    """A spread in percent, or nothing."""
    return "" if spread is None else spread.words()


def _value(result: Result, metric: str, ood: str | None) -> float | None:
    if metric in OF_CLASSIFIER:
        value: float | None = getattr(result, metric)
        return value
    return result.mean(metric) if ood is None else result.metrics[ood][metric].value


def passes(result: Result) -> str:
    """The passes through the network for one image, forward + backward."""
    cost = result.cost
    return f"{cost.forward} + {cost.backward}" if cost.backward else str(cost.forward)
