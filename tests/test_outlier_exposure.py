"""Outlier Exposure: its loss, its training, and the loader of the outliers."""

import copy
import itertools
import math

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import kedge
from helpers import images, labelled, same_weights
from kedge.data.leakage import fingerprints
from kedge.detectors.trained.outlier_exposure import OutlierExposure
from kedge.errors import InputError
from kedge.pixels import to_unit
from kedge.seeds import seeded
from kedge.training import Recipe
from kedge.training.loader import OutlierLoader, epoch_order
from method_helpers import small, softmax, step_of

RECIPE = Recipe(epochs=2, batch=16, lr=0.05, crop=0, flip=False)
DATA = labelled(48, classes=2, channels=1)


def gray(n=48, seed=0, side=8) -> torch.Tensor:
    return images(n, channels=1, side=side, seed=seed)


def unlabelled(n=40, seed=100) -> kedge.ImageSet:
    return kedge.ImageSet(gray(n, seed), name="unlabelled")


def trained(outliers=None, net=None, data=DATA, recipe=RECIPE, weight=0.5, **options) -> kedge.Classifier:
    """A network trained by outlier exposure."""
    outliers = unlabelled() if outliers is None else outliers
    loss = OutlierExposure.loss(weight=weight)
    return kedge.train(net or small(), data, recipe, loss=loss, outliers=outliers, **options)


def linear(classes=3) -> kedge.Classifier:
    """Has no batch norm, so that a loss is the same however its images are passed."""
    with seeded(0):
        return kedge.Classifier(nn.Sequential(nn.Flatten(), nn.Linear(64, classes)).double(), mean=0.5, std=0.25)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_loss_by_hand(smoothing):
    net, x, outliers = linear(), to_unit(gray(5), torch.float64), to_unit(gray(7, 1), torch.float64)
    y = torch.tensor([0, 2, 1, 1, 0])
    result = OutlierExposure.loss(weight=0.3).loss(step_of(net, x, y, outliers=outliers, label_smoothing=smoothing))
    log_p = [[[math.log(p) for p in softmax(row)] for row in net(part).tolist()] for part in (x, outliers)]
    known = 0.0
    for row, label in zip(log_p[0], y.tolist(), strict=True):
        known -= sum((smoothing / 3 + (1 - smoothing) * (c == label)) * p for c, p in enumerate(row)) / 5
    uniform = sum(-sum(row) / 3 for row in log_p[1]) / 7
    assert result.value.item() == pytest.approx(known + 0.3 * uniform, rel=1e-12)
    assert result.logits.allclose(net(x))


def test_without_weight_it_is_ordinary_training():
    exposed = trained(weight=0)
    assert exposed.outliers is not None
    exposed.outliers = None
    assert same_weights(kedge.train(small(), DATA, RECIPE), exposed)


def test_a_run_with_another_weight_or_other_outliers_is_not_resumed(tmp_path):
    trained(directory=tmp_path)
    for options, message in (
        ({"weight": 0.4}, r"loss\.weight was 0\.5 and is 0\.4"),
        ({"outliers": unlabelled(seed=7)}, r"outliers\.sha256 was"),
    ):
        with pytest.raises(InputError, match=message):
            trained(directory=tmp_path, **options)


def test_the_same_as_a_loop_by_hand():
    """Each step takes all images and all outliers, so that their order does not matter."""
    data, outliers = labelled(12, classes=3, channels=1), unlabelled(36)
    recipe = Recipe(epochs=5, batch=12, lr=0.3, momentum=0.8, weight_decay=0.01, crop=0, flip=False)
    loss, net = OutlierExposure.loss(weight=0.7, outliers_per_image=3), linear()
    weight = net.network[1].weight.detach().clone().requires_grad_()
    bias = net.network[1].bias.detach().clone().requires_grad_()
    net = kedge.train(net, data, recipe, loss=loss, outliers=outliers)

    x, o = (to_unit(s.images.flatten(1)).double().sub(0.5).div(0.25) for s in (data, outliers))
    speed = [torch.zeros_like(weight), torch.zeros_like(bias)]
    for _ in range(5):
        p, q = ((z @ weight.T + bias).softmax(dim=1).log() for z in (x, o))
        value = -p[torch.arange(12), data.labels].mean() + 0.7 * -(q / 3).sum(dim=1).mean()
        for w, gradient, v in zip((weight, bias), torch.autograd.grad(value, (weight, bias)), speed, strict=True):
            v.mul_(0.8).add_(gradient + 0.01 * w.detach())
            w.data.sub_(0.3 * v)
    assert net.network[1].weight.allclose(weight, rtol=1e-9, atol=1e-12)
    assert net.network[1].bias.allclose(bias, rtol=1e-9, atol=1e-12)


def test_outliers_share_the_batch_statistics():
    means = [trained(unlabelled(seed=seed)).network.prep[1].running_mean for seed in (100, 101)]
    assert not means[0].equal(means[1])


def test_it_learns_to_be_unsure_about_outliers():
    """Left or right is bright; the outliers are bright above or below."""
    data = labelled(96, classes=2, channels=1)
    data.images[data.labels == 0, :, :, :4] //= 4
    data.images[data.labels == 1, :, :, 4:] //= 4
    turned = kedge.ImageSet(data.images.transpose(2, 3).contiguous(), name="turned")
    fresh = kedge.ImageSet(turned.images.flip(3), name="fresh")
    recipe = Recipe(epochs=8, batch=16, lr=0.05, crop=0, flip=False)
    exposed = OutlierExposure(trained(turned, data=data, recipe=recipe)).fit(data)
    without = OutlierExposure(kedge.train(small(), data, recipe)).fit(data)
    assert float(exposed.score(fresh).mean()) > -0.65  # -0.5 is equal probabilities
    assert float(exposed.score(data).mean()) < -0.9
    assert float(exposed.score(fresh).mean()) > float(without.score(fresh).mean()) + 0.1


def test_evaluation_refuses_the_outliers_that_it_learned_from(tmp_path):
    outliers, fresh = unlabelled(), kedge.ImageSet(gray(9, 4), name="fresh")
    net = trained(outliers)
    assert net.outliers.equal(fingerprints(outliers.images).unique(dim=0))
    detector = OutlierExposure(net).fit(DATA).calibrate(labelled(40, classes=2, channels=1, seed=2))
    detector.save(tmp_path / "saved.kedge")
    mixed = kedge.ImageSet(torch.cat([gray(9, 3), outliers.images[7:8]]), name="mixed")
    for each in (detector, kedge.load(tmp_path / "saved.kedge"), kedge.MSP(net).fit(DATA).calibrate(gray(40, 2))):
        for inside, outside in ((fresh, mixed), (mixed, fresh)):
            with pytest.raises(InputError, match="1 of the images in 'mixed' are among the training outliers"):
                kedge.evaluate({"x": each}, inside, [outside])


def loader(data, count=4, seed=0, recipe=RECIPE, **options) -> OutlierLoader:
    return OutlierLoader(data, recipe, seed, count, kedge.Preprocess((1, 8, 8)), **options)


def first(source, n, step=0) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return list(itertools.islice(source.batches(step), n))


def check_same(batches, others):
    for (x, index), (y, numbers) in zip(batches, others, strict=True):
        assert index.equal(numbers)
        assert x.equal(y)


@pytest.mark.parametrize("count", [4, 5, 10, 23])
def test_every_image_comes_once_a_round_in_a_new_order(count):
    data = unlabelled(10)
    result = first(loader(data, count), 30)
    numbers = torch.cat([index for _, index in result])
    rounds = numbers[: len(numbers) // 10 * 10].view(-1, 10)
    assert all(sorted(order) == list(range(10)) for order in rounds.tolist())
    assert len({tuple(order) for order in rounds.tolist()}) == len(rounds)
    for x, index in result:  # also where a round ends in mid-batch, and where a batch is longer than a round
        assert x.shape == (count, 1, 8, 8)
        assert x.equal(to_unit(data.images[index]))


def test_the_seed_decides_the_order_and_each_round_has_crops_of_its_own():
    def order(seed):
        return first(loader(unlabelled(40), 40, seed), 1)[0][1].tolist()

    assert order(0) == order(0) != order(1)
    assert order(0) != epoch_order(40, 0, 0).tolist()  # not that of the training images
    (x, index), *_ = first(loader(unlabelled(10), 40, recipe=Recipe(epochs=1, crop=2)), 1)
    for number in range(10):
        crops = x[index == number]
        assert len(crops) == 4
        assert not all(crop.equal(crops[0]) for crop in crops)


@pytest.mark.parametrize("data", [unlabelled(10), list(gray(10, 100))], ids=["set", "data set"])
def test_a_restart_goes_on_with_the_same_images_and_processes_share_the_batch(data):
    recipe = Recipe(epochs=1, crop=2)
    whole = first(loader(data, 12, recipe=recipe), 12)
    for step in range(9):
        check_same(whole[step:], first(loader(data, 12, recipe=recipe), 12 - step, step))
    for world in (2, 3):
        parts = [first(loader(data, 12, recipe=recipe, rank=rank, world=world), 6) for rank in range(world)]
        assert all(len(index) == 12 // world for part in parts for _, index in part)
        for step, (x, index) in enumerate(whole[:6]):
            assert torch.cat([part[step][0] for part in parts]).equal(x)
            assert torch.cat([part[step][1] for part in parts]).equal(index)


@pytest.mark.parametrize("workers", [0, 2])
def test_pictures_are_the_same_as_a_set_of_their_pixels(workers):
    data, recipe = unlabelled(10), Recipe(epochs=1, crop=2)
    pictures = [(Image.fromarray(image[0].numpy()), "no number") for image in data.images]  # labels are not read
    expected = first(loader(data, 23, recipe=recipe), 5)  # of 10, so that images come twice and thrice in a batch
    check_same(expected, first(loader(pictures, 23, recipe=recipe, workers=workers), 5))


def test_wrong_outliers_are_named():
    for data, message in (
        (DataLoader(TensorDataset(torch.rand(4, 1, 8, 8))), "got DataLoader"),
        (iter([1]), "got list_iterator"),
        ([], "empty"),
        (kedge.ImageSet(gray(3, side=9)), r"\(1, 8, 8\); got \(1, 9, 9\)"),
    ):
        for use in (loader, trained):
            with pytest.raises(InputError, match=f"outliers.*{message}"):
                use(data)


def test_the_network_records_outliers_at_the_size_of_its_inputs():
    rng, rule = np.random.default_rng(0), kedge.Preprocess((1, 8, 8))
    pictures = [Image.fromarray(rng.integers(0, 256, (16, 16), dtype=np.uint8)) for _ in range(6)]
    net = trained(pictures)
    assert net.outliers.equal(fingerprints(torch.stack([rule(picture) for picture in pictures])).unique(dim=0))
    assert copy.deepcopy(net).outliers.equal(net.outliers)
    assert net.record["outliers"] == {"name": "list", "images": 6, "sha256": None}
