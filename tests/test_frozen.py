"""Training the head alone on frozen features."""

import pytest
import torch
from sklearn.linear_model import LogisticRegression
from torch import nn

import kedge
from helpers import colors
from kedge.data import Preprocess
from kedge.errors import InputError
from kedge.training.frozen import train_head


def frozen_network(bias: bool = True) -> kedge.Classifier:
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 3, bias=bias)
    return kedge.Classifier(nn.Sequential(*layers), mean=0.3, std=0.2)


@pytest.mark.parametrize("bias", [True, False])
def test_only_the_head_changes_and_it_learns(bias: bool) -> None:
    net = frozen_network(bias)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    train_head(net, colors(120), preprocess=Preprocess((3, 8, 8)), epochs=30)
    changed = {name for name, value in net.state_dict().items() if not torch.equal(value, before[name])}
    assert changed == ({"network.4.weight", "network.4.bias"} if bias else {"network.4.weight"})
    test = colors(90, seed=1)
    assert float((net(test.images).argmax(dim=1) == test.labels).double().mean()) > 0.95
    assert not net.training


def test_it_is_as_good_as_logistic_regression_on_the_features() -> None:
    net, train, test = frozen_network(), colors(60), colors(200, seed=1)
    features = [net.features(each.images, ["4:in"])[1]["4:in"].detach().numpy() for each in (train, test)]
    oracle = LogisticRegression(max_iter=1000).fit(features[0], train.labels).score(features[1], test.labels)
    train_head(net, train, preprocess=Preprocess((3, 8, 8)))
    assert float((net(test.images).argmax(dim=1) == test.labels).double().mean()) >= oracle - 0.02


def test_the_seed_decides() -> None:
    heads = [
        train_head(frozen_network(), colors(60), preprocess=Preprocess((3, 8, 8)), seed=seed).network[4].weight
        for seed in (1, 1, 2)
    ]
    assert torch.equal(heads[0], heads[1])
    assert not torch.equal(heads[0], heads[2])


def test_a_feature_that_is_constant_in_training_moves_no_logit_later() -> None:
    net, train, test = frozen_network(), colors(60), colors(20, seed=1)
    net.network[0].weight.data[0] = 0
    net.network[0].bias.data[0] = -1  # the first four features are zero for every image
    train_head(net, train, preprocess=Preprocess((3, 8, 8)))
    before = net(test.images)
    net.network[0].bias.data[0] = 100
    assert torch.equal(net(test.images), before)
    assert float((before.argmax(dim=1) == test.labels).double().mean()) > 0.9


def test_bad_labels_and_sizes_are_refused() -> None:
    data = colors(60)
    with pytest.raises(InputError, match="preprocess"):
        train_head(frozen_network(), data)
    for labels, words in {"none": "label for each", "large": "0..2", "one": "two classes"}.items():
        y = {"none": None, "large": data.labels + 3, "one": torch.zeros(60, dtype=torch.long)}[labels]
        with pytest.raises(InputError, match=words):
            train_head(frozen_network(), kedge.ImageSet(data.images, y), preprocess=Preprocess((3, 8, 8)))
