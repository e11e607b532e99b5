"""Suites: a declaration of networks, methods and sets; what is finished is not run again."""

import dataclasses
import zlib

import pytest
import torch

import kedge
from kedge.detectors import AMP, MSP, Energy, OutlierExposure
from kedge.errors import FileFormatError, InputError, NotReadyError
from kedge.models import build
from kedge.suites.plan import MethodPlan, NetworkPlan, Suite, SuiteData
from kedge.suites.run import SuiteRun
from kedge.training import Recipe

RECIPE = Recipe(epochs=1, batch=16, lr=0.05, crop=0)
SIZE = {"width": 4, "classes": 3, "channels": 1}


def images(n, name, seed=0) -> kedge.ImageSet:
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()) + seed)
    pixels = torch.randint(0, 256, (n, 1, 8, 8), dtype=torch.uint8, generator=generator)
    return kedge.ImageSet(pixels, torch.arange(n) % 3, name=name)


def data(seed) -> SuiteData:
    names = ("train", "held out", "test", "other", "more")
    train, held_out, test, *ood = (images(48, name, seed) for name in names)
    return SuiteData(train, held_out, test, tuple(ood), images(32, "outliers", seed))


def suite(**changes) -> Suite:
    declared = {
        "name": "tiny",
        "title": "Tiny",
        "networks": {
            "plain": NetworkPlan("compact", RECIPE, SIZE),
            "anchored": NetworkPlan("compact", RECIPE, SIZE, anchored=True),
            "exposed": NetworkPlan("compact", RECIPE, SIZE, method=OutlierExposure),
        },
        "methods": {
            "AMP": MethodPlan(AMP, ("anchored",), {"k": 3}),
            "MSP": MethodPlan(MSP, ("plain",)),
            "Energy": MethodPlan(Energy, ("plain",)),
            "OE": MethodPlan(OutlierExposure, ("exposed",)),
        },
        "data": data,
    }
    return Suite(**declared | changes)


def events(suite, folder):
    """Run a suite; give its tables, the networks that were trained and the methods that were scored."""
    trained, scored = [], []
    run = SuiteRun(
        suite,
        folder,
        on_training=lambda name, p: trained.append(name),
        on_scoring=lambda label, done, total: scored.append(label),
    )
    return run.run(), list(dict.fromkeys(trained)), list(dict.fromkeys(scored))


def plain(table):
    """A table as numbers, less its times."""
    made = table.as_dict()
    for result in made["results"].values():
        del result["milliseconds_per_image"]
    return made


def test_a_suite_trains_what_its_methods_need_and_scores_each_once(tmp_path):
    tables, trained, scored = events(suite(), tmp_path)
    assert trained == ["anchored", "plain", "exposed"]
    assert scored == list(tables[0].results) == ["AMP", "MSP", "Energy", "OE"]
    assert tables[0].ood_names == ("other", "more")
    assert [result.uses_outliers for result in tables[0].results.values()] == [False, False, False, True]
    assert tables[0].results["AMP"].cost.forward == 3


def test_a_network_that_no_method_needs_is_not_trained(tmp_path):
    _, trained, _ = events(suite(methods={"MSP": MethodPlan(MSP, ("plain",))}), tmp_path)
    assert trained == ["plain"]


def test_its_numbers_are_those_of_the_same_steps_by_hand(tmp_path):
    tables, _, _ = events(suite(seeds=(2,)), tmp_path)
    sets = data(2)
    with kedge.transforms.seeded(2):
        net = build("compact", **SIZE)
    net = kedge.train(net, sets.train, RECIPE, seed=2)
    detector = MSP(net).fit(sets.train).calibrate(sets.held_out)
    expected = kedge.evaluate({"MSP": detector}, sets.test, sets.ood).results["MSP"]
    ours = tables[2].results["MSP"]
    assert ours.metrics == expected.metrics
    assert torch.equal(ours.detections["other"].score, expected.detections["other"].score)


def test_what_is_finished_is_not_run_again_and_reads_back_the_same(tmp_path):
    before, _, _ = events(suite(), tmp_path)
    after, trained, scored = events(suite(), tmp_path)
    assert trained == scored == []
    assert plain(before[0]) == plain(after[0])
    for label, result in before[0].results.items():
        for name, detection in result.detections.items():
            for field in dataclasses.fields(detection):
                one, two = (getattr(d, field.name) for d in (detection, after[0].results[label].detections[name]))
                assert (one is None and two is None) or torch.equal(one, two)


def test_a_method_that_is_added_runs_alone(tmp_path):
    events(suite(), tmp_path)
    more = {**suite().methods, "MSP again": MethodPlan(MSP, ("plain",))}
    _, trained, scored = events(suite(methods=more), tmp_path)
    assert trained == []  # the training is finished in its folder
    assert scored == ["MSP again"]


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"methods": {"AMP": MethodPlan(AMP, ("anchored",), {"k": 4})}}, "method"),
        ({"resamples": 10}, "resamples"),
        ({"data": lambda seed: dataclasses.replace(data(seed), held_out=images(40, "x"))}, "held-out images"),
        ({"data": lambda seed: dataclasses.replace(data(seed), ood=(images(40, "x"),))}, "test sets"),
        ({"networks": suite().networks | {"anchored": NetworkPlan("compact", RECIPE, SIZE)}}, "networks"),
    ],
)
def test_a_cell_of_other_making_is_refused(tmp_path, changes, what):
    events(suite(methods={"AMP": suite().methods["AMP"]}), tmp_path)
    with pytest.raises(InputError, match=rf"amp\.cell was made with other .*{what}.* than the suite has now"):
        events(suite(**{"methods": {"AMP": suite().methods["AMP"]}} | changes), tmp_path)


def test_a_cell_that_is_damaged_is_named(tmp_path):
    only = suite(methods={"MSP": MethodPlan(MSP, ("plain",))})
    events(only, tmp_path)
    (cell,) = tmp_path.rglob("*.cell")
    cell.write_bytes(cell.read_bytes()[:100])
    with pytest.raises(FileFormatError, match=r"msp\.cell is truncated"):
        events(only, tmp_path)


def test_a_run_that_was_stopped_goes_on(tmp_path):
    whole, _, _ = events(suite(), tmp_path / "whole")

    def stop(label, done, total):
        if label == "MSP":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        SuiteRun(suite(), tmp_path / "parts", on_scoring=stop).run()
    parts, _, scored = events(suite(), tmp_path / "parts")
    assert scored == ["MSP", "Energy", "OE"]
    assert plain(parts[0]) == plain(whole[0])


def test_a_method_must_name_networks_of_the_suite():
    with pytest.raises(InputError, match=r"'MSP' must name networks of the suite, some of .*plain.*; got \['none'\]"):
        suite(methods={"MSP": MethodPlan(MSP, ("none",))})
    with pytest.raises(InputError, match="pass method= too"):
        NetworkPlan("compact", RECIPE, prepare={"a": 1})


def test_networks_of_the_user_s_own_are_made_by_a_function(tmp_path):
    def mine(hidden):
        return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, hidden), torch.nn.Linear(hidden, 3))

    networks = {"plain": NetworkPlan(mine, RECIPE, {"hidden": 5})}
    tables, _, _ = events(suite(networks=networks, methods={"MSP": MethodPlan(MSP, ("plain",))}), tmp_path)
    assert 0 <= tables[0].results["MSP"].mean("auroc") <= 1


def test_without_ood_sets_nothing_is_trained(tmp_path):
    alone = dataclasses.replace(data(0), ood=(), missing={"svhn": "get it there"})
    with pytest.raises(NotReadyError, match="no OOD set is here: get it there"):
        events(suite(data=lambda seed: alone), tmp_path)
    assert not list(tmp_path.rglob("*.ckpt"))


def test_without_outliers_the_methods_that_need_them_are_left_out(tmp_path):
    without = {**suite().methods, "tuned": MethodPlan(kedge.Mahalanobis, ("plain",), outliers=True)}
    tables, trained, _ = events(
        suite(methods=without, data=lambda seed: dataclasses.replace(data(seed), outliers=None)), tmp_path
    )
    assert list(tables[0].results) == ["AMP", "MSP", "Energy"]
    assert "exposed" not in trained
