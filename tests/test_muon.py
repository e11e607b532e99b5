"""Muon: orthogonal steps for matrices, Adam for the rest, against their definitions; and runs that resume with it."""

import numpy as np
import pytest
import torch
from torch import nn

import kedge
from kedge.models import build
from kedge.models.classifier import Classifier
from kedge.seeds import seeded
from kedge.training import Recipe, train
from kedge.training.muon import Muon, orthogonalised
from kedge.training.optimizer import make_optimizer

HOW = Recipe(epochs=5, batch=16, lr=0.1, optimizer="muon", momentum=0.6, schedule="linear", crop=1, pad="reflect")


def random(*shape, seed=0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("shape", [(4, 9), (9, 4), (6, 6)])
def test_singular_values_come_near_one_and_directions_stay(shape):
    matrix = random(*shape)
    made = orthogonalised(matrix, iterations=8)
    values = np.linalg.svd(made.numpy(), compute_uv=False)
    assert values.min() > 0.6
    assert values.max() < 1.3
    left, _, right = np.linalg.svd(matrix.numpy(), full_matrices=False)
    through = left.T @ made.numpy() @ right.T  # diagonal where the singular vectors are the same
    np.testing.assert_allclose(through, np.diag(np.diag(through)), atol=1e-8)


def test_each_iteration_takes_the_quintic_of_every_singular_value():
    left, values, right = np.linalg.svd(random(5, 8).numpy(), full_matrices=False)
    scaled = values / (np.sqrt((values**2).sum()) + 1e-7)
    for _ in range(3):
        scaled = 3.4445 * scaled - 4.7750 * scaled**3 + 2.0315 * scaled**5
    expected = left @ np.diag(scaled) @ right
    np.testing.assert_allclose(orthogonalised(random(5, 8)).numpy(), expected, atol=1e-10)


def test_a_matrix_is_brought_to_its_size_and_moved_along_the_orthogonal_momentum():
    weight = nn.Parameter(random(3, 2, 2, 2))
    optimizer = Muon([{"params": [weight], "muon": True}], lr=0.2, momentum=0.7)
    expected, velocity = weight.detach().clone(), torch.zeros(3, 8, dtype=torch.float64)
    for step in range(3):
        gradient = random(3, 2, 2, 2, seed=step + 1)
        weight.grad = gradient.clone()
        optimizer.step()
        velocity = 0.7 * velocity + gradient.flatten(1)
        flat = expected.flatten(1)
        flat = flat * (3**0.5 / flat.square().sum().sqrt())
        flat = flat - 0.2 * orthogonalised(gradient.flatten(1) + 0.7 * velocity)
        expected = flat.view(3, 2, 2, 2)
        torch.testing.assert_close(weight.detach(), expected)


def test_what_is_no_matrix_goes_by_torch_s_adam():
    ours, theirs = (nn.Parameter(random(6)) for _ in range(2))
    optimisers = Muon([{"params": [ours]}], lr=0.05), torch.optim.Adam([theirs], lr=0.05, betas=(0.85, 0.95))
    for step in range(4):
        for weight, optimizer in zip((ours, theirs), optimisers, strict=True):
            weight.grad = random(6, seed=step + 1)
            optimizer.step()
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("anchored", [False, True])
def test_every_weight_has_its_group_and_its_rate(anchored):
    net = build("airbench", width=2, classes=3)
    classifier = kedge.anchor(net) if anchored else Classifier(net)
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


def pictures(n=64) -> kedge.ImageSet:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 120, (n, 3, 12, 12), dtype=torch.uint8, generator=generator)
    labels = torch.arange(n) % 3
    images[torch.arange(n), labels] += 100
    return kedge.ImageSet(images, labels, name="colours")


def network(anchored=True) -> nn.Module:
    with seeded(0):
        net = build("airbench", width=2, classes=3)
    return kedge.anchor(net, every=2) if anchored else net


class Stopped(Exception):  # noqa: N818
    pass


@pytest.mark.parametrize("anchored", [False, True])
def test_a_run_with_muon_learns_and_resumes_to_the_same_bits(anchored, tmp_path):
    whole = train(network(anchored), pictures(), HOW, seed=1)
    with torch.no_grad():
        right = whole(pictures().images).argmax(dim=1) == pictures().labels
    assert right.float().mean() > 0.9  # by guessing a third

    def stop(p):
        if p.step == 6:
            raise Stopped

    options = {"seed": 1, "directory": tmp_path, "checkpoint_seconds": 0.0}
    with pytest.raises(Stopped):
        train(network(anchored), pictures(), HOW, progress=stop, **options)
    again = train(network(anchored), pictures(), HOW, **options)
    one, two = whole.state_dict(), again.state_dict()
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_the_rate_falls_from_the_first_step_on():
    assert [HOW.rate(epoch) for epoch in (0, 2.5, 5)] == pytest.approx([0.1, 0.05, 0])
