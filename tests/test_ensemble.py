"""Ensembles: several classifiers as one, and the detector on their mean softmax."""

import math

import numpy as np
import pytest
import torch
from torch import nn

import kedge
from kedge.detectors.ensemble import DeepEnsemble
from kedge.detectors.registry import DETECTORS
from kedge.errors import InputError
from kedge.models import build
from kedge.models.ensemble import Ensemble, log_mean_softmax
from kedge.seeds import seeded
from kedge.training import Recipe, train

SCORES = ["msp", "entropy", "mutual_information"]


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    monkeypatch.setitem(DETECTORS, DeepEnsemble.name, DeepEnsemble)


def images(n=12, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (n, 3, 8, 8), dtype=torch.uint8, generator=generator)


def flat(seed=0, classes=3, dtype=torch.float64):
    """A network of one's own: one linear layer."""
    with seeded(seed):
        return nn.Sequential(nn.Flatten(), nn.Linear(192, classes)).to(dtype)


def member(seed=0, kind="plain", dtype=torch.float32):
    with seeded(seed):
        net = build("compact", width=4, classes=4).to(dtype)
        net.fc.weight.data.mul_(20)
    if kind == "anchored":
        return kedge.anchor(net, init="fresh", mean=0.5, std=0.25)
    return kedge.Classifier(net, mean=0.1 * seed, std=0.25)


def softmax(z):
    e = np.exp(z - z.max())
    return e / e.sum()


# The ensemble.


def test_the_logits_are_the_logarithm_of_the_mean_softmax():
    nets, x = [flat(seed) for seed in range(3)], torch.rand(5, 3, 8, 8, dtype=torch.float64)
    found = Ensemble(nets)(x).detach().numpy()
    for i in range(5):
        each = [softmax(net(x[i : i + 1])[0].detach().numpy()) for net in nets]
        assert found[i] == pytest.approx(np.log((each[0] + each[1] + each[2]) / 3), rel=1e-9)


def test_the_mean_softmax_of_logits_that_are_far_apart_does_not_overflow():
    hypotheses = torch.tensor([[[1000.0, -1000.0]], [[-1000.0, 1000.0]]])
    assert log_mean_softmax(hypotheses).allclose(torch.full((1, 2), -math.log(2)))


def test_raw_output_and_hypotheses_are_the_members_logits_in_their_order():
    nets, x = [member(0), member(1)], torch.rand(2, 3, 8, 8)
    net = Ensemble(nets).eval()
    assert net.members == nets
    assert net(x, raw=True).equal(torch.stack([nets[0](x), nets[1](x)]))
    assert net.per_anchor_logits(x).equal(net(x, raw=True))


def test_a_module_list_is_a_list():
    nets = nn.ModuleList([flat(0), flat(1)])
    assert [m.network for m in Ensemble(nets).members] == list(nets)


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ([], "at least one network, got none"),
        (flat(), "must be a list of networks, got Sequential"),
        ("resnet18", "must be a list of networks, got str"),
        ([flat(), "resnet18"], "must be networks, got Sequential, str"),
    ],
)
def test_members_must_be_networks(members, message):
    for kind in (Ensemble, DeepEnsemble):
        with pytest.raises(InputError, match=message):
            kind(members)


def test_members_of_other_classes_are_found_out():
    net = Ensemble([flat(classes=3), flat(classes=4)])
    with pytest.raises(InputError, match=r"same classes; they give \(2, 3\), \(2, 4\)"):
        net(torch.rand(2, 3, 8, 8, dtype=torch.float64))


def test_an_ensemble_has_no_features_and_other_detectors_score_its_logits():
    net = Ensemble([member(0), member(1)])
    with pytest.raises(InputError, match="no layers to read; use one of its members"):
        net.features(torch.rand(1, 3, 8, 8), ["fc"])
    entropy = kedge.Entropy(net).fit(images(seed=1)).score(images())
    assert entropy.allclose(DeepEnsemble(net, score="entropy").fit(images(seed=1)).score(images()))


# What the members were trained with.


def trained(size=8, seed=0, classes=2):
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 256, (16, 1, size, size), dtype=torch.uint8, generator=generator)
    net = nn.Sequential(nn.AdaptiveAvgPool2d(8), nn.Flatten(), nn.Linear(64, classes))
    return train(net, kedge.ImageSet(pixels, torch.arange(16) % 2), Recipe(epochs=1, batch=8, crop=0), seed=seed)


def test_the_record_has_the_preprocessing_that_the_members_agree_on():
    first, second = trained(seed=0), trained(seed=1)
    net = Ensemble([first, second])
    assert net.record == {"preprocess": first.record["preprocess"]}
    other = torch.randint(0, 256, (20, 1, 12, 12), dtype=torch.uint8)
    assert DeepEnsemble(net).fit(other).preprocess.shape == (1, 8, 8)
    assert Ensemble([first, flat()]).record == net.record  # who was not trained here does not object
    net.record = {"note": "of mine"}
    assert net.record == {"note": "of mine", "preprocess": first.record["preprocess"]}


def test_members_that_disagree_leave_the_preprocessing_to_the_images():
    net = Ensemble([trained(8), trained(12)])
    assert net.record == {}
    other = torch.randint(0, 256, (20, 1, 10, 10), dtype=torch.uint8)
    assert DeepEnsemble(net).fit(other).preprocess.shape == (1, 10, 10)


def test_training_a_member_later_is_seen():
    net = Ensemble([kedge.Classifier(nn.Sequential(nn.Flatten(), nn.Linear(64, 2)))])
    assert net.record == {}
    data = kedge.ImageSet(torch.randint(0, 256, (16, 1, 8, 8), dtype=torch.uint8), torch.arange(16) % 2)
    train(net.members[0], data, Recipe(epochs=1, batch=8, crop=0))
    assert net.record["preprocess"]["shape"] == [1, 8, 8]


# The detector.


@pytest.mark.parametrize("score", SCORES)
def test_scores_are_those_of_the_definition(score):
    nets = [flat(seed) for seed in range(4)]
    x = torch.rand(6, 3, 8, 8, dtype=torch.float64)
    expected = []
    for i in range(6):
        each = [softmax(net(x[i : i + 1])[0].detach().numpy()) for net in nets]
        mean = sum(each) / 4
        entropy = -sum(p * math.log(p) for p in mean)
        own = sum(-sum(p * math.log(p) for p in q) for q in each) / 4
        expected.append({"msp": -max(mean), "entropy": entropy, "mutual_information": entropy - own}[score])
    found = DeepEnsemble(nets, score=score).fit(x).score(x)
    assert found.tolist() == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("kind", ["plain", "anchored"])
def test_an_ensemble_of_one_with_msp_is_msp(kind):
    net = member(1, kind)
    expected = kedge.MSP(net).fit(images(30, seed=1)).calibrate(images(40, seed=2))
    found = DeepEnsemble([net]).fit(images(30, seed=1)).calibrate(images(40, seed=2))
    assert found.score(images()).allclose(expected.score(images()), atol=1e-6)
    assert found(images()).probability.allclose(expected(images()).probability, atol=1e-6)
    assert found(images()).is_ood.equal(expected(images()).is_ood)


def test_members_that_agree_have_no_mutual_information():
    net = member(1)
    detector = DeepEnsemble([net, net, net], score="mutual_information").fit(images(seed=1))
    assert detector.score(images()).abs().max() < 1e-6
    detector = DeepEnsemble([net, member(2)], score="mutual_information").fit(images(seed=1))
    assert detector.score(images()).min() > 1e-6


def test_anchored_members_answer_with_the_mean_over_their_own_anchors():
    nets = [member(seed, "anchored", torch.float64) for seed in range(2)]
    for seed, net in enumerate(nets):
        net.set_anchors(images(3 + seed, seed=seed + 7))
    x = images()
    found = DeepEnsemble(nets).fit(images(seed=1))
    assert [len(net.anchors) for net in nets] == [3, 4]  # fit leaves them
    with torch.no_grad():
        expected = (
            torch.stack([net.per_anchor_logits(x).mean(dim=0).softmax(dim=1) for net in nets]).mean(dim=0).amax(dim=1)
        )
    assert found.score(x).neg().allclose(expected, rtol=1e-9)
    assert found.cost.forward == 7


def test_fit_gives_anchors_to_the_members_without():
    nets = [member(0, "anchored"), member(1), member(2, "anchored")]
    nets[0].set_anchors(images(2))
    detector = DeepEnsemble(nets).fit(images(30, seed=1))
    assert len(nets[0].anchors) == 2
    assert len(nets[2].anchors) == 5
    assert detector.cost.forward == 2 + 1 + 5
    nets[2].set_anchors(images(3))
    with pytest.raises(kedge.errors.NotReadyError, match="anchors changed after this detector was fitted"):
        detector.score(images())


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.float64, 1e-9)])
def test_scores_do_not_depend_on_the_batch(score, dtype, tolerance):
    nets = [member(0, "plain", dtype), member(1, "anchored", dtype)]
    detector = DeepEnsemble(nets, score=score).fit(images(seed=1))
    x, order = images(11), torch.randperm(11)
    expected = detector.score(x)
    for size in (1, 4):
        assert detector.score(x, batch_size=size).sub(expected).abs().max() <= tolerance
        assert detector.score(x[order], batch_size=size).sub(expected[order]).abs().max() <= tolerance
    assert expected.dtype == dtype


def test_hypotheses_are_those_of_evaluation_whatever_the_mode():
    detector = DeepEnsemble([member(0), member(1)])
    x = torch.rand(4, 3, 8, 8)
    detector.net.eval()
    expected = detector.per_anchor_logits(x)
    detector.net.train()
    assert detector.per_anchor_logits(x).equal(expected)
    assert detector.net.training


def test_arguments_out_of_range_are_named():
    with pytest.raises(InputError, match="score must be one of 'msp', 'entropy', 'mutual_information'; got 'energy'"):
        DeepEnsemble([flat()], score="energy")
    with pytest.raises(InputError, match="'mutual_information' needs at least two hypotheses, got 1"):
        DeepEnsemble([flat()], score="mutual_information")


# Files.


@pytest.mark.parametrize("kinds", [("plain", "plain"), ("anchored", "anchored"), ("plain", "anchored")])
@pytest.mark.parametrize("score", ["msp", "mutual_information"])
def test_a_saved_ensemble_gives_the_same_scores(kinds, score, tmp_path):
    nets = [member(seed, kind) for seed, kind in enumerate(kinds)]
    for seed, net in enumerate(nets):
        if isinstance(net, kedge.Anchored):
            net.set_anchors(images(2 + seed, seed=seed + 7))
    detector = DeepEnsemble(nets, score=score).fit(images(seed=1)).calibrate(images(40, seed=2))
    detector.save(tmp_path / "x.kedge")
    again = kedge.load(tmp_path / "x.kedge")
    assert isinstance(again, DeepEnsemble)
    assert again.config() == {"score": score}
    assert [type(m) for m in again.net.members] == [type(m) for m in nets]
    assert again(images()).score.equal(detector(images()).score)
    assert again(images()).is_ood.equal(detector(images()).is_ood)


def test_a_saved_ensemble_keeps_the_records_of_its_members(tmp_path):
    nets = [trained(seed=0), trained(seed=1)]
    detector = DeepEnsemble(nets).fit(torch.randint(0, 256, (20, 1, 8, 8), dtype=torch.uint8))
    detector.save(tmp_path / "x.kedge")
    model = nn.Sequential(nn.AdaptiveAvgPool2d(8), nn.Flatten(), nn.Linear(64, 2))
    again = kedge.load(tmp_path / "x.kedge", model=model)
    assert [m.record["seed"] for m in again.net.members] == [0, 1]
    assert again.net.record == detector.net.record


@pytest.mark.parametrize("kind", ["plain", "anchored"])
def test_members_of_a_type_of_ones_own_are_built_from_model(kind, tmp_path):
    nets = [flat(seed) if kind == "plain" else kedge.anchor(flat(seed)) for seed in range(3)]
    detector = DeepEnsemble(nets, score="entropy").fit(images(seed=1))
    detector.save(tmp_path / "x.kedge")
    with pytest.raises(InputError, match=r"holds a Sequential, .*pass model="):
        kedge.load(tmp_path / "x.kedge")
    model = flat(seed=9)
    before = model[1].weight.clone()
    again = kedge.load(tmp_path / "x.kedge", model=model)
    assert again.score(images()).equal(detector.score(images()))
    assert model[1].weight.equal(before)  # each member got a copy


def test_ensembles_of_ensembles_are_saved_too(tmp_path):
    inner = Ensemble([member(0), member(1)])
    detector = DeepEnsemble([inner, member(2)]).fit(images(seed=1))
    assert detector.cost.forward == 3
    detector.save(tmp_path / "x.kedge")
    assert kedge.load(tmp_path / "x.kedge").score(images()).equal(detector.score(images()))
