"""Losses: the loss of a step can be exchanged, and everything else of the training stays."""

import sys
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

import kedge
from helpers import StopError, TwoHeads, labelled, same_weights, stop_at
from kedge.anchoring.corruption import Corruption
from kedge.anchoring.layer import _CALL
from kedge.errors import ArchitectureError, InputError
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
from kedge.training import CrossEntropy, LogitNorm, Loss, Recipe, Step, StepLoss, T2FNorm, train

RECIPE = Recipe(epochs=2, batch=8, lr=0.05, crop=1)


def data(n=24, name="images", **options) -> kedge.ImageSet:
    return labelled(n, classes=3, name=name, channels=1, seed=len(name), **options)


def network(anchored=False):
    with seeded(0):
        net = build("compact", width=4, classes=3, channels=1)
    return kedge.anchor(net) if anchored else net


class Spy(CrossEntropy):
    """Cross entropy that records its calls."""

    name = "spy"

    def __init__(self):
        self.steps, self.epochs, self.after = [], [], 0

    def begin_epoch(self, net, data, outliers, preprocess, epoch):
        assert len(self.steps) % 3 == 0
        self.epochs.append((epoch, len(data), outliers, preprocess.shape))

    def loss(self, step):
        self.steps.append(step)
        assert step.net.training
        return super().loss(step)

    def after_step(self, step):
        assert step is self.steps[-1]
        self.after += 1


@pytest.mark.parametrize("anchored", [False, True])
def test_a_loss_sees_every_step_and_every_epoch_and_changes_nothing_else(anchored):
    spy, whole = Spy(), data()
    net = train(network(anchored), whole, RECIPE, loss=spy)
    default = train(network(anchored), whole, RECIPE)
    assert same_weights(net, default)
    assert (net.record["loss"]["name"], default.record["loss"]) == ("spy", {"name": "cross-entropy"})
    assert spy.epochs == [(0, 24, None, (1, 8, 8)), (1, 24, None, (1, 8, 8))]
    assert spy.after == len(spy.steps) == 6
    assert [step.epoch for step in spy.steps] == [0, 0, 0, 1, 1, 1]
    assert [step.done for step in spy.steps] == [0, 1 / 6, 2 / 6, 3 / 6, 4 / 6, 5 / 6]
    for step in spy.steps:
        assert torch.equal(step.y, whole.labels[step.index])
        assert (step.images, step.outliers, step.net) == (24, None, net)
    for epoch in (0, 1):
        seen = torch.cat([step.index for step in spy.steps if step.epoch == epoch])
        assert sorted(seen.tolist()) == list(range(24))
    draws = [torch.rand(1, generator=step.generator).item() for step in spy.steps]
    assert len(set(draws)) == 6


class OnOutliers(Loss):
    """Minimizes the logits of outliers, and records them."""

    name = "on outliers"
    outliers_per_image = 2
    unanchored_only = True

    def __init__(self):
        self.seen = []

    def loss(self, step):
        self.seen.append((len(step.x), step.outliers, step.outlier_index))
        logits = step.logits()
        return StepLoss(F.cross_entropy(logits, step.y) + step.forward(step.outliers).square().mean(), logits)


@pytest.mark.parametrize("kind", ["set", "data set", "loader"])
def test_outliers_come_with_their_indices_for_each_image_of_the_batch(kind):
    loss, other, own = OnOutliers(), data(10, "outliers"), data()
    outliers = list(other.images) if kind == "data set" else other
    images = torch.utils.data.DataLoader(own, batch_size=6) if kind == "loader" else own
    train(network(), images, Recipe(epochs=1, batch=8, crop=0, flip=False), loss=loss, outliers=outliers)
    for count, x, index in loss.seen:
        assert (count, len(x)) == ((6, 12) if kind == "loader" else (8, 16))
        assert torch.equal(x, other.images[index].float() / 255)
    order = torch.cat([index for _, _, index in loss.seen]).view(-1)[:40].tolist()
    rounds = [order[start : start + 10] for start in range(0, 40, 10)]
    assert all(sorted(part) == list(range(10)) for part in rounds)


def test_loss_network_and_outliers_must_fit_together():
    outliers, needs = data(10, "outliers"), OnOutliers()
    for net, images, options, message in (
        (network(), data(), {"loss": needs}, "'on outliers' needs outliers; pass outliers="),
        (network(), data(), {"outliers": outliers}, "'cross-entropy' uses no outliers"),
        (network(anchored=True), data(), {"loss": needs, "outliers": outliers}, "trains unanchored networks"),
        (Ensemble([network()]), data(), {}, "got an ensemble; train its members"),
        (network(), kedge.ImageSet(data().images, data().labels + 5), {"loss": needs, "outliers": outliers}, "0..2"),
        (network(), data(), {"loss": needs, "outliers": data(4, side=6)}, "outliers must have the shape"),
        (network(), data(), {"loss": needs, "outliers": 3}, "got int"),
        (network(), data(), {"loss": needs, "outliers": []}, "outliers must hold at least one image"),
    ):
        with pytest.raises(InputError, match=message):
            train(net, images, RECIPE, **options)


# Losses by hand.


def step_of(net, forward):
    y = torch.tensor([0, 2])
    return Step(net, forward, torch.rand(2, 1, 8, 8), y, None, None, None, {}, 0.0, 0, 2, 0.0)


def test_logit_norm_is_the_cross_entropy_of_logits_of_one_length():
    logits = torch.tensor([[3.0, 4.0, 0.0], [0.0, 0.0, -2.0]])  # of lengths 5 and 2
    result = LogitNorm(temperature=0.5).loss(step_of(network(), lambda x: logits))
    unit = torch.tensor([[1.2, 1.6, 0.0], [0.0, 0.0, -2.0]])
    expected = (torch.log(unit[0].exp().sum()) - 1.2 + torch.log(unit[1].exp().sum()) + 2.0) / 2
    torch.testing.assert_close(result.value, expected)
    assert torch.equal(result.logits, logits)
    with pytest.raises(InputError, match="temperature must lie in"):
        LogitNorm(temperature=0)


def test_t2fnorm_is_the_cross_entropy_with_features_of_one_length():
    net = kedge.Classifier(torch.nn.Sequential(torch.nn.Identity(), torch.nn.Linear(4, 3))).double()
    x, y = torch.rand(5, 4, dtype=torch.float64) - 0.5, torch.tensor([0, 1, 2, 0, 1])
    weight, bias = (value.detach().clone() for value in net.network[1].parameters())
    loss = T2FNorm(temperature=0.2)
    result = loss.loss(replace(step_of(net, net), x=x, y=y))
    total = 0.0
    for h, label in zip(x, y.tolist(), strict=True):
        z = weight @ (h / (0.2 * h.square().sum().sqrt())) + bias
        total += float(torch.log(z.exp().sum()) - z[label]) / 5
    assert result.value.item() == pytest.approx(total, rel=1e-12)
    result.value.backward()
    assert net.network[1].weight.grad.abs().max() > 0
    torch.testing.assert_close(net(x), x @ weight.T + bias)  # outside of training the features are as they are
    loss.finish(net)
    torch.testing.assert_close(net(x), x @ weight.T / 0.2 + bias)
    for wrong in ({"temperature": 0}, {"head": "fc"}):
        with pytest.raises(InputError, match=next(iter(wrong))):
            T2FNorm(**wrong).check(net)


def test_t2fnorm_needs_the_layer_that_gives_the_logits():
    step = replace(step_of(kedge.Classifier(TwoHeads()), None), x=torch.rand(2, 4))
    step = replace(step, forward=step.net)
    with pytest.raises(ArchitectureError, match=r"not the output of 'body'.*pass head="):
        T2FNorm().loss(step)
    assert T2FNorm(head="head").loss(step).value.isfinite()


@pytest.mark.parametrize("anchored", [False, True])
@pytest.mark.parametrize("name", ["logit-norm", "t2fnorm"])
def test_a_loss_by_name_trains_and_resumes_to_the_very_same_weights(tmp_path, name, anchored):
    def run(folder, **more):
        options = {"loss": name, "directory": tmp_path / folder, "checkpoint_seconds": 0.0}
        return train(network(anchored), data(), replace(RECIPE, ema=0.9), **options | more)

    straight = run("straight")
    assert straight.record["loss"]["name"] == name
    assert not same_weights(straight, run("other", loss=None))
    with pytest.raises(StopError):
        run("stopped", progress=stop_at(4))
    assert same_weights(run("stopped"), straight)
    assert same_weights(run("stopped"), straight)  # a finished run, once more
    with pytest.raises(InputError, match="loss must be one of"):
        train(network(), data(), RECIPE, loss="logit norm")


# Losses of the study `insight`.


def test_agreement_is_two_cross_entropies_and_the_squared_difference_of_log_probabilities():
    logits = torch.tensor([[0.0, 0.0, 0.0], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0], [torch.log(torch.tensor(2.0)), 0.0, 0.0]])
    result = Agreement().loss(step_of(network(), lambda x: logits))
    third, half, quarter = (torch.tensor(1 / n).log() for n in (3, 2, 4))
    fits = -(third + third) / 2, -(third + quarter) / 2
    apart = ((half - third) ** 2 + 2 * (quarter - third) ** 2) / 6
    torch.testing.assert_close(result.value, sum(fits) / 2 + 0.1 * apart)
    assert torch.equal(result.logits, logits[:2])


@pytest.mark.parametrize(("apart", "penalty"), [(0.0, 10 * 0.25), (0.2, 10 * 0.09), (0.5, 0.0), (2.0, 0.0)])
def test_anchors_are_kept_alive_by_halves_that_differ(apart, penalty):
    net = network(anchored=True)
    with torch.no_grad():
        net.anchored_layer.layer_x.weight[:] = 1.0
        net.anchored_layer.layer_c.weight[:] = 1.0 + apart
    logits = torch.zeros(2, 3)
    result = AliveAnchors().loss(step_of(net, lambda x: logits))
    torch.testing.assert_close(result.value, torch.log(torch.tensor(3.0)) + penalty)


def seen_by(loss, net, x, y, done=0.0):
    """The loss of a step, and the images that the network was given."""
    given = []
    step = step_of(net.train(), lambda images: given.append(images) or net(images))
    with seeded(0):
        result = loss.loss(replace(step, x=x, y=y, done=done))
    (images,) = given
    return result, images


def linear() -> kedge.Classifier:
    return kedge.Classifier(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(72, 3)), mean=[0.3, 0.6], std=0.5)


def test_differences_are_the_masked_pairs_of_a_network_without_anchors():
    x, y, net = torch.rand(40, 2, 6, 6), torch.arange(40) % 3, linear()
    result, given = seen_by(Differences(), net, x, y)
    changed = (given != x).flatten(1).any(dim=1)
    assert 4 <= int(changed.sum()) <= 16  # a quarter
    mean = torch.tensor([0.3, 0.6]).view(2, 1, 1)
    for made, image in zip(given[changed], x[changed], strict=True):
        assert any(torch.allclose(made, image - other + mean) for other in x)
    rows = -net(given).log_softmax(dim=1)
    expected = torch.where(changed, rows.mean(dim=1), rows[torch.arange(40), y]).mean()
    torch.testing.assert_close(result.value, expected)


def test_t_as_noise_adds_what_t_changes_of_another_image_until_the_clean_final_fraction(monkeypatch):
    monkeypatch.setattr(sys.modules[AsNoise.__module__], "Corruption", lambda: torch.square)
    x, y, net = torch.rand(60, 2, 6, 6), torch.arange(60) % 3, linear()
    result, given = seen_by(AsNoise(0.4), net, x, y, done=0.59)
    changed = (given != x).flatten(1).any(dim=1)
    assert 4 <= int(changed.sum()) <= 22  # a fifth
    for made, image in zip(given[changed], x[changed], strict=True):
        assert any(torch.allclose(made, image + other**2 - other) for other in x)
    torch.testing.assert_close(result.value, -net(given).log_softmax(dim=1)[torch.arange(60), y].mean())
    assert torch.equal(seen_by(AsNoise(0.4), net, x, y, done=0.61)[1], x)


def test_a_network_with_equal_halves_sees_of_a_pair_the_image_and_what_t_changed_of_the_anchor():
    plain = network()
    net = kedge.anchor(plain, corruption=torch.square, every=1, mean=0.3, std=0.5).train()
    x = torch.rand(12, 1, 8, 8)
    result = net(x)
    c = x[net.draw.permutation]
    alone = kedge.Classifier(plain, mean=0.3, std=0.5).train()
    torch.testing.assert_close(result, alone(x + c**2 - c), rtol=1e-4, atol=1e-5)


def test_under_an_anchor_of_another_class_a_network_is_to_say_nothing():
    y = torch.arange(60) % 3
    net = kedge.anchor(network(), init="fresh").train()
    pairs = []
    net.anchored_layer.register_forward_pre_hook(lambda _, given: pairs.append((given[0], _CALL.get().permutation)))
    step = step_of(net, net)
    with seeded(0):
        x = torch.rand(60, 1, 8, 8)
        result = SameClass().loss(replace(step, x=x, y=y))
    ((_, anchors),) = pairs
    assert not bool((anchors == torch.arange(60)).any())  # no image is its own anchor
    same = y[anchors] == y
    assert 18 <= int(same.sum()) <= 42  # half
    rows = -result.logits.log_softmax(dim=1)
    torch.testing.assert_close(result.value, torch.where(same, rows[torch.arange(60), y], rows.mean(dim=1)).mean())


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
            result = as_published(image.repeat(3, 1, 1, 1))
        torch.testing.assert_close(result, result[:1].expand_as(result))
        clamped += bool((result >= mean - 1e-5).all())
    assert 24 <= clamped <= 39  # 32 in the mean
