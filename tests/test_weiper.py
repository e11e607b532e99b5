"""WeiPer+KLD: histograms of features and of perturbed logits, against NumPy's, one image at a time."""

import numpy as np
import pytest
import torch
from scipy.special import softmax
from scipy.stats import entropy

from helpers import images, network, penultimate
from kedge.detectors.weiper import WeiPer, histogram, perturbed_weight, smoothed, symmetric_kl
from kedge.seeds import mix_seed


def smooth(values, size):
    """Means over neighbouring bins, with the outer bins repeated."""
    before = (size - 1) // 2
    padded = [values[0]] * before + list(values) + [values[-1]] * (size - 1 - before)
    return np.array([np.mean(padded[i : i + size]) for i in range(len(values))])


def divergence(known, own, size, epsilon):
    p, q = known + epsilon, smooth(own, size) + epsilon
    return entropy(p, q) + entropy(q, p)  # scipy normalises both


@pytest.mark.parametrize("kind", ["unanchored", "anchored"])
def test_the_score_is_made_of_two_divergences_and_the_mean_probability(kind):
    net, repeats, bins = network(kind, dtype=torch.float64), 7, 20
    options = {"delta": 1.5, "repeats": repeats, "bins": bins, "weight": 2.0, "msp_weight": 0.3, "seed": 4}
    detector = WeiPer(net, **options).fit(images(60))
    fc = net.network.fc
    heads = [perturbed_weight(fc.weight.detach(), 1.5, mix_seed(4, i)).numpy() for i in range(repeats)]
    bias = fc.bias.detach().numpy()
    train, test = penultimate(net, images(60)), penultimate(net, images(9, seed=1))
    logits = [np.stack([h @ head.T + bias for head in heads], axis=1) for h in (train, test)]  # (N, repeats, C)

    def own(rows, ends):
        counts = [np.histogram(row, bins, ends)[0] for row in rows.reshape(len(rows), -1)]
        return np.array(counts) / rows[0].size

    ends = [(values.min(), values.max()) for values in (train, logits[0])]
    known = [own(values, end).mean(axis=0) for values, end in zip((train, logits[0]), ends, strict=True)]
    np.testing.assert_allclose(detector.histograms.numpy(), known, atol=1e-9)
    expected = [
        divergence(known[0], h, 4, 0.01)
        + 2.0 * divergence(known[1], z, 15, 0.025)
        - 0.3 * softmax(all_logits, axis=1).max(axis=1).mean()
        for h, z, all_logits in zip(own(test, ends[0]), own(logits[1], ends[1]), logits[1], strict=True)
    ]
    assert detector.score(images(9, seed=1)).tolist() == pytest.approx(expected, rel=1e-9)


def test_perturbations_have_the_length_of_their_row_times_delta_and_their_own_seed():
    weight = torch.randn(5, 300, generator=torch.Generator().manual_seed(0))
    one, other = (perturbed_weight(weight, 2.0, seed) - weight for seed in (0, 1))
    torch.testing.assert_close(one.norm(dim=1), 2 * weight.norm(dim=1))
    assert torch.cosine_similarity(one, other).abs().max() < 0.3
    assert perturbed_weight(weight, 2.0, 0).equal(perturbed_weight(weight, 2.0, 0))


def test_values_outside_the_range_count_for_no_bin():
    ends = torch.tensor([0.0, 4.0], dtype=torch.float64)
    shares = histogram(torch.tensor([[-1.0, 0.0, 0.5, 3.9, 4.0, 9.0, 2.0, 2.5]]), ends, 4)
    assert shares.tolist() == [[2 / 8, 0, 2 / 8, 2 / 8]]
    equal = histogram(torch.ones(1, 3), torch.ones(2), 4)
    assert equal.tolist() == [[1, 0, 0, 0]]


def test_smoothing_and_divergence_by_hand():
    assert smoothed(torch.tensor([[0.0, 6.0, 0.0, 0.0]]), 3).tolist() == [[2, 2, 2, 0]]
    assert smoothed(torch.tensor([[0.0, 6.0, 0.0, 0.0]]), 2).tolist() == [[3, 3, 0, 0]]
    p, q = torch.tensor([1.0, 3.0]), torch.tensor([[1.0, 1.0], [2.0, 6.0]])
    assert symmetric_kl(p, q).tolist() == pytest.approx([0.25 * np.log(3), 0.0], abs=1e-6)


def test_the_sample_and_the_perturbations_follow_the_seed():
    net = network()
    scores = [WeiPer(net, limit=20, repeats=5, seed=s).fit(images(60)).score(images(5)) for s in (0, 0, 1)]
    assert scores[0].equal(scores[1])
    assert not scores[0].equal(scores[2])
