"""Suites: a declaration of networks, methods and sets; what is finished is not run again."""

import dataclasses
import zlib

import pytest
import torch

import kedge
from helpers import labelled
from kedge.detectors import AMP, MSP, SVI, Energy, OutlierExposure
from kedge.errors import FileFormatError, InputError, NotReadyError
from kedge.models import build
from kedge.seeds import seeded
from kedge.studies.plan import MethodPlan, NetworkPlan, Suite, SuiteData
from kedge.studies.run import SuiteRun
from kedge.training import Recipe
from kedge.training.losses import SyntheticOutliers

RECIPE = Recipe(epochs=1, batch=16, lr=0.05, crop=0)
STILL = Recipe(epochs=1, batch=16, lr=1e-12, momentum=0.0, weight_decay=0.0, crop=0)
SIZE = {"width": 4, "classes": 3, "channels": 1}
BASE = NetworkPlan("compact", RECIPE, SIZE)
MSP_ROW = {"MSP": MethodPlan(MSP, ("base",))}


def images(n, name, seed=0):
    return labelled(n, 3, name, channels=1, seed=zlib.crc32(name.encode()) + seed)


def data(seed):
    names = ("train", "held out", "test", "other", "more")
    train, held_out, test, *ood = (images(48, name, seed) for name in names)
    return SuiteData(train, held_out, test, tuple(ood), images(32, "outliers", seed))


def changed(**parts):
    """The sets of seed 0, some of them replaced, for every seed."""
    return lambda seed: dataclasses.replace(data(0), **parts)


def suite(**changes):
    networks = {
        "base": BASE,
        "anchored": NetworkPlan("compact", RECIPE, SIZE, anchored=True),
        "exposed": NetworkPlan("compact", RECIPE, SIZE, method=OutlierExposure),
    }
    methods = {
        "AMP": MethodPlan(AMP, ("anchored",), {"k": 3}),
        **MSP_ROW,
        "Energy": MethodPlan(Energy, ("base",)),
        "OE": MethodPlan(OutlierExposure, ("exposed",)),
    }
    return Suite(**{"name": "tiny", "title": "Tiny", "networks": networks, "methods": methods, "data": data} | changes)


def events(suite, folder, **options):
    """Run a suite; return its tables, the networks that were trained and the methods that were scored."""
    trained, scored = [], []
    options["on_training"] = lambda name, p: trained.append(name)
    options["on_scoring"] = lambda label, done, total: scored.append(label)
    return SuiteRun(suite, folder, **options).run(), list(dict.fromkeys(trained)), list(dict.fromkeys(scored))


def shared(suite, folder):
    """Run a suite in its own folder, with networks that all suites share."""
    return events(suite, folder, networks=folder.parent / "networks")


def numbers(table):
    """A table as plain data, without its times."""
    plain = table.as_dict()
    for result in plain["results"].values():
        del result["milliseconds_per_image"]
    return plain


# --- running and resuming -------------------------------------------------------------------------------------------


def test_a_suite_trains_the_networks_of_its_methods_and_scores_each_once(tmp_path):
    tables, trained, scored = events(suite(), tmp_path)
    assert trained == ["anchored", "base", "exposed"]
    assert scored == list(tables[0].results) == ["AMP", "MSP", "Energy", "OE"]
    assert tables[0].ood_names == ("other", "more")
    assert [result.uses_outliers for result in tables[0].results.values()] == [False, False, False, True]
    assert tables[0].results["AMP"].cost.forward == 3
    assert events(suite(methods=MSP_ROW), tmp_path / "one row")[1] == ["base"]


def test_its_numbers_are_those_of_the_same_steps_by_hand(tmp_path):
    tables, _, _ = events(suite(seeds=(2,)), tmp_path)
    sets = data(2)
    with seeded(2):
        net = build("compact", **SIZE)
    detector = MSP(kedge.train(net, sets.train, RECIPE, seed=2)).fit(sets.train).calibrate(sets.held_out)
    expected = kedge.evaluate({"MSP": detector}, sets.test, sets.ood).results["MSP"]
    ours = tables[2].results["MSP"]
    assert ours.metrics == expected.metrics
    assert torch.equal(ours.detections["other"].score, expected.detections["other"].score)


def test_finished_cells_are_read_back_the_same(tmp_path):
    before, _, _ = events(suite(), tmp_path)
    after, trained, scored = events(suite(), tmp_path)
    assert trained == scored == []
    assert numbers(before[0]) == numbers(after[0])
    for label, result in before[0].results.items():
        for name, detection in result.detections.items():
            for field in dataclasses.fields(detection):
                one, two = (getattr(d, field.name) for d in (detection, after[0].results[label].detections[name]))
                assert torch.equal(one, two) if isinstance(one, torch.Tensor) else not isinstance(two, torch.Tensor)
    more = {**suite().methods, "MSP again": MethodPlan(MSP, ("base",))}
    assert events(suite(methods=more), tmp_path)[1:] == ([], ["MSP again"])


def test_some_rows_run_separately_and_the_whole_suite_reuses_them(tmp_path):
    whole = suite(leads=("AMP", "MSP"), draws={"AMP": ("OE",), "MSP": ("Energy",)})
    part = whole.only("M*", "Energy")
    assert (list(part.methods), part.leads, part.draws) == (["MSP", "Energy"], ("MSP",), {"MSP": ("Energy",)})
    tables, trained, scored = events(part, tmp_path)
    assert (trained, scored) == (["base"], ["MSP", "Energy"])
    again, trained, scored = events(whole, tmp_path)
    assert (trained, scored) == (["anchored", "exposed"], ["AMP", "OE"])
    assert all(numbers(again[0])["results"][label] == row for label, row in numbers(tables[0])["results"].items())
    with pytest.raises(InputError, match=r"rows must match .* got amp; it has AMP; MSP; Energy; OE"):
        suite().only("amp")


KNOWN = {"known_in": {"more": images(24, "more, known")}}


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"methods": {"MSP": MethodPlan(Energy, ("base",))}}, "method"),
        ({"resamples": 10}, "resamples"),
        ({"data": changed(held_out=images(40, "x"), **KNOWN)}, "held-out images"),
        ({"data": changed(ood=(images(40, "x"), images(48, "more")), **KNOWN)}, "test sets"),
        ({"networks": {"base": dataclasses.replace(BASE, anchored=True)}}, "networks"),
        ({"data": changed(known_in={"other": images(24, "more, known")})}, "known in"),
        ({"data": changed(shifted=(images(24, "more, known"),))}, "shifted"),
    ],
)
def test_a_cell_that_was_made_of_something_else_is_refused(tmp_path, changes, what):
    declared = {"methods": MSP_ROW, "data": changed(**KNOWN)}
    events(suite(**declared), tmp_path)
    with pytest.raises(InputError, match=rf"msp\.cell was made with other .*{what}.* than the suite has now"):
        events(suite(**declared | changes), tmp_path)


def test_a_damaged_cell_is_named(tmp_path):
    events(suite(methods=MSP_ROW), tmp_path)
    (cell,) = tmp_path.rglob("*.cell")
    cell.write_bytes(cell.read_bytes()[:100])
    with pytest.raises(FileFormatError, match=r"msp\.cell is truncated"):
        events(suite(methods=MSP_ROW), tmp_path)
    detector = SuiteRun(suite(methods=MSP_ROW), tmp_path).detector("MSP", 0)
    detector.save(cell)
    with pytest.raises(FileFormatError, match="must be a cell of a suite"):
        events(suite(methods=MSP_ROW), tmp_path)


def test_an_interrupted_run_is_resumed(tmp_path):
    whole, _, _ = events(suite(), tmp_path / "whole")

    def stop(label, done, total):
        if label == "MSP":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        SuiteRun(suite(), tmp_path / "parts", on_scoring=stop).run()
    parts, _, scored = events(suite(), tmp_path / "parts")
    assert scored == ["MSP", "Energy", "OE"]
    assert numbers(parts[0]) == numbers(whole[0])


@pytest.mark.parametrize(
    ("declare", "message"),
    [
        (lambda: suite(methods={"MSP": MethodPlan(MSP, ("none",))}), r"'MSP' must be of the suite, .*; got \['none'\]"),
        (lambda: NetworkPlan("compact", RECIPE, prepare={"a": 1}), "pass method= too"),
        (lambda: NetworkPlan("compact", RECIPE, method=SVI, loss=SyntheticOutliers()), "got .*, another loss"),
        (lambda: NetworkPlan("compact", RECIPE, share=0), "share must be above 0 and at most 1; got 0"),
        (lambda: NetworkPlan("compact", RECIPE, start="base", member=1), "member must be 0"),
        (lambda: suite(networks={"a": dataclasses.replace(BASE, start="b")}, methods={}), "from scratch; got 'b'"),
        (lambda: MethodPlan(MSP, ("base",), permuted=True), "MSP: it has no tau"),
    ],
)
def test_a_declaration_that_makes_no_sense_is_an_error(declare, message):
    with pytest.raises(InputError, match=message):
        declare()


def test_without_ood_sets_nothing_is_trained(tmp_path):
    alone = changed(ood=(), missing={"svhn": "get it there"})
    with pytest.raises(NotReadyError, match="needs at least one OOD set: get it there"):
        events(suite(data=alone), tmp_path)
    assert not list(tmp_path.rglob("*.ckpt"))


def test_without_outliers_the_methods_that_need_them_are_left_out(tmp_path):
    methods = {**suite().methods, "tuned": MethodPlan(kedge.Mahalanobis, ("base",), outliers=True)}
    tables, trained, _ = events(suite(methods=methods, data=changed(outliers=None)), tmp_path)
    assert list(tables[0].results) == ["AMP", "MSP", "Energy"]
    assert "exposed" not in trained


def test_the_sets_of_a_seed_are_read_once(tmp_path):
    read = []
    run = SuiteRun(suite(methods=MSP_ROW, seeds=(0, 1), data=lambda seed: read.append(seed) or data(seed)), tmp_path)
    run.run()
    run.detector("MSP", 1)
    assert read == [0, 1]
    assert run.data(0).train.checksum == data(0).train.checksum


# --- networks that suites share -------------------------------------------------------------------------------------


def test_suites_that_share_their_networks_train_an_equal_plan_once(tmp_path):
    assert shared(suite(methods=MSP_ROW), tmp_path / "one")[1] == ["base"]
    renamed = {"first": BASE, "again": BASE, "own": suite().networks["anchored"]}
    methods = {"Energy": MethodPlan(Energy, ("first",)), "MSP": MethodPlan(MSP, ("again",))}
    methods["AMP"] = MethodPlan(AMP, ("own",), {"k": 3})
    tables, trained, scored = shared(suite(networks=renamed, methods=methods), tmp_path / "two")
    assert (trained, scored) == (["own"], ["Energy", "MSP", "AMP"])  # the other is there, under another name
    alone, trained, _ = events(suite(networks=renamed, methods=methods), tmp_path / "three")
    assert trained == ["first", "own"]
    assert numbers(tables[0]) == numbers(alone[0])
    assert sorted(p.suffix for p in (tmp_path / "one").rglob("*") if p.is_file()) == [".cell", ".json"]
    assert len(list((tmp_path / "three" / "networks").rglob("*.ckpt"))) == 2


@pytest.mark.parametrize(
    "changes",
    [
        {"seeds": (1,), "data": changed()},
        {"networks": {"base": dataclasses.replace(BASE, member=1)}},
        {"networks": {"base": dataclasses.replace(BASE, recipe=dataclasses.replace(RECIPE, lr=0.04))}},
        {"networks": {"base": dataclasses.replace(BASE, arguments=SIZE | {"width": 6})}},
        {"networks": {"base": dataclasses.replace(BASE, anchored=True)}},
        {"networks": {"base": dataclasses.replace(BASE, method=OutlierExposure)}},
        {"networks": {"base": dataclasses.replace(BASE, loss=SyntheticOutliers(share=0.5))}},
        {"data": changed(train=images(48, "train", 5))},
        {"data": changed(train=kedge.ImageSet(data(0).train.images, (torch.arange(48) + 1) % 3, "train"))},
    ],
    ids=["seed", "member", "recipe", "size", "anchored", "method", "loss", "images", "labels"],
)
def test_a_network_of_another_plan_is_not_shared(tmp_path, changes):
    shared(suite(methods=MSP_ROW), tmp_path / "one")
    tables, trained, _ = shared(suite(**{"methods": MSP_ROW} | changes), tmp_path / "two")
    assert trained == ["base"]
    again, trained, _ = shared(suite(methods=MSP_ROW), tmp_path / "three")
    assert trained == []  # and the first is still there
    logits = [t.results["MSP"].detections["test"].logits for table in (tables, again) for t in table.values()]
    assert not torch.equal(*logits)


def test_a_network_depends_on_its_outliers_and_the_name_of_its_set_but_not_on_test_sets(tmp_path):
    methods = {**MSP_ROW, "OE": MethodPlan(OutlierExposure, ("exposed",))}
    assert shared(suite(methods=methods), tmp_path / "one")[1] == ["base", "exposed"]
    others = changed(outliers=images(32, "outliers", 5))
    assert shared(suite(methods=methods, data=others), tmp_path / "two")[1] == ["exposed"]
    others = changed(held_out=images(40, "x"), test=images(30, "y"), ood=(images(30, "z"),))
    assert shared(suite(methods=MSP_ROW, data=others), tmp_path / "three")[1:] == ([], ["MSP"])
    renamed = changed(train=dataclasses.replace(data(0).train, name="training"))
    assert shared(suite(methods=MSP_ROW, data=renamed), tmp_path / "four")[1] == ["base"]


def test_functions_of_one_name_that_build_different_networks_share_nothing(tmp_path):
    def builder(activation):
        def build():
            return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 5), activation(), torch.nn.Linear(5, 3))

        return build

    for folder, activation in (("one", torch.nn.ReLU), ("two", torch.nn.Tanh)):
        networks = {"base": NetworkPlan(builder(activation), RECIPE)}
        assert shared(suite(networks=networks, methods=MSP_ROW), tmp_path / folder)[1] == ["base"]


def test_members_with_fixed_seeds_are_the_networks_of_those_seeds(tmp_path):
    networks = {"base": BASE, "base 1": dataclasses.replace(BASE, seed=1)}
    methods = {**MSP_ROW, "MSP of seed 1": MethodPlan(MSP, ("base 1",))}
    tables, trained, _ = events(suite(networks=networks, methods=methods, seeds=(0, 1), data=changed()), tmp_path)
    assert trained == ["base", "base 1"]  # once each: the network of seed 1 was there when seed 1 came
    scores = {seed: {label: r.detections["test"].score for label, r in t.results.items()} for seed, t in tables.items()}
    assert torch.equal(scores[0]["MSP of seed 1"], scores[1]["MSP"])
    assert not torch.equal(scores[0]["MSP"], scores[1]["MSP"])


def test_the_record_has_the_training_and_its_loss_and_images(tmp_path):
    loss = SyntheticOutliers(share=0.5)
    networks = {"base": dataclasses.replace(BASE, loss=loss, share=0.5)}
    run = SuiteRun(suite(networks=networks, methods=MSP_ROW), tmp_path)
    run.run()
    net = run.network("base", 0)
    ((folder, training),) = run.trainings().items()
    assert (tmp_path / "networks" / folder).is_dir()
    assert training["seconds"] == net.record["seconds"]
    assert training["made with"]["torch"] == torch.__version__
    assert net.record["loss"] == {"name": loss.name, **loss.config()}
    assert net.record["data"]["images"] == 24  # half of them


# --- networks that start from another -------------------------------------------------------------------------------


def test_a_network_starts_from_the_trained_weights_of_another(tmp_path):
    networks = {
        "base": BASE,
        "anchored": NetworkPlan("compact", STILL, SIZE, anchored=True, start="base"),
        "svi": NetworkPlan("compact", STILL, SIZE, method=SVI, prepare={"prior_mean": "weights"}, start="base"),
    }
    methods = {**MSP_ROW, "AMP": MethodPlan(AMP, ("anchored",), {"k": 2}), "SVI": MethodPlan(SVI, ("svi",))}
    declared = suite(networks=networks, methods=methods)
    _, trained, _ = events(declared, tmp_path)
    assert trained == ["base", "anchored", "svi"]
    base, anchored, svi = (SuiteRun(declared, tmp_path).detector(label, 0).net for label in methods)
    assert isinstance(anchored, kedge.Anchored)
    assert torch.allclose(anchored.network.fc.weight, base.network.fc.weight, atol=1e-6)
    assert torch.allclose(svi.network.fc.parametrizations.weight.original, base.network.fc.weight, atol=1e-6)
    longer = networks | {"base": dataclasses.replace(BASE, recipe=dataclasses.replace(RECIPE, epochs=2))}
    again = dataclasses.replace(declared, networks=longer)
    assert events(again, tmp_path / "longer", networks=tmp_path / "networks")[1] == ["base", "anchored", "svi"]


# --- rows -----------------------------------------------------------------------------------------------------------

AMPS = {
    "AMP": MethodPlan(AMP, ("anchored",), {"k": 3}),
    "AMP, permuted": MethodPlan(AMP, ("anchored",), {"k": 3}, permuted=True),
}
FULL = changed(shifted=(images(30, "turned"), images(26, "blurred")), **KNOWN)


def test_a_permuted_row_has_the_same_logits_and_a_permutation_of_tau(tmp_path):
    tables, trained, scored = events(suite(methods=AMPS, data=FULL), tmp_path)
    assert (trained, scored) == (["anchored"], list(AMPS))
    for field, same in (("logits", True), ("score", False), ("tau", False)):
        results = tables[0].results.values()
        own, permuted = (torch.cat([getattr(d, field) for d in r.detections.values()]) for r in results)
        assert torch.equal(own, permuted) == same
    assert torch.equal(own.sort().values, permuted.sort().values)  # of tau
    tau_alone = {"AMP": MethodPlan(AMP, ("anchored",), {"k": 3, "score": "tau"}, permuted=True)}
    with pytest.raises(InputError, match="its score does not depend on the image's tau"):
        events(suite(methods=tau_alone), tmp_path / "other")


def test_shifted_and_known_sets_reach_the_evaluation_and_are_read_back(tmp_path):
    run = SuiteRun(suite(methods=AMPS, data=FULL, apart=("other",)), tmp_path)
    table, sets = run.run()[0], FULL(0)
    assert (table.ood_names, table.apart) == (("other", "more"), ("other",))
    assert table.shifted_names == ("turned", "blurred")
    assert table.known_in == {"more": "more, known"}
    detector = {"AMP": run.detector("AMP", 0)}
    direct = kedge.evaluate(detector, sets.test, sets.ood, shifted=sets.shifted, known_in=sets.known_in)
    assert list(table.sets) == list(direct.sets)
    ours, expected = table.results["AMP"], direct.results["AMP"]
    for part in ("metrics", "shifted", "flagged"):
        assert getattr(ours, part) == getattr(expected, part)
    assert ours.mean("auroc") == ours.metrics["more"]["auroc"].value  # sets apart are in no mean
    inside = torch.cat([ours.detections[name].score for name in ("test", "more, known")])
    assert torch.equal(table.inside("AMP", "more"), inside)
    assert ours.metrics["more"]["auroc"].value == kedge.metrics.auroc(inside, ours.detections["more"].score)
    again, trained, scored = events(run.suite, tmp_path)
    assert trained == scored == []
    assert numbers(again[0]) == numbers(table)
    assert again[0].results["AMP"].shifted == ours.shifted
    assert torch.equal(again[0].inside("AMP", "more"), inside)


def test_rows_on_the_same_logits_share_them_and_score_as_they_do_alone(tmp_path):
    rows = {
        "AMP": MethodPlan(AMP, ("anchored",), {"k": 3, "seed": 0}),
        "AMP, tau mean": MethodPlan(AMP, ("anchored",), {"k": 3, "seed": 0, "tau": "mean"}),
        "AMP, mirrored": MethodPlan(AMP, ("anchored",), {"k": 3, "seed": 0, "tta": 2}),
        "AMP, other anchors": MethodPlan(AMP, ("anchored",), {"k": 3, "seed": 7}),
        "Energy": MethodPlan(Energy, ("anchored",)),
    }
    together, _, _ = events(suite(methods=rows), tmp_path / "all")
    for label, row in rows.items():
        alone, _, _ = events(suite(methods={label: row}), tmp_path / label, networks=tmp_path / "all" / "networks")
        for name, detection in alone[0].results[label].detections.items():
            assert torch.equal(detection.score, together[0].results[label].detections[name].score)
    assert all(result.milliseconds > 0 for result in together[0].results.values())


def test_rows_on_the_same_anchors_share_their_passes(tmp_path, monkeypatch):
    rows = {
        "AMP": MethodPlan(kedge.AMP, ("anchored",)),
        "AMP, tau alone": MethodPlan(kedge.AMP, ("anchored",), {"score": "tau"}),
        "Energy": MethodPlan(Energy, ("anchored",)),
        "AMP, other anchors": MethodPlan(kedge.AMP, ("anchored",), {"seed": 7}),
    }
    passed, original = [], kedge.Anchored.marginalise

    def counting(self, x, *arguments, **options):
        passed.append(len(x))
        return original(self, x, *arguments, **options)

    events(suite(methods={"AMP": rows["AMP"]}), tmp_path / "trained", networks=tmp_path / "networks")
    monkeypatch.setattr(kedge.Anchored, "marginalise", counting)
    events(suite(methods=dict(list(rows.items())[:3])), tmp_path / "same", networks=tmp_path / "networks")
    once = [n for n in passed if n > 2]
    passed.clear()
    events(suite(methods=rows), tmp_path / "all", networks=tmp_path / "networks")
    rest = [n for n in passed if n > 2]
    assert sum(rest) - sum(once) > sum(once) / 4  # other anchors are another network
    timed = 2 * 48  # each row times its passes on a batch
    assert sum(once) == 48 * 4 + 3 * timed


def test_with_extract_the_images_pass_once_for_all_rows_that_take_features(tmp_path, monkeypatch):
    rows = {kind.__name__: MethodPlan(kind, ("base",)) for kind in (MSP, Energy, kedge.ViM)}
    known = changed(shifted=(images(24, "shifted"),), known_in={"more": images(24, "known")})
    declared = {"methods": rows, "data": known}
    alone, _, _ = events(suite(**declared), tmp_path / "alone", networks=tmp_path / "networks")
    passed, original = [], kedge.Classifier.features

    def counting(self, x, *arguments, **options):
        passed.append(len(x))
        return original(self, x, *arguments, **options)

    monkeypatch.setattr(kedge.Classifier, "features", counting)
    together, trained, _ = events(suite(**declared, extract=True), tmp_path / "all", networks=tmp_path / "networks")
    assert trained == []
    assert sum(n for n in passed if n > 2) == 48 * 5 + 24 * 2  # two images serve to find the head
    for label, result in alone[0].results.items():
        assert together[0].results[label].metrics == result.metrics
        assert together[0].results[label].shifted == result.shifted
        assert together[0].results[label].milliseconds > 0
        for name, detection in result.detections.items():
            assert torch.equal(together[0].results[label].detections[name].score, detection.score)
