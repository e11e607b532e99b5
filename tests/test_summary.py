"""Evaluations over seeds: means, deviations, the forms of the table; curves; and the Energy paper's protocol."""

import dataclasses
import json
import statistics

import numpy as np
import pytest
import torch
from rich.console import Console

import kedge
from kedge.errors import InputError
from kedge.evaluation import SeedSummary, SeedValues, TextTable, evaluate
from kedge.evaluation.protocol import redrawn
from kedge.evaluation.result import Curve
from kedge.metrics import detection_metrics


def images(n, name, seed) -> kedge.ImageSet:
    pixels = torch.randint(0, 256, (n, 1, 4, 4), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return kedge.ImageSet(pixels, torch.arange(n) % 2, name=name)


def evaluation(seed, kinds=(kedge.MSP, kedge.Energy), labels=True) -> kedge.evaluation.Evaluation:
    torch.manual_seed(seed)
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 2))
    detectors = {kind.__name__: kind(net).fit(images(20, "train", 1)).calibrate(images(30, "c", 2)) for kind in kinds}
    test = images(25, "test", 3) if labels else kedge.ImageSet(images(25, "test", 3).images, name="test")
    return evaluate(detectors, test, [images(15, "near", 4), images(15, "far", 5)])


@pytest.fixture(scope="module")
def three() -> SeedSummary:
    return SeedSummary({seed: evaluation(seed) for seed in (0, 1, 2)})


def test_means_and_deviations_are_over_the_seeds(three):
    for label in ("MSP", "Energy"):
        results = [e.results[label] for e in three.evaluations.values()]
        by_hand = [r.metrics["near"]["auroc"].value for r in results]
        values = three.value(label, "auroc", "near")
        assert values.values == tuple(by_hand)
        assert values.mean == pytest.approx(sum(by_hand) / 3)
        assert values.deviation == pytest.approx(statistics.stdev(by_hand))
        both = [(r.metrics["near"]["fpr95"].value + r.metrics["far"]["fpr95"].value) / 2 for r in results]
        assert three.value(label, "fpr95").values == pytest.approx(tuple(both))
        assert three.value(label, "accuracy").values == tuple(r.accuracy for r in results)
    assert SeedValues((0.1234,)).words() == "12.3"
    assert SeedValues((0.1, 0.3)).words() == "20.0 ± 14.1"  # the difference of two values over root two


def test_one_seed_has_no_deviation_and_without_labels_there_is_no_accuracy():
    one = SeedSummary({0: evaluation(0, labels=False)})
    assert one.value("MSP", "auroc").deviation is None
    assert "±" not in one.table().markdown()
    assert "seeds" not in one.table().caption
    assert one.value("MSP", "accuracy") is None
    assert one.table(("accuracy", "auroc")).rows[0][1] == ""


def test_the_table_has_a_row_per_method_and_says_what_it_means_of(three):
    table = three.table(("auroc", "fpr95"))
    assert table.heads == ("method", "AUROC ↑", "FPR95 ↓", "passes", "ms")
    assert [row[0] for row in table.rows] == ["MSP", "Energy"]
    assert table.rows[0][1] == three.value("MSP", "auroc").words()
    assert "means over 2 OOD sets, mean ± deviation over 3 seeds" in table.caption
    chosen = three.tables(80, ("nll", "oscr", "auroc", "scod_aurc", "brier"))
    assert [part.heads[1:-2] for part in chosen] == [("NLL ↓", "OSCR ↑", "AUROC ↑", "SCOD-AURC ↓"), ("Brier ↓",)]
    assert chosen[0].rows[0][1] == three.value("MSP", "nll").words("nll")
    assert "In % (NLL apart), means" in chosen[0].caption
    assert [len(part.heads) for part in three.tables(80)] == [7, 7]
    assert [len(part.heads) for part in three.tables(200)] == [11]
    by_set = three.by_set("auroc")
    assert by_set.heads == ("method", "near", "far", "mean")
    assert by_set.rows[1][2] == three.value("Energy", "auroc", "far").words()


def test_a_star_marks_what_learned_from_outliers(three):
    first = three.first
    results = {name: dataclasses.replace(r, uses_outliers=name == "MSP") for name, r in first.results.items()}
    starred = SeedSummary({0: dataclasses.replace(first, results=results)})
    assert [row[0] for row in starred.table().rows] == ["MSP *", "Energy"]
    assert [row[0] for row in starred.by_set("auroc").rows] == ["MSP *", "Energy"]


def test_evaluations_must_be_comparable(three):
    other_sets = dataclasses.replace(three.first, id_name="near")
    for evaluations, message in (
        ({}, "at least one"),
        ({0: three.first, 1: evaluation(1, kinds=(kedge.MSP,))}, "the same methods; those of seed 1 differ"),
        ({0: three.first, 1: other_sets}, "sets of the same names; those of seed 1 differ"),
    ):
        with pytest.raises(InputError, match=message):
            SeedSummary(evaluations)


def test_the_data_goes_through_json(three):
    data = json.loads(json.dumps(three.as_dict()))
    assert data["summary"]["MSP"]["auroc"]["values"] == list(three.value("MSP", "auroc").values)
    assert data["seeds"]["2"]["results"]["Energy"]["aurc"] == three.evaluations[2].results["Energy"].classifier["aurc"]


TABLE = TextTable("a & b: 50 % of [x]", ("method", "AUROC ↑"), (("A_1 | B", "1.0 ± 0.1"), ("[bold]C", "2.0")))


def test_markdown_and_latex_are_escaped():
    lines = TABLE.markdown().splitlines()
    assert lines[:3] == ["| method | AUROC ↑ |", "|---|---:|", "| A_1 \\| B | 1.0 ± 0.1 |"]
    assert lines[-1] == "a & b: 50 % of [x]"
    text = TABLE.latex()
    for line in (r"A\_1 | B & 1.0 $\pm$ 0.1 \\", r"AUROC $\uparrow$ \\", r"\caption{a \& b: 50 \% of [x]}"):
        assert line in text
    assert text.count(r"\begin{tabular}{lr}") == text.count(r"\end{tabular}") == 1


def test_a_narrow_terminal_wraps_labels_cuts_no_number_and_keeps_brackets():
    rows = (("[bold] method with a name as long as this", "88.3 ± 0.3", "57.6"), ("short", "1.0", "2.0"))
    console = Console(width=40)
    with console.capture() as captured:
        console.print(TextTable("", ("method", "a set of images, validation", "mean"), rows).terminal())
    assert "…" not in captured.get()
    assert all(word in captured.get() for row in rows for cell in row for word in cell.split())


def test_a_curve_has_the_values_of_results_and_sets_that_are_there_by_ascending_number(three):
    table = three.first
    series = {
        "mean": {10: ("Energy", None), 2.5: ("MSP", None), 20: ("gone", None)},
        "one set": {-1: ("MSP", "far"), 1: ("MSP", "nowhere"), 2: ("MSP", "test")},
        "gone": {1: ("Gram", "far")},
    }
    for metric in ("auroc", "fpr95"):
        values = Curve("Effect of K", "anchors", series, metric).values(table)
        assert list(values["mean"].items()) == [
            (n, table.results[d].mean(metric)) for n, d in ((2.5, "MSP"), (10, "Energy"))
        ]
        assert values["one set"] == {-1: table.results["MSP"].metrics["far"][metric].value}
        assert list(values) == ["mean", "one set"]
    assert Curve("", "", {}).values(table) == {}


def test_fewer_ood_images_are_drawn_again_and_again_the_same_for_every_detector(three):
    few = [images(40, "many", 4), images(3, "few", 5)]
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 2))
    msp = kedge.MSP(net).fit(images(20, "train", 1)).calibrate(images(30, "c", 2))
    table = evaluate({"MSP": msp, "again": msp}, images(50, "test", 3), few)
    again, rng = redrawn(table, ood_ratio=0.2, draws=3, seed=5), np.random.default_rng(5)
    picks = {name: [rng.permutation(n)[:10] for _ in range(3)] for name, n in (("many", 40), ("few", 3))}
    for label, result in table.results.items():
        inside = result.detections["test"].score
        for name, each in picks.items():
            drawn = [
                detection_metrics(inside, result.detections[name].score[p], table.right(label, name)) for p in each
            ]
            assert again.results[label].measured == tuple(drawn[0])
            for metric, estimate in again.results[label].metrics[name].items():
                assert estimate.value == pytest.approx(sum(d[metric].value for d in drawn) / 3)
                assert estimate.low is None
        assert again.results[label].metrics["few"]["auroc"].value == pytest.approx(result.metrics["few"]["auroc"].value)
        assert again.results[label].detections is result.detections
    for bad in ({"ood_ratio": 0.0}, {"draws": 0}):
        with pytest.raises(InputError, match=next(iter(bad))):
            redrawn(table, **{"ood_ratio": 0.2} | bad)
