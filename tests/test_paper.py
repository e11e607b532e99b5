"""The paper's numbers: as printed, complete, under kedge's names, and at odds with each other only where it is said."""

import dataclasses
import re
from collections import Counter, defaultdict
from itertools import product

import pytest

from kedge import models
from kedge.anchoring.corruption import Corruption
from kedge.data.preprocess import FILTERS
from kedge.data.sources.catalogue import SOURCES
from kedge.detectors.registry import DETECTORS
from kedge.errors import InputError
from kedge.metrics import DETECTION_METRICS
from kedge.studies.paper import AVERAGE, reported

EVERY = reported()
CIFARS = ("cifar10", "cifar100")
UNIT = {"4": 0.1, "7": 0.1, "12": 0.1, "text": 0.1}  # of the last decimal; elsewhere there are two
DETAILS = {"cifar10": "10", "cifar100": "11"}  # the tables that Table 6 sums up
LSUN = ("lsun-resize", "lsun-crop")
# Rows without a detector of their own name.
OTHERS = {"unanchored", "ODIN", "Mahalanobis", "Gram", "DUQ", "DeepEnsemble", "MCDropout", "SVI", "SVIAvUC"}
OTHERS |= {"ClassifierDiscrepancy", "UDG"}


def one(**chosen):
    (number,) = reported(**chosen)
    return number


def column(table, number, metric=None):
    """The numbers that stand in a table over the sets, for the row and metric of a number."""
    numbers = reported(table=table, id_set=number.id_set, method=number.method, metric=metric or number.metric)
    return [r.value for r in numbers if r.ood_set != AVERAGE]


def in_details(number, **at):
    """The same quantity in Table 12, which gives TNR for FPR."""
    metric = "tnr95" if number.metric == "fpr95" else number.metric
    numbers = one(table=12, id_set=number.id_set, method=number.method, metric=metric, **at)
    return numbers.as_fpr95().value if metric == "tnr95" else numbers.value


def mean(values):
    return sum(values) / len(values)


def in_table_12(number):
    return number.method in {"MSP", "ODIN", "Gram", "AMP"}


def unit(number):
    return UNIT.get(number.table, 0.01)


def recomputed():
    """Numbers that follow from others of the paper: the number, what follows, and what rounding can hide."""
    for number in EVERY:
        if number.ood_set == AVERAGE and number.table in {"2", "7", "10", "11"}:
            yield number, mean(column(number.table, number)), unit(number)  # half for the columns, half for the mean
        elif number.table == "6":
            yield number, mean(column(DETAILS[number.id_set], number)), 0.01
        elif number.table == "3" and in_table_12(number):
            sets = [r.ood_set for r in reported(table=12, id_set=number.id_set, method=number.method, metric="auroc")]
            assert len(sets) == 7
            yield number, mean([in_details(number, ood_set=s) for s in sets]), 0.05 + 0.005
        elif number.table == "4" and in_table_12(number):
            yield number, in_details(number, ood_set=number.ood_set), 0.0


RECOMPUTED = list(recomputed())


def named(value):
    if dataclasses.is_dataclass(value):
        return f"{value.table}-{value.id_set}-{value.method}-{value.ood_set}-{value.metric}"
    return ""


# --- what the paper prints, read off it by eye: the corners of each table --------------------------------------------


@pytest.mark.parametrize(
    ("table", "id_set", "method", "ood_set", "metric", "value"),
    [
        ("2", "cifar10", "MSP", "isun", "fpr95", 56.03),
        ("2", "cifar10", "AMP", "lsun-crop", "fpr95", 1.50),
        ("2", "cifar10", "Energy", "places365", "aupr_in", 97.30),
        ("2", "cifar100", "ODIN", "textures", "fpr95", 79.27),
        ("2", "cifar100", "AMP", "svhn", "aupr_in", 95.25),
        ("2", "cifar100", "AMP", "average", "auroc", 87.27),
        ("3", "cifar10", "MSP", "average", "fpr95", 55.12),
        ("3", "cifar10", "Mahalanobis*", "average", "fpr95", 14.8),
        ("3", "cifar100", "AMP", "average", "dtacc", 82.50),
        ("4", "cifar10", "ODIN", "cifar100", "fpr95", 58.0),
        ("4", "cifar100", "Mahalanobis*", "cifar10", "fpr95", 79.8),
        ("4", "cifar100", "AMP", "cifar10", "auroc", 79.9),
        ("5", "imagenet", "unanchored", "imagenet-c/gaussian_blur/5", "auroc", 93.36),
        ("5", "imagenet", "MCDropout", "imagenet-c/gaussian_blur/5", "dtacc", 89.98),
        ("5", "imagenet", "AMP", "imagenet-c/gaussian_blur/5", "aupr_out", 99.08),
        ("6", "cifar10", "ODIN", "average", "fpr95", 52.00),
        ("6", "cifar10", "ClassifierDiscrepancy", "average", "fpr95", 73.02),
        ("6", "cifar100", "AMP", "average", "aupr_out", 76.20),
        ("7", "cifar10", "MSP", "lsun-test/nearest", "fpr95", 41.5),
        ("7", "cifar100", "Gram", "lsun-test/bicubic", "auroc", 80.0),
        ("7", "cifar100", "AMP", "average", "auroc", 86.9),
        ("9", "cifar10", "DeepEnsemble", "svhn", "auroc", 94.70),
        ("10", "cifar10", "ODIN", "scood/texture", "fpr95", 42.52),
        ("10", "cifar10", "AMP", "scood/places365", "aupr_out", 97.19),
        ("11", "cifar100", "Energy", "scood/cifar10", "aupr_in", 80.01),
        ("11", "cifar100", "AMP", "scood/places365", "aupr_out", 90.09),
        ("12", "cifar10", "MSP", "isun", "tnr95", 44.6),
        ("12", "cifar10", "Gram", "tiny-imagenet-crop", "auroc", 96.2),
        ("12", "cifar100", "AMP", "cifar10", "dtacc", 73.8),
    ],
)
def test_a_number_is_the_printed_one(table, id_set, method, ood_set, metric, value):
    numbers = one(table=table, id_set=id_set, method=method, ood_set=ood_set, metric=metric)
    assert numbers.value == value
    assert numbers.deviation is None


def test_the_ablation_names_corruptions_and_anchors():
    numbers = {(r.corruption, r.anchors): r.value for r in reported(table=8)}
    assert numbers[(), 2] == 50.71
    assert numbers[("jitter", "blur"), 10] == 6.36
    assert numbers[("jitter", "blur", "flip", "gray", "crop"), 20] == 5.22
    assert numbers[("jitter", "blur", "flip", "gray", "crop"), 5] == 5.19  # the AMP of Table 2 on SVHN
    switches = {f.name for f in dataclasses.fields(Corruption) if f.default is True}
    assert {name for corruption, _ in numbers for name in corruption} == switches
    assert len(numbers) == 4 * 4
    assert set(numbers) == set(product({c for c, _ in numbers}, (2, 5, 10, 20)))
    assert all(r.corruption is r.anchors is None for r in EVERY if r.table != "8")


def test_deviations_accuracies_and_remarks_are_kept():
    deviations = {
        ("unanchored", 91.77, 1.85),
        ("DUQ", 92.70, 1.30),
        ("DeepEnsemble", 94.70, None),
        ("AMP", 97.41, 0.72),
    }
    assert {(r.method, r.value, r.deviation) for r in reported(table=9)} == deviations
    assert all(r.deviation is None for r in EVERY if r.table != "9")
    accuracies = {("cifar10", "wrn-40-2", 95.1), ("cifar100", "wrn-40-2", 76.1), ("imagenet", "resnet50", 76.0)}
    assert {
        (r.id_set, r.network, r.value) for r in reported(metric="accuracy", table="text", method="AMP")
    } == accuracies
    mcd = {("5", "MCDropout"), *((table, "ClassifierDiscrepancy") for table in ("6", "10", "11"))}  # one name for two
    assert {(r.table, r.method) for r in EVERY if r.printed_as == "MCD"} == mcd
    marked = {"Mahalanobis*", "OutlierExposure", "ClassifierDiscrepancy", "UDG"}
    assert all(r.uses_outliers == (r.method in marked) for r in EVERY)
    for r in reported(table=2, metric="aupr_in"):
        assert (r.doubt is not None and "not comparable" in r.doubt) == (r.method == "AMP")


# In-distribution sets, methods, OOD sets with the average, metrics.
SIZES = {
    "2": (2, 4, 7, 3),
    "3": (2, 6, 1, 3),
    "4": (2, 5, 1, 2),
    "5": (1, 7, 1, 4),
    "6": (2, 6, 1, 4),
    "7": (2, 4, 5, 2),
}
SIZES |= {"9": (1, 4, 1, 1), "10": (1, 6, 7, 4), "11": (1, 6, 7, 4), "12": (2, 4, 7, 3)}


@pytest.mark.parametrize(("table", "sizes"), SIZES.items())
def test_no_cell_of_a_table_is_missing_or_there_twice(table, sizes):
    numbers = reported(table=table)
    by_set = {i: {r.ood_set for r in numbers if r.id_set == i} for i in {r.id_set for r in numbers}}
    methods, metrics = {r.method for r in numbers}, {r.metric for r in numbers}
    assert (len(by_set), len(methods), len(next(iter(by_set.values()))), len(metrics)) == sizes
    cells = {(i, m, s, k) for i, sets in by_set.items() for m, s, k in product(methods, sets, metrics)}
    assert Counter((r.id_set, r.method, r.ood_set, r.metric) for r in numbers) == Counter(cells)
    for r in numbers:
        assert 0 <= r.value <= 100
        assert round(r.value / unit(r)) * unit(r) == pytest.approx(r.value, abs=1e-9)  # the decimals of its table


# --- numbers against numbers ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("number", "expected", "rounding"), RECOMPUTED, ids=named)
def test_a_number_agrees_with_what_follows_from_others_unless_it_is_marked_as_a_slip(number, expected, rounding):
    agrees = abs(number.value - expected) <= rounding + 1e-9
    assert agrees == (number.slip is None), f"printed {number.value}, others give {expected:.4f}"


def test_a_slip_says_what_was_printed_and_what_follows_from_the_others():
    expected, slips = {named(n): value for n, value, _ in RECOMPUTED}, [r for r in EVERY if r.slip]
    for number in slips:
        printed, follows = re.match(r"printed as ([\d.]+); .*?(?:is|has) ([\d.]+)", number.slip).groups()
        assert float(printed) == number.value
        assert abs(float(follows) - expected[named(number)]) <= unit(number) / 2 + 1e-9
    assert Counter(r.table for r in slips) == {"2": 2, "4": 1, "6": 1, "7": 16, "10": 1}
    assert all(r.slip for r in reported(table=7, ood_set=AVERAGE))
    # Energy and Mahalanobis are not in the table of single sets; every other average follows from others.
    alone = {named(r) for r in EVERY if r.ood_set == AVERAGE} - set(expected)
    unprinted = product(CIFARS, ("Energy", "Mahalanobis*"), ("fpr95", "auroc", "dtacc"))
    assert alone == {f"3-{i}-{m}-average-{k}" for i, m, k in unprinted}


@pytest.mark.parametrize("number", [r for r in reported(table=7, ood_set=AVERAGE) if in_table_12(r)], ids=named)
def test_the_averages_over_resized_sets_are_over_six_sets(number):
    six = column("7", number) + [in_details(number, ood_set=s) for s in LSUN]
    assert len(six) == 6
    assert abs(mean(six) - number.value) <= 0.1
    assert "mean of six is the printed one" in number.slip


def test_impossible_combinations_are_marked():
    """A ROC curve through (FPR, 0.95) bounds AUROC and DTACC, and DTACC bounds AUROC."""
    rows = defaultdict(dict)
    for r in EVERY:
        rows[r.table, r.id_set, r.method, r.ood_set][r.metric] = r
    checked, impossible = 0, []
    for place, cells in rows.items():
        value = {m: r.as_fpr95().value / 100 if m in {"tnr95", "fpr95"} else r.value / 100 for m, r in cells.items()}
        f, a, d = value.get("tnr95", value.get("fpr95")), value.get("auroc"), value.get("dtacc")
        held = []
        if f is not None and a is not None:
            held.append(0.95 * (1 - f) - 1e-3 <= a <= 1 - 0.05 * f + 1e-3)
        if f is not None and d is not None:
            held.append(d >= (0.95 + 1 - f) / 2 - 1e-3)
        if a is not None and d is not None:
            gain = 2 * d - 1  # the largest height of the curve above the diagonal
            held.append(gain - 1e-3 <= a <= 1 - (1 - gain) ** 2 / 2 + 1e-3)
        checked += bool(held)
        if not all(held):
            impossible.append(place)
    assert checked > 200
    assert impossible == [("12", "cifar10", "ODIN", "lsun-resize")]
    assert all("impossible" in rows[impossible[0]][m].doubt for m in ("tnr95", "dtacc"))


# --- names ----------------------------------------------------------------------------------------------------------


def test_methods_networks_metrics_and_sets_have_kedge_s_names():
    assert {r.method.removesuffix("*") for r in EVERY} <= {kind.__name__ for kind in DETECTORS.values()} | OTHERS
    assert {r.network for r in EVERY} <= set(models.model_names())
    assert {r.metric for r in EVERY} <= {*DETECTION_METRICS, "tnr95", "accuracy"}
    assert {r.metric for r in EVERY if r.ood_set is None} == {"accuracy"}
    for r in EVERY:
        assert r.id_set in SOURCES
        if r.ood_set in {None, AVERAGE} or r.ood_set in SOURCES:
            continue
        source, _, part = r.ood_set.partition("/")
        splits = {"scood": f"{r.id_set}/test_{part}", "imagenet-c": part}
        assert part in FILTERS if source == "lsun-test" else splits[source] in SOURCES[source].splits


# --- selection ------------------------------------------------------------------------------------------------------


def test_arguments_narrow_the_numbers_down_together():
    chosen = {"table": "12", "id_set": "cifar10", "method": "Gram", "ood_set": "svhn", "network": "resnet34-cifar"}
    expected = [r for r in EVERY if all(getattr(r, name) == value for name, value in chosen.items())]
    assert reported(**chosen) == expected
    assert [r.metric for r in expected] == ["tnr95", "auroc", "dtacc"]
    assert reported(table=12, metric="fpr95") == []  # both known, nowhere together
    assert reported(table=12) == reported(table="12") != []
    reported(table=9).clear()  # a copy
    assert len(reported(table=9)) == 4


@pytest.mark.parametrize("argument", ["table", "id_set", "method", "ood_set", "metric", "network"])
def test_an_unknown_name_is_an_error_with_the_known_ones(argument):
    known = ", ".join(dict.fromkeys(repr(getattr(r, argument)) for r in EVERY if getattr(r, argument) is not None))
    with pytest.raises(InputError, match=re.escape(f"{argument} must be one of {known}; got 'cifar-10'")):
        reported(**{argument: "cifar-10"})


def test_tnr_is_given_as_fpr_on_request():
    number = one(table=12, id_set="cifar10", method="MSP", ood_set="isun", metric="tnr95")
    assert number.as_fpr95() == dataclasses.replace(number, metric="fpr95", value=55.4)
    assert number.as_fpr95().as_fpr95() == number.as_fpr95()
    with pytest.raises(InputError, match=r"metric must be 'tnr95' or 'fpr95' .*; got 'auroc'"):
        one(table=12, id_set="cifar10", method="MSP", ood_set="isun", metric="auroc").as_fpr95()
