"""The studies of the paper: each runs from end to end on generated images, and names the data that is missing."""

import json
import re
from fnmatch import fnmatch
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import kedge
from helpers import picture, run_cli
from kedge.errors import NotReadyError
from kedge.evaluation import SeedSummary, evaluate
from kedge.studies import STUDIES, MethodPlan, NetworkPlan, PaperTable, Protocol, Setting, Suite, sets
from kedge.studies.ablation import ANCHORS, CUMULATIVE
from kedge.studies.commands import StudyProgress
from kedge.studies.paper import reported
from kedge.studies.publish import beside_paper, command_line
from kedge.studies.study import smoke_data
from kedge.training import Recipe
from test_report import check

reproduce = partial(run_cli, "reproduce", columns=200)
OPENOOD = [name for name in STUDIES if name.startswith("openood-")]


SOME = {  # rows of the largest studies: every network, and every way to score one of them
    "insight": ("*: Energy", "anchored: *", "compact, same class: *", "unanchored: *"),
    "methods": ("*(unanchored)", "AMP*", "DeepEnsemble*", "*[!)]"),
    "ablation": ("T: *, K = 2", "AMP, *", "*, same network", "*unanchored*", "low-level statistics"),
}


# The benchmarks of OpenOOD are all the same at the smoke scale.
@pytest.mark.parametrize("name", [name for name in STUDIES if name not in OPENOOD[1:]])
def test_every_study_runs_at_the_smoke_scale(name, tmp_path):
    patterns = SOME.get(name, ("*",))
    rows = [word for pattern in patterns for word in ("--rows", pattern)]
    result = reproduce(name, "--scale", "smoke", "--out", tmp_path, *rows)
    assert result.exit_code == 0, result.output
    for suite in STUDIES[name](Setting("smoke")).suites:
        labels = [label for label in suite.methods if any(fnmatch(label, pattern) for pattern in patterns)]
        networks = {each for label in labels for each in suite.methods[label].networks}
        assert networks == set(suite.networks)
        folder = tmp_path / suite.name
        check((folder / "report-0.html").read_text())
        numbers = json.loads((folder / "metrics.json").read_text())
        assert list(numbers["summary"]) == labels
        for label, by_metric in numbers["summary"].items():
            assert all(0 <= by_metric[metric]["mean"] <= 1 for metric in suite.protocol.metrics), label
        text = (folder / "tables.md").read_text()
        assert all(f"| {label.rstrip('*')}" in text for label in labels)
        assert r"\begin{tabular}" in (folder / "tables.tex").read_text()


def test_a_finished_study_is_not_trained_again(tmp_path, monkeypatch):
    steps = []
    monkeypatch.setattr(StudyProgress, "on_training", lambda self, network, p: steps.append(network))
    for trains in (True, False):
        assert reproduce("uncertainty", "--scale", "smoke", "--out", tmp_path, "--overwrite").exit_code == 0
        assert ("unanchored" in steps) == trains
        steps.clear()


def test_a_study_runs_some_of_its_rows(tmp_path):
    result = reproduce("insight", "--scale", "smoke", "--out", tmp_path, "--rows", "unanchored: *", "--rows", "*: KNN")
    assert result.exit_code == 0, result.output
    (summary,) = (json.loads(path.read_text())["summary"] for path in tmp_path.glob("*/metrics.json"))
    assert {label.partition(": ")[0] for label in summary} == {"unanchored", "anchored"}
    assert [label for label in summary if label.startswith("anchored")] == ["anchored: KNN"]


def test_what_is_unknown_is_named():
    assert "NAME must be one of 'methods', 'cifar-wrn'" in str(reproduce("cifar").exception)
    assert "--scale must be one of 'full', 'small', 'smoke'" in str(reproduce("ablation", "--scale", "huge").exception)


def test_without_its_data_a_study_says_how_to_get_it(tmp_path):
    result = reproduce("cifar-wrn", "--data-dir", tmp_path / "empty", "--out", tmp_path)
    assert isinstance(result.exception, NotReadyError)
    output = re.sub(r"\s+", " ", result.output)
    assert "cifar10 left out: cifar10 (train) is not in" in output
    assert "run `kedge data get cifar100`" in output


def test_brackets_in_paths_and_hints_are_shown(tmp_path, monkeypatch):
    def missing(run):
        raise NotReadyError("it needs lmdb: pip install 'kedge[lsun]'")

    monkeypatch.setattr("kedge.studies.run.SuiteRun.run", missing)
    result = reproduce("uncertainty", "--scale", "smoke", "--out", tmp_path / "[red]")
    assert "pip install 'kedge[lsun]'" in result.output


OWN = ("methods", "cifar10-fast", "cifar10-longer", "insight", *OPENOOD)  # studies that the paper has no table of


@pytest.mark.parametrize("scale", ["full", "small"])
@pytest.mark.parametrize("name", [name for name in STUDIES if name not in OWN])
def test_every_study_of_the_paper_is_declared_at_every_scale(name, scale):
    for suite in STUDIES[name](Setting(scale)).suites:
        for plan in suite.networks.values():
            described = plan.described()
            assert (described["network"] == "compact") == (scale == "small")
            assert scale == "small" or described["recipe"]["epochs"] in (120, 200)
        assert set(suite.protocol.metrics) <= {"fpr95", "auroc", "aupr_in", "aupr_out", "dtacc"}


def test_at_the_full_scale_rows_and_columns_are_those_of_the_paper():
    for name in ("cifar-wrn", "cifar-resnet34", "near-ood", "imagenet-c", "scood", "resizing", "uncertainty"):
        for suite in STUDIES[name](Setting("full")).suites:
            printed = reported(table=suite.paper.table, id_set=suite.paper.id_set, network=suite.paper.network)
            assert {r.method for r in printed} <= {plan.paper for plan in suite.methods.values()}, name
            assert {r.metric.replace("tnr95", "fpr95") for r in printed} <= set(suite.protocol.metrics)


def test_the_ablation_has_a_row_for_each_cell_of_the_paper_s_table():
    (suite,) = STUDIES["ablation"](Setting("small")).suites
    for name in CUMULATIVE:
        for k in ANCHORS:
            assert suite.methods[f"T: {name}, K = {k}"].options == {"k": k}
    corruptions = {each.corruption for each in reported(table=8)}
    rows = {tuple(sorted(switches)) for switches in CUMULATIVE.values()}
    assert {tuple(sorted(corruption)) for corruption in corruptions} == rows
    assert {each.anchors for each in reported(table=8)} == set(ANCHORS)
    assert {each.row for each in reported(table=8)} == {plan.paper for plan in suite.methods.values()} - {None}


def scood_files(home):
    """SCOOD's folders with a few images; of three in each OOD list the second shows a known class, save in SVHN's."""
    lists = home / "data" / "imglist" / "benchmark_cifar10"
    lists.mkdir(parents=True)
    labels = {"train_cifar10": range(10), "train_tin": (-1, 3, -1), "test_cifar10": range(4), "test_svhn": (-1, -1)}
    labels |= {f"test_{name}": (-1, 8, -1) for name in ("texture", "tin", "lsun", "places365", "cifar100")}
    for name, meant in labels.items():
        lines = []
        for number, label in enumerate(meant):
            file = f"{name}/{number}.png"
            (home / "data" / "images" / name).mkdir(parents=True, exist_ok=True)
            picture(number, (32, 32)).save(home / "data" / "images" / file)
            lines.append(f"{file} " + json.dumps({"label": -1, "sc_label": label}))
        (lists / f"{name}.txt").write_text("\n".join(lines))


def test_in_scood_a_list_s_known_images_count_as_known_against_that_list_alone(tmp_path):
    scood_files(tmp_path / "scood")
    data = STUDIES["scood"](Setting("small", data_dir=tmp_path)).suites[0].data(0)
    assert (data.test.name, data.test.labels.tolist()) == ("scood/cifar10", [0, 1, 2, 3])
    assert len(data.train) + len(data.held_out) == 10
    assert {s.name: len(s) for s in data.ood} == {
        f"scood/{name}": 2 for name in ("texture", "svhn", "tin", "lsun", "places365", "cifar100")
    }
    assert {ood: (s.name, s.labels.tolist()) for ood, s in data.known_in.items()} == {
        f"scood/{name}": (f"scood/{name} (known)", [8]) for name in ("texture", "tin", "lsun", "places365", "cifar100")
    }
    assert len(data.outliers) == 3


def test_a_suite_of_the_user_s_own_takes_a_few_lines(tmp_path):
    own = Suite(
        name="own",
        title="Own",
        networks={"unanchored": NetworkPlan("compact", Recipe(epochs=1, batch=16, crop=0), {"width": 4, "classes": 4})},
        methods={
            "MSP": MethodPlan(kedge.MSP, ("unanchored",)),
            "KNN": MethodPlan(kedge.KNN, ("unanchored",), {"k": 3}),
        },
        data=smoke_data,
    )
    (table,) = kedge.studies.SuiteRun(own, tmp_path).run().values()
    assert list(table.results) == ["MSP", "KNN"]


def test_recorded_commands_have_no_folders_of_one_machine(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    inside, outside = str(tmp_path / "runs" / "a"), "/elsewhere/networks"
    line = command_line(["reproduce", "methods", "--out", inside, f"--networks={outside}", "--rows", "AMP*"])
    assert line == "kedge reproduce methods --out runs/a --networks=networks --rows AMP*"
    docs = Path(__file__).parents[1] / "docs" / "results"
    commands = [json.loads(path.read_text()).get("record", {}).get("command", "") for path in docs.glob("*.json")]
    assert not any(part.startswith("/") for command in commands for part in command.split())


# Beside the paper.


def one_table(names, labels):
    data = smoke_data(0)
    renamed = [kedge.ImageSet(s.images, name=name) for s, name in zip(data.ood, names, strict=True)]
    net = kedge.models.build("compact", width=4, classes=4)
    detectors = {label: kedge.MSP(net).fit(data.train).calibrate(data.held_out) for label in labels}
    return SeedSummary({0: evaluate(detectors, data.test, renamed)})


def declared(labels, table):
    plan = {"unanchored": NetworkPlan("compact", Recipe(epochs=1), {})}
    methods = {label: MethodPlan(kedge.MSP, ("unanchored",), paper=name) for label, name in labels.items()}
    return Suite("a", "A", plan, methods, smoke_data, protocol=Protocol(), paper=table)


def test_the_paper_s_value_stands_in_brackets_where_it_has_the_cell():
    summary = one_table(["svhn", "street characters"], ["MSP", "own"])
    suite = declared({"MSP": "MSP", "own": None}, PaperTable("2", "cifar10", "wrn-40-2"))
    (theirs,) = reported(table=2, id_set="cifar10", method="MSP", ood_set="svhn", metric="fpr95")
    table = beside_paper(summary, suite, "fpr95")
    ours = summary.value("MSP", "fpr95", "svhn").words()
    assert table.rows[0][1] == f"{ours} ({theirs.value:g})"
    assert "(" not in table.rows[0][2]  # a set that stands in for another has its own name
    assert "(" not in table.rows[0][3]  # the paper's mean is over other sets
    assert "(" not in "".join(table.rows[1])
    assert "Table 2" in table.caption


def test_true_negative_rates_are_turned_and_slips_are_marked():
    summary = one_table(["cifar100", "svhn"], ["ODIN", "AMP"])
    suite = declared({"ODIN": "ODIN", "AMP": "AMP"}, PaperTable("12", "cifar10", "resnet34-cifar"))
    (tnr,) = reported(table=12, id_set="cifar10", method="AMP", ood_set="svhn", metric="tnr95")
    assert beside_paper(summary, suite, "fpr95").rows[1][2].endswith(f"({100 - tnr.value:.4g})")
    near = declared({"ODIN": "ODIN"}, PaperTable("4", "cifar10", "resnet34-cifar"))
    slipped = beside_paper(one_table(["cifar100", "svhn"], ["ODIN"]), near, "auroc").rows[0][1]
    assert slipped.endswith("(88.2?)")


# Sets.


def test_sets_are_found_or_named(tmp_path):
    np.savez(tmp_path / sets.FILES["scenes"], x=np.zeros((3, 32, 32, 3), np.uint8), y=np.arange(3))
    result = sets.find(["scenes", "traffic signs", "svhn"], side=32, data_dir=tmp_path)
    assert [(s.name, len(s), s.labels) for s in result.sets] == [("scenes", 3, None)]
    assert set(result.missing) == {"traffic signs", "svhn"}
    assert "put gtsrb_test_32.npz into" in result.missing["traffic signs"]
