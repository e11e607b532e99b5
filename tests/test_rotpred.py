"""RotPred: a second head that tells rotations, its loss, and a score of both heads."""

import math

import pytest
import torch
from torch import nn

import kedge
from helpers import images, labelled
from kedge.detectors import Cost
from kedge.detectors.trained.rotpred import RotationHead, RotPred, rotated
from kedge.errors import InputError
from kedge.pixels import to_unit
from kedge.training import Recipe, train
from method_helpers import small, softmax, step_of


def linear(classes=3, seed=0) -> kedge.Classifier:
    """Both heads on the pixels themselves, one channel of two by two, in double precision."""
    torch.manual_seed(seed)
    return kedge.Classifier(RotPred.prepare(nn.Sequential(nn.Flatten(), nn.Linear(4, classes)).double()))


def turned(image: list[list[float]], turns: int) -> list[list[float]]:
    """A square image after so many quarter turns against the clock."""
    for _ in range(turns):
        image = [list(row) for row in zip(*image, strict=True)][::-1]
    return image


def of_head(layer: nn.Linear, image: list[list[float]]) -> list[float]:
    pixels = [value for row in image for value in row]
    weight, bias = layer.weight.tolist(), layer.bias.tolist()
    return softmax(
        [sum(w * p for w, p in zip(row, pixels, strict=True)) + b for row, b in zip(weight, bias, strict=True)]
    )


def test_images_are_turned_by_quarters():
    x = torch.rand(3, 1, 5, 5)
    result = rotated(x)
    for number, image in enumerate(x):
        for turns in range(4):
            assert result[4 * number + turns, 0].tolist() == turned(image[0].tolist(), turns)


@pytest.mark.parametrize("weight", [0.0, 0.5, 2.0])
def test_the_loss_is_that_of_upright_labels_and_of_all_rotations(weight):
    net, x, y = linear(), torch.rand(5, 1, 2, 2, dtype=torch.float64), torch.tensor([0, 1, 2, 0, 1])
    head, total = net.network[1], 0.0
    for image, label in zip(x[:, 0].tolist(), y.tolist(), strict=True):
        total -= math.log(of_head(head.classes, image)[label]) / 5
        for turns in range(4):
            total -= weight * math.log(of_head(head.rotations, turned(image, turns))[turns]) / 20
    result = RotPred.loss(weight=weight).loss(step_of(net, x, y))
    assert result.value.item() == pytest.approx(total, rel=1e-12)
    torch.testing.assert_close(result.logits, net(x))
    result.value.backward()
    assert not head._forward_hooks
    assert (head.rotations.weight.grad.abs().max() > 0) == (weight > 0)


def test_the_score_is_the_mean_rotation_loss_less_the_divergence_from_uniform():
    net, x = linear(), torch.rand(6, 1, 2, 2, dtype=torch.float64)
    detector, head = RotPred(net).fit(x), net.network[1]
    for image, score in zip(x[:, 0].tolist(), detector.score(x).tolist(), strict=True):
        p = of_head(head.classes, image)
        divergence = sum(math.log(1 / 3 / each) / 3 for each in p)
        rotations = [-math.log(of_head(head.rotations, turned(image, turns))[turns]) for turns in range(4)]
        assert score == pytest.approx(sum(rotations) / 4 - divergence - math.log(3), rel=1e-10)  # a constant apart
    assert detector.cost == Cost(forward=4)


@pytest.mark.parametrize("mask", [0.0, 0.5])
def test_an_anchored_network_pairs_rotated_images(mask):
    net = kedge.anchor(RotPred.prepare(small()), init="fresh", mask=mask, mask_target="uniform", mean=0.5, std=0.25)
    x, y = to_unit(images(8, channels=1)), torch.arange(8) % 2
    result = RotPred.loss().loss(step_of(net.train(), x, y, anchors={"among": x, "first": 0}))
    assert result.logits.shape == (8, 2)
    assert len(net.draw.permutation) == 32
    result.value.backward()
    assert net.network.fc.rotations.weight.grad.abs().max() > 0
    detector = RotPred(net).fit(labelled(20, classes=2, channels=1))
    assert detector.cost == Cost(forward=20)
    expected, sums = detector.score(x), 0.0
    for anchor in net.anchors.clone():  # one at a time
        net.set_anchors(anchor[None])
        with torch.no_grad():
            each = [net.features(x.rot90(turns, (2, 3)), ["fc.rotations"]) for turns in range(4)]
        values = [each[0][0], *(features["fc.rotations"] for _, features in each)]
        sums = sums + torch.stack([torch.nn.functional.pad(value, (0, 4 - value.shape[1])) for value in values]) / 5
    z, rotations = sums[0][:, :2], sums[1:]
    loss = -sum(rotations[turns].log_softmax(dim=1)[:, turns] for turns in range(4)) / 4
    torch.testing.assert_close(expected, z.mean(dim=1) - z.logsumexp(dim=1) + loss, rtol=1e-4, atol=1e-5)


def bars(n=96, seed=0) -> kedge.ImageSet:
    """Images that are bright at the top, with a second bar in the middle for one of two classes."""
    pixels, labels = images(n, channels=1, seed=seed) // 4, torch.arange(n) % 2
    pixels[:, :, :2] += 180
    pixels[labels == 1, :, 4] += 180
    return kedge.ImageSet(pixels, labels, "bars")


def test_rotations_are_learned_and_images_that_lie_on_their_side_are_further_out():
    recipe = Recipe(epochs=8, batch=16, lr=0.05, crop=0, flip=False)
    net = train(RotPred.prepare(small()), bars(), recipe, loss=RotPred.loss())
    assert net.record["loss"] == {"name": "rotpred", "weight": 0.5}
    detector, test = RotPred(net).fit(bars()), bars(32, seed=1)
    lying = kedge.ImageSet(test.images.rot90(1, (2, 3)))
    assert kedge.metrics.auroc(detector.score(test), detector.score(lying)) > 0.95


def test_images_must_be_square():
    net, wide = RotPred.prepare(small()), torch.rand(4, 1, 8, 16)
    with pytest.raises(InputError, match=r"must be square.*\(1, 8, 16\)"):
        RotPred(net).fit(wide)
    with pytest.raises(InputError, match=r"must be square.*\(1, 8, 16\)"):
        RotPred.loss().loss(step_of(kedge.Classifier(net), wide, torch.zeros(4).long()))
    assert isinstance(net.fc, RotationHead)
