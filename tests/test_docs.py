"""The pages that are written out of the code are up to date."""

import runpy
from pathlib import Path

import pytest

from kedge.detectors.registry import registered

DOCS = Path(__file__).parent.parent / "docs"


def test_the_page_of_methods_is_what_the_docstrings_say():
    made = runpy.run_path(str(DOCS / "methods.py"))["page"]()
    assert (DOCS / "methods.md").read_text() == made, "run `make tables`"


def test_every_registered_method_has_a_section_with_a_summary_and_says_when_to_use_it():
    text = (DOCS / "methods.md").read_text()
    for kind in registered().values():
        assert f"### {kind.__name__}\n\n**" in text
        (row,) = [line for line in text.splitlines() if f"[{kind.__name__}](#" in line]
        assert row.split("|")[-2].strip(), f"{kind.__name__} needs a sentence 'Use it ...' in its docstring"


TABLES = runpy.run_path(str(DOCS / "tables"))


@pytest.mark.parametrize("page", TABLES["PAGES"], ids=lambda page: page.name)
def test_tables_of_results_are_those_of_the_files(page):
    assert page.read_text() == TABLES["filled"](page.read_text()), "run `python docs/tables`"
    assert "<!-- table" in page.read_text()


def run_of(rows, seconds, images="a"):
    """The metrics.json of a run: a value by row, and one training."""
    results = {label: {"accuracy": value} for label, value in rows.items()}
    record = {"command": f"{seconds} s", "training hours": 0, "trainings": {f"net-{seconds}": {"seconds": seconds}}}
    return {"record": record, "seeds": {"0": {"sets": images, "results": results}}, "summary": dict(rows)}


def test_rows_of_another_run_take_their_place_among_the_results():
    order = ["one", "two", "three"]
    whole = TABLES["added"](run_of({"one": 1, "three": 3}, 3600), run_of({"two": 2, "three": 4}, 1800), order)
    assert list(whole["seeds"]["0"]["results"]) == list(whole["summary"]) == order
    assert whole["summary"] == {"one": 1, "two": 2, "three": 4}
    assert whole["seeds"]["0"]["results"]["three"] == {"accuracy": 4}
    assert whole["record"]["training hours"] == 1.5
    assert whole["record"]["command"] == "3600 s"  # that of the whole
    assert set(whole["record"]["trainings"]) == {"net-3600", "net-1800"}
    with pytest.raises(SystemExit, match="the same images"):
        TABLES["added"](run_of({"one": 1}, 1), run_of({"two": 2}, 1, images="b"), order)


def test_the_tasks_of_a_run_replace_those_of_the_results_and_say_how_they_were_made():
    def run_of(**tasks):
        record = {"command": " ".join(tasks), "seeds": [0], "made with": {}}
        return {"record": record, "results": {label: dict(tasks) for label in ("knn", "gen")}}

    known = run_of(a=1, b=1)
    both = TABLES["with_tasks"](known, run_of(b=2))
    assert both["results"] == {"knn": {"a": 1, "b": 2}, "gen": {"a": 1, "b": 2}}
    assert both["record"]["command"] == "a b"
    assert both["record"]["added"]["b"]["command"] == "b"
    assert TABLES["with_tasks"](known, run_of(a=3, b=3)) == run_of(a=3, b=3)


def test_further_seeds_of_a_part_are_added_and_other_rows_replace_it():
    known = {"results": {"knn": {"a": {"0": 1}}}}
    more = TABLES["with_seeds"](known, {"results": {"knn": {"a": {"1": 2}}}})
    assert more["results"] == {"knn": {"a": {"0": 1, "1": 2}}}
    assert TABLES["with_seeds"](known, {"results": {"gen": {"a": {"1": 2}}}})["results"] == {"gen": {"a": {"1": 2}}}
    assert TABLES["with_seeds"](known, {"results": {"knn": {"a": {"0": 3}}}})["results"] == {"knn": {"a": {"0": 3}}}


def test_sets_are_kept_apart_where_some_are_private():
    def result(*names):
        return {"sets": {name: {"auroc": 0.25 * k} for k, name in enumerate(names)}, "groups": {"far": list(names)}}

    found = {"results": {"knn": {"a": {"0": result("x", "y")}, "b": {"0": result("scenes", "y")}}}}
    kept = TABLES["by_group"](found)["results"]["knn"]
    assert kept["a"]["0"]["sets"] == {"far": {"auroc": 0.125}}
    assert kept["b"]["0"]["sets"] == found["results"]["knn"]["b"]["0"]["sets"]
