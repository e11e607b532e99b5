"""AdaSCALE: a percentile for each image, from how its largest features move; against loops over images."""

import math

import numpy as np
import pytest
import torch
from scipy.special import logsumexp

import kedge
from helpers import images, layer_maps, network
from kedge.data.leakage import halves
from kedge.detectors.adascale import AdaSCALE, feature_shift, smallest
from kedge.detectors.registry import make
from kedge.errors import InputError, NotReadyError


def features_of(net, image):
    logits, maps = layer_maps(net, image, ["flatten"])
    return logits, maps[0][:, :, 0]


def moved(net, image, o=0.05, epsilon=0.5):
    """One image (1, D, H, W) in [0, 1] after its step, in the units of the normalised input."""
    std = float(net.std[0])
    start = image.clone().requires_grad_()
    logits, _ = features_of(net, start)
    logits.max().backward()
    gradient = start.grad.flatten()
    order = gradient.abs().argsort()[: int(len(gradient) * o)]
    step = torch.zeros_like(gradient)
    step[order] = epsilon * std * gradient[order].sign()
    return image + step.view_as(image)


def q_of(net, image, k1=0.01, k2=0.05, lam=10.0):
    with torch.no_grad():
        before = features_of(net, image)[1][0].numpy()
    after_image = moved(net, image)
    with torch.no_grad():
        after = features_of(net, after_image)[1][0].numpy()
    order = np.argsort(-before)
    first, second = (order[: max(1, int(len(order) * k))] for k in (k1, k2))
    return lam * sum(abs(after[i] - before[i]) for i in first) + sum(max(after[i], 0) for i in second), before


@pytest.mark.parametrize("kind", ["unanchored", "anchored"])
@pytest.mark.parametrize("method", ["adascale", "adascale-l"])
def test_it_is_scale_or_lts_at_each_image_s_own_percentile(method, kind):
    net, held_out = network(kind, dtype=torch.float64), images(50, seed=1)
    detector = make(method, net, percentile=(0.2, 0.9)).fit(images(60)).calibrate(held_out)
    half = halves(held_out, detector.preprocess, "")[0].images
    known = [q_of(net, x[None].double() / 255)[0] for x in half]
    assert detector.shifts.tolist() == pytest.approx(sorted(known), rel=1e-9)
    weight, bias = (p.detach().numpy() for p in (net.network.fc.weight, net.network.fc.bias))
    expected = []
    for x in images(6, seed=2):
        q, h = q_of(net, x[None].double() / 255)
        p = 0.2 + (1 - np.mean(np.array(known) <= q)) * 0.7
        largest = sorted(h, reverse=True)[: max(1, len(h) - round(len(h) * p))]
        r = sum(h) / sum(largest)
        logits = weight @ (h * math.exp(r)) + bias if method == "adascale" else r**2 * (weight @ h + bias)
        expected.append(-logsumexp(logits))
    assert detector.score(images(6, seed=2)).tolist() == pytest.approx(expected, rel=1e-9)


def test_by_hand():
    before, after = torch.tensor([[4.0, 1.0, 3.0, 0.0]]), torch.tensor([[3.0, 1.0, -1.0, 9.0]])
    assert feature_shift(before, after, 0.25, 0.25, 10.0).tolist() == [10 * 1 + 3]
    assert feature_shift(before, after, 0.5, 0.5, 1.0).tolist() == [1 + 4 + 3 + 0]
    assert feature_shift(before, after, 0.01, 0.5, 2.0).tolist() == [2 * 1 + 3]  # at least one
    assert smallest(torch.tensor([[[3.0, 1.0], [2.0, 4.0]]]), 0.5).tolist() == [[[0, 1], [1, 0]]]


def test_it_takes_images_alone_and_needs_calibration(tmp_path):
    net = network()
    detector = AdaSCALE(net).fit(images(60))
    with pytest.raises(NotReadyError, match=r"calibrate\(held_out\)"):
        detector.score(images(3))
    assert not detector.takes_features
    with pytest.raises(InputError, match="reads more of the network"):
        AdaSCALE(net).fit(kedge.extract(net, images(60)))
    detector.calibrate(images(50, seed=1)).save(tmp_path / "a.kedge")
    assert kedge.load(tmp_path / "a.kedge").shifts.equal(detector.shifts)
    assert detector.fit(images(60)).shifts is None
