"""Outlier Exposure: its loss, its training, and the feed of the images beside the training set."""

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
from kedge import scores
from kedge.data.leakage import fingerprints
from kedge.detectors.outlier_exposure import OutlierExposure
from kedge.errors import InputError
from kedge.models import build
from kedge.seeds import seeded
from kedge.training import Recipe
from kedge.training.losses import Step
from kedge.training.outlier_loader import OutlierLoader

RECIPE = Recipe(epochs=2, batch=16, lr=0.05, crop=0, flip=False)


def images(n=48, seed=0, side=8, channels=1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (n, channels, side, side), dtype=torch.uint8, generator=generator)


def labelled(n=48, seed=0, name="toy", classes=2) -> kedge.ImageSet:
    return kedge.ImageSet(images(n, seed), torch.arange(n) % classes, name)


def beside(n=40, seed=100, name="beside") -> kedge.ImageSet:
    return kedge.ImageSet(images(n, seed), name=name)


def network(classes=2, seed=0) -> nn.Module:
    with seeded(seed):
        return build("compact", width=4, classes=classes, channels=1)


def linear(classes=3, seed=0) -> kedge.Classifier:
    """Has no batch norm, so that a loss is the same however its images are passed."""
    with seeded(seed):
        return kedge.Classifier(nn.Sequential(nn.Flatten(), nn.Linear(64, classes)).double(), mean=0.5, std=0.25)


def step_of(net, x, y, outliers, label_smoothing=0.0) -> Step:
    return Step(net, net, x, y, None, outliers, None, {}, 0.0, 0, len(x), label_smoothing)


def same(a: nn.Module, b: nn.Module) -> bool:
    pairs = zip(a.state_dict().values(), b.state_dict().values(), strict=True)
    return all(torch.equal(x, y) for x, y in pairs)


# The loss.


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_loss_by_hand(smoothing):
    net, x, outliers = linear(), images(5).double() / 255, images(7, 1).double() / 255
    y = torch.tensor([0, 2, 1, 1, 0])
    made = OutlierExposure.loss(weight=0.3).loss(step_of(net, x, y, outliers, smoothing))

    def log_softmax(image):
        logits = net(image[None])[0].tolist()
        total = math.log(sum(math.exp(z) for z in logits))
        return [z - total for z in logits]

    known = 0.0
    for image, label in zip(x, y.tolist(), strict=True):
        targets = [smoothing / 3 + (1 - smoothing) * (c == label) for c in range(3)]
        known -= sum(t * p for t, p in zip(targets, log_softmax(image), strict=True)) / 5
    uniform = sum(-sum(log_softmax(image)) / 3 for image in outliers) / 7
    assert made.value.item() == pytest.approx(known + 0.3 * uniform, rel=1e-12)
    assert made.logits.allclose(net(x))


def test_outliers_with_equal_logits_cost_the_least():
    """The cross-entropy to the uniform distribution is log C there, and its gradient is zero."""
    net = linear(classes=4)
    nn.init.zeros_(net.network[1].weight)
    nn.init.zeros_(net.network[1].bias)
    x, outliers = images(2).double() / 255, images(3, 1).double() / 255
    loss = OutlierExposure.loss(weight=10.0)
    made = loss.loss(step_of(net, x, torch.tensor([0, 1]), outliers))
    assert made.value.item() == pytest.approx(11 * math.log(4))
    without = OutlierExposure.loss(weight=0).loss(step_of(net, x, torch.tensor([0, 1]), outliers))
    weight = net.network[1].weight
    gradients = [torch.autograd.grad(loss.value, weight)[0] for loss in (made, without)]
    assert gradients[0].allclose(gradients[1])


@pytest.mark.parametrize("weight", [0, 0.5])
def test_labels_beyond_the_classes_are_named(weight):
    net, x = linear(), images(2).double() / 255
    with pytest.raises(InputError, match=r"labels must lie in 0\.\.2.*got 1\.\.3"):
        OutlierExposure.loss(weight=weight).loss(step_of(net, x, torch.tensor([1, 3]), x))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weight": -0.1}, r"weight must lie in \[0, inf\]; got -0\.1"),
        ({"weight": math.nan}, "weight must lie in"),
        ({"outliers_per_image": 0}, "outliers_per_image must be a whole number of at least 1; got 0"),
        ({"outliers_per_image": 1.5}, "outliers_per_image must be a whole number"),
    ],
)
def test_what_an_objective_cannot_be(options, message):
    with pytest.raises(InputError, match=message):
        OutlierExposure.loss(**options)


def test_the_objective_describes_itself():
    assert OutlierExposure.loss().config() == {"weight": 0.5, "outliers_per_image": 2}
    assert OutlierExposure.loss(weight=1.0, outliers_per_image=3).outliers_per_image == 3


# The training.


def test_without_weight_it_is_plain_training():
    plain = kedge.train(network(), labelled(), RECIPE)
    exposed = kedge.train(network(), labelled(), RECIPE, loss=OutlierExposure.loss(weight=0), outliers=beside())
    assert exposed.outliers is not None
    exposed.outliers = None
    assert same(plain, exposed)


def test_the_same_as_a_loop_by_hand():
    """Each step takes all images and all outliers, so that their order does not matter."""
    data, outliers = labelled(12, classes=3), beside(36)
    recipe = Recipe(epochs=5, batch=12, lr=0.3, momentum=0.8, weight_decay=0.01, crop=0, flip=False)
    loss = OutlierExposure.loss(weight=0.7, outliers_per_image=3)
    net = linear()
    weight = net.network[1].weight.detach().clone().requires_grad_()
    bias = net.network[1].bias.detach().clone().requires_grad_()
    trained = kedge.train(net, data, recipe, loss=loss, outliers=outliers)

    x, o = ((s.images.flatten(1).float() / 255).double().sub(0.5).div(0.25) for s in (data, outliers))
    speed = [torch.zeros_like(weight), torch.zeros_like(bias)]
    for _ in range(5):
        p, q = ((z @ weight.T + bias).softmax(dim=1).log() for z in (x, o))
        loss = -p[torch.arange(12), data.labels].mean() + 0.7 * -(q / 3).sum(dim=1).mean()
        for value, gradient, v in zip((weight, bias), torch.autograd.grad(loss, (weight, bias)), speed, strict=True):
            v.mul_(0.8).add_(gradient + 0.01 * value.detach())
            value.data.sub_(0.3 * v)
    assert trained.network[1].weight.allclose(weight, rtol=1e-9, atol=1e-12)
    assert trained.network[1].bias.allclose(bias, rtol=1e-9, atol=1e-12)


def test_outliers_share_the_batch_statistics():
    loss = OutlierExposure.loss()
    nets = [
        kedge.train(network(), labelled(), RECIPE, loss=loss, outliers=outliers)
        for outliers in (beside(), beside(seed=101))
    ]
    assert not nets[0].network.prep[1].running_mean.equal(nets[1].network.prep[1].running_mean)


def test_it_learns_to_be_unsure_about_outliers():
    """Left or right is bright; the outliers are bright above or below."""
    data = labelled(96)
    data.images[data.labels == 0, :, :, :4] //= 4
    data.images[data.labels == 1, :, :, 4:] //= 4
    turned = kedge.ImageSet(data.images.transpose(2, 3).contiguous(), name="turned")
    fresh = kedge.ImageSet(turned.images.flip(3), name="fresh")
    recipe = Recipe(epochs=8, batch=16, lr=0.05, crop=0, flip=False)
    net = kedge.train(network(), data, recipe, loss=OutlierExposure.loss(), outliers=turned)
    plain = kedge.train(network(), data, recipe)
    exposed, before = (OutlierExposure(each).fit(data) for each in (net, plain))
    assert float(exposed.score(fresh).mean()) > -0.65  # half would be none the wiser
    assert float(exposed.score(data).mean()) < -0.9
    assert float(exposed.score(fresh).mean()) > float(before.score(fresh).mean()) + 0.1


def test_objective_outliers_and_network_must_fit_each_other():
    loss = OutlierExposure.loss()
    with pytest.raises(InputError, match=r"'outlier exposure' needs outliers; pass outliers= with images beside"):
        kedge.train(network(), labelled(), RECIPE, loss=loss)
    with pytest.raises(InputError, match=r"'cross-entropy' uses no outliers; leave outliers= out"):
        kedge.train(network(), labelled(), RECIPE, outliers=beside())
    with pytest.raises(InputError, match=r"'outlier exposure' trains plain networks; pass the network before"):
        kedge.train(kedge.anchor(network()), labelled(), RECIPE, loss=loss, outliers=beside())


def test_a_run_stopped_in_mid_epoch_goes_on_as_if_it_never_had(tmp_path):
    recipe = Recipe(epochs=3, batch=16, lr=0.05, crop=2)  # 96 of 40 outliers an epoch: rounds end anywhere

    def run(directory, progress=None):
        options = {"directory": tmp_path / directory, "checkpoint_seconds": 0.0, "progress": progress}
        loss = OutlierExposure.loss()
        return kedge.train(network(), labelled(), recipe, loss=loss, outliers=beside(), **options)

    straight = run("straight")
    for at in (2, 3, 7):

        class StopError(Exception):
            pass

        def stop(progress, at=at, kind=StopError):
            if progress.step == at:
                raise kind

        with pytest.raises(StopError):
            run(f"stopped {at}", stop)
        assert same(run(f"stopped {at}"), straight)
    with pytest.raises(InputError, match=r"loss\.weight was 0\.5 and is 0\.4"):
        kedge.train(
            network(), labelled(), recipe, loss=OutlierExposure.loss(weight=0.4), outliers=beside(),
            directory=tmp_path / "straight",
        )  # fmt: skip
    with pytest.raises(InputError, match=r"outliers\.sha256 was"):
        kedge.train(
            network(), labelled(), recipe, loss=OutlierExposure.loss(), outliers=beside(seed=7),
            directory=tmp_path / "straight",
        )  # fmt: skip


# The detector.


@pytest.mark.parametrize("score", list(scores.SCORES))
def test_the_score_is_that_of_the_logits(score, tmp_path):
    net = kedge.train(network(), labelled(), RECIPE, loss=OutlierExposure.loss(), outliers=beside())
    detector = OutlierExposure(net, score=score).fit(labelled())
    x = images(30, 5)
    with torch.no_grad():
        logits = net(x)
    assert detector.score(x).allclose(scores.SCORES[score](logits), atol=1e-6)
    assert detector.score(x, batch_size=7).allclose(detector.score(x), rtol=1e-4, atol=1e-6)
    assert detector.cost == kedge.detectors.Cost(forward=1)
    detector.save(tmp_path / "saved.kedge")
    again = kedge.load(tmp_path / "saved.kedge")
    assert again.config() == {"score": score}
    # A trained network has another memory layout than one from a file, which rounds differently in the last bit.
    assert again.score(x).allclose(detector.score(x), rtol=1e-5)


def test_it_scores_an_anchored_network_by_the_mean_over_anchors():
    net = kedge.anchor(network().eval(), init="fresh", mean=0.5, std=0.25)
    detector = OutlierExposure(net).fit(labelled())
    x = images(5, 5)
    logits = torch.stack([net.per_anchor_logits(x.float() / 255)[k] for k in range(5)]).mean(dim=0)
    assert detector.score(x).allclose(-logits.softmax(dim=1).amax(dim=1), atol=1e-6)


def test_a_score_that_is_not_known():
    with pytest.raises(InputError, match=r"score must be one of 'amp', 'msp'.*got 'best'"):
        OutlierExposure(network(), score="best")


def test_evaluation_refuses_the_outliers_that_it_learned_from(tmp_path):
    outliers = beside()
    net = kedge.train(network(), labelled(), RECIPE, loss=OutlierExposure.loss(), outliers=outliers)
    assert net.outliers.equal(fingerprints(outliers.images).unique(dim=0))
    detector = OutlierExposure(net).fit(labelled()).calibrate(labelled(40, 2))
    detector.save(tmp_path / "saved.kedge")
    mixed = torch.cat([images(9, 3), outliers.images[7:8]])
    for each in (
        detector,
        kedge.load(tmp_path / "saved.kedge"),
        kedge.MSP(net).fit(labelled()).calibrate(images(40, 2)),
    ):
        for inside, outside in [(images(9, 4), mixed), (mixed, images(9, 4))]:
            sets = kedge.ImageSet(inside, name="in"), [kedge.ImageSet(outside, name="out")]
            with pytest.raises(
                InputError, match=r"1 of the images in '(in|out)' are among the training outliers of 'x'"
            ):
                kedge.evaluate({"x": each}, *sets)
        good = kedge.evaluate({"x": each}, kedge.ImageSet(images(9, 4), name="in"), [kedge.ImageSet(images(9, 3))])
        assert good.results["x"].uses_outliers is True
    plain = kedge.MSP(kedge.train(network(), labelled(), RECIPE)).fit(labelled()).calibrate(images(40, 2))
    assert plain.outliers is None
    found = kedge.evaluate({"x": plain}, kedge.ImageSet(images(9, 4), name="in"), [kedge.ImageSet(mixed)])
    assert found.results["x"].uses_outliers is False


# The feed of outliers.


def feed(data, count=4, seed=0, recipe=RECIPE, **options) -> OutlierLoader:
    return OutlierLoader(data, recipe, seed, count, kedge.Preprocess((1, 8, 8)), **options)


def first(source, n, step=0) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return list(itertools.islice(source.batches(step), n))


@pytest.mark.parametrize("count", [4, 5, 10, 23])
def test_every_image_comes_once_a_round_in_a_new_order(count):
    data = beside(10)
    found = first(feed(data, count), 30)
    numbers = torch.cat([index for _, index in found])
    rounds = numbers[: len(numbers) // 10 * 10].view(-1, 10)
    assert all(sorted(order) == list(range(10)) for order in rounds.tolist())
    assert len({tuple(order) for order in rounds.tolist()}) == len(rounds)
    for x, index in found:  # also where a round ends in mid-batch, and where a batch is longer than a round
        assert x.shape == (count, 1, 8, 8)
        assert x.equal(data.images[index].float() / 255)


def test_the_seed_decides_the_order_and_it_is_not_that_of_the_training_images():
    from kedge.training.loader import epoch_order

    def order(seed):
        return first(feed(beside(40), 40, seed), 1)[0][1].tolist()

    assert order(0) == order(0) != order(1)
    assert order(0) != epoch_order(40, 0, 0).tolist()


@pytest.mark.parametrize("kind", ["set", "data set"])
def test_a_restart_from_any_step_goes_on_with_the_same_images(kind):
    data = beside(10) if kind == "set" else list(images(10, 100))
    recipe = Recipe(epochs=1, crop=2)
    whole = first(feed(data, 4, recipe=recipe), 12)
    for step in range(9):
        for (x, index), (y, numbers) in zip(
            whole[step:], first(feed(data, 4, recipe=recipe), 12 - step, step), strict=True
        ):
            assert index.equal(numbers)
            assert x.equal(y)


@pytest.mark.parametrize("workers", [0, 2])
def test_pictures_are_the_same_as_a_set_of_their_pixels(workers):
    data = beside(10)
    pictures = [Image.fromarray(image[0].numpy()) for image in data.images]
    recipe = Recipe(epochs=1, crop=2)  # crops and flips: 23 of 10, so that images come twice and thrice in a batch
    pairs = zip(
        first(feed(data, 23, recipe=recipe), 5),
        first(feed(pictures, 23, recipe=recipe, workers=workers), 5),
        strict=True,
    )
    for (x, index), (y, numbers) in pairs:
        assert index.equal(numbers)
        assert x.equal(y)


def test_each_round_has_crops_of_its_own():
    data = beside(10)
    (x, index), *_ = first(feed(data, 40, recipe=Recipe(epochs=1, crop=2)), 1)
    for number in range(10):
        views = x[index == number]
        assert len(views) == 4
        assert not all(view.equal(views[0]) for view in views)


def test_labels_are_not_read():
    data = beside(10)
    pairs = [(image, "no number") for image in data.images]
    for (x, _), (y, _) in zip(first(feed(data), 4), first(feed(pairs), 4), strict=True):
        assert x.equal(y)


@pytest.mark.parametrize("kind", ["set", "data set"])
@pytest.mark.parametrize("world", [2, 3])
def test_processes_share_the_batch(kind, world):
    data = beside(10) if kind == "set" else list(images(10, 100))
    recipe = Recipe(epochs=1, crop=2)
    whole = first(feed(data, 12, recipe=recipe), 6)
    parts = [first(feed(data, 12, recipe=recipe, rank=rank, world=world), 6) for rank in range(world)]
    for step, (x, index) in enumerate(whole):
        mine = [part[step] for part in parts]
        assert all(len(numbers) == 12 // world for _, numbers in mine)
        assert torch.cat([numbers for _, numbers in mine]).equal(index)
        assert torch.cat([y for y, _ in mine]).equal(x)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (
            DataLoader(TensorDataset(torch.rand(4, 1, 8, 8))),
            "outliers must be an ImageSet or a data set, got DataLoader",
        ),
        (iter([1]), "outliers must be an ImageSet or a data set, got list_iterator"),
        ([], "outliers must hold at least one image; the set is empty"),
        (kedge.ImageSet(images(3, side=9)), r"the shape of the training images, \(1, 8, 8\); got \(1, 9, 9\)"),
    ],
)
def test_what_outliers_cannot_be(data, message):
    with pytest.raises(InputError, match=message):
        feed(data)
    with pytest.raises(InputError, match=message):
        kedge.train(network(), labelled(), RECIPE, loss=OutlierExposure.loss(), outliers=data)


def test_the_network_notes_outliers_at_the_size_that_it_sees_them():
    rng = np.random.default_rng(0)
    pictures = [Image.fromarray(rng.integers(0, 256, (16, 16), dtype=np.uint8)) for _ in range(6)]
    net = kedge.train(network(), labelled(), RECIPE, loss=OutlierExposure.loss(), outliers=pictures)
    rule = kedge.Preprocess((1, 8, 8))
    seen = fingerprints(torch.stack([rule(picture) for picture in pictures]))
    assert net.outliers.equal(seen.unique(dim=0))
    assert copy.deepcopy(net).outliers.equal(net.outliers)
    assert net.record["outliers"] == {"name": "list", "images": 6, "sha256": None}
