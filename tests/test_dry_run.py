"""The dry run of a study: which sets are here, and what the whole would take, from a few steps and batches."""

from dataclasses import replace
from unittest import mock

import pytest
import torch
from typer.testing import CliRunner

from kedge import KNN, ImageSet
from kedge.cli import app
from kedge.data import StreamedSet
from kedge.detectors import base
from kedge.detectors.registry import post_hoc
from kedge.errors import NotReadyError
from kedge.models import build
from kedge.studies import STUDIES
from kedge.studies.dry_run import Line, dry_run
from kedge.studies.plan import MethodPlan, Need, Sets
from kedge.studies.stand_ins import few_images, wanted
from kedge.studies.study import Setting, smoke_data
from kedge.training import recipe, train


def quiet(_):
    pass


def smoke_suite(needs=(), **changes):
    (suite, _) = STUDIES["cifar-wrn"](Setting("smoke")).suites
    sets = Sets(smoke_data, tuple(needs), (3, 16, 16), **changes)
    return replace(suite, data=sets)


def missing():
    raise NotReadyError("put it there")


NEEDS = (
    Need("train", "large", 5_000, missing),
    Need("held out", "part of large", 500),
    Need("test", "noise", 200, lambda: ImageSet(torch.zeros(200, 3, 16, 16, dtype=torch.uint8), name="noise")),
    Need("ood", "elsewhere", 300, missing),
)


def test_numbers_of_images_come_from_the_declaration_and_missing_sets_are_named():
    outcome = dry_run(smoke_suite(NEEDS).only("MSP", "AMP"), {}, quiet)
    assert outcome.sets.missing == {"large": "put it there", "elsewhere": "put it there"}
    assert {line.name: line.images for line in outcome.trainings} == {"anchored": 5_000, "unanchored": 5_000}
    scored = {line.name: line.images for line in outcome.scorings}
    assert scored["MSP"] == scored["AMP"] == 500 + 200 + 300
    assert all(line.milliseconds > 0 and not line.note for line in (*outcome.trainings, *outcome.scorings))
    assert outcome.hours[0] == pytest.approx(sum(5_000 * line.milliseconds / 3.6e6 for line in outcome.trainings))
    assert outcome.memory["images"] == (200 + 300 + 2 * 5_500) * 3 * 16 * 16
    assert outcome.disk["scores"] == 2 * (200 + 300) * (2 * 4 * 4 + 40)
    sets, lines, sums = (table.markdown() for table in outcome.tables())
    assert "| large | train | 5,000 | no |" in sets
    assert "| noise | test | 200 | yes |" in sets
    assert "| AMP | row | 1,000 |" in lines
    assert "| hours |" in sums


def test_time_is_in_proportion_to_images_and_epochs():
    (suite,) = (smoke_suite(NEEDS),)
    longer = {name: replace(plan, recipe=replace(plan.recipe, epochs=7)) for name, plan in suite.networks.items()}
    outcome = dry_run(replace(suite, networks=longer).only("MSP"), {}, quiet)
    assert {line.name: line.images for line in outcome.trainings} == {"unanchored": 7 * 5_000}  # no other is read
    assert Line("a network", 3_600, 1000.0).hours == 1.0


def test_networks_that_differ_in_their_seed_alone_are_measured_once():
    (suite,) = STUDIES["uncertainty"](Setting("smoke")).suites
    assert len(suite.networks) == 4
    outcome = dry_run(suite, {}, quiet)
    time = {line.name: line.milliseconds for line in outcome.trainings}
    assert time["unanchored"] == time["unanchored 1"]
    assert len(set(time.values())) == 3


def test_networks_that_differ_in_their_length_alone_are_both_measured():
    suite = smoke_suite(NEEDS).only("MSP")
    longer = replace(suite.networks["unanchored"], recipe=replace(suite.networks["unanchored"].recipe, epochs=7))
    rows = suite.methods | {"MSP, longer": replace(suite.methods["MSP"], networks=("longer",))}
    both = replace(suite, networks=suite.networks | {"longer": longer}, methods=rows)
    images = {line.name: line.images for line in dry_run(both, {}, quiet).trainings}
    assert images["longer"] == 7 * images["unanchored"]


def test_streamed_training_images_are_made_as_files_and_found_ones_are_used(tmp_path):
    sets = wanted(smoke_suite(NEEDS, streamed=True), quiet)
    few = few_images(sets, {"train": 20, "held out": 6, "test": 5, "outliers": 0}, 4, tmp_path)
    assert isinstance(few.train, StreamedSet)
    assert few.train[0][0].size == (500, 375)
    assert 50_000 < (tmp_path / "0.jpg").stat().st_size < 200_000  # ImageNet's have 110 KB on average
    assert (len(few.held_out), len(few.test), few.outliers) == (6, 5, None)
    assert not few.test.images.any()  # the set that is here
    assert few.held_out.images.any()
    many = few_images(sets, {"train": 20, "held out": 6, "test": 5, "outliers": 0}, 1000, tmp_path / "many")
    assert few.train.labels.unique().tolist() == [0, 1, 2, 3]
    assert many.train.labels.bincount().tolist() == [2] * 10  # a covariance within classes takes two images of one


def test_rows_that_read_extracted_features_are_measured():
    suite = smoke_suite(NEEDS).only("MSP")
    rows = suite.methods | {"KNN": MethodPlan(KNN, ("unanchored",), {"k": 3})}
    lines = {line.name: line for line in dry_run(replace(suite, methods=rows, extract=True), {}, quiet).scorings}
    assert not lines["KNN"].note
    assert lines["KNN"].milliseconds > 0


def test_a_row_that_cannot_be_measured_says_why(monkeypatch):
    suite = smoke_suite(NEEDS).only("MSP", "Energy")
    monkeypatch.setattr(suite.methods["MSP"].kind, "calibrate", mock.Mock(side_effect=NotReadyError("no labels")))
    lines = {line.name: line for line in dry_run(suite, {}, quiet).scorings}
    assert lines["MSP"].note == "not measured: no labels"
    assert lines["Energy"].milliseconds > 0


def test_every_full_study_of_the_paper_declares_its_sets():
    for name in ("cifar-wrn", "cifar-resnet34", "near-ood", "imagenet-c", "scood", "resizing", "ablation",
                 "uncertainty", "openood-cifar10", "openood-imagenet200", "openood-imagenet"):  # fmt: skip
        for suite in STUDIES[name](Setting("full")).suites:
            roles = [need.role for need in suite.data.needs]
            assert roles[:3] == ["train", "held out", "test"], name
            assert "ood" in roles
            assert ("outliers" in roles) == any(run_needs_outliers(suite, label) for label in suite.methods)
    (imagenet,) = STUDIES["imagenet-c"](Setting("full")).suites
    counts = [need.images for need in imagenet.data.needs]
    assert counts == [1_153_050, 128_117, *(50_000,) * 6]
    assert (imagenet.data.shape, imagenet.data.streamed) == ((3, 224, 224), True)


def run_needs_outliers(suite, label):
    row = suite.methods[label]
    kinds = (suite.networks[name].method for name in row.networks)
    return row.outliers or any(kind is not None and kind.needs_outliers for kind in kinds)


def test_a_detector_says_whether_it_reads_the_training_images(monkeypatch):
    images = ImageSet(torch.randint(0, 256, (48, 3, 16, 16), dtype=torch.uint8), torch.arange(48) % 4)
    net = train(build("compact", width=4, classes=4), images, recipe("demo", epochs=1, batch=16))
    for name, (kind, options) in post_hoc(unanchored=True).items():
        spy = mock.Mock(wraps=base.training_prints)
        monkeypatch.setattr(base, "training_prints", spy)
        detector = kind(net, **options).fit(images)
        read = sum(map(len, spy.call_args.args[2]))
        assert detector.reads_train == (read > 0), name


def test_the_command_prints_the_tables_and_leaves_nothing_behind(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["reproduce", "near-ood", "--scale", "smoke", "--rows", "MSP", "--dry-run"])
    assert result.exit_code == 0, result.output
    assert "GB of memory" in result.output
    assert not list(tmp_path.iterdir())
    refused = CliRunner().invoke(app, ["reproduce", "photos", "--dry-run"])
    assert refused.exit_code != 0
