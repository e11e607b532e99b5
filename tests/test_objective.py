"""Losses: what a step minimises can be exchanged; everything else of the training stays."""

import dataclasses
import sys

import pytest
import torch
import torch.nn.functional as F

import kedge
from kedge.anchoring.corruption import Corruption
from kedge.errors import InputError
from kedge.models import build
from kedge.models.ensemble import Ensemble
from kedge.seeds import seeded
from kedge.studies.insight_trainings import (
    Agreement,
    AliveAnchors,
    AsNoise,
    Differences,
    SameClass,
    as_published,
    twice,
)
from kedge.training import Recipe, train
from kedge.training.losses import CrossEntropy, LogitNorm, Loss, Step

RECIPE = Recipe(epochs=2, batch=8, lr=0.05, crop=1)


def data(n=24, name="images") -> kedge.ImageSet:
    pixels = torch.randint(0, 256, (n, 1, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(len(name)))
    return kedge.ImageSet(pixels, torch.arange(n) % 3, name=name)


def network(anchored=False):
    with seeded(0):
        net = build("compact", width=4, classes=3, channels=1)
    return kedge.anchor(net) if anchored else net


class Spy(CrossEntropy):
    """Cross-entropy that notes down what it sees."""

    name = "spy"

    def __init__(self):
        self.steps, self.epochs, self.after = [], [], 0

    def begin_epoch(self, net, data, outliers, preprocess, epoch):
        assert not self.steps or len(self.steps) % 3 == 0
        self.epochs.append((epoch, len(data), outliers, preprocess.shape))

    def loss(self, step):
        self.steps.append(step)
        assert step.net.training
        return super().loss(step)

    def after_step(self, step):
        assert step is self.steps[-1]
        self.after += 1


@pytest.mark.parametrize("anchored", [False, True])
def test_an_objective_that_is_the_cross_entropy_changes_nothing(anchored):
    plain = train(network(anchored), data(), RECIPE).state_dict()
    spied = train(network(anchored), data(), RECIPE, loss=Spy()).state_dict()
    assert all(torch.equal(plain[name], spied[name]) for name in plain)


def test_an_objective_sees_every_step_and_every_epoch():
    spy, whole = Spy(), data()
    net = train(network(), whole, RECIPE, loss=spy)
    assert spy.epochs == [(0, 24, None, (1, 8, 8)), (1, 24, None, (1, 8, 8))]
    assert spy.after == len(spy.steps) == 6
    assert [step.epoch for step in spy.steps] == [0, 0, 0, 1, 1, 1]
    assert [step.done for step in spy.steps] == [0, 1 / 6, 2 / 6, 3 / 6, 4 / 6, 5 / 6]
    for step in spy.steps:
        assert torch.equal(step.y, whole.labels[step.index])
        assert step.images == 24
        assert step.outliers is None
        assert step.net is net
    for epoch in (0, 1):
        seen = torch.cat([step.index for step in spy.steps if step.epoch == epoch])
        assert sorted(seen.tolist()) == list(range(24))


def test_the_record_names_the_objective():
    assert train(network(), data(), RECIPE).record["loss"] == {"name": "cross-entropy"}
    assert train(network(), data(), RECIPE, loss=Spy()).record["loss"]["name"] == "spy"


class OnOutliers(Loss):
    """Reads outliers and minimises something of them."""

    name = "on outliers"
    outliers_per_image = 2
    unanchored_only = True

    def loss(self, step):
        logits = step.logits()
        return StepLoss(F.cross_entropy(logits, step.y) + step.forward(step.outliers).square().mean(), logits)


def test_outliers_come_with_their_numbers():
    seen = []

    class Noting(OnOutliers):
        def loss(self, step):
            seen.append((step.outliers, step.outlier_index))
            return super().loss(step)

    other = data(10, "outliers")
    train(network(), data(), Recipe(epochs=1, batch=8, crop=0, flip=False), loss=Noting(), outliers=other)
    for images, index in seen:
        assert len(images) == 16
        assert torch.equal(images, other.images[index].float() / 255)


def test_objective_network_and_outliers_must_fit_each_other():
    with pytest.raises(InputError, match="'on outliers' needs outliers; pass outliers="):
        train(network(), data(), RECIPE, loss=OnOutliers())
    with pytest.raises(InputError, match="'cross-entropy' uses no outliers; leave outliers= out"):
        train(network(), data(), RECIPE, outliers=data(10, "outliers"))
    with pytest.raises(InputError, match="'on outliers' trains plain networks"):
        train(network(anchored=True), data(), RECIPE, loss=OnOutliers(), outliers=data(10, "outliers"))
    with pytest.raises(InputError, match="got an ensemble; train its members"):
        train(Ensemble([network()]), data(), RECIPE)
    bad = kedge.ImageSet(data().images, data().labels + 5)
    with pytest.raises(InputError, match=r"labels must lie in 0\.\.2"):
        train(network(), bad, RECIPE, loss=OnOutliers(), outliers=data(10, "outliers"))
    small = kedge.ImageSet(torch.zeros(4, 1, 6, 6, dtype=torch.uint8))
    with pytest.raises(InputError, match=r"outliers must have the shape of the training images, \(1, 8, 8\)"):
        train(network(), data(), RECIPE, loss=OnOutliers(), outliers=small)
    with pytest.raises(InputError, match="outliers must be an ImageSet or a data set, got int"):
        train(network(), data(), RECIPE, loss=OnOutliers(), outliers=3)


def test_a_data_loader_s_own_batch_counts_the_outliers():
    seen = []

    class Noting(OnOutliers):
        def loss(self, step):
            seen.append((len(step.x), len(step.outliers)))
            return super().loss(step)

    loader = torch.utils.data.DataLoader(data(), batch_size=6)
    train(network(), loader, Recipe(epochs=1, batch=8), loss=Noting(), outliers=data(10, "outliers"))
    assert seen == [(6, 12)] * 4


# Losses by hand.


def step_of(net, forward):
    y = torch.tensor([0, 2])
    return Step(net, forward, torch.rand(2, 1, 8, 8), y, None, None, None, {}, 0.0, 0, 2, 0.0)


def test_logit_norm_is_the_cross_entropy_of_logits_of_one_length():
    logits = torch.tensor([[3.0, 4.0, 0.0], [0.0, 0.0, -2.0]])  # of lengths 5 and 2
    found = LogitNorm(temperature=0.5).loss(step_of(network(), lambda x: logits))
    unit = torch.tensor([[1.2, 1.6, 0.0], [0.0, 0.0, -2.0]])
    expected = (torch.log(unit[0].exp().sum()) - 1.2 + torch.log(unit[1].exp().sum()) + 2.0) / 2
    torch.testing.assert_close(found.value, expected)
    assert torch.equal(found.logits, logits)
    with pytest.raises(InputError, match="temperature must lie in"):
        LogitNorm(temperature=0)


def test_agreement_is_two_cross_entropies_and_the_squared_difference_of_log_probabilities():
    logits = torch.tensor([[0.0, 0.0, 0.0], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0], [torch.log(torch.tensor(2.0)), 0.0, 0.0]])
    found = Agreement().loss(step_of(network(), lambda x: logits))
    third, half, quarter = (torch.tensor(1 / n).log() for n in (3, 2, 4))
    fits = -(third + third) / 2, -(third + quarter) / 2
    apart = ((half - third) ** 2 + 2 * (quarter - third) ** 2) / 6
    torch.testing.assert_close(found.value, sum(fits) / 2 + 0.1 * apart)
    assert torch.equal(found.logits, logits[:2])


@pytest.mark.parametrize(("apart", "penalty"), [(0.0, 10 * 0.25), (0.2, 10 * 0.09), (0.5, 0.0), (2.0, 0.0)])
def test_anchors_are_kept_alive_by_halves_that_differ(apart, penalty):
    net = network(anchored=True)
    with torch.no_grad():
        net.stem.weight[:, 1:] = 1.0
        net.stem.weight[:, :1] = 1.0 + apart
    logits = torch.zeros(2, 3)
    found = AliveAnchors().loss(step_of(net, lambda x: logits))
    torch.testing.assert_close(found.value, torch.log(torch.tensor(3.0)) + penalty)


def seen_by(loss, net, x, y, done=0.0):
    """The loss of a step, and the images that the network was given."""
    given = []
    step = step_of(net.train(), lambda images: given.append(images) or net(images))
    with seeded(0):
        found = loss.loss(dataclasses.replace(step, x=x, y=y, done=done))
    (images,) = given
    return found, images


def linear() -> kedge.Classifier:
    return kedge.Classifier(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(72, 3)), mean=[0.3, 0.6], std=0.5)


def test_differences_are_the_masked_pairs_of_a_network_without_anchors():
    x, y, net = torch.rand(40, 2, 6, 6), torch.arange(40) % 3, linear()
    found, given = seen_by(Differences(), net, x, y)
    changed = (given != x).flatten(1).any(dim=1)
    assert 4 <= int(changed.sum()) <= 16  # a quarter
    mean = torch.tensor([0.3, 0.6]).view(2, 1, 1)
    for made, image in zip(given[changed], x[changed], strict=True):
        assert any(torch.allclose(made, image - other + mean) for other in x)
    rows = -net(given).log_softmax(dim=1)
    expected = torch.where(changed, rows.mean(dim=1), rows[torch.arange(40), y]).mean()
    torch.testing.assert_close(found.value, expected)


def test_t_as_noise_adds_what_t_changes_of_another_image_until_the_training_settles(monkeypatch):
    monkeypatch.setattr(sys.modules[AsNoise.__module__], "Corruption", lambda: torch.square)
    x, y, net = torch.rand(60, 2, 6, 6), torch.arange(60) % 3, linear()
    found, given = seen_by(AsNoise(clean_final_fraction=0.4), net, x, y, done=0.59)
    changed = (given != x).flatten(1).any(dim=1)
    assert 4 <= int(changed.sum()) <= 22  # a fifth
    for made, image in zip(given[changed], x[changed], strict=True):
        assert any(torch.allclose(made, image + other**2 - other) for other in x)
    torch.testing.assert_close(found.value, -net(given).log_softmax(dim=1)[torch.arange(60), y].mean())
    assert torch.equal(seen_by(AsNoise(clean_final_fraction=0.4), net, x, y, done=0.61)[1], x)


def test_a_network_with_equal_halves_sees_of_a_pair_the_image_and_what_t_changed_of_the_anchor():
    plain = network()
    net = kedge.anchor(plain, corruption=torch.square, every=1, mean=0.3, std=0.5).train()
    x = torch.rand(12, 1, 8, 8)
    found = net(x)
    c = x[net.draw.permutation]
    alone = kedge.Classifier(plain, mean=0.3, std=0.5).train()
    torch.testing.assert_close(found, alone(x + c**2 - c), rtol=1e-4, atol=1e-5)


def test_under_an_anchor_of_another_class_a_network_is_to_say_nothing():
    y = torch.arange(60) % 3
    net = kedge.anchor(network(), init="fresh").train()
    pairs = []
    net.stem.register_forward_pre_hook(lambda stem, given: pairs.append((given[0], stem.job.permutation)))
    step = step_of(net, net)
    with seeded(0):
        x = torch.rand(60, 1, 8, 8)
        found = SameClass().loss(dataclasses.replace(step, x=x, y=y))
    ((_, anchors),) = pairs
    assert not bool((anchors == torch.arange(60)).any())  # no image is its own anchor
    same = y[anchors] == y
    assert 18 <= int(same.sum()) <= 42  # half
    rows = -found.logits.log_softmax(dim=1)
    torch.testing.assert_close(found.value, torch.where(same, rows[torch.arange(60), y], rows.mean(dim=1)).mean())


def test_t_twice_is_stronger_than_once():
    x = torch.rand(64, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    smooth = F.avg_pool2d(x, 8, stride=1)  # images with edges, which blur and crops change
    with seeded(0):
        once, again = (t(smooth) for t in (Corruption(), twice))
    assert float((again - smooth).square().mean()) > 1.1 * float((once - smooth).square().mean())


def test_t_as_published_draws_once_for_a_batch_and_loses_what_is_darker_than_the_mean():
    image = torch.rand(1, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    mean = torch.tensor([125.3, 123.0, 113.9]).view(3, 1, 1) / 255
    clamped = 0
    for seed in range(40):
        with seeded(seed):
            found = as_published(image.repeat(3, 1, 1, 1))
        torch.testing.assert_close(found, found[:1].expand_as(found))
        clamped += bool((found >= mean - 1e-5).all())
    assert 24 <= clamped <= 39  # 32 in the mean
