"""Maximum classifier discrepancy: two heads, the loss that drives them apart, and the distance that scores."""

import math

import pytest
import torch
from torch import nn

import kedge
from helpers import StopError, images, labelled, same_weights, stop_at
from kedge.detectors import Cost
from kedge.detectors.trained.discrepancy import ClassifierDiscrepancy, TwoHeads
from kedge.errors import InputError
from kedge.pixels import to_unit
from kedge.seeds import seeded
from kedge.training import Recipe
from method_helpers import entropy, small, softmax, step_of

RECIPE = Recipe(epochs=2, batch=16, lr=0.05, crop=0, flip=False)
DATA = labelled(48, classes=2, channels=1)
Y = torch.tensor([0, 3, 1, 2, 0])


def gray(n, seed=0) -> torch.Tensor:
    return images(n, channels=1, seed=seed)


def unlabelled(n=40, seed=100) -> kedge.ImageSet:
    return kedge.ImageSet(gray(n, seed), name="unlabelled")


def two(classes=2, seed=0) -> nn.Module:
    return ClassifierDiscrepancy.prepare(small(classes, seed), seed=seed)


def tiny(classes=4) -> kedge.Classifier:
    with seeded(0):
        network = nn.Sequential(nn.Flatten(), nn.Linear(64, 5), nn.ReLU(), nn.Linear(5, classes)).double()
    net = ClassifierDiscrepancy.prepare(kedge.Classifier(network, mean=0.5, std=0.25))
    for parameter in net.network[3].parameters():
        parameter.data.mul_(4)  # for softmaxes that differ
    return net


def test_prepare_puts_two_different_heads_in_the_place_of_one():
    net, state = small(classes=3), torch.get_rng_state()
    prepared = ClassifierDiscrepancy.prepare(net)
    heads, kept = prepared.fc, prepared.state_dict()
    assert torch.get_rng_state().equal(state)
    assert heads.first.weight.shape == heads.second.weight.shape == (3, 32)
    assert not heads.first.weight.equal(heads.second.weight)
    assert not heads.first.weight.equal(net.fc.weight)
    assert all(kept[key].equal(value) for key, value in net.state_dict().items() if not key.startswith("fc."))
    assert same_weights(ClassifierDiscrepancy.prepare(net), prepared)
    assert not ClassifierDiscrepancy.prepare(net, seed=1).fc.first.weight.equal(heads.first.weight)
    two_layers = nn.Sequential(nn.Linear(4, 3, bias=False), nn.Linear(3, 2)).double()
    named = ClassifierDiscrepancy.prepare(two_layers, head="0")[0]
    assert isinstance(named, TwoHeads)
    assert named.first.bias is None
    assert named.first.weight.dtype == torch.float64


def test_the_logits_are_the_mean_and_give_the_geometric_mean_of_the_softmaxes():
    net = tiny()
    output = net(gray(6), raw=True)
    first, second = output.extra
    features = net.network[2](net.network[1](net.network[0](net.normalise(gray(6)))))
    assert first.allclose(features @ net.network[3].first.weight.T + net.network[3].first.bias)
    assert second.allclose(features @ net.network[3].second.weight.T + net.network[3].second.bias)
    assert output.logits.allclose((first + second) / 2)
    assert net(gray(6)).equal(output.logits)
    both = (first.softmax(dim=1) * second.softmax(dim=1)).sqrt()
    assert output.logits.softmax(dim=1).allclose(both / both.sum(dim=1, keepdim=True))


@pytest.mark.parametrize("margin", [1.2, 0.0, 5.0])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_loss_by_hand(margin, smoothing):
    net, x, outliers = tiny(), to_unit(gray(5), torch.float64), to_unit(gray(7, 1), torch.float64)
    with torch.no_grad():
        known, unknown = (net(part, raw=True).extra for part in (x, outliers))
    labels = 0.0
    for head in known:
        for logits, label in zip(head.tolist(), Y.tolist(), strict=True):
            targets = [smoothing / 4 + (1 - smoothing) * (c == label) for c in range(4)]
            labels -= sum(t * math.log(p) for t, p in zip(targets, softmax(logits), strict=True)) / 5
    entropies = [[entropy(softmax(row)) for row in head.tolist()] for head in unknown]
    apart = sum(a - b for a, b in zip(*entropies, strict=True)) / 7
    assert abs(apart) > 0.01
    loss = ClassifierDiscrepancy.loss(margin=margin, start=0.5)
    for done, expected in ((0.49, labels), (0.5, labels + max(margin - apart, 0))):
        result = loss.loss(step_of(net, x, Y, outliers=outliers, done=done, label_smoothing=smoothing))
        assert result.value.item() == pytest.approx(expected, rel=1e-12)
        assert result.logits.allclose((known[0] + known[1]) / 2)


def test_arguments_and_networks_that_do_not_fit_are_named():
    given = {"margin": 0.5, "start": 0.9, "outliers_per_image": 3}
    assert ClassifierDiscrepancy.loss(**given).config() == given
    assert ClassifierDiscrepancy.loss().config()["margin"] == 1.2
    for name, value in {"margin": -1, "start": 1.5, "outliers_per_image": 0}.items():
        with pytest.raises(InputError, match=name):
            ClassifierDiscrepancy.loss(**{name: value})
    net, x = tiny(), to_unit(gray(2), torch.float64)
    with pytest.raises(InputError, match=r"labels must lie in 0\.\.3.*got 1\.\.4"):
        ClassifierDiscrepancy.loss().loss(step_of(net, x, torch.tensor([1, 4]), outliers=x))
    with pytest.raises(InputError, match=r"head must name a linear layer, one of \['fc'\]; got 'stage1'"):
        ClassifierDiscrepancy.prepare(small(), head="stage1")
    with pytest.raises(InputError, match="TwoHeads yet"):
        ClassifierDiscrepancy.prepare(two())
    for net in (small(), kedge.Classifier(small())):
        with pytest.raises(InputError, match=r"TwoHeads.*ClassifierDiscrepancy\.prepare\(net\)"):
            ClassifierDiscrepancy(net)
    for net, outliers, message in (
        (small(), unlabelled(), r"TwoHeads.*ClassifierDiscrepancy\.prepare\(net\)"),
        (two(), None, "'classifier discrepancy' needs outliers"),
        (kedge.anchor(two()), unlabelled(), "'classifier discrepancy' trains"),
    ):
        with pytest.raises(InputError, match=message):
            kedge.train(net, DATA, RECIPE, loss=ClassifierDiscrepancy.loss(), outliers=outliers)


def test_the_same_as_a_loop_by_hand():
    """Each step takes all images, so that their order does not matter; the first two of four leave the others out."""
    data, outliers = labelled(12, classes=4, channels=1), unlabelled(24)
    recipe = Recipe(epochs=4, batch=12, lr=0.1, momentum=0.8, weight_decay=0.01, crop=0, flip=False)
    loss = ClassifierDiscrepancy.loss(start=0.5, outliers_per_image=2)
    trained, net = kedge.train(tiny(), data, recipe, loss=loss, outliers=outliers), tiny()
    x, o = (to_unit(s.images).double() for s in (data, outliers))
    optimizer, rows = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.8, weight_decay=0.01), torch.arange(12)
    for number in range(4):
        p, q = (z.softmax(dim=1) for z in net(x, raw=True).extra)
        value = -p[rows, data.labels].log().mean() - q[rows, data.labels].log().mean()
        if number >= 2:
            p, q = (z.softmax(dim=1) for z in net(o, raw=True).extra)
            apart = ((q * q.log()).sum(dim=1) - (p * p.log()).sum(dim=1)).mean()
            value = value + torch.relu(1.2 - apart)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
    for name, value in net.named_parameters():
        assert trained.get_parameter(name).allclose(value, rtol=1e-9, atol=1e-12), name


def test_the_heads_disagree_on_images_without_labels():
    """Left or right is bright where there are labels; above or below in the other images, of which a few are known."""
    data = labelled(96, classes=2, channels=1)
    data.images[data.labels == 0, :, :, :4] //= 4
    data.images[data.labels == 1, :, :, 4:] //= 4
    turned = data.images.transpose(2, 3).contiguous()
    mixed = kedge.ImageSet(torch.cat([turned, data.images[:20].flip(2)]), name="mixed")
    recipe = Recipe(epochs=12, batch=16, lr=0.05, crop=0, flip=False)
    loss = ClassifierDiscrepancy.loss(margin=0.6, start=0.5)
    detector = ClassifierDiscrepancy(kedge.train(two(), data, recipe, loss=loss, outliers=mixed)).fit(data)
    inside, outside = detector.score(data.images[20:].flip(2)), detector.score(turned.flip(3))
    assert kedge.metrics.auroc(inside, outside) > 0.95
    assert outside.mean() > inside.mean() + 0.3
    assert detector.calibrate(data.images)(data.images).label.equal(data.labels)
    assert detector.outliers is not None


def test_a_run_stopped_in_mid_epoch_goes_on_as_if_it_never_had(tmp_path):
    def run(directory, progress=None):
        options = {"directory": tmp_path / directory, "checkpoint_seconds": 0.0, "progress": progress}
        loss, recipe = ClassifierDiscrepancy.loss(start=0.4), Recipe(epochs=3, batch=16, lr=0.05, crop=2)
        return kedge.train(two(), DATA, recipe, loss=loss, outliers=unlabelled(), **options)

    straight = run("straight")
    for at in (2, 5, 8):
        with pytest.raises(StopError):
            run(f"stopped {at}", stop_at(at))
        assert same_weights(run(f"stopped {at}"), straight)


def test_the_score_is_the_distance_between_the_softmaxes():
    net, x = tiny(), gray(9, 5)
    detector = ClassifierDiscrepancy(net).fit(DATA)
    with torch.no_grad():
        first, second = net(x, raw=True).extra
    expected = []
    for a, b in zip(first.tolist(), second.tolist(), strict=True):
        expected.append(sum(abs(p - q) for p, q in zip(softmax(a), softmax(b), strict=True)))
    assert detector.score(x).tolist() == pytest.approx(expected, rel=1e-12)
    assert len(set(expected)) == 9
    assert detector.cost == Cost(forward=1)
    assert detector.calibrate(gray(48, 1))(x).logits.allclose((first + second) / 2)


def test_an_anchored_network_gives_each_head_the_mean_over_its_anchors():
    net = kedge.anchor(two(seed=3).eval(), init="fresh", mean=0.5, std=0.25)
    detector, x, sums = ClassifierDiscrepancy(net).fit(DATA), gray(4, 5), [0.0, 0.0]
    names, anchors = ("fc.first", "fc.second"), net.anchors
    for anchor in anchors:
        net.set_anchors(anchor[None])
        with torch.no_grad():
            _, features = net.features(to_unit(x), names)
        sums = [total + features[name] / 5 for total, name in zip(sums, names, strict=True)]
    net.set_anchors(anchors)
    expected = (sums[0].softmax(dim=1) - sums[1].softmax(dim=1)).abs().sum(dim=1)
    assert detector.fit(DATA).score(x).allclose(expected, atol=1e-6)
    assert detector.cost == Cost(forward=5)
