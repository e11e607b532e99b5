"""Gram: deviations of Gram matrices from the bounds of the predicted class, against the definition in naive loops."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import helpers
import kedge
from helpers import images, layer_maps
from kedge.data.leakage import fingerprints
from kedge.detectors import gram as gram_module
from kedge.detectors.gram import Gram, gram_deviation, gram_sums
from kedge.errors import InputError, NotReadyError

LAYERS = ("stage1", "stage2", "stage3", "flatten")


def network(dtype=torch.float32) -> nn.Module:
    """A compact network whose untrained head has no favourite among its classes."""
    net = helpers.network(classes=3, dtype=dtype).network
    with torch.no_grad():
        net.fc.bias.sub_(net(images().to(dtype) / 255).mean(dim=0))
    return net


def channels(classes=2) -> nn.Module:
    """Feature maps are the channels themselves, and the largest of the first channels' means is the class."""
    net = nn.Sequential(nn.Identity(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, classes, bias=False))
    net[3].weight.data = torch.eye(3)[:classes].clone()
    return net.double()


def pixels(*rows: list[float]) -> torch.Tensor:
    """Images (N, channels, 1, 1)."""
    return torch.tensor(rows, dtype=torch.float64)[:, :, None, None]


# The definition, in naive loops.


def naive_gram(maps: np.ndarray, p: int) -> np.ndarray:
    """(C, HW) -> (C,): the Gram matrix of the maps to the power p, its rows summed up, then the signed p-th root."""
    matrix = maps**p @ (maps**p).T
    rows = matrix.sum(axis=1)
    return np.array([np.copysign(abs(row) ** (1 / p), row) if row else 0.0 for row in rows])


def naive_deviation(value: float, least: float, largest: float) -> float:
    if value < least:
        return (least - value) / max(abs(least), 1e-6)
    return (value - largest) / max(abs(largest), 1e-6) if value > largest else 0.0


def naive_deviations(train, predicted, test, labels, powers) -> np.ndarray:
    """(N, L), from the maps and the predicted classes of training and test images."""
    grams = [[[naive_gram(maps, p) for p in powers] for maps in row] for row in train]
    assert set(labels) <= set(predicted)
    result = np.zeros((len(test), len(test[0])))
    for n, (row, label) in enumerate(zip(test, labels, strict=True)):
        same = [g for g, c in zip(grams, predicted, strict=True) if c == label]
        for layer, maps in enumerate(row):
            for k, p in enumerate(powers):
                for c, value in enumerate(naive_gram(maps, p)):
                    seen = [g[layer][k][c] for g in same]
                    result[n, layer] += naive_deviation(value, min(seen), max(seen))
    return result


@torch.no_grad()
def naive_scores(net, train, test, powers=range(1, 11), layers=LAYERS) -> np.ndarray:
    (train_logits, train_maps), (logits, maps) = (layer_maps(net, x.double() / 255, layers) for x in (train, test))
    rows, test_rows = (list(zip(*(each.numpy() for each in every), strict=True)) for every in (train_maps, maps))
    predicted, labels = (each.argmax(dim=1).tolist() for each in (train_logits, logits))
    return naive_deviations(rows, predicted, test_rows, labels, powers)


# The Gram matrix.


@pytest.mark.parametrize("shape", [(3, 4, 2, 3), (3, 4), (3, 4, 5), (2, 1, 2, 2), (1, 5, 1, 1)])
@pytest.mark.parametrize("kind", ["signed", "after a ReLU"])
def test_row_sums_are_those_of_the_gram_matrix(shape, kind):
    features = torch.randn(shape, dtype=torch.float64)
    features = features if kind == "signed" else features.relu()
    result = gram_sums(features, range(1, 11))
    assert result.shape == (shape[0], 10, shape[1])
    for b in range(shape[0]):
        for p in range(1, 11):
            expected = naive_gram(features[b].reshape(shape[1], -1).numpy(), p)
            assert result[b, p - 1].numpy() == pytest.approx(expected, rel=1e-7, abs=1e-9)


def test_few_powers_silent_maps_and_half_precision():
    features = torch.randn(2, 3, 4)
    assert gram_sums(features, [3, 7]).equal(gram_sums(features)[:, [2, 6]])
    assert gram_sums(torch.zeros(2, 3, 4, 4)).eq(0).all()
    result = gram_sums(features.bfloat16())
    assert result.dtype == torch.float32
    assert result.equal(gram_sums(features.bfloat16().float()))
    with pytest.raises(InputError, match=r"features must be \(B, channels, \.\.\.\)"):
        gram_sums(torch.rand(4))


def test_a_gram_matrix_by_hand():
    """Maps (3, 0) and (1, 2): the matrix is 9, 3; 3, 5, and of the squares 81, 9; 9, 17."""
    result = gram_sums(torch.tensor([[[3.0, 0.0], [1.0, 2.0]]]).double(), [1, 2])
    assert result[0].numpy() == pytest.approx(np.array([[12, 8], [90**0.5, 26**0.5]]))
    result = gram_sums(torch.tensor([[[-1.0], [2.0]]]).double(), [1, 3])
    assert result[0].numpy() == pytest.approx(np.array([[-1, 2], [-(7 ** (1 / 3)), 56 ** (1 / 3)]]))  # of -7 and 8 * 7


def test_a_faint_channel_does_not_vanish_beside_a_strong_one():
    """(1e-5)^10 is zero in float32; the channel's Gram sum is not, whether or not a strong pixel is near."""
    features = torch.tensor([[[1e3, 1.0, 0.0], [1e-2, 0.0, 0.0], [0.0, 0.0, 1e-3]]])
    expected = [naive_gram(features[0].double().numpy(), p) for p in range(1, 11)]
    assert gram_sums(features)[0].numpy() == pytest.approx(np.stack(expected), rel=1e-4)
    assert (gram_sums(features) > 0).all()


@given(st.lists(st.floats(-1000, 1000, width=32), min_size=6, max_size=6), st.integers(1, 10))
def test_any_maps_agree_with_the_definition(values, p):
    maps = np.array(values).reshape(2, 3)
    expected = naive_gram(maps, p)
    largest = float(np.abs(expected).max())
    result = gram_sums(torch.from_numpy(maps)[None], [p])[0, 0].numpy()
    # Where odd powers cancel, a rounding error of 1e-15 under the root is all that is left.
    assert result == pytest.approx(expected, rel=1e-9, abs=largest * (1e-13 ** (1 / p)) + 1e-300)


def test_working_in_parts_changes_nothing(monkeypatch):
    features = torch.randn(9, 4, 5, 5).double()
    whole = gram_sums(features)
    for chunk in (1, 250, 1000):
        monkeypatch.setattr(gram_module, "CHUNK", chunk)
        assert gram_sums(features).allclose(whole, rtol=1e-9)


# The deviation.


def test_deviations_are_in_parts_of_the_bound():
    cases = [(1, 2, 4, 0.5), (5, 2, 4, 0.25), (3, 2, 4, 0), (2, 2, 4, 0), (4, 2, 4, 0)]
    cases += [(-5, -4, -2, 0.25), (-1, -4, -2, 0.5), (3, 0, 0, 3e6), (-3, 0, 0, 3e6), (0, 0, 0, 0)]
    for value, least, largest, expected in cases:
        result = gram_deviation(*(torch.tensor([[[float(v)]]]).double() for v in (value, least, largest)))
        assert result.tolist() == pytest.approx([expected])
        assert naive_deviation(value, least, largest) == pytest.approx(expected)
    columns = [torch.tensor(column).double()[None, None] for column in zip(*cases, strict=True)]
    assert float(gram_deviation(*columns[:3])) == pytest.approx(float(columns[3].sum()))


@pytest.mark.parametrize("options", [{}, {"powers": (2, 5)}, {"layers": ["stage2", "flatten"]}])
def test_the_score_is_the_definition_s(options):
    net, train, test = network(torch.float64), images(40, seed=1), images(12, seed=2)
    expected = naive_scores(net, train, test, **options).sum(axis=1)
    assert (expected > 0).sum() > 6
    assert Gram(net, **options).fit(train).score(test).numpy() == pytest.approx(expected, rel=1e-6)


def test_bounds_by_hand():
    """One pixel, power 1: the sum of channel c is F_c times the sum of all."""
    train = pixels([0.5, 0.0, 0.5], [0.8, 0.0, 0.2], [0.1, 0.6, 0.3])
    detector = Gram(channels(), layers=["0"], powers=[1]).fit(train)
    lower, upper = detector.bounds["0"]
    assert lower[:, 0].numpy() == pytest.approx(np.array([[0.5, 0.0, 0.2], [0.1, 0.6, 0.3]]))
    assert upper[:, 0].numpy() == pytest.approx(np.array([[0.8, 0.0, 0.5], [0.1, 0.6, 0.3]]))
    test = pixels([0.4, 0.0, 0.6], [0.7, 0.0, 0.3], [0.05, 0.7, 0.25])
    expected = [0.1 / 0.5 + 0.1 / 0.5, 0, 0.05 / 0.1 + 0.1 / 0.6 + 0.05 / 0.3]
    assert detector.score(test).numpy() == pytest.approx(np.array(expected))


def test_a_class_never_predicted_has_the_bounds_of_all():
    train = pixels([0.9, 0.1, 0.0], [0.6, 0.2, 0.2], [0.1, 0.8, 0.1])
    detector = Gram(channels(classes=3), layers=["0"], powers=[1]).fit(train)
    lower, upper = detector.bounds["0"]
    assert lower[2, 0].numpy() == pytest.approx(np.array([0.1, 0.1, 0.0]))
    assert upper[2, 0].numpy() == pytest.approx(np.array([0.9, 0.8, 0.2]))
    assert detector.score(pixels([0.2, 0.3, 0.5])).tolist() == pytest.approx([1.5])


# Bringing layers to one scale.


def test_normalised_layers_are_divided_by_their_mean_deviation_on_held_out_images():
    net, train, held_out, test = network(torch.float64), images(40), images(60, seed=1), images(8, seed=2)
    detector = Gram(net, powers=(1, 4), normalise=True).fit(train).calibrate(held_out)
    half = held_out[fingerprints(held_out)[:, 0] % 2 == 0]  # the half that calibrate gives to the method
    expected = naive_scores(net, train, half, (1, 4)).mean(axis=0)
    assert (expected > 0).all()
    assert detector.expected.numpy() == pytest.approx(expected, rel=1e-6)
    scores = (naive_scores(net, train, test, (1, 4)) / (expected + 1e-7)).sum(axis=1)
    assert detector.score(test).numpy() == pytest.approx(scores, rel=1e-6)


def test_a_layer_that_never_deviates_on_held_out_images_still_divides():
    x, test, net = images(60), images(9, seed=3), network(torch.float64)
    detector, without = Gram(net, normalise=True).fit(x).calibrate(x), Gram(net).fit(x)
    assert detector.expected.numpy() == pytest.approx(0, abs=1e-12)
    assert detector.score(test).numpy() == pytest.approx(without.score(test).numpy() / 1e-7, rel=1e-4)


def test_expected_deviations_come_with_calibration_and_go_with_a_new_fit():
    detector = Gram(network(), normalise=True)
    for _ in range(2):
        detector.fit(images())
        with pytest.raises(NotReadyError, match=r"no expected deviations yet: call calibrate\(held_out\), or"):
            detector.score(images())
        detector.calibrate(images(60, seed=1)).score(images())


# Which features.


def test_an_anchored_network_gives_the_mean_maps_over_its_anchors():
    net = kedge.anchor(network(torch.float64), init="fresh", seed=3)
    net.set_anchors(images(2, seed=8))
    train, test, layers = images(30), images(5, seed=5), ["stage2", "stage3"]
    expected = naive_scores(net, train, test, layers=layers).sum(axis=1)
    assert Gram(net, layers=layers).fit(train).score(test).numpy() == pytest.approx(expected, rel=1e-6)


# What goes wrong.
