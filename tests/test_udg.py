"""Unsupervised dual grouping: groups before each epoch, pseudo-labels in pure ones, and the loss of all three parts."""

import copy
import math

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader

import kedge
from helpers import images, labelled
from kedge.detectors.kmeans import kmeans
from kedge.detectors.trained.udg import UDG, filter_known
from kedge.errors import InputError
from kedge.pixels import to_unit
from kedge.seeds import mix_seed, seeded
from kedge.training import Recipe
from method_helpers import small, softmax, step_of

RECIPE = Recipe(epochs=2, batch=16, lr=0.05, crop=0, flip=False)
RULE = kedge.Preprocess((1, 8, 8))
DATA = labelled(48, classes=2, channels=1)
THREE = labelled(48, classes=3, channels=1)
UNLABELLED = kedge.ImageSet(images(40, channels=1, seed=100), name="unlabelled")


def bright(n: int, level: int, seed=0) -> torch.Tensor:
    """Images about as bright as a level."""
    return (images(n, channels=1, seed=seed) // 16 + level).to(torch.uint8)


def grouped(classes=2, seed=0, groups=6) -> nn.Module:
    return UDG.prepare(small(classes, seed), groups=groups)


def tiny(groups=4, dtype=torch.float64) -> kedge.Classifier:
    """Three classes; without batch norm, so that a loss is the same however its images are passed."""
    with seeded(0):
        network = nn.Sequential(nn.Flatten(), nn.Linear(64, 5), nn.ReLU(), nn.Linear(5, 3)).to(dtype)
    net = UDG.prepare(kedge.Classifier(network, mean=0.5, std=0.25), groups=groups)
    net.network[3].groups.weight.data.mul_(50)  # for groups that differ
    return net


def step(net, data, numbers, outliers, outlier_numbers, **fields):
    index, outlier_index = torch.tensor(numbers), torch.tensor(outlier_numbers)
    x, o = (to_unit(s.images[n], net.mean.dtype) for s, n in ((data, index), (outliers, outlier_index)))
    return step_of(net, x, data.labels[index], index=index, outliers=o, outlier_index=outlier_index, **fields)


def naive_filter(groups, labels, unlabelled, purity):
    """The rule in words: in each group, count every class among all of its images."""
    result = []
    for group in unlabelled:
        size = sum(g == group for g in groups) + sum(g == group for g in unlabelled)
        chosen = -1
        for c in sorted(set(labels)):
            of_class = sum(g == group and y == c for g, y in zip(groups, labels, strict=True))
            if of_class / size > purity:
                chosen = c
        result.append(chosen)
    return result


def test_filtering_by_hand():
    """Group 0: 4 of 5 of class 1. Group 1: 4 of 6. Group 2: no labels. Group 3: 2 and 2. Group 4: labels alone."""
    groups = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1, 3, 3, 3, 3, 4])
    labels = torch.tensor([1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 1, 1, 2])
    unlabelled = torch.tensor([0, 1, 1, 2, 3])
    assert filter_known(groups, labels, unlabelled, 0.79).tolist() == [1, -1, -1, -1, -1]
    assert filter_known(groups, labels, unlabelled, 0.8).tolist() == [-1] * 5  # more than, not as much as
    assert filter_known(groups, labels, unlabelled, 0.6).tolist() == [1, 0, 0, -1, -1]
    assert filter_known(groups, labels, unlabelled, 1).tolist() == [-1] * 5
    mixed = torch.tensor([0, 0, 1, 1, 1])
    assert filter_known(torch.zeros(5, dtype=torch.long), mixed, torch.tensor([0]), 0.3).tolist() == [1]  # the larger


@pytest.mark.parametrize("purity", [0.5, 0.6, 2 / 3, 0.75, 0.8, 0.9])
def test_filtering_is_the_rule_in_words(purity):
    taken = 0
    for seed in range(30):
        rng = np.random.default_rng(seed)
        labels = rng.integers(0, 4, 60)
        groups = np.where(rng.random(60) < 0.8, 2 * labels, rng.integers(0, 9, 60))
        unlabelled = rng.integers(0, 9, 14)
        expected = naive_filter(groups.tolist(), labels.tolist(), unlabelled.tolist(), purity)
        result = filter_known(*(torch.from_numpy(a) for a in (groups, labels, unlabelled)), purity)
        assert result.tolist() == expected
        taken += sum(label >= 0 for label in expected)
    assert 0 < taken < 30 * 14


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])  # the latter grouped in single precision
def test_groups_are_those_of_k_means_on_the_features(dtype):
    net, data, outliers = tiny(dtype=dtype).train(), THREE, UNLABELLED
    loss, count = UDG.loss(purity=0.5, seed=3), len(data)
    loss.begin_epoch(net, data, outliers, RULE, epoch=2)
    inner = net.network
    x = to_unit(torch.cat([data.images, outliers.images]), dtype)
    features = inner[2](inner[1](inner[0]((x - 0.5) / 0.25))).detach()
    expected, _ = kmeans(features.double() if dtype == torch.float64 else features.float(), 4, seed=mix_seed(3, 2))
    state = loss.state()
    assert state["groups"].equal(expected[:count])
    assert state["outlier_groups"].equal(expected[count:])
    pseudo = naive_filter(expected[:count].tolist(), data.labels.tolist(), expected[count:].tolist(), 0.5)
    assert state["pseudo_labels"].tolist() == pseudo
    assert len(expected.unique()) == 4
    assert net.training


def test_a_case_by_hand():
    """Dark images are of class 0 and some unlabelled ones are too; of the bright ones, half are unlabelled."""
    data = kedge.ImageSet(torch.cat([bright(9, 0), bright(5, 200)]), torch.tensor([0] * 9 + [1] * 5), "toy")
    outliers = kedge.ImageSet(torch.cat([bright(2, 0, 1), bright(5, 200, 1), bright(4, 100, 1)]), name="outliers")
    brightness = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(1, 2))
    net = kedge.Classifier(UDG.prepare(brightness, groups=3), mean=0.0, std=1.0)
    for source in (data, [(Image.fromarray(image[0].numpy()), int(label)) for image, label in data]):
        loss = UDG.loss()
        loss.begin_epoch(net, source, outliers, RULE, epoch=0)
        state = loss.state()
        dark, light, gray = (int(state["outlier_groups"][i]) for i in (0, 2, 7))
        assert state["groups"].tolist() == [dark] * 9 + [light] * 5
        assert state["outlier_groups"].tolist() == [dark] * 2 + [light] * 5 + [gray] * 4
        assert state["pseudo_labels"].tolist() == [0] * 2 + [-1] * 9  # 9 of 11 are more than 0.8; 5 of 10 are not


def test_features_are_taken_in_evaluation_mode_and_without_a_trace():
    net = kedge.Classifier(grouped(), mean=0.5, std=0.25).train()
    before, state = copy.deepcopy(net.state_dict()), torch.get_rng_state()
    loss = UDG.loss()
    loss.begin_epoch(net, DATA, UNLABELLED, RULE, epoch=0)
    after = net.state_dict()
    assert all(after[key].equal(before[key]) for key in before if not key.startswith("network.fc.groups"))
    assert all(module.training for module in net.modules())
    assert torch.get_rng_state().equal(state)
    assert all(parameter.grad is None for parameter in net.parameters())
    with torch.no_grad():
        features = net.eval().features(torch.cat([DATA.images, UNLABELLED.images]), ["fc.classes:in"])[1]
    expected, _ = kmeans(features["fc.classes:in"], 6, seed=mix_seed(0, 0))
    assert torch.cat([loss.state()[key] for key in ("groups", "outlier_groups")]).equal(expected)


def test_the_group_head_is_drawn_anew_before_each_epoch():
    net, loss, drawn = tiny(), UDG.loss(seed=1), []
    for epoch in (0, 1, 1):
        net.network[3].groups.bias.data.fill_(1.0)
        loss.begin_epoch(net, THREE, UNLABELLED, RULE, epoch)
        drawn.append(net.network[3].groups.weight.detach().clone())
        assert not net.network[3].groups.bias.any()
    assert not drawn[0].equal(drawn[1])
    assert drawn[1].equal(drawn[2])
    many = UDG.prepare(small(), groups=500).fc.groups.weight
    assert many.mean().item() == pytest.approx(0, abs=4e-4)
    assert many.std().item() == pytest.approx(0.01, rel=0.03)


def test_random_transforms_of_a_data_set_are_seeded():
    class Noisy:
        def __len__(self):
            return 48

        def __getitem__(self, index):
            return (THREE.images[index] / 255 * 0.9 + torch.rand(1, 8, 8) / 10).float(), index % 3

    states = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        loss = UDG.loss()
        loss.begin_epoch(tiny(dtype=torch.float32), Noisy(), UNLABELLED, RULE, epoch=0)
        states.append(loss.state())
    assert all(states[0][key].equal(states[1][key]) for key in states[0])


def test_processes_take_the_groups_of_the_first(monkeypatch):
    def first(groups, src):
        assert src == 0
        groups.fill_(3)

    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "broadcast", first)
    loss = UDG.loss()
    loss.begin_epoch(tiny(), THREE, UNLABELLED, RULE, epoch=0)
    assert set(loss.state()["groups"].tolist()) == set(loss.state()["outlier_groups"].tolist()) == {3}


def test_data_that_cannot_be_grouped():
    x, stream = images(48, channels=1), DataLoader(THREE, batch_size=16)
    few = kedge.ImageSet(UNLABELLED.images[:10], name="few")
    loss = UDG.loss()
    for net, data, outliers, start, message in (
        (tiny(), stream, UNLABELLED, 0, "data must be a set"),
        (tiny(), stream, UNLABELLED, 5, "data must be a set"),  # before epochs are spent on it
        (tiny(), list(x), UNLABELLED, 0, r"a label in 0\.\.2 for each image.*got none"),
        (tiny(), [(image, i % 5) for i, image in enumerate(x)], UNLABELLED, 0, r"label in 0\.\.2 .*got \[0, 1, 2, 3"),
        (tiny(), [(image, i % 3 - 1) for i, image in enumerate(x)], UNLABELLED, 0, r"in 0\.\.2 .*got \[-1, 0, 1\]"),
        (tiny(groups=59), THREE, few, 0, r"groups must be at most the number of images, 58 .*; got 59"),
    ):
        with pytest.raises(InputError, match=message):
            UDG.loss(start=start).begin_epoch(net, data, outliers, RULE, epoch=0)
    loss.begin_epoch(tiny(groups=58), THREE, few, RULE, epoch=0)
    loss.begin_epoch(tiny(), THREE, THREE, RULE, epoch=0)  # one set may be both
    assert loss.state()["groups"].equal(loss.state()["outlier_groups"])


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("pseudo", [[2, -1, 0, -1], [-1] * 4, [1] * 4])
def test_the_loss_by_hand(smoothing, pseudo):
    net, loss = tiny(), UDG.loss(weight_groups=0.3, weight_outliers=0.7)
    groups, outlier_groups = torch.arange(48) % 4, (torch.arange(40) * 3) % 4
    numbers, outlier_numbers = [3, 9, 5], [1, 6, 7, 2]
    labels = torch.full((40,), -1)
    labels[outlier_numbers] = torch.tensor(pseudo)
    loss.load_state({"groups": groups, "outlier_groups": outlier_groups, "pseudo_labels": labels})
    result = loss.loss(step(net, THREE, numbers, UNLABELLED, outlier_numbers, label_smoothing=smoothing))

    known, uniform, grouping = [], [], []
    for source, index, group_of in [(THREE, numbers, groups), (UNLABELLED, outlier_numbers, outlier_groups)]:
        for place, i in enumerate(index):
            output = net(to_unit(source.images[i : i + 1], torch.float64), raw=True)
            p = [math.log(q) for q in softmax(output.logits[0].tolist())]
            label = int(THREE.labels[i]) if source is THREE else pseudo[place]
            if label >= 0:
                targets = [smoothing / 3 + (1 - smoothing) * (c == label) for c in range(3)]
                known.append(-sum(t * q for t, q in zip(targets, p, strict=True)))
            else:
                uniform.append(-sum(p) / 3)
            grouping.append(-math.log(softmax(output.extra[0][0].tolist())[int(group_of[i])]))
    expected = sum(known) / len(known) + 0.3 * sum(grouping) / 7
    expected += 0.7 * sum(uniform) / len(uniform) if uniform else 0
    assert result.value.item() == pytest.approx(expected, rel=1e-12)
    assert result.logits.allclose(net(to_unit(THREE.images[numbers], torch.float64)))


def test_a_network_prepared_for_other_groups_and_a_stream_are_refused_before_training():
    stream = DataLoader(DATA, batch_size=16)
    for data, loss, message in ((DATA, UDG.loss(groups=7), "groups must be 6.*got 7"), (stream, UDG.loss(), "a set")):
        with pytest.raises(InputError, match=message):
            kedge.train(grouped(), data, RECIPE, loss=loss, outliers=UNLABELLED)


def test_before_the_first_grouping_the_labels_are_learned_alone():
    net, loss = tiny(), UDG.loss(start=2)
    loss.begin_epoch(net, THREE, UNLABELLED, RULE, epoch=1)
    assert loss.state() == {}
    result = loss.loss(step(net, THREE, [0, 1, 2], UNLABELLED, [0, 1], epoch=1))
    p = net(to_unit(THREE.images[:3], torch.float64)).log_softmax(dim=1)
    assert result.value.item() == pytest.approx(-(p[0, 0] + p[1, 1] + p[2, 2]).item() / 3)
    result.value.backward()
    assert all(parameter.grad is not None for parameter in net.parameters())  # which parallel training waits for
    assert not net.network[3].groups.weight.grad.any()
    loss.begin_epoch(net, THREE, UNLABELLED, RULE, epoch=2)
    assert set(loss.state()) == {"groups", "outlier_groups", "pseudo_labels"}
    loss.begin_epoch(net, THREE, UNLABELLED, RULE, epoch=0)  # of another run
    assert loss.state() == {}


def test_without_grouping_it_is_ordinary_training_and_without_filtering_outlier_exposure():
    exposure = kedge.OutlierExposure.loss(weight=0.5, outliers_per_image=2)
    loss = UDG.loss(purity=1, weight_groups=0, weight_outliers=0.5, outliers_per_image=2)
    trained = kedge.train(small(), DATA, RECIPE), kedge.train(small(), DATA, RECIPE, loss=exposure, outliers=UNLABELLED)
    for net, method_loss, close in ((trained[0], UDG.loss(start=2), 0), (trained[1], loss, 1)):
        state = kedge.train(grouped(), DATA, RECIPE, loss=method_loss, outliers=UNLABELLED).network.state_dict()
        for name, value in net.network.state_dict().items():
            assert state[name.replace("fc.", "fc.classes.")].allclose(value, rtol=1e-3 * close, atol=1e-5 * close), name


def turned_squares(n=160) -> tuple[kedge.ImageSet, kedge.ImageSet, torch.Tensor]:
    """Left or right is bright where there are labels, above or below in most other images; 20 of those are known."""
    data = labelled(n, classes=2, channels=1)
    fresh = images(160, channels=1, seed=1)
    labels = torch.cat([torch.arange(20) % 2, torch.full((140,), -1)])
    for x, y in ((data.images, data.labels), (fresh[:20], labels[:20])):
        x[y == 0, :, :, :4] //= 8
        x[y == 1, :, :, 4:] //= 8
    fresh[20:90, :, :4] //= 8
    fresh[90:, :, 4:] //= 8
    return data, kedge.ImageSet(fresh, name="mixed"), labels


def test_pseudo_labels_go_to_the_unlabelled_images_of_known_classes():
    data, mixed, labels = turned_squares()
    recipe = Recipe(epochs=3, batch=16, lr=0.05, crop=0, flip=False)
    loss = UDG.loss()
    net = kedge.train(grouped(groups=8), data, recipe, loss=loss, outliers=mixed)
    pseudo = loss.state()["pseudo_labels"]
    assert (pseudo[:20] == labels[:20]).float().mean() > 0.8
    assert (pseudo[20:] >= 0).float().mean() < 0.1
    detector = UDG(net).fit(data)
    test, unknown = turned_squares()[0].images.flip(2), mixed.images[20:].flip(2)
    assert kedge.metrics.auroc(detector.score(test), detector.score(unknown)) > 0.95
    assert (detector.calibrate(data.images)(test).label == data.labels).float().mean() > 0.95
    assert detector.outliers is not None
