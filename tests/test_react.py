"""ReAct: activations clipped at a percentile of the training set's; and quantiles of a stream."""

import math

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from scipy.special import logsumexp

from helpers import images, network, penultimate, vector_network
from kedge import scores
from kedge.detectors.react import ReAct
from kedge.detectors.streaming_quantile import StreamingQuantile
from kedge.errors import InputError, NotReadyError

# The formula.


@pytest.mark.parametrize("kind", ["unanchored", "anchored"])
@pytest.mark.parametrize("percentile", [0.5, 0.9, 0.99])
def test_it_is_the_energy_of_the_head_on_clipped_activations(kind, percentile):
    net = network(kind, dtype=torch.float64)
    detector = ReAct(net, percentile=percentile).fit(images(60))
    train, test = penultimate(net, images(60)), penultimate(net, images(9, seed=1))
    weight, bias = (p.detach().numpy() for p in (net.network.fc.weight, net.network.fc.bias))
    assert detector.clip == pytest.approx(np.quantile(train, percentile), abs=1e-5 * np.ptp(train))
    expected = -logsumexp(np.minimum(test, detector.clip) @ weight.T + bias, axis=1)
    assert detector.score(images(9, seed=1)).tolist() == pytest.approx(expected.tolist(), abs=1e-9)


def test_by_hand():
    """Of the activations 0, 1, ..., 10 the 90th percentile is 9."""
    net = vector_network([[1.0], [0.0]], [0.0, 0.0])
    detector = ReAct(net).fit(torch.arange(11.0, dtype=torch.float64)[:, None])
    assert detector.clip == pytest.approx(9, abs=1e-4)
    x = torch.tensor([[2.0], [9.5], [1000.0]], dtype=torch.float64)
    expected = [-math.log(math.exp(2) + 1), -math.log(math.exp(9) + 1), -math.log(math.exp(9) + 1)]
    assert detector.score(x).tolist() == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("score", scores.SCORES)
def test_any_score_of_the_clipped_logits(score):
    net = network(dtype=torch.float64)
    detector = ReAct(net, score=score).fit(images(60))
    clipped = torch.from_numpy(penultimate(net, images(9, seed=1))).clamp(max=detector.clip)
    with torch.no_grad():
        expected = scores.SCORES[score](net.network.fc(clipped))
    assert detector.score(images(9, seed=1)).allclose(expected, rtol=0, atol=1e-9)


# Its options.


def test_activations_that_are_mostly_nothing_need_a_higher_percentile():
    net = vector_network([[1.0], [0.0]], [0.0, 0.0])
    sparse = torch.zeros(100, 1, dtype=torch.float64)
    sparse[:5, 0] = torch.arange(1.0, 6.0).double()
    with pytest.raises(
        InputError, match=r"percentile must be higher .* share of 0\.9 .*smallest value, 0, .*try 0\.99"
    ):
        ReAct(net).fit(sparse)
    assert ReAct(net, percentile=0.99).fit(sparse).clip == pytest.approx(np.quantile(sparse, 0.99), abs=1e-4)
    assert ReAct(net, percentile=1.0).fit(sparse[5:]).clip == 0


# Quantiles of a stream.


def streamed(parts) -> StreamingQuantile:
    stream = StreamingQuantile()
    for part in parts:
        stream.add(part)
    return stream


def close_to_numpy(parts) -> bool:
    stream, every = streamed(parts), torch.cat([part.flatten().double() for part in parts]).numpy()
    allowed = 1e-5 * np.ptp(every) + 1e-12 * np.abs(every).max()
    return all(
        abs(stream.quantile(q) - np.quantile(every, q)) <= allowed for q in (0, 0.05, 0.3, 0.5, 0.75, 0.9, 0.99, 1)
    )


DRAWS = np.random.default_rng(0)
NORMAL, UNIFORM = DRAWS.normal(size=20_000), DRAWS.uniform(size=20_000)


@pytest.mark.parametrize(
    "values",
    [
        *(NORMAL, np.maximum(NORMAL, 0)),  # as a ReLU gives them
        DRAWS.exponential(size=20_000) ** 3,
        *(100 + UNIFORM, -1e6 * UNIFORM),  # far from zero
        NORMAL * np.geomspace(1e-6, 1e6, 20_000),  # ever larger, to both sides
        *(np.arange(20_000.0), -np.arange(20_000.0)),
        DRAWS.integers(0, 3, 20_000).astype(float),
        *(np.array([5.0]), np.array([1.0, 2.0])),
    ],
)
@pytest.mark.parametrize("size", [7000, 20_000])
def test_quantiles_are_numpy_s_to_a_hundred_thousandth_of_the_range(values, size):
    assert close_to_numpy(torch.from_numpy(values).split(size))


numbers = st.lists(st.floats(-1e9, 1e9, allow_subnormal=False), min_size=1, max_size=8)


@given(st.lists(numbers, min_size=1, max_size=5))
@example([[0.0], [0.0, 5.759e-199]])  # equal numbers at first, and then all in a range that is very small
def test_quantiles_of_any_numbers_in_any_batches(parts):
    assert close_to_numpy([torch.tensor(part, dtype=torch.float64) for part in parts])


def test_ends_are_exact_in_single_precision_and_no_number_is_lost_as_the_range_doubles():
    values = torch.cat([torch.rand(100), 1e4 * torch.rand(100), -1e5 * torch.rand(100)])
    stream = streamed([*values.view(3, 10, 10), torch.empty(0)])
    assert (stream.quantile(0), stream.quantile(1)) == (values.min().item(), values.max().item())
    assert stream.count == int(stream._bins.sum()) == 300
    assert stream._bins.shape == (2**20,)


def test_equal_numbers_have_one_quantile():
    stream = streamed([torch.full((5,), 3.0), torch.full((2,), 3.0)])
    assert {stream.quantile(q) for q in (0, 0.3, 0.5, 1)} == {3.0}
    stream.add(torch.tensor([1e6]))  # after numbers that gave no range to begin with
    assert stream.quantile(0.5) == pytest.approx(3, abs=10)
    assert stream.quantile(1) == 1e6


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: StreamingQuantile().quantile(0.5), NotReadyError, r"call add\(values\) first"),
        (lambda: streamed([torch.rand(3)]).quantile(90), InputError, r"q must lie in \[0, 1\]; got 90"),
        (lambda: StreamingQuantile().add(torch.tensor([1.0, math.inf])), InputError, "values must be finite; 1 of 2"),
    ],
)
def test_what_has_no_quantile(call, error, message):
    with pytest.raises(error, match=message):
        call()
