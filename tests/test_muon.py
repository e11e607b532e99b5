"""Muon: orthogonal steps for matrices, Adam for the rest, against their definitions; and runs that resume with it."""

import numpy as np
import pytest
import torch
from torch import nn

import kedge
from helpers import StopError, colors, same_weights, stop_at
from kedge.models import build
from kedge.seeds import seeded
from kedge.training import Recipe, train
from kedge.training.optimizers import Muon, make_optimizer, orthogonalized

HOW = Recipe(epochs=5, batch=16, lr=0.1, optimizer="muon", momentum=0.6, schedule="linear", crop=1, pad="reflect")


def random(*shape, seed=0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("shape", [(4, 9), (9, 4), (6, 6)])
def test_each_iteration_applies_the_quintic_to_every_singular_value(shape):
    left, values, right = np.linalg.svd(random(*shape).numpy(), full_matrices=False)
    scaled = values / (np.sqrt((values**2).sum()) + 1e-7)
    for iteration in range(1, 9):
        scaled = 3.4445 * scaled - 4.7750 * scaled**3 + 2.0315 * scaled**5
        result = orthogonalized(random(*shape), iteration).numpy()
        np.testing.assert_allclose(result, left @ np.diag(scaled) @ right, atol=1e-8)
    assert scaled.min() > 0.6
    assert scaled.max() < 1.3
    np.testing.assert_array_equal(orthogonalized(random(*shape)), orthogonalized(random(*shape), 3))


def test_a_matrix_is_normalized_and_moved_along_the_orthogonalized_momentum():
    weight = nn.Parameter(random(3, 2, 2, 2))
    optimizer = Muon([{"params": [weight], "muon": True}], lr=0.2, momentum=0.7)
    expected, velocity = weight.detach().clone(), torch.zeros(3, 8, dtype=torch.float64)
    for step in range(3):
        gradient = random(3, 2, 2, 2, seed=step + 1)
        weight.grad = gradient.clone()
        optimizer.step()
        velocity = 0.7 * velocity + gradient.flatten(1)
        matrix = expected.flatten(1)
        matrix = matrix * (3**0.5 / matrix.square().sum().sqrt())
        matrix = matrix - 0.2 * orthogonalized(gradient.flatten(1) + 0.7 * velocity)
        expected = matrix.view(3, 2, 2, 2)
        torch.testing.assert_close(weight.detach(), expected)


def test_other_parameters_follow_torch_s_adam():
    ours, theirs = (nn.Parameter(random(6)) for _ in range(2))
    optimizers = Muon([{"params": [ours]}], lr=0.05), torch.optim.Adam([theirs], lr=0.05, betas=(0.85, 0.95))
    for step in range(4):
        for weight, optimizer in zip((ours, theirs), optimizers, strict=True):
            weight.grad = random(6, seed=step + 1)
            optimizer.step()
    torch.testing.assert_close(ours, theirs)


def network(anchored) -> kedge.Classifier:
    with seeded(0):
        net = build("airbench", width=2, classes=3)
    return kedge.anchor(net, every=2) if anchored else kedge.Classifier(net)


@pytest.mark.parametrize("anchored", [False, True])
def test_every_weight_has_its_group_and_its_rate(anchored):
    classifier = network(anchored)
    groups = make_optimizer(classifier, HOW).param_groups
    names = {p: name.removeprefix("network.") for name, p in classifier.named_parameters()}
    inner = [f"group{i}.conv{j}.weight" for i in (1, 2, 3) for j in (1, 2)]
    assert [names[p] for p in groups[0]["params"]] == inner
    assert [group["muon"] for group in groups] == [True] + [False] * (len(groups) - 1)
    scales = {names[p]: group["scale"] for group in groups for p in group["params"]}
    assert sorted(scales) == sorted(names.values())
    expected = dict.fromkeys(scales, 1 / 12) | dict.fromkeys(inner, 1)
    stem = ("stem.layer_x.weight", "stem.layer_c.weight") if anchored else ("stem.weight",)
    expected |= dict.fromkeys(stem, 1 / 12 / (12 * len(stem)) ** 0.5) | {"fc.weight": 10 / 12 / 8**0.5}
    assert scales == pytest.approx(expected)


@pytest.mark.parametrize("anchored", [False, True])
def test_a_run_with_muon_learns_and_resumes_to_the_same_bits(anchored, tmp_path):
    data = colors(side=12)
    whole = train(network(anchored), data, HOW, seed=1)
    with torch.no_grad():
        assert (whole(data.images).argmax(dim=1) == data.labels).float().mean() > 0.9  # by chance a third
    options = {"seed": 1, "directory": tmp_path, "checkpoint_seconds": 0.0}
    with pytest.raises(StopError):
        train(network(anchored), data, HOW, progress=stop_at(6), **options)
    assert same_weights(whole, train(network(anchored), data, HOW, **options))
