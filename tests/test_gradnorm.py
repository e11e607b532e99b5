"""GradNorm: the norm of a gradient in closed form."""

import pytest
import torch

import kedge
from helpers import images, labelled, network, vector_network
from kedge.detectors.gradnorm import gradnorm


def by_autograd(head: torch.nn.Linear, h: torch.Tensor) -> float:
    """The L1 norm of the weights' gradient of the cross entropy from uniform, for one image."""
    head.zero_grad()
    (-head(h).log_softmax(dim=-1).mean()).backward()
    return float(head.weight.grad.abs().sum())


@pytest.mark.parametrize(("classes", "width"), [(2, 1), (3, 7), (40, 64)])
def test_the_score_is_the_norm_that_autograd_finds(classes, width):
    torch.manual_seed(classes)
    net = vector_network(torch.randn(classes, width), torch.randn(classes))
    x = torch.rand(20, width, dtype=torch.float64)
    scores = kedge.GradNorm(net).fit(x).score(x)
    assert scores.tolist() == pytest.approx([-by_autograd(net[1], h) for h in x], rel=1e-12)


def test_a_case_by_hand():
    logits = torch.tensor([[0.0, 3.0]]).double().log1p()  # probabilities 1/5 and 4/5
    features = torch.tensor([[2.0, -1.0, 0.5]]).double()
    # |1/5 - 1/2| + |4/5 - 1/2| = 0.6, and |2| + |-1| + |0.5| = 3.5
    assert gradnorm(logits, features).tolist() == pytest.approx([-2.1])
    assert gradnorm(torch.zeros(1, 5), torch.ones(1, 3)).tolist() == pytest.approx([0.0], abs=1e-6)  # already uniform


def test_with_anchors_it_is_that_of_the_means_over_them():
    net, x = network("anchored"), images(6, side=12)
    detector = kedge.GradNorm(net).fit(labelled(20, side=12))
    with torch.no_grad():
        logits, features = net.features(net.as_input(x), ["fc:in"])
    expected = [-by_autograd(net.network.fc, h) for h in features["fc:in"]]
    assert detector.score(x).tolist() == pytest.approx(expected, rel=1e-4)
    assert torch.equal(detector.score(x).argsort(), gradnorm(logits, features["fc:in"]).argsort())
