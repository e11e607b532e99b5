"""Combined: what its parts share, what it learns from held-out images, and what it promises."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

import kedge
from kedge.calibration import allowed, to_learn_from
from kedge.detectors.rules import RULES
from kedge.errors import FileFormatError, InputError, NotReadyError
from kedge.io import artifact
from test_contract import images, network


def combined(*parts, net=None, **options):
    return kedge.Combined(net or network(), parts=parts or None, **options).fit(images())


class Counting(nn.Module):
    """A network that counts the images it sees."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(144, 16), nn.ReLU())
        self.fc = nn.Linear(16, 3)
        self.seen = 0

    def forward(self, x):
        self.seen += len(x)
        return self.fc(self.body(x))


# What it computes.


def test_the_sum_is_that_of_the_z_scores_of_its_parts():
    net = network()
    parts = [kedge.KNN(net).fit(images()), kedge.GEN(net).fit(images())]
    detector = kedge.Combined(parts).calibrate(images(80, seed=1))
    held = images(80, seed=1)
    learned = len(held) - len(detector.calibration.scores)
    some = images(9, seed=2)
    expected = 0
    for part, centre, scale in zip(parts, detector.standard["centre"], detector.standard["scale"], strict=True):
        expected = expected + ((part.score(some).double() - centre) / scale).clamp(min=-2)
    torch.testing.assert_close(detector.score(some), expected.float(), rtol=1e-4, atol=1e-4)
    assert learned == to_learn_from(80, 0.05, share=0.2, least=20)
    assert len(detector.calibration.fingerprints) == 80


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_and_standard_gives_a_working_detector(rule, tmp_path):
    detector = combined("knn", "gen", "max_logit", rule=rule, standardise="quantiles").calibrate(images(80, seed=1))
    detector.save(tmp_path / "a.kedge")
    again, some = kedge.load(tmp_path / "a.kedge"), images(9, seed=2)
    assert torch.equal(again.score(some), detector.score(some))
    assert again.config() == detector.config()
    assert again.config()["rule"] == rule


@pytest.mark.parametrize(
    ("parts", "cost"),
    [(("mds++", "gen"), 1), (("knn", "vim", "energy", "scale"), 1), (("msp", "entropy"), 1), (("odin", "knn"), 3)],
)
def test_parts_share_one_pass(parts, cost):
    net = Counting()
    net.fc.bias.data += 5
    detector = kedge.Combined(kedge.Classifier(net, mean=0.5), parts=parts).fit(images()).calibrate(images(80, seed=1))
    assert detector.cost.forward == cost
    net.seen = 0
    detector.score(images(10, seed=2))
    assert net.seen == 10 * cost


def test_parts_learn_from_one_pass_over_the_training_images():
    net = Counting()
    parts = [*("mds++", "knn", "dice"), {"name": "mahalanobis", "config": {"layers": "last", "relative": True}}]
    shared = kedge.Combined(kedge.Classifier(net, mean=0.5), parts=parts)
    net.seen = 0
    shared.fit(images())
    assert net.seen <= len(images()) + 8  # a few to find the last layer
    assert len(shared.fitted_on) == len(images())
    for part in shared.parts:
        alone = type(part)(shared.net, **part.config()).fit(images())
        for name, value in alone.state().items():
            torch.testing.assert_close(part.state()[name], value)


def test_an_error_of_one_part_ends_the_reading():
    class Endless:
        count = 0

        def __iter__(self):
            while self.count < 1000:
                self.count += 1
                yield images(1)[0][0], -1

    source = Endless()
    detector = kedge.Combined(network(), parts=["mds++", "knn"])
    with pytest.raises(InputError, match="label for each image"):
        detector.fit(source, preprocess=kedge.Preprocess((1, 12, 12)))
    assert source.count < 1000


def test_an_anchored_pass_serves_amp_and_the_features():
    net = network("anchored")
    parts = [kedge.AMP(net, k=3), kedge.KNN(net), kedge.GEN(net)]
    detector = kedge.Combined(parts).fit(images()).calibrate(images(80, seed=1))
    assert detector.has_tau
    assert detector.cost.forward == 3
    some = images(6, seed=2)
    alone = [type(part)(detector.net).fit(images()) for part in parts]
    torch.testing.assert_close(detector(some).tau, alone[0].calibrate(images(80, seed=1))(some).tau)
    expected = [each.score(some).double() for each in alone]
    z = (torch.stack(expected, 1) - detector.standard["centre"]) / detector.standard["scale"]
    torch.testing.assert_close(detector.score(some), z.sum(1).float(), rtol=1e-3, atol=1e-3)
    flipped = kedge.Combined([kedge.AMP(net, tta=2), kedge.GEN(net)])
    assert flipped.fit(images()).cost.forward == 2 * net.k  # the views need a pass of their own


def test_parts_that_draw_other_anchors_are_refused():
    net = network("anchored")
    with pytest.raises(InputError, match="share the anchors"):
        kedge.Combined([kedge.AMP(net, k=3), kedge.AMP(net, k=4)]).fit(images())


@pytest.mark.parametrize(
    ("kind", "parts"),
    [
        ("unanchored", ["mds++", "knn", "gen"]),
        ("anchored", ["mds++", "knn", "gen"]),
        ("anchored", ["knn", "amp", "gen"]),
    ],
)
def test_it_takes_extracted_features_if_its_parts_do(kind, parts):
    net = network(kind)
    if kind == "anchored":
        net.set_anchors(images(4).images)
    train, held, some = (kedge.extract(net, each) for each in (images(), images(80, seed=1), images(9, seed=2)))
    of_features = kedge.Combined(net, parts=parts, rule="fisher").fit(train).calibrate(held)
    of_images = kedge.Combined(net, parts=parts, rule="fisher").fit(images())
    of_images.calibrate(images(80, seed=1))
    torch.testing.assert_close(of_features.score(some), of_images.score(images(9, seed=2)), rtol=1e-3, atol=1e-3)
    learned = kedge.Combined(net, parts=parts, rule="learned").fit(train)
    with pytest.raises(InputError, match="pass the images themselves"):
        learned.calibrate(held)
    learned.calibrate(images(80, seed=1))
    torch.testing.assert_close(learned.score(some), learned.score(images(9, seed=2)), rtol=1e-3, atol=1e-3)


def test_parts_that_learn_from_held_out_images_do_so_from_those_of_the_standardisation():
    detector = combined("temperature_scaling", "knn").calibrate(images(80, seed=1))
    assert detector.parts[0].temperature > 0
    assert len(detector.calibration.scores) == 59
    assert len(detector.calibration.fingerprints) == 80


def test_detectors_that_were_given_stay_as_they_are():
    net = network()
    knn = kedge.KNN(net, k=3).fit(images()).calibrate(images(80, seed=1))
    before, bank = knn.calibration, knn.bank.clone()
    detector = kedge.Combined([knn, kedge.GEN(net).fit(images())]).calibrate(images(80, seed=4))
    detector.fit(images(40, seed=5))
    assert knn.calibration is before
    assert torch.equal(knn.bank, bank)


# Why an image was flagged.


def test_reasons_name_the_part_that_adds_the_most():
    detector = combined("knn", "gen").calibrate(images(200, seed=1), alpha=0.5)
    some = images(60, seed=2)
    detection = detector(some)
    evidence = detector.outputs(detector.as_input(some.images)).parts
    words = ["unlike anything seen", "between classes"]
    expected = [words[k] for k in evidence.argmax(dim=1).tolist()]
    flagged = detection.is_ood.tolist()
    assert list(detection.reasons) == [w if ood else None for w, ood in zip(expected, flagged, strict=True)]
    assert set(words) <= set(detection.reasons)
    assert [row["reason"] for row in detection.to_rows()] == list(detection.reasons)
    assert detection[2:5].reasons == detection.reasons[2:5]


def test_an_image_with_nan_has_a_reason_of_its_own():
    broken = images(2, seed=2).images.float() / 255
    broken[0, 0, 0, 0] = torch.nan
    assert combined().calibrate(images(80, seed=1))(broken).reasons[0] == "damaged pixels"


# What it promises.


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("held_out", [60, 200])
def test_at_most_alpha_of_fresh_images_are_flagged(rule, held_out, monkeypatch):
    """On average over held-out sets: the share flagged follows Beta(k, n + 1 - k), as for any split conformal score."""
    generator = torch.Generator().manual_seed(0)
    shares, kept = [], []
    for _ in range(150):
        scores = torch.randn(held_out + 400, 2, dtype=torch.float64, generator=generator).exp()  # heavy tails
        first = to_learn_from(held_out, 0.05, share=0.2, least=20)
        outside = scores[:first] * 2 if rule == "learned" else None
        learned = RULES[rule].learn(scores[:first], outside, "moments")
        ruled = RULES[rule].combine(RULES[rule].evidence(scores, learned), learned)
        calibration, fresh = ruled[first:held_out], ruled[held_out:]
        shares.append(float(kedge.calibration.is_ood(calibration, fresh, 0.05).double().mean()))
        kept.append(len(calibration))
    expected = allowed(kept[0], 0.05) / (kept[0] + 1)
    assert expected <= 0.05
    assert np.mean(shares) == pytest.approx(expected, abs=4 * np.std(shares) / np.sqrt(len(shares)))


def test_sixty_held_out_images_waste_nothing():
    learned = to_learn_from(60, 0.05, share=0.2, least=20)
    assert (learned, allowed(60 - learned, 0.05) / (61 - learned)) == (21, 0.05)
    for n in range(21, 400):
        rest = n - to_learn_from(n, 0.05, share=0.2, least=20)
        assert rest == 20 or allowed(rest, 0.05) > allowed(rest - 1, 0.05)  # one image fewer would flag less
    for n in (100, 1000):
        rest = n - to_learn_from(n, 0.05, 0.1, share=0.2, least=20)
        assert allowed(rest, 0.05, 0.1) > allowed(rest - 1, 0.05, 0.1)


def test_the_images_that_are_learned_from_do_not_depend_on_their_order():
    detector, held = combined(), images(80, seed=1)
    one = copy.deepcopy(detector).calibrate(held)
    other = copy.deepcopy(detector).calibrate(held.subset(range(79, -1, -1)))
    torch.testing.assert_close(one.standard["centre"], other.standard["centre"])
    torch.testing.assert_close(one.calibration.scores, other.calibration.scores, rtol=1e-4, atol=1e-4)


# Errors.


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"parts": ["mds++"]}, "2 to 8"),
        ({"parts": ["mds++", "genn"]}, "genn"),
        ({"rule": "product"}, "rule"),
        ({"standardise": "ranks"}, "standardise"),
        ({"parts": [{"name": "knn", "config": {"k": "five"}}, "gen"]}, r"parts\[0\]\.config\.k"),
        ({"parts": [{"name": "kmm", "config": {}}, "gen"]}, r"parts\[0\]\.name"),
        ({"parts": [{"name": "amp", "config": {"score": None}}, "gen"]}, "score with a name"),
    ],
    ids=str,
)
def test_options_that_are_wrong_are_named(options, words):
    with pytest.raises((InputError, FileFormatError), match=words):
        kedge.Combined(network(), **options)


def test_detectors_must_be_of_one_network():
    with pytest.raises(InputError, match="one network"):
        kedge.Combined([kedge.KNN(network()), kedge.GEN(network())])
    bare = network().network
    assert len(kedge.Combined([kedge.KNN(bare), kedge.GEN(bare)]).parts) == 2
    with pytest.raises(InputError, match="MSP, str"):
        kedge.Combined([kedge.MSP(network()), "gen"])
    with pytest.raises(InputError, match="got function"):
        kedge.protect(lambda x: x, images(40), images(40, seed=1))


def test_too_few_held_out_images_are_an_error_or_a_warning():
    detector = combined()
    with pytest.raises(InputError, match="at least 3"):
        detector.calibrate(images(2, seed=1))
    with pytest.warns(kedge.errors.KedgeWarning, match="at least 21 held-out"):
        detector.calibrate(images(18, seed=1))
    with pytest.raises(InputError, match="all of these are the same"):
        detector.calibrate(torch.zeros(30, 1, 12, 12))
    with pytest.raises(NotReadyError, match="calibrate"):
        combined().score(images(3))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("rule.scale", torch.zeros(2, dtype=torch.float64)),
        ("rule.scale", torch.ones(1, dtype=torch.float64)),
        ("rule.centre", torch.full((2,), torch.nan, dtype=torch.float64)),
        ("rule.centre", torch.zeros(2)),
        ("rule.knots", torch.zeros(2, 2, dtype=torch.float64)),
    ],
)
def test_a_damaged_standardisation_is_refused(name, value, tmp_path):
    combined().calibrate(images(80, seed=1)).save(tmp_path / "a.kedge")
    header, tensors = artifact.read(tmp_path / "a.kedge")
    artifact.write(tmp_path / "a.kedge", header, tensors | {f"detector.{name}": value})
    with pytest.raises(FileFormatError, match="rule"):
        kedge.load(tmp_path / "a.kedge")


@pytest.mark.parametrize(
    "part",
    [{"name": "knn"}, {"name": "knn", "config": {"k": True}}, 3, {"name": "knn", "config": {"wrong": 1}}],
    ids=str,
)
def test_damaged_parts_are_refused(part, tmp_path):
    combined().calibrate(images(80, seed=1)).save(tmp_path / "a.kedge")
    header, tensors = artifact.read(tmp_path / "a.kedge")
    header["detector"]["config"]["parts"][0] = part
    artifact.write(tmp_path / "a.kedge", header, tensors)
    with pytest.raises(FileFormatError, match=r"parts|config"):
        kedge.load(tmp_path / "a.kedge")
