"""What the methods with a loss of their own share: preparing, arguments, resuming, and anchored networks."""

import math

import pytest
import torch
from torch import nn

import kedge
from helpers import StopError, images, labelled, same_weights, stop_at
from kedge import scores
from kedge.detectors import Cost
from kedge.detectors.trained.discrepancy import TwoHeads
from kedge.detectors.trained.duq import RBFHead
from kedge.detectors.trained.rotpred import RotationHead
from kedge.detectors.trained.udg import GroupHead
from kedge.errors import ArchitectureError, InputError
from kedge.models.ensemble import Ensemble
from kedge.models.head import head_name
from kedge.pixels import to_unit
from kedge.training import Recipe, train
from method_helpers import small, step_of

RECIPE = Recipe(epochs=2, batch=16, lr=0.05, crop=0, flip=False)
DATA = labelled(48, classes=2, channels=1)
UNLABELLED = kedge.ImageSet(images(40, channels=1, seed=100), name="unlabelled")
HEADS = {
    kedge.DUQ: RBFHead,
    kedge.ClassifierDiscrepancy: TwoHeads,
    kedge.UDG: GroupHead,
    kedge.RotPred: RotationHead,
}
METHODS = [kedge.OutlierExposure, *HEADS, kedge.SVI, kedge.SVIAvUC]


def prepared(method, net=None, **options):
    options |= {"groups": 6} if method is kedge.UDG else {}
    return method.prepare(small() if net is None else net, **options)


def outliers_for(loss):
    return UNLABELLED if loss.outliers_per_image else None


@pytest.mark.parametrize("method", HEADS)
def test_prepare_draws_a_head_from_the_seed_and_changes_nothing_else(method):
    net, state = small(classes=3), torch.get_rng_state()
    ready, other = prepared(method, net), prepared(method, net, seed=4)
    assert torch.equal(torch.get_rng_state(), state)
    assert isinstance(net.fc, nn.Linear)
    assert isinstance(ready.fc, HEADS[method])
    assert same_weights(prepared(method, net), ready)
    assert not same_weights(other.fc, ready.fc)
    weights = ready.state_dict()
    assert all(weights[name].equal(value) for name, value in net.state_dict().items() if not name.startswith("fc."))
    two = nn.Sequential(nn.Linear(4, 3, bias=False), nn.Linear(3, 3)).double()
    assert isinstance(prepared(method, two, head="0")[0], HEADS[method])
    assert {value.dtype for value in prepared(method, two)[1].state_dict().values()} == {torch.float64}


def test_the_shapes_of_the_heads():
    net = small(classes=3)
    assert kedge.DUQ.prepare(net).fc.weight.shape == (3, 32, 32)  # as long as the penultimate vector by default
    assert kedge.DUQ.prepare(net, centroid_size=5).fc.weight.shape == (3, 5, 32)
    heads = kedge.ClassifierDiscrepancy.prepare(net).fc
    assert heads.first.weight.shape == heads.second.weight.shape == (3, 32)
    assert not heads.first.weight.equal(heads.second.weight)
    grouped, x = kedge.UDG.prepare(net, groups=7), images(4, channels=1)
    assert grouped.fc.groups.weight.shape == (7, 32)
    assert kedge.UDG.prepare(net).fc.groups.out_features == 1000
    assert kedge.Classifier(grouped.eval())(x).equal(kedge.Classifier(net.eval())(x))
    assert kedge.RotPred.prepare(net).fc.rotations.weight.shape == (4, 32)
    assert (
        head_name(grouped) == head_name(kedge.RotPred.prepare(net)) == "fc.classes"
    )  # so that methods that read the head find the one of the classes


GROUPING = {"groups": 9, "purity": 0.5, "weight_groups": 0.2, "weight_outliers": 0.3}
# method: (arguments of the loss that differ from the defaults, values that are refused, arguments refused by `prepare`)
ARGUMENTS = {
    kedge.OutlierExposure: (
        {"weight": 0.3, "outliers_per_image": 1},
        [("weight", -0.1), ("weight", math.nan), ("outliers_per_image", 0), ("outliers_per_image", 1.5)],
        [],
    ),
    kedge.DUQ: (
        {"penalty": 1.0},
        [("penalty", -1)],
        [("centroid_size", 0), ("length_scale", 0.0), ("gamma", 1.0), ("head", "prep")],
    ),
    kedge.ClassifierDiscrepancy: (
        {"margin": 0.5, "start": 0.9, "outliers_per_image": 3},
        [("margin", -1), ("start", 1.5), ("outliers_per_image", 0)],
        [("head", "stage1")],
    ),
    kedge.UDG: (
        GROUPING | {"outliers_per_image": 2, "start": 1, "seed": 5},
        [*dict.fromkeys(GROUPING, -1).items(), ("purity", 1.1), ("outliers_per_image", 0), ("start", 0.5)],
        [("groups", 1), ("head", "prep")],
    ),
    kedge.RotPred: ({"weight": 1.0}, [("weight", -1), ("weight", math.nan)], [("head", "prep")]),
    kedge.SVI: (
        {"kl_weight": 0.5, "warmup": 0.2, "samples": 2},
        [("kl_weight", -1.0), ("warmup", 1.5), ("samples", 0)],
        [("initial", 0.0), ("prior", 0.0), ("prior_mean", "one")],
    ),
    kedge.SVIAvUC: (
        {"kl_weight": 0.5, "warmup": 0.2, "samples": 2, "beta": 1.0},
        [("warmup", 0.0), ("warmup", 1.0), ("beta", -1.0)],
        [],
    ),
}


@pytest.mark.parametrize("method", METHODS)
def test_arguments_and_networks_that_do_not_fit_are_named(method):
    given, refused, refused_by_prepare = ARGUMENTS[method]
    assert method.loss(**given).config() == given
    assert method.loss().config().keys() == given.keys()
    for call, arguments in ((method.loss, refused), (lambda **o: method.prepare(small(), **o), refused_by_prepare)):
        for name, value in arguments:
            with pytest.raises(InputError, match=name):
                call(**{name: value})
    loss = method.loss()
    if loss.outliers_per_image:
        with pytest.raises(InputError, match=f"'{loss.name}' needs outliers"):
            train(prepared(method), DATA, RECIPE, loss=loss)
        with pytest.raises(InputError, match="'cross-entropy' uses no outliers"):
            train(small(), DATA, RECIPE, outliers=UNLABELLED)
    if method.loss.unanchored_only:
        with pytest.raises(InputError, match=f"'{loss.name}' trains unanchored"):
            train(kedge.anchor(prepared(method)), DATA, RECIPE, loss=loss, outliers=outliers_for(loss))
    if method is kedge.OutlierExposure:
        return
    words = HEADS[method].__name__ if method in HEADS else "Gaussian weights"
    for refused_net in (small(), kedge.Classifier(small())):
        for use in (method, lambda net: train(net, DATA, RECIPE, loss=loss, outliers=outliers_for(loss))):
            with pytest.raises(InputError, match=rf"{words}.*\.prepare\(net\)"):
                use(refused_net)
    with pytest.raises((InputError, ArchitectureError), match=r"yet; it has one|computes its weight"):
        prepared(method, prepared(method))
    with pytest.raises(InputError, match="got an ensemble"):
        prepared(method, Ensemble([small(), small()]))
    if method in HEADS:
        with pytest.raises(InputError, match="got an ensemble"):
            method(Ensemble([prepared(method)]))


@pytest.mark.parametrize("method", [kedge.OutlierExposure, *HEADS])
def test_labels_without_an_output_are_named(method):
    x, net = to_unit(images(2, channels=1)), kedge.Classifier(prepared(method))
    fields = {"outliers": x, "index": torch.arange(2), "outlier_index": torch.arange(2), "done": 1.0}
    losses = [method.loss(), method.loss(weight=0)] if method is kedge.OutlierExposure else [method.loss()]
    for loss in losses:
        with pytest.raises(InputError, match=r"labels must lie in 0\.\.1.*got 1\.\.3"):
            loss.loss(step_of(net, x, torch.tensor([1, 3]), **fields))


RUNS = {  # twelve steps; SVI-AvUC's warm-up ends within the fourth
    "outlier exposure": (kedge.OutlierExposure, "unanchored", {}),  # 96 of 40 outliers an epoch: rounds end anywhere
    "duq": (kedge.DUQ, "unanchored", {}),
    "discrepancy": (kedge.ClassifierDiscrepancy, "unanchored", {"start": 0.4}),
    "udg": (kedge.UDG, "unanchored", {}),
    "udg that starts later": (kedge.UDG, "unanchored", {"start": 1}),
    "rotpred": (kedge.RotPred, "unanchored", {}),
    "rotpred, anchored": (kedge.RotPred, "anchored", {}),
    "svi avuc": (kedge.SVIAvUC, "unanchored", {}),
    "svi avuc, anchored": (kedge.SVIAvUC, "anchored", {}),
}


@pytest.mark.parametrize("name", RUNS)
def test_a_run_that_was_stopped_ends_with_the_very_same_weights_and_state(tmp_path, name):
    method, kind, options = RUNS[name]
    recipe = Recipe(epochs=3, batch=16, lr=0.05, crop=1, flip=False, ema=0.9)

    def run(directory, **more):
        loss, steps = method.loss(**options), []
        net = prepared(method, kedge.anchor(small(), init="fresh") if kind == "anchored" else small())
        more = {"directory": tmp_path / directory, "outliers": outliers_for(loss), "progress": steps.append} | more
        net = train(net, labelled(64, classes=2, channels=1), recipe, seed=2, loss=loss, checkpoint_seconds=0.0, **more)
        return net, loss.state(), [progress.step for progress in steps]

    straight, state, _ = run("straight")
    for at in (3, 5, 9):
        with pytest.raises(StopError):
            run(f"stopped {at}", progress=stop_at(at))
        net, again, steps = run(f"stopped {at}")
        assert steps == list(range(at, 13))
        assert same_weights(net, straight)
        assert all(again[key].equal(state[key]) for key in state)


@pytest.mark.parametrize("method", [kedge.OutlierExposure, kedge.UDG])
def test_the_score_is_one_of_the_logits(method):
    net = kedge.Classifier(prepared(method, small(3, seed=3)).eval(), mean=0.5, std=0.25)
    x = images(30, channels=1, seed=5)
    for score, function in scores.SCORES.items():
        detector = method(net, score=score).fit(DATA)
        with torch.no_grad():
            assert detector.score(x).allclose(function(net(x)), atol=1e-6)
        assert (detector.cost, detector.config()) == (Cost(forward=1), {"score": score})
    with pytest.raises(InputError, match="score must be one of"):
        method(net, score="best")


# The score of the means over anchors: of the logits, or of what the layers give.
MEANS = {
    kedge.OutlierExposure: ((), lambda z: -z.softmax(dim=1).amax(dim=1)),
    kedge.UDG: ((), lambda z: -z.softmax(dim=1).amax(dim=1)),
    kedge.DUQ: ((), lambda z: -z.amax(dim=1)),
    kedge.ClassifierDiscrepancy: (
        ("fc.first", "fc.second"),
        lambda a, b: (a.softmax(dim=1) - b.softmax(dim=1)).abs().sum(dim=1),
    ),
}


@pytest.mark.parametrize("method", MEANS)
def test_an_anchored_network_gives_the_means_over_its_anchors(method):
    layers, function = MEANS[method]
    net = kedge.anchor(prepared(method, small(3, seed=3)).eval(), init="fresh", mean=0.5, std=0.25)
    detector, x, sums = method(net).fit(labelled(48, classes=3, channels=1)), images(6, channels=1, seed=4), 0.0
    expected = detector.score(x)
    assert detector.cost == Cost(forward=5)
    for anchor in net.anchors.clone():  # one at a time
        net.set_anchors(anchor[None])
        with torch.no_grad():
            logits, features = net.features(to_unit(x), layers)
        sums = sums + torch.stack([features[name] for name in layers] or [logits]) / 5
    assert function(*sums).allclose(expected, rtol=1e-4, atol=1e-6)
