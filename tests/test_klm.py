"""KL matching: the divergence from the closest of the mean posteriors, against SciPy's."""

import numpy as np
import pytest
import torch
from scipy.special import softmax
from scipy.stats import entropy
from torch import nn

from helpers import images, network, vector_network
from kedge.detectors.klm import KLM
from kedge.errors import InputError


@pytest.mark.parametrize("kind", ["unanchored", "anchored"])
@pytest.mark.parametrize("classes", [2, 4])
def test_it_is_the_smallest_divergence_from_a_mean_posterior_of_a_predicted_class(kind, classes):
    net, x = network(kind, classes=classes, dtype=torch.float64), images(9, seed=1)
    detector = KLM(net).fit(images(60))
    with torch.no_grad():
        train, test = (softmax(net(net.as_input(each)).numpy(), axis=1) for each in (images(60), x))
    predicted = train.argmax(axis=1)
    means = [train[predicted == c].mean(axis=0) for c in range(classes) if (predicted == c).any()]
    expected = [min(entropy(p, mean) for mean in means) for p in test]
    assert detector.posteriors.tolist() == pytest.approx(np.array(means), abs=1e-12)
    assert detector.score(x).tolist() == pytest.approx(expected, abs=1e-9)


def test_by_hand():
    """Probabilities of 0.9 and 0.8 for the first of two classes; an even image is closest to their mean, 0.85."""
    logits = torch.tensor([[9.0, 1.0], [8.0, 2.0]], dtype=torch.float64).log()
    detector = KLM(vector_network([[1.0, 0.0], [0.0, 1.0]])).fit(logits)
    assert detector.posteriors.tolist() == pytest.approx(np.array([[0.85, 0.15]]))  # the second class has no image
    even = detector.score(torch.zeros(1, 2, dtype=torch.float64))
    assert even.tolist() == pytest.approx([0.5 * np.log(0.5 / 0.85) + 0.5 * np.log(0.5 / 0.15)])


def test_probabilities_that_round_to_zero_give_finite_scores():
    detector = KLM(vector_network([[1.0, 0.0], [0.0, 1.0]])).fit(torch.tensor([[2000.0, 0.0]], dtype=torch.float64))
    scores = detector.score(torch.tensor([[2000.0, 0.0], [1.0, 0.0], [0.0, 2000.0]], dtype=torch.float64))
    assert scores[0] == 0
    assert scores.isfinite().all()
    assert scores.diff().gt(0).all()


def test_a_network_without_a_linear_layer_will_do_and_its_logits_must_be_finite():
    net = nn.Sequential(nn.Conv2d(3, 4, 8), nn.Flatten())
    assert KLM(net).fit(images(20)).score(images(5)).shape == (5,)
    net[0].bias.data[0] = torch.nan
    with pytest.raises(InputError, match="logits must be finite"):
        KLM(net).fit(images(20))
