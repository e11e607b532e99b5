"""Suites: a declaration of networks, methods and sets; what is finished is not run again."""

import dataclasses
import zlib

import pytest
import torch

import kedge
from kedge.detectors import AMP, MSP, SVI, Energy, OutlierExposure
from kedge.errors import FileFormatError, InputError, NotReadyError
from kedge.models import build
from kedge.studies.plan import MethodPlan, NetworkPlan, Suite, SuiteData
from kedge.studies.run import SuiteRun
from kedge.training import Recipe
from kedge.training.losses import SyntheticOutliers

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


def events(suite, folder, **options):
    """Run a suite; give its tables, the networks that were trained and the methods that were scored."""
    trained, scored = [], []
    run = SuiteRun(
        suite,
        folder,
        **options,
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
    with kedge.anchoring.corruption.seeded(2):
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


def test_some_rows_run_apart_and_the_whole_takes_them_as_they_are(tmp_path):
    whole = suite(leads=("AMP", "MSP"), draws={"AMP": ("OE",), "MSP": ("Energy",)})
    part = whole.only("M*", "Energy")
    assert (list(part.methods), part.leads, part.draws) == (["MSP", "Energy"], ("MSP",), {"MSP": ("Energy",)})
    tables, trained, scored = events(part, tmp_path)
    assert (trained, scored) == (["plain"], ["MSP", "Energy"])
    again, trained, scored = events(whole, tmp_path)
    assert (trained, scored) == (["anchored", "exposed"], ["AMP", "OE"])
    assert all(plain(again[0])["results"][label] == result for label, result in plain(tables[0])["results"].items())


def test_patterns_that_fit_no_row_are_told_with_the_rows():
    with pytest.raises(InputError, match=r"rows must fit some label of 'tiny'.*got amp; it has AMP; MSP; Energy; OE"):
        suite().only("amp")


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


# Networks that suites share.

ONLY = {"MSP": MethodPlan(MSP, ("plain",))}
EXPOSED = {"OE": MethodPlan(OutlierExposure, ("exposed",))}


def shared(suite, folder):
    """Run a suite in a folder of its own, with the networks of all of them."""
    return events(suite, folder, networks=folder.parent / "networks")


def changed(**parts):
    """The sets of every seed, those of seed 0 with some others in their place."""
    return lambda seed: dataclasses.replace(data(0), **parts)


def test_suites_that_share_their_networks_train_an_equal_plan_once(tmp_path):
    _, trained, _ = shared(suite(methods=ONLY), tmp_path / "one")
    assert trained == ["plain"]
    renamed = {"base": suite().networks["plain"], "own": suite().networks["anchored"]}
    methods = {"Energy": MethodPlan(Energy, ("base",)), "AMP": MethodPlan(AMP, ("own",), {"k": 3})}
    tables, trained, scored = shared(suite(networks=renamed, methods=methods), tmp_path / "two")
    assert trained == ["own"]  # the other one is there, under another name
    assert scored == ["Energy", "AMP"]
    alone, trained, _ = events(suite(networks=renamed, methods=methods), tmp_path / "three")
    assert trained == ["base", "own"]
    assert plain(tables[0]) == plain(alone[0])


def test_two_names_of_one_plan_in_a_suite_are_one_network(tmp_path):
    networks = {"plain": suite().networks["plain"], "again": suite().networks["plain"]}
    methods = {"MSP": MethodPlan(MSP, ("plain",)), "MSP again": MethodPlan(MSP, ("again",))}
    tables, trained, _ = events(suite(networks=networks, methods=methods), tmp_path)
    assert trained == ["plain"]
    one, two = tables[0].results.values()
    assert torch.equal(one.detections["test"].logits, two.detections["test"].logits)


PLAN = suite().networks["plain"]


@pytest.mark.parametrize(
    "changes",
    [
        {"seeds": (1,), "data": changed()},
        {"networks": {"plain": dataclasses.replace(PLAN, member=1)}},
        {"networks": {"plain": dataclasses.replace(PLAN, recipe=dataclasses.replace(RECIPE, lr=0.04))}},
        {"networks": {"plain": dataclasses.replace(PLAN, arguments=SIZE | {"width": 6})}},
        {"networks": {"plain": dataclasses.replace(PLAN, anchored=True)}},
        {"networks": {"plain": dataclasses.replace(PLAN, method=OutlierExposure)}},
        {"data": changed(train=images(48, "train", 5))},
        {"data": changed(train=kedge.ImageSet(data(0).train.images, (torch.arange(48) + 1) % 3, "train"))},
    ],
    ids=["seed", "member", "recipe", "size", "anchored", "method", "training images", "training labels"],
)
def test_a_network_of_other_making_is_not_shared(tmp_path, changes):
    shared(suite(methods=ONLY), tmp_path / "one")
    tables, trained, _ = shared(suite(**{"methods": ONLY} | changes), tmp_path / "two")
    assert trained == ["plain"]
    again, trained, _ = shared(suite(methods=ONLY), tmp_path / "three")
    assert trained == []  # and the first is still there
    logits = [t.results["MSP"].detections["test"].logits for table in (tables, again) for t in table.values()]
    assert not torch.equal(*logits)


def test_other_outliers_make_another_network_of_what_learns_from_them(tmp_path):
    both = {**ONLY, **EXPOSED}
    _, trained, _ = shared(suite(methods=both), tmp_path / "one")
    assert trained == ["plain", "exposed"]
    others = changed(outliers=images(32, "outliers", 5))
    _, trained, _ = shared(suite(methods=both, data=others), tmp_path / "two")
    assert trained == ["exposed"]


def test_what_a_network_is_tested_on_does_not_make_it_another(tmp_path):
    shared(suite(methods=ONLY), tmp_path / "one")
    others = changed(held_out=images(40, "x"), test=images(30, "y"), ood=(images(30, "z"),))
    _, trained, scored = shared(suite(methods=ONLY, data=others), tmp_path / "two")
    assert (trained, scored) == ([], ["MSP"])


def test_networks_lie_in_the_suite_s_folder_unless_another_is_given(tmp_path):
    events(suite(methods=ONLY), tmp_path / "own")
    assert len(list((tmp_path / "own").rglob("*.ckpt"))) == len(list(tmp_path.rglob("*.ckpt"))) == 1
    shared(suite(methods=ONLY), tmp_path / "one")
    assert len(list((tmp_path / "networks").rglob("*.ckpt"))) == 1
    assert sorted(p.suffix for p in (tmp_path / "one").rglob("*") if p.is_file()) == [".cell", ".json"]


def test_a_training_set_of_another_name_is_another_training(tmp_path):
    shared(suite(methods=ONLY), tmp_path / "one")
    renamed = changed(train=dataclasses.replace(data(0).train, name="training"))
    _, trained, _ = shared(suite(methods=ONLY, data=renamed), tmp_path / "two")
    assert trained == ["plain"]


def test_functions_of_the_same_name_that_make_different_networks_share_nothing(tmp_path):
    def maker(activation):
        def mine():
            return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 5), activation(), torch.nn.Linear(5, 3))

        return mine

    for folder, activation in (("one", torch.nn.ReLU), ("two", torch.nn.Tanh)):
        networks = {"plain": NetworkPlan(maker(activation), RECIPE)}
        _, trained, _ = shared(suite(networks=networks, methods=ONLY), tmp_path / folder)
        assert trained == ["plain"]


# Controls, shifted images and known images.

AMPS = {
    "AMP": MethodPlan(AMP, ("anchored",), {"k": 3}),
    "AMP, exchanged": MethodPlan(AMP, ("anchored",), {"k": 3}, permuted=True),
}
FULL = changed(shifted=(images(30, "turned"), images(26, "blurred")), known_in={"more": images(24, "more, known")})


def test_a_permuted_method_is_the_control_of_the_plain_one(tmp_path):
    tables, trained, scored = events(suite(methods=AMPS, data=FULL), tmp_path)
    assert list(tables[0].results) == scored == ["AMP", "AMP, exchanged"]
    assert trained == ["anchored"]
    own, permuted = tables[0].results.values()
    everywhere = {}
    for field in ("label", "logits", "temperature", "score"):
        everywhere[field] = [torch.cat([getattr(d, field) for d in r.detections.values()]) for r in (own, permuted)]
    assert torch.equal(*everywhere["label"])
    assert torch.equal(*everywhere["logits"])
    assert not torch.equal(*everywhere["score"])
    before, after = everywhere["temperature"]
    assert not torch.equal(before, after)
    assert torch.equal(before.sort().values, after.sort().values)
    assert (own.accuracy, own.ece) == (permuted.accuracy, permuted.ece)


def test_a_method_that_becomes_permuted_is_not_read_from_its_old_cell(tmp_path):
    events(suite(methods={"AMP": AMPS["AMP"]}), tmp_path)
    with pytest.raises(InputError, match=r"amp\.cell was made with other method than"):
        events(suite(methods={"AMP": AMPS["AMP, exchanged"]}), tmp_path)


def test_shifted_and_known_sets_reach_the_evaluation(tmp_path):
    run = SuiteRun(suite(methods=AMPS, data=FULL), tmp_path)
    table, sets = run.run()[0], FULL(0)
    assert table.ood_names == ("other", "more")
    assert table.shifted_names == ("turned", "blurred")
    assert table.known_in == {"more": "more, known"}
    direct = kedge.evaluate(
        {"AMP": run.detector("AMP", 0)}, sets.test, sets.ood, shifted=sets.shifted, known_in=sets.known_in
    )
    assert list(table.sets) == list(direct.sets)
    ours, expected = table.results["AMP"], direct.results["AMP"]
    assert ours.metrics == expected.metrics
    assert ours.shifted == expected.shifted
    assert set(ours.shifted) == {"turned", "blurred"}
    assert ours.flagged == expected.flagged
    inside = torch.cat([ours.detections[name].score for name in ("test", "more, known")])
    assert torch.equal(table.inside("AMP", "more"), inside)
    assert ours.metrics["more"]["auroc"].value == kedge.metrics.auroc(inside, ours.detections["more"].score)


def test_they_read_back_from_the_cells(tmp_path):
    before, _, _ = events(suite(methods=AMPS, data=FULL), tmp_path)
    after, trained, scored = events(suite(methods=AMPS, data=FULL), tmp_path)
    assert trained == scored == []
    assert plain(before[0]) == plain(after[0])
    for name in ("ood_names", "shifted_names", "known_in"):
        assert getattr(before[0], name) == getattr(after[0], name)
    for label in AMPS:
        assert before[0].results[label].shifted == after[0].results[label].shifted
        assert torch.equal(before[0].inside(label, "more"), after[0].inside(label, "more"))


@pytest.mark.parametrize(
    "roles",
    [
        {"known_in": {"other": images(24, "more, known")}},
        {"shifted": (images(24, "more, known"),)},
        {"ood": (*data(0).ood, images(24, "more, known"))},
    ],
    ids=["of another set", "shifted", "out of distribution"],
)
def test_a_cell_whose_sets_had_other_roles_is_refused(tmp_path, roles):
    events(suite(methods=ONLY, data=changed(known_in={"more": images(24, "more, known")})), tmp_path)
    with pytest.raises(InputError, match=r"msp\.cell was made with other"):
        events(suite(methods=ONLY, data=changed(**roles)), tmp_path)


def test_the_detector_behind_a_row_gives_its_scores(tmp_path):
    run = SuiteRun(suite(), tmp_path)
    table, sets = run.run()[0], data(0)
    for label, result in table.results.items():
        detector = run.detector(label, 0)
        for images_of in (sets.test, *sets.ood):
            said = detector(images_of)
            assert torch.equal(said.score, result.detections[images_of.name].score), label
            assert torch.equal(said.is_ood, result.detections[images_of.name].is_ood), label


def test_the_detector_behind_a_row_is_there_without_a_run(tmp_path):
    detector = SuiteRun(suite(methods=ONLY), tmp_path / "a").detector("MSP", 0)
    tables, _, _ = events(suite(methods=ONLY), tmp_path / "b")
    assert torch.equal(detector.score(data(0).test), tables[0].results["MSP"].detections["test"].score)


def test_the_sets_of_a_seed_are_read_once(tmp_path):
    read = []
    run = SuiteRun(suite(methods=ONLY, seeds=(0, 1), data=lambda seed: read.append(seed) or data(seed)), tmp_path)
    run.run()
    assert read == [0, 1]
    run.detector("MSP", 1)
    assert read == [0, 1]
    assert run.data(0).train.checksum == data(0).train.checksum


# A network that goes on from another.


def test_a_network_starts_from_the_trained_weights_of_another(tmp_path):
    still = Recipe(epochs=1, batch=16, lr=1e-12, momentum=0.0, weight_decay=0.0, crop=0)
    networks = {
        "plain": NetworkPlan("compact", RECIPE, SIZE),
        "tuned": NetworkPlan("compact", still, SIZE, anchored=True, start="plain"),
    }
    methods = {
        "MSP": MethodPlan(MSP, ("plain",)),
        "of the tuned": MethodPlan(MSP, ("tuned",)),
    }
    declared = suite(networks=networks, methods=methods)
    tables, trained, _ = events(declared, tmp_path)
    assert trained == ["plain", "tuned"]
    plain, tuned = (SuiteRun(declared, tmp_path).detector(label, 0).net for label in methods)
    assert isinstance(tuned, kedge.Anchored)
    assert torch.allclose(
        tuned.anchored_layer.layer_c.weight, plain.network.prep[0].weight, atol=1e-6
    )  # preserved, hardly moved
    assert torch.allclose(tuned.network.fc.weight, plain.network.fc.weight, atol=1e-6)
    assert list(tables[0].results) == list(methods)


def test_a_method_s_own_training_starts_from_another_network_too(tmp_path):
    still = Recipe(epochs=1, batch=16, lr=1e-12, momentum=0.0, weight_decay=0.0, crop=0)
    networks = {
        "plain": NetworkPlan("compact", RECIPE, SIZE),
        "svi": NetworkPlan("compact", still, SIZE, method=SVI, prepare={"prior_mean": "weights"}, start="plain"),
    }
    declared = suite(networks=networks, methods={"MSP": MethodPlan(MSP, ("plain",)), "SVI": MethodPlan(SVI, ("svi",))})
    _, trained, _ = events(declared, tmp_path)
    assert trained == ["plain", "svi"]
    plain, svi = (SuiteRun(declared, tmp_path).detector(label, 0).net for label in ("MSP", "SVI"))
    mean = svi.network.fc.parametrizations.weight.original
    assert torch.allclose(mean, plain.network.fc.weight, atol=1e-6)


def test_a_network_is_trained_by_an_objective(tmp_path):
    networks = {"plain": NetworkPlan("compact", RECIPE, SIZE, loss=SyntheticOutliers(share=0.5))}
    declared = suite(networks=networks, methods={"MSP": MethodPlan(MSP, ("plain",))})
    events(declared, tmp_path)
    (net,) = (SuiteRun(declared, tmp_path).detector("MSP", 0).net,)
    assert net.record["loss"] == {"name": "synthetic outliers", **SyntheticOutliers(share=0.5).config()}
    weaker = {"plain": NetworkPlan("compact", RECIPE, SIZE, loss=SyntheticOutliers(share=0.25))}
    with pytest.raises(InputError, match="was made with other networks"):
        SuiteRun(dataclasses.replace(declared, networks=weaker), tmp_path).run()
    with pytest.raises(InputError, match="arguments of the method's own; got another loss"):
        NetworkPlan("compact", RECIPE, SIZE, method=SVI, loss=SyntheticOutliers())


def test_another_start_is_another_network(tmp_path):
    def declared(epochs):
        first = NetworkPlan("compact", dataclasses.replace(RECIPE, epochs=epochs), SIZE)
        networks = {"plain": first, "tuned": NetworkPlan("compact", RECIPE, SIZE, anchored=True, start="plain")}
        return suite(networks=networks, methods={"AMP": MethodPlan(AMP, ("tuned",), {"k": 2})})

    assert shared(declared(1), tmp_path / "one")[1] == ["plain", "tuned"]
    assert shared(declared(2), tmp_path / "two")[1] == ["plain", "tuned"]
    assert shared(declared(1), tmp_path / "three")[1] == []


def test_a_start_must_be_a_network_from_scratch():
    tuned = NetworkPlan("compact", RECIPE, SIZE, start="plain")
    with pytest.raises(InputError, match="'tuned' must start from one that is trained from scratch; got 'plain'"):
        suite(networks={**suite().networks, "plain": dataclasses.replace(tuned, start="anchored"), "tuned": tuned})
    with pytest.raises(InputError, match="member does not go with it"):
        NetworkPlan("compact", RECIPE, SIZE, start="plain", member=1)


def test_sets_apart_are_in_no_mean_of_a_suite(tmp_path):
    tables, _, _ = events(suite(methods=ONLY, apart=("more",)), tmp_path)
    (result,) = tables[0].results.values()
    assert tables[0].apart == ("more",)
    assert result.mean("auroc") == result.metrics["other"]["auroc"].value


def test_members_with_seeds_of_their_own_are_the_networks_of_those_seeds(tmp_path):
    member = NetworkPlan("compact", RECIPE, SIZE, seed=1)
    networks = {"plain": NetworkPlan("compact", RECIPE, SIZE), "plain 1": member}
    methods = {"MSP": MethodPlan(MSP, ("plain",)), "MSP of seed 1": MethodPlan(MSP, ("plain 1",))}
    declared = suite(networks=networks, methods=methods, seeds=(0, 1), data=lambda seed: data(0))
    tables, trained, _ = events(declared, tmp_path)
    assert trained == ["plain", "plain 1"]  # once each: the network of seed 1 was there when seed 1 came
    scores = {seed: {label: r.detections["test"].score for label, r in t.results.items()} for seed, t in tables.items()}
    assert torch.equal(scores[0]["MSP of seed 1"], scores[1]["MSP"])
    assert not torch.equal(scores[0]["MSP"], scores[1]["MSP"])


def test_a_training_shorter_than_an_epoch_takes_a_share_of_the_images(tmp_path):
    short = NetworkPlan("compact", RECIPE, SIZE, share=0.5)
    run = SuiteRun(suite(networks={"plain": short}, methods=ONLY), tmp_path)
    run.run()
    assert run._network("plain", data(0), 0).record["data"]["images"] == 24
    with pytest.raises(InputError, match="share must be above 0 and at most 1; got 0"):
        NetworkPlan("compact", RECIPE, SIZE, share=0)


def test_rows_on_the_same_hypotheses_share_them_and_are_what_they_are_alone(tmp_path):
    rows = {
        "AMP": MethodPlan(AMP, ("anchored",), {"k": 3, "seed": 0}),
        "AMP, tau mean": MethodPlan(AMP, ("anchored",), {"k": 3, "seed": 0, "tau": "mean"}),
        "AMP, mirrored": MethodPlan(AMP, ("anchored",), {"k": 3, "seed": 0, "views": 2}),
        "AMP, others": MethodPlan(AMP, ("anchored",), {"k": 3, "seed": 7}),
        "Energy": MethodPlan(Energy, ("anchored",)),
    }
    together, _, _ = events(suite(methods=rows), tmp_path / "all")
    for label, row in rows.items():
        alone, _, _ = events(suite(methods={label: row}), tmp_path / label, networks=tmp_path / "all" / "networks")
        for name, said in alone[0].results[label].detections.items():
            assert torch.equal(said.score, together[0].results[label].detections[name].score)
    assert all(result.milliseconds > 0 for result in together[0].results.values())


def test_the_record_tells_how_long_the_networks_trained(tmp_path):
    run = SuiteRun(suite(methods=ONLY), tmp_path)
    run.run()
    ((folder, training),) = run.trainings().items()
    assert (tmp_path / "networks" / folder).is_dir()
    assert training["seconds"] == run._network("plain", data(0), 0).record["seconds"]
    assert training["made with"]["torch"] == torch.__version__
