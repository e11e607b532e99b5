"""Options chosen on in-distribution images alone, by held-out classes or synthetic outliers, or on OOD images."""

import copy

import pytest
import torch
from torch import nn

import kedge
from helpers import images, labelled, network, run_cli
from kedge.data.leakage import shared
from kedge.detectors import Tuner, registered
from kedge.detectors.registry import make, named_methods
from kedge.detectors.tuning import MAKERS, candidates, with_rows
from kedge.errors import FileFormatError, InputError
from kedge.evaluation.summary import grouped_table
from kedge.io import artifact
from kedge.metrics import auroc

SIDE = 12


def noisy(n: int, classes: range, seed: int, name: str = "noisy") -> kedge.ImageSet:
    """Images of classes that are patterns of their own, under noise."""
    patterns = torch.randint(0, 256, (20, 3, 4, 4), generator=torch.Generator().manual_seed(99))
    labels = torch.tensor(classes)[torch.arange(n) % len(classes)]
    noise = torch.randn(n, 3, 4, 4, generator=torch.Generator().manual_seed(seed))
    return kedge.ImageSet((patterns[labels] + 30 * noise).clamp(0, 255).to(torch.uint8), labels, name)


def pixels_network(classes: int = 12) -> kedge.Classifier:
    """A network whose features are its pixels."""
    torch.manual_seed(0)
    return kedge.Classifier(nn.Sequential(nn.Flatten(), nn.Linear(48, classes)), mean=0.5, std=0.25)


def sets(net=None, classes=4):
    return labelled(120, classes, side=SIDE), labelled(90, classes, side=SIDE, seed=1)


# What is chosen.


def test_both_ways_find_that_few_images_of_a_class_need_fewer_neighbours_than_a_bad_default(monkeypatch):
    monkeypatch.setattr("kedge.detectors.knn.SHARE_OF_CLASS", 100)  # the default becomes 50
    net, train, held_out = pixels_network(), noisy(96, range(12), 0), noisy(120, range(12), 1)
    test, unknown = noisy(120, range(12), 2), noisy(120, range(12, 20), 3)

    def judged(detector):
        detector.fit(train)
        return auroc(detector.score(test), detector.score(unknown))

    assert judged(kedge.KNN(net)) < 0.8  # the 50th neighbour is in one of the other classes, which have 8 images each
    for by in ("classes", "synthetic"):
        detector = kedge.tune("knn", net, train, held_out, by=by)
        assert detector.k in (1, 5)
        assert detector.tuned.options == {"k": detector.k}
        assert judged(detector) > 0.99
        assert detector.tuned.auroc > 0.9 > 0.8 > detector.tuned.default_auroc
        assert (detector.tuned.by, detector.tuned.tried) == (by, 6)  # 1, 5, 10, 20, 50, which is the default too, ...


def test_the_choice_and_what_it_was_made_on_follow_the_seed():
    net, (train, held_out) = network(), sets()
    for by in ("classes", "synthetic"):
        first, again, other = (kedge.tune("gen", net, train, held_out, by=by, seed=s).tuned for s in (0, 0, 1))
        assert (first.options, first.auroc) == (again.options, again.auroc)
        assert first.auroc != other.auroc


def test_with_held_out_classes_it_is_the_mean_auroc_of_methods_that_never_saw_them():
    """The definition, with networks that are built anew without the rows of a third of the classes."""
    net, (train, held_out) = network(), sets()
    tuner = Tuner(net, train, held_out)
    for method in ("gen", "knn", "vim", "mds++", "dice", "openmax", "energy"):
        net.network.fc.bias.data.fill_(9)  # ViM needs positive logits
        options = {"shape": "scale"} if method == "energy" else {}
        expected = []
        order = torch.randperm(4, generator=torch.Generator().manual_seed(0))
        for part in order.tensor_split(3):
            kept = [c for c in range(4) if c not in part.tolist()]
            small = copy.deepcopy(net)
            fc = nn.Linear(32, len(kept))
            fc.weight.data, fc.bias.data = net.network.fc.weight.data[kept], net.network.fc.bias.data[kept]
            small.network.fc = fc
            known = torch.isin(train.labels, torch.tensor(kept))
            own = kedge.ImageSet(
                train.images[known], torch.tensor([kept.index(y) for y in train.labels[known].tolist()])
            )
            detector = make(method, small, **options).fit(own)
            inside = torch.isin(held_out.labels, torch.tensor(kept))
            scores = detector.score(held_out)
            expected.append(auroc(scores[inside], scores[~inside]))
        tuner = Tuner(net, train, held_out)
        detector = tuner.detector(method, **options)
        assert detector.tuned.default_auroc == pytest.approx(sum(expected) / 3, abs=0.01), method
        of_images = tuner._auroc(method, options, tuner._of_images)
        assert of_images == pytest.approx(detector.tuned.default_auroc, abs=0.01), method


def test_synthetic_outliers_are_made_of_training_images_of_every_kind():
    net, (train, held_out) = network(), sets()
    tuner = Tuner(net, train, held_out, by="synthetic")
    assert len(tuner.outside) == len(train)
    parts = tuner.outside.images.tensor_split(len(MAKERS))
    assert len({part.float().std().item() for part in parts}) == 3
    shuffled, original = parts[0].flatten(1), train.images.flatten(1)
    pairs = (shuffled.sort(dim=1).values[:, None] == original.sort(dim=1).values).all(dim=2)
    assert pairs.any(dim=1).all()  # the same pixels in another order


@pytest.mark.parametrize("kind", ["unanchored", "anchored"])
def test_features_take_the_place_of_images(kind):
    net, (train, held_out) = network(kind), sets()
    by_images = Tuner(net, train, held_out).detector("knn")
    stored = [kedge.extract(net, each) for each in (train, held_out)]
    assert Tuner(net, *stored).detector("knn").tuned.auroc == by_images.tuned.auroc
    with pytest.raises(InputError, match="pass images="):
        Tuner(net, *stored, by="synthetic")
    one, other = (
        Tuner(net, *given, by="synthetic", **more).detector("knn", limit=100)
        for given, more in (((train, held_out), {}), (stored, {"images": train}))
    )
    assert one.tuned.auroc == other.tuned.auroc
    assert one.config()["limit"] == 100
    one.fit(stored[0])


def test_methods_that_read_more_are_tuned_on_images():
    net, (train, held_out) = network(), sets()
    tuner = Tuner(net, train.subset(range(60)), held_out)
    detector = tuner.detector("mahalanobis", shrinkage=0.1)
    assert detector.tuned.tried == 1 + len(kedge.Mahalanobis(net).layers)  # all, and each alone
    assert set(detector.tuned.options) <= {"layers"}
    adascale = tuner.detector("adascale")  # learns from held-out images too
    assert adascale.tuned.tried == 5


def test_options_that_are_given_or_missing_are_left_alone():
    net, (train, held_out) = network(), sets()
    tuner = Tuner(net, train, held_out)
    assert tuner.detector("gen", gamma=0.2, m=2).tuned is None
    assert tuner.detector("msp").tuned is None
    assert tuner.detector("klm").tuned is None
    assert tuner.detector("gen", gamma=0.2).tuned.options.keys() <= {"m"}
    for method, options in (("msp", {}), ("knn", {"k": 3})):
        with pytest.raises(InputError, match=f"{method!r} has none"):
            kedge.tune(method, net, train, held_out, **options)


def test_labels_that_are_not_the_networks_classes_leave_its_outputs():
    net, (train, held_out) = network(classes=4), (labelled(n, 3, side=SIDE, seed=s) for n, s in ((60, 0), (60, 1)))
    train, held_out = (kedge.ImageSet(s.images, s.labels, "three", ("x", "y", "z")) for s in (train, held_out))
    tuner = Tuner(net, train, held_out)
    assert tuner.detector("gen").tuned is not None
    assert [each.train.logits.shape for each in tuner._of_features] == [(40, 4)] * 3


def test_held_out_labels_are_matched_by_name():
    net, (train, held_out) = network(classes=4), sets()
    names = train.classes
    relabelled = kedge.ImageSet(held_out.images, (held_out.labels + 1) % 4, "held out", (names[3], *names[:3]))
    assert [relabelled.classes[int(y)] for y in relabelled.labels] == [names[int(y)] for y in held_out.labels]
    assert (
        Tuner(net, train, relabelled).detector("gen").tuned.auroc
        == Tuner(net, train, held_out).detector("gen").tuned.auroc
    )


def test_what_cannot_be_tuned_is_an_error():
    net, (train, held_out) = network(), sets()
    plain = kedge.ImageSet(held_out.images)
    with pytest.raises(InputError, match="by must be one of 'classes', 'synthetic'"):
        Tuner(net, train, held_out, by="outliers")
    with pytest.raises(InputError, match="needs labels"):
        Tuner(net, train, plain).detector("knn")
    with pytest.raises(InputError, match="at least three classes with held-out images, got 2"):
        Tuner(net, train, held_out.subset(held_out.labels < 2)).detector("knn")
    net.network.fc.bias.data.fill_(-999)
    with pytest.raises(InputError, match="largest logit must be positive"):  # by any dimension
        kedge.tune("vim", net, train, held_out)


@pytest.mark.parametrize("name", registered())
def test_every_grid_is_of_options_and_every_value_is_allowed(name):
    kind = registered()[name]
    for _, options in [(kind, {}), *(pair for pair in named_methods().values() if pair[0] is kind)]:
        try:
            detector = kind(network(), **options)
        except (InputError, TypeError):  # of a network that is prepared or anchored for it
            return
        assert set(detector.grid) <= set(detector.config())
        chosen = list(candidates(detector, {}))
        assert chosen[0] == {}
        assert len(chosen) <= 40
        for candidate in chosen:
            if "dim" not in candidate:  # refused by fit, if it is too large
                kind(network(), **{**options, **candidate})


def test_a_layer_with_some_rows():
    layer = nn.Linear(3, 4)
    some = with_rows(layer, torch.tensor([2, 0]))
    x = torch.rand(5, 3)
    torch.testing.assert_close(some(x), layer(x)[:, [2, 0]])
    assert (some.out_features, layer.out_features) == (2, 4)
    assert with_rows(nn.Linear(3, 4, bias=False), torch.tensor([1])).bias is None


# What is recorded, and what follows from it.


def test_the_choice_is_saved_read_back_and_shown(tmp_path):
    net, (train, held_out) = network(), sets()
    detector = kedge.tune("knn", net, train, held_out).fit(train).calibrate(images(60, side=SIDE, seed=5))
    detector.save(tmp_path / "a.kedge")
    again = kedge.load(tmp_path / "a.kedge")
    assert again.tuned.header() == detector.tuned.header()
    assert again.tuned.held_out.equal(detector.tuned.held_out)
    assert str(again.tuned) == str(detector.tuned)
    assert again.tuned.outliers.shape == (0, 16)
    assert again.outliers is None
    again.save(tmp_path / "b.kedge")
    assert (tmp_path / "a.kedge").read_bytes() == (tmp_path / "b.kedge").read_bytes()
    result = run_cli("info", tmp_path / "a.kedge")
    assert str(detector.tuned) in result.output
    evaluation = kedge.evaluate(
        {"KNN": detector}, labelled(30, side=SIDE, seed=7), [labelled(30, side=SIDE, seed=8, name="o")]
    )
    assert evaluation.results["KNN"].tuned == str(detector.tuned)
    assert evaluation.results["KNN"].uses_outliers is False


def test_a_damaged_record_is_an_error(tmp_path):
    net, (train, held_out) = network(), sets()
    kedge.tune("knn", net, train, held_out).fit(train).save(tmp_path / "a.kedge")
    header, tensors = artifact.read(tmp_path / "a.kedge")
    for wrong in ({**header["tuned"], "auroc": "high"}, {"by": "classes"}, []):
        artifact.write(tmp_path / "b.kedge", header | {"tuned": wrong}, tensors)
        with pytest.raises(FileFormatError, match="tuned"):
            kedge.load(tmp_path / "b.kedge")
    artifact.write(tmp_path / "b.kedge", header, tensors | {"tuned.held_out": torch.zeros(3)})
    with pytest.raises(FileFormatError, match="tuned"):
        kedge.load(tmp_path / "b.kedge")


def test_the_threshold_and_the_test_need_images_that_the_options_were_not_chosen_on(monkeypatch):
    monkeypatch.setattr("kedge.detectors.training_images.SHARED", 0.005)
    net, (train, held_out) = network(), sets()
    detector = kedge.tune("knn", net, train, held_out).fit(train)
    with pytest.raises(InputError, match="its options were chosen on them"):
        detector.calibrate(held_out)
    detector.calibrate(images(60, side=SIDE, seed=5))
    with pytest.raises(InputError, match="90 of the images in 'toy' are among the tuning images"):
        kedge.evaluate({"KNN": detector}, held_out, [labelled(30, side=SIDE, seed=8, name="other")])


def test_given_ood_images_make_it_a_method_with_outliers(tmp_path):
    net, (train, held_out) = network(), sets()
    validation, other = (labelled(40, side=SIDE, seed=s, name=f"set {s}") for s in (8, 9))
    detector = kedge.tune("knn", net, train, held_out, by=validation).fit(train)
    detector.calibrate(images(60, side=SIDE, seed=5)).save(tmp_path / "a.kedge")
    test = labelled(30, side=SIDE, seed=7, name="test")
    for each in (detector, kedge.load(tmp_path / "a.kedge")):
        assert each.tuned.by == "set 8"
        assert len(each.outliers) == 40
        table = kedge.evaluation.SeedSummary({0: kedge.evaluate({"KNN": each}, test, [other])}).table()
        assert table.rows[0][0] == "KNN *"
        assert f"Options chosen, KNN: {each.tuned}." in table.caption
        with pytest.raises(InputError, match="40 of the images in 'set 8' are among the training outliers"):
            kedge.evaluate({"KNN": each}, test, [validation])


def test_protect_chooses_on_half_of_the_held_out_images(tmp_path):
    net, (train, held_out) = pixels_network(4), (noisy(96, range(4), 0), noisy(120, range(4), 1))
    detector = kedge.protect(net, train, held_out, method="knn", tune="classes")
    assert detector.tuned.by == "classes"
    assert len(detector.tuned.held_out) == 60
    assert len(detector.calibration.scores) == 60
    assert len(shared(detector.calibration.fingerprints, detector.tuned.held_out)) == 0
    with pytest.raises(InputError, match="'msp' has none"):
        kedge.protect(net, train, held_out, method="msp", tune="synthetic")
    with pytest.raises(InputError, match="held_out must be an ImageSet"):
        kedge.protect(net, train, list(held_out), tune="synthetic")


def test_compare_chooses_options_on_images_that_neither_set_the_threshold_nor_are_tested():
    net, train, held_out = network(), labelled(80, side=SIDE), labelled(160, side=SIDE, seed=1, name="held out")
    other, validation = (labelled(30, side=SIDE, seed=s, name=f"set {s}") for s in (8, 9))
    for by in ("classes", "synthetic", validation):
        methods = ["knn", "gen", "msp", "odin"]
        table = kedge.compare(net, train, held_out, [other], methods=methods, tune=by, resamples=0)
        assert set(table.results) == set(methods)
        chosen = {name: result.tuned for name, result in table.results.items()}
        assert chosen["msp"] == chosen["odin"] == ""  # the one has no options, and the other reads more than features
        caption = grouped_table(table, ["auroc"]).caption
        assert all(f"{name}: {chosen[name]}" in caption for name in ("knn", "gen"))
        assert table.results["knn"].uses_outliers is (by is validation)
    with_leak = kedge.compare(net, train, held_out, [validation], methods=methods, tune=validation, resamples=0)
    assert "among the training outliers" in with_leak.left_out["knn"]
