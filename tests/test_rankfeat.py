"""RankFeat: the largest singular component of a map is removed, and the rest of the network runs on what is left."""

import numpy as np
import pytest
import torch
from torch import nn

import kedge
from helpers import images, labelled, network
from kedge.detectors import Cost
from kedge.detectors.rankfeat import as_matrices, last_map, remove_first_component
from kedge.errors import ArchitectureError

SIDE = 16


@pytest.mark.parametrize("shape", [(5, 8, 4), (5, 4, 8), (5, 1, 3), (5, 6, 6)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_component_is_that_of_numpy_s_svd(shape, dtype):
    x = torch.randn(shape, dtype=dtype)
    u, s, v = np.linalg.svd(x.double().numpy(), full_matrices=False)
    expected = x.numpy() - s[:, :1, None] * u[:, :, :1] * v[:, :1, :]
    result = remove_first_component(x)
    assert result.dtype == dtype
    np.testing.assert_allclose(result.numpy(), expected, atol=1e-10 if dtype == torch.float64 else 1e-5)


def test_a_case_by_hand():
    x = torch.tensor([[[3.0, 0.0], [0.0, -5.0]], [[2.0, 4.0], [1.0, 2.0]], [[0.0, 0.0], [0.0, 0.0]]])
    expected = torch.tensor([[[3.0, 0.0], [0.0, 0.0]], torch.zeros(2, 2).tolist(), torch.zeros(2, 2).tolist()])
    torch.testing.assert_close(remove_first_component(x), expected)


def test_channels_are_found_where_they_are():
    x = torch.rand(2, 3, 4, 5)
    assert as_matrices(x, 3).shape == as_matrices(x, None).shape == (2, 3, 20)
    assert torch.equal(as_matrices(x, 5), x.view(2, 12, 5))  # channels last, as wide as the head's input
    assert as_matrices(torch.rand(2, 7, 8), 8).shape == (2, 7, 8)  # tokens


def test_the_score_is_the_energy_of_the_rest_of_the_network():
    """A convolution, a pool and a head, computed layer by layer in NumPy."""
    net = nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 4)).double()
    x = torch.rand(5, 3, 8, 8, dtype=torch.float64)
    detector = kedge.RankFeat(net).fit(x)
    assert (detector.layer, detector.cost) == ("1", Cost(forward=2))
    with torch.no_grad():
        maps = net[:2](x).flatten(2).numpy()
    weight, bias = (value.detach().numpy() for value in (net[4].weight, net[4].bias))
    for m, score in zip(maps, detector.score(x).tolist(), strict=True):
        u, s, v = np.linalg.svd(m, full_matrices=False)
        logits = weight @ (m - s[0] * np.outer(u[:, 0], v[0])).mean(axis=1) + bias
        assert score == pytest.approx(-np.log(np.exp(logits).sum()), rel=1e-10)


def test_the_last_map_with_positions_is_found_by_running_the_network():
    assert last_map(network(), torch.rand(2, 3, SIDE, SIDE)) == "stage3"
    assert last_map(network(), torch.rand(2, 3, 8, 8)) == "stage3.0"  # stage3 itself has one position left
    vectors = kedge.Classifier(nn.Sequential(nn.Flatten(), nn.Linear(12, 2)))
    with pytest.raises(ArchitectureError, match="no layer with maps of more than one position"):
        last_map(vectors, torch.rand(2, 3, 2, 2))
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)
    tokens = nn.Sequential(nn.Conv2d(3, 8, 4, 4), nn.Flatten(2), Transpose(), layer, TokenMean(), nn.Linear(8, 3))
    assert last_map(kedge.Classifier(tokens), torch.rand(2, 3, SIDE, SIDE)) == "3"
    assert kedge.RankFeat(tokens).fit(images(8, side=SIDE)).score(images(4, side=SIDE)).isfinite().all()


class Transpose(nn.Module):
    def forward(self, x):
        return x.mT


class TokenMean(nn.Module):
    def forward(self, x):
        return x.mean(dim=1)


class Skip(nn.Module):
    """A connection that leads around its layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(3, 3, 3, padding=1)

    def forward(self, x):
        return x + self.layer(x)


@pytest.mark.parametrize("layer", ["0.layer", "0"])
@pytest.mark.parametrize("count", [1, 5])
def test_a_connection_may_lead_around_the_layer(layer, count):
    net = nn.Sequential(Skip(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 4)).double()
    x = torch.rand(count, 3, 8, 8, dtype=torch.float64)
    with torch.no_grad():
        maps = net[0].layer(x) + (x if layer == "0" else 0)
        rest = remove_first_component(maps.flatten(2)).view_as(maps) + (0 if layer == "0" else x)
        logits, expected = net(x), -net[1:](rest).logsumexp(dim=1)
        outputs = kedge.RankFeat(net, layer=layer).fit(x).outputs(x)
    torch.testing.assert_close(outputs.score, expected)
    torch.testing.assert_close(outputs.logits, logits)


def test_with_anchors_it_is_the_mean_over_those_of_each():
    net, x = network("anchored"), images(6, side=SIDE)
    detector = kedge.RankFeat(net).fit(labelled(20, side=SIDE))
    assert (detector.layer, detector.cost.forward) == ("stage3", 2 * net.k)
    expected, logits = detector.score(x), []
    tail = net.network.fc
    for anchor in net.anchors.clone():
        net.set_anchors(anchor[None])
        with torch.no_grad():
            maps = net.features(net.as_input(x), ["stage3"])[1]["stage3"]
            changed = remove_first_component(maps.flatten(2)).view_as(maps)
            logits.append(tail(changed.amax(dim=(2, 3)) / 8))  # as the compact network goes on
    torch.testing.assert_close(expected, -torch.stack(logits).mean(dim=0).logsumexp(dim=1), rtol=1e-4, atol=1e-5)


def test_a_saved_network_without_its_code_gives_the_same(tmp_path):
    net = nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 4))
    detector = kedge.RankFeat(net).fit(images(20, side=SIDE))
    detector.save(tmp_path / "a.kedge")
    x = images(5, side=SIDE, seed=1)
    torch.testing.assert_close(kedge.load(tmp_path / "a.kedge").score(x), detector.score(x))
