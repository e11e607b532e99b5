"""Maximum classifier discrepancy: two heads, the loss that drives them apart, and the distance that scores."""

import math

import pytest
import torch
from torch import nn

import kedge
from helpers import images, labelled
from kedge.detectors import Cost
from kedge.detectors.trained.discrepancy import ClassifierDiscrepancy
from kedge.pixels import to_unit
from kedge.seeds import seeded
from kedge.training import Recipe
from method_helpers import entropy, small, softmax, step_of

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


def test_the_first_head_must_be_the_unsure_one_and_a_margin_that_is_met_moves_nothing():
    x = to_unit(gray(5), torch.float64)
    for unsure, expected in (("first", 0.0), ("second", 1.2 + math.log(4))):  # entropies of log 4 and of 0
        net = tiny()
        for name, head in net.network[3].named_children():
            nn.init.zeros_(head.weight)
            head.bias.data = torch.tensor([0.0 if name == unsure else 200.0, 0, 0, 0], dtype=torch.float64)
        loss = ClassifierDiscrepancy.loss(start=0).loss(step_of(net, x, torch.zeros(5).long(), outliers=x))
        assert loss.value.item() == pytest.approx(math.log(4) + expected)
    net, heads = tiny(), tiny().network[3]
    with torch.no_grad():
        first, second = (kedge.scores.entropy(z) for z in net(x, raw=True).extra)
    apart = (first - second).mean().item()
    if apart < 0:
        net.network[3].first, net.network[3].second = heads.second, heads.first
    gradients = []
    for margin, done in ((0.0, 0.0), (0.9 * abs(apart), 1.0), (1.1 * abs(apart), 1.0)):  # labels alone, met, not met
        loss = ClassifierDiscrepancy.loss(margin=margin, start=0.5)
        value = loss.loss(step_of(net, x, Y, outliers=x, done=done)).value
        gradients.append(torch.cat([g.flatten() for g in torch.autograd.grad(value, list(net.parameters()))]))
    assert gradients[1].allclose(gradients[0])
    assert not gradients[2].allclose(gradients[0])


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
