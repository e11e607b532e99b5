"""GEN: the generalised entropy of the largest probabilities, against its definition in exact arithmetic."""

from decimal import Decimal, localcontext

import pytest
import torch

import kedge
from helpers import vector_network
from kedge import scores


def definition(logits: list[float], gamma: float, m: int) -> float:
    with localcontext() as context:
        context.prec = 60
        powers = [Decimal(z).exp() for z in logits]
        p = sorted((power / sum(powers) for power in powers), reverse=True)[:m]
        return float(sum((each * (1 - each)) ** Decimal(gamma) for each in p))


@pytest.mark.parametrize(("gamma", "m"), [(0.1, 100), (0.1, 3), (0.5, 2), (0.9, 7)])
@pytest.mark.parametrize("scale", [0.1, 3.0, 20.0])
def test_the_sum_over_the_largest_probabilities(gamma, m, scale):
    logits = scale * torch.randn(6, 7, generator=torch.Generator().manual_seed(0)).double()
    expected = [definition(row, gamma, m) for row in logits.tolist()]
    assert scores.gen(logits, gamma, m).tolist() == pytest.approx(expected, rel=1e-9)
    assert scores.gen(logits.float(), gamma, m).tolist() == pytest.approx(expected, rel=1e-3)


def test_a_sure_prediction_in_single_precision():
    """p rounds to 1, and 1 - p to 0; its tenth root is a tenth."""
    sure = torch.tensor([[23.0258509, 0.0]])
    assert float(scores.gen(sure)) == pytest.approx(2 * 0.1, rel=1e-5)
    assert (scores.gen(torch.tensor([[200.0, 0.0, 0.0]])) < scores.gen(sure)).all()


def test_uniform_is_furthest_out_and_the_detector_s_options_count():
    net = vector_network(torch.eye(4))
    x = torch.tensor([[0.0, 0, 0, 0], [3.0, 0, 0, 0], [3.0, 2, 0, 0]]).double()
    detector = kedge.GEN(net, gamma=0.5, m=2).fit(x)
    assert detector.score(x).tolist() == pytest.approx([definition(row, 0.5, 2) for row in x.tolist()])
    assert kedge.GEN(net).fit(x).score(x).argmax() == 0
