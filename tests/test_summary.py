"""Evaluations over seeds: means, deviations, and the forms of the table."""

import dataclasses
import json
import statistics

import pytest
import torch
from rich.console import Console

import kedge
from kedge.errors import InputError
from kedge.evaluation import SeedSummary, SeedValues, TextTable, evaluate


def images(n, name, seed) -> kedge.ImageSet:
    pixels = torch.randint(0, 256, (n, 1, 4, 4), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return kedge.ImageSet(pixels, torch.arange(n) % 2, name=name)


def evaluation(seed, kinds=(kedge.MSP, kedge.Energy), labelled=True) -> kedge.evaluation.Evaluation:
    torch.manual_seed(seed)
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 2))
    detectors = {kind.__name__: kind(net).fit(images(20, "train", 1)).calibrate(images(30, "c", 2)) for kind in kinds}
    test = images(25, "test", 3)
    if not labelled:
        test = kedge.ImageSet(test.images, name="test")
    return evaluate(detectors, test, [images(15, "near", 4), images(15, "far", 5)])


@pytest.fixture(scope="module")
def three() -> SeedSummary:
    return SeedSummary({seed: evaluation(seed) for seed in (0, 1, 2)})


def test_means_and_deviations_are_over_the_seeds(three):
    for label in ("MSP", "Energy"):
        by_hand = [e.results[label].metrics["near"]["auroc"].value for e in three.evaluations.values()]
        spread = three.value(label, "auroc", "near")
        assert spread.values == tuple(by_hand)
        assert spread.mean == pytest.approx(sum(by_hand) / 3)
        assert spread.deviation == pytest.approx(statistics.stdev(by_hand))
        both = [
            (e.results[label].metrics["near"]["fpr95"].value + e.results[label].metrics["far"]["fpr95"].value) / 2
            for e in three.evaluations.values()
        ]
        assert three.value(label, "fpr95").values == pytest.approx(tuple(both))
        assert three.value(label, "accuracy").values == tuple(
            e.results[label].accuracy for e in three.evaluations.values()
        )


def test_one_seed_has_no_deviation():
    one = SeedSummary({0: evaluation(0)})
    assert one.value("MSP", "auroc").deviation is None
    assert "±" not in one.table().markdown()
    assert "seeds" not in one.table().caption


def test_without_labels_there_is_no_accuracy():
    one = SeedSummary({0: evaluation(0, labelled=False)})
    assert one.value("MSP", "accuracy") is None
    assert one.table(("accuracy", "auroc")).rows[0][1] == ""


def test_the_table_has_a_row_per_method_and_says_what_it_means_of(three):
    table = three.table(("auroc", "fpr95"))
    assert table.heads == ("method", "AUROC ↑", "FPR95 ↓", "passes", "ms")
    assert [row[0] for row in table.rows] == ["MSP", "Energy"]
    assert table.rows[0][1] == three.value("MSP", "auroc").words()
    assert "means over 2 OOD sets, mean ± deviation over 3 seeds" in table.caption
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
    with pytest.raises(InputError, match="at least one"):
        SeedSummary({})
    with pytest.raises(InputError, match="the same methods; those of seed 1 differ"):
        SeedSummary({0: evaluation(0), 1: evaluation(1, kinds=(kedge.MSP,))})
    other = dataclasses.replace(three.first, id_name="near")
    with pytest.raises(InputError, match="sets of the same names; those of seed 1 differ"):
        SeedSummary({0: three.first, 1: other})


def test_plain_data_goes_through_json(three):
    plain = json.loads(json.dumps(three.as_dict()))
    assert plain["summary"]["MSP"]["auroc"]["values"] == list(three.value("MSP", "auroc").values)
    assert plain["seeds"]["2"]["results"]["Energy"]["aurc"] == three.evaluations[2].results["Energy"].aurc


def test_a_spread_is_in_percent():
    assert SeedValues((0.1234,)).words() == "12.3"
    assert (
        SeedValues((0.1, 0.3)).words() == "20.0 ± 14.1"
    )  # the deviation of two values is their difference over root two


TABLE = TextTable("a & b: 50 % of [x]", ("method", "AUROC ↑"), (("A_1 | B", "1.0 ± 0.1"), ("[bold]C", "2.0")))


def test_markdown_escapes_what_would_break_the_table():
    lines = TABLE.markdown().splitlines()
    assert lines[0] == "| method | AUROC ↑ |"
    assert lines[1] == "|---|---:|"
    assert lines[2] == "| A_1 \\| B | 1.0 ± 0.1 |"
    assert lines[-1] == "a & b: 50 % of [x]"


def test_latex_escapes_its_special_characters():
    text = TABLE.latex()
    assert r"A\_1 | B & 1.0 $\pm$ 0.1 \\" in text
    assert r"AUROC $\uparrow$ \\" in text
    assert r"\caption{a \& b: 50 \% of [x]}" in text
    assert text.count(r"\begin{tabular}{lr}") == text.count(r"\end{tabular}") == 1


def test_a_terminal_shows_brackets_as_they_are():
    console = Console(width=100, record=True)
    with console.capture() as captured:
        console.print(TABLE.terminal())
    assert "[bold]C" in captured.get()


def test_a_narrow_terminal_wraps_labels_and_cuts_no_number():
    rows = (("a method with a name that is as long as this", "88.3 ± 0.3", "57.6"), ("short", "1.0", "2.0"))
    console = Console(width=40, record=True)
    with console.capture() as captured:
        console.print(TextTable("", ("method", "a set of images, validation", "mean"), rows).terminal())
    assert "…" not in captured.get()
    assert all(word in captured.get() for row in rows for cell in row for word in cell.split())
