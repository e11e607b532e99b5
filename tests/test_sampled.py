"""Mean softmax over samples: deep ensembles, and Monte Carlo dropout with masks that all images share."""

import math
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch import nn

import kedge
from helpers import flat, images, network
from kedge.detectors.sampled import DeepEnsemble, MCDropout
from kedge.errors import ArchitectureError, InputError, NotReadyError
from kedge.models import build
from kedge.models.ensemble import Ensemble, log_mean_softmax
from kedge.seeds import seeded
from kedge.training import Recipe, train
from method_helpers import entropy, softmax

SCORES = ["msp", "entropy", "mutual_information"]


def sampled_scores(each, score):
    """A score of the softmaxes of one image in each sample."""
    mean = [sum(p) / len(each) for p in zip(*each, strict=True)]
    information = entropy(mean) - sum(map(entropy, each)) / len(each)
    return {"msp": -max(mean), "entropy": entropy(mean), "mutual_information": information}[score]


def test_arguments_out_of_range_are_named():
    for kind, given in ((DeepEnsemble, [flat()]), (MCDropout, dense())):
        with pytest.raises(InputError, match="score must be one of 'msp', 'entropy', 'mutual_information'"):
            kind(given, score="energy")
    for options in ({"samples": 0}, {"samples": 2.5}, {"seed": "0"}):
        with pytest.raises(InputError, match=next(iter(options))):
            MCDropout(dense(), **options)
    with pytest.raises(InputError, match="'mutual_information' needs at least two"):
        DeepEnsemble([flat()], score="mutual_information")
    for members in ([], flat(), "resnet18", [flat(), "resnet18"]):
        for kind in (Ensemble, DeepEnsemble):
            with pytest.raises(InputError, match="members must be"):
                kind(members)


def test_the_logits_of_an_ensemble_are_the_logarithm_of_the_mean_softmax():
    nets, x = [flat(seed=seed).double() for seed in range(3)], torch.rand(5, 3, 8, 8, dtype=torch.float64)
    result = Ensemble(nets)(x).tolist()
    for i in range(5):
        each = [softmax(net(x[i : i + 1])[0].tolist()) for net in nets]
        assert result[i] == pytest.approx([math.log(sum(p) / 3) for p in zip(*each, strict=True)], rel=1e-9)
    far = torch.tensor([[[1000.0, -1000.0]], [[-1000.0, 1000.0]]])
    assert log_mean_softmax(far).allclose(torch.full((1, 2), -math.log(2)))
    members, x = nn.ModuleList([flat(), flat(seed=1)]), torch.rand(2, 3, 8, 8)
    net = Ensemble(members)
    assert [member.network for member in net.members] == list(members)
    for logits in (net(x, raw=True), net.members_logits(x)):
        assert logits.equal(torch.stack([member(x) for member in members]))


def test_an_ensemble_has_the_same_classes_and_no_features():
    with pytest.raises(InputError, match=r"same classes; they give \(2, 3\), \(2, 4\)"):
        Ensemble([flat(classes=3), flat(classes=4)])(torch.rand(2, 3, 8, 8))
    net = Ensemble([network(seed=0), network(seed=1)])
    with pytest.raises(InputError, match="no layers to read; use one of its members"):
        net.features(torch.rand(1, 3, 8, 8), ["fc"])
    scores = kedge.Entropy(net).fit(images(seed=1)).score(images())  # methods on logits take it
    assert scores.allclose(DeepEnsemble(net, score="entropy").fit(images(seed=1)).score(images()))


def trained(side=8, seed=0):
    data = kedge.ImageSet(images(16, channels=1, side=side, seed=seed), torch.arange(16) % 2)
    net = nn.Sequential(nn.AdaptiveAvgPool2d(8), nn.Flatten(), nn.Linear(64, 2))
    return train(net, data, Recipe(epochs=1, batch=8, crop=0), seed=seed)


def test_the_record_has_the_preprocessing_that_the_members_agree_on(tmp_path):
    first, second = trained(seed=0), trained(seed=1)
    net, shared = Ensemble([first, second]), {"preprocess": first.record["preprocess"]}
    assert net.record == shared
    assert DeepEnsemble(net).fit(images(20, channels=1, side=12)).preprocess.shape == (1, 8, 8)
    assert Ensemble([first, flat()]).record == shared  # an untrained member has no preprocessing to disagree about
    net.record = {"note": "own"}
    assert net.record == {"note": "own"} | shared
    other = Ensemble([trained(8), trained(12)])
    assert other.record == {}
    assert DeepEnsemble(other).fit(images(20, channels=1, side=10)).preprocess.shape == (1, 10, 10)
    DeepEnsemble(net).fit(images(20, channels=1)).save(tmp_path / "x.kedge")
    model = nn.Sequential(nn.AdaptiveAvgPool2d(8), nn.Flatten(), nn.Linear(64, 2))
    again = kedge.load(tmp_path / "x.kedge", model=model)
    assert [member.record["seed"] for member in again.net.members] == [0, 1]
    assert again.net.record == net.record


@pytest.mark.parametrize("score", SCORES)
def test_the_scores_of_an_ensemble_are_those_of_the_definition(score):
    nets, x = [flat(seed=seed).double() for seed in range(4)], torch.rand(6, 3, 8, 8, dtype=torch.float64)
    expected = [sampled_scores([softmax(net(row[None])[0].tolist()) for net in nets], score) for row in x]
    assert DeepEnsemble(nets, score=score).fit(x).score(x).tolist() == pytest.approx(expected, rel=1e-9)
    if score == "mutual_information":
        assert DeepEnsemble(nets[:1] * 3, score=score).fit(x).score(x).abs().max() < 1e-6  # they agree


@pytest.mark.parametrize("kind", ["unanchored", "anchored"])
def test_an_ensemble_of_one_with_msp_is_msp(kind):
    net, x = network(kind, seed=1), images(12)
    expected = kedge.MSP(net).fit(images(30, seed=1)).calibrate(images(40, seed=2))(x)
    result = DeepEnsemble([net]).fit(images(30, seed=1)).calibrate(images(40, seed=2))(x)
    assert result.score.allclose(expected.score, atol=1e-6)
    assert result.probability.allclose(expected.probability, atol=1e-6)
    assert result.is_ood.equal(expected.is_ood)


def test_anchored_members_give_the_mean_over_their_own_anchors():
    nets, x = [network("anchored", seed=seed, dtype=torch.float64) for seed in range(2)], images(12)
    nets[0].set_anchors(images(3, seed=7))
    detector = DeepEnsemble([*nets, network(seed=2, dtype=torch.float64)]).fit(images(30, seed=1))
    assert [len(net.anchors) for net in nets] == [3, 5]  # fit leaves those of the first and sets the second's
    with torch.no_grad():
        each = [net.per_anchor_logits(x).mean(dim=0) for net in nets] + [detector.net.members[2](x)]
    mean = torch.stack(each).softmax(dim=2).mean(dim=0)
    assert detector.score(x).neg().allclose(mean.amax(dim=1), rtol=1e-9)
    assert detector.cost.forward == 3 + 5 + 1
    nets[1].set_anchors(images(3))
    with pytest.raises(NotReadyError, match="anchors changed after this detector was fitted"):
        detector.score(images())


@pytest.mark.parametrize("kind", ["unanchored", "anchored"])
def test_members_of_a_foreign_type_are_built_from_copies_of_model(kind, tmp_path):
    nets = [flat(seed=seed) if kind == "unanchored" else kedge.anchor(flat(seed=seed)) for seed in range(3)]
    detector = DeepEnsemble(nets, score="entropy").fit(images(seed=1))
    detector.save(tmp_path / "x.kedge")
    assert kedge.load(tmp_path / "x.kedge").score(images()).equal(detector.score(images()))  # by their graphs
    model = flat(seed=9)
    before = model[1].weight.clone()
    again = kedge.load(tmp_path / "x.kedge", model=model)
    assert again.score(images()).equal(detector.score(images()))
    assert model[1].weight.equal(before)


def test_ensembles_of_ensembles_are_saved_too(tmp_path):
    inner = Ensemble([network(seed=0), network("anchored", seed=1)])
    detector = DeepEnsemble([inner, network(seed=2)]).fit(images(seed=1))
    assert detector.cost.forward == 1 + 5 + 1
    detector.save(tmp_path / "x.kedge")
    assert kedge.load(tmp_path / "x.kedge").score(images()).equal(detector.score(images()))


def dense(dropout=0.5):
    """Two linear layers with dropout between them, which numpy can follow."""
    with seeded(3):
        return nn.Sequential(nn.Flatten(), nn.Linear(3, 6), nn.ReLU(), nn.Dropout(dropout), nn.Linear(6, 4)).double()


def vectors(n=5):
    return torch.rand(n, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def sampled(net, x, **options):
    with torch.no_grad():
        return MCDropout(net, **options).sampled_logits(x)


def masks(p, features, **options):
    """The outputs for ones of a network that only drops, (M, B, features)."""
    net = nn.Sequential(nn.Flatten(), nn.Dropout(p), nn.Identity())
    return sampled(net, torch.ones(3, features, dtype=torch.float64), **options)


def test_all_images_share_the_mask_of_a_pass_and_the_seed_decides_it():
    result = masks(0.3, 4000, samples=3)
    assert set(result.unique().tolist()) == {0.0, 1 / 0.7}
    for mask in result[:, 0]:
        assert abs(float((mask == 0).double().mean()) - 0.3) < 4 * math.sqrt(0.3 * 0.7 / 4000)
    assert result.equal(result[:, :1].expand_as(result))
    assert len({tuple(mask.tolist()) for mask in result[:, 0]}) == 3
    first = masks(0.5, 64, seed=1)
    assert first.equal(masks(0.5, 64, seed=1))
    assert not first.equal(masks(0.5, 64, seed=2))
    assert masks(0.5, 64, samples=3, seed=1).equal(first[:3])  # more samples add passes and change none


@pytest.mark.parametrize("layers", [1, 2])
def test_layers_and_calls_of_one_layer_draw_masks_of_their_own(layers):
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.drops = nn.ModuleList(nn.Dropout(0.5) for _ in range(layers))

        def forward(self, x):
            return torch.stack([self.drops[0](x), self.drops[-1](x)], dim=1).flatten(1)

    result = sampled(Twice(), torch.ones(2, 64), samples=2).view(2, 2, 2, 64)  # pass, image, call, feature
    assert result[:, 0].equal(result[:, 1])
    assert all(not a.equal(b) for a, b in result[:, 0])


@pytest.mark.parametrize(
    ("kind", "shape"), [(nn.Dropout1d, (40, 5)), (nn.Dropout2d, (40, 5, 5)), (nn.Dropout3d, (40, 2, 5, 5))]
)
def test_channelwise_layers_drop_whole_channels(kind, shape):
    result = sampled(nn.Sequential(kind(0.5), nn.Flatten()), torch.ones(2, *shape), samples=3).view(3, 2, 40, -1)
    assert result.amin(dim=3).equal(result.amax(dim=3))
    assert set(result.unique().tolist()) == {0.0, 2.0}
    assert result[:, 0].equal(result[:, 1])


def test_dropout_of_everything_leaves_nothing_and_the_mean_of_a_linear_network_is_the_network():
    net = dense(1.0)
    result = sampled(net, vectors())
    assert result.allclose(net[4].bias.detach().expand_as(result))
    linear = nn.Sequential(nn.Flatten(), nn.Dropout(0.3), nn.Linear(3, 4)).double()
    result = sampled(linear, vectors(2), samples=1000)
    with torch.no_grad():
        expected = linear.eval()(vectors(2))
    assert ((result.mean(dim=0) - expected).abs() < 4 * result.std(dim=0) / math.sqrt(1000)).all()


@pytest.mark.parametrize("score", SCORES)
def test_the_scores_of_dropout_are_those_of_the_definition(score):
    net, x = dense(), vectors()
    w1, w2 = (layer.weight.detach().numpy() for layer in (net[1], net[4]))
    b1, b2 = (layer.bias.detach().numpy() for layer in (net[1], net[4]))
    expected, drops = [], masks(0.5, 6, samples=7, seed=5)[:, 0].numpy()
    for row in x.numpy():
        each = [softmax(w2 @ (np.maximum(w1 @ row + b1, 0) * mask) + b2) for mask in drops]
        expected.append(sampled_scores(each, score))
    assert MCDropout(net, samples=7, score=score, seed=5).fit(x).score(x).tolist() == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("memory", [256 * 2**20, 1])  # all anchors in one batch, or one row at a time
@pytest.mark.parametrize("before", [False, True])
def test_an_anchored_network_gives_the_mean_over_its_anchors_under_the_same_masks(before, memory):
    """Also with dropout before the anchored layer, which drops the same of image and anchor."""
    with seeded(0):
        early = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(3, 4)).double()
    net, x, anchors = kedge.anchor(early if before else dense(), init="fresh"), vectors(), vectors(8)[5:]
    net.set_anchors(anchors)
    net.memory_cap = memory
    result = sampled(net, x, samples=4)
    expected = torch.zeros_like(result)
    for anchor in anchors:
        net.set_anchors(anchor[None])
        expected += sampled(net, x, samples=4) / 3
    assert result.allclose(expected, rtol=1e-9)
    net.set_anchors(anchors)
    assert MCDropout(net, samples=4).cost.forward == 12
    both = sampled(Ensemble([dense(), dense()]), x, samples=3)  # the second member has masks of its own
    assert both.shape == (3, 5, 4)
    assert not both.allclose(sampled(dense(), x, samples=3).log_softmax(dim=-1))


def test_a_failure_in_mid_pass_leaves_no_hooks():
    net = build("compact", width=4, classes=4, dropout=0.3)
    detector = MCDropout(net, samples=2).fit(images(12))
    net.fc.weight = nn.Parameter(torch.zeros(4, 7))
    with pytest.raises(InputError, match="Compact cannot take inputs"):
        detector.score(images(12))
    assert all(not module._forward_hooks and not module._forward_pre_hooks for module in net.modules())


@pytest.mark.parametrize("kind", [MCDropout, kedge.SVI])
def test_threads_that_score_at_once_do_not_get_each_other_s_draws(kind):
    net = build("compact", width=4, classes=4, dropout=0.5)
    detectors = [kind(kedge.SVI.prepare(net) if kind is kedge.SVI else net, samples=4, seed=s) for s in (0, 1)]
    detectors[1].net = detectors[0].net  # one network
    if kind is MCDropout:
        detectors[1].layers = detectors[0].layers
    detectors.append(kedge.MSP(detectors[0].net.eval()))  # which draws nothing and takes no lock
    expected = [detector.fit(images(12)).score(images(12)) for detector in detectors]
    with ThreadPoolExecutor(6) as pool:
        results = list(pool.map(lambda number: detectors[number % 3].score(images(12)), range(120)))
    assert all(result.equal(expected[number % 3]) for number, result in enumerate(results))


def test_networks_without_suitable_dropout_are_refused():
    for net in (build("compact", width=4), nn.Sequential(nn.Flatten(), nn.Dropout(0.0), nn.Linear(3, 2))):
        with pytest.raises(InputError, match=r'build\("wrn-40-2", dropout=0\.3\)'):
            MCDropout(net)
    for kind in (nn.AlphaDropout, nn.FeatureAlphaDropout):
        with pytest.raises(ArchitectureError, match=rf"'network\.1' is an {kind.__name__}"):
            MCDropout(nn.Sequential(nn.Dropout(0.5), kind(0.5), nn.Flatten()))
        MCDropout(nn.Sequential(nn.Dropout(0.5), kind(0.0), nn.Flatten()))

    class Odd(nn.Module):
        def __init__(self, forward):
            super().__init__()
            self.drop, self.fc, self.pass_on = nn.Dropout(0.5), nn.Linear(3, 2), forward

        def forward(self, x):
            return self.pass_on(self, x)

    idle, transposed = Odd(lambda self, x: self.fc(x)), Odd(lambda self, x: self.drop(x.T).T)
    with pytest.raises(InputError, match=r"none of the dropout layers \['network\.drop'\] runs"):
        MCDropout(idle).fit(torch.rand(4, 3)).score(torch.rand(4, 3))
    with pytest.raises(ArchitectureError, match=r"'network\.drop' must get one row per image.* \(3, 4\) for 4 images"):
        MCDropout(transposed).fit(torch.rand(4, 3)).score(torch.rand(4, 3))
