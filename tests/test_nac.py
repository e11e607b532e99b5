"""NAC-UE: coverage of the states of neurons, against loops over images, neurons and bins."""

import math

import numpy as np
import pytest
import torch

import kedge
from helpers import images, layer_maps, network
from kedge.detectors.nac import NAC, state_edges

LAYERS = ["stage1", "flatten"]


def states(net, image, alphas):
    """The states of one image (1, D, H, W), by a change that is added to the layer for every anchor."""
    result = []
    for layer, alpha in zip(LAYERS, alphas, strict=True):
        with torch.no_grad():
            maps = layer_maps(net, image, [layer])[1][0][0]  # (channels, positions)
        module = net.network.get_submodule(layer)
        shape = (len(maps), *(round(math.sqrt(maps.shape[1])),) * 2) if layer == "stage1" else (len(maps),)
        change = torch.zeros(shape, dtype=torch.float64, requires_grad=True)
        handle = module.register_forward_hook(lambda _, inputs, output, change=change: output + change)
        p = net(image).softmax(dim=1)[0]
        handle.remove()
        uniform = 1 / len(p)
        (uniform * (math.log(uniform) - p.log())).sum().backward()
        gradient = change.grad.reshape(maps.shape[0], -1).mean(dim=1)
        result.append(torch.sigmoid(alpha * maps.mean(dim=1) * gradient).numpy())
    return result


@pytest.mark.parametrize("kind", ["unanchored", "anchored"])
def test_the_score_is_the_mean_coverage_of_the_states(kind):
    net, alphas, full, bins = network(kind, dtype=torch.float64), (50.0, 400.0), 5, 10
    detector = NAC(net, layers=LAYERS, alpha=alphas, bins=bins, full=full).fit(images(40))
    cut = state_edges(bins).numpy()

    def bin_of(state):
        return max(i for i in range(bins) if cut[i] <= state)

    train, test = (
        [states(net, x[None].double() / 255, alphas) for x in some] for some in (images(40), images(4, seed=4))
    )
    expected = []
    for image in test:
        layers = []
        for i, layer in enumerate(image):
            counts = [sum(bin_of(other[i][n]) == bin_of(state) for other in train) for n, state in enumerate(layer)]
            layers.append(np.mean([min(count / full, 1) for count in counts]))
        expected.append(-np.mean(layers))
    assert len({round(score, 6) for score in expected}) > 1
    assert detector.score(images(4, seed=4)).tolist() == pytest.approx(expected, abs=1e-6)


def test_bins_are_symmetric_and_narrower_around_one_half():
    cut = state_edges(10)
    assert len(cut) == 11
    assert (cut[0], cut[5], cut[10]) == (0, 0.5, 1)
    torch.testing.assert_close(cut, 1 - cut.flip(0))
    assert (cut.diff()[:5].diff() < 0).all()
    assert cut[1] == pytest.approx(math.log(1 + (math.sqrt(1000) - 1) / 5) / math.log(1000))


def test_images_like_those_of_training_are_covered():
    net = network()
    detector = NAC(net, full=1).fit(images(40))
    torch.testing.assert_close(detector.score(images(40)), -torch.ones(40))
    assert NAC(net, full=40).fit(images(40)).score(images(40)).max() > -1


def test_anchors_in_groups_and_frozen_weights_give_the_same(monkeypatch):
    net = network("anchored", dtype=torch.float64)
    detector = NAC(net, layers=LAYERS).fit(images(40))
    expected = detector.score(images(6, seed=1))
    net.requires_grad_(False)
    torch.testing.assert_close(detector.score(images(6, seed=1)), expected)
    monkeypatch.setattr(net, "memory_cap", 1)
    torch.testing.assert_close(detector.score(images(6, seed=1)), expected)


def test_the_sample_follows_the_seed_and_what_is_saved_is_the_coverage(tmp_path):
    net = network()
    detectors = [NAC(net, limit=15, seed=seed).fit(images(60)) for seed in (0, 0, 1)]
    scores = [detector.score(images(5, seed=3)) for detector in detectors]
    assert scores[0].equal(scores[1])
    assert not scores[0].equal(scores[2])
    detectors[0].save(tmp_path / "a.kedge")
    assert kedge.load(tmp_path / "a.kedge").score(images(5, seed=3)).equal(scores[0])
