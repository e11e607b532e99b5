"""ViM: the length of what the training images' main space leaves over, against the logits."""

import copy
import math

import numpy as np
import pytest
import torch
from scipy.special import logsumexp, softmax
from sklearn.covariance import EmpiricalCovariance
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import kedge
from kedge.detectors import Cost
from kedge.detectors.registry import DETECTORS
from kedge.detectors.vim import ViM, default_dim, origin_of
from kedge.errors import ArchitectureError, InputError, NotReadyError
from kedge.models import build
from kedge.seeds import seeded


def images(n=60, seed=0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (n, 3, 8, 8), dtype=torch.uint8, generator=generator)


def network(kind="plain", *, seed=0, dtype=torch.float32) -> kedge.Classifier:
    """A compact network whose weights and batch statistics are drawn large enough for scores to vary."""
    with seeded(seed):
        net = build("compact", width=4, classes=4, channels=3)
        for module in net.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.running_mean.uniform_(-0.2, 0.2)
                module.running_var.uniform_(0.3, 1.0)
        net.fc.weight.data.mul_(200)
        net.fc.bias.data += 1
    net = net.to(dtype).eval()
    if kind == "anchored":
        return kedge.anchor(net, init="fresh", seed=seed, mean=[0.5] * 3, std=[0.25] * 3)
    return kedge.Classifier(net, mean=[0.5] * 3, std=[0.25] * 3)


def penultimate(net: kedge.Classifier, x: torch.Tensor) -> np.ndarray:
    """A compact network's features, layer by layer and without reading its hooks; the mean over anchors."""
    if isinstance(net, kedge.Anchored):
        found = []
        for anchor in net.anchors:
            single = copy.deepcopy(net)
            single.set_anchors(anchor[None])
            with torch.no_grad():
                found.append(single.features(x.to(net.mean.dtype) / 255, ["flatten"])[1]["flatten"].double().numpy())
        return sum(found) / len(found)
    parts, x = net.network, net.normalise(x.to(net.mean.dtype) / 255)
    with torch.no_grad():
        z = parts.stage3(parts.stage2(parts.stage1(parts.prep(x))))
    return z.amax(dim=(2, 3)).double().numpy() / 8


def vector_network(weight, bias) -> nn.Module:
    """A network whose features are its inputs, in float64."""
    weight = torch.tensor(weight, dtype=torch.float64)
    head = nn.Linear(weight.shape[1], len(weight), bias=bias is not None, dtype=torch.float64)
    head.weight.data = weight
    if bias is not None:
        head.bias.data = torch.tensor(bias, dtype=torch.float64)
    return nn.Sequential(nn.Identity(), head)


def oracle(train: np.ndarray, test: np.ndarray, weight: np.ndarray, bias: np.ndarray, dim: int):
    """The paper's published steps in NumPy: virtual logits and logits of the test features, and alpha."""
    u = -np.linalg.pinv(weight) @ bias
    covariance = EmpiricalCovariance(assume_centered=True).fit(train - u)
    values, vectors = np.linalg.eig(covariance.covariance_)
    null = np.ascontiguousarray(vectors.real.T[np.argsort(values.real * -1)[dim:]].T)
    logits = train @ weight.T + bias
    alpha = logits.max(axis=-1).mean() / np.linalg.norm((train - u) @ null, axis=-1).mean()
    return np.linalg.norm((test - u) @ null, axis=-1) * alpha, test @ weight.T + bias, alpha


def head_of(net: kedge.Classifier) -> tuple[np.ndarray, np.ndarray]:
    head = net.network.fc
    return head.weight.detach().double().numpy(), head.bias.detach().double().numpy()


# The formula.


@pytest.mark.parametrize("kind", ["plain", "anchored"])
@pytest.mark.parametrize("dim", [1, 5, 16, None])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.float64, 1e-9)])
def test_it_is_the_paper_s_published_computation(dim, kind, dtype, tolerance):
    net = network(kind, dtype=dtype)
    detector = ViM(net, dim=dim).fit(images())
    features = penultimate(net, images()), penultimate(net, images(9, seed=1))
    virtual, logits, alpha = oracle(*features, *head_of(net), dim or 16)  # half of 32 features
    assert detector.alpha == pytest.approx(alpha, rel=tolerance)
    expected = virtual - logsumexp(logits, axis=1)
    assert detector.score(images(9, seed=1)).tolist() == pytest.approx(expected.tolist(), abs=10 * tolerance)
    assert detector.score(images(9)).dtype == dtype


def test_it_orders_images_as_the_virtual_probability_does():
    """The paper's score is the softmax probability of the virtual logit beside the others: this is its log-odds."""
    net = network(dtype=torch.float64)
    score = ViM(net, dim=5).fit(images()).score(images(9, seed=1)).numpy()
    features = penultimate(net, images()), penultimate(net, images(9, seed=1))
    virtual, logits, _ = oracle(*features, *head_of(net), 5)
    probability = softmax(np.concatenate([virtual[:, None], logits], axis=1), axis=1)[:, 0]
    assert score == pytest.approx(np.log(probability / (1 - probability)), abs=1e-9)
    assert np.array_equal(np.argsort(score), np.argsort(probability))


def test_by_hand():
    """Training images vary along the first two axes by 4 and along the third by 1; the head reads the first two."""
    net = vector_network([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]], [0.0, 0.0])
    train = torch.tensor([[4.0, 0, 1], [4, 0, -1], [0, 4, 1], [0, 4, -1]], dtype=torch.float64)
    detector = ViM(net, dim=2).fit(train)
    assert detector.alpha == pytest.approx(4)  # the largest logit is 4 and the residual 1, of every image
    x = torch.tensor([[4.0, 0, 0], [4, 0, 3], [0, 0, -2]], dtype=torch.float64)
    energy = [math.log(math.exp(4) + 1), math.log(math.exp(4) + 1), math.log(2)]
    expected = [0 - energy[0], 12 - energy[1], 8 - energy[2]]
    assert detector.score(x).tolist() == pytest.approx(expected, abs=1e-12)


def test_features_are_measured_from_the_point_where_the_logits_are_zero():
    net = vector_network([[1.0, 0.0, 0.0], [0.0, 2.0, 0.0]], [3.0, 4.0])
    origin = origin_of(net[1])
    assert origin.tolist() == pytest.approx([-3, -2, 0])
    assert net[1](origin).abs().max() < 1e-12
    assert origin_of(vector_network([[1.0, 2.0]], None)[1]).tolist() == [0, 0]


def test_a_head_without_a_bias_measures_from_zero():
    x = torch.rand(30, 3, dtype=torch.float64)
    without, zero = vector_network([[1.0, 2.0, 3.0], [3.0, 2.0, 1.0]], None), [0.0, 0.0]
    expected = ViM(vector_network([[1.0, 2.0, 3.0], [3.0, 2.0, 1.0]], zero), dim=1).fit(x).score(x)
    assert ViM(without, dim=1).fit(x).score(x).allclose(expected, rtol=0, atol=1e-12)


def test_on_training_images_the_virtual_logit_is_as_large_as_the_largest():
    net = network(dtype=torch.float64)
    detector = ViM(net).fit(images()).calibrate(images())
    found = detector(images())
    virtual = found.score + found.logits.logsumexp(dim=1)
    assert virtual.mean().item() == pytest.approx(found.logits.amax(dim=1).mean().item(), abs=1e-9)


def test_only_what_lies_outside_the_main_space_counts():
    net = network(dtype=torch.float64)
    detector = ViM(net, dim=5).fit(images())
    assert detector.residual.shape == (32, 27)
    assert (detector.residual.T @ detector.residual).allclose(torch.eye(27).double(), atol=1e-12)
    main = torch.linalg.svd(detector.residual.T).Vh[27:]  # (5, d), orthogonal to all residuals
    centred = torch.from_numpy(penultimate(net, images())) - detector.origin
    other = torch.linalg.qr(torch.randn(32, 5, dtype=torch.float64)).Q.T
    assert (centred @ main.T).square().sum() > (centred @ other.T).square().sum()
    best = torch.linalg.svdvals(centred)[:5].square().sum()  # what no other five dimensions can exceed
    assert (centred @ main.T).square().sum().item() == pytest.approx(best.item())


# Its options.


@pytest.mark.parametrize(
    ("features", "dim"), [(4096, 1000), (2048, 1000), (2047, 512), (768, 512), (767, 383), (3, 1), (1, 0)]
)
def test_the_default_dimension_is_that_of_the_paper_s_code(features, dim):
    assert default_dim(features) == dim
    assert ViM(nn.Sequential(nn.Identity(), nn.Linear(features, 2))).dim == dim


def test_a_single_feature_is_all_residual():
    net = vector_network([[2.0], [0.0]], [0.0, 0.0])
    detector = ViM(net).fit(torch.tensor([[1.0], [3.0]], dtype=torch.float64))
    assert detector.alpha == pytest.approx(2)  # mean logit 4, mean residual 2
    assert detector.score(torch.tensor([[5.0]]).double()).item() == pytest.approx(10 - math.log(math.exp(10) + 1))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dim": -1}, "dim must be a whole number of at least 0; got -1"),
        ({"dim": 2.0}, r"dim must be a whole number of at least 0; got 2\.0"),
        ({"dim": 32}, "dim must be less than the 32 features, so that a residual is left; got 32"),
        ({"head": "stage1"}, r"head must name a linear layer, one of \['fc'\]; got 'stage1'"),
    ],
)
def test_options_that_cannot_be(options, message):
    with pytest.raises(InputError, match=message):
        ViM(network(), **options)


class TwoHeads(nn.Module):
    """The layer that gives the logits is registered before another linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(5, 3)
        self.body = nn.Linear(4, 5)
        self.head.bias.data += 5

    def forward(self, x):
        return self.head(self.body(x).relu())


def test_the_head_can_be_named():
    net = TwoHeads()
    with pytest.raises(ArchitectureError, match=r"not the output of 'body'.*pass head="):
        ViM(net).fit(torch.rand(40, 4))
    detector = ViM(net, head="head").fit(torch.rand(40, 4))
    assert detector.config() == {"dim": 2, "head": "head"}
    with pytest.raises(ArchitectureError, match="no linear layer"):
        ViM(nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten()))


def test_features_that_leave_no_residual():
    """Two training images span two dimensions at most."""
    x = torch.rand(2, 3, dtype=torch.float64)
    net = vector_network([[1.0, 2.0, 3.0], [3.0, 2.0, 1.0]], [0.0, 0.0])
    with pytest.raises(InputError, match=r"dim must be smaller .*no residual beside 2 of 3 dimensions; pass a smaller"):
        ViM(net, dim=2).fit(x)
    assert ViM(net, dim=1).fit(x).score(x).shape == (2,)


def test_logits_that_are_negative_give_no_scale():
    net = vector_network([[1.0, 2.0, 3.0], [3.0, 2.0, 1.0]], [-50.0, -60.0])
    with pytest.raises(InputError, match=r"largest logit must be positive on average.*use a method"):
        ViM(net, dim=1).fit(torch.rand(9, 3, dtype=torch.float64))


def test_features_that_are_not_finite_are_found_out():
    net = network()
    net.network.stage3[0][0].weight.data[0] = math.nan
    with pytest.raises(InputError, match=r"features must be finite.*check the network's weights"):
        ViM(net).fit(images())


# As every detector.


@pytest.mark.parametrize("kind", ["plain", "anchored"])
@pytest.mark.parametrize("options", [{}, {"dim": 3}, {"dim": 0}])
def test_saved_and_loaded_it_scores_the_same(kind, options, tmp_path, monkeypatch):
    monkeypatch.setitem(DETECTORS, "vim", ViM)
    detector = ViM(network(kind), **options).fit(images()).calibrate(images(30, seed=2))
    detector.save(tmp_path / "saved.kedge")
    again = kedge.load(tmp_path / "saved.kedge")
    assert again.config() == detector.config()
    assert again(images(9, seed=1)).score.equal(detector(images(9, seed=1)).score)


@pytest.mark.parametrize("kind", ["plain", "anchored"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.float64, 1e-9)])
def test_scores_do_not_depend_on_batch_size_or_order(kind, dtype, tolerance):
    x = images(30, seed=5)
    detector = ViM(network(kind, dtype=dtype)).fit(images()).calibrate(images())
    found = detector(x)
    allowed = tolerance * float(found.logits.abs().max())
    order = torch.randperm(30, generator=torch.Generator().manual_seed(1))
    for size in (1, 7):
        assert detector.score(x, batch_size=size).sub(found.score).abs().max() <= allowed
        assert detector.score(x[order], batch_size=size).sub(found.score[order]).abs().max() <= allowed


def test_the_training_set_may_come_in_any_batches_and_order():
    x, order = images(), torch.randperm(60, generator=torch.Generator().manual_seed(1))
    expected = ViM(network(dtype=torch.float64)).fit(x).score(images(9, seed=1))
    for source in (DataLoader(TensorDataset(x), batch_size=7), x[order]):
        again = ViM(network(dtype=torch.float64)).fit(source).score(images(9, seed=1))
        assert again.allclose(expected, rtol=0, atol=1e-9)


def test_fitting_again_forgets():
    detector = ViM(network()).fit(images())
    detector.fit(images(40, seed=3))
    assert detector.score(images(9)).equal(ViM(network()).fit(images(40, seed=3)).score(images(9)))


def test_a_network_in_training_mode_is_read_in_evaluation_mode():
    net = network()
    expected = ViM(net).fit(images()).score(images(9))
    net.train()
    before = copy.deepcopy(net.state_dict())
    detector = ViM(net).fit(images())
    assert detector.score(images(9)).equal(expected)
    assert net.training
    assert not detector.residual.requires_grad
    assert not detector.origin.requires_grad
    assert all(value.equal(before[key]) for key, value in net.state_dict().items())


def test_labels_are_the_network_s_own_and_cost_one_pass():
    net = network("anchored")
    detector = ViM(net).fit(images()).calibrate(images())
    with torch.no_grad():
        assert detector(images(9)).logits.allclose(net.eval()(images(9)), atol=1e-6)
    assert detector.cost == Cost(forward=5)
    assert ViM(network()).cost == Cost(forward=1)


def test_it_must_be_fitted_first():
    detector = ViM(network())
    assert detector.state() == {}
    with pytest.raises(NotReadyError, match=r"call ViM\(net\)\.fit\(train_set\) first"):
        detector.score(images())


def test_features_that_are_too_many_to_keep_are_computed_again(monkeypatch):
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
    net[-1].bias.data += 5
    train = torch.rand(600, 3, 2, 2)
    kept = ViM(net).fit(train)
    reads = []
    monkeypatch.setattr("kedge.detectors.vim.KEPT_BYTES", 100)
    monkeypatch.setattr(ViM, "_read", lambda self, x, read=ViM._read: reads.append(len(x)) or read(self, x))
    again = ViM(net).fit(train)
    assert sum(reads) == 2 * 600
    assert again.alpha == pytest.approx(kept.alpha, rel=1e-12)
    assert torch.equal(again.score(train[:9]), kept.score(train[:9]))
